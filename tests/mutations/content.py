"""Faults of content: what a batch is, beyond the values of its elements, and what is drawn for it."""

from __future__ import annotations

from tests.mutations.fault import Fault

FAULTS = (
    Fault(
        "what a collate_fn draws depends on the worker that joins the batch",
        "lanes/placement.py",
        "        if self.own_collate and self._seeder is not None:\n",
        "        if False and self._seeder is not None:\n",
        ("contracts/test_content.py",),
    ),
    Fault(
        "what samples have drawn is forgotten as their batch is joined",
        "lanes/worker.py",
        "if progress.unseeded and self._placement.own_collate and self._producer.drew():",
        "if False and self._producer.drew():",
        ("contracts/test_content.py",),
    ),
    Fault(
        "what a collate_fn keeps of a sample becomes another sample",
        "lanes/worker.py",
        "lasting=self._placement.own_collate",
        "lasting=False",
        ("lanes/test_worker.py",),
    ),
    Fault(
        "a tensor's key is where it lies in memory",
        "samples.py",
        '    if hasattr(key, "untyped_storage"):  # a tensor, without an import of torch\n',
        "    if False:\n",
        ("sampling/test_sampling.py",),
    ),
    Fault(
        "tensors lose their order in memory",
        "memory/blobs.py",
        "return tensor if tensor.is_contiguous() else tensor.clone()",
        "return tensor.contiguous()",
        ("memory/test_blobs.py", "torch_semantics/test_batch_types.py"),
    ),
)
