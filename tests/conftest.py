"""Options of the tests, which warnings are errors, and how many cases were left out.

The process of xdist that hands tests out runs none, so it need not import torch (1.3 s, 200 MB): what does is in
support/rules.py, which is loaded where tests run.

Hypothesis draws the same examples in every run, so that a red run is the change's; ``--hypothesis-profile=search``
draws new ones, ten times as many.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest

LEFT_OUT = pytest.StashKey[int]()  # how many cases were
_EXAMPLE = 5_000  # ms for one example: an endless one, not one on a busy machine

hypothesis.settings.register_profile("same", derandomize=True, deadline=_EXAMPLE)
hypothesis.settings.register_profile("search", max_examples=1000, deadline=_EXAMPLE)
hypothesis.settings.load_profile("same")
hypothesis.settings.register_profile(
    "first", derandomize=True, deadline=_EXAMPLE, phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)  # the first example that fails will do


def half(of: hypothesis.settings | None = None) -> hypothesis.settings:
    """Half as many examples as the loaded profile makes, for a test whose examples are long; ``of``: settings that say
    other things, too."""
    whole = hypothesis.settings() if of is None else of
    return hypothesis.settings(whole, max_examples=whole.max_examples // 2)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="a GPU test that is skipped counts as failed")
    parser.addoption("--all", action="store_true", help="run every combination of parameters, and PyTorch's own loader")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu: needs a CUDA device; give it to single parameters by marks=pytest.mark.gpu"
    )
    config.addinivalue_line("markers", "on_request: runs with --all only; say why beside it")
    config.addinivalue_line("markers", "each_value: each value of a parameter is tried, not each pair of values")
    config.addinivalue_line("filterwarnings", "error")
    # Depends on the machine's number of cores; test_construction checks the warning itself.
    config.addinivalue_line("filterwarnings", "ignore:This DataLoader will create:UserWarning")
    # Python 3.12 and later say it of every fork where some library has started threads, of PyTorch's loader as well.
    config.addinivalue_line("filterwarnings", "ignore:This process .* is multi-threaded:DeprecationWarning")
    # PyTorch 2.11 says it once for any sparse tensor, also where the checks were asked for; 2.13 does not.
    config.addinivalue_line("filterwarnings", "ignore:Sparse invariant checks are implicitly disabled:UserWarning")
    # DALI says it when the first graph for a GPU is built where NPP is not installed, which no stage here asks for.
    config.addinivalue_line("filterwarnings", "ignore:nvidia-dali-cuda... is no longer shipped with CUDA:Warning")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Loads the rules for tests, but not in the process that hands tests out."""
    if not session.config.pluginmanager.hasplugin("dsession"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as while pytest loads a conftest
            session.config.pluginmanager.import_plugin("tests.support.rules")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of xdist: it tells what it deselected, which xdist does not."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All processes of xdist collect the same."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("deselected", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash.get(LEFT_OUT, 0)
    if left_out:
        if "deselected" not in terminalreporter.stats:  # but by xdist's processes: for the last line
            terminalreporter.stats["deselected"] = [SimpleNamespace() for _ in range(left_out)]
        terminalreporter.write_line(
            f"{left_out} cases left out, which --all runs (make test-all): see tests/support/selection.py"
        )
