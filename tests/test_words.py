"""Names in the package: each class name stands for one thing, and modules are named by nouns."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import minato_gpu

PACKAGE = Path(minato_gpu.__file__).parent
# Nouns of the field, and the public module of Accelerate's users.
NOUNS = {
    *("fetching", "forking", "greeting", "loading", "pacing", "packing", "padding", "reading", "routing"),
    *("seeding", "sharing", "staging", "training", "accelerated"),
}
# Participles that are still there; none may be added.
LEFT = {"collated", "waiting"}


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_no_module_is_named_by_a_participle() -> None:
    names = {path.stem for path in PACKAGE.rglob("*.py")}
    assert {name for name in names if name.endswith(("ing", "ed"))} - NOUNS <= LEFT
