"""The cases of the contract: what a loader may be, and what may happen to it, one value for each factor.

``run.py`` runs a case through the loader's public face, ``oracle.py`` says what must come, ``test_table.py`` compares
the two. Of all legal cases those are tried in which each legal pair of values occurs (``tests/support/covering.py``). A
defect that was found becomes a row of ``KNOWN``.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.covering import pairwise

SAMPLES = 30
BAD = 7  # the key whose sample raises, hangs, or kills its worker
# Keys, some of them twice.
LISTED = (7, 7, 3, 12, 7, 29, *range(4), 3, 28, *range(14, 18), *range(4, 7), *range(21, 24), 12, 24, 25, 11, 10, 29, 3)
DRAWN = 13  # keys after which a sampler raises
ALLOWED = 1  # failures in an epoch, where one more is "too many"
HANG_S = 2.0  # the limit for a sample, which takes milliseconds
STREAMS = (14, 5, 9)  # samples of each worker's stream
SHARDS = (9, 6, 5, 0, 8)  # samples of each shard, or of each part of what workers share out
ELASTIC = ("stateful shards", "stateful split")  # streams that another number of workers may go on with
FILES = ("files", "urls")  # data whose bytes the loader reads
STARTS = ("start raises", "start kills")  # faults of worker_init_fn
OF_FILES = ("no file", "too short")  # errors of files
SAVES = ("begun", "saved", "saved twice", "ahead", "elsewhere", "between")  # interruptions
STREAM_OF = 1_000  # the keys of a worker's stream begin at a multiple of it

VALUES: dict[str, tuple[Any, ...]] = {
    "data": (
        *("numbers", "mapping", "ragged", "uneven", "objects", "closures", "many at once", "pipeline", "files", "urls"),
        *("stream", "stateful stream", "stateful iterator", *ELASTIC),
    ),
    "sampler": (
        *("sequential", "shuffled", "shuffle=True", "repeats", "stateful", "listed", "batches", "distributed"),
        "none",
    ),
    "batch": (4, 1, None),
    "drop_last": (False, True),
    "snapshots": (1, 3, 50),  # the last is more than an epoch has
    "lateness": (0, 1, 8),
    "workers": (2, 0, 1, 3),
    "kind": ("process", "thread"),
    "stay": ("an epoch", "persistent", "epochs"),
    "most": (None, 4),
    "start": ("plain", "seeds"),
    "lanes": ("cpu", "device", "both"),
    "collate": ("usual", "own", "draws"),
    "cache": ("none", "memory", "little", "both"),
    "budget": (None, 1, 40_000),
    "fault": (
        *("none", "raise", "skip", "handler skips", "handler raises", "retry", "too many"),
        *("killed once", "killed twice", "killed", "collate raises", "start raises", "sampler raises"),
    ),
    "error": ("ValueError", "StopIteration", "local", "unsendable", "no file", "too short"),
    "interruption": (
        *("none", "left", "begun", "saved", "saved twice", "ahead", "elsewhere", "between", "two at once"),
        *("forked", "changed"),
    ),
    "epochs": (2, 1),
    "ranks": (1, 2),
}


@dataclass(frozen=True)
class Case:
    """One loader, and what happens to it. A value is one of ``VALUES``; the defaults are the plainest loader."""

    data: str = "numbers"  # what the samples are, or the streams
    sampler: str = "sequential"  # where their order comes from
    batch: int | None = 4
    drop_last: bool = False
    snapshots: int = 1  # snapshot_every_n_steps
    lateness: int = 0  # batches; 0: in order
    workers: int = 2
    kind: str = "process"  # of workers
    stay: str = "an epoch"  # how long workers stay; "epochs": the number of epochs is declared
    context: str = "fork"  # how worker processes start
    most: int | None = None  # max_workers
    start: str = "plain"  # what worker_init_fn does
    lanes: str = "cpu"
    collate: str = "usual"  # "own" stacks tensors as a user would; "draws" draws numbers for each batch
    cache: str = "none"  # where the bytes of "files" and "urls" are kept
    budget: int | None = None  # host_memory_budget
    fault: str = "none"  # of the sample of key BAD, and what the loader is to do about it
    error: str = "ValueError"  # what that sample raises, or that it cannot be pickled, or that it has no file
    interruption: str = "none"  # of the first epoch
    epochs: int = 2
    ranks: int = 1
    share: bool | str = (
        False  # whether ranks, resumed loaders and the like share a reader process; "prepared": samples too
    )
    far: str = "none"  # workers of an agent beside these; "killed": its sessions are, in the middle of each epoch

    def __str__(self) -> str:
        """The call that makes the case, without what is as usual."""
        usual = vars(type(self))
        given = {name: value for name, value in vars(self).items() if value != usual[name]}
        return f"Case({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def streams(self) -> bool:
        """Whether the data set is iterable."""
        return self.data.startswith("stat") or self.data == "stream"

    @property
    def replaces(self) -> bool:
        """Whether workers that die or hang are replaced."""
        return self.fault.endswith((" once", " twice")) or self.fault == "start kills"

    @property
    def fails(self) -> bool:
        """Whether the sample of BAD is never had."""
        return self.fault not in ("none", "retry", "killed once", "hung once", *STARTS, "sampler raises")

    @property
    def raises(self) -> bool:
        """Whether a batch with that sample is an error, after which others come."""
        return self.fault in ("raise", "handler raises", "collate raises")

    @property
    def ends_early(self) -> bool:
        """Whether the first error ends the run."""
        return self.fault in ("too many", "killed", "hung", *STARTS, "sampler raises")


@dataclass(frozen=True)
class Step:
    """A part of an epoch: ``take`` batches (None: all that are left), then "go on", "leave" the epoch, or "save" and
    go on with another loader; with "save ahead" the last batch counts as not delivered. "at once": the next step's
    batches are taken in turn with this one's, from another iterator. "fork": a forked process uses the loader, too.
    "change": other files come in the places of the data set's."""

    epoch: int
    take: int | None = None
    then: str = "go on"


def steps(case: Case) -> list[Step]:
    """The parts in which the epochs are run."""
    first = {
        "none": [Step(0)],
        "left": [Step(0, 2, "leave")],
        "begun": [Step(0, 0, "save"), Step(0)],
        "saved": [Step(0, 2, "save"), Step(0)],
        "saved twice": [Step(0, 1, "save"), Step(0, 2, "save"), Step(0)],
        "ahead": [Step(0, 3, "save ahead"), Step(0)],
        "elsewhere": [Step(0, 2 * case.workers if case.streams else 2, "save"), Step(0)],  # each stream has been begun
        "between": [Step(0, None, "save")],
        "two at once": [Step(0, None, "at once")],
        "forked": [Step(0, None, "fork")],
        "changed": [Step(0, None, "change")],
    }[case.interruption]
    return first + [Step(epoch) for epoch in range(1, case.epochs)]


def elsewhere(case: Case) -> Case:
    """The loader that goes on with what the case's has saved."""
    if case.interruption != "elsewhere":
        return case
    return dataclasses.replace(case, workers=case.workers % 3 + 1, ranks=1, cache="none")


Rule = tuple[str, Callable[[Case], bool]]
RULES: tuple[Rule, ...] = (
    ("Streams have no sampler, and only streams have none.", lambda c: c.streams != (c.sampler == "none")),
    (
        "A stream belongs to its worker: it has one lane, one rank, and dies with its worker; nothing is left out.",
        lambda c: (
            c.streams
            and (
                c.ranks > 1
                or c.most is not None
                or c.fault not in ("none", "raise", "killed", "start raises", "collate raises")
            )
        ),
    ),
    (
        "Whether a stream that has raised can be resumed depends on what it is.",
        lambda c: c.streams and c.fault != "none" and c.interruption != "none",
    ),
    (
        "get_worker_info() knows one worker to a process: threads cannot share a stream.",
        lambda c: c.streams and c.kind == "thread" and c.workers > 1,
    ),
    (
        "It draws from Python's and NumPy's generators, which no state has: without workers its resume is refused.",
        lambda c: c.data == "stream" and c.workers == 0 and c.interruption in ("saved", "saved twice", "ahead"),
    ),
    (
        "Streams go on with as many workers as before, but those that are shared out; of these each must have begun.",
        lambda c: c.streams and c.interruption == "elsewhere" and (c.data not in ELASTIC or c.lateness > 1),
    ),
    (
        "Snapshots are taken of a stream with a state, and matter to who saves; one of some batches ago is not split.",
        lambda c: (
            c.snapshots != 1
            and (
                not c.data.startswith("stateful")
                or c.interruption not in SAVES
                or (c.data in ELASTIC and c.interruption == "elsewhere")
            )
        ),
    ),
    ("Without workers there is no kind of worker.", lambda c: c.workers == 0 and c.kind == "thread"),
    (
        "Without workers nothing is overtaken, nothing stays, and nobody starts or dies.",
        lambda c: (
            c.workers == 0
            and (
                (c.lateness, c.most, c.start) != (0, None, "plain")
                or c.stay == "persistent"
                or "killed" in c.fault
                or c.fault in STARTS
            )
        ),
    ),
    (
        "The device lane and the reader need workers; so does a resume with another number of them.",
        lambda c: c.workers == 0 and (c.lanes != "cpu" or c.cache != "none" or c.interruption == "elsewhere"),
    ),
    ("Only pipelines have device stages.", lambda c: c.lanes != "cpu" and c.data != "pipeline"),
    ("Only files can be cached.", lambda c: c.cache != "none" and c.data not in FILES),
    ("A thread that dies takes the program with it.", lambda c: ("kill" in c.fault) and c.kind == "thread"),
    (
        "Only what is prepared in another process need be pickled.",
        lambda c: c.error == "unsendable" and (c.workers == 0 or c.kind == "thread" or c.data == "pipeline"),
    ),
    (
        "A sample that cannot be pickled is of use to a user's own function, or it cannot be joined.",
        lambda c: c.error == "unsendable" and (c.collate != "usual" or c.data == "closures"),
    ),
    ("Only files can be gone.", lambda c: c.error in OF_FILES and c.data not in FILES),
    (
        "Only files can be changed, before they are read ahead.",
        lambda c: c.interruption == "changed" and (c.data not in FILES or c.stay == "epochs"),
    ),
    (
        "What a sample raises matters where it raises.",
        lambda c: (
            c.error != "ValueError"
            and (c.streams or c.fault not in ("raise", "skip", "handler skips", "handler raises", "too many"))
        ),
    ),
    ("What is drawn for a batch is a rank's own.", lambda c: c.collate == "draws" and c.ranks > 1),
    ("A batch is made where there are batches.", lambda c: c.collate != "usual" and (c.batch is None or c.streams)),
    (
        "A list of samples is a user's own way to make a batch already.",
        lambda c: c.collate == "own" and c.data in ("ragged", "uneven", "objects", "closures"),
    ),
    ("Samples that are single are made into no batch.", lambda c: c.fault == "collate raises" and c.batch is None),
    ("Ranks share out what a DistributedSampler yields.", lambda c: c.ranks > 1 and c.sampler != "distributed"),
    ("Batches of a user's own have their own sizes.", lambda c: c.sampler == "batches" and c.batch != 4),
    (
        "A last batch is dropped where the loader makes the batches.",
        lambda c: c.drop_last and (c.sampler == "batches" or c.batch is None),
    ),
    (
        "A rank whose batch has lost all its samples repeats one: not in this table yet.",
        lambda c: c.sampler == "distributed" and c.fails and c.fault not in ("raise", "handler raises", "killed"),
    ),
    (
        "A worker that dies ends the run, and nobody knows how many batches before it was due.",
        lambda c: (
            c.fault in ("killed", *STARTS, "sampler raises")
            and (c.interruption != "none" or c.epochs > 1 or c.ranks > 1)
        ),
    ),
    ("Only a user's own sampler raises.", lambda c: c.fault == "sampler raises" and c.sampler != "listed"),
    (
        "An epoch that is left, or saved after its end, or run beside another, has a next one.",
        lambda c: c.interruption in ("left", "between", "two at once", "forked", "changed") and c.epochs == 1,
    ),
    (
        "Iterators share a state, a generator, the epochs declared, and what stats() describes.",
        lambda c: (
            c.interruption == "two at once"
            and (
                c.sampler not in ("sequential", "listed", "batches", "none")
                or c.data.startswith("stateful")
                or c.fault not in ("none", "raise", "skip", "retry")
                or c.stay == "epochs"
            )
        ),
    ),
    (
        "A process that is forked uses a loader of which it has all.",
        lambda c: c.interruption == "forked" and (c.fault, c.ranks) != ("none", 1),
    ),
    (
        "How far a state or a generator has moved in an epoch that is left depends on how far it was read ahead.",
        lambda c: c.sampler in ("stateful", "shuffled", "shuffle=True") and c.interruption == "left",
    ),
    (
        "What failed in a batch that counts as not delivered is counted twice.",
        lambda c: c.interruption == "ahead" and c.fails,
    ),
    (
        "A batch that raises takes others along: out of order nobody knows which.",
        lambda c: c.raises and c.lateness > 0 and c.interruption != "none",
    ),
)

ROOTS: dict[Case, str] = {
    Case(): "",
    Case(data="stream", sampler="none"): "sampler",
    Case(fault="too many"): "fault",
    Case(fault="killed", epochs=1): "fault",
    Case(fault="start raises", epochs=1): "fault",
    Case(data="files", interruption="changed"): "interruption",
    Case(sampler="listed", fault="sampler raises", epochs=1): "fault",
    Case(fault="skip", error="local"): "error",
    Case(data="stream", sampler="none", fault="raise"): "fault",
    Case(sampler="batches"): "sampler",
    Case(sampler="distributed", ranks=2): "ranks",
    Case(workers=0): "workers",
}
"""Legal cases of every sort, and the factor that makes each of them a sort."""

KNOWN: tuple[Case, ...] = (
    Case(fault="hung once"),  # what takes seconds has few cases
    Case(data="pipeline", lateness=8, workers=3, fault="hung twice", epochs=1),
    Case(data="many at once", fault="hung", epochs=1),
    Case(data="files", context="forkserver", sampler="shuffle=True", start="seeds", cache="both"),
    Case(data="stateful stream", sampler="none", workers=3, interruption="ahead"),  # another stream's turn
    Case(fault="start kills", epochs=1),
    Case(stay="persistent", interruption="forked"),
    Case(stay="persistent", fault="killed once"),  # in each epoch
    Case(sampler="stateful", interruption="saved"),
    Case(sampler="stateful", workers=0, interruption="saved twice"),
    Case(sampler="stateful", fault="too many", interruption="saved"),  # what had failed before counted no more
    Case(data="pipeline", workers=3),  # what a stage drew from global generators was another worker's
    Case(sampler="listed", fault="raise", interruption="saved"),  # the first batch raised, and came again
    Case(data="urls", share=True, sampler="shuffled", cache="memory"),
    Case(data="urls", share=True, sampler="distributed", ranks=2, cache="little", lateness=8),
    Case(data="files", share=True, context="forkserver", sampler="shuffle=True", fault="skip", error="no file"),
    Case(data="urls", share=True, kind="thread", stay="persistent", interruption="two at once", cache="little"),
    Case(data="files", share=True, sampler="shuffled", interruption="elsewhere", fault="killed once", cache="memory"),
    Case(data="urls", share=True, interruption="forked", batch=None, cache="memory"),
    Case(data="urls", share=True, sampler="repeats", interruption="saved twice", lateness=1, stay="epochs"),
    Case(share="prepared", interruption="two at once"),
    Case(data="pipeline", share="prepared", sampler="shuffled", interruption="elsewhere", fault="killed once"),
    Case(data="objects", share="prepared", sampler="listed", interruption="two at once", fault="skip", lateness=8),
    Case(data="closures", share="prepared", interruption="two at once", stay="persistent"),
    Case(data="many at once", share="prepared", context="forkserver", interruption="two at once", collate="draws"),
    Case(data="urls", share="prepared", sampler="distributed", ranks=2, cache="little", workers=3),
    Case(data="files", share="prepared", sampler="repeats", interruption="saved twice", batch=None, fault="retry"),
    Case(data="ragged", share="prepared", interruption="forked", batch=1, budget=40_000, most=4),
    Case(far="there", sampler="shuffled", interruption="saved"),
    Case(far="there", data="mapping", sampler="shuffle=True", stay="persistent", interruption="left"),
    Case(far="there", data="objects", sampler="listed", lateness=8, interruption="elsewhere"),
    Case(far="there", data="many at once", sampler="repeats", fault="killed once", interruption="saved twice"),
    Case(far="there", data="files", sampler="distributed", ranks=2, stay="persistent"),
    Case(far="killed", sampler="shuffled", interruption="ahead"),
    Case(far="killed", data="ragged", lateness=8, stay="persistent"),
    Case(far="killed", data="pipeline", batch=None, sampler="repeats", interruption="saved"),
    Case(far="killed", data="urls", sampler="shuffled", fault="raise", workers=1),
)
"""Costly cases, of which few are enough, and counter-examples of the past, each with a word on what went wrong."""


def legal(case: Case) -> bool:
    """Whether no rule leaves the case out."""
    return not any(applies(case) for _, applies in RULES)


def promised_by_pytorch(case: Case) -> bool:
    """Whether PyTorch's own loader promises the same, but for what samples draw. (Of a worker that was killed it tells
    by a RuntimeError, or by what reading from it raises; and it asks a sampler of single keys again after its end.)"""
    happens = case.fault in ("none", "raise", "collate raises") and case.error == "ValueError"
    goes_on = case.interruption in ("none", "left") or (case.interruption, case.stay) == ("two at once", "an epoch")
    theirs = case.lateness == 0 and case.kind == "process" and case.stay != "epochs" and case.data != "pipeline"
    theirs = theirs and not case.share and not (case.sampler == "stateful" and case.batch is None)
    return happens and goes_on and theirs and case.cache == "none" and case.budget is None and case.most is None


@functools.cache
def table(walk: int = 20_000, where: Callable[[Case], bool] = legal, seed: int = 37) -> tuple[Case, ...]:
    """The cases of the gate: among those that a walk comes by, some that have each pair of values that they have, which
    are 98 of 100 of the legal ones (``test_table``)."""
    cases = walked(walk, where, seed)
    chosen = pairwise([vars(case) for case in cases])
    return (*filter(where, KNOWN), *(cases[number] for number in chosen))


def walked(walk: int, where: Callable[[Case], bool] = legal, seed: int = 37) -> list[Case]:
    """Cases that a walk comes by. ``where``: only such.

    Few combinations are legal, so cases are not drawn but changed: a step changes up to three factors of one that is.
    Walks begin at the ``ROOTS``, and each leaves one factor as it is there.
    """
    rng = random.Random(seed)
    found: dict[Case, None] = {}
    for root, pinned in ROOTS.items():
        case = root
        for _ in range(walk // len(ROOTS)):
            if where(case):
                found[case] = None
            names = rng.sample([name for name in VALUES if name != pinned], rng.randint(1, 3))
            changed = dataclasses.replace(case, **{name: rng.choice(VALUES[name]) for name in names})
            case = changed if legal(changed) and (where(changed) or not where(case)) else case
    return list(found)
