"""The pages of documentation: their links, and the examples in them, which run as they stand there.

The examples of a page run one after another with the same names. One that begins with ``# NAME.py`` is a module of that
name, in the current folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDERS = ("minato_gpu", "pipelines", "benchmarks", "tests")  # not those that are made here: .venv, runs, build
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md")))
)


_LINES = re.DOTALL | re.MULTILINE


def text(page: str) -> str:
    """What the page says."""
    return (ROOT / page).read_text(encoding="utf-8")


def examples(page: str, heading: str = "") -> list[str]:
    """The page's blocks of Python, or those under one heading."""
    (part,) = re.findall(rf"^#+ {heading}$.*?(?=^#+ |\Z)", text(page), flags=_LINES) if heading else [text(page)]
    return re.findall(r"^```python\n(.*?)^```$", part, flags=_LINES)


def run(example: str, names: dict[str, Any], folder: Path) -> None:
    """Run the example with these names, and add those that it defines; a module is left in ``folder``."""
    module = re.match(r"# (\w+\.py)\n", example)
    if module is not None:
        (folder / module[1]).write_text(example, encoding="utf-8")
    else:
        exec(compile(example, "<example>", "exec"), names)


def broken_links(page: str) -> Iterator[str]:
    """Links of the page that lead to no file of this folder, or to no heading of a page."""
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_code(text(page))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            yield target


def _anchors(path: Path) -> set[str]:
    """What headings of a page can be linked to by: lower case, words joined by hyphens, no other signs."""
    headings = re.findall(r"^#+ (.*)$", _without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _without_code(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
