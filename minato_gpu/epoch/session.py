"""The parts of a loader that outlive an epoch: workers that stay, seeds, the epoch that is prepared early, and the
resume point.

The loader is passed to every call and never kept: dropping the loader drops its workers.
"""

from __future__ import annotations

import os
import weakref
from time import perf_counter
from typing import Any, NamedTuple

from minato_gpu.arguments import Arguments
from minato_gpu.checkpoint.cursor import Cursor, before_epoch
from minato_gpu.checkpoint.resumption import Resumption
from minato_gpu.checkpoint.state import State
from minato_gpu.engine.engine import Engine
from minato_gpu.epoch.delivery import EpochIterator, EpochView
from minato_gpu.lanes.streams import StreamState, told_of
from minato_gpu.observe.counters import Counts, carried, counters
from minato_gpu.observe.facts import Facts
from minato_gpu.observe.metrics_server import exported_at
from minato_gpu.observe.shared_service import LoaderSnapshot
from minato_gpu.observe.trace import write_trace
from minato_gpu.options.options import Options
from minato_gpu.sampling.epoch_batches import EpochBatches
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.speculation import Speculation
from minato_gpu.sources.reader import ReaderOwner

_OWN = ("engine", "ahead", "cursor", "_pending", "_user", "_shown")
"""The attributes that no copy of a session has: a pickled loader takes its arguments along, not its workers."""

_Ahead = tuple[EpochBatches, Speculation]


class ReportedEpoch(NamedTuple):
    """The epoch that ``stats()`` describes: the one that began, or was resumed, last."""

    view: EpochView
    number: int
    ended: Counts  # what earlier epochs add to its counters (see ``carried``); empty without ``metrics_port``


class Session:
    """The epochs of one loader, one after the other."""

    def __init__(self, loader: Arguments, options: Options) -> None:
        self.options = options
        self.kind = type(loader.dataset).__name__  # a word for what is loaded
        self.engine: Engine | None = None  # engine that is kept, for persistent workers or a declared number of epochs
        self.base_seed = 0  # base seed of the engine's workers
        self.first_epoch = 0  # in which these workers started
        self.ahead: _Ahead | None = None  # the next epoch, if its order is drawn already
        self.speculates = loader.epochs is not None and Sampling(loader).is_torch_permutation  # whether it may be
        self.prepared = self.discarded = 0  # epochs that were drawn ahead
        self.cursor: Cursor | None = None  # position of the last epoch
        self._next_epoch = 0  # number of the one that begins next, if no state says otherwise
        self._pending: Resumption | None = None  # what load_state_dict was given, until the next epoch begins
        self._given: State | None = None  # the same in a copy of the loader, which has to prepare for it
        self._user: weakref.ref[EpochIterator] | None = None
        self._shown: ReportedEpoch | None = None
        self.readers = ReaderOwner()  # reader processes, which stay when workers end with an epoch
        self.facts = Facts()  # facts of all epochs
        self._is_observed = False
        self._process = os.getpid()

    def begin_here(self) -> None:
        """Prepares for an epoch in this process: after a fork, all workers are the parent's."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self.engine = self.ahead = self._user = None
            self.readers = ReaderOwner()
            self.facts, self._is_observed = Facts(), False

    @property
    def starts_processes(self) -> bool:
        """True unless workers are threads, or have started already and stay: then the start method does not matter."""
        return not self.options.threads and (self.engine is None or self.engine.closed)

    def __getstate__(self) -> dict[str, Any]:
        given = self._given if self._pending is None else self._pending.given
        anew = {"facts": Facts(), "_is_observed": False, "_given": given}
        return {**self.__dict__, **dict.fromkeys(_OWN), **anew, "readers": ReaderOwner()}

    def number(self, resumption: Resumption | None) -> int:
        """Returns the number of the epoch that begins."""
        return self._next_epoch if resumption is None else resumption.number

    def observe(self, loader: Arguments) -> None:
        """Begins to write the trace that the argument ``trace`` names, if any. Only the first call does anything.

        Raises OSError if its file cannot be written.
        """
        if self._is_observed:
            return
        self._is_observed = True
        if (trace := self.options.trace) is not None:
            write_trace(self.facts, trace, loader)

    # --- epochs --------------------------------------------------------------------------------------------

    def _waiting(self, loader: Arguments) -> Resumption | None:
        """Returns the loaded state that the next epoch is to go on from; None if there is none.

        Checks it anew in a copy of a loader, and where streams no longer fit ``num_workers``; raises as ``Resumption``.
        """
        if self._pending is not None and not self._pending.fits(loader):
            self._given = self._pending.given
        if self._given is not None:
            self._pending, self._given = Resumption(loader, self._given), None
        return self._pending

    def restore_pending(self, loader: Arguments) -> Resumption | None:
        """Returns the loaded state that this epoch is made from; None if none was loaded, and then changes nothing.

        Sets torch's global generator and the workers' seed to it; of a state between two epochs also the sampler and
        its generators, which ``begin_epoch`` does for others. An epoch that was drawn ahead is discarded. The state
        stays loaded until the epoch has ``begun``.
        """
        resumption = self._waiting(loader)
        if resumption is None:
            return None
        if resumption.is_superseded:
            resumption.give_up_rest()
        resumption.globals.put()
        if self.ahead is not None:
            self.ahead, self.discarded = None, self.discarded + 1
        if resumption.knows_seed:
            self.base_seed, self.first_epoch = resumption.workers
        if not resumption.begun:
            resumption.set_generators()
            resumption.load_sampler()
        return resumption

    def may_keep(self, loader: Arguments, resumption: Resumption | None) -> bool:
        """Returns whether the epoch that begins may use workers that stay: the loader asks for such
        (``persistent_workers`` or ``epochs``), and no other iterator uses them.

        If one does, an epoch that resumes from a state leaves them to it, to end with it, and may start others that
        stay.
        """
        user = None if self._user is None else self._user()
        if resumption is not None and user is not None and not user.ended and self.engine is not None:
            weakref.finalize(user, self.engine.close)
            self.engine = user = None
        return (loader.persistent_workers or loader.epochs is not None) and (user is None or user.ended)

    def keep(self, engine: Engine, user: EpochIterator) -> None:
        """Keeps the engine for later epochs; ``user`` has it now."""
        self.engine, self._user = engine, weakref.ref(user)

    def settle_ahead(self, ahead: _Ahead | None, *, begins: bool) -> None:
        """Settles what becomes of the epoch drawn early, ``ahead``: it ``begins`` now, or counts as discarded, and no
        epoch is drawn early any more. None: none was drawn, or its workers are not used."""
        self.ahead = None
        if ahead is not None and begins:
            ahead[1].adopt()
        elif ahead is not None:
            self.discarded += 1
            self.speculates = False  # the generators move between epochs: the next guess would be wrong too

    def begun(self, number: int, view: EpochView) -> None:
        """Notes that epoch ``number`` has begun, or goes on: ``stats()`` describes it, ``number`` + 1 comes next, and a
        loaded state has been used."""
        self._shown = ReportedEpoch(view, number, self._carried_into(view))
        self._next_epoch, self._pending = number + 1, None

    def _carried_into(self, view: EpochView) -> Counts:
        """Returns what is to be added to the counters of ``view``, an epoch that begins, so that none falls from one
        epoch to the next (see ``carried``). Empty for the loader's first epoch, and without ``metrics_port``."""
        last = self._shown
        if last is None or self.options.metrics is None:
            return {}
        return carried(last.ended, counters(self._stats_of(last.view)), counters(self._stats_of(view)))

    # --- saving and resuming -------------------------------------------------------------------------------

    def state(self, loader: Arguments, ahead: int) -> State:
        """Implements ``DataLoader.state_dict``."""
        if (waiting := self._waiting(loader)) is not None:
            if ahead:
                raise ValueError(f"ahead={ahead}: nothing has been delivered since load_state_dict()")
            return waiting.given
        if self.cursor is None or (self.cursor.over and ahead == 0):
            number = self._next_epoch
            workers = self.base_seed, self.first_epoch if loader.persistent_workers and number else number
            streams = self.streams_between(loader) if Sampling(loader).iterable else []
            return before_epoch(loader, number, workers, self.cursor, streams)
        return self.cursor.state(ahead)

    def load(self, loader: Arguments, state: dict[str, Any]) -> None:
        """Implements ``DataLoader.load_state_dict``."""
        self._pending, self._given = Resumption(loader, state), None

    def streams_between(self, loader: Arguments, *, keeps: bool = True) -> list[StreamState]:
        """Returns where the data sets of the next epoch stand before it begins; empty where nobody knows.

        With ``keeps``, workers that have stayed iterate their own data sets. Otherwise a worker thread, or the loader
        without workers, iterates the data set of this process.
        """
        engine, last = self.engine if keeps else None, self.cursor
        streams = None if last is None else last.epoch.streams
        if streams is not None and engine is not None and not engine.closed:
            return streams.at_end()
        if loader.num_workers > 0 and not self.options.threads:
            return []
        if left := self.left_here(loader):
            return left
        told = told_of(loader.dataset, over=last is not None and last.ended_with_batches)
        return [StreamState(None) if last is None and told.error else told]  # it may be able to once it is iterated

    def left_here(self, loader: Arguments) -> list[StreamState]:
        """Returns where the data set of this process begins the next epoch, if the last one was resumed at its end.

        Else, and with worker processes, empty. The data set has not been given that state, as its stream had nothing
        more to yield.
        """
        streams = None if self.cursor is None else self.cursor.epoch.streams
        here = loader.num_workers == 0 or self.options.threads
        return streams.left if here and streams is not None else []

    # --- looking -------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Implements ``DataLoader.stats``."""
        return self._stats_of(self._view("stats()"))

    def snapshot(self) -> LoaderSnapshot | None:
        """Returns the loader's present counts for other processes (see ``StatsProvider``); None before the first
        epoch."""
        shown = self._shown
        return None if shown is None else LoaderSnapshot(shown.number, self._stats_of(shown.view), shown.ended)

    def _stats_of(self, view: EpochView) -> dict[str, Any]:
        asked = self.options.metrics
        address = None if asked is None else exported_at(asked)
        return {
            **view.log.stats(perf_counter()),
            **view.memory(),
            "failures": list(view.failures.recent),
            "speculation": {"epochs_prepared": self.prepared, "epochs_discarded": self.discarded},
            **({} if address is None else {"metrics": str(address)}),
        }

    def timeline(self) -> dict[str, Any]:
        """Implements ``DataLoader.timeline``."""
        return self._view("timeline()").log.timeline()

    def _view(self, asked: str) -> EpochView:
        if self._shown is None:
            raise RuntimeError(f"{asked} has nothing to tell before the first iter() of this loader")
        return self._shown.view
