"""Put the tables of recorded results into README.md and MEASUREMENTS.md: ``python -m benchmarks.readme FOLDER``.

``FOLDER`` holds what each benchmark left with ``--json``, a document for each table: ``storage.json`` for the table
``storage``. ``--session FILE`` names the document of a GPU session, and may be given for several, which each table
shows one after another. The text between ``<!-- NAME -->`` and ``<!-- /NAME -->`` is
replaced. ``tables.toml`` says which figures a table shows.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import report
from benchmarks.compare.ratios import ratio, scaling_summary, summary
from minato_gpu.lab.simulation.comparison import OURS

Row = Mapping[str, Any]

WORKLOADS = tuple(
    f"compare_{name}" for name in ("image_classification", "object_detection", "segmentation_3d", "speech_recognition")
)
SCALING = ("scaling_named", "scaling_close", "scaling_kinds")
PAGES: Mapping[str, Sequence[str]] = {
    "README.md": ("swap", "pairs"),
    "benchmarks/MEASUREMENTS.md": (
        *("paired", "compare", *WORKLOADS, "accuracy", "overhead", *SCALING, "tails", "more_tails"),
        *("cost_model", "simulation", "ablation", "saves", "storage", "caches", "coordl", "seneca"),
        *("kept_fields", "hits", "peer_hits", "peer_epochs", "cluster", "simulation_cluster"),
        *("node", "node_share", "node_prepared"),
    ),
}
"""Which page shows which tables."""

GPU_PAGE, GPU_TABLES = "benchmarks/MEASUREMENTS.md", ("gpu", "gpu_decoding")
"""Which page shows which tables of GPU sessions."""

_COLUMNS = {
    **dict.fromkeys(WORKLOADS, "compare_every_loader"),
    **dict.fromkeys(SCALING, "scaling"),
    "more_tails": "tails",
}
"""Tables that have their columns in common, and under which name in ``tables.toml``."""


def recorded(folder: Path, name: str) -> Any:
    """The document that the table ``name`` is made from."""
    if name == "compare":
        documents = [_read(folder / f"{each}.json") for each in WORKLOADS]
        return {**documents[0], "rows": [row for document in documents for row in document["rows"]]}
    return _read(folder / f"{'paired' if name == 'pairs' else name}.json")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def markdown(name: str, rows: Sequence[Row]) -> str:
    """A Markdown table of the rows that have the table's first three figures."""
    needed = list(report.columns(_COLUMNS.get(name, name)))[:3]
    made = _made[name](rows) if name in _made else rows
    chosen = [row for row in made if all(row.get(key) is not None for key in needed) and _shown(name, row)]
    return _table(name, chosen)


def _table(name: str, rows: Sequence[Row]) -> str:
    columns = report.columns(_COLUMNS.get(name, name))
    cells = [
        ["" if row.get(key) is None else format(row[key], form) for key, (_, form) in columns.items()] for row in rows
    ]
    return report.markdown_table([title for title, _ in columns.values()], cells)


def every_loader(rows: Sequence[Row]) -> list[Row]:
    """The rows of a comparison, with ratios and their intervals in words."""
    return [
        {**row, "to_peer": ratio(row, "ratio_to_peer"), "cpu_to_peer": ratio(row, "cpu_ratio_to_peer")} for row in rows
    ]


def in_pairs(rows: Sequence[Row]) -> list[Row]:
    """The rows of the protocol, with this loader's rate by the peer's and its penalty beside the peer's."""
    ours = {row["case"]: row for row in rows if row["loader"] == "minato_gpu"}
    return [
        {**row, "to_peer": ratio(row, "ratio"), "our_penalty": ours.get(row["case"], {}).get("penalty")} for row in rows
    ]


def _decided(row: Row) -> bool:
    """Whether the interval of a comparison excludes 1."""
    return row.get("ratio_high") is not None and not row["ratio_low"] <= 1.0 <= row["ratio_high"]


def beside_peers(rows: Sequence[Row]) -> list[Row]:
    """This scheduler's rows, each with the best that a peer's policy reaches in the same setting."""
    setting = operator.itemgetter("scenario", "window", "max_lateness", "prediction_error")
    out: list[Row] = []
    for row in (row for row in rows if row["policy"] == OURS):
        peers = [other for other in rows if other["policy"] != OURS and setting(other) == setting(row)]
        best = {f"peer_{key}": max(peer[key] for peer in peers) for key in ("of_bound", "efficiency")}
        out.append({**row, **best})
    return out


_made: Mapping[str, Callable[[Sequence[Row]], Sequence[Row]]] = {
    **dict.fromkeys(("paired", "pairs"), in_pairs),
    "compare": summary,
    **dict.fromkeys(WORKLOADS, every_loader),
    **dict.fromkeys(SCALING, scaling_summary),
    "simulation": beside_peers,
}
"""How the rows of a table are made from those of its document, where they are not the same."""


def _shown(name: str, row: Row) -> bool:
    """Of the pairs those with two workers that are decided; of the simulation prediction error 0.3, at the larger
    window."""
    if name == "pairs":
        return row["workers"] == 2 and _decided(row)
    if name in ("tails", "more_tails"):
        return str(row["case"]).startswith("scattered") == (name == "tails")
    if name == "caches":
        return "equal items" in str(row["case"]) and "belady" in row
    if name != "simulation":
        return True
    return row["prediction_error"] == 0.3 and (row["scenario"], row["window"]) not in {("hybrid", 128), ("tail", 256)}


def described(document: Row) -> str:
    """Date, machine and versions in a line."""
    machine, named = document["machine"], _named(document, dict.fromkeys(("python", "torch", "spdl", "torchdata")))
    gpus = ", ".join(str(gpu) for gpu in machine["gpus"]) or "no GPU"
    return f"{document['date']}, {machine['cores']} cores of {machine['processor']}, {gpus}; {named}"


def _named(document: Row, titles: Mapping[str, str | None]) -> str:
    """The versions of these packages, under these titles or their own names."""
    versions = document["versions"]
    return ", ".join(f"{title or key} {versions[key]}" for key, title in titles.items() if key in versions)


# --- GPU sessions -----------------------------------------------------------------------------------------------------


_NAMES = {
    "hybrid": "this loader, both lanes",
    "device": "this loader, device lane",
    "cpu": "this loader, CPU lane",
    "dali_dynamic": "DALI, dynamic mode",
    "dali": "DALI, pipeline",
    "dali_cpu": "DALI, CPU operators, pipeline",
    "torchvision": "PyTorch, torchvision's nvJPEG",
    "pytorch": "PyTorch, the rest on the GPU",
    "spdl": "SPDL, the rest on the GPU",
}
_VERSIONS = {
    "python": "Python",
    "torch": "PyTorch",
    "nvidia-dali-cuda130": "DALI",
    "nvidia-nvimgcodec-cu13": "nvImageCodec",
    "nvidia-nvjpeg": "nvJPEG",
}


def gpu_described(document: Row) -> str:
    """Date, machine, commit, driver and versions in a line."""
    machine, settings = document["machine"], document["settings"]
    gpus = ", ".join(str(gpu) for gpu in machine["gpus"])
    return (
        f"{document['date']}, {gpus}, driver {settings['driver']}, {machine['cores']} cores of {machine['processor']}; "
        f"{_named(document, _VERSIONS)}; commit {settings['commit']}"
    )


def gpu_rows(name: str, document: Row) -> list[dict[str, Any]]:
    """The table's rows; none where the session has answered nothing that it shows."""
    rows = document["rows"]
    if name == "gpu_decoding":
        return [{**row, "cpu_ms": 1e3 * row["cpu_s_per_sample"]} for row in _measured(rows, "probe").values()]
    rates, training = _measured(rows, "rates"), _measured(rows, "training")
    return [
        _loader(key, rates.get(key, {}), training.get(key, {})) for key in _NAMES if key in rates or key in training
    ]


def _loader(name: str, rate: Row, trained: Row) -> dict[str, Any]:
    """One loader without steps and with them."""
    row = {key: rate.get(key) for key in ("samples_per_s", "cores_busy", "jpeg_engine_busy")}
    row |= {"loader": _NAMES[name], "trained_per_s": trained.get("samples_per_s")}
    row["runs"] = f"{rate.get('repetitions', '-')}, {trained.get('repetitions', '-')}"
    for key in ("step", "resident_step"):
        row[f"{key}_ms"] = None if trained.get(f"{key}_s") is None else 1e3 * trained[f"{key}_s"]
    return row | {"step_slowdown": trained.get("step_slowdown")}


def _measured(rows: Sequence[Row], case: str) -> dict[str, Row]:
    return {str(row["name"]): row for row in rows if row["case"] == case and "samples_per_s" in row}


# --- the command ------------------------------------------------------------------------------------------------------


@click.command(help=__doc__)
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
        documents = [_read(session) for session in sessions]
        _fill(root, {GPU_PAGE: GPU_TABLES}, lambda name: gpu_block(name, documents))


def block(name: str, document: Row) -> str:
    """What stands between the marks of a table."""
    if name == "pairs":
        compared = [row for row in document["rows"] if row.get("ratio") is not None and row["workers"] == 2]
        open_ones = sum(not _decided(row) for row in compared)
        said = f"Of {len(compared)} comparisons {open_ones} are not shown: their interval includes 1."
        return f"{described(document)}\n\n{markdown(name, document['rows'])}\n\n{said}"
    return f"{described(document)}\n\n{markdown(name, document['rows'])}"


def gpu_block(name: str, documents: Sequence[Row]) -> str:
    """What stands between the marks of a table of GPU sessions: those that have anything for it."""
    shown = [(gpu_described(each), rows) for each in documents if (rows := gpu_rows(name, each))]
    return "\n\n".join(f"{head}\n\n{_table(name, rows)}" for head, rows in shown)


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
