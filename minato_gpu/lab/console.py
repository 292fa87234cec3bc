"""Shows what commands have found: on which stream, and rows as tables that fit its width.

No header is broken in the middle of a word, and no line is longer than the console is wide. Where not all columns fit
beside each other, several tables follow: each begins with the rows' numbers. All numbers of a column have as many
digits behind the point, and so few that they can be read: written out, with commas between thousands, never as a power
of ten.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minato_gpu.samples import JSON, Value
from minato_gpu.util.cached_property import cached_property

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# A log or a pipe has no width of its own, and a table folded to 80 columns is hard to read there.
_WIDTH_IN_FILES = 160
_WIDEST_UNFOLDED = 20  # characters of a column of text
_GAP = 2  # characters between two columns
_DIGITS = 3  # significant ones of a number by itself; behind the point, of numbers around 1 in a column
_MOST = 9  # behind the point


@dataclass(frozen=True)
class Column:
    """``cells`` under a ``heading``; ``number``: they stand to the right, and are never folded."""

    heading: str
    cells: Sequence[str]
    number: bool = False

    @cached_property
    def least(self) -> int:
        """The width below which a word of the heading would be broken, or a number."""
        cells = max(map(len, self.cells), default=0)
        words = max(map(len, self.heading.split()), default=0)
        return max(words, cells if self.number else min(cells, _WIDEST_UNFOLDED))

    @cached_property
    def most(self) -> int:
        """The width in which nothing is folded."""
        return max([len(self.heading), *(len(line) for cell in self.cells for line in cell.splitlines())])


def open_console(json_path: str | None) -> Console:
    """Returns a console for standard output, or standard error where JSON goes there (``json_path`` is ``-``).

    Where that is no terminal, it is 160 characters wide, or as wide as the environment's COLUMNS says.
    """
    from rich.console import Console

    console = Console(stderr=json_path == "-")
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH_IN_FILES
    return console


def show(console: Console, title: str, rows: Sequence[Mapping[str, JSON]], keys: Iterable[str] | None = None) -> None:
    """Prints flat rows: a column for each key (of ``keys``, where given) that is not None in all rows, in order."""
    wanted = dict.fromkeys(key for row in rows for key in row) if keys is None else keys
    shown = [key for key in wanted if any(row.get(key) is not None for row in rows)]
    columns = [column(key, [row.get(key) for row in rows]) for key in shown]
    console.print()
    console.print(title, style="italic", markup=False, highlight=False)
    for group in _groups(columns, console.width):
        console.print(table(group, console.width))
        console.print()


def column(key: str, values: Sequence[JSON]) -> Column:
    """Returns a column of values under the key's name in words: ``samples_per_s`` is "samples/s"."""
    heading = key.replace("_per_", "/").replace("_", " ")
    numbers = all(value is None or isinstance(value, (int, float)) for value in values)
    digits = shared_digits(value for value in values if isinstance(value, float)) if numbers else None
    return Column(heading, [_cell(value, digits) for value in values], numbers)


def _cell(value: Value, digits: int | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return number(value, digits) if isinstance(value, float) else str(value)


def _groups(columns: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """Yields the columns of each table; where there are several, each begins with the numbers of the rows."""
    if _least(columns) <= width:
        yield list(columns)
        return
    numbers = Column("#", [str(number) for number in range(1, len(columns[0].cells) + 1)], number=True)
    group = [numbers]
    for each in columns:
        if len(group) > 1 and _least([*group, each]) > width:
            yield group
            group = [numbers]
        group.append(each)
    yield group


def _least(columns: Sequence[Column]) -> int:
    return sum(each.least for each in columns) + _GAP * (len(columns) - 1)


def table(columns: Sequence[Column], width: int) -> Table:
    """Returns a table at most ``width`` wide. Columns get their least width, the leftmost ones the spare."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    spare = max(width - _least(columns), 0)
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for each in columns:
        more = min(each.most - each.least, spare)
        spare -= more
        wide = min(each.least + more, width)
        made.add_column(Text(each.heading), justify="right" if each.number else "left", width=wide, overflow="fold")
    for cells in zip(*(each.cells for each in columns), strict=True):
        made.add_row(*map(Text, cells))
    return made


def number(value: float, digits: int | None = None) -> str:
    """Returns a number in text, with ``digits`` behind the point; None: as many as make three significant ones.

    Then no digit before the point is rounded away: 0.00123, 12.3, 1,163.
    """
    if digits is not None:
        return f"{value:,.{digits}f}"
    if not value or not math.isfinite(value):
        return f"{value:g}"
    wanted = _DIGITS - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:,.{min(max(wanted, 0), _MOST)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def shared_digits(values: Iterable[float]) -> int:
    """Returns how many digits behind the point a column needs: as in 1234, 123.4, 12.34, 1.234, 0.123, 0.0123.

    The largest decides; the smallest gets a digit that is not nought, where up to three behind the point do that. 0 if
    all are whole, or NaN or infinite.
    """
    finite = [abs(value) for value in values if math.isfinite(value) and value]
    if all(value == int(value) for value in finite):
        return 0
    largest, smallest = (math.floor(math.log10(value)) for value in (max(finite), min(finite)))
    wanted = _DIGITS - largest if largest >= 0 else _DIGITS - 1 - largest
    return min(max(wanted, min(-smallest, _DIGITS), 0), _MOST)
