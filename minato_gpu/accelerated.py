"""Loaders in Hugging Face's Accelerate, whose own ``prepare`` would put PyTorch's DataLoader in a loader's place.

``Accelerator.prepare`` makes a DataLoader anew, of torch's class and with torch's arguments alone, around a batch
sampler that shares the batches out to ranks. ``prepare`` here lets it do so, takes the shared batches, and puts a
loader of the original's class, with all its arguments, into the place of torch's. What Accelerate adds around a loader
stays: it looks one batch ahead, so that gradient accumulation knows the last one, and counts what
``gather_for_metrics`` leaves out.

Decision: a function that the user calls, not a patch of Accelerate's module, which would change other loaders too. The
loader refuses to be prepared without it, rather than be replaced unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from minato_gpu.checkpoint import global_generator
from minato_gpu.checkpoint.state import number
from minato_gpu.loader import DataLoader, accelerating
from minato_gpu.samples import Value


class PreparedLoader(DataLoaderShard):
    """One rank's share of a loader, as Accelerate prepares it.

    Unknown attributes (``stats``, say) are ``base_dataloader``'s.
    """

    iteration: int
    _ahead = 0  # batches that were read from the loader, and not handed on
    _epoch_uncounted = False  # the last batch was handed on, but ``iteration`` does not count the epoch yet

    @classmethod
    def around(cls, shard: Any, loader: DataLoader[Any]) -> PreparedLoader:
        """Returns a copy of ``shard``, which Accelerate has made, around ``loader``."""
        prepared = cls.__new__(cls)
        prepared.__dict__.update(shard.__dict__)
        # saved with the model it would be one file for all ranks, where each has a state of its own
        prepared.__dict__.update(base_dataloader=loader, use_stateful_dataloader=False, _is_accelerate_prepared=True)
        if loader.pipeline is not None:
            prepared.__dict__["collate_fn"] = _refuse_to_skip  # which skip_first_batches takes, and nobody else
        return prepared

    def _update_state_dict(self) -> None:
        """Records whether a batch was read ahead. Accelerate calls it after each batch, and would make a state here."""
        self._ahead = 0 if self.end_of_dataloader else 1
        self._epoch_uncounted = self.end_of_dataloader

    def __iter__(self) -> Iterator[Value]:
        try:
            yield from super().__iter__()
        finally:  # counted by now, or left at its last batch and not to be
            self._epoch_uncounted = False

    def state_dict(self) -> dict[str, Value]:
        """Returns where this rank stands (see ``DataLoader.state_dict``). Save it for each rank."""
        loader: DataLoader[Any] = self.base_dataloader
        state = loader.state_dict(ahead=self._ahead)
        if self._ahead and loader.num_workers > 0 and state.get("global"):
            # training has used all batches but the one that is read ahead, and has drawn for them
            state["global"] = global_generator.plain()
        return {**state, "iteration": self.iteration + self._epoch_uncounted}

    def load_state_dict(self, state_dict: dict[str, Value]) -> None:
        """Lets the next epoch go on from a state of this rank (see ``DataLoader.load_state_dict``)."""
        # Accelerate's own count of epochs, by which it shuffles: one that is left early is not counted
        iteration = number(state_dict, "iteration") if "iteration" in state_dict else None
        self.base_dataloader.load_state_dict(state_dict)
        self._ahead, self._epoch_uncounted = 0, False
        self.iteration = state_dict.get("epoch", self.iteration) if iteration is None else iteration


def prepare(accelerator: Any, loader: DataLoader[Any]) -> PreparedLoader:
    """Returns what ``accelerator.prepare`` would, around a new loader of the same class and arguments.

    Pipeline, lanes, lateness, device and all other arguments are kept. May be given to ``accelerator.prepare`` with
    model and optimizer afterwards, which leaves it as it is. ``stats()`` counts what this rank has read. To go on in
    the middle of an epoch, save ``state_dict()`` of every rank and load it on the same rank (``skip_first_batches``
    would make a loader of torch's class).

    Raises ValueError where Accelerate would read all batches on one rank and hand them out (``dispatch_batches``).
    """
    token = accelerating.set(True)
    try:
        shard = accelerator.prepare_data_loader(loader)
    finally:
        accelerating.reset(token)
    known = accelerator._dataloaders
    at = next(number for number, each in enumerate(known) if each is shard)
    if not hasattr(shard, "_update_state_dict") or type(shard) is not DataLoaderShard:
        del known[at]
        raise ValueError(
            "minato_gpu.accelerated.prepare() needs every rank to read its own batches; pass "
            "dataloader_config=DataLoaderConfiguration(dispatch_batches=False) to Accelerator"
        )
    known[at] = PreparedLoader.around(shard, _like(loader, shard.base_dataloader))
    prepared: PreparedLoader = known[at]
    return prepared


def _refuse_to_skip(samples: Value) -> Value:
    """Raises RuntimeError in place of collating what a loader of torch's class delivers without the pipeline."""
    raise RuntimeError(
        "accelerate.skip_first_batches() puts PyTorch's DataLoader in this loader's place, without its pipeline. Load "
        "state_dict() instead. With Hugging Face's Trainer save at the end of epochs, or resume with "
        "ignore_data_skip=True, which begins the epoch again"
    )


def _like(loader: DataLoader[Any], other: TorchDataLoader[Any]) -> DataLoader[Any]:
    """Returns a loader with the arguments of ``loader``, over the data set and batches of ``other``."""
    if isinstance(other.dataset, IterableDataset):
        cutting: dict[str, Value] = {"batch_size": other.batch_size, "drop_last": other.drop_last}
    elif other.batch_sampler is not None:
        cutting = {"batch_sampler": other.batch_sampler}
    else:
        cutting = {"batch_size": None, "sampler": other.sampler}
    given = {"self", "dataset", "shuffle", "batch_size", "sampler", "batch_sampler", "drop_last"}
    names = [name for name in signature(DataLoader.__init__).parameters if name not in given]
    arguments = {name: getattr(loader, name) for name in names}
    if not loader.prefetch_given:
        del arguments["prefetch_factor"]
    return type(loader)(other.dataset, **cutting, **arguments)
