"""The cost model: what it learns, what it remembers, what that takes, and how it reports its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minato_gpu.scheduling import history as history_module
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.history import History


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
