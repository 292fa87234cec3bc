"""How commands show things: where to, and rows as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# A log or a pipe has no width of its own, and a table folded to 80 columns is hard to read there.
_WIDTH_IN_FILES = 160
_WIDEST_UNFOLDED = 20  # characters of a column of text


def open_console(json_path: str | None) -> Console:
    """Standard output, or standard error where the JSON document goes to standard output (``json_path`` is ``-``)."""
    from rich.console import Console

    console = Console(stderr=json_path == "-")
    if not console.is_terminal:
        console.width = max(console.width, _WIDTH_IN_FILES)
    return console


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Flat rows as a table: a column for each key, in the order in which keys first appear; numbers stay whole."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        values = [row.get(key) for row in rows]
        if all(isinstance(value, (int, float, type(None))) for value in values):
            made.add_column(key.replace("_", " "), justify="right", min_width=6)
        else:
            widest = max(len(_cell(value)) for value in values)
            made.add_column(key.replace("_", " "), overflow="fold", min_width=min(widest, _WIDEST_UNFOLDED))
    for row in rows:
        made.add_row(*(_cell(row.get(key)) for key in keys))
    return made


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
