"""Strategies of other packages: found by their entry points, imported when named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import REPOSITORY, environment

STRATEGY = """
from lightning_gnn import GNNStrategy
from lightning_gnn.strategy.scheme import EdgeCutScheme
class Mine(GNNStrategy):
    strategy_name = "mine"
    def __init__(self, **options):
        super().__init__(EdgeCutScheme(), **options)
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with an installed package that brings a strategy, one that cannot be imported, and one with a name of ours."""
    (tmp_path / "their_package.py").write_text(STRATEGY)
    (tmp_path / "their_broken.py").write_text("import a_package_that_is_not_there\n")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    names = {"mine": "their_package:Mine", "broken": "their_broken:Broken", "dgcl": "their_package:Mine"}
    lines = [f"{name} = {value}" for name, value in names.items()]
    (info / "entry_points.txt").write_text("\n".join(["[lightning_gnn.strategies]", *lines]) + "\n")
    return tmp_path


def said(plugin: Path, code: str) -> tuple[str, str]:
    """Returns what a new process says, which imports everything anew."""
    ran = subprocess.run(
        ["env", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(), "PYTHONPATH": f"{plugin}:{REPOSITORY}"},
    )
    return ran.stdout, ran.stderr


def test_a_plugin_is_imported_when_it_is_named(plugin):
    out, err = said(
        plugin,
        "import sys, lightning_gnn, lightning as L\n"
        "print('their_package' in sys.modules)\n"
        "trainer = L.Trainer(strategy='mine', devices=2, accelerator='cpu', logger=False, enable_checkpointing=False)\n"
        "print(type(trainer.strategy).__module__, trainer.strategy._start_method)\n"
        "trainer = L.Trainer(strategy='mine_spawn', devices=2, accelerator='cpu', logger=False)\n"
        "print(trainer.strategy._start_method)\n",
    )
    assert out.splitlines() == ["False", "their_package popen", "spawn"], err
    assert err.count("Skipped strategy 'dgcl' of the package their-package: another strategy has this name.") == 1


def test_tools_find_plugins_and_leave_out_a_broken_one_with_one_warning(plugin):
    out, err = said(
        plugin,
        "from lightning_gnn.strategies import registered\n"
        "from lightning_gnn.tools.parity import make_strategies\n"
        "print('mine' in registered(), 'broken' in registered(), registered()['dgcl'].__module__)\n"
        "print('mine' in [each.strategy_name for each in make_strategies()])\n",
    )
    assert out.splitlines() == ["True False lightning_gnn.strategies.dgcl.strategy", "True"], err
    text = "their_broken:Broken, a strategy of the package their-package, cannot be imported: ModuleNotFoundError"
    assert err.count(text) == 1


def test_a_broken_plugin_is_told_of_when_it_is_named(plugin):
    _, err = said(plugin, "import lightning_gnn, lightning as L\nL.Trainer(strategy='broken', devices=2)\n")
    assert "ImportError: their_broken:Broken, a strategy of the package their-package, cannot be imported" in err
    assert "No module named 'a_package_that_is_not_there'" in err
