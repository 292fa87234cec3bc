"""Under Hugging Face's Accelerate, batches still come from this loader, with all that it was told."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Costly, Made, Streams, draw
from tests.support.numbers import PIPELINE, Numbers
from tests.support.programs import RANKS, results_of_ranks


@pytest.fixture(scope="module")
def program() -> Any:
    """What the ranks run."""
    return importlib.import_module("tests.tools.accelerate_program")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, program: Any) -> list[dict[str, Any]]:
    """What each of two ranks has seen."""
    folder = tmp_path_factory.mktemp("ranks")
    return results_of_ranks(folder, program.__name__, str(folder))


def test_every_sample_once_on_one_of_the_ranks(ranks: list[dict[str, Any]], program: Any) -> None:
    """In the second epoch too, which a new loader went on with."""
    for epoch in range(2):
        shares = [rank["seen"][epoch] for rank in ranks]
        assert [len(share) for share in shares] == [program.LENGTH // RANKS] * RANKS
        assert sorted(label for share in shares for label in share) == list(range(program.LENGTH))
    assert ranks[0]["seen"][0] != ranks[0]["seen"][1]


def test_what_was_received_is_what_the_loader_counts(ranks: list[dict[str, Any]], program: Any) -> None:
    batches = program.LENGTH // RANKS // program.BATCH
    for rank in ranks:
        assert rank["stats"]["samples_delivered"] == len(rank["seen"][0])
        assert rank["stats"]["batches_delivered"] == rank["stats"]["device"]["batches"] == batches
        assert rank["resumed"]["batches_delivered"] == batches - program.LEFT_AT


def prepared(accelerate: Any, loader: DataLoader[Any], **configuration: bool) -> Any:
    """The loader, prepared by an Accelerator of this process alone."""
    config = accelerate.utils.DataLoaderConfiguration(**configuration)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
    return importlib.import_module("minato_gpu.accelerated").prepare(accelerator, loader)


def test_prepare_alone_is_refused(accelerate: Any) -> None:
    """It would replace the loader by torch's without a word."""
    loader = DataLoader(Costly(8), 2)
    with pytest.raises(TypeError, match=r"minato_gpu\.accelerated\.prepare"):
        accelerate.Accelerator(cpu=True).prepare(loader)


def test_skipping_batches_would_lose_the_pipeline(accelerate: Any) -> None:
    """As the Trainer does that resumes in the middle of an epoch: PyTorch's loader would deliver raw fields."""
    plain, piped = (prepared(accelerate, DataLoader(Numbers(), 50, pipeline=each)) for each in (None, PIPELINE))
    assert len(list(accelerate.skip_first_batches(plain, 1))) == len(list(piped)) - 1 == 2
    with pytest.raises(RuntimeError, match=r"without its pipeline.*ignore_data_skip=True"):
        list(accelerate.skip_first_batches(piped, 1))


def test_a_data_set_that_workers_iterate(accelerate: Any) -> None:
    with pytest.raises(ValueError, match="dispatch_batches=False"):
        prepared(accelerate, DataLoader(Streams([6]), 2, num_workers=1))
    loader = prepared(accelerate, DataLoader(Streams([6]), 2, num_workers=1), dispatch_batches=False)
    assert [batch[:, 1].tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
    assert loader.stats()["batches_delivered"] == 3


def test_training_that_draws_goes_on(accelerate: Any) -> None:
    """Accelerate reads a batch ahead, and training has drawn for all before it: a state has the generator as it is."""

    def trained(state: Any = None, stop: int | None = None) -> Any:
        loader = prepared(accelerate, DataLoader(Made(16, draw), 4, shuffle=True, num_workers=1, collate_fn=list))
        if state is not None:
            loader.load_state_dict(state)
        got: list[Any] = []
        for _ in range(2):
            for batch in loader:
                got.append((batch, torch.rand(()).item()))
                if len(got) == stop:
                    return got, loader.state_dict()
        return got

    torch.manual_seed(3)
    reference = trained()
    torch.manual_seed(3)
    got, state = trained(stop=2)
    torch.manual_seed(9)
    assert got + trained(state) == reference


def test_epochs_that_are_left_early_go_on(accelerate: Any) -> None:
    """Accelerate does not count them: its sampler draws the same order again, and a resume goes on in that."""

    def trained(steps: list[int], state: Any = None) -> Any:
        data = DataLoader(Made(16, torch.tensor), 2, shuffle=True)
        loader = prepared(accelerate, data, use_seedable_sampler=True)
        if state is not None:
            loader.load_state_dict(state)
        got = []
        for most in steps:
            for step, batch in enumerate(loader, start=1):
                got.append(batch.tolist())
                state = loader.state_dict()
                if step == most:
                    break
        return got, state, loader.state_dict()

    whole_epoch = 9  # one step more than there are, so that the loop comes to its end
    cases = [  # by which of the states they go on: that of the last batch, or one that was saved after the loop
        (0, [3, 2], [1, whole_epoch], [3, 3, whole_epoch]),
        (0, [3, whole_epoch], [whole_epoch, 2], [3, whole_epoch, whole_epoch, 2]),
        (0, [whole_epoch, 2], [6, whole_epoch], [whole_epoch, 8, whole_epoch]),
        *((1, begun, [whole_epoch, 2], [*begun, whole_epoch, 2]) for begun in ([8], [3, 8], [whole_epoch, 8])),
    ]
    for which, before, after, whole in cases:
        torch.manual_seed(3)
        reference, *_ = trained(whole)
        torch.manual_seed(3)
        got, *states = trained(before)
        torch.manual_seed(3)
        assert got + trained(after, states[which])[0] == reference
    with pytest.raises(ValueError, match="'iteration' must be a whole number"):
        trained([1], {**states[0], "iteration": "3"})


def test_accelerate_is_only_needed_where_it_is_used() -> None:
    code = "import sys, minato_gpu; sys.exit('accelerate' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
