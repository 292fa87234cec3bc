"""From samplers to tickets: occurrences, speculation without side effects, and order logs."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from minato_gpu import DataLoader as Loader
from minato_gpu.lanes.base import NoSample
from minato_gpu.samples import key_digest
from minato_gpu.sampling.delivered import DeliveredPositions
from minato_gpu.sampling.occurrences import Occurrences
from minato_gpu.sampling.order_log import OrderLog
from minato_gpu.sampling.orders import Order
from minato_gpu.sampling.samplers import Sampling
from minato_gpu.sampling.sources import Drawn, Source
from minato_gpu.sampling.speculation import Speculation


@pytest.fixture(autouse=True)
def the_generator_is_put_back() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def source(order: Any, *, batched: bool = True, number: int = 0, length: int | None = None) -> Source:
    """A source over ``order``."""
    data: Any = [None]
    arguments: dict[str, Any] = {"batch_sampler": order} if batched else {"batch_size": None, "sampler": order}
    loader: Any = DataLoader(data, **arguments)
    return Source(number, 5, Order(iter(order)), Sampling(loader), Occurrences(length, unique=False))


def drain(draw: Callable[[], Drawn | None]) -> list[Drawn]:
    """Everything."""
    return list(iter(draw, None))


# --- sources ------------------------------------------------------------------------------------------------


def test_batches_with_positions_and_occurrences() -> None:
    drawn = drain(source([[4, 5], (5, "a"), [], [5, 4, "a"]]).draw)
    assert [list(each.positions) for each in drawn] == [[0, 1], [2, 3], [4], [5, 6, 7]]
    assert [each.occurrences for each in drawn] == [None, [1, 0], None, [2, 1, 1]]
    assert drawn[1].keys == [5, "a"] and isinstance(drawn[2].keys[0], NoSample)


def test_single_keys() -> None:
    drawn = drain(source([7, (1, 2), 7], batched=False).draw)
    assert [(list(each.positions), each.keys, each.occurrences) for each in drawn] == [
        ([0], [7], None),
        ([1], [(1, 2)], None),
        ([2], [7], [1]),
    ]


def test_what_the_sampler_raises_passes_through() -> None:
    def order() -> Iterator[list[int]]:
        yield [1]
        raise OSError("index file")

    one = source(order())
    one.draw()
    with pytest.raises(OSError, match="index file"):
        one.draw()


@settings(deadline=None)
@given(
    st.lists(st.integers(-2, 6) | st.text("ab", max_size=1) | st.tuples(st.integers(0, 1)), max_size=60),
    st.sampled_from([None, 0, 4]),
)
def test_occurrences_count_like_a_counter(keys: list[Any], length: int | None) -> None:
    counted = Occurrences(length, unique=False)
    seen: Counter[Any] = Counter()
    for key in keys:
        expected = seen[key]
        seen[key] += 1
        assert (counted.count([key]) or [0]) == [expected]


_INDICES = st.integers(0, 6)


@given(
    st.lists(_INDICES, max_size=60) | st.lists(_INDICES | st.integers(-2, 1 << 70) | st.text("ab", max_size=1)),
    st.integers(0, 60),
    st.sampled_from([None, 0, 4, 7]),
    st.sampled_from([0, 300]),
)
def test_occurrences_as_they_were(keys: list[Any], at: int, length: int | None, threes: int) -> None:
    """As a save finds them: what the window holds has been counted, and has not come."""
    counted, then = Occurrences(length, unique=False), Occurrences(length, unique=False)
    counted.count([3] * threes + keys)
    then.count([3] * threes + keys[:at])
    assert counted.before(keys[at:]).planes() == then.planes()


@pytest.mark.parametrize("length", [None, 3])
def test_occurrences_of_a_key_that_comes_very_often(length: int | None) -> None:
    """More often than fits into one byte."""
    counted = Occurrences(length, unique=False)
    assert counted.count([2] * 700) == list(range(700))
    assert counted.count([1, 2]) == [0, 700]


@pytest.mark.parametrize(
    "key", [np.int64(3), torch.tensor(3), None, 2.5, frozenset({1}), {"a": [1]}, [1, 2], (1, [2])], ids=repr
)
def test_any_object_may_be_a_key(key: Any) -> None:
    """Samplers may yield what data sets take, hashable or not."""
    assert Occurrences(10, unique=False).count([key, key]) == [0, 1]


def test_an_item_that_is_no_batch_is_gone_once_told() -> None:
    """It takes no position and no place, and what an earlier run was told is not told again."""
    items: Any = [[4], 7, [5, 6], None, [8]]
    one, again = source(items), source(items)
    for keys in ([4], None, [5, 6], None, [8]):
        if keys is None:
            with pytest.raises(TypeError, match="not iterable"):
                one.draw()
        else:
            drawn = one.draw()
            assert drawn is not None and drawn.keys == keys
    assert (one.place, one.position, one.draw()) == (3, 4, None)
    again.delivered = DeliveredPositions(2, 3)
    again.skip()
    assert (again.place, again.position) == (2, 3)


def test_an_iteration_goes_on_after_an_item_that_is_no_batch() -> None:
    batches: Any = [[0, 1], 5, [2, 3]]
    iterator = iter(Loader(range(10), batch_sampler=batches))  # type: ignore[arg-type]
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(TypeError, match="not iterable"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[2, 3]]


def test_keys_with_equal_elements_are_one_key() -> None:
    """A batch sampler may cut a tensor into pieces: what a sample draws must not depend on where its key lies."""
    alike = [3, np.int64(3), torch.tensor(3), np.array(3), torch.tensor([1, 3])[1]]
    assert Occurrences(10, unique=False).count(alike) == [0, 1, 2, 3, 4]
    assert {key_digest(key) for key in alike} == {key_digest(3)}
    for make in (
        lambda: torch.tensor([1.5, 2]),
        lambda: np.array([1, 2]),
        lambda: (torch.tensor(1), "a"),
        lambda: [torch.tensor([1])],
        lambda: np.array(["a", None], object),
    ):
        assert Occurrences(10, unique=False).count([make(), make()]) == [0, 1]
        assert key_digest(make()) == key_digest(make())
    unlike = [torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([[1, 2]]), torch.tensor([2])]
    assert len({key_digest(key) for key in unlike}) == 4
    assert Occurrences(10, unique=False).count(unlike) is None, "each for the first time"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"shuffle": True}, True),
        ({"sampler": RandomSampler(range(10), replacement=True)}, False),
        ({"sampler": RandomSampler(range(10), num_samples=20)}, False),
        ({"sampler": RandomSampler(range(10), num_samples=5)}, True),
        ({"sampler": list(range(10))}, False),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(10)), 3, True)}, True),
        ({"batch_sampler": [[1, 2]]}, False),
        ({"batch_size": None}, True),
    ],
)
def test_samplers_that_never_repeat(arguments: dict[str, Any], expected: bool) -> None:
    assert Sampling(DataLoader(range(10), **arguments)).never_repeats == expected  # type: ignore[arg-type]


# --- speculation --------------------------------------------------------------------------------------------


def _own() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def _loader(*arguments: Any, **more: Any) -> Any:
    return DataLoader(*arguments, **more)


_LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: _loader(range(30), 4),
    "shuffled": lambda: _loader(range(30), 4, shuffle=True),
    "shuffled, own generator": lambda: _loader(range(30), 4, shuffle=True, generator=_own()),
    "sampler with its own": lambda: _loader(range(30), 4, sampler=RandomSampler(range(30), generator=_own())),
    "two generators": lambda: _loader(
        range(30),
        4,
        sampler=RandomSampler(range(30), generator=_own()),
        generator=_own(),
    ),
    "drawn while it runs": lambda: _loader(
        range(100),
        4,
        sampler=RandomSampler(range(100), replacement=True, num_samples=90, generator=_own()),
    ),
    "longer than the data set": lambda: _loader(
        range(30),
        4,
        sampler=RandomSampler(range(30), num_samples=75, generator=_own()),
    ),
    "single keys": lambda: _loader(range(30), None, shuffle=True),
}


def states(loader: Any) -> list[bytes]:
    """The states of all generators involved."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
    found = [loader.generator, getattr(sampler, "generator", None)]
    return [(torch.default_generator if g is None else g).get_state().numpy().tobytes() for g in found]


def plainly(loader: Any, draws_seed: bool) -> tuple[int, list[Any], list[bytes]]:
    """Seed, order and final states when all is drawn at the right time, as PyTorch does."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()) if draws_seed else 0
    return seed, list(loader._index_sampler), states(loader)


@pytest.mark.parametrize("draws_seed", [True, False])
@pytest.mark.parametrize("ahead", [0, 1, 5, 100])
@pytest.mark.parametrize("make", _LOADERS.values(), ids=_LOADERS.keys())
def test_drawn_ahead_is_as_drawn_at_the_right_time(make: Callable[[], Any], ahead: int, draws_seed: bool) -> None:
    """The order, the seed, and where the generators stand at the end; nothing moves before the epoch begins."""
    torch.manual_seed(3)
    expected = plainly(make(), draws_seed)
    torch.manual_seed(3)
    loader = make()
    before = states(loader)
    speculation = Speculation(loader, draws_seed=draws_seed)
    order = list(itertools.islice(speculation, ahead))
    assert states(loader) == before, "speculation moved a generator"
    assert speculation.holds()
    speculation.adopt()
    order += list(speculation)
    assert (speculation.seed, order, states(loader)) == expected


@pytest.mark.parametrize("make", [_LOADERS["shuffled"], _LOADERS["sampler with its own"]])
def test_a_generator_that_moved_ends_the_speculation(make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    loader = make()
    speculation = Speculation(loader, draws_seed=True)
    next(speculation)
    expected = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(expected, torch.rand(1)), "the consumer's own draws changed"
    next(speculation)
    assert not speculation.holds()
    torch.manual_seed(3)
    assert speculation.holds()


def test_other_generators_do_not_matter() -> None:
    loader = _LOADERS["shuffled, own generator"]()
    speculation = Speculation(loader, draws_seed=True)
    random.random()
    np.random.rand()
    loader_state = loader.generator.get_state()
    speculation.adopt()
    assert not torch.equal(loader.generator.get_state(), loader_state)


# --- order logs ---------------------------------------------------------------------------------------------


def replayed(log: OrderLog, order: Any, number: int = 0) -> list[tuple[list[int], list[Any], list[int] | None]]:
    """Positions, keys and occurrences of a whole epoch."""
    return [(list(each.positions), each.keys, each.occurrences) for each in log.replay(source(order, number=number))]


def test_what_was_recorded_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "new" / "order.log"
    log = OrderLog(path)
    assert not log.replays
    log.record(0, [(2, 3), (0, 1)])
    log.record(0, [(1, 2), (3, 5)])
    log.record(1, [(0, 1)])
    again = OrderLog(path)
    assert again.replays
    assert replayed(again, [["a", "b"], ["a", "c"], ["a"]]) == [
        ([2, 0], ["a", "a"], [1, 0]),
        ([1, 3, 4], ["b", "c", "a"], [0, 0, 2]),
    ]
    assert replayed(again, [["z"]], number=1) == [([0], ["z"], [0])]


def write(path: Path, *batches: Any) -> OrderLog:
    path.write_text("".join(json.dumps({"epoch": 0, "positions": spans}) + "\n" for spans in batches))
    return OrderLog(path)


def test_a_log_that_does_not_match_is_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [[0, 2]], [[2, 4]])
    with pytest.raises(ValueError, match="names positions that epoch 0 lacks"):
        replayed(log, [[1, 2], [3]])
    with pytest.raises(ValueError, match="ends before epoch 0 does"):
        replayed(log, [[1, 2], [3, 4], [5]])
    with pytest.raises(ValueError, match="ends before epoch 0 does"):
        replayed(log, [[1, 2], [3, 4, 5]])
    with pytest.raises(ValueError, match="has no epoch 3"):
        replayed(log, [[1]], number=3)


def test_a_position_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="order_log"):
        replayed(write(tmp_path / "log", [[0, 2]], [[1, 3]]), [[1, 2], [3]])


@pytest.mark.parametrize(
    "line", ["nonsense", "{}", '{"epoch": 0}', '{"epoch": 0, "positions": 5}', "[]", '{"epoch": 0, "positions": [[1]]}']
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "log"
    path.write_text('{"epoch": 0, "positions": [[0, 1]]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"line 2 of .*log is not a recorded batch"):
        OrderLog(path)


def test_an_empty_file_is_recorded_into(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    assert not OrderLog(tmp_path / "log").replays
