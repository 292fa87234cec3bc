"""torch's global generator, from which a loader draws where it is given no ``generator``.

It yields the seed of every epoch, and the order of samplers without a generator of their own. It belongs to the user: a
state records where it stands, and only resuming sets it back, unless it has moved since ``load_state_dict``. States
hold neither Python's nor NumPy's.
"""

from __future__ import annotations

import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import state as s
from minato_gpu.sampling.packing import packed
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.util.messages import say_once


def concerns(loader: Arguments, sampling: Sampling) -> bool:
    """Returns whether the loader, or what it calls in this process, may draw from torch's global generator.

    False only for a map-style data set with workers, if the loader was given a ``generator``, from which epochs' seeds
    come, and its sampler ``replays`` and draws from a generator of its own, or from none.
    """
    if loader.num_workers == 0 or not (sampling.replays or sampling.iterable):
        return True
    own = sampling.replays and (sampling.generator is not None or not sampling.uses_default_generator)
    return not (own and loader.generator is not None)


def now() -> bytes:
    """Returns the state of torch's global generator; takes 2 microseconds."""
    return torch.default_generator.get_state().numpy().tobytes()


def plain() -> str:
    """Returns the state of torch's global generator as a base64 string."""
    return packed(now())


def _checked(state: s.State) -> torch.Tensor | None:
    return None if state.get("global") is None else s.generator_state(state, "global")


class GlobalGenerator:
    """The saved state of torch's global generator, between ``load_state_dict`` and the next ``iter()``.

    Nothing is ever set if ``state`` holds none, or the loader does not draw from that generator. Raises ValueError if
    what it holds is damaged.
    """

    def __init__(self, loader: Arguments, sampling: Sampling, state: s.State) -> None:
        saved = _checked(state)
        self._saved = saved if concerns(loader, sampling) else None
        self._found = now()

    def put(self) -> None:
        """Sets the generator to where it stood at the save, unless it has moved since ``load_state_dict``: that is
        logged once in a process."""
        if self._saved is None:
            return
        if now() != self._found and now() != self._saved.numpy().tobytes():
            self._saved = None
            say_once(
                "torch's global generator was drawn from or seeded between load_state_dict() and iter(): it stays as "
                "it is, so that later epochs, and what else comes from it, are not those of the run that was saved. "
                "Call load_state_dict() just before iter(), or set the generator to where it was then"
            )
        self.put_again()

    def put_again(self) -> None:
        """Sets the generator to the saved state once more, unless ``put`` found that it had moved: a sampler or a
        stream may have drawn from it as it was resumed."""
        if self._saved is not None:
            torch.default_generator.set_state(self._saved)
