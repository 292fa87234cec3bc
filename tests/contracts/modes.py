"""The modes in which the promises must hold, and one place where a loader is made for a mode.

"pytorch" is a control: where PyTorch's own loader keeps a promise too, the test runs on it as well, which shows
that the test is satisfiable and not a statement about one implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.utils.data

import minato_gpu


@dataclass(frozen=True)
class Mode:
    """A name, the loader's class, and the arguments that make the mode. ``lateness`` in batches (0: strict order)."""

    name: str
    loader_class: Any = field(default=minato_gpu.DataLoader)
    arguments: tuple[tuple[str, Any], ...] = ()
    lateness: int = 0

    def loader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """A loader of this mode; the mode's arguments win, and without workers those for workers are left out."""
        mine = dict(self.arguments)
        if kwargs.get("num_workers", 0) == 0:
            mine.pop("worker_kind", None)
        return self.loader_class(dataset, *args, **{**kwargs, **mine})

    @property
    def factors(self) -> dict[str, Any]:
        """What it is made of: see tests/support/selection.py."""
        kind = dict(self.arguments).get("worker_kind", "process")
        return {"bounded": self.lateness > 0, "max_lateness": self.lateness, "worker_kind": kind}

    @property
    def processes(self) -> bool:
        """Whether workers are processes."""
        return bool(dict(self.arguments).get("worker_kind", "process") == "process")


def _minato(name: str, lateness: int, kind: str) -> Mode:
    order: tuple[tuple[str, Any], ...] = ()
    if lateness:
        order = (("in_order", False), ("max_lateness", lateness))
    return Mode(name, arguments=(("worker_kind", kind), *order), lateness=lateness)


PYTORCH = Mode("pytorch", torch.utils.data.DataLoader)
IN_ORDER = _minato("in order, processes", 0, "process")
IN_ORDER_THREADS = _minato("in order, threads", 0, "thread")
BOUNDED_1 = _minato("bounded 1, processes", 1, "process")
BOUNDED_8 = _minato("bounded 8, processes", 8, "process")
BOUNDED_1_THREADS = _minato("bounded 1, threads", 1, "thread")
BOUNDED_8_THREADS = _minato("bounded 8, threads", 8, "thread")

STRICT = (IN_ORDER, IN_ORDER_THREADS)
BOUNDED = (BOUNDED_1, BOUNDED_8, BOUNDED_1_THREADS, BOUNDED_8_THREADS)
MINATO = (*STRICT, *BOUNDED)
EVERY = (PYTORCH, *MINATO)
BY_PROCESSES = (IN_ORDER, BOUNDED_1, BOUNDED_8)
