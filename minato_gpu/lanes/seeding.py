"""The global random generators of a worker process, seeded for each sample (promise P2).

``random``, NumPy's legacy generator and torch's default generator are seeded from the sample's own seed before the
data set sees it; that costs about 7 microseconds. A chunk of cheap samples goes without while none of them draws:
a second set of generators, in step with the global ones, shows at the chunk's end whether one of those has moved.
If so the chunk is prepared again, seeded, and every later sample is seeded too. (Comparing the generators' states
instead would cost 45 microseconds a time.)

A ``worker_init_fn`` that seeds torch keeps what PyTorch promises for it: ``torch.initial_seed()`` stays what it
set. What is *drawn* is the sample's own all the same; per-sample seeding wins.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_UNSEEDED_FROM = 8  # chunks of fewer samples are always seeded: the check would cost as much
_EVIDENCE = 16  # seeded samples that are looked at for draws
_MASK = (1 << 64) - 1
_TORCH_MASK = _MASK >> 1  # torch.initial_seed() must fit a signed 64-bit tensor element, as PyTorch's own seeds do


class Seeder:
    """Seeds the global generators of this process, and notices whether samples draw from them."""

    def __init__(self, worker_seed: int) -> None:
        seed_generators(worker_seed)
        self._worker_seed = worker_seed
        self._default_initial = torch.initial_seed()
        self._shown: int | None = None
        self._draws = False
        self._looked_at = 0
        self._in_step = False
        self._random = random.Random()
        self._numpy = np.random.RandomState()
        self._torch = torch.Generator()
        self._scratch = torch.empty(2, dtype=torch.int64)

    def after_init_fn(self) -> None:
        """Call once a ``worker_init_fn`` has run: from now on its torch seed is what ``initial_seed`` shows."""
        if torch.initial_seed() != self._default_initial:
            self._shown = torch.initial_seed()

    def begin_unseeded(self, samples: int) -> bool:
        """Whether a chunk of this many samples may go unseeded; if so ``moved`` must be asked at its end."""
        if samples < _UNSEEDED_FROM or self._draws:
            return False
        if not self._in_step:
            self._step_in(self._worker_seed)
        return True

    def moved(self) -> bool:
        """Whether anything was drawn or seeded since ``begin_unseeded``; if so later samples are always seeded."""
        first, second = self._scratch[:1], self._scratch[1:]
        same = (
            random.getrandbits(64) == self._random.getrandbits(64)
            and np.random.random_sample() == self._numpy.random_sample()
            and int(first.random_()) == int(second.random_(generator=self._torch))
        )
        self._draws = not same
        return not same

    def seed(self, seed: int) -> None:
        """Seed for one sample."""
        self._in_step = False
        if self._draws or self._looked_at >= _EVIDENCE:
            seed_generators(seed)
        else:
            self._step_in(seed)
        if self._shown is not None:
            show_initial_seed(self._shown)

    def seeded_sample_done(self) -> None:
        """Call after each seeded sample: the first few are looked at for draws."""
        if not self._draws and self._looked_at < _EVIDENCE:
            self._looked_at += 1
            self.moved()

    def _step_in(self, seed: int) -> None:
        seed_generators(seed)
        self._random.seed(seed)
        self._numpy.seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
        self._torch.manual_seed(seed & _TORCH_MASK)
        self._in_step = True


def seed_generators(seed: int) -> None:
    """Seed ``random``, NumPy's legacy generator and torch's CPU generator from one unsigned 64-bit number."""
    random.seed(seed)
    np.random.seed((seed ^ (seed >> 32)) & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed & _TORCH_MASK)


def show_initial_seed(seed: int) -> None:
    """Make ``torch.initial_seed()`` return ``seed`` and leave what will be drawn as it is.

    The state of torch's CPU generator begins with its initial seed (8 bytes, native order).
    """
    state = torch.default_generator.get_state()
    state[:8] = torch.frombuffer(bytearray((seed & _MASK).to_bytes(8, "little")), dtype=torch.uint8)
    torch.default_generator.set_state(state)
