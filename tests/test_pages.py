"""Every page of documentation: links lead somewhere, and every example runs and delivers all samples."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from minato_gpu.sources import host_reader
from pipelines import image_classification
from tests.support import pages
from tests.support.agents import AgentProcess, agents
from tests.support.torchvision_operators import import_torchvision

# How many samples the page's loader has delivered after each example; None: the example has no loader.
MANUAL = "minato_gpu/manual"
DELIVERED: dict[str, Sequence[int | None]] = {
    "README.md": (100, 35),
    f"{MANUAL}/failures.md": (99,),
    f"{MANUAL}/pipelines.md": (35, 100),
    f"{MANUAL}/resuming.md": (36, 90),
    f"{MANUAL}/several_jobs.md": (100,),
    f"{MANUAL}/several_machines.md": (100,),
    f"{MANUAL}/start.md": (100,),
    f"{MANUAL}/storage.md": (100, 100),
    f"{MANUAL}/torchvision.md": (35,),
    f"{MANUAL}/watching.md": (100, 100, 100),
    f"{MANUAL}/workers.md": (100,),
}
ELSEWHERE = {  # in tests/tools, tests/cluster
    f"{MANUAL}/migrating.md": 5,
    f"{MANUAL}/other_libraries.md": 3,
    f"{MANUAL}/ray.md": 2,
}
README_BYTES = 8192


class OneBad(list[Any]):
    """A data set with a sample that cannot be prepared."""

    def __getitem__(self, index: Any) -> Any:
        if index == 17:
            raise OSError("bad sector")
        return super().__getitem__(index)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for module in tmp_path.glob("*.py"):
        sys.modules.pop(module.stem, None)


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    with agents() as [found]:
        yield found


@pytest.fixture
def given(request: pytest.FixtureRequest, here: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examples of a page take for granted."""
    page, signals = request.param, [np.full(3, number) for number in range(100)]
    name = page.rpartition("/")[2]
    names: dict[str, Any] = {"dataset": OneBad(signals) if name == "failures.md" else signals}
    if name == "torchvision.md":
        import_torchvision()
    if name in ("README.md", "torchvision.md", "pipelines.md"):
        image_classification.example_data(here / "photographs")
    if name == "several_machines.md":
        names["agents"] = [request.getfixturevalue("agent").address]
    if name == "watching.md":
        names["writer"], names["wandb"] = MagicMock(), MagicMock()
    if name == "resuming.md":
        (here / "logs").mkdir()
        for shard in "abcd":
            (here / "logs" / f"{shard}.txt").write_text("a line\n" * 25)
    if name == "several_jobs.md":
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
        monkeypatch.setattr(host_reader, "LINGER_S", 0.1)
    if name == "storage.md":
        names["urls"], names["decode"] = [str(here / f"{number}.bin") for number in range(100)], np.copy
        for url in names["urls"]:
            Path(url).write_bytes(b"1234")
    return names


def test_every_page_with_examples_is_known() -> None:
    assert {page: len(pages.examples(page)) for page in pages.PAGES if pages.examples(page)} == {
        page: len(delivered) for page, delivered in DELIVERED.items()
    } | ELSEWHERE


@pytest.mark.parametrize(("page", "given"), [(page, page) for page in DELIVERED], indirect=["given"], ids=DELIVERED)
def test_examples_run(page: str, given: dict[str, Any], here: Path) -> None:
    for example, delivered in zip(pages.examples(page), DELIVERED[page], strict=True):
        pages.run(example, given, here)
        if delivered is not None:
            loader = given.get("again", given.get("loader"))
            assert loader is not None and loader.stats()["samples_delivered"] == delivered
    if "writer" in given:
        drawn = {call.args[0]: call.args[1:] for call in given["writer"].add_scalar.call_args_list}
        assert drawn["loader/samples_delivered"] == (100.0, 1)
        assert given["wandb"].log.call_args.args[0]["samples_delivered"] == 100.0


@pytest.mark.parametrize("page", pages.PAGES)
def test_links_lead_somewhere(page: str) -> None:
    assert list(pages.broken_links(page)) == []


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = "# One `two`, three\n[a](#one-two-three) [b](#four) [c](no.md) [d](page.md#one) [e](https://x.y)\n```\n[f](g)\n```\n"
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert list(pages.broken_links("page.md")) == ["#four", "no.md", "page.md#one"]


def test_the_readme_is_short() -> None:
    assert len(pages.text("README.md").encode()) <= README_BYTES


def test_the_manual_has_an_index() -> None:
    found = {page.rpartition("/")[2] for page in pages.PAGES if page.startswith(f"{MANUAL}/")} - {"README.md"}
    assert found == set(re.findall(r"\((\w+\.md)\)", pages.text(f"{MANUAL}/README.md")))


ROOMS = [page for page in pages.PAGES if re.fullmatch(r"minato_gpu/(?!manual)\w+/README.md", page)]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_takes_gives_promises_and_must_not_import(room: str) -> None:
    rows = re.findall(r"^\| ([a-z][^|]*) \| \S.* \|$", pages.text(room), flags=re.MULTILINE)
    assert rows[:4] == ["comes in", "goes out", "promises", "may not import"]
