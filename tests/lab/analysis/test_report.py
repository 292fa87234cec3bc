"""The report: one file that needs nothing else, which a browser shows on a desk and on a phone, and a screen reader
reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minato_gpu.lab.analysis import page
from minato_gpu.lab.analysis.profile import Phase, Profile, Setting, Storage, Trial
from minato_gpu.lab.analysis.questions import compared
from minato_gpu.lab.report import document
from tests.lab.analysis.conftest import a_profile

NASTY = "/data/<script>alert(1)</script>/" + "a" * 90 + ".jpeg"


def phase(seconds: float) -> Phase:
    times = tuple((seconds * np.random.default_rng(0).lognormal(0, 0.2, 50)).tolist())
    return Phase(50, sum(times), 0.2 * sum(times), times)


WHOLE = a_profile(
    loader="torch",
    samples=1001,
    batch_size=10,
    cores=2,
    prepare_cpu_share=1.0,
    step_s=(0.1, 0.11),
    persistent=False,
    overlap=False,
    prepare_s=tuple((0.01 * np.random.default_rng(1).lognormal(0, 1, 200)).tolist()),
    phases={"compute": phase(0.1), "warm": phase(0.13), "cold": phase(0.19)},
    stages_s={"decode": 0.006, "crop": 0.001},
    scaling=((1, 90.0), (2, 170.0), (4, 250.0)),
    slowest=((0.2, NASTY), (0.1, "/data/b.jpeg")),
    notes=("the page cache could not be looked at",),
)


def answered(question: str, at: float, epoch_s: float, spread_s: float, **more: float) -> dict[str, Any]:
    said = {"question": question, "setting": at, "measured": None, "verified": "can be run here"}
    return {**said, "epoch_s": epoch_s, "low_s": epoch_s - spread_s, "high_s": epoch_s + spread_s, **more}


ROWS = (
    *(answered("workers", n, 100 / n, 10 / n, **({"measured_s": 51.0} if n == 2 else {})) for n in (1, 2, 8, 32)),
    *(answered("share of the set", share, 60 - 20 * share, 10) for share in (0.0, 0.5, 1.0)),
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    return partial(written, tmp_path)


def written(folder: Path, profiles: Sequence[Profile] = (WHOLE,), rows: Sequence[Any] = ROWS) -> Path:
    path = folder / "report.html"
    page.write(path, "train.py", profiles, document({}, []), answered=rows)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with everything."""
    return written(tmp_path_factory.mktemp("page")).read_text(encoding="utf-8")


class Seen(HTMLParser):
    """What of a page matters to who does not see it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_it_needs_nothing_else(text: str) -> None:
    seen = Seen(text)
    assert not any(seen.all(tag) for tag in ("script", "link", "img", "iframe"))
    assert not re.search(r"url\((?!#)|@import", text)
    linked = [value for _, attributes in seen.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(value is not None and value.startswith("#") for value in linked)
    assert len(text) < 1_000_000


def test_it_says_what_it_shows(text: str) -> None:
    seen = Seen(text)
    levels = [int(tag[1]) for tag, _ in seen.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert seen.all("html")[0]["lang"] == "en" and "width=device-width" in str(seen.all("meta")[1]["content"])
    pictures = [each for each in seen.all("div") if each.get("role") == "img"]
    assert len(pictures) == len(seen.all("svg")) == 7
    assert all(len(each["aria-label"] or "") > 20 for each in pictures)
    assert all(each.get("scope") in ("col", "row") for each in seen.all("th"))
    said = "".join(seen.text)
    assert NASTY in said and "the page cache could not be looked at" in said and "within the noise" not in said


@pytest.mark.parametrize(
    ("profile", "lacks"),
    [
        (replace(WHOLE, phases={}), "Where an epoch's time goes"),
        (replace(WHOLE, prepare_s=(), stages_s={}, scaling=(), slowest=()), "What samples cost"),
        (replace(WHOLE, phases={"compute": phase(0.1), "warm": phase(0.1)}, notes=()), "could not be looked at"),
    ],
    ids=["nothing", "no costs", "no cold phase"],
)
@pytest.mark.usefixtures("undrawn")
def test_what_was_not_measured_is_left_out(write: Callable[..., Path], profile: Profile, lacks: str) -> None:
    whole, said = ("".join(Seen(write([each], ()).read_text(encoding="utf-8")).text) for each in (WHOLE, profile))
    assert lacks in whole and lacks not in said


# --- what it says of other settings -----------------------------------------------------------------------------------

SMALL = replace(
    WHOLE,
    samples=32,
    batch_size=4,
    prepare_s=WHOLE.prepare_s[:32],
    storage=Storage(bytes_per_s=1e8, latency_s=0.005, requests=1.0, nbytes=1e5, concurrency=2.0),
)


@pytest.fixture(scope="module")
def small_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_of(tmp_path_factory.mktemp("report"), SMALL)


def page_of(folder: Path, profile: Profile) -> str:
    path = folder / "report.html"
    page.write(path, "train.py", [profile], document({}, []), draws=2)
    return re.sub("<svg.*?</svg>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_questions_with_numbers_have_curves_and_the_others_a_table(small_page: str) -> None:
    text = small_page
    for question in ("workers", "storage latency, ms", "step, times"):
        assert f"<h3>{question}</h3>" in text
    assert "cache of this loader, share of the set, from 0 to 1: makes no difference" in text
    assert "were measured" in text and "not verifiable here" in text
    table = text[text.index("<caption>other settings") :]
    assert "next-use" in table and "minato_gpu" in table and "as measured" in table
    assert "minio: a cache that keeps what comes first" in text and "lru: a cache that keeps what was used last" in text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("measured", "drawn"), [(None, False), (1900.0, False), (1500.0, True)])
def test_a_flat_curve_is_a_sentence(write: Callable[..., Path], measured: float | None, drawn: bool) -> None:
    """A curve is drawn where what was measured changes, but not where it only lies elsewhere."""
    ends = ({}, {}) if measured is None else ({"measured_s": 1910.0}, {"measured_s": measured})
    rows = [answered("ranks", n, 1150.0 + n, 9, **more) for n, more in zip((1, 8), ends, strict=True)]
    said = "".join(Seen(write(rows=rows).read_text(encoding="utf-8")).text)
    sentence = "ranks, from 1 to 8: makes no difference, an epoch is predicted to take 1,151 to 1,158 s"
    assert (sentence in said) == (not drawn) == ("ranks: 1" not in said)
    assert ("; 1,900 to 1,910 s measured." in said) == (measured == 1900.0)


@pytest.mark.usefixtures("undrawn")
def test_what_was_tried_is_on_the_curves(tmp_path: Path) -> None:
    answered = compared(
        SMALL, [Trial(Setting(workers=4), (12.34, 12.36, 99.0)), Trial(Setting(loader="minato_gpu"), (56.7,))], draws=1
    )
    path = tmp_path / "report.html"
    page.write(path, "train.py", [SMALL], document({}, []), answered=answered, draws=2)
    text = re.sub("<svg.*?</svg>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    workers = text[text.index("<h3>workers</h3>") :]
    assert "12.4 s (4)" in workers[: workers.index("</figure>")]
    assert "56.7" in text[text.index("<caption>other settings") :]


def test_the_model_is_beside_what_was_measured(small_page: str) -> None:
    rows = small_page[small_page.index("<caption>epochs of the run as it is") :]
    assert "bytes in memory" in rows and "bytes in storage" in rows and "%" in rows


@pytest.mark.usefixtures("undrawn")
def test_nothing_is_predicted_of_what_was_not_measured(tmp_path: Path) -> None:
    text = page_of(tmp_path, replace(SMALL, storage=None))
    assert "storage latency" not in text and "bytes in storage" not in text and "<h3>workers</h3>" in text
    for profile in (replace(SMALL, prepare_s=(), scaling=()), replace(SMALL, step_s=())):
        assert "What if" not in page_of(tmp_path, profile)
