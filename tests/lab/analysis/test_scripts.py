"""Scripts under analysis: the loader is found, all is measured, and whatever the script does, what is known is kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from minato_gpu.lab.analysis.breakdown import broken_down
from minato_gpu.lab.analysis.profile import Setting
from minato_gpu.lab.analysis.script import Result, ScriptOrder, result_of
from tests.lab.analysis.scripts import FEW_BATCHES, SET_CLOCK, data, written
from tests.support.programs import Program

CLEAN = "print('cleaned up', flush=True)"


class Ran:
    """A script that has run under analysis: what it left, said, and how it ended."""

    def __init__(self, folder: Path, body: str, *arguments: str, seconds: float = 0.5, verify_s: float = 0.0) -> None:
        order = ScriptOrder(written(folder, body), arguments, str(folder), seconds, verify_s=verify_s)
        program = Program("minato_gpu.lab.analysis.child", order.text(), at_once=True)
        self.said, self.errors = program.communicate()
        self.code = program.returncode
        found = result_of(folder, 0)
        assert found is not None, self.errors
        self.result: Result = found

    @property
    def phases(self) -> set[str]:
        assert self.result.profile is not None, (self.result, self.errors)
        return set(self.result.profile.phases)


@pytest.mark.parametrize("kind", ["DataLoader", "minato_gpu.DataLoader"])
@pytest.mark.parametrize("workers", [0, 2])
def test_all_is_measured_and_the_script_stopped(tmp_path: Path, kind: str, workers: int) -> None:
    folder = data(tmp_path / "data")
    body = f"""
loader = {kind}(Files(sys.argv[1]), 4, shuffle=True, num_workers={workers})
try:
    while True:
        train(loader)
finally:
    {CLEAN}
"""
    ran = Ran(tmp_path, body, folder)
    assert (ran.code, ran.result.status, ran.said) == (0, "complete", "cleaned up\n"), ran.errors
    profile = ran.result.profile
    assert profile is not None
    assert profile.loader == ("torch" if kind == "DataLoader" else "minato_gpu")
    assert (profile.samples, profile.batch_size, profile.workers, profile.batches) == (64, 4, workers, 16)
    assert {"sight", "compute", "warm"} <= ran.phases
    found = broken_down(profile)
    assert found is not None and sum(part.share for part in found.parts.values()) == pytest.approx(1.0)
    assert profile.prepare_s and all(seconds > 0 for seconds in profile.prepare_s)
    assert profile.slowest[0][1].endswith(".bin")
    if workers:
        assert [count for count, _ in profile.scaling] == [1, 2]
    assert json.loads(json.dumps(asdict(profile)))["samples"] == 64
    if "cold" in ran.phases:  # else the temporary folder is in memory, which a note says
        assert profile.storage is None or profile.storage.nbytes == 2000
    else:
        assert any("page cache kept" in note for note in profile.notes)


@pytest.mark.parametrize("kind", ["DataLoader", "minato_gpu.DataLoader"])
def test_other_settings_are_run(tmp_path: Path, kind: str) -> None:
    body = (
        SET_CLOCK
        + f"""
loader = {kind}(Files(sys.argv[1]), 4, num_workers=1)
while True:
    for batch in loader:
        pass
"""
    )
    ran = Ran(tmp_path, body, data(tmp_path / "data"), verify_s=20.0)
    assert (ran.code, ran.result.status) == (0, "complete"), ran.errors
    tried = {trial.setting: trial for trial in ran.result.tried}
    for setting in (Setting(), Setting(workers=2), Setting(loader="torch"), Setting(loader="minato_gpu")):
        trial = tried.get(setting)  # one of the loaders is the script's own
        assert trial is None or ((trial.epoch_s or 0) > 0 and not trial.why_not), trial
    assert tried[Setting()].epoch_s
    assert ran.errors.count("more workers") == ran.errors.count("worker processes in total") == 0


def test_of_an_epoch_of_unknown_length_no_setting_is_tried(tmp_path: Path) -> None:
    body = """
class Stream(IterableDataset):
    def __iter__(self): return iter(torch.zeros(400, 100))
loader = DataLoader(Stream(), 4)
while True:
    train(loader)
"""
    ran = Ran(tmp_path, body, verify_s=5.0)
    assert (ran.code, ran.result.status, ran.result.tried) == (0, "complete", ()), ran.errors
    assert ran.result.profile is not None and ran.result.profile.samples == 0
    assert "no other setting was tried" in " ".join(ran.result.profile.notes)


def test_epochs_keep_their_length(tmp_path: Path) -> None:
    body = (
        FEW_BATCHES
        + """
loader = DataLoader(Files(sys.argv[1]), 4, num_workers=1)
for epoch in range(3):
    given = train(loader)
    assert given == [4] * 16 == [4] * len(loader), given
print("three epochs")
"""
    )
    ran = Ran(tmp_path, body, data(tmp_path / "data"), seconds=1000.0)
    assert (ran.code, ran.result.status, ran.said) == (0, "ended", "three epochs\n"), ran.errors
    assert {"sight", "compute", "warm"} <= ran.phases
    # 25 % of an epoch for each phase: one epoch is enough for all four, less the batches that settle
    assert ran.result.profile is not None and len(ran.result.profile.step_s) >= 3


def test_a_batch_is_replayed_as_it_was(tmp_path: Path) -> None:
    body = """
class Numbers(Dataset):
    def __len__(self): return 400
    def __getitem__(self, index): return torch.full((100,), float(index + 1))
loader = DataLoader(Numbers(), 4)
while True:
    for batch in loader:
        assert batch.min() > 0, "a batch that was changed in place came again"
        batch.zero_()
"""
    ran = Ran(tmp_path, body)
    assert (ran.code, ran.result.status) == (0, "complete"), ran.errors
    assert "Which files samples are in could not be seen" in " ".join(ran.result.profile.notes)  # type: ignore[union-attr]


def test_validation_is_left_alone(tmp_path: Path) -> None:
    body = """
files = Files(sys.argv[1])
checked, trained = DataLoader(files, 2), DataLoader(files, 4)
while True:
    with torch.no_grad():
        assert sum(len(batch) for batch in checked) == 64
    train(trained)
"""
    ran = Ran(tmp_path, body, data(tmp_path / "data"))
    assert (ran.code, ran.result.status) == (0, "complete"), ran.errors
    assert ran.result.profile is not None and ran.result.profile.batch_size == 4
    first, second = ran.result.loaders
    assert "asked for" in first and "analysed" in second and "16 batches an epoch" in second


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_script_that_dies_keeps_what_was_measured(tmp_path: Path) -> None:
    body = (
        FEW_BATCHES
        + """
loader = DataLoader(Files(sys.argv[1]), 4)
for epoch in range(2):
    train(loader)
raise RuntimeError("no space left on device")
"""
    )
    ran = Ran(tmp_path, body, data(tmp_path / "data"), seconds=1000.0)
    assert (ran.code, ran.result.status) == (1, "died")
    assert ran.result.message == "RuntimeError: no space left on device"
    assert "Traceback" in ran.errors
    assert {"compute", "warm"} <= ran.phases


def test_who_swallows_the_end_is_told_again(tmp_path: Path) -> None:
    body = """
loader, ends = DataLoader(Files(sys.argv[1]), 4), 0
while ends < 3:
    try:
        train(loader)
    except BaseException:
        ends += 1
print("still here")
"""
    ran = Ran(tmp_path, body, data(tmp_path / "data"))
    assert (ran.code, ran.result.status, ran.said) == (0, "complete", "still here\n"), ran.errors


def test_it_ends_when_the_command_is_gone(tmp_path: Path) -> None:
    """The parent's id is looked at before each batch: here it is another one from the start."""
    body = """
before = os.getppid
train(loader := DataLoader(Files(sys.argv[1]), 4))
os.getppid = lambda: before() + 1
train(loader)
raise AssertionError("it went on")
"""
    ran = Ran(tmp_path, body, data(tmp_path / "data"), seconds=1000.0)
    assert ran.result.status == "complete" and "it went on" not in ran.errors


def test_a_loader_for_each_epoch_is_one_loader(tmp_path: Path) -> None:
    """Epochs of validation, and loaders of another shape, are not taken for it."""
    folder = data(tmp_path / "data")
    body = """
seen = []
for epoch in range(10_000):
    train(DataLoader(Files(sys.argv[1]), 4, shuffle=True, num_workers=1))
    with torch.no_grad():
        assert len([batch for batch in DataLoader(Files(sys.argv[1]), 4, num_workers=1)]) == 16
    assert len([batch for batch in DataLoader(Files(sys.argv[1]), 8)]) == 8
"""
    ran = Ran(tmp_path, body, folder)
    assert (ran.code, ran.result.status) == (0, "complete"), ran.errors
    assert {"compute", "warm"} <= ran.phases
