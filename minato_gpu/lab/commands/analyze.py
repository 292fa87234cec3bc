"""``minato-gpu analyze``: where a training script's time goes, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minato_gpu.lab.commands.common import CommandOutput, shows, writable

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
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@shows
def analyze(out: CommandOutput, /, script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT with its ARGUMENTs, measure its loader, stop it, and say what holds training up.

    SCRIPT is any training script with torch.utils.data.DataLoader or minato_gpu.DataLoader; it is not edited. Under
    torchrun every rank is measured: torchrun --nproc-per-node 2 -m minato_gpu analyze SCRIPT.

    With --verify the loader is then swapped for others (other workers, the other loader), and an epoch's predicted
    seconds are shown beside the measured ones.
    """
    from minato_gpu.lab.analysis.ranks import Ranks
    from minato_gpu.lab.analysis.script import ScriptOrder

    if not options["is_module"] and not Path(script).is_file():
        raise click.UsageError(f"there is no script {script!r}")
    for name in _OURS:
        if any(each == name or each.startswith(f"{name}=") for each in arguments):
            said = f"{name} comes after the script, so the script gets it; put it before {script} for the analysis."
            out.console.print(said, style="yellow", markup=False, highlight=False)
    ranks = Ranks.of_environment()
    if options["verify"] and ranks.ranks > 1:
        raise click.UsageError("--verify is for one rank: run the script without torchrun")
    with ranks.folder() as folder:
        order = ScriptOrder(
            script,
            arguments,
            str(folder),
            options["seconds"],
            is_module=options["is_module"],
            loader=options["loader"],
            rank=ranks.rank,
            ranks=ranks.ranks,
            verify_s=options["seconds"] if options["verify"] else 0.0,
        )
        results = _measured(out.console, order, ranks)
    if results is not None:
        settings = {"command": "analyze", "script": script, "arguments": list(arguments)}
        settings |= {"seconds": options["seconds"], "verify": options["verify"]}
        _told(out, settings, results, options["report_path"])


def _measured(console: Console, order: ScriptOrder, ranks: Any) -> list[Result] | None:
    """Runs this rank's analysis. Returns the results of all ranks on rank 0, which shows them; None on the others."""
    from minato_gpu.lab.analysis import script as process

    if ranks.rank == 0:
        console.print(_WARNING.format(seconds=order.seconds + order.verify_s), style="yellow", highlight=False)
    own = process.run(order)
    if ranks.rank != 0:
        return None
    return [own, *process.others(Path(order.folder), range(1, ranks.ranks))]


def _told(out: CommandOutput, settings: dict[str, Any], results: list[Result], report_path: Path | None) -> None:
    """Shows what was measured, and writes it. Then raises ClickException if that was nothing, or the script died."""
    from minato_gpu.lab.analysis import tables
    from minato_gpu.lab.analysis.breakdown import of_ranks
    from minato_gpu.lab.analysis.verdict import verdict
    from minato_gpu.lab.report import document

    console = out.console
    tables.show_results(console, results)
    answered = []
    if settings["verify"] or report_path is not None:
        with console.status("simulating what changes would bring"):
            answered = tables.whatif(results)
    if settings["verify"]:
        tables.show_answers(console, answered)
    found = document(settings, tables.rows(results), **tables.more(results), whatif=answered)
    out.leave(found)
    if report_path is not None:
        tables.write_page(report_path, str(settings["script"]), found, results)
        console.print(f"The report is {report_path}.", markup=False, highlight=False)
    problem = tables.problem(results)
    profiles = [result.profile for result in results if result.profile is not None]
    if not of_ranks(profiles):
        too_few = f"{verdict(profiles).sentence} Give it more --seconds: a step takes long." if profiles else ""
        raise click.ClickException(f"nothing was measured: {problem or too_few}")
    if problem:
        console.print(f"Not all of it: {problem}", style="yellow", markup=False, highlight=False)
    if any(result.status == "died" for result in results):
        raise click.ClickException("the script died; what had been measured until then is above")
