"""A program that takes up an epoch where another process left it, for ``test_resume``.

Argument: more of the loader's arguments, as JSON. Input: how many batches to take (null: all that are left) and the
state to take them from. Output: the batches, and the state then.
"""

from __future__ import annotations

import json
import sys
from itertools import islice

import torch

from minato_gpu import DataLoader
from tests.contracts.datasets import Made, draw, rows

if __name__ == "__main__":
    steps, state = json.loads(sys.stdin.read())
    generator = torch.Generator().manual_seed(17)
    loader = DataLoader(Made(64, draw), 4, shuffle=True, generator=generator, **json.loads(sys.argv[1]))
    loader.load_state_dict(state)
    got = [rows([batch]) for batch in islice(loader, steps)]
    sys.stdout.write(json.dumps([got, loader.state_dict()]))
