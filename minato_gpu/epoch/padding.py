"""Makes a batch of one sample for a rank that has lost all samples of a batch, as the other ranks count on that batch.

In a distributed job a batch that has lost all of its samples must come all the same, or the other ranks would wait for
ever. A sample of another batch takes its place: it is prepared once more, and joined alone.

Decision: by a PyTorch DataLoader of its own, with a worker where the loader has worker processes. Each such batch costs
the start of a process; in return the data set is prepared and used as in any worker, and what it opens (files, say) is
not inherited by the workers of the next epoch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch
from torch.utils.data import DataLoader, DistributedSampler

from minato_gpu.arguments import Arguments
from minato_gpu.lanes.seeding import seed_generators
from minato_gpu.options.options import Options
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.samples import Ticket, Value, add_note, sample_seed
from minato_gpu.sampling.samplers import Sampling


def pads_batches(loader: Arguments, options: Options) -> bool:
    """Returns whether a batch that loses all its samples must come all the same, as other ranks or devices count on
    it."""
    if not options.skips:
        return False
    if len(options.devices) > 1:
        return True
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return True
    sampler = Sampling(loader).inner
    return isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1


def batch_of(loader: Arguments, options: Options, epoch_seed: int, ticket: Ticket) -> Value:
    """Returns a batch of one sample, on the host, with the draws that the sample has in its own place.

    Without workers, and in threads, that holds for the draws of a pipeline only.
    """
    seed = sample_seed(epoch_seed, 0, ticket.index, ticket.occurrence)
    batched = loader.batch_sampler is not None
    worker: dict[str, Value] = {}
    if loader.num_workers > 0 and not options.threads:
        begin = partial(_begin, loader.worker_init_fn, seed)
        worker = {"num_workers": 1, "worker_init_fn": begin, "timeout": loader.timeout}
        worker["multiprocessing_context"] = loader.multiprocessing_context
    try:
        (batch,) = DataLoader(
            loader.dataset,
            batch_size=1 if batched else None,
            sampler=[ticket.index],
            collate_fn=partial(_join, loader.pipeline, seed, loader.collate_fn, batched),
            generator=torch.Generator(),  # or torch's own would move
            **worker,
        )
    except Exception as error:
        add_note(error, f"epoch {ticket.epoch}, index {ticket.index!r}: prepared once more for a batch without samples")
        raise
    return batch


def _begin(init: Callable[[int], None] | None, seed: int, worker: int) -> None:
    """Is the worker's ``worker_init_fn``: calls the loader's own, then seeds the generators for the sample."""
    gc.freeze()  # what the training process has dropped is that process's to collect
    if init is not None:
        init(worker)
    seed_generators(seed)


def _join(pipeline: Pipeline | None, seed: int, collate: Callable[[Value], Value], batched: bool, read: Value) -> Value:
    """Runs the pipeline, if any, on what the data set has returned, and collates that. ``batched``: ``read`` is a list
    of samples, else it is one."""
    samples = read if batched else [read]
    if pipeline is not None:
        samples = [pipeline.run(sample, seed) for sample in samples]
    return collate(samples if batched else samples[0])
