"""The command line: ``minato-gpu demo``, ``check``, ``simulate``, ``analyze``, ``cache`` ...

Commands only read their arguments, call one function of the package and show what it returned. Heavy imports
happen inside the commands, so that ``--help`` answers at once. An error ends with a short message in place of a
traceback, and exit code 2 (wrong arguments) or 1 (all else); ``--traceback`` shows where it came from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from minato_gpu.lab.commands.analyze import analyze
from minato_gpu.lab.commands.common import CommandOutput, imported, plain_errors, shows, writable
from minato_gpu.lab.console import show
from minato_gpu.lab.top import top
from minato_gpu.samples import JSON
from minato_gpu.util.messages import from_extra

# Columns of ``simulate`` that a terminal has no room for.
_ONLY_IN_JSON = {"bound_s", "makespan_s", "displacement_p50", "displacement_max"}
_UNUSED_S = 86400.0  # a copy that was not used for so long is probably of no use
_CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(context_settings=_CONTEXT)
@click.version_option(package_name="minato-gpu")
@click.option("--traceback", is_flag=True, help="Show where an error came from.")
@click.pass_context
def main(context: click.Context, traceback: bool) -> None:
    """A PyTorch DataLoader that prepares every sample where it is served best, on the CPU or on the GPU."""
    context.obj = traceback


main.add_command(analyze)
main.add_command(top)


def _writable_folder(context: click.Context, parameter: click.Parameter, folder: Path) -> Path:
    writable(context, parameter, folder / "summary.json")
    return folder


@main.command(short_help="Train a small model on real photographs.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Your own folder of class folders of images; without it, photographs are made.",
)
@click.option("--epochs", type=click.IntRange(min=1), default=2, help="Passes over the photographs.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    callback=_writable_folder,
    help="Folder for summary.json and timeline.png.",
)
@click.option("--size", type=click.IntRange(min=1), default=960, help="How many photographs to make.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, help="Samples of a batch.")
@click.option("--workers", type=click.IntRange(min=1), default=2, help="Worker processes of the cpu lane.")
@click.option("--seed", type=int, default=0, help="Of all random values.")
@shows
def demo(out: CommandOutput, /, **options: Any) -> None:
    """Train a small model on real photographs through the loader, both lanes at work.

    Leaves summary.json and timeline.png in the --out folder.
    """
    if find_spec("nvidia") is None or find_spec("nvidia.dali") is None:
        raise click.ClickException(
            "the device lane needs NVIDIA DALI, also without a GPU: pip install 'minato-gpu[cuda13]' (or cuda12)"
        )
    with from_extra("demo"):
        import_module("matplotlib.figure")  # what it ends with: missed now, not after the training
        from minato_gpu.lab.demo.run import run

    document = run(console=out.console, **options)
    out.leave(document)
    if not document["every_sample_once"]:
        raise click.ClickException("the loader did not deliver every sample exactly once; this is a defect")


@main.command(short_help="Compare a pipeline's CPU and device implementations.")
@click.argument("module")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with samples for the pipeline, or pictures for the transform; without it, the module's own.",
)
@click.option("--device", default="cpu", help="What runs the device implementations: cpu, cuda, cuda:1 ...")
@shows
def check(out: CommandOutput, module: str, data: Path | None, device: str) -> None:
    """Compare both implementations of every stage of the pipeline defined by MODULE, a module's name or file.

    Both get the same samples and the same drawn values. Exits with 1 where they differ by more than the
    pipeline's tolerance. MODULE:NAME is a torchvision transform or data set of that name in MODULE.
    """
    from minato_gpu.lab import parity

    name, _, member = module.partition(":")
    source = imported(name)
    if not hasattr(source, member or "pipeline"):
        lacks = f"has nothing called {member}" if member else "defines no pipeline: it needs a function pipeline()"
        raise click.UsageError(f"{name} {lacks}")
    _need_device(device)
    if member:
        from minato_gpu.pipelines.torchvision_datasets import to_check

        found = parity.check_data(*to_check(getattr(source, member), data), device)
    else:
        found = parity.run_check(source.__name__, None if data is None else str(data), device)
    show(out.console, "the device's deviation from the CPU, in levels (see Field.level)", _shown(found.rows))
    for reason in found.skipped:
        out.console.print(f"left out: {reason}", markup=False)
    settings = {"command": "check", "module": module, "device": device, "samples_left_out": len(found.skipped)}
    out.leave_rows(settings, found.rows)
    if not found.passed:
        raise click.ClickException(f"{module} deviates by more than its tolerance")
    out.console.print("every stage is within its tolerance")


@main.command(short_help="Run the scheduler under a virtual clock.")
@click.argument("scenarios", nargs=-1, metavar="[SCENARIO]...")
@click.option("--seeds", type=click.IntRange(min=1), default=10, help="Runs of each scenario, averaged.")
@click.option("--list", "only_list", is_flag=True, help="Name the scenarios and stop.")
@shows
def simulate(out: CommandOutput, scenarios: tuple[str, ...], seeds: int, only_list: bool) -> None:
    """Run the scheduler under a virtual clock on named scenarios (all of them where none is named).

    The scenario `cluster`, which is named alone, is a training on many machines; it takes minutes.
    """
    from minato_gpu.lab.simulation import cluster, comparison

    known = comparison.SCENARIOS
    if scenarios == ("cluster",):
        with out.console.status("simulating"):
            rows = cluster.run()
        show(out.console, cluster.DESCRIPTION, rows)
        out.leave_rows({"command": "simulate", "scenarios": ["cluster"]}, rows)
        return
    unknown = [name for name in scenarios if name not in known]
    if unknown:
        raise click.UsageError(f"no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    if only_list:
        listed = {name: known[name].description for name in known} | {"cluster": cluster.DESCRIPTION}
        show(out.console, "scenarios", [{"scenario": name, "what": what} for name, what in listed.items()])
        return
    asked = list(scenarios or known)
    with out.console.status("simulating"):
        rows = comparison.run(asked, seeds)
    shown = [{key: value for key, value in row.items() if key not in _ONLY_IN_JSON} for row in rows]
    show(out.console, f"simulation, mean of {seeds} seeds (every column: --json -)", shown)
    out.leave_rows({"command": "simulate", "scenarios": asked, "seeds": seeds}, rows)


@main.command(short_help="Show or empty a cache on disk.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option("--empty", is_flag=True, help="Delete all copies; runs that use them miss them, and go on.")
@shows
def cache(out: CommandOutput, directory: Path, empty: bool) -> None:
    """Show what the cache in DIR holds, which may be in use.

    unused_bytes are those of copies that no run has used for a day, so they are probably of no use. Between newest_s
    and oldest_s seconds have passed since the copies were used or written.
    """
    row = _emptied(directory) if empty else _looked_at(directory)
    show(out.console, f"the cache in {directory}", [row])
    out.leave_rows({"command": "cache", "empty": empty}, [row])


def _looked_at(directory: Path) -> dict[str, Any]:
    from minato_gpu.sources.disk.tier import DiskTier

    with closing(DiskTier(directory, None)) as tier:
        held = [(entry.length, entry.used_at) for entry in tier.entries()]
        nbytes = tier.nbytes()
    now = time.time()
    return {
        "entries": len(held),
        "content_bytes": sum(length for length, _ in held),
        "disk_bytes": nbytes,
        "unused_bytes": sum(length for length, at in held if now - at > _UNUSED_S),
        "oldest_s": max((now - at for _, at in held), default=None),
        "newest_s": min((now - at for _, at in held), default=None),
    }


def _emptied(directory: Path) -> dict[str, Any]:
    from minato_gpu.sources.disk.directory import wipe
    from minato_gpu.sources.disk.tier import DiskTier

    if wipe(directory):
        return {"entries": 0, "in_use": False}
    with closing(DiskTier(directory, None)) as tier:
        freed = tier.remove([entry.key for entry in tier.entries()])
        return {"entries": 0, "in_use": True, "freed_bytes": freed}


@main.command(short_help="Prepare samples here for loaders of other machines.")
@click.option("--listen", default="127.0.0.1:0", metavar="HOST:PORT", help="Where loaders connect; port 0: any.")
@click.option("--cores", type=click.IntRange(min=0), default=0, help="Workers for each loader; 0: one a core.")
@click.option("--tied", is_flag=True, help="End when standard input is closed: with whatever has started it.")
@click.pass_context
def lane(context: click.Context, listen: str, cores: int, tied: bool) -> None:
    """Prepare samples here for DataLoader(cluster=minato_gpu.Lanes("host:port")) of other machines.

    Runs until it is ended. Both sides need the same secret in the environment variable MINATO_GPU_TOKEN. Whoever knows
    it can run code here as you: keep the port in a network that you trust, since nothing is encrypted.
    """
    from minato_gpu.lanes.far.agent import serve

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit():
        raise click.BadParameter(f"{listen!r} is no HOST:PORT", param_hint="--listen")
    with plain_errors(context):
        serve(host.strip("[]"), int(port), cores, lambda address: click.echo(f"listening on {address}"), tied=tied)


def _need_device(name: str) -> None:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise click.BadParameter(f"{name!r} is no device; use cpu, cuda, cuda:1 ...", param_hint="--device") from None
    if device.type not in ("cpu", "cuda"):
        raise click.BadParameter(f"no pipeline runs on {device.type!r}; use cpu or cuda", param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise click.BadParameter(f"there is no {name!r} on this machine", param_hint="--device")


def _shown(rows: Sequence[Mapping[str, JSON]]) -> list[dict[str, JSON]]:
    """The rows of a parity report with limits beside what they limit, so that they fit a terminal."""
    troubled = any(row["problem"] for row in rows)
    return [
        {
            "stage": row["stage"],
            "runs as": row["implementation"],
            "samples": row["samples"],
            "largest (limit)": f"{row['max_deviation']:.3f} ({row['limit_max']:g})",
            "mean (limit)": f"{row['mean_deviation']:.3f} ({row['limit_mean']:g})",
            "passed": row["passed"],
            **({"problem": row["problem"]} if troubled else {}),
        }
        for row in rows
    ]
