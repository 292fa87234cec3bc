"""``minato-gpu analyze``: where a training script's time goes, and what to change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minato_gpu.lab.commands.common import CommandOutput, need_pipeline, shows, writable

if TYPE_CHECKING:
    from rich.console import Console

    from minato_gpu.lab.analysis.script import Result, ScriptOrder

_OURS = ("--seconds", "--loader", "--report", "--verify", "--json")  # that one may mean for the analysis
_WARNING = (
    "The script runs as it is, side effects (checkpoints, logs, uploads) included, for at most {seconds:.0f} s of its "
    "training, and is stopped then."
)


@click.command(
    short_help="Say where a training script's time goes, and what to change.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--seconds", type=click.FloatRange(min=1), default=100.0, help="Seconds for all measurements.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.option(
    "--loader", type=click.IntRange(min=1), help="Number of the script's loader to measure; else the one for training."
)
@click.option("--pipeline", metavar="MODULE", help="Measure the pipeline defined by MODULE instead of a script.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With --pipeline: a folder of samples.",
)
@click.option("--step-ms", type=float, help="With --pipeline: milliseconds of a training step.")
@click.option("--batch-size", type=click.IntRange(min=1), default=32, help="With --pipeline: samples of a batch.")
@click.option("--workers", type=click.IntRange(min=0), default=2, help="With --pipeline: worker processes.")
@click.option(
    "--report",
    "report_path",
    metavar="PATH",
    type=click.Path(path_type=Path),
    callback=writable,
    help="Write a page for a browser, with what changes would bring.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Then run other settings, for as many seconds again, and show what was predicted beside what they take.",
)
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@shows
def analyze(out: CommandOutput, /, script: str | None, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with its ARGUMENTs, measure its loader, stop it, and say what holds training up.

    SCRIPT is any training script with torch.utils.data.DataLoader or minato_gpu.DataLoader; it is not edited. Under
    torchrun every rank is measured: torchrun --nproc-per-node 2 -m minato_gpu analyze SCRIPT. With --pipeline, --data
    and --step-ms the step is a wait.

    With --verify the loader is then swapped for others (workers, cores, a cache, the other loader, batches of another
    size), as far as this machine can, and an epoch's predicted seconds are shown beside the measured ones.
    """
    from minato_gpu.lab.analysis.ranks import Ranks
    from minato_gpu.lab.analysis.script import ScriptOrder

    what, given = _what(script, arguments, options)
    for name in _OURS:
        if any(each == name or each.startswith(f"{name}=") for each in arguments):
            said = f"{name} comes after the script, so the script gets it; put it before {script} for the analysis."
            out.console.print(said, style="yellow", markup=False, highlight=False)
    _check_report(options["report_path"])
    ranks = Ranks.of_environment()
    if options["verify"] and ranks.ranks > 1:
        raise click.UsageError("--verify is for one rank: run the script without torchrun")
    with ranks.folder() as folder:
        order = ScriptOrder(
            **what, folder=str(folder), seconds=options["seconds"], loader=options["loader"], rank=ranks.rank,
            ranks=ranks.ranks, verify_s=options["seconds"] if options["verify"] else 0.0,
        )  # fmt: skip
        results = _measured(out.console, order, ranks, is_script=script is not None)
    if results is not None:
        settings = {"command": "analyze", **given, "seconds": options["seconds"], "verify": options["verify"]}
        _told(out, settings, results, options["report_path"])


def _what(
    script: str | None, arguments: tuple[str, ...], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what to run, and the settings that are noted."""
    if options["pipeline"] is not None:
        if script is not None:
            raise click.UsageError("give a SCRIPT or --pipeline, not both")
        return _synthetic(options)
    for name in ("data", "step_ms"):
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} goes with --pipeline")
    if script is None:
        raise click.UsageError("give a SCRIPT, or --pipeline MODULE --data DIR --step-ms X")
    if not options["is_module"] and not Path(script).is_file():
        raise click.UsageError(f"there is no script {script!r}")
    what = {"script": script, "arguments": arguments, "is_module": options["is_module"]}
    return what, {"script": script, "arguments": list(arguments)}


def _synthetic(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    if options["data"] is None or options["step_ms"] is None:
        raise click.UsageError("--pipeline needs --data DIR and --step-ms X")
    if not options["step_ms"] > 0:
        raise click.UsageError("a step of no time needs no loader: --step-ms must be above 0")
    given = {
        "module": need_pipeline(options["pipeline"]),
        "data": str(options["data"]),
        "step_s": options["step_ms"] / 1e3,
        "batch_size": options["batch_size"],
        "workers": options["workers"],
    }
    return {"script": "minato_gpu.lab.analysis.synthetic", "arguments": (json.dumps(given),), "is_module": True}, given


def _measured(console: Console, order: ScriptOrder, ranks: Any, *, is_script: bool) -> list[Result] | None:
    """The results of all ranks, for the rank that shows them; None for the others."""
    from minato_gpu.lab.analysis import script as process

    if is_script and ranks.rank == 0:
        console.print(_WARNING.format(seconds=order.seconds + order.verify_s), style="yellow", highlight=False)
    own = process.run(order)
    if ranks.rank != 0:
        return None
    return [own, *process.others(Path(order.folder), range(1, ranks.here))]


def _check_report(path: Path | None) -> None:
    """Checks before the script runs that the report can be written."""
    if path is not None:
        from minato_gpu.lab.analysis import page

        page.check()
        if not path.absolute().parent.is_dir():
            raise click.UsageError(f"--report: there is no folder {str(path.absolute().parent)!r}")


def _told(out: CommandOutput, settings: dict[str, Any], results: list[Result], report_path: Path | None) -> None:
    """Show what was measured, and leave it. Raises ClickException where nothing was, or the script died."""
    from minato_gpu.lab.analysis import tables
    from minato_gpu.lab.analysis.breakdown import of_ranks
    from minato_gpu.lab.analysis.verdict import verdict
    from minato_gpu.lab.report import document

    console = out.console
    tables.show_results(console, results)
    with console.status("simulating what changes would bring"):
        tried = tables.tried(results)
    if tried is not None:
        tables.show_tried(console, tried)
    more = tables.more(results) | ({} if tried is None else {"whatif": tried})
    found = document(settings, tables.rows(results), **more)
    out.leave(found)
    problem = tables.problem(results)
    profiles = [result.profile for result in results if result.profile is not None]
    measured = bool(of_ranks(profiles))
    if profiles and report_path is not None:
        from minato_gpu.lab.analysis import page

        with console.status("simulating what changes would bring"):
            what = str(settings.get("script") or settings["module"])
            page.write(report_path, what, profiles, found, answered=tried)
        console.print(f"The report is {report_path}.", markup=False, highlight=False)
    if not measured:
        too_few = f"{verdict(profiles).sentence} Give it more --seconds: a step takes long." if profiles else ""
        raise click.ClickException(f"nothing was measured: {problem or too_few}")
    if problem:
        console.print(f"Not all of it: {problem}", style="yellow", markup=False, highlight=False)
    if any(result.status == "died" for result in results):
        raise click.ClickException("the script died; what had been measured until then is above")
