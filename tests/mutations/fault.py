"""One fault: a small change of one file, after which a test must fail."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(.*?)(?: \(reverts (\w+)\))?")


@dataclass(frozen=True)
class Fault:
    """In ``file`` (below ``minato_gpu/``) the text ``before``, which is there once, becomes ``after``.

    ``likely``: test files that should notice, the quickest first (below ``tests/``). ``reverts``: the commit whose mend
    is taken back, where the fault once was in the code.
    """

    name: str
    file: str
    before: str
    after: str
    likely: tuple[str, ...]
    reverts: str = ""

    def path(self, root: Path) -> Path:
        """The file in a tree."""
        return root / "minato_gpu" / self.file

    def apply(self, root: Path) -> None:
        """Put the fault into a tree. Raises ValueError where the code is not what it was written for."""
        path = self.path(root)
        text = path.read_text()
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.before)} places like\n{self.before}")
        path.write_text(text.replace(self.before, self.after))


def read(text: str) -> tuple[Fault, ...]:
    """Returns the faults that a text lists, with an empty line between them: a fault's name, perhaps with
    ``(reverts COMMIT)``, and its change as in a diff, in which a line may be a part of one. A line
    ``=== FILE: TEST...`` before a name holds up to the next such line."""
    found: list[Fault] = []
    file, likely = "", list[str]()
    for part in text.strip("\n").split("\n\n"):
        first, *lines = part.split("\n")
        if first.startswith("=== "):
            file, *likely = first.removeprefix("=== ").replace(":", "").split()
            first, *lines = lines
        named = _NAME.fullmatch(first)
        assert named is not None
        before, after = ("\n".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        found.append(Fault(named[1], file, before, after, tuple(likely), named[2] or ""))
    return tuple(found)
