"""The global random generators of a worker process, seeded for each sample (promise P2).

``random``, NumPy's legacy generator and torch's default generator are seeded from the sample's own seed before the
data set sees it, from that and the stage's number before each stage of a pipeline, and from the place of the batch
before a ``collate_fn`` of the user's joins one; that costs about 7 microseconds. A chunk of cheap samples goes without
while none of them draws: a second set of generators, in step with the global ones, shows at the chunk's end whether
one of those has moved; of torch's, a few words of its state are compared where they are stored. If one has, the chunk
is prepared again, seeded, and every later sample is seeded too.

Decision: a costly sample is looked at by itself, after a sleep or much other work, when nothing of torch is in the
processor's caches. A draw from each of two torch generators then takes 35 microseconds (warm 7), seeding all three
26, copying torch's state 23, a look at its words less than one. Where the words are not found as expected (another
layout of torch's class), torch's state is copied.

A ``worker_init_fn`` that seeds torch keeps what PyTorch promises for it: ``torch.initial_seed()`` stays what it
set. What is *drawn* is the sample's own all the same; per-sample seeding wins.
"""

from __future__ import annotations

import ctypes
import random
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from minato_gpu.samples import sample_seed

_UNSEEDED_FROM = 8  # chunks of fewer samples are seeded until there is evidence: often these are the costly ones
_EVIDENCE = 16  # seeded samples that are looked at for draws
_MASK = (1 << 64) - 1
_TORCH_MASK = _MASK >> 1  # torch.initial_seed() must fit a signed 64-bit tensor element, as PyTorch's own seeds do


class Seeder:
    """Seeds the global generators of this process, and notices whether samples draw from them."""

    def __init__(self, base_seed: int, worker: int = 0, epochs_before: int = 0) -> None:
        """Seeds as PyTorch does for this worker: that is what its ``worker_init_fn`` and streams draw from.

        After ``epochs_before`` epochs of another process in its place, streams do not draw what they drew in the first.
        """
        self._worker_seed = base_seed + worker
        seed_generators(self._worker_seed)
        with suppress(ImportError):  # the function is torch's own affair, and may go
            from torch.utils.data._utils.worker import _generate_state

            np.random.seed(_generate_state(base_seed, worker))
        self._default_initial = torch.initial_seed()
        if epochs_before:
            seed_generators(sample_seed(self._worker_seed, epochs_before, "stream"))
            show_initial_seed(self._default_initial)
        self._shown: int | None = None
        self._draws = False
        self.always_looks = False  # seeded samples are looked at for draws, however many have been
        self._looked_at = 0
        self._in_step = False
        self._random = random.Random()
        self._numpy = np.random.RandomState()
        self._words = state_words(torch.default_generator)
        self._torch_before = b""

    def after_init_fn(self) -> None:
        """Notes that a ``worker_init_fn`` has run: from now on its torch seed is what ``initial_seed`` shows."""
        if torch.initial_seed() != self._default_initial:
            self._shown = torch.initial_seed()

    def begin_unseeded(self, samples: int) -> bool:
        """Returns whether a chunk of this many samples may go unseeded. If so, the global generators are in step with
        the second set, for which they are seeded if need be, and ``moved`` must be asked at the chunk's end."""
        if self._draws or (samples < _UNSEEDED_FROM and self._looked_at < _EVIDENCE):
            return False
        if not self._in_step:
            self._step_in(self._worker_seed)
        return True

    def moved(self) -> bool:
        """Returns whether anything has drawn from the generators, or seeded them, since ``begin_unseeded`` or the last
        ``seed``; False where the second set was not seeded with them. After True all later samples are seeded. The
        question itself draws from ``random`` and NumPy's generator."""
        same = not self._in_step or (
            random.getrandbits(64) == self._random.getrandbits(64)
            and np.random.random_sample() == self._numpy.random_sample()
            and self._torch_state() == self._torch_before
        )
        self._draws |= not same
        return not same

    def _torch_state(self) -> bytes:
        """Returns the words that change with every draw; the whole state if they are not found."""
        return torch.default_generator.get_state().numpy().tobytes() if self._words is None else bytes(self._words)

    def seed(self, seed: int) -> None:
        """Seeds for one sample, or for a stage of one."""
        if self._in_step and not self._draws:
            self.moved()  # for the stage before
        self._in_step = False
        if self.always_looks or not (self._draws or self._looked_at >= _EVIDENCE):
            self._step_in(seed)
        else:
            seed_generators(seed)
        if self._shown is not None:
            show_initial_seed(self._shown)

    def seed_batch(self, seed: int) -> None:
        """Seeds for the ``collate_fn`` that joins a batch."""
        self._in_step = False
        seed_generators(seed)
        if self._shown is not None:
            show_initial_seed(self._shown)

    def seeded_sample_done(self) -> None:
        """Notes the end of a seeded sample: the first few are looked at for draws."""
        if not self._draws and self._looked_at < _EVIDENCE:
            self._looked_at += 1
            self.moved()

    def _step_in(self, seed: int) -> None:
        seed_generators(seed)
        self._random.seed(seed)
        self._numpy.seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
        self._torch_before = self._torch_state()
        self._in_step = True


def seed_generators(seed: int) -> None:
    """Seeds ``random``, NumPy's legacy generator and torch's CPU generator from one unsigned 64-bit number."""
    random.seed(seed)
    np.random.seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & _TORCH_MASK)


_HEAD = 256  # bytes of a generator in which its words begin; all of it is ten times as long
_SEEDED = struct.Struct("=Qi")  # seed; how many numbers are left until the state is made anew
_BESIDE = 16  # bytes from there to what is looked at:
_LOOKED_AT = struct.Struct("=I4I")  # the next number of the state, a Mersenne twister's, and the state's first four
_PROBE = 0x2F0E_1D2C_3B4A_5968


def state_words(generator: torch.Generator) -> Any:
    """Returns memory of torch's CPU generator that changes with every draw and every other seed, as a ctypes array.

    None if it is not found. It may be read for as long as the generator lives. Which number comes next changes with
    each draw, and the numbers with every 624 of them, or another seed.
    """
    probe = torch.Generator().manual_seed(_PROBE)
    address = getattr(probe, "_cdata", None)
    if not isinstance(address, int):
        return None
    numbers = probe.get_state()[24:56].view(torch.int64).tolist()  # 64 bits each there, 32 where they are stored
    head = ctypes.string_at(address, _HEAD)
    found = head.find(_SEEDED.pack(_PROBE, 1))
    begin = found + _BESIDE
    if found < 0 or head[begin : begin + _LOOKED_AT.size] != _LOOKED_AT.pack(0, *numbers):
        return None
    array = ctypes.c_char * _LOOKED_AT.size
    looked_at = array.from_address(address + begin)
    before = bytes(looked_at)
    torch.rand(1, generator=probe, device="cpu")
    if bytes(looked_at) == before:
        return None
    return array.from_address(generator._cdata + begin)  # type: ignore[attr-defined]


def show_initial_seed(seed: int) -> None:
    """Makes ``torch.initial_seed()`` return ``seed`` and leaves what will be drawn as it is.

    The state of torch's CPU generator begins with its initial seed (8 bytes, native order).
    """
    state = torch.default_generator.get_state()
    state[:8] = torch.frombuffer(bytearray((seed & _MASK).to_bytes(8, "little")), dtype=torch.uint8)
    torch.default_generator.set_state(state)
