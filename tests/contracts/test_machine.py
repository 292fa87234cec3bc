"""The machine of the contract: a few examples of it, the same each time, and that it notices what must not be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import click.testing
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.contracts import chaos, lineage
from tests.contracts.cases import Case
from tests.contracts.lineage import WrongError
from tests.contracts.machine import AS_USUAL, EPOCHS, Machine, cases

_FEW = settings(
    max_examples=25,
    stateful_step_count=15,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_a_loader_and_its_successors() -> None:
    run_state_machine_as_test(Machine, settings=_FEW)


def test_the_machine_begins_with_every_value_that_it_may() -> None:
    left_out = {"interruption", "epochs", "ranks", *AS_USUAL}
    for name in {field.name for field in dataclasses.fields(Case)} - left_out:
        assert len({getattr(case, name) for case in cases()}) > 1
    assert all(eval(str(case)) == case for case in cases())


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.failed.append(made.program)  # what was done to it is no leak
    made.teardown()
    made.failed.clear()


_LOSSES: dict[str, Callable[[list[Any]], list[Any]]] = {
    "missing": lambda got: got[1:],
    "twice": lambda got: [*got[:1], *got],
    "late": lambda got: got[::-1],
    "content": lambda got: [tuple(sample._replace(content=0) for sample in batch) for batch in got],
    "drawn": lambda got: [tuple(sample._replace(drawn=(0.5,) * 3) for sample in batch) for batch in got],
}


@pytest.mark.parametrize("lateness", [0, 1])
@pytest.mark.parametrize("loss", _LOSSES)
def test_it_notices(machine: Machine, loss: str, lateness: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what a successor delivers."""
    machine.start(case=Case(batch=1, lateness=lateness, epochs=EPOCHS), death="", budget=None)
    machine.take(count=5)
    machine.save(ahead=0)
    machine.load(which=0, workers=1, same=False, count=0)
    part = lineage.Lineage.part

    def losing(self: Any, ahead: int = 0) -> Any:
        found = part(self, ahead)
        return dataclasses.replace(found, got=_LOSSES[loss](found.got))

    monkeypatch.setattr(lineage.Lineage, "part", losing)
    with pytest.raises(AssertionError):
        machine.finish()


def test_it_notices_a_process_that_stays(machine: Machine) -> None:
    machine.start(case=Case(epochs=EPOCHS), death="", budget=None)
    machine.take(count=1)
    kept = machine.line.iterator
    with pytest.raises(AssertionError, match="left behind: process"):
        machine.check_left(0.1)
    del kept


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command runs few machines, of few steps."""
    few = settings(chaos.SETTINGS, max_examples=2, stateful_step_count=6, phases=[Phase.generate])
    monkeypatch.setattr(chaos, "SETTINGS", few)


@pytest.mark.usefixtures("short")
def test_a_failure_is_a_program_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "check", _refuses)
    said = click.testing.CliRunner().invoke(chaos.main, ["--seconds", "0", "--seed", "1"])
    assert said.exit_code == 1 and "seed 1" in said.output
    program = said.output[said.output.index("from tests.contracts") :]
    assert "    machine.start(case=Case(" in program and len(program.splitlines()) < 25
    with pytest.raises(WrongError, match="nothing is right"):
        exec(program, {})


def _refuses(*_: Any) -> None:
    raise WrongError("nothing is right")


@pytest.mark.usefixtures("short")
def test_the_command_tells_what_was_done() -> None:
    said = click.testing.CliRunner().invoke(chaos.main, ["--seconds", "0"])
    assert said.exit_code == 0, said.output
    assert "runs" in said.output and "steps" in said.output and "seed" in said.output
