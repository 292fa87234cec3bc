"""The cost model: what it learns, what it remembers, what that takes, and how it reports its errors; and what a
micro-batch costs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minato_gpu.estimates.estimator import Estimator, Observed
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Work
from minato_gpu.samples import TicketId
from minato_gpu.scheduling import history as history_module
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.history import History
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
from minato_gpu.scheduling.policy import Policy


def observe(model: CostModel, keys: np.ndarray, features: np.ndarray, seconds: np.ndarray) -> None:
    for start in range(0, len(keys), 32):
        part = slice(start, start + 32)
        model.predict("cpu", features[part], keys[part])
        model.observe_many("cpu", keys[part], features[part], seconds[part])


@pytest.fixture
def photographs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys, features (encoded bytes, pixels) and costs: a part per pixel, a part per byte and a constant."""
    rng = np.random.default_rng(0)
    pixels = rng.lognormal(13, 1.2, 600)
    nbytes = pixels * rng.lognormal(-1.5, 0.5, 600)
    seconds = (1e-3 + 8e-9 * pixels + 2e-8 * nbytes) * rng.lognormal(0, 0.25, 600)
    return np.arange(600), np.stack([nbytes, pixels], axis=1), seconds


def test_the_first_epoch_learns_from_features_and_the_second_from_history(
    photographs: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    keys, features, seconds = photographs
    model = CostModel(("cpu",), features=2, length=len(keys))
    observe(model, keys, features, seconds)
    first = model.report()
    model.reset_report()
    again = seconds * np.random.default_rng(1).lognormal(0, 0.05, len(seconds))
    observe(model, keys, features, again)
    second = model.report()
    assert isinstance(first["log_sigma"], float)
    assert isinstance(second["log_sigma"], float)
    assert 0.2 < first["log_sigma"] < 0.32  # the noise that features cannot explain is 0.25
    assert second["log_sigma"] < 0.12
    assert second["rank_correlation"] is not None
    assert second["rank_correlation"] > 0.98
    total = model.predict("cpu", features, keys).sum()
    assert total == pytest.approx(seconds.sum(), rel=0.1)


def test_without_features_the_mean_is_predicted_even_when_few_samples_make_most_of_it() -> None:
    model = CostModel(("cpu",))
    costs = np.where(np.arange(4000) % 20 == 0, 0.12, 0.003)
    for start in range(0, 4000, 50):
        model.observe_many("cpu", None, None, costs[start : start + 50])
    assert model.predict("cpu")[0] == pytest.approx(costs.mean(), rel=0.15)


def test_features_that_are_not_given_do_not_spoil_the_model(
    photographs: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> None:
    keys, features, seconds = photographs
    model = CostModel(("cpu",), features=2)
    observe(model, keys, features, seconds)
    before = model.predict("cpu", features[:5])
    predicted = model.predict("cpu", [[np.nan, np.nan], features[0].tolist()])
    assert predicted[1] == pytest.approx(before[0])
    assert np.isfinite(predicted).all()


@pytest.mark.parametrize("keys", [["a", ("b", 1)], [-1, 10], [True, 3.5], [0, "x"], [[3, 1], {"a": [2]}]])
def test_any_key_can_be_remembered(keys: list[object]) -> None:
    history = History(5)
    history.write(keys, np.log([0.25, 4.0]))
    assert np.exp(history.read(keys)) == pytest.approx([0.25, 4.0], rel=1e-3)
    assert np.isnan(history.read(["other"])).all()
    assert history.recorded == 2


def test_keys_that_never_come_again_take_no_more_and_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of a shuffled batch sampler."""
    monkeypatch.setattr(history_module, "MOST", 3)
    history = History(5)
    for key in range(6):
        history.write([[key, key + 1], 4], np.log([1.0 + key, 9.0]))
    assert history.recorded == 3 + 1
    costs = np.exp(history.read([[key, key + 1] for key in range(6)]))
    assert np.isnan(costs[:3]).all() and costs[3:] == pytest.approx([4.0, 5.0, 6.0], rel=1e-3)


def test_a_tensor_is_remembered_by_what_it_holds() -> None:
    """A sampler makes another object of it in each epoch."""
    history = History(None)
    history.write([torch.tensor([1, 2])], np.log([2.0]))
    assert np.exp(history.read([torch.tensor([1, 2])])) == pytest.approx([2.0], rel=1e-3)


# --- what a micro-batch costs a GPU beside its samples, and what the scheduler makes of it ----------------------

FIXED_S, EACH_S, MOST = 15e-3, 0.1e-3, 128


def test_what_a_micro_batch_takes_beside_its_samples_is_found_from_their_sizes() -> None:
    cost = MicroBatchCost(MOST)
    for size in (1, 2, 8, 4, 16, 64, 3, 128, 20, 5) * 4:
        found = cost.of_samples(size, FIXED_S + size * EACH_S)
    assert cost.fixed_s == pytest.approx(FIXED_S, rel=0.02)
    assert found == pytest.approx(5 * (EACH_S + FIXED_S / MOST), rel=0.1)


def test_the_estimator_learns_what_samples_cost_in_a_full_micro_batch() -> None:
    found = []
    for micro_batches in (MicroBatchCost(MOST), None):
        estimator = Estimator(CostModel(("cpu", "device")), ("cpu", "device"), micro_batches)
        for size in (1, 2, 4, 8, 16, 64, 1, 2) * 20:
            seconds = [(FIXED_S + size * EACH_S) / size] * size
            estimator.measured("device", Observed([None] * size, [], seconds, sum(seconds)))
        (_, device, _) = estimator.of_features([TicketId(0)], [None], [None])
        assert device is not None
        found += device
    learned, plain = found
    assert learned < 3 * (EACH_S + FIXED_S / MOST) < plain / 1.5


def test_what_was_copied_from_another_loader_is_not_learned() -> None:
    seen = Observed(["a", "b", "c"], [TicketId(0), TicketId(1), TicketId(2)], [1.0, 1e-4, 3.0], 8.0)
    assert seen.without({TicketId(1)}) == Observed(["a", "c"], [TicketId(0), TicketId(2)], [1.0, 3.0], 8.0 - 1e-4)


def test_a_gpu_of_which_nothing_is_known_and_that_stalls_is_given_full_micro_batches() -> None:
    """Headers are read before any lane has prepared a sample, and each micro-batch takes much longer than its samples:
    few at once would look costly, and fewer would follow."""
    samples, rng = 64 * 128, np.random.default_rng(0)
    cpu = 12e-3 * rng.lognormal(0.0, 0.6, samples)
    device = np.full(samples, EACH_S)
    work = Work(
        cpu=cpu,
        predicted_cpu=cpu,
        batch=128,
        epoch_samples=(samples,),
        slots=14,
        devices=1,
        device_run_s=0.3,
        device=device,
        predicted_device=device + 0.3 / MOST,
        header_s=0.4e-3,
    )
    policy = Policy(window=28 * 128, max_lateness=8, micro_batch=MOST, device_s=0.1, device_ahead=2, inspect=True)
    loader = VirtualLoader(work, policy, trip_s=5e-4)
    outcome = loader.run()
    assert samples / outcome.makespan_s > 0.85 * (14 / cpu.mean() + MOST / (0.3 + MOST * EACH_S))


@pytest.mark.parametrize(("batch", "delivers"), [(8, True), (14, False)])
def test_an_idle_gpu_is_given_few_samples_where_they_complete_a_batch_for_a_consumer_that_waits(
    batch: int, delivers: bool
) -> None:
    """Two workers are at samples of a minute each, others such wait for them; nine of the GPU's come after these."""
    samples = 2 + 7 + 9
    cpu, device = np.full(samples, 1.0), np.full(samples, EACH_S)
    cpu[2:9], device[2:9] = 60.0, 1e4
    work = Work(
        cpu=cpu,
        predicted_cpu=cpu,
        batch=batch,
        epoch_samples=(samples,),
        slots=2,
        devices=1,
        device_run_s=FIXED_S,
        device=device,
        predicted_device=device,
        stagger_s=0.0,
    )
    policy = Policy(
        window=64, fixed=False, max_lateness=8, micro_batch=MOST, device_s=0.1, device_ahead=2, inspect=True
    )
    outcome = VirtualLoader(work, policy).run()
    assert (outcome.first_batch_s < 1.0) is delivers
