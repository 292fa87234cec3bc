"""Whether an object is what it was."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from minato_gpu.fingerprints import fingerprint


class Scale:
    """An object of the user's own that is called."""

    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, value: Any) -> Any:
        return value * self.by

    def twice(self, value: Any) -> Any:
        return 2 * self(value)


def _times(value: Any, by: Any) -> Any:
    return value * by


def _closure(by: Any) -> Callable[[Any], Any]:
    return lambda value: value * by


def _default(by: Any) -> Callable[[Any], Any]:
    def times(value: Any, by: Any = by) -> Any:
        return value * by

    return times


def _keyword(by: Any) -> Callable[[Any], Any]:
    def times(value: Any, *, by: Any = by) -> Any:
        return value * by

    return times


def _attribute(by: Any) -> Callable[[Any], Any]:
    def times(value: Any) -> Any:
        return value * times.by  # type: ignore[attr-defined]

    times.by = by  # type: ignore[attr-defined]
    return times


def _in_itself(by: Any) -> Callable[[Any], Any]:
    def times(value: Any) -> Any:
        return value * by if value else times(1)

    return times


KINDS: dict[str, Callable[[Any], Any]] = {
    "partial": lambda by: partial(_times, by=by),
    "closure": _closure,
    "default": _default,
    "keyword": _keyword,
    "attribute": _attribute,
    "function in its own closure": _in_itself,
    "object": Scale,
    "method": lambda by: Scale(by).twice,
    "object in a function in a list": lambda by: [_closure(Scale(by))],
}
SETTINGS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "dict": ({"a": 1}, lambda by: by.update(a=2)),
    "list": ([1, [2]], lambda by: by[1].append(3)),
    "array": (np.zeros(100_000), lambda by: by.fill(1)),
    "array with gaps": (np.zeros((300, 300)).T[::2], lambda by: by.fill(1)),
    "tensor": (torch.zeros(100_000), lambda by: by.fill_(1)),
    "object": (Scale(1), lambda by: setattr(by, "by", 2)),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_settings_are_told_apart(kind: str, setting: str) -> None:
    given, change = SETTINGS[setting]
    by = copy.deepcopy(given)
    value = KINDS[kind](by)
    found = fingerprint(value)
    assert found is not None
    assert fingerprint(value) == found
    change(by)
    assert fingerprint(value) not in (found, None)


def test_a_function_that_is_defined_anew_under_its_name_is_another() -> None:
    found = []
    for body in ("a + 1", "a + 2", "a - 1", "a + b", "(lambda c: c + 1)(a)", "(lambda c: c + 2)(a)", "a + 1"):
        names: dict[str, Any] = {}
        exec(f"def same(a, b):\n    return {body}", names)
        found.append(fingerprint(names["same"]))
    assert None not in found
    assert found[0] == found[-1]
    assert len(set(found)) == len(found) - 1


@pytest.mark.parametrize("cached", ["lru_cache", "cache", "lru_cache(maxsize=2)"])
def test_a_function_under_a_cache_that_is_defined_anew_is_another(cached: str) -> None:
    """It is a module's, and pickled by its name."""
    found, module = [], ModuleType("tests.defined_anew")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        for body in ("a + 1", "a + 2", "a - 1", "a + 1"):
            exec(f"import functools\n@functools.{cached}\ndef same(a):\n    return {body}", module.__dict__)
            assert pickle.loads(pickle.dumps(module.same)) is module.same
            found.append(fingerprint(partial(module.same, 1)))
            module.same(1)
            assert fingerprint(partial(module.same, 1)) == found[-1]
    assert None not in found
    assert found[0] == found[-1]
    assert len(set(found)) == len(found) - 1


def test_functions_that_take_other_arguments_are_told_apart() -> None:
    """The code of their bodies is the same."""
    found = []
    for arguments in ("a, b", "a, *b", "a, **b", "*a, b", "*, a, b", "a, *, b", "a, /, b", "a, b, /", "*b, **a"):
        names: dict[str, Any] = {}
        exec(f"def same({arguments}):\n    return 1", names)
        found.append(fingerprint(names["same"]))
    assert None not in found
    assert len(set(found)) == len(found)


def test_of_some_objects_it_cannot_be_told() -> None:
    assert fingerprint(partial(_times, by=threading.Lock())) is None
    assert fingerprint(_closure(open)) is not None
