"""A job that trains until its input ends; the tests of watching look at it from outside, or kill it.

It says "trains" once its loader has delivered a batch, and goes on through epochs of the samples 0 to 63.
"""

from __future__ import annotations

import select
import sys
from typing import Any

from minato_gpu import DataLoader

if __name__ == "__main__":
    numbers: Any = range(64)
    loader: Any = DataLoader(numbers, 4, num_workers=1, persistent_workers=True)
    said = False
    while not select.select([sys.stdin], [], [], 0.0)[0]:
        for batch in loader:
            assert len(batch) == 4
            if not said:
                sys.stdout.write("trains\n")
                sys.stdout.flush()
                said = True
