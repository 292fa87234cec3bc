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
        "lasting=lasting",
        "lasting=False",
        ("lanes/test_worker.py",),
    ),
    Fault(
        "generators are seeded before the data set alone, not before the stages of a pipeline",
        "lanes/produce.py",
        "        seeder.seed(stage_seed(seed, number))\n\n",
        "\n",
        ("lanes/test_worker.py", "contracts/test_table.py"),
    ),
    Fault(
        "all stages of a sample draw the same",
        "lanes/produce.py",
        "        seeder.seed(stage_seed(seed, number))\n\n",
        "        seeder.seed(seed)\n\n",
        ("lanes/test_worker.py",),
    ),
    Fault(
        "a cache keeps what a stage has drawn from a global generator",
        "pipeline/kept_fields.py",
        "kept[number] = _DREW if drew() else",
        "kept[number] =",
        ("contracts/test_kept_fields.py",),
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
    Fault(
        "tensors of another dtype are stacked all the same",
        "memory/layout.py",
        "elif {each.dtype for each in column} != {leaf.dtype} or",
        "elif",
        ("memory/test_layout.py",),
    ),
    Fault(
        "small tensors that do not fit are left out of their batch",
        "lanes/placement.py",
        "                        items[number] = self._stored(task, piece, at, value)\n",
        "                        pass\n",
        ("torch_semantics/test_batch_types.py",),
    ),
    Fault(
        "fields of samples that have them in another order are taken for alike",
        "memory/layout.py",
        "        for (key, part), (own, item) in zip(parts, value.items(), strict=True):\n"
        "            if own != key:  # in another order, too: a batch has that of its first sample\n"
        "                raise Mismatch\n"
        "            _flatten(part, item, out)\n",
        "        for key, part in parts:\n"
        "            if key not in value:\n"
        "                raise Mismatch\n"
        "            _flatten(part, value[key], out)\n",
        ("torch_semantics/test_collate.py",),
        "ff673df",
    ),
    Fault(
        "a worker's NumPy generator begins with another seed than PyTorch's",
        "lanes/seeding.py",
        "            np.random.seed(_generate_state(base_seed, worker))\n",
        "            del _generate_state\n",
        ("lanes/test_seeding.py", "torch_semantics/test_randomness.py"),
        "28853c3",
    ),
    Fault(
        "columns by name are taken for samples",
        "lanes/produce.py",
        'isinstance(returned, (str, bytes)) or hasattr(kind, "keys") else',
        "isinstance(returned, (str, bytes)) else",
        ("lanes/test_worker.py", "torch_semantics/test_iteration.py"),
        "ebb0b4c",
    ),
    Fault(
        "an epoch that was prepared ahead leaves the generator where it was",
        "sampling/speculation.py",
        "        self._ahead = False\n        self._set(self._states)\n",
        "        self._ahead = False\n",
        ("sampling/test_sampling.py", "contracts/test_content.py"),
    ),
)
