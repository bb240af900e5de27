"""The examples run as a user runs them."""

from __future__ import annotations

import re

import pytest
from processes import REPOSITORY, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


def accuracy(output: str) -> float:
    [found] = re.findall(r"^Test accuracy (\d\.\d+)", output, re.MULTILINE)
    return float(found)


@pytest.mark.parametrize(("name", "at_least"), [("demo.py", 0.9), ("library.py", 0.8), ("own_module.py", 0.65)])
def test_example(tmp_path, name, at_least):
    assert accuracy(run(REPOSITORY / "examples" / name, cwd=tmp_path).succeeded().output) >= at_least


def test_library_on_cora(tmp_path, shared):
    arguments = ["--root", shared / "planetoid", "--epochs", 10]
    finished = run(REPOSITORY / "examples" / "library.py", *arguments, cwd=tmp_path).succeeded()
    assert accuracy(finished.output) >= 0.7
