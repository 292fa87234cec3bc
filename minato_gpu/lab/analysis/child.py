"""The process that runs the script: ``python -m minato_gpu.lab.analysis.child ORDER``.

The script runs as ``python SCRIPT ARGUMENT...`` would run it, but that its loader's batches come from the analysis.
What is known is written after every phase, so that it is there whatever becomes of the script.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from minato_gpu.lab.analysis import conductor
from minato_gpu.lab.analysis.ranks import Lockstep
from minato_gpu.lab.analysis.script import Result, ScriptOrder, Status, in_one_line
from minato_gpu.lab.analysis.subject import Subject


class ScriptRun:
    """One script under analysis."""

    def __init__(self, order: ScriptOrder) -> None:
        self.order = order
        self._folder = Path(order.folder)
        self._loaders = conductor.Loaders(self._begin, order.loader)

    def to_its_end(self) -> int:
        """Runs the script; returns the exit code: 1 if it died before the analysis had what it needs, else 0."""
        self._leave("starting")
        self._loaders.install()
        status, message = self._how_it_ended()
        if (found := self._loaders.conductor) is not None:
            if found.over or found.measured:  # how the script ends does not matter then
                status = "complete"
            if status != "stopped":
                found.script_ended()
            found.lockstep.close()
        self._leave(status, message)
        return 1 if status == "died" else 0

    def _how_it_ended(self) -> tuple[Status, str]:
        """Runs the script; returns how it ended, and why, in a sentence."""
        try:
            self._run_script()
        except conductor.Over:
            return "complete", ""
        except SystemExit as error:
            if error.code not in (None, 0):
                return "died", f"it ended with exit code {error.code}"
        except KeyboardInterrupt:
            return "stopped", "it was interrupted"
        except BaseException as error:
            traceback.print_exc()
            return "died", in_one_line(error)
        return "ended", ""

    def _run_script(self) -> None:
        order = self.order
        sys.argv = [order.script, *order.arguments]
        if order.is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(order.script, run_name="__main__", alter_sys=True)
            return
        sys.path.insert(0, str(Path(order.script).resolve().parent))
        module = ModuleType("__main__")
        module.__file__ = order.script
        sys.modules["__main__"] = module  # for good: workers that are spawned, and pickles, look there
        with io.open_code(os.path.abspath(order.script)) as file:  # noqa: PTH100 -- links stay
            code = compile(file.read(), order.script, "exec")
        exec(code, module.__dict__)

    def _begin(self, loader: Any) -> conductor.Conductor:
        """Makes the conductor, as the loader to analyse has been found."""
        order = self.order
        notes = self._folder / f"notes-{order.rank}"
        notes.mkdir(exist_ok=True)
        lockstep = Lockstep(self._folder, order.rank, order.ranks)
        return conductor.Conductor(
            Subject(loader, str(notes)),
            order.seconds,
            lambda: self._leave("measuring"),
            lockstep,
            verify_s=order.verify_s,
        )

    def _leave(self, status: Status, message: str = "") -> None:
        """Writes what is known so far."""
        order, found = self.order, self._loaders.conductor
        profile = None if found is None else found.findings.profile(order.rank, order.ranks)
        tried = () if found is None or found.trials is None else tuple(found.trials.found)
        Result(status, order.rank, message, profile, tuple(self._loaders.described()), tried).leave(self._folder)


def main() -> int:
    """Runs the script that ``sys.argv`` orders; returns the exit code."""
    order = ScriptOrder(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = ScriptRun(order).to_its_end()
    sys.stdout.flush()
    sys.stderr.flush()
    others = [each for each in threading.enumerate() if each is not threading.main_thread() and not each.daemon]
    if others:  # the script's own: they would keep this process for as long as they like
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
