"""A sample's ticket, private random streams and errors.

A prepared sample is a function of (seed, epoch, index, occurrence) and of nothing else (promise P2). ``sample_seed``
turns those four into one 64-bit seed; every random value of the sample derives from it. Nothing here knows about lanes,
time or processes, so every other room may import it.

Decision: seeds are mixed with BLAKE2b rather than Python's ``hash``, which is salted per process for strings, so the
same key gives the same stream in every worker and on every machine.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Any, NewType, ParamSpec, TypeVar

import numpy as np
from numpy.random.bit_generator import ISeedSequence

_MASK = (1 << 64) - 1

TicketId = NewType("TicketId", int)
"""Counts all tickets of a run, over its epochs; a *serial* in names."""
Position = NewType("Position", int)
"""A place in the sampler's order of one epoch."""
SourceBatch = NewType("SourceBatch", int)
"""Counts the sampler's batches over a run; a *place* in names."""
OutputBatch = NewType("OutputBatch", int)
"""Counts the consumer's batches over a run; an *order* in names. With ``max_lateness`` the consumer's batch 3 may hold
samples of several of the sampler's."""

_P = ParamSpec("_P")
_R = TypeVar("_R")

Key = Any
"""A key, which a user's sampler yields and a user's data set takes: an integer mostly, a list of them for a whole
batch, or anything else that has a pickle."""
Value = Any
"""A value that a user's code returns: a sample, one of its fields, a batch. Nothing is known of its type."""
JSON = Any
"""Plain data as JSON has it: states, statistics, tables. Who reads such data from outside checks it there."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One delivery that the sampler asked for.

    ``position`` is the place in the sampler's order of this epoch (from 0); ``index`` is the key that the
    sampler yielded; ``occurrence`` counts earlier tickets of the same index in the
    same epoch (0 for the first).
    """

    epoch: int
    position: Position
    index: Key
    occurrence: int = 0


def key_digest(key: Key) -> int:
    """Returns a 64-bit number for a data set key that is the same in every process.

    Integers stand for themselves (modulo 2**64); strings and bytes are hashed with BLAKE2b, tuples and lists through
    the digests of their parts, and scalars of NumPy and PyTorch as Python's, their arrays and tensors by dtype, shape
    and elements; any other key is hashed through its pickle (protocol 4), so it must pickle to the same bytes whenever
    it is equal. Raises what pickling it raises.
    """
    if isinstance(key, (int, np.integer)):
        return int(key) & _MASK
    if isinstance(key, str):
        data = b"s" + key.encode("utf-8", "surrogatepass")
    elif isinstance(key, bytes):
        data = b"b" + key
    elif type(key) in (tuple, list):  # the pickle of one depends on which of its parts are the same object
        data = type(key).__name__.encode() + b"".join(key_digest(part).to_bytes(8, "little") for part in key)
    elif (plain := plain_key(key)) is not key:
        return key_digest(plain)
    else:
        data = b"p" + pickle.dumps(key, protocol=4)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def plain_key(key: Key) -> Key:
    """Returns a scalar of NumPy or PyTorch as Python's, an array or a tensor as a tuple that differs where they are not
    equal, and any other key unchanged."""
    if hasattr(key, "untyped_storage"):  # a tensor, without an import of torch
        key = key.detach().numpy(force=True)
    if isinstance(key, np.ndarray) and key.ndim:
        return "array", key.dtype.str, key.shape, key.tolist() if key.dtype.hasobject else key.tobytes()
    if isinstance(key, (np.generic, np.ndarray)) and not isinstance(plain := key.item(), np.generic):
        return plain
    return key


def name_of(key: Key) -> Key:
    """Returns a hashable value that is equal for keys that count as the same one, such as NumPy's 3 and Python's.

    Of a key that cannot be hashed it is the repr.
    """
    key = tuple(map(name_of, key)) if type(key) is tuple else plain_key(key)
    try:
        hash(key)
    except TypeError:
        return repr(key)
    return key


def sample_seed(base_seed: int, epoch: int, key: Hashable, occurrence: int = 0) -> int:
    """Returns the 64-bit seed of one sample. ``base_seed`` is the epoch's seed, drawn as PyTorch draws its own.

    The mixing is SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over the four parts in turn; it
    costs about a microsecond, which BLAKE2b for every sample would not.
    """
    state = _mix(base_seed & _MASK)
    state = _mix(state ^ (epoch & _MASK))
    state = _mix(state ^ key_digest(key))
    return _mix(state ^ (occurrence & _MASK))


def stage_seed(seed: int, number: int) -> int:
    """Returns the 64-bit seed of what stage ``number`` of a pipeline draws from global generators for a sample."""
    return _mix(_mix(seed) ^ (number & _MASK))


def witness_of(keys: list[Key]) -> int:
    """Returns a 48-bit number that tells an epoch's first 16 keys from others; 0, no check, if one has no digest."""
    try:
        digests = [key_digest(key).to_bytes(8, "little") for key in keys[:16]]
    except Exception:
        return 0
    return int.from_bytes(blake2b(b"".join(digests), digest_size=6).digest(), "little")


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream(seed: int, number: int = 0) -> np.random.Generator:
    """Returns random stream ``number`` of the sample with this seed; streams of one sample are independent.

    Counter-based (Philox 4x64; Salmon et al., SC 2011): the key is (seed, number), so a stage's draws do not
    depend on how much another stage drew.
    """
    source = _PHILOX(_NO_ENTROPY)
    key = np.array([seed & _MASK, number & _MASK], dtype=np.uint64)
    source.state = {"bit_generator": "Philox", "state": {"counter": _ZEROS, "key": key}, **_UNUSED}
    return np.random.Generator(source)


class _NoEntropy(ISeedSequence):
    """Stands for the entropy that ``Philox(key=...)`` would ask the system for and never use, in half of a stream's
    time.

    It has no children: those of the system's entropy would differ each time.
    """

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        """Returns zeros."""
        return np.zeros(n_words, dtype)


_PHILOX: Any = np.random.Philox  # whose types do not say all that it takes
_NO_ENTROPY = _NoEntropy()
_ZEROS = np.zeros(4, np.uint64)
_UNUSED = {"buffer": _ZEROS, "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}


def shown(key: Key) -> str:
    """Returns the key as errors and counts name it: NumPy's numbers as Python's."""
    return repr(key.item() if isinstance(key, np.generic) else key)


@dataclass(frozen=True, slots=True)
class Origin:
    """The place of a failure, as far as it is known (promise P6)."""

    epoch: int | None = None
    position: Position | None = None
    index: Key = None
    stage: str | None = None
    lane: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        parts = [
            f"{name} {shown(value)}" if name in ("index", "path", "stage") else f"{name} {value}"
            for name, value in known.items()
            if value is not None
        ]
        return ", ".join(parts) or "origin unknown"


class StageError(Exception):
    """A stage failed on one sample. The original exception is ``__cause__``; ``origin`` says where.

    Raised by ``Pipeline.run``; the loader turns it into the exception that the user sees, with the type
    of the cause and the origin in its message.
    """

    def __init__(self, message: str, origin: Origin) -> None:
        super().__init__(message)
        self.message = message
        self.origin = origin

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message, self.origin)


def explain(error: Exception, place: Origin) -> tuple[BaseException, Origin]:
    """Returns the error of the user's code behind ``error``, and where it happened, as precisely as the error says."""
    if isinstance(error, StageError) and error.__cause__ is not None:
        return error.__cause__, replace(place, stage=error.origin.stage, path=error.origin.path)
    return error, place


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an error; does nothing for a class that takes none (a frozen data class)."""
    with suppress(Exception):
        error.add_note(text)


def no_end(function: Callable[_P, _R], what: str) -> Callable[_P, _R]:
    """Wraps a function of the user's so that a ``StopIteration`` that it raises becomes the cause of a RuntimeError.

    Otherwise whoever asks for the next item would take it for the end of the data, and lose the rest silently (as PEP
    479 does for generators).
    """

    def call(*arguments: _P.args, **more: _P.kwargs) -> _R:
        try:
            return function(*arguments, **more)
        except StopIteration as error:
            raise RuntimeError(f"{what} raised StopIteration") from error

    return call


def plain(value: object) -> JSON:
    """Returns ``value`` in JSON's types: NaN and infinity as None, anything else that JSON has not as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
