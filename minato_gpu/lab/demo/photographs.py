"""Makes the demonstration's data set: JPEG files of very different sizes, from real photographs.

The photographs are inside the scikit-image package, so nothing is downloaded. Each file is a view of one of
them: a crop, perhaps mirrored, with its own exposure and grain, resized to its own number of pixels. The sizes
are log-normal, as sizes of photographs on the web roughly are, so that decoding the largest costs far more than
fifty times as much as decoding the smallest; that spread is what the loader is shown on. Grain is added because
an enlarged photograph is smooth and would decode faster than a camera's picture of that size.

Everything follows from the seed: two runs with one version of OpenCV make the same files.

Decision: threads, not processes. Nearly all the time is spent inside OpenCV, which releases the interpreter
lock, and a pool of processes would first spend seconds on importing.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from minato_gpu.pipelines.example_photographs import photograph
from minato_gpu.samples import JSON
from minato_gpu.util.messages import from_extra
from minato_gpu.util.threads import usable_cores

with from_extra("demo"):
    import cv2

    import_module("PIL")  # which reads the photographs: missed now, not in the midst of it

# The threads here are one for each core. And a forked worker would inherit a pool of OpenCV's without its threads, for
# which ``cv2.setNumThreads`` would then wait for ever (seen with OpenCV 5.0).
cv2.setNumThreads(1)

Pixels = npt.NDArray[np.uint8]

# Class folder -> files in scikit-image's data folder. Drawings and simulated pictures are left out.
SOURCES: dict[str, tuple[str, ...]] = {
    "astronaut": ("astronaut.png",),
    "bricks": ("brick.png",),
    "cameraman": ("camera.png",),
    "cat": ("chelsea.png",),
    "coffee": ("coffee.png",),
    "coins": ("coins.png",),
    "galaxies": ("hubble_deep_field.jpg",),
    "grass": ("grass.png",),
    "gravel": ("gravel.png",),
    "moon": ("moon.png",),
    "motorcycle": ("motorcycle_left.png", "motorcycle_right.png"),
    "page": ("page.png",),
    "retina": ("retina.jpg",),
    "rocket": ("rocket.jpg",),
    "tissue": ("ihc.png",),
}
SMALLEST_MEGAPIXELS, LARGEST_MEGAPIXELS = 0.05, 12.0
# The middle of the two limits on a logarithmic scale, and a spread that reaches both within 600 draws.
MEDIAN_MEGAPIXELS = (SMALLEST_MEGAPIXELS * LARGEST_MEGAPIXELS) ** 0.5
SIGMA = 1.0

_MANIFEST = "manifest.json"
_VERSION = 1


class DataSetError(Exception):
    """The data set cannot be made or used; the message tells the user why."""


@dataclass(frozen=True, slots=True)
class View:
    """One file to be made: ``number`` seeds its random values, ``megapixels`` is the size aimed at."""

    number: int
    class_name: str
    source: str
    megapixels: float

    @property
    def file_name(self) -> str:
        return f"{self.class_name}/{self.number:05d}.jpg"


def make(folder: Path, count: int, seed: int) -> dict[str, JSON]:
    """Makes ``count`` JPEG files in class folders under ``folder``, or finds them made already.

    Returns the manifest: the settings that decide the files, and ``files``, ``bytes``, ``smallest_pixels`` and
    ``largest_pixels``. The files are made beside the folder and moved into place when all are there, so that an
    interrupted run leaves nothing half made; files that it made there with other settings go. Raises ``DataSetError``
    where ``folder`` holds something else, scikit-image lacks its photographs, or ``count`` is below the 15 classes.
    """
    if count < len(SOURCES):
        raise DataSetError(f"the data set needs at least {len(SOURCES)} files, one for each class; got {count}")
    settings: dict[str, JSON] = {"version": _VERSION, "count": count, "seed": seed, "classes": list(SOURCES)}
    if folder.exists():
        known = _read_manifest(folder)
        if known.items() >= settings.items() and len(list(folder.glob("*/*.jpg"))) == count:
            return known
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for name in SOURCES:
        (partial / name).mkdir(parents=True)
    manifest = settings | _write_all(partial, views(count, seed), seed)
    (partial / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.replace(folder)
    return manifest


def views(count: int, seed: int) -> list[View]:
    """Returns what the files will show.

    Sizes are the quantiles of the log-normal in random order, classes take turns. Quantiles rather than draws, so that
    a small data set has both small and large files too.
    """
    order = np.random.default_rng(seed).permutation(count)
    log_normal = NormalDist(np.log(MEDIAN_MEGAPIXELS), SIGMA)
    names = list(SOURCES)
    made = []
    for number, rank in enumerate(order):
        megapixels = float(np.exp(log_normal.inv_cdf((int(rank) + 0.5) / count)))
        class_name = names[number % len(names)]
        sources = SOURCES[class_name]
        source = sources[number // len(names) % len(sources)]
        megapixels = min(max(megapixels, SMALLEST_MEGAPIXELS), LARGEST_MEGAPIXELS)
        made.append(View(number, class_name, source, megapixels))
    return made


def render(view: View, photograph: Pixels, rng: np.random.Generator) -> Pixels:
    """The view's pixels, uint8, [height, width, 3] in OpenCV's order or [height, width] from a grey photograph."""
    height, width = photograph.shape[:2]
    share = rng.uniform(0.6, 1.0)
    crop_height, crop_width = round(height * share), round(width * rng.uniform(0.6, 1.0))
    top, left = int(rng.integers(0, height - crop_height + 1)), int(rng.integers(0, width - crop_width + 1))
    crop = photograph[top : top + crop_height, left : left + crop_width]
    if rng.random() < 0.5:
        crop = crop[:, ::-1]
    scale = (view.megapixels * 1e6 / (crop_height * crop_width)) ** 0.5
    size = (max(1, round(crop_width * scale)), max(1, round(crop_height * scale)))
    resized = cv2.resize(crop, size, interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)
    exposed = cv2.convertScaleAbs(resized, alpha=rng.uniform(0.8, 1.2), beta=rng.uniform(-5, 10))
    return _with_grain(np.asarray(exposed, dtype=np.uint8), rng)


def _with_grain(image: Pixels, rng: np.random.Generator) -> Pixels:
    """The image with Gaussian noise as of a camera; one strip of noise serves all rows, because drawing is slow."""
    rows = min(64, image.shape[0])
    strip = rng.normal(0.0, 1.0, (rows, *image.shape[1:])).astype(np.float32) * rng.uniform(2.0, 6.0)
    grain = np.rint(strip).astype(np.int16)
    grainy = np.empty_like(image)
    for top in range(0, image.shape[0], rows):
        part = image[top : top + rows]
        grainy[top : top + rows] = cv2.add(part, grain[: part.shape[0]], dtype=cv2.CV_8U)
    return grainy


def _write_all(folder: Path, wanted: list[View], seed: int) -> dict[str, JSON]:
    # The largest first, so that no thread is left with one at the end.
    largest_first = sorted(wanted, key=lambda view: -view.megapixels)
    with ThreadPoolExecutor(usable_cores(), thread_name_prefix="photographs") as pool:
        made = list(pool.map(lambda view: _write(folder, view, seed), largest_first))
    sizes, pixels = zip(*made, strict=True)
    return {"files": len(sizes), "bytes": sum(sizes), "smallest_pixels": min(pixels), "largest_pixels": max(pixels)}


def _write(folder: Path, view: View, seed: int) -> tuple[int, int]:
    """Makes one file; returns its size in bytes and its number of pixels."""
    rng = np.random.default_rng([seed, view.number])
    image = render(view, _photograph(view.source), rng)
    quality = int(rng.integers(82, 96))
    done, encoded = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
    if not done:
        raise DataSetError(f"OpenCV could not encode {view.file_name}")
    (folder / view.file_name).write_bytes(encoded.tobytes())
    return len(encoded), image.shape[0] * image.shape[1]


@cache
def _photograph(name: str) -> Pixels:
    try:
        found: Pixels = photograph(name)
    except FileNotFoundError:
        raise DataSetError(f"this version of scikit-image lacks the photograph {name}") from None
    return found


def _read_manifest(folder: Path) -> dict[str, JSON]:
    manifest: JSON = None
    with suppress(OSError, ValueError):
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        raise DataSetError(f"{folder} exists and was not made by the demonstration; choose another --out")
    return manifest
