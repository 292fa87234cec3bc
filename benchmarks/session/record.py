"""The record of a session: rows, each written when it is known, and the document that is made of them.

Beside the document ``NAME.json`` lies ``NAME.rows.jsonl``, to which every row is appended when it is known, by the
process that has found it: a part that is ended, or a machine that goes away, loses only what it was at. Its first line
says what was measured (``about``). ``{"part": ..., "complete": ...}`` says that a part has ended, and why where it was
ended: such a line is a row too, until the part has run again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.session.targets import targets
from minato_gpu.lab.report import write as write_json
from minato_gpu.lab.report import write_whole
from minato_gpu.samples import plain

Row = dict[str, Any]
Rows = list[Row]

NO_TIME = "no time left"
_RATE = "samples_per_s"


class Record:
    """Rows by case and name, of which the last one counts. ``about``: the document's other keys."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self.path = path
        self.about = dict(about)
        self._lines = lines_beside(path)

    @classmethod
    def begin(cls, path: Path, about: Mapping[str, Any], known: Record | None = None) -> Self:
        """A new record with what another knows; the files at ``path`` are replaced."""
        lines = [{"about": dict(about)}, *([] if known is None else known.lines()[1:])]
        path.parent.mkdir(parents=True, exist_ok=True)
        record = cls(path, about)
        write_whole(record._lines, "\n".join(map(_line, lines)))
        return record

    @classmethod
    def read(cls, path: Path) -> Self:
        """What an earlier command has left, by the lines beside its document, or by that alone. Raises ValueError where
        there is none."""
        path = path.with_name(path.name.removesuffix(".rows.jsonl") + ".json") if path.suffix == ".jsonl" else path
        record = cls(path, {})
        lines = record.lines()
        if not lines or "about" not in lines[0]:
            raise ValueError(f"{path} is missing, or is none of this program's")
        record.about = lines[0]["about"]
        return record

    def add(self, *lines: Mapping[str, Any]) -> None:
        """Append rows, at once; also from several processes. Each begins a line: one that a process was writing as it
        was ended must not spoil the next."""
        with self._lines.open("a", encoding="utf-8") as file:
            file.write("".join(f"\n{_line(line)}" for line in lines))

    def lines(self) -> Rows:
        """All that was written. What a process was writing as it was ended is left out."""
        if not self._lines.exists():
            return self._lines_of_document()
        found: Rows = []
        for line in self._lines.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def _lines_of_document(self) -> Rows:
        """The same where there is nothing but the document, whose parts may be unfinished, for all that it says."""
        if not self.path.exists():
            return []
        about = json.loads(self.path.read_text(encoding="utf-8"))
        rows = about.pop("rows", [])
        about.pop("targets", None)
        return [{"about": about}, *rows] if "settings" in about else []

    def rows(self, cases: Sequence[str] = ()) -> Rows:
        """The last row of each case and name, in the order of ``cases``, then of their first ones. One that has no
        figures does not take the place of one that has."""
        rows: dict[tuple[str, str], Row] = {}
        for line in self.lines():
            if "case" in line:
                key = line["case"], line["name"]
                if _RATE in line or not (line.keys() & {"missing", "error"} and _RATE in rows.get(key, ())):
                    rows[key] = line
            elif "part" in line:
                case = line["part"]
                rows.pop((case, case), None)
                if line.keys() & {"missing", "error"}:
                    rows[case, case] = {"case": case, "name": case, **line}
        rank = {case: number for number, case in enumerate(cases)}
        return sorted(rows.values(), key=lambda row: rank.get(row["case"], len(rank)))

    def complete(self) -> set[str]:
        """The parts that have ended with all they were asked for."""
        ended = {line["part"]: line["complete"] for line in self.lines() if "part" in line}
        return {name for name, complete in ended.items() if complete}

    def write(self, cases: Sequence[str]) -> Row:
        """The document, which is also written."""
        rows = self.rows(cases)
        content = {**self.about, "rows": rows, "targets": targets(rows)}
        write_json(content, self.path)
        return content


def lines_beside(path: Path) -> Path:
    """Where the rows of a document grow."""
    return path.with_name(path.name.removesuffix(".json") + ".rows.jsonl")


def unanswered(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether there was no time for one of the rows."""
    return any(row.get("missing") == NO_TIME for row in rows)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(plain(row), allow_nan=False)
