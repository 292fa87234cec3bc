"""The order of delivery of an out-of-order run, recorded, and replayed exactly."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from minato_gpu.samples import Key, Position
from minato_gpu.sampling.sources import Drawn, Source
from minato_gpu.scheduling.messages import Span


class OrderLog:
    """The delivered order of an out-of-order run: recorded to a file, or replayed from one that exists.

    A line of JSON for each batch: ``{"epoch": 0, "positions": [[0, 5], [6, 17]]}``, half-open ranges of positions.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.replays = path.exists() and path.stat().st_size > 0
        self._size = 0  # what this loader has recorded, in bytes
        self._batches: dict[int, list[list[Span]]] = {}
        if self.replays:
            for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
                try:
                    entry = json.loads(line)
                    spans = [(int(lo), int(hi)) for lo, hi in entry["positions"]]
                    self._batches.setdefault(int(entry["epoch"]), []).append(spans)
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"order_log: line {number} of {path} is not a recorded batch: {error}") from error
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def may_have(self, epoch: int) -> bool:
        """Whether the epoch can begin: it is recorded, or will be."""
        return not self.replays or epoch in self._batches

    def record(self, epoch: int, spans: Sequence[Span]) -> None:
        """Append one delivered batch, to a new file where the one before was moved away.

        Raises ValueError where others record there, or part of it is gone, which no replay could follow.
        """
        with self.path.open("ab") as file:
            found = os.fstat(file.fileno())
            if found.st_size not in (0, self._size) and stat.S_ISREG(found.st_mode):
                if found.st_size < self._size:
                    raise ValueError(f"order_log: {self.path} was cut off, or another put in its place, while it grew")
                raise ValueError(
                    f"order_log: another loader records to {self.path}, too: another rank's, or a copy of this one, "
                    "pickled or in a forked process. Where each loader is made, pass each a file of its own, such as "
                    "order_log=f'order-{rank}.jsonl'; a copy keeps the one that it was made with"
                )
            line = json.dumps({"epoch": epoch, "positions": spans}).encode() + b"\n"
            file.write(line)
            self._size = found.st_size + len(line)

    def replay(self, source: Source) -> Iterator[Drawn]:
        """The source's tickets in the recorded order and batches. Raises ValueError where they do not match."""
        batches = self._batches.get(source.number)
        if batches is None:
            raise ValueError(f"order_log: {self.path} has no epoch {source.number}; it ends before")
        waiting: dict[int, tuple[Key, int]] = {}
        for spans in batches:
            positions = [Position(position) for lo, hi in spans for position in range(lo, hi)]
            while any(position not in waiting for position in positions):
                drawn = source.draw()
                if drawn is None:
                    raise ValueError(f"order_log: {self.path} names positions that epoch {source.number} lacks")
                occurrences = drawn.occurrences or [0] * len(drawn.keys)
                waiting.update(zip(drawn.positions, zip(drawn.keys, occurrences, strict=True), strict=True))
            pairs = [waiting.pop(position) for position in positions]
            yield Drawn(positions, [key for key, _ in pairs], [occurrence for _, occurrence in pairs])
        if waiting or source.draw() is not None:
            raise ValueError(f"order_log: {self.path} ends before epoch {source.number} does")
