"""The parts that all commands share: the option ``--json``, errors in one line, the document, pipelines by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from minato_gpu.lab.console import open_console


class CommandOutput:
    """The ``console`` for a command's figures, and the document for them if ``--json`` names a ``path``."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.console = open_console(path)

    def leave(self, document: Mapping[str, Any]) -> None:
        """Writes the document, if it is asked for."""
        if self._path is not None:
            from minato_gpu.lab import report

            report.write(document, self._path)

    def leave_rows(self, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes a document of these rows, if it is asked for."""
        if self._path is not None:
            from minato_gpu.lab import report

            report.write(report.document(settings, rows), self._path)


def writable(context: click.Context, parameter: click.Parameter, path: Any) -> Any:
    """Returns the value of an option that names a file to be written at the end ("-" and None are none).

    Raises BadParameter, before the command has begun, if it cannot be written.
    """
    if path is not None and path != "-":
        from minato_gpu.lab import report

        try:
            report.check_writable(path)
        except OSError as error:
            raise click.BadParameter(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    return path


def shows(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a command of a function that shows figures: adds ``--json``, and passes a CommandOutput before its
    arguments; errors are shown by ``plain_errors``."""

    @click.option(
        "--json",
        "path",
        metavar="PATH",
        callback=writable,
        help="Write the figures as one JSON document to PATH; - is standard output.",
    )
    @click.pass_context
    @wraps(function)
    def command(context: click.Context, /, path: str | None, **arguments: Any) -> None:
        with plain_errors(context):
            function(CommandOutput(path), **arguments)

    return command


@contextmanager
def plain_errors(context: click.Context) -> Iterator[None]:
    """Shows an error in one line instead of a traceback, unless ``--traceback`` asked for it."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if context.obj:
            raise
        plain = isinstance(error, (OSError, ValueError)) or type(error).__module__.startswith("minato_gpu")
        kind = "" if plain else f"{type(error).__name__}: "
        raise click.ClickException(f"{kind}{_brief(error)}\n(minato-gpu --traceback ... shows where)") from error


def _brief(error: Exception) -> str:
    """Returns the message; of one that quotes a worker's traceback, as PyTorch's do, its first and last line."""
    lines = str(error).strip().splitlines()
    if any("Traceback (most recent call last)" in line for line in lines):
        return f"{lines[0]}\n{lines[-1]}"
    return str(error)


def _module_of(file: Path) -> str:
    """Returns the name of the module in this file, and puts its folder on ``sys.path``."""
    names, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    sys.path.insert(0, str(folder))
    return ".".join(names)


def imported(module: str) -> ModuleType:
    """Imports a module by its name or file, whose folder goes on ``sys.path``; so does the current one, as with
    ``python -m``.

    ``pipelines.NAME`` is one of ours too, as in a clone, where no module of the user's is called so. Raises UsageError
    where there is none.
    """
    if module.endswith(".py") and Path(module).is_file():
        module = _module_of(Path(module).resolve())
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in (module, f"minato_gpu.{module}") if module.startswith("pipelines.") else (module,):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    raise click.UsageError(f"no module named {module}, from here or installed")
