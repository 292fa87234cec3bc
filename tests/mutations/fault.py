"""One fault: a small change of one file, after which a test must fail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
