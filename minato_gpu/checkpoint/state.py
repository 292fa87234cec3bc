"""The form of a saved state: plain data (dicts, lists, tuples, strings, numbers, booleans, None), and its checks.

A state may come from an untrusted file, so it holds no pickle, and nothing in it is used before it has been checked.
What a user's own sampler or data set put into its state is handed to that alone, unchecked.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import numpy as np
import torch

from minato_gpu.lanes.base import NoSample
from minato_gpu.samples import JSON, Key, Value
from minato_gpu.sampling.delivered_positions import DeliveredPositions
from minato_gpu.sampling.packing import packed

FORMAT, VERSION = "minato_gpu.DataLoader", 6
MOST_ABOVE = 1 << 20  # bytes of the bit map of delivered positions: eight million samples, more than a window holds
_LARGEST = (1 << 63) - 1
_DEPTH = 8
_QUOTED = 60  # characters of a value in a message

_AS_THEY_ARE = {int, str, bool, float, type(None)}  # keys that are plain data
_NUMPYS = {
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{sign}int{8 << size}" for sign in ("", "u") for size in range(4)),
}
"""Dtypes of NumPy's scalars whose values are plain data."""

State = dict[str, JSON]


def header(kind: str, epoch: int, seeds: tuple[int, int, int], *, begun: bool) -> State:
    """Returns the entries that every state begins with.

    ``kind``: "map" or "iterable"; ``begun`` is False between two epochs, where ``kind`` is always "map". ``seeds``: the
    epoch's, the workers', and the number of the epoch in which the workers started.
    """
    names = ("format", "version", "kind", "epoch", "begun", "seed", "workers_seed", "workers_epoch")
    return dict(zip(names, (FORMAT, VERSION, kind, epoch, begun, *seeds), strict=True))


def check(state: JSON) -> State:
    """Returns a shallow copy of the state, if it is one of this version. Checked are the entries of ``header``, the
    generators, and that 'source' is a mapping; nothing else.

    Raises TypeError or ValueError that says what is wrong with it.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state_dict() takes what state_dict() returned, a dict, not {type(state).__name__}")
    if state.get("format") != FORMAT:
        raise ValueError(f"not a state of minato_gpu.DataLoader: 'format' is {quoted(state.get('format'))}")
    version = state.get("version")
    if not alike(version, VERSION) or isinstance(version, bool):
        raise ValueError(
            f"a state of version {quoted(version)}; this minato_gpu reads version {VERSION}. Resume with the "
            "minato_gpu that saved it, or begin the epoch anew"
        )
    out = dict(state)
    choice(out, "kind", ("map", "iterable"))
    choice(out, "begun", (True, False))
    number(out, "epoch")
    for name in ("seed", "workers_seed"):
        number(out, name, largest=(1 << 64) - 1)
    number(out, "workers_epoch", least=-_LARGEST)
    generators(mapping(out, "generators"))
    mapping(out, "source")
    return out


def generators(states: Mapping[str, JSON]) -> dict[str, torch.Tensor]:
    """Returns the states of generators by role. Raises ValueError for another role, and for what is no state."""
    for name in states:
        if name not in ("loader", "sampler", "default"):
            raise ValueError(f"state: 'generators' names {quoted(name)}; it may name 'loader', 'sampler' and 'default'")
    return {name: generator_state(states, name) for name in states}


def generator_state(states: Mapping[str, JSON], name: str) -> torch.Tensor:
    """Returns ``states[name]`` as a uint8 tensor that a torch.Generator takes. Raises ValueError if none does."""
    data = torch.frombuffer(bytearray(unpacked(states, name) or b"\0"), dtype=torch.uint8)
    try:
        torch.Generator().set_state(data)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"state: {name!r} holds no state of a torch.Generator") from error
    return data


# --- fields -------------------------------------------------------------------------------------------------


def quoted(value: JSON) -> str:
    """Returns the first 60 characters of the ``repr`` of a value of an untrusted state, for a message."""
    return repr(value)[:_QUOTED]


def alike(one: Value, other: Value) -> bool:
    """Returns whether two parts of states are equal.

    A user's own part may hold tensors and arrays, whose ``==`` is no answer. What cannot be compared counts as
    different.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    try:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            return one.dtype == other.dtype and np.array_equal(one, other)
        return bool(one == other)
    except Exception:
        return False


@contextmanager
def within_depth() -> Iterator[None]:
    """Raises ValueError in place of RecursionError: what is nested too deeply is a damaged state."""
    try:
        yield
    except RecursionError as error:
        raise ValueError("state: nested too deeply") from error


def number(data: Mapping[str, JSON], name: str, least: int = 0, largest: int = _LARGEST) -> int:
    """Returns ``data[name]``, a whole number (no bool) from ``least`` to ``largest``. Raises ValueError otherwise."""
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= largest:
        raise ValueError(f"state: {name!r} must be a whole number from {least} to {largest}, got {quoted(value)}")
    return value


def choice(data: Mapping[str, JSON], name: str, choices: Iterable[JSON]) -> JSON:
    """Returns ``data[name]``, one of ``choices`` and of its very type. Raises ValueError for anything else."""
    value, choices = data.get(name), list(choices)
    if not any(type(value) is type(each) and value == each for each in choices):
        raise ValueError(f"state: {name!r} must be one of {choices}, got {quoted(value)}")
    return value


def mapping(data: Mapping[str, JSON], name: str) -> Mapping[str, JSON]:
    """Returns ``data[name]``, a mapping. Raises ValueError for anything else."""
    value = data.get(name)
    if not isinstance(value, Mapping):
        raise ValueError(f"state: {name!r} must be a dict, got {quoted(value)}")
    return value


def sequence(data: Mapping[str, JSON], name: str) -> list[JSON]:
    """Returns ``data[name]``, a list or a tuple, as a list. Raises ValueError for anything else."""
    value = data.get(name)
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"state: {name!r} must be a list, got {quoted(value)}")
    return list(value)


def unpacked(data: Mapping[str, JSON], name: str) -> bytes:
    """Returns the bytes that the base64 string ``data[name]`` encodes. Raises ValueError if it is none."""
    value = data.get(name)
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise ValueError(f"state: {name!r} must be a base64 string, got {quoted(value)}")


# --- keys ---------------------------------------------------------------------------------------------------


def plain_batch(keys: list[Key]) -> tuple[JSON, ...]:
    """Returns the keys of a batch as plain data, in a tuple: states that share it cannot change it."""
    return tuple(keys) if _AS_THEY_ARE.issuperset(map(type, keys)) else tuple(map(plain_key, keys))


def batches_of(data: Mapping[str, JSON]) -> list[list[Key]]:
    """Returns the batches of ``data["drawn"]`` as lists of keys; ``plain_batch`` made them plain. Raises ValueError for
    anything else, and for a batch of no keys."""
    batches = [[key_of(key) for key in sequence({"drawn": plain}, "drawn")] for plain in sequence(data, "drawn")]
    if not all(batches):
        raise ValueError("state: a batch of no keys")
    return batches


def plain_key(key: Key, depth: int = 0) -> JSON:
    """Returns a data set's key as plain data: a number or a string as it is, another as a tuple of a word and the rest.

    NumPy's numbers are stored with their dtype. Subclasses of ``int`` and ``str`` are stored as plain ones, with the
    same ``key_digest``. Raises ValueError for a key that cannot be stored, such as one nested deeper than 8 levels.
    ``depth``: the levels that it is in already.
    """
    if isinstance(key, np.generic):
        if key.dtype.name in _NUMPYS:
            return key.dtype.name, key.item()
        key = key.item()
    if type(key) in _AS_THEY_ARE:
        return key
    if isinstance(key, int):
        return int(key)
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, NoSample):
        return ("none",)
    if isinstance(key, bytes):
        return "bytes", packed(key)
    if type(key) in (tuple, list) and depth < _DEPTH:
        return type(key).__name__, *(plain_key(each, depth + 1) for each in key)
    raise ValueError(
        f"the sampler's order cannot be stored: key {quoted(key)} is a {type(key).__name__}, and only numbers, "
        f"strings, bytes, and tuples and lists of these can be, {_DEPTH} deep at most. Let the sampler yield such keys "
        "(indices of a list of others, say)"
    )


def key_of(plain: JSON, depth: int = 0) -> Key:
    """Returns the key that ``plain_key`` made plain. Raises ValueError for anything else, and for deeper nesting."""
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    if isinstance(plain, (list, tuple)) and plain and depth < _DEPTH:
        word, *parts = plain
        if word == "none" and not parts:
            return NoSample()
        if word == "bytes" and len(parts) == 1:
            return unpacked({"key": parts[0]}, "key")
        if word == "tuple":
            return tuple(key_of(part, depth + 1) for part in parts)
        if word == "list":
            return [key_of(part, depth + 1) for part in parts]
        if isinstance(word, str) and word in _NUMPYS and len(parts) == 1:
            return _numpys(word, parts[0])
    raise ValueError(f"state: not a key of a data set: {quoted(plain)}")


def _numpys(name: str, value: JSON) -> Key:
    """Returns the NumPy scalar of dtype ``name`` with this value. Raises ValueError if the dtype has no such value."""
    kind = np.dtype(name).type
    if type(kind().item()) is type(value):
        with suppress(OverflowError), np.errstate(over="ignore"):
            return kind(value)
    raise ValueError(f"state: not a key of dtype {name}: {quoted(value)}")


# --- what was delivered -------------------------------------------------------------------------------------


def plain_positions(delivered: DeliveredPositions) -> State:
    """Returns a record of delivered positions as plain data."""
    out: State = {"batches": delivered.batches, "below": delivered.low, "above": packed(delivered.bits())}
    return {**out, "failed": delivered.failed} if delivered.failed else out


def positions_of(progress: Mapping[str, JSON]) -> DeliveredPositions:
    """Returns the record that ``plain_positions`` made plain. Raises ValueError for anything else."""
    if len(above := unpacked(progress, "above")) > MOST_ABOVE:
        raise ValueError("state: 'above' is longer than any window")
    delivered = DeliveredPositions.of_bits(number(progress, "batches"), number(progress, "below"), above)
    if progress.get("failed") is not None:
        delivered.failed = number(progress, "failed")
    return delivered
