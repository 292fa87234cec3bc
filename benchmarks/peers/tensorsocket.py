"""TensorSocket 0.0.5: one producer has PyTorch's loader, every job a consumer of its batches.

As set here every job gets the same batches: the producer keeps all that it has sent (``rubber_band_pct=1``), so that a
job which connects late begins with the first. The last batches of an epoch, up to those that it sends at once, never
come: rates count what came. It needs pyzmq and tornado, and is no dependency of the benchmarks.
"""

from __future__ import annotations

import importlib
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

PACKAGE = "tensorsocket"
_AT_ONCE = 4  # batches
Ports = dict[str, Any]


def consumer(ports: Ports, batch_size: int) -> Iterator[Any]:
    """One epoch of a job's batches, as soon as the producer is there."""
    batches = importlib.import_module(PACKAGE).TensorConsumer(batch_size=batch_size, **ports)
    return (batch[0] for batch in batches)


@contextmanager
def producer(dataset: Any, batch_size: int, workers: int) -> Iterator[Ports]:
    """A process that sends an epoch in a shuffled order; the arguments by which consumers find it."""
    found = [socket.create_server(("", 0)) for _ in range(4)]
    data, ack, *heart = (each.getsockname()[1] for each in found)
    for each in found:
        each.close()
    ports: Ports = {"port": data, "ack_port": ack, "heart_ports": tuple(heart)}
    process = multiprocessing.get_context("fork").Process(target=_produce, args=(dataset, batch_size, workers, ports))
    process.start()
    try:
        yield ports
    finally:
        process.kill()
        process.join()


def _produce(dataset: Any, batch_size: int, workers: int, ports: Ports) -> None:
    torch.set_num_threads(1)
    loader: Any = DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=workers,
        collate_fn=lambda samples: (default_collate(samples),),
        generator=torch.Generator().manual_seed(0),
    )
    made = importlib.import_module(PACKAGE).TensorProducer(
        loader, rubber_band_pct=1.0, producer_batch_size=_AT_ONCE, **ports
    )
    for _ in made:
        pass
    multiprocessing.Event().wait()  # until it is killed: consumers have mapped its memory
