"""Runs the Python source that is its first argument, with what follows as arguments: a few lines, as a program."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    text = sys.argv.pop(1)
    exec(text, {"__name__": "__main__"})
