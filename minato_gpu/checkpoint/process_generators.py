"""The global generators of the main process, which a loader draws from where it is given no ``generator``.

Torch's yields the seed of every epoch, and the order of samplers without a generator of their own. A sampler of the
user's always draws there, and without workers the data set does too, both from whichever they like: then Python's and
NumPy's count as well. They are the user's all the same: a state takes down how they stand, and only who resumes has
them moved, to there, unless they have moved since ``load_state_dict``.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint import state as s
from minato_gpu.notices import say_once
from minato_gpu.packing import packed
from minato_gpu.samples import JSON, Value
from minato_gpu.sampling.samplers import Sampling

TORCH, PYTHON, NUMPY = "torch", "python", "numpy"
_WORDS = 624  # of Python's and NumPy's generator, both Mersenne twisters
# those, the place in them; whether a normal number was drawn and not asked for yet, and that
_TWISTER = struct.Struct(f"<{_WORDS + 1}I?d")


def concerning(loader: Arguments, sampling: Sampling) -> tuple[str, ...]:
    """Which of them a loader, or the data set or the sampler of unknown kind that it calls here, may draw from."""
    if loader.num_workers == 0 or not (sampling.replays or sampling.iterable):
        return TORCH, PYTHON, NUMPY
    own = sampling.replays and (sampling.generator is not None or not sampling.uses_default_generator)
    return () if loader.generator is not None and own else (TORCH,)


def torch_now() -> bytes:
    """How torch's stands; 2 microseconds."""
    return torch.default_generator.get_state().numpy().tobytes()


def now(names: Iterable[str]) -> dict[str, bytes]:
    """How these stand; up to 100 microseconds for all. NumPy's is left out where it has been given another kind."""
    found = {name: _TAKE[name]() for name in names}
    return {name: state for name, state in found.items() if state is not None}


def every() -> dict[str, bytes]:
    """How all stand."""
    return now((TORCH, PYTHON, NUMPY))


def put(states: Mapping[str, bytes]) -> None:
    """Set these to where they stood."""
    for name, state in states.items():
        _PUT[name](state)


def plain(states: Mapping[str, bytes]) -> s.State:
    """As plain data."""
    return {name: packed(state) for name, state in states.items()}


def checked(states: Mapping[str, JSON]) -> dict[str, bytes]:
    """What ``plain`` made plain. Raises ValueError for anything else."""
    for name in states:
        if name not in _PUT:
            raise ValueError(f"state: 'global' names {s.quoted(name)}; it may name 'torch', 'python' and 'numpy'")
        if name == TORCH:
            s.generator_state(states, name)
        elif not _is_twister(s.unpacked(states, name)):
            raise ValueError(f"state: {name!r} holds no state of that generator")
    return {name: s.unpacked(states, name) for name in states}


class Waiting:
    """States from ``load_state_dict`` until the next ``iter()``. ``begun``: how they stood as the epoch began."""

    def __init__(
        self, loader: Arguments, sampling: Sampling, state: Mapping[str, JSON], begun: Mapping[str, JSON]
    ) -> None:
        saved, names = checked(state), concerning(loader, sampling)
        self._found = now(name for name in saved if name in names)
        self._saved = {name: saved[name] for name in self._found}
        self._at_save = self._saved.copy()
        self._begun = checked(begun)
        self._own: dict[str, bytes] = {}  # how the user's own stood before they were rewound

    def put(self) -> None:
        """Set the generators, but those that have moved since: these stay, which is said once."""
        there = now(self._found)
        for name, found in self._found.items():
            if there.get(name) == found:
                put({name: self._saved[name]})
            elif there.get(name) != self._saved[name]:
                del self._saved[name]
                say_once(
                    f"{_SAID[name]} global generator was drawn from or seeded between load_state_dict() and iter(): it "
                    "stays as it is, so that later epochs, and what else comes from it, are not those of the run that "
                    "was saved. Call load_state_dict() just before iter(), or set the generator to where it was then"
                )

    def rewind(self) -> bool:
        """Set them to where they stood as the epoch began, until ``put_again``; those that ``put`` left to the user,
        too. Returns whether that is known of torch's."""
        there = now(self._begun)
        self._own = {name: state for name, state in there.items() if name not in self._saved}
        put({name: self._begun[name] for name in there})
        return TORCH in there

    def put_again(self, drew: Iterable[str] = ()) -> None:
        """What was done meanwhile to them is undone. ``drew``: those of which a stream has drawn while it was read
        again. Raises ValueError where one of these came elsewhere than it was at the save: others had drawn from it
        between the stream's batches, so that what was dropped need not be what was delivered (P1)."""
        known = {name: state for name, state in now(drew).items() if name in self._begun and name in self._at_save}
        put({**self._own, **self._saved})
        for name, state in known.items():
            if state != self._at_save[name]:
                raise ValueError(
                    "the state cannot be taken up: its iterable data set has no state of its own, so that what was "
                    f"delivered of it is read again and dropped; it draws from {_SAID[name]} global generator, and so "
                    "did others (training, say) between its batches. It may yield other samples now, and some would be "
                    "lost and others come twice. Give the data set, or its iterator, state_dict() and "
                    "load_state_dict(), or let it draw from a generator of its own; where what it draws does not "
                    "choose its samples (augmentation), the latter lets this state be taken up, too"
                )


# --- each of them -------------------------------------------------------------------------------------------


def _put_torch(state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _twister(words: Iterable[int], gauss: float | None) -> bytes:
    return _TWISTER.pack(*words, gauss is not None, gauss or 0.0)


def _parts(state: bytes) -> tuple[tuple[int, ...], float | None]:
    *words, has_gauss, gauss = _TWISTER.unpack(state)
    return tuple(words), gauss if has_gauss else None


def _is_twister(state: bytes) -> bool:
    """Beyond its words NumPy would read other memory."""
    return len(state) == _TWISTER.size and _parts(state)[0][-1] <= _WORDS


def _take_python() -> bytes:
    return _twister(*random.getstate()[1:])


def _put_python(state: bytes) -> None:
    random.setstate((3, *_parts(state)))


def _take_numpy() -> bytes | None:
    state: Value = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    words = [*state["state"]["key"].tolist(), state["state"]["pos"]]
    return _twister(words, state["gauss"] if state["has_gauss"] else None)


def _put_numpy(state: bytes) -> None:
    (*words, place), gauss = _parts(state)
    np.random.set_state(("MT19937", np.array(words, np.uint32), place, int(gauss is not None), gauss or 0.0))


_TAKE = {TORCH: torch_now, PYTHON: _take_python, NUMPY: _take_numpy}
_PUT = {TORCH: _put_torch, PYTHON: _put_python, NUMPY: _put_numpy}
_SAID = {TORCH: "torch's", PYTHON: "Python's", NUMPY: "NumPy's"}
