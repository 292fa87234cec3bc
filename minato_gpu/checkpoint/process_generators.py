"""The global generators of the main process, which a loader draws from where it is given no ``generator``.

Torch's yields the seed of every epoch, and the order of samplers without a generator of their own. Without workers the
data set draws there too, from whichever it likes: then Python's and NumPy's count as well. They are the user's all the
same: a state takes down how they stand, and only who resumes has them moved, to there, unless they have moved since
``load_state_dict``.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from minato_gpu.checkpoint import state as s
from minato_gpu.notices import say_once
from minato_gpu.packing import packed
from minato_gpu.sampling.samplers import Sampling

TORCH, PYTHON, NUMPY = "torch", "python", "numpy"
_WORDS = 624  # of Python's and NumPy's generator, both of the same kind
_KEY_BYTES = 4 * _WORDS
_GAUSS = struct.Struct("<d")  # a normal number that was drawn and not asked for yet
_REST = struct.Struct("<IId")  # NumPy's: place in the key, whether there is such a number, and that


def concerning(loader: Any, sampling: Sampling) -> tuple[str, ...]:
    """Which of them a loader, or the data set that it calls here, may draw from."""
    if loader.num_workers == 0:
        return TORCH, PYTHON, NUMPY
    own = sampling.generator is not None or (sampling.replays and not sampling.uses_default_generator)
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


def checked(states: Mapping[str, Any]) -> dict[str, bytes]:
    """What ``plain`` made plain. Raises ValueError for anything else."""
    for name in states:
        if name not in _CHECK:
            raise ValueError(f"state: 'global' names {s.quoted(name)}; it may name 'torch', 'python' and 'numpy'")
        if not _CHECK[name](states):
            raise ValueError(f"state: {name!r} holds no state of that generator")
    return {name: s.unpacked(states, name) for name in states}


class Waiting:
    """States from ``load_state_dict`` until the next ``iter()``. ``begun``: how they stood as the epoch began."""

    def __init__(self, loader: Any, sampling: Sampling, state: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
        saved, names = checked(state), concerning(loader, sampling)
        self._found = now(name for name in saved if name in names)
        self._saved = {name: saved[name] for name in self._found}
        self._begun = checked(begun)

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
        """Set those that ``put`` set to where they stood as the epoch began. Returns whether that is known."""
        begun = {name: state for name, state in self._begun.items() if name in self._saved}
        put(begun)
        return TORCH in begun

    def put_again(self) -> None:
        """What was done meanwhile to those that ``put`` set is undone."""
        put(self._saved)


# --- each of them -------------------------------------------------------------------------------------------


def _put_torch(state: bytes) -> None:
    torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _check_torch(states: Mapping[str, Any]) -> bool:
    s.generator_state(states, TORCH)
    return True


def _take_python() -> bytes:
    _, words, gauss = random.getstate()
    return np.array(words, dtype="<u4").tobytes() + (b"" if gauss is None else _GAUSS.pack(gauss))


def _put_python(state: bytes) -> None:
    words, gauss = np.frombuffer(state[: _KEY_BYTES + 4], dtype="<u4").tolist(), state[_KEY_BYTES + 4 :]
    random.setstate((3, tuple(words), *(_GAUSS.unpack(gauss) if gauss else (None,))))


def _check_python(states: Mapping[str, Any]) -> bool:
    state = s.unpacked(states, PYTHON)
    place = int.from_bytes(state[_KEY_BYTES : _KEY_BYTES + 4], "little")
    return len(state) in (_KEY_BYTES + 4, _KEY_BYTES + 4 + _GAUSS.size) and place <= _WORDS


def _take_numpy() -> bytes | None:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return None
    place, key = state["state"]["pos"], np.asarray(state["state"]["key"], dtype="<u4")
    return key.tobytes() + _REST.pack(place, state["has_gauss"], state["gauss"])


def _put_numpy(state: bytes) -> None:
    key = np.frombuffer(state[:_KEY_BYTES], dtype="<u4").astype(np.uint32)
    np.random.set_state(("MT19937", key, *_REST.unpack(state[_KEY_BYTES:])))


def _check_numpy(states: Mapping[str, Any]) -> bool:
    state = s.unpacked(states, NUMPY)
    if len(state) != _KEY_BYTES + _REST.size:
        return False
    place, has_gauss, _ = _REST.unpack(state[_KEY_BYTES:])
    return bool(place <= _WORDS and has_gauss <= 1)  # beyond its key NumPy would read other memory


_TAKE = {TORCH: torch_now, PYTHON: _take_python, NUMPY: _take_numpy}
_PUT = {TORCH: _put_torch, PYTHON: _put_python, NUMPY: _put_numpy}
_CHECK = {TORCH: _check_torch, PYTHON: _check_python, NUMPY: _check_numpy}
_SAID = {TORCH: "torch's", PYTHON: "Python's", NUMPY: "NumPy's"}
