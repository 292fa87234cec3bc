"""Prepares samples of which a cache keeps fields: from these fields, or so that they can be kept (see
kept_fields.py)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from minato_gpu.lanes.seeding import Seeder
from minato_gpu.memory import blobs
from minato_gpu.pipeline.kept_fields import KeepableFields, PreparedSample
from minato_gpu.pipeline.pipeline import Pipeline
from minato_gpu.pipeline.stages import Fields
from minato_gpu.samples import Value
from minato_gpu.sources import sent_samples
from minato_gpu.sources.reading import AT_HAND
from minato_gpu.sources.sent_samples import SentSample


class FieldKeeper:
    """Prepares samples with kept fields, and sends the reader process fields to keep.

    ``end``: the socket to the reader process. ``seeder``: that of a worker process; None in a thread.
    """

    def __init__(self, pipeline: Pipeline, end: socket.socket, seeder: Seeder | None) -> None:
        self._pipeline, self._end, self._seeder = pipeline, end, seeder
        self._keepable = KeepableFields(pipeline)

    def run(self, fields: Fields, seed: int, before_stage: Callable[[int], None]) -> Value:
        """Prepares a sample from what the data set returned, and from kept fields, if ``AT_HAND`` (sources/reading.py)
        has some for it. Raises as ``Pipeline.run``."""
        given = None if AT_HAND.fields is None else self._keepable.given(fields)
        if given is not None:
            with suppress(Exception):  # it fails without a cache as well, or is no failure there
                found = self._with_kept(fields, given, seed, before_stage)
                if found is not None:
                    return found
        return self._pipeline.run(fields, seed, before_stage=before_stage)

    def _with_kept(self, fields: Fields, given: bytes, seed: int, before_stage: Callable[[int], None]) -> Value:
        """Prepares the sample from its kept fields or, if the reader process asks for them, so that they can be kept.

        Returns None if neither applies, or what was kept belongs to other data.
        """
        if AT_HAND.asked_for >= 0:
            made = self._make(fields, seed, before_stage)
            buffers = None if made.kept is None else blobs.pieces(blobs.dump((given, made.kept)))
            sent = SentSample(AT_HAND.asked_for, made.prepare_s, made.saved_s, why_not=made.why_not)
            with suppress(OSError):  # then they are not kept
                sent_samples.send(self._end, sent, buffers)
            return made.outputs
        data = AT_HAND.find_fields()
        if data is not None:
            belongs_to, kept = blobs.load(data)
            if belongs_to == given:  # else the data set has changed
                return self._keepable.run(fields, kept, seed, before_stage)
        return None

    def _make(self, fields: Fields, seed: int, before_stage: Callable[[int], None]) -> PreparedSample:
        if self._seeder is None:
            return self._keepable.make(fields, seed, before_stage)
        self._seeder.always_looks = True
        try:
            return self._keepable.make(fields, seed, before_stage, self._seeder.moved)
        finally:
            self._seeder.always_looks = False
