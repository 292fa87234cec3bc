"""What all commands share: the option ``--json``, errors in one line, the document, pipelines by their names."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import click

JSON_OPTION = click.option(
    "--json", "json_path", metavar="PATH", help="Write the figures as one JSON document to PATH; - is standard output."
)


@contextmanager
def plain_errors(context: click.Context) -> Iterator[None]:
    """Say an error in one line instead of a traceback, unless ``--traceback`` asked for it."""
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
    """The message; of one that quotes a worker's traceback, as PyTorch's do, where it happened and what it was."""
    lines = str(error).strip().splitlines()
    if any("Traceback (most recent call last)" in line for line in lines):
        return f"{lines[0]}\n{lines[-1]}"
    return str(error)


def leave_rows(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], json_path: str | None) -> None:
    """Write rows as a document where ``--json`` asks for one."""
    from minato_gpu import report

    if json_path is not None:
        report.write(report.document(settings, rows), json_path)


def leave_json(document: Mapping[str, Any], json_path: str | None) -> None:
    """Write the document where ``--json`` asks for it."""
    from minato_gpu import report

    if json_path is not None:
        report.write(document, json_path)


def need_pipeline(module: str) -> str:
    """The name to import ``module`` by. One of the current folder counts too, as with ``python -m``.

    ``pipelines.NAME`` is one of ours too, as in a clone, where no module of the user's is called so.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for name in (module, f"minato_gpu.{module}") if module.startswith("pipelines.") else (module,):
        try:
            found = import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        if not callable(getattr(found, "pipeline", None)):
            raise click.UsageError(f"{module} defines no pipeline: it needs a function pipeline() that returns one")
        return name
    raise click.UsageError(f"no module named {module}, from here or installed")
