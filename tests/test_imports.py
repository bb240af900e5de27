"""What importing the package loads, and what a fit does."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from processes import REPOSITORY
from warm import cold

_SIZE = spec_from_file_location("size", REPOSITORY / ".ci" / "size.py")
size = module_from_spec(_SIZE)
_SIZE.loader.exec_module(size)

NOT_IN_A_RANK = ("jsonargparse", "lightning.pytorch.cli", "lightning_gnn.tools")
FIT = """
import lightning as L
model = lightning_gnn.NodeClassifier(torch_geometric.nn.GCN(8, 8, 1, 2), lr=0.1)
data = lightning_gnn.GraphDataModule(lightning_gnn.planted_partition(100, num_classes=2, num_features=8))
strategy = lightning_gnn.DGCLStrategy()
L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
          enable_progress_bar=False, enable_model_summary=False).fit(model, datamodule=data)
"""


def test_files_of_tests_have_different_names():
    """Otherwise pytest imports one of them in a run of all tests, and reports an error for the other."""
    files = (REPOSITORY / "tests").rglob("test_*.py")
    names = [file.name for file in files if not (file.parent / "__init__.py").exists()]
    assert sorted(names) == sorted({*names})


def loaded(script: str = "") -> tuple[set[str], float]:
    """Returns the modules that a fresh process has loaded since it has imported Lightning and PyG, and the CPU seconds that
    importing this package took."""
    program = f"""
import sys, time
import lightning.pytorch, torch_geometric.nn
before, began = set(sys.modules), time.process_time()
import lightning_gnn
seconds = time.process_time() - began
{script}
print("LOADED", seconds, *sorted(set(sys.modules) - before))
"""
    with cold():
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=280
        )
    _, seconds, *modules = done.stdout[done.stdout.index("LOADED") :].split()
    return set(modules), float(seconds)


def test_the_package_is_imported_in_a_moment_and_loads_no_strategy():
    modules, seconds = loaded()
    assert seconds < 0.3
    assert "lightning_gnn.strategies" in modules and "lightning_gnn.strategy.base" not in modules
    assert not [
        name for name in modules if name.startswith((*NOT_IN_A_RANK, "lightning_gnn.nn", "lightning_gnn.checks"))
    ]


def test_a_fit_of_one_rank_loads_no_command_line_no_checks_of_ranks_and_no_other_scheme():
    modules, _ = loaded(FIT)
    others = ("cover", "gossip", "sampling", "spmm", "vertex_cut")
    of_ranks = ("checks.", "launching.script", "launching.processes", "strategy.self_checks", "strategy.memory_checks")
    names = (*(f"strategies.{name}" for name in others), *of_ranks)
    unused = (*NOT_IN_A_RANK, *(f"lightning_gnn.{name}" for name in names))
    assert "lightning_gnn.strategies.dgcl.strategy" in modules
    assert not [name for name in modules if name.startswith(unused)]


LIMITS = json.loads((REPOSITORY / ".ci" / "limits.json").read_text())


@pytest.mark.parametrize(
    ("what", "script"),
    [("GraphDataModule and DGCLStrategy", "lightning_gnn.GraphDataModule, lightning_gnn.DGCLStrategy"), ("a dgcl fit", FIT)],
)
def test_little_of_the_package_is_loaded(what, script, monkeypatch, tmp_path):
    """Limits are only lowered. Of a fit, the second one: its graph is in the store."""
    monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path))
    loaded(script)
    modules, _ = loaded(script)
    ours = [name for name in modules if name.partition(".")[0] == "lightning_gnn"]
    files = [REPOSITORY.joinpath(*name.split(".")) for name in ours]
    lines = sum(size.code_lines(each / "__init__.py" if each.is_dir() else each.with_suffix(".py")) for each in files)
    most = LIMITS["loaded"][what]
    assert len(ours) <= most["modules"] and lines <= most["code_lines"], (len(ours), lines)


def test_only_the_registry_names_modules_by_strings():
    """Elsewhere import contracts see what is imported; two packages take names from the registry when asked for them."""
    package = REPOSITORY / "lightning_gnn"
    may = {package / "registry.py", package / "__init__.py", package / "strategies" / "__init__.py"}
    for file in set(package.rglob("*.py")) - may:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
                assert not ast.unparse(node.args[0]).startswith(("'lightning_gnn.", "f'lightning_gnn.")), file


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("StagedStrategy", "ckpt_path"),
        ("labelled", "batch.train_mask"),
        ("mean_over_ranks", r"x.mean\(0\)"),
        ("sum_over_ranks", r"x.sum\(0\)"),
    ],
)
def test_names_that_were_removed_say_what_replaces_them(name, instead):
    import lightning_gnn

    with pytest.raises(ImportError, match=f"lightning_gnn.{name} was removed. .*{instead}"):
        getattr(lightning_gnn, name)


@pytest.mark.parametrize(("name", "package"), [("optuna", "optuna"), ("hydra", "hydra-core")])
def test_a_missing_package_is_an_error_with_the_command(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"lightning_gnn.{name}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=f"Run pip install {package}"):
        import_module(f"lightning_gnn.{name}")


def test_every_name_of_the_package_is_there():
    import lightning_gnn

    for name in lightning_gnn.__all__:
        assert getattr(lightning_gnn, name).__name__.replace("_", "").lower() in (name.replace("_", "").lower(),)
    assert lightning_gnn.nn.gather_halo is lightning_gnn.gather_halo  # as of packages that are imported with their parent
