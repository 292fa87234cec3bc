"""The tables of README.md and MEASUREMENTS.md, from recorded results: ``python -m benchmarks.readme FOLDER``.

``FOLDER`` holds what each command left with ``--json``: overhead.json, tails.json (of which the scattered cases are
shown), more_tails.json (of which the others are), large.json, cost_model.json, simulation.json, ablation.json,
saves.json, storage.json, caches.json (of which what is simulated is shown), cached_epochs.json (``benchmarks.caches
--part measured``), kept_fields.json, hits.json, cold_files.json, worker_count.json, node.json and node_share.json
(``benchmarks.node --part ranks`` and ``share``), trace_cost.json, swap.json, and a compare_WORKLOAD.json for each
workload. ``--session FILE`` names the document of a GPU session, and may be given for several, which each table shows
one after another; their tables are in ``gpu_page``. The text between ``<!-- NAME -->`` and ``<!-- /NAME -->`` is
replaced.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import gpu_page, report
from benchmarks.compare.summary import FAMILIES, summary
from minato_gpu.lab.simulation.comparison import OURS

Row = Mapping[str, Any]

PAGES: Mapping[str, Sequence[str]] = {
    "README.md": ("swap", "workloads"),
    "benchmarks/MEASUREMENTS.md": (
        "compare",
        "overhead",
        "tails",
        "more_tails",
        "large",
        "cost_model",
        "simulation",
        "ablation",
        "saves",
        "storage",
        "caches",
        "cached_epochs",
        "kept_fields",
        "hits",
        "cold_files",
        "worker_count",
        "node",
        "node_share",
        "trace_cost",
    ),
}
"""Which page shows which tables."""

_TAILS = (
    ("case", "case", "{}"),
    ("loader", "loader", "{}"),
    ("efficiency", "efficiency", "{:.3f}"),
    ("simulated_efficiency", "simulated", "{:.3f}"),
    ("first_batch_s", "first batch, s", "{:.3f}"),
    ("peak_bytes_in_flight", "peak bytes in flight", "{:,}"),
    ("peak_rss_bytes", "peak RSS, bytes", "{:,}"),
)

_FAMILIES = tuple((family, family, "{:,.1f}") for family in FAMILIES)

COLUMNS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "workloads": (
        ("workload", "workload", "{}"),
        *_FAMILIES,
        ("in order", "this loader", "{:,.1f}"),
        ("in order ratio", "to the best peer (95 %)", "{}"),
    ),
    "compare": (
        ("workload", "workload", "{}"),
        ("step_ms", "step, ms", "{:.1f}"),
        *_FAMILIES,
        ("in order", "this, in order", "{:,.1f}"),
        ("in order ratio", "to the best in order (95 %)", "{}"),
        ("bounded", "this, bounded", "{:,.1f}"),
        ("bounded ratio", "to the best out of order (95 %)", "{}"),
    ),
    "overhead": (
        ("loader", "loader", "{}"),
        ("samples_per_s", "samples/s", "{:,.0f}"),
        ("ratio_to_best_pytorch", "to PyTorch's best", "{:.2f}"),
        ("first_batch_s", "first batch, s", "{:.3f}"),
    ),
    "tails": (*_TAILS[:4], ("simulated_with_overhead", "with its overhead", "{:.3f}"), *_TAILS[4:]),
    "more_tails": _TAILS,
    "large": (
        ("sampler", "sampler", "{}"),
        ("loader", "loader", "{}"),
        ("indices", "indices", "{:,}"),
        ("start_beyond_sampler_s", "start beyond the sampler, s", "{:.2f}"),
        ("held_bytes_per_index", "held, bytes per index", "{:.2f}"),
        ("reserved_bytes_per_index", "reserved, bytes per index", "{:.2f}"),
    ),
    "cost_model": (
        ("lane", "lane", "{}"),
        ("epoch", "epoch", "{}"),
        ("log_sigma", "sigma of the log", "{:.3f}"),
        ("rank_correlation", "rank correlation", "{:.3f}"),
        ("max_to_median", "slowest to median", "{:.0f}"),
    ),
    "simulation": (
        ("scenario", "scenario", "{}"),
        ("window", "window", "{}"),
        ("max_lateness", "lateness", "{}"),
        ("of_bound", "of the bound", "{:.3f}"),
        ("peer_of_bound", "best peer", "{:.3f}"),
        ("efficiency", "efficiency", "{:.3f}"),
        ("peer_efficiency", "best peer", "{:.3f}"),
        ("displacement_p99", "displacement p99", "{:.0f}"),
    ),
    "saves": (
        ("mode", "mode", "{}"),
        ("window", "window", "{}"),
        ("save_p50_us", "save p50, us", "{:,.0f}"),
        ("save_p99_us", "save p99, us", "{:,.0f}"),
        ("save_cpu_p99_us", "on a core, p99, us", "{:,.0f}"),
        ("state_bytes", "state, bytes", "{:,}"),
        ("own_bytes", "of these the loader's own", "{:,}"),
        ("batch_us", "a batch, us", "{:,.0f}"),
        ("saved_batch_us", "a batch where each is saved, us", "{:,.0f}"),
    ),
    "storage": (
        ("case", "case", "{}"),
        ("loader", "loader", "{}"),
        ("of_bound", "of the bound", "{:.3f}"),
        ("samples_per_s", "samples/s", "{:,.0f}"),
        ("hedged_share", "asked twice", "{:.3f}"),
    ),
    "caches": (
        ("shards", "hosts", "{}"),
        ("cache_share", "cache", "{:.2f}"),
        ("policy", "policy", "{}"),
        ("hit_rate", "hit rate", "{:.3f}"),
        ("belady", "the most there can be", "{:.3f}"),
        ("look_ahead", "epochs of look-ahead", "{:.3g}"),
    ),
    "cached_epochs": (
        ("case", "case", "{}"),
        ("cache_share", "cache", "{:.2f}"),
        ("policy", "policy", "{}"),
        ("hit_rate", "hit rate", "{:.3f}"),
        ("of_hits", "of the simulated hits", "{:.3f}"),
        ("epoch_s", "epoch, s", "{:.2f}"),
        ("model_s", "model, s", "{:.2f}"),
        ("least_s", "the least, s", "{:.2f}"),
        ("of_model", "of the model", "{:.3f}"),
    ),
    "kept_fields": (
        ("split", "what is kept", "{}"),
        ("fields", "decoded", "{:.3f}"),
        ("raw", "raw", "{:.3f}"),
        ("epoch_s", "epoch, s", "{:.2f}"),
        ("of_uncached", "of that without a cache", "{:.3f}"),
        ("of_best", "of the best", "{:.3f}"),
    ),
    "hits": (
        ("tier", "tier", "{}"),
        ("cache", "page cache", "{}"),
        ("bytes", "bytes", "{:,}"),
        ("hit_us", "hit, us", "{:.1f}"),
        ("bare_us", "bare read, us", "{:.1f}"),
        ("ratio", "ratio", "{:.2f}"),
    ),
    "cold_files": (
        ("case", "case", "{}"),
        ("loader", "loader", "{}"),
        ("samples_per_s", "samples/s", "{:,.0f}"),
        ("cpu_us", "CPU a sample, us", "{:,.0f}"),
        ("ratio_to_best", "rate by the best peer's", "{:.3f}"),
        ("cpu_ratio", "CPU by that peer's", "{:.3f}"),
    ),
    "worker_count": (
        ("case", "case", "{}"),
        ("workers", "workers", "{}"),
        ("samples_per_s", "samples/s", "{:,.0f}"),
        ("at_work", "at work", "{:.1f}"),
    ),
    "node": (
        ("case", "case", "{}"),
        ("loader", "loader", "{}"),
        ("of_bound", "of the bound", "{:.3f}"),
        ("of_bound_min", "least", "{:.3f}"),
        ("of_bound_max", "most", "{:.3f}"),
    ),
    "node_share": (
        ("case", "case", "{}"),
        ("clients", "jobs", "{}"),
        ("loader", "loader", "{}"),
        ("samples_per_s", "samples/s of the slowest job", "{:,.0f}"),
        ("times_read", "times the set was read", "{:.3f}"),
        ("recovery_s", "longest wait, s", "{:.2f}"),
    ),
    "swap": (
        ("loader", "loader", "{}"),
        ("epoch_s", "epoch, s", "{:.1f}"),
        ("wait_p99_ms", "wait for a batch, p99, ms", "{:,.0f}"),
        ("first_epoch_s", "first epoch, s", "{:.1f}"),
        ("first_wait_p99_ms", "p99, ms", "{:,.0f}"),
    ),
    "trace_cost": (
        ("case", "case", "{}"),
        ("without_per_s", "samples/s without", "{:,.0f}"),
        ("with_per_s", "with", "{:,.0f}"),
        ("ratio", "ratio", "{:.4f}"),
        ("ratio_low", "middle half from", "{:.4f}"),
        ("ratio_high", "to", "{:.4f}"),
        ("cpu_us", "CPU more, us a sample", "{:.2f}"),
        ("bytes_per_sample", "bytes a sample", "{:,.0f}"),
    ),
    "ablation": (
        ("scenario", "scenario", "{}"),
        ("without", "without", "{}"),
        ("of_bound", "of the bound", "{:.3f}"),
        ("efficiency", "efficiency", "{:.3f}"),
        ("displacement_p99", "displacement p99", "{:.0f}"),
    ),
}


def recorded(folder: Path, name: str) -> Any:
    """The document that the table ``name`` is made from."""
    if name in ("workloads", "compare"):
        documents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("compare_*.json"))]
        return {**documents[0], "rows": [row for document in documents for row in document["rows"]]}
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def markdown(name: str, rows: Sequence[Row]) -> str:
    """A Markdown table of the rows that have the table's figures."""
    columns = COLUMNS[name]
    if name in ("workloads", "compare"):
        rows = summary(rows)
    if name == "simulation":
        rows = beside_peers(rows)
    chosen = [row for row in rows if all(row.get(key) is not None for key, _, _ in columns[:3]) and _shown(name, row)]
    cells = [["" if row.get(key) is None else form.format(row[key]) for key, _, form in columns] for row in chosen]
    return report.markdown_table([title for _, title, _ in columns], cells)


def beside_peers(rows: Sequence[Row]) -> list[Row]:
    """This scheduler's rows, each with the best that a peer's policy reaches in the same setting."""
    setting = operator.itemgetter("scenario", "window", "max_lateness", "prediction_error")
    out: list[Row] = []
    for row in (row for row in rows if row["policy"] == OURS):
        peers = [other for other in rows if other["policy"] != OURS and setting(other) == setting(row)]
        best = {f"peer_{key}": max(peer[key] for peer in peers) for key in ("of_bound", "efficiency")}
        out.append({**row, **best})
    return out


def _shown(name: str, row: Row) -> bool:
    """Of the workloads those without a step; of the simulation prediction error 0.3, at the larger window."""
    if name == "workloads":
        return bool(row["step_ms"] == 0)
    if name in ("tails", "more_tails"):
        return str(row["case"]).startswith("scattered") == (name == "tails")
    if name == "caches":
        return "equal items" in str(row["case"]) and "belady" in row
    if name != "simulation":
        return True
    return row["prediction_error"] == 0.3 and (row["scenario"], row["window"]) not in {("hybrid", 128), ("tail", 256)}


def described(document: Row) -> str:
    """Date, machine and versions in a line."""
    machine, versions = document["machine"], document["versions"]
    named = ", ".join(f"{key} {versions[key]}" for key in ("python", "torch", "spdl", "torchdata") if key in versions)
    gpus = ", ".join(str(gpu) for gpu in machine["gpus"]) or "no GPU"
    return f"{document['date']}, {machine['cores']} cores of {machine['processor']}, {gpus}; {named}"


@click.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--session",
    "sessions",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A GPU session's document; may be given several times.",
)
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=Path())
def main(folder: Path | None, sessions: Sequence[Path], root: Path) -> None:
    """Put the tables of FOLDER, and those of GPU sessions, into the pages of the checkout ROOT."""
    if folder is not None:
        _fill(root, PAGES, lambda name: block(name, recorded(folder, name)))
    if sessions:
        documents = [json.loads(session.read_text(encoding="utf-8")) for session in sessions]
        _fill(root, gpu_page.PAGES, lambda name: gpu_block(name, documents))


def block(name: str, document: Row) -> str:
    """What stands between the marks of a table."""
    return f"{described(document)}\n\n{markdown(name, document['rows'])}"


def gpu_block(name: str, documents: Sequence[Row]) -> str:
    """What stands between the marks of a table of GPU sessions: those that have anything for it."""
    shown = [each for each in documents if gpu_page.has(name, each)]
    return "\n\n".join(f"{gpu_page.described(each)}\n\n{gpu_page.table(name, each)}" for each in shown)


def _fill(root: Path, pages: Mapping[str, Sequence[str]], made: Callable[[str], str]) -> None:
    for page, names in pages.items():
        text = (root / page).read_text(encoding="utf-8")
        for name in names:
            text = _filled(text, name, made(name), page)
        (root / page).write_text(text, encoding="utf-8")


def _filled(text: str, name: str, content: str, page: str) -> str:
    place = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", text, re.DOTALL)
    if place is None:
        raise click.ClickException(f"{page} has no place marked <!-- {name} -->")
    return text[: place.start(1)] + content + text[place.end(1) :]


if __name__ == "__main__":
    main()
