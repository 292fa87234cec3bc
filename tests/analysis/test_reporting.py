"""What a report says of a profile: predictions beside what was measured, as far as the profile goes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from minato_gpu.analysis import reporting
from minato_gpu.analysis.profile import Profile, Storage
from minato_gpu.analysis.questions import compared
from minato_gpu.analysis.setting import Setting, Trial
from minato_gpu.cli import main
from minato_gpu.report import document

from .test_page import WHOLE

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
    reporting.write(path, "train.py", [profile], document({}, []), draws=2)
    return re.sub("<svg.*?</svg>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_questions_with_numbers_have_curves_and_the_others_a_table(small_page: str) -> None:
    text = small_page
    for question in ("workers", "storage latency, ms", "cache of this loader, share of the set", "step, times"):
        assert f"<h3>{question}</h3>" in text
    assert "were measured" in text and "not verifiable here" in text
    table = text[text.index("<caption>other settings") :]
    assert "next-use" in table and "minato_gpu" in table and "as measured" in table


@pytest.mark.usefixtures("undrawn")
def test_what_was_tried_is_on_the_curves(tmp_path: Path) -> None:
    answered = compared(
        SMALL, [Trial(Setting(workers=4), (12.34, 12.36, 99.0)), Trial(Setting(loader="minato_gpu"), (56.7,))], draws=1
    )
    path = tmp_path / "report.html"
    reporting.write(path, "train.py", [SMALL], document({}, []), answered=answered, draws=2)
    text = re.sub("<svg.*?</svg>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    workers = text[text.index("<h3>workers</h3>") :]
    assert "12.4 s (4)" in workers[: workers.index("</figure>")]
    assert "56.7" in text[text.index("<caption>other settings") :]


def test_the_model_is_beside_what_was_measured(small_page: str) -> None:
    rows = small_page[small_page.index("<caption>epochs of the run as it is") :]
    assert "bytes in memory" in rows and "bytes in storage" in rows and "%" in rows


@pytest.mark.usefixtures("undrawn")
def test_without_reads_nothing_is_said_of_storage(tmp_path: Path) -> None:
    text = page_of(tmp_path, replace(SMALL, storage=None))
    assert "storage latency" not in text and "bytes in storage" not in text and "<h3>workers</h3>" in text


@pytest.mark.usefixtures("undrawn")
def test_a_profile_without_samples_or_steps_predicts_nothing(tmp_path: Path) -> None:
    for profile in (replace(SMALL, prepare_s=(), scaling=()), replace(SMALL, step_s=())):
        assert "What if" not in page_of(tmp_path, profile)


@pytest.mark.parametrize("where", ["no/such/folder/report.html", "."])
def test_where_no_report_can_be_written_nothing_is_run(tmp_path: Path, where: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it ran')")
    done = CliRunner().invoke(main, ["analyze", "--report", str(tmp_path / where), str(script)])
    assert done.exit_code == 2 and "it ran" not in done.output and "--report" in done.output
