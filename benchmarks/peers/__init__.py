"""The loaders that are compared, each by an adapter with one face (``base.Loader``)."""

from __future__ import annotations

from benchmarks.peers.base import Job, Loader, installed, take_one

__all__ = ["Job", "Loader", "installed", "take_one"]
