"""torch's global generator, from which a loader draws where it is given no ``generator``.

It yields the seed of every epoch, and the order of samplers without a generator of their own. It belongs to the user: a
state records where it stands, and only resuming sets it back, unless it has moved since ``load_state_dict``. States
hold neither Python's nor NumPy's.
"""

from __future__ import annotations

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import state as s
from minato_gpu.samples import JSON
from minato_gpu.sampling.packing import packed
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.util.messages import say_once


def concerns(loader: Arguments, sampling: Sampling) -> bool:
    """Returns whether the loader may draw from torch's global generator.

    So may a data set or sampler of unknown kind that it calls in this process.
    """
    if loader.num_workers == 0 or not (sampling.replays or sampling.iterable):
        return True
    own = sampling.replays and (sampling.generator is not None or not sampling.uses_default_generator)
    return not (own and loader.generator is not None)


def now() -> bytes:
    """Returns the state of torch's global generator; takes 2 microseconds."""
    return torch.default_generator.get_state().numpy().tobytes()


def plain() -> str:
    """Returns the state of torch's global generator as plain data."""
    return packed(now())


def _set(state: bytes | None) -> None:
    if state is not None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _checked(state: dict[str, JSON], name: str) -> bytes | None:
    return None if state.get(name) is None else s.generator_state(state, name).numpy().tobytes()


class GlobalGenerator:
    """The states of torch's global generator between ``load_state_dict`` and the next ``iter()``."""

    def __init__(self, loader: Arguments, sampling: Sampling, state: s.State) -> None:
        saved, self._begun = _checked(state, "global"), _checked(state["source"], "global_at_start")
        self._at_save = self._saved = saved if concerns(loader, sampling) else None
        self._found = now()
        self._own: bytes | None = None  # the user's, while it is rewound

    def put(self) -> None:
        """Sets the generator to where it stood at the save, unless it has moved since ``load_state_dict``, which is
        logged once."""
        there = now()
        if there == self._found:
            _set(self._saved)
        elif self._saved not in (None, there):
            self._saved = None
            say_once(
                "torch's global generator was drawn from or seeded between load_state_dict() and iter(): it stays as "
                "it is, so that later epochs, and what else comes from it, are not those of the run that was saved. "
                "Call load_state_dict() just before iter(), or set the generator to where it was then"
            )

    def rewind(self) -> bool:
        """Sets the generator to where it stood as the epoch began, until ``put_again``.

        Returns whether that is known.
        """
        self._own = now() if self._saved is None else None
        _set(self._begun)
        return self._begun is not None

    def put_again(self, *, drew: bool = False) -> None:
        """Undoes ``rewind``. ``drew``: a stream has drawn from the generator while it was read again.

        Raises ValueError if rereading left the generator elsewhere than at the save: others had drawn between the
        stream's batches, so what was dropped need not be what was delivered.
        """
        there = now()
        _set(self._own if self._saved is None else self._saved)
        if drew and self._begun is not None and self._at_save not in (None, there):
            raise ValueError(
                "the state cannot be taken up: its iterable data set has no state of its own, so that what was "
                "delivered of it is read again and dropped; it draws from torch's global generator, and so did others "
                "(training, say) between its batches. It may yield other samples now, and some would be lost and "
                "others come twice. Give the data set, or its iterator, state_dict() and load_state_dict(), or let it "
                "draw from a generator of its own"
            )
