"""Who is measured: this loader on each of its lanes, and its peers with GPU transforms; each with the settings that are
tried for it.

All prepare the same samples: PyTorch's, SPDL's and torchvision's workers read and draw by the pipeline's own functions,
so that their batches can be compared with the pipeline's. DALI draws by itself, so its batches are only counted. This
loader, DALI and torchvision upsample chroma as nvJPEG does by default, without smoothing; OpenCV, in PyTorch's and
SPDL's workers, smooths it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from unittest import mock

import torch
from torch.utils.data import DataLoader

from benchmarks.peers import Job
from benchmarks.session.dali import DaliCpu, DaliDynamic, DaliGpu
from benchmarks.session.settings import Settings, settings_of
from benchmarks.session.torch_gpu import Crops, Packing, TorchvisionGpu, brought
from minato_gpu import DataLoader as MinatoDataLoader
from minato_gpu.arguments import LaneName
from minato_gpu.device import nvjpeg
from minato_gpu.engine import builder
from minato_gpu.engine import settings as engine_settings
from minato_gpu.parity import whole_tolerance
from minato_gpu.stages import Tolerance
from minato_gpu.threads import usable_cores
from pipelines.photograph_stages import GEOMETRIC


class Contender(Protocol):
    """A loader with its settings. ``package``: what it needs. ``ordered``, ``own_draws``: see ``work.Taken.check``."""

    @property
    def name(self) -> str: ...

    @property
    def package(self) -> str: ...

    @property
    def ordered(self) -> bool: ...

    @property
    def own_draws(self) -> bool: ...

    def settings(self) -> dict[str, Any]:
        """What was chosen for it."""

    def make(self, job: Job, device: str) -> Iterable[Any]:
        """Its batches of the job, on the device."""

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        """How far pictures may be from the CPU implementation's; None: not at all."""


def available(contender: Contender) -> bool:
    """Whether its package is there. It is not imported: a process that may fork must not have met CUDA."""
    parts = contender.package.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return all(importlib.util.find_spec(name) is not None for name in names)


# --- this loader -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ours:
    """``minato_gpu.DataLoader``, with bounded lateness. ``micro_batch``: most samples of a dispatch to the GPU;
    ``engine_load``: the share of JPEGs for its hardware engine (None: as usual); ``fancy_upsampling``: chroma is
    smoothed on both lanes, which DALI and torchvision do not do here, and which takes nvJPEG twice as long.

    The device lane by itself has as many threads of DALI as beside a CPU lane: the sum of the two is then what both
    could make, and a core is not counted twice.
    """

    TUNED: ClassVar[tuple[str, ...]] = ("workers", "micro_batch", "engine_load")

    name: str
    lanes: tuple[LaneName, ...]
    workers: int
    micro_batch: int = engine_settings.MOST_ON_GPU
    engine_load: float | None = None
    device_memory_budget: int | None = None
    fancy_upsampling: bool = False
    package: str = "minato_gpu"
    ordered: bool = True
    own_draws: bool = False

    def settings(self) -> dict[str, Any]:
        names = (*self.TUNED, "lanes", "device_memory_budget", "fancy_upsampling")
        return {name: getattr(self, name) for name in names}

    def make(self, job: Job, device: str) -> Any:
        """In a process of its own, whose settings it changes."""
        engine_settings.MOST_ON_GPU = self.micro_batch
        if device == "cuda" and self.lanes == ("device",):
            mock.patch.object(builder, "usable_cores", return_value=builder.THREADS_BESIDE).start()
        if self.engine_load is not None:
            os.environ[nvjpeg.ENGINE_LOAD] = str(self.engine_load)
        return MinatoDataLoader(
            job.source,
            job.batch_size,
            num_workers=self.workers,
            lanes=self.lanes,
            in_order=False,
            generator=torch.Generator().manual_seed(0),
            pipeline=job.pipeline,
            device=device if device == "cuda" else None,
            device_memory_budget=self.device_memory_budget,
        )

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return whole_tolerance(job.pipeline, device, job.pipeline.host_prefix) if "device" in self.lanes else None


# --- peers whose workers decode, and whose GPU does the rest in torch --------------------------------------------


@dataclass(frozen=True)
class TorchGpu:
    """``torch.utils.data.DataLoader``, batches out of order, pinned; the rest on the GPU one batch ahead."""

    name: str
    workers: int
    size: int
    squares: bool = True
    decoder: str = "opencv"
    prefetch: int = 2
    package: str = "torch"
    ordered: bool = False
    own_draws: bool = False

    def settings(self) -> dict[str, Any]:
        return settings_of(self)

    def make(self, job: Job, device: str) -> Iterable[Any]:
        loader: DataLoader[Any] = DataLoader(
            Crops(job, self.decoder, squares=self.squares, size=self.size),  # type: ignore[arg-type]
            job.batch_size,
            num_workers=self.workers,
            collate_fn=Packing(squares=self.squares),
            pin_memory=device == "cuda",
            prefetch_factor=self.prefetch,
            in_order=False,
        )
        return brought(loader, device, self.size)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return GEOMETRIC


@dataclass(frozen=True)
class SpdlGpu:
    """SPDL's pipeline: samples decoded by threads, gathered, brought to the GPU by SPDL's transfer in a thread of its
    own; the rest there, one batch ahead."""

    name: str
    threads: int
    size: int
    squares: bool = True
    decoder: str = "opencv"
    sink: int = 3
    package: str = "spdl.pipeline"
    ordered: bool = False
    own_draws: bool = False

    def settings(self) -> dict[str, Any]:
        return settings_of(self)

    def make(self, job: Job, device: str) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder

        crops = Crops(job, self.decoder, squares=self.squares, size=self.size)
        prepare: Any = crops.__getitem__
        pack: Any = Packing(squares=self.squares)
        builder: PipelineBuilder[Any, Any] = PipelineBuilder()
        builder.add_source(range(len(crops)))
        builder.pipe(prepare, concurrency=self.threads)
        builder.aggregate(job.batch_size, drop_last=True)
        builder.pipe(pack, executor=ThreadPoolExecutor(2), concurrency=2)
        if device == "cuda":
            from spdl.io import transfer_tensor_h2d

            builder.pipe(transfer_tensor_h2d, executor=ThreadPoolExecutor(1))
        pipeline = builder.add_sink(self.sink).build(num_threads=self.threads, use_thread_output_queue=True)
        pipeline.start()
        return brought(pipeline.get_iterator(), device, self.size)

    def tolerance(self, job: Job, device: str) -> Tolerance | None:
        return GEOMETRIC


# --- all of them -------------------------------------------------------------------------------------------------


def ours(workers: int) -> tuple[Ours, Ours, Ours]:
    """All-CPU, all-device, hybrid."""
    return (
        Ours("cpu", ("cpu",), workers),
        Ours("device", ("device",), workers),
        Ours("hybrid", ("cpu", "device"), workers),
    )


def peers(settings: Settings) -> dict[str, Contender]:
    """The peers, as they are before anything was tried. The strongest is first: time may run short for the last."""
    cores = usable_cores()
    return {
        "dali": DaliGpu("dali", cores),
        "dali_dynamic": DaliDynamic("dali_dynamic", cores),
        "torchvision": TorchvisionGpu("torchvision", settings.workers, settings.size),
        "dali_cpu": DaliCpu("dali_cpu", cores),
        "pytorch": TorchGpu("pytorch", settings.workers, settings.size),
        "spdl": SpdlGpu("spdl", settings.workers, settings.size),
    }


def changes(*, quick: bool) -> dict[str, Sequence[Mapping[str, Any]]]:
    """For each peer and the hybrid the changes of settings that are tried one after the other; one that is faster is
    kept. What is expected to gain most comes first, because time may end the list."""
    if quick:
        return {
            "hybrid": ({"micro_batch": 8},),
            "pytorch": ({"squares": False},),
            "spdl": (),
            "dali": ({"exec_dynamic": False},),
            "dali_cpu": ({"squares": True},),
            "dali_dynamic": ({"capture": False, "ahead": 1},),
            "torchvision": ({"pinned": True},),
        }
    cores = usable_cores()
    decoding = ({"squares": False}, {"decoder": "nvimgcodec"})
    half, recipe = {"threads": max(1, cores // 2)}, ({"hints": True}, {"padding": True})
    engine, last = _engine(1.0, 0.9, 0.65), _engine(0.0)
    whole = [{"regions": False}] if nvjpeg.decodes_regions() else []
    load = [{"engine_load": 0.5}] if nvjpeg.engine_load() else []
    return {
        "hybrid": (
            {"micro_batch": 256},
            {"workers": cores},
            *load,
            {"micro_batch": 64},
            {"workers": max(2, cores // 2)},
        ),
        "dali": (*recipe[:1], *whole, *engine, half, *recipe[1:], {"prefetch": 3}, {"exec_dynamic": False}, *last),
        "dali_dynamic": (*recipe[:1], *whole, *engine, half, *recipe[1:], {"capture": False, "ahead": 1}, *last),
        "torchvision": ({"pinned": True}, {"workers": max(1, cores // 4), "prefetch": 4}, {"workers": cores}),
        "dali_cpu": ({"squares": True}, half, {"threads": 2 * cores}, {"prefetch": 3}, {"exec_dynamic": False}),
        "pytorch": (*decoding, {"workers": cores, "prefetch": 4}),
        "spdl": (*decoding, {"threads": cores}),
    }


def _engine(*loads: float) -> list[dict[str, Any]]:
    """Other shares for the JPEG engine than the one to begin with; none where it was told to be left alone."""
    first = nvjpeg.engine_load()
    return [{"hw_decoder_load": load} for load in loads if first > 0 and load != first]
