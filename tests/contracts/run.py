"""Runs a case through the loader's public face, and tells what came."""

from __future__ import annotations

import gc
import io
import json
import os
import random
import re
import time
import warnings
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

import minato_gpu
from tests.contracts.cases import ALLOWED, FILES, HANG_S, STARTS, Case, Step, elsewhere, steps
from tests.contracts.kinds import PIPELINE, Sample
from tests.contracts.material import collate_of, counted, data_of, samples_of, start_of
from tests.contracts.orders import SEED, sampler_of
from tests.support.agents import AgentProcess, agents

_MACHINE = re.compile("will create .* worker processes|is multi-threaded")  # warnings that depend on the machine
_LITTLE = 10 * 4096  # a cache for ten files
_NO_SAMPLES = (*STARTS, "sampler raises", "collate raises")  # faults that are no sample's, so not left out
_MOST = 60  # batches and errors of a part: one that goes on for ever is cut off

_FAR_WORKERS = 2  # of the agent
_KILLED_AT = 2  # batches of an epoch before its sessions are killed
_agents: list[AgentProcess] = []  # of the case that runs

Batch = tuple[Sample, ...]


@dataclass(frozen=True)
class Raised:
    """An error: its class, and what it, its notes and its cause say. Not the error, whose traceback keeps an iterator
    alive."""

    kind: type[Exception]
    text: str

    @classmethod
    def of(cls, error: Exception) -> Raised:
        """What is kept of an error."""
        notes = "\n".join(getattr(error, "__notes__", ()))
        return cls(type(error), f"{error} {error.__cause__} {notes}")


@dataclass
class Part:
    """What one rank got of a step, batches and errors, and what ``stats()`` said then (nothing where it is of another
    step). ``joined``: what was drawn for each batch. ``undone``: a batch after these that counts as not delivered.
    ``elapsed_s``: what ``stats()`` said of that a moment later."""

    step: Step
    rank: int
    got: list[Batch | Raised] = field(default_factory=list)
    joined: list[tuple[float, ...]] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    undone: list[Batch | Raised] = field(default_factory=list)
    elapsed_s: float = 0.0

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
    """What came of a case. ``asked``: the samples about which ``on_error`` was asked. ``begun``: how many samples were
    asked of the data set. ``forks``: how processes ended that used the loader."""

    parts: list[Part] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    begun: int = 0
    forks: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(case: Case, folder: Path, loader_class: Any = minato_gpu.DataLoader) -> Outcome:
    """The case, once. ``folder``: an empty one, beside which ``files`` are those of the data set."""
    if case.far == "none":
        return _run(case, folder, loader_class)
    with agents(1, _FAR_WORKERS) as started:
        _agents[:] = started
        outcome = _run(case, folder, loader_class)
        gc.collect()
        _agents.clear()
    return outcome


def _run(case: Case, folder: Path, loader_class: Any) -> Outcome:
    outcome = Outcome()
    began = Path.cwd()
    _seed()
    data = data_of(case, folder / "files")
    loaders = loaders_of(case, data, folder, outcome, loader_class)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left = steps(case)
        places = [folder, folder.parent]  # relative paths lead to the same files from both
        os.chdir(folder)
        while left:
            together = [left.pop(0) for _ in range(2 if left[0].then == "at once" else 1)]
            if not case.streams and together[0].epoch > (outcome.parts[-1].step.epoch if outcome.parts else -1):
                data.begin()
            parts = [part for rank, loader in enumerate(loaders) for part in _parts(case, loader, together, rank)]
            outcome.parts += parts
            step = together[0]
            if case.ends_early and any(part.errors for part in parts):
                break
            if step.then == "fork":
                outcome.forks.append(_in_a_fork(loaders))
            elif step.then == "change":
                data.change()
            if case.data in FILES:
                places = places[1:] + places[:1]
                os.chdir(places[0])
            if step.then.startswith("save"):
                loaders = _resumed(case, loaders, data, folder, outcome, loader_class)
    os.chdir(began)
    outcome.begun = 0 if case.streams else counted(data.begun)
    outcome.warnings = [str(each.message) for each in caught if not _MACHINE.search(str(each.message))]
    return outcome


def _in_a_fork(loaders: list[Any]) -> int:
    """A process forked from this one runs an epoch; returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    status = 1
    try:
        batches = sum(1 for _ in loaders[0])
        loaders.clear()
        gc.collect()
        status = 0 if batches else 2
    finally:
        os._exit(status)


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _resumed(case: Case, loaders: list[Any], data: Any, folder: Path, outcome: Outcome, loader_class: Any) -> list[Any]:
    """Other loaders, which go on from where these are; these are dropped."""
    ahead = {"ahead": 1} if case.interruption == "ahead" else {}
    states = [stored(loader.state_dict(**ahead)) for loader in loaders]
    loaders.clear()
    data = data_of(case, folder / "files") if case.streams else data  # a stream that is taken up begins where it does
    fresh = loaders_of(elsewhere(case), data, folder, outcome, loader_class)
    if len(fresh) != len(states):
        states = [stored(minato_gpu.merge_state_dicts(states))] * len(fresh)
    for loader, state in zip(fresh, states, strict=True):
        loader.load_state_dict(state)
    return fresh


def stored(state: Any) -> Any:
    """The state as another process reads it: from JSON or, where a sampler's own holds tensors, without pickles."""
    try:
        return json.loads(json.dumps(state))
    except TypeError:
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)


def loaders_of(case: Case, data: Any, folder: Path, outcome: Outcome, loader_class: Any) -> list[Any]:
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
            worker_init_fn=start_of(case),
            multiprocessing_context=None if case.context == "fork" else case.context,
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

    skips = ("skip", "killed twice", "hung twice", "too many", *_NO_SAMPLES)
    how: dict[str, Any] = dict.fromkeys(skips if not case.streams else (), "skip")
    how |= {"retry": "retry", "handler skips": handle, "handler raises": handle}
    more: dict[str, Any] = {"on_error": how.get(case.fault, "raise"), "worker_kind": case.kind}
    if case.snapshots != 1:
        more["snapshot_every_n_steps"] = case.snapshots
    if case.fault == "too many":
        more["max_failures"] = ALLOWED
    if case.replaces:
        more["on_worker_death"] = "replace"
    if case.fault.startswith("hung"):
        more["hang_timeout"] = HANG_S
    more["max_workers"], more["host_memory_budget"] = case.most, case.budget
    if case.lateness:
        more.update(in_order=False, max_lateness=case.lateness)
    if case.stay == "epochs":
        more["epochs"] = case.epochs
    if case.data == "pipeline":
        more["pipeline"] = PIPELINE
        more["lanes"] = ("cpu", "device") if case.lanes == "both" else (case.lanes,)
    if case.cache != "none":
        more["cache"] = {"memory": 1 << 20, "little": _LITTLE, "both": {"memory": _LITTLE, "disk": 8 << 20}}[case.cache]
        more["cache_dir"] = folder / "cache" if case.cache == "both" else None
    if case.far != "none":
        more["cluster"] = minato_gpu.Lanes(_agents[0].address)
    if case.share:
        more["share"] = f"case-{zlib.crc32(bytes(folder)):x}"
        more["share_budget"] = 1 << 20 if case.share == "prepared" else None
    return more


def _parts(case: Case, loader: Any, together: list[Step], rank: int) -> list[Part]:
    """Take the batches of a step; of two that are taken at once in turn."""
    taking = []
    for step in together:
        if case.sampler == "distributed":
            loader.sampler.set_epoch(step.epoch)
        taking.append(_Taking(case, Part(step, rank), loader))
    going = list(taking)
    while going:
        going = [each for each in going if each.goes_on()]
    for each in taking:
        each.finish()
    parts = [each.part for each in taking]
    if isinstance(loader, minato_gpu.DataLoader) and len(parts) == 1 and taking[0].iterator is not None:
        parts[0].stats = loader.stats()
        parts[0].elapsed_s = loader.stats()["elapsed_s"]
    return parts


class _Taking:
    """Takes the batches of a part. Every other one is kept, and looked at when the others have come."""

    def __init__(self, case: Case, part: Part, loader: Any) -> None:
        self.case, self.part = case, part
        self.begun = getattr(loader.dataset, "begun", Path())
        self.held: dict[int, Any] = {}
        self.iterator: Any = None
        try:
            self.iterator = iter(loader)
        except Exception as error:
            self._failed(error)

    def goes_on(self) -> bool:
        """Whether one more came."""
        got, take = self.part.got, self.part.step.take
        if self.iterator is None or len(got) == (_MOST if take is None else take):
            return False
        if len(got) == 1 and self.case.budget is not None and self.case.data in ("many at once", "uneven"):
            self._dawdle()
        try:
            if len(got) == _KILLED_AT and self.case.far == "killed":
                for session in _agents[0].sessions():
                    session.kill()
            batch = next(self.iterator)
            if len(got) % 2 == 0:
                self.held[len(got)] = batch
            self._read(batch)
        except StopIteration:
            return False
        except Exception as error:
            self._failed(error)
            return not self.case.ends_early or self.case.fault == "sampler raises"
        return True

    def _dawdle(self) -> None:
        """Take nothing until workers begin nothing more."""
        before = -1
        while before != (now := counted(self.begun)):
            before = now
            time.sleep(0.02)

    def _failed(self, error: Exception) -> None:
        self.part.got.append(Raised.of(error))

    def _read(self, batch: Any) -> None:
        samples, joined = samples_of(self.case, batch)
        self.part.got.append(samples)
        self.part.joined.append(joined)

    def finish(self) -> None:
        """The part is whole."""
        part = self.part
        for number, batch in self.held.items():
            part.got[number] = samples_of(self.case, batch)[0]
        if part.step.then == "save ahead":
            part.undone.append(part.got.pop())
            part.joined.pop()
