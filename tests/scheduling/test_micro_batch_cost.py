"""What a micro-batch costs a GPU beside its samples, and what the scheduler makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from minato_gpu.estimates.estimator import Estimator, Observed
from minato_gpu.lab.simulation.virtual_loader import VirtualLoader
from minato_gpu.lab.simulation.work import Array, Work
from minato_gpu.samples import TicketId
from minato_gpu.scheduling.costs import CostModel
from minato_gpu.scheduling.micro_batch_cost import MicroBatchCost
from minato_gpu.scheduling.policy import Policy

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


def _work(cpu: Array, device: Array, run_s: float, header_s: float | None = None) -> Work:
    """Batches of 128 for 14 workers and a GPU that takes ``run_s`` for each micro-batch beside its samples."""
    return Work(
        cpu=cpu,
        predicted_cpu=cpu,
        batch=128,
        epoch_samples=(len(cpu),),
        slots=14,
        devices=1,
        device_run_s=run_s,
        device=device,
        predicted_device=device + run_s / MOST,
        header_s=header_s,
    )


def test_a_gpu_of_which_nothing_is_known_and_that_stalls_is_given_full_micro_batches() -> None:
    """Headers are read before any lane has prepared a sample, and each micro-batch takes much longer than its samples:
    few at once would look costly, and fewer would follow."""
    samples, rng = 64 * 128, np.random.default_rng(0)
    cpu = 12e-3 * rng.lognormal(0.0, 0.6, samples)
    device = np.full(samples, EACH_S)
    work = _work(cpu, device, run_s=0.3, header_s=0.4e-3)
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
