"""The JSON document of commands and benchmarks."""

from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pytest

from minato_gpu import report


def test_the_document_has_its_five_keys_and_what_is_added() -> None:
    before = datetime.now(UTC).date()
    document = report.document({"seeds": 3}, [{"a_s": 1.0}], total=7)
    assert before <= date.fromisoformat(document["date"]) <= datetime.now(UTC).date()
    assert document["total"] == 7
    assert document["settings"] == {"seeds": 3}
    assert document["rows"] == [{"a_s": 1.0}]
    assert document["machine"]["cores"] >= 1
    assert document["versions"].keys() >= {"python", "minato-gpu", "torch", "numpy"}


def test_a_file_holds_plain_json(tmp_path: Path) -> None:
    content = {"nan": math.nan, "inf": [math.inf], "numpy": np.float32(0.5), "path": tmp_path, "pair": (1, True)}
    report.write(content, tmp_path / "new" / "report.json")
    read = json.loads((tmp_path / "new" / "report.json").read_text())
    assert read == {"nan": None, "inf": [None], "numpy": 0.5, "path": str(tmp_path), "pair": [1, True]}
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["report.json"]


def test_whether_it_can_be_written_is_found_out_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    for name in ("new", "old", "some/folder/new"):
        report.check_writable(tmp_path / name)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "old")]
    with pytest.raises(OSError, match="something else than a file"):
        report.check_writable(tmp_path)
    with pytest.raises(NotADirectoryError):
        report.check_writable(tmp_path / "old" / "new")


def test_a_dash_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    report.write({"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
