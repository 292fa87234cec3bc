"""The process that runs the script: ``python -m minato_gpu.lab.analysis.child ORDER``.

The script runs as ``python SCRIPT ARGUMENT...`` would run it, but that its loader's batches come from the analysis.
What is known is written after every phase, so that it is there whatever becomes of the script.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from minato_gpu.lab.analysis.script import Result, ScriptOrder, Status, in_one_line


class ScriptRun:
    """One script under analysis."""

    def __init__(self, order: ScriptOrder) -> None:
        self.order = order
        self._folder = Path(order.folder)
        self._loaders: Any = None
        self._conductor: Any = None

    def to_its_end(self) -> int:
        """Runs the script; returns the exit code: 1 if it died before the analysis had what it needs, else 0."""
        from minato_gpu.lab.analysis.conductor import Loaders, Over

        self._loaders = Loaders(self._begin, self.order.loader)
        self._leave("starting")
        self._loaders.install()
        try:
            self._run_script()
        except Over:
            return self._ended("complete")
        except SystemExit as error:
            if error.code not in (None, 0):
                return self._ended(self._unless_over("died"), f"it ended with exit code {error.code}")
        except KeyboardInterrupt:  # also where the loader was in another thread: see _begin
            return self._ended(self._unless_over("stopped"), "it was interrupted")
        except BaseException as error:
            traceback.print_exc()
            return self._ended(self._unless_over("died"), in_one_line(error))
        return self._ended(self._unless_over("ended"))

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

    def _begin(self, loader: Any) -> Any:
        """Makes the conductor, as the loader to analyse has been found."""
        from minato_gpu.lab.analysis.conductor import Conductor
        from minato_gpu.lab.analysis.ranks import Lockstep
        from minato_gpu.lab.analysis.subject import Subject

        order = self.order
        notes = self._folder / f"notes-{order.rank}"
        notes.mkdir(exist_ok=True)
        subject = Subject(loader, str(notes))
        lockstep = Lockstep(self._folder, order.rank, order.ranks)
        self._conductor = Conductor(
            subject, order.seconds, lambda: self._leave("measuring"), lockstep, verify_s=order.verify_s
        )
        self._leave("measuring")
        return self._conductor

    def _unless_over(self, status: Status) -> Status:
        """Returns "complete" once the analysis is through: how the script ends does not matter then."""
        conductor = self._conductor
        return "complete" if conductor is not None and (conductor.over or conductor.measured) else status

    def _ended(self, status: Status, message: str = "") -> int:
        if status in ("ended", "died", "complete") and self._conductor is not None:
            self._conductor.script_ended(f"the script ended{f': {message}' if message else ''}")
        self._loaders.uninstall()
        if self._conductor is not None:
            self._conductor.lockstep.close()
        self._leave(status, message)
        return 1 if status == "died" else 0

    def _leave(self, status: Status, message: str = "") -> None:
        order, conductor = self.order, self._conductor
        profile = None if conductor is None else conductor.findings.profile(order.rank, order.ranks)
        tried = () if conductor is None or conductor.trials is None else tuple(conductor.trials.found)
        Result(status, order.rank, message, profile, tuple(self._loaders.described()), tried).leave(self._folder)


def main() -> int:
    """Runs the script that ``sys.argv`` orders; returns the exit code."""
    order = ScriptOrder.of(sys.argv[1])
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
