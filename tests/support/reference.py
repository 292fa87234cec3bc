"""The manual's page reference.md, made of docstrings and of the command line: ``python -m tests.support.reference``."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
from torch.utils.data import DataLoader as TorchDataLoader

import minato_gpu
from minato_gpu import DataLoader
from minato_gpu.lab.cli import main

PAGE = Path(minato_gpu.__file__).parent / "manual" / "reference.md"
STATISTICS = PAGE.with_name("statistics.md")
MORE = {  # pages that say more about an argument
    "pipeline": "pipelines.md",
    "device": "gpus.md#several-gpus",
    "lanes": "gpus.md",
    "prefetch_factor": "workers.md#memory",
    "host_memory_budget": "workers.md#memory",
    "device_memory_budget": "gpus.md#memory",
    "on_error": "failures.md",
    "max_failures": "failures.md",
    "on_worker_death": "failures.md#workers-that-die",
    "hang_timeout": "failures.md#workers-that-hang",
    "snapshot_every_n_steps": "resuming.md",
    "max_workers": "workers.md#how-many-workers",
    "cache": "storage.md#caches",
    "cache_dir": "storage.md#caches",
    "share": "several_jobs.md#reading-once",
    "share_budget": "several_jobs.md#preparing-once",
    "trace": "watching.md#a-trace-of-every-sample",
    "metrics_port": "watching.md#prometheus",
    "cluster": "several_machines.md",
}
HEAD = """# Reference

<!-- python -m tests.support.reference writes this page from docstrings and the command line. -->

The names of the package are in its docstrings: `help(minato_gpu.DataLoader)`, `dir(minato_gpu)`.

## Arguments

`minato_gpu.DataLoader` takes PyTorch's arguments, with [their meaning](migrating.md#arguments). Beyond them:
"""


def section(docstring: str, name: str) -> dict[str, str]:
    """The entries of a section (``Args``, ``Returns``) of a docstring in Google's style, each on one line."""
    text = inspect.cleandoc(docstring).partition(f"\n{name}:\n")[2]
    block = re.split(r"^\S", text, flags=re.MULTILINE)[0]
    entries = re.findall(r"^    ([\w.*]+): (.*(?:\n {5,}.*)*)", block, flags=re.MULTILINE)
    return {key: re.sub(r"\s+", " ", value) for key, value in entries}


def statistics() -> dict[str, str]:
    """The entries of the manual's page on ``stats()``: key and text."""
    text = STATISTICS.read_text(encoding="utf-8")
    return dict(re.findall(r"^- \*\*`([\w.*]+)`\*\* (.*(?:\n  .*)*)", text, flags=re.MULTILINE))


def page() -> str:
    """The page as it should be."""
    return "\n".join([HEAD, *_arguments(), *_commands(), ""])


def _item(name: str, text: str) -> str:
    line = f"- **`{name}`** {text}".replace("``", "`")
    return textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _arguments() -> Iterator[str]:
    own = inspect.signature(DataLoader).parameters.keys() - inspect.signature(TorchDataLoader).parameters.keys()
    for name, text in section(DataLoader.__doc__ or "", "Args").items():
        if name in own | {"prefetch_factor"}:
            more = f" [More]({MORE[name]})." if name in MORE else ""
            yield _item(name, text + more)


def _commands() -> Iterator[str]:
    yield "\n## Commands\n"
    yield "Each takes `--help`, and `--json PATH` for its figures as one JSON document (`-` is standard output)."
    yield "`python -m minato_gpu` is the same as `minato-gpu`, for torchrun."
    for name, command in sorted(main.commands.items()):
        context = click.Context(command, info_name=f"minato-gpu {name}", show_default=True)
        yield f"\n### {name}\n\n`{command.get_usage(context).removeprefix('Usage: ')}`\n"
        yield re.sub(r"[ \t]*\n[ \t]*", "\n", inspect.cleandoc(command.help or "")) + "\n"
        for parameter in command.params:
            if isinstance(parameter, click.Option) and parameter.name != "path":  # --json
                names, text = parameter.get_help_record(context) or ("", "")
                yield _item(names, re.sub(r"\s+", " ", text).replace("[", r"\["))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
