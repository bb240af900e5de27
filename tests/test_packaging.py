"""What is built has every file of the package; and the public API has types."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from processes import REPOSITORY

import lightning_gnn

PROGRAM = REPOSITORY / "tests" / "public_api.py"
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def built(what: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", BUILD, what, str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_has_every_file(tmp_path):
    """As an installer builds it: from what the sdist holds, and nothing else."""
    source = tmp_path / "checkout"
    source.mkdir()
    for name in ("lightning_gnn", "pyproject.toml", "README.md", "LICENSE"):
        os.symlink(REPOSITORY / name, source / name)
    with tarfile.open(built("build_sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    [unpacked] = (tmp_path / "sdist").iterdir()
    with zipfile.ZipFile(built("build_wheel", unpacked, tmp_path)) as wheel:
        names = {name for name in wheel.namelist() if name.startswith("lightning_gnn/")}
        [metadata] = (name for name in wheel.namelist() if name.endswith("dist-info/METADATA"))
        assert re.search(r"^Requires-Python: >=3\.10$", wheel.read(metadata).decode(), re.MULTILINE)
    there = {path for path in (REPOSITORY / "lightning_gnn").rglob("*.*") if path.parent.name != "__pycache__"}
    assert names == {path.relative_to(REPOSITORY).as_posix() for path in there}


def test_the_program_of_types_uses_all_names():
    assert not [name for name in lightning_gnn.__all__ if len(re.findall(rf"\b{name}\b", PROGRAM.read_text())) < 2]


@pytest.mark.campaign
@pytest.mark.slow
def test_types_of_the_public_api(tmp_path):
    """`mypy --strict` finds nothing in a program that uses it well, and what is wrong in one that does not."""
    wrong = tmp_path / "wrong.py"
    text = PROGRAM.read_text().replace("epsilon=0.01", 'epsilon="little"')
    wrong.write_text(text.replace("partition_dir=folder", "partition_dirs=folder"))
    command = [*(sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--cache-dir", str(tmp_path))]
    command += ["--ignore-missing-imports", "--follow-imports", "silent"]
    found = [
        subprocess.run([*command, str(each)], cwd=REPOSITORY, capture_output=True, text=True, timeout=250).stdout
        for each in (PROGRAM, wrong)
    ]
    assert found[0].startswith("Success"), found[0]
    errors = re.findall(r'error: .*?"(\w+)".*\[([\w-]+)\]', found[1])
    assert sorted(errors) == [("epsilon", "arg-type"), ("partition_dirs", "arg-type")], found[1]
