"""Runs a case through the loader's public face, and tells what came."""

from __future__ import annotations

import io
import json
import random
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

import minato_gpu
from tests.contracts.cases import ALLOWED, Case, Step, elsewhere, steps
from tests.contracts.kinds import PIPELINE, Sample
from tests.contracts.material import collate_of, data_of, samples_of
from tests.contracts.orders import SEED, sampler_of

_MACHINE = re.compile("will create .* worker processes|is multi-threaded")  # warnings that depend on the machine
_MOST = 60  # batches and errors of a part: one that goes on for ever is cut off

Batch = tuple[Sample, ...]


@dataclass(frozen=True)
class Raised:
    """An error: its class, and what it and its cause say. Not the error, whose traceback keeps an iterator alive."""

    kind: type[Exception]
    text: str


@dataclass
class Part:
    """What one rank got of a step, batches and errors, and what ``stats()`` said then. ``undone``: a batch after these
    that counts as not delivered."""

    step: Step
    rank: int
    got: list[Batch | Raised] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    undone: list[Batch | Raised] = field(default_factory=list)

    @property
    def batches(self) -> list[Batch]:
        """What came of batches."""
        return [each for each in self.got if not isinstance(each, Raised)]

    @property
    def errors(self) -> list[Raised]:
        """What was raised."""
        return [each for each in self.got if isinstance(each, Raised)]


@dataclass
class Outcome:
    """What came of a case. ``asked``: the samples about which ``on_error`` was asked."""

    parts: list[Part] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(case: Case, folder: Path, loader_class: Any = minato_gpu.DataLoader) -> Outcome:
    """The case, once. ``folder``: an empty one, beside which ``files`` are those of the data set."""
    outcome = Outcome()
    _seed()
    data = data_of(case, folder / "files")
    loaders = _loaders(case, data, folder, outcome, loader_class)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps(case):
            parts = [_part(case, loader, step, rank) for rank, loader in enumerate(loaders)]
            outcome.parts += parts
            if case.ends_early and any(part.errors for part in parts):
                break
            if step.then.startswith("save"):
                loaders = _resumed(case, loaders, data, folder, outcome, loader_class)
    outcome.warnings = [str(each.message) for each in caught if not _MACHINE.search(str(each.message))]
    return outcome


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _resumed(case: Case, loaders: list[Any], data: Any, folder: Path, outcome: Outcome, loader_class: Any) -> list[Any]:
    """Other loaders, which go on from where these are; these are dropped."""
    ahead = {"ahead": 1} if case.interruption == "ahead" else {}
    states = [_stored(loader.state_dict(**ahead)) for loader in loaders]
    loaders.clear()
    data = data_of(case, folder / "files") if case.streams else data  # a stream that is taken up begins where it does
    fresh = _loaders(elsewhere(case), data, folder, outcome, loader_class)
    for loader in fresh:
        loader.load_state_dict(states[0] if case.ranks == 1 else _stored(minato_gpu.merge_state_dicts(states)))
    return fresh


def _stored(state: Any) -> Any:
    """The state as another process reads it: from JSON or, where a sampler's own holds tensors, without pickles."""
    try:
        return json.loads(json.dumps(state))
    except TypeError:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


def _loaders(case: Case, data: Any, folder: Path, outcome: Outcome, loader_class: Any) -> list[Any]:
    """One loader for each rank."""
    extra = {} if loader_class is torch.utils.data.DataLoader else _own_arguments(case, folder, outcome)
    batching: dict[str, Any] = {"batch_size": case.batch, "drop_last": case.drop_last}
    return [
        loader_class(
            data,
            **({} if case.sampler == "batches" else batching),
            **sampler_of(case, rank),
            num_workers=case.workers,
            collate_fn=collate_of(case),
            generator=torch.Generator().manual_seed(SEED),
            persistent_workers=case.stay == "persistent",
            **extra,
        )
        for rank in range(case.ranks)
    ]


def _own_arguments(case: Case, folder: Path, outcome: Outcome) -> dict[str, Any]:
    """The arguments that PyTorch's loader has not."""

    def handle(bad: Any) -> str:
        outcome.asked.append(bad)
        return "raise" if case.fault == "handler raises" else "skip"

    how: dict[str, Any] = {"skip": "skip", "killed twice": "skip", "too many": "skip", "retry": "retry"}
    how |= {"handler skips": handle, "handler raises": handle}
    more: dict[str, Any] = {"on_error": how.get(case.fault, "raise"), "worker_kind": case.kind}
    if case.fault == "too many":
        more["max_failures"] = ALLOWED
    if case.replaces:
        more["on_worker_death"] = "replace"
    if case.lateness:
        more.update(in_order=False, max_lateness=case.lateness)
    if case.stay == "epochs":
        more["epochs"] = case.epochs
    if case.data == "pipeline":
        more["pipeline"] = PIPELINE
        more["lanes"] = ("cpu", "device") if case.lanes == "both" else (case.lanes,)
    if case.cache == "memory":
        more["cache"] = 1 << 20
    elif case.cache == "disk":
        more.update(cache=8 << 20, cache_dir=folder / "cache")
    return more


def _part(case: Case, loader: Any, step: Step, rank: int) -> Part:
    """Take the step's batches. Every other one is kept, and looked at when the others have come."""
    part = Part(step, rank)
    if case.sampler == "distributed":
        loader.sampler.set_epoch(step.epoch)
    iterator, held = iter(loader), dict[int, Any]()
    while len(part.got) != (_MOST if step.take is None else step.take):
        try:
            batch = next(iterator)
            if len(part.got) % 2 == 0:
                held[len(part.got)] = batch
            part.got.append(samples_of(case, batch))
        except StopIteration:
            break
        except Exception as error:
            part.got.append(Raised(type(error), f"{error} {error.__cause__}"))
            if case.ends_early:
                break
    for number, batch in held.items():
        part.got[number] = samples_of(case, batch)
    if step.then == "save ahead":
        part.undone.append(part.got.pop())
    if isinstance(loader, minato_gpu.DataLoader):
        part.stats = loader.stats()
    return part
