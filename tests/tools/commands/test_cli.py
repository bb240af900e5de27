"""The command line: partition, doctor, and answers to what it does not know."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from common import of_file
from launched import GRAPH
from processes import REPOSITORY, run

from lightning_gnn import GraphDataModule
from lightning_gnn.data.store import read_manifest
from lightning_gnn.tools import cli
from lightning_gnn.tools.commands import doctor as doctor_command
from lightning_gnn.tools.commands import partition as partitioning
from lightning_gnn.tools.commands.doctor import Check, check_launcher_variables, check_store, check_versions, doctor
from lightning_gnn.tools.commands.exchange import time_exchange
from lightning_gnn.tools.commands.graph_cli import num_ranks
from lightning_gnn.tools.commands.partition import partition
from lightning_gnn.tools.parser import Parser, unknown_key, unknown_word

CLI = ("-m", "lightning_gnn.tools.cli")
DGCL = f"--config={REPOSITORY / 'configs' / 'dgcl.yaml'}"
DATA = ("--data.source=lightning_gnn.planted_partition", f"--data.source_kwargs={json.dumps(GRAPH)}")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "store"


def in_store(store: Path) -> dict[str, str]:
    return {"LIGHTNING_GNN_STORE": str(store)}


def entries(store: Path) -> list[Path]:
    return [manifest.parent for manifest in store.glob("*/manifest.json")]


# partition ###################################################################


def test_partition_of_a_vertex_cut(store, monkeypatch, capsys):
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    partition([*DATA, "--parts=4", "--trainer.strategy=vertex_cut", "--columns=16"])
    output = capsys.readouterr().out
    [folder] = entries(store)
    report = read_manifest(folder)["report"]
    assert sum(report["edges"]) == len(
        GraphDataModule("lightning_gnn.planted_partition", source_kwargs=GRAPH).load().edge_index[0]
    )
    assert all(f"{count:,}" in output for name in ("masters", "edges", "copies") for count in report[name])
    assert "Vertex cut" in output and "ne; a row of 16 columns, float32, has 64 bytes" in output


@pytest.mark.slow
def test_fit_finds_what_partition_kept(store, tmp_path, monkeypatch, capsys):
    overrides = (DGCL, "--data.init_args.source=lightning_gnn.planted_partition", DATA[1])
    monkeypatch.setattr(sys, "argv", ["lightning-gnn", "partition", *overrides])
    cli.main()
    output = capsys.readouterr().out
    [folder] = entries(store)
    report = read_manifest(folder)["report"]
    assert len(report["nodes"]) == 2
    assert all(f"{count:,}" in output for name in ("nodes", "edges", "halo_rows") for count in report[name])
    assert f"Kept in {folder}" in output

    model = (f"--model.model.in_channels={GRAPH['num_features']}", f"--model.model.out_channels={GRAPH['num_classes']}")
    options = (*overrides, *model, "--trainer.max_epochs=1")
    fitted = run(*CLI, "fit", *options, cwd=tmp_path, variables=in_store(store)).succeeded().output
    assert "Partitioned" not in fitted
    assert entries(store) == [folder]

    # The file that the fit kept describes the same data.
    [kept] = tmp_path.rglob("config.yaml")
    partition(["--config", str(kept)])
    assert f"The store had it already: {folder}" in capsys.readouterr().out


def test_partition_without_a_config(store, monkeypatch, capsys):
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    partition([*DATA, "--parts=3", "--columns=250"])
    output = capsys.readouterr().out
    [folder] = entries(store)
    manifest = read_manifest(folder)
    report, locality = manifest["report"], manifest["locality"]
    assert len(report["nodes"]) == 3
    assert 0 < locality["before"] <= locality["after"] <= 1
    assert (
        f"{locality['after']:.1%} of the rows that edges read were read shortly before "
        f"(original order: {locality['before']:.1%})" in output
    )
    assert f"{report['halo_rows'][2]:,.1f} kB" in output  # 250 columns of float32 are 1 kB
    assert "Rows of 250 columns, float32" in output
    assert f"replication {1 + sum(report['halo_rows']) / GRAPH['num_nodes']:.2f}" in output


@pytest.mark.parametrize(
    ("asked", "free", "said"),
    [
        ([], None, "partition: metis, is asked for"),
        ([], 1, 'partition: metis, is asked for and does not fit: use "auto"'),
        (["--data.partition=auto"], None, "partition: auto, takes the first that fits"),
        (["--data.partition=auto"], 1, "partition: auto, would fail: No partitioner fits"),
        (["--data.partition=random"], 1, "partition: random, has no row: it takes little"),
    ],
)
def test_a_dry_run_of_partition_says_what_it_would_take(store, monkeypatch, capsys, asked, free, said):
    monkeypatch.setattr(partitioning, "available_bytes", lambda: free)
    partition([*DATA, "--parts=3", "--dry-run", *asked])
    out = capsys.readouterr().out
    assert said in out and (" yes │" in out) == (free is None)
    for method in ("metis", "kaminpar", "kaminpar_compressed", "streaming"):
        assert f"│ {method} " in out
    assert not list(store.glob("*/manifest.json"))


def test_a_dry_run_of_a_vertex_cut(store, monkeypatch, capsys):
    monkeypatch.setattr(partitioning, "available_bytes", lambda: None)
    partition([*DATA, "--parts=3", "--dry-run", "--trainer.strategy=vertex_cut", "--data.partition=auto"])
    out = capsys.readouterr().out
    assert "partition: auto, takes the first that fits" in out and "metis" not in out
    for method in ("ne", "ebv", "streaming"):
        assert f"│ {method} " in out


def test_partition_says_what_is_wrong_with_the_source(store):
    with pytest.raises(SystemExit, match="error: Loading or partitioning lightning_gnn.nothing failed"):
        partition(["--data.source=lightning_gnn.nothing", "--parts=2"])


@pytest.mark.parametrize(
    ("devices", "num_nodes", "ranks"),
    [
        (2, 1, 2),
        (2, 3, 6),
        ("4", 1, 4),
        ([0, 2], 1, 2),
        ("0,3", 2, 4),
        ("auto", 1, None),
        (-1, 1, None),
        ("-1", 1, None),
    ],
)
def test_number_of_ranks(devices, num_nodes, ranks):
    assert num_ranks(devices, num_nodes) == ranks


# doctor ######################################################################


@pytest.mark.slow
def test_doctor_on_this_machine(store, capsys):
    with pytest.raises(SystemExit) as ended:
        doctor(["--json"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    found = json.loads(output[output.index("{") :])
    checks = {check["name"]: check for check in found["checks"]}
    assert found["ok"] and {check["status"] for check in checks.values()} <= {"ok", "warning"}
    assert {"python", "torch", "lightning", "numba", "CPU", "gloo", "store", "shared memory", "sockets"} <= set(checks)
    assert "GB/s" in checks["sockets"]["result"]


def test_doctor_fails(store, tmp_path, monkeypatch, capsys):
    def fails(deadline: float) -> None:
        raise RuntimeError("nobody answered")

    monkeypatch.setattr(doctor_command, "time_exchange", fails)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        doctor([f"--store={tmp_path / 'file'}"])
    assert ended.value.code == 1
    output = capsys.readouterr().out
    assert "nobody answered" in output and "Does not work: store, exchange" in output


def test_exchange_keeps_its_deadline():
    with pytest.raises(RuntimeError, match="within 0 s"):
        time_exchange(0.2)


def test_versions(monkeypatch):
    versions = {"torch": "2.3.1", "lightning": "2.6.3", "pytorch_lightning": "2.5"}
    monkeypatch.setattr("importlib.metadata.version", lambda name: versions.get(name, "9999.1"))
    monkeypatch.setattr(
        "importlib.metadata.requires",
        lambda name: ["torch>=2.4", "lightning!=2.6.3,>=2.5"] if name == "lightning-gnn" else [],
    )
    found = {check.name: check for check in check_versions()}
    assert found["torch"].status == found["lightning"].status == "failed"
    assert found["torch"].advice == 'pip install "torch>=2.4"'
    assert found["numba"].status == "ok"
    assert found["pytorch_lightning"].status == "warning"


def test_launcher_variables(monkeypatch):
    for name in doctor_command.LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert check_launcher_variables().status == "ok"
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = check_launcher_variables()
    assert found.status == "warning" and "WORLD_SIZE=4" in found.result


def test_store(tmp_path, monkeypatch):
    assert check_store(tmp_path / "new").status == "ok"
    assert not any((tmp_path / "new").iterdir())
    monkeypatch.setattr(doctor_command, "LITTLE_SPACE", 1e20)
    assert isinstance(found := check_store(tmp_path), Check) and found.status == "warning"


# What it does not know #######################################################


def answer(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["lightning-gnn", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


def test_help_lists_the_commands(monkeypatch, capsys):
    code, said = answer(["--help"], monkeypatch, capsys)
    assert code == 0
    for name, text in cli.COMMANDS.items():
        assert f"  {name:<10} {text}\n" in said
    code, said = answer([], monkeypatch, capsys)
    named = {word.strip(",") for line in said.splitlines() for word in line[:31].split() if line.startswith("  ")}
    assert code == 0 and len(said.splitlines()) <= 10 and named == cli.COMMANDS.keys()


@pytest.mark.campaign
def test_demo(store, tmp_path):
    """Four live runs of which three are ours, a table, and a page with plots."""
    arguments = ("-m", "lightning_gnn", "demo", "--nodes", 500, "--epochs", 2, "--output", tmp_path / "demo")
    run(*arguments, cwd=tmp_path, variables=in_store(store)).succeeded()
    found = json.loads((tmp_path / "demo" / "comparison.json").read_text())
    assert [cell["status"] for cell in found["runs"]] == ["finished"] * 4
    assert [cell["parity"]["ok"] for cell in found["runs"][1:3]] == [True, True]
    assert (tmp_path / "demo" / "comparison.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["partion"], "partition"),
        (["fit", DGCL, "--trainer.stratgy", "dgcl"], "trainer.strategy"),
        (["fit", DGCL, "--trainer.devcies=2"], "trainer.devices"),
        (["fit", DGCL, "--max_epochs=3"], "trainer.max_epochs"),
        (["fit", DGCL, "--data.init_args.soruce", "x"], "source"),
        (["fit", DGCL, "--model.init_args.model.init_args.hiden_channels=8"], "hidden_channels"),
        (["fit", DGCL, "--model=NodeClasifier"], "NodeClassifier"),
        (["fit", DGCL, "--trainer.strategy=dgcll"], "dgcl"),
        (["fit", DGCL, "--trainer.strategy=DGCLStrategy", "--trainer.strategy.timout=9"], "timeout"),
        (["fit", DGCL, "--trainer.accelerator=cpuu"], "cpu"),
        (["partition", DGCL, "--trainer.strategy=dcgl"], "dgcl"),
        (["partition", DGCL, "--colums=3"], "columns"),
        (["doctor", "--jsno"], "json"),
    ],
)
def test_names_the_nearest(arguments, nearest, monkeypatch, capsys):
    code, said = answer(arguments, monkeypatch, capsys)
    assert code == 2
    assert f"did you mean '{nearest}'?" in said
    assert len(said.splitlines()) < 30 and "Traceback" not in said


@pytest.mark.parametrize("arguments", [["completion"], ["completion", "bash"], ["--print-completion", "bash"]])
def test_shell_completion_was_removed(arguments, monkeypatch, capsys):
    code, said = answer(arguments, monkeypatch, capsys)
    assert code == 2 and said == (
        "error: shell completion was removed. All options of a command: lightning-gnn COMMAND --help\n"
    )


@pytest.mark.parametrize(
    ("written", "meant", "nearest"),
    [
        ("max_epochs:", "max_epoch:", "trainer.max_epochs"),
        ("source_kwargs:", "source_arg:", "source_kwargs"),
        ("\ndata:", "\ndta:", "data"),
        ("NodeClassifier", "NodeClasifier", "NodeClassifier"),
        ("strategy: dgcl", "strategy: dgcll", "dgcl"),
    ],
)
def test_names_the_nearest_key_of_a_file(written, meant, nearest, tmp_path, monkeypatch, capsys):
    text = (REPOSITORY / "configs" / "dgcl.yaml").read_text()
    assert written in text
    (tmp_path / "config.yaml").write_text(text.replace(written, meant))
    code, said = answer(["fit", "--config", str(tmp_path / "config.yaml")], monkeypatch, capsys)
    assert code == 2 and f"did you mean '{nearest}'?" in said


@pytest.mark.parametrize(
    ("meant", "reason"),
    [
        ("{class_path: lightning_gnn.StagedStrategy, init_args: {stages: [dgcl]}}", "was removed. Fit under the first"),
        ("{class_path: lightning_gnn.DGCLStrategy, init_args: {offload: true}}", "has no argument 'offload'"),
    ],
)
def test_what_was_removed_is_named(meant, reason, tmp_path, monkeypatch, capsys):
    text = (REPOSITORY / "configs" / "dgcl.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("strategy: dgcl", f"strategy: {meant}"))
    code, said = answer(["fit", "--config", str(tmp_path / "config.yaml")], monkeypatch, capsys)
    assert code == 2 and reason in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["partition", DGCL, "--trainer.strategy=ddp"], "DDPStrategy does not split the graph"),
        (["partition", *DATA], "Pass --parts"),
        (["partition", *DATA, "--parts=0"], "above 0"),
        (["partition", "--parts=2"], "required: data"),
    ],
)
def test_partition_refuses(arguments, reason, monkeypatch, capsys):
    code, said = answer(arguments, monkeypatch, capsys)
    assert code == 2 and reason in said


def test_nothing_near_is_not_guessed():
    assert unknown_key("zzz.yy", ["trainer.strategy"]) == "unknown key 'zzz'."
    parser = Parser()
    parser.add_argument("--number", type=int)
    assert unknown_word(parser, {"number": "three"}) is None


# Configs of papers ###########################################################

PAPERS = {
    "dgcl": ("dgcl", 2, 256, 0.01),
    "cagnet": ("spmm_15d", 3, 16, 0.01),
    "cdfgnn": ("vertex_cut_cached", 2, 64, 0.01),
    "gossipgcn": ("gossip", 3, 128, 0.01),
    "distdgl": ("sampling", 3, 256, 0.003),
}
"""Strategy, convs, hidden width, learning rate."""


@pytest.mark.parametrize("paper", PAPERS)
def test_configs_of_papers(paper):
    found = of_file(REPOSITORY / "configs" / "papers" / f"{paper}.yaml")
    model, trainer, graph = found.model.model, found.trainer, found.datamodule.source_kwargs
    assert (trainer.strategy.strategy_name, model.num_layers, model.hidden_channels, found.model.lr) == PAPERS[paper]
    assert (model.in_channels, model.out_channels) == (graph["num_features"], graph["num_classes"])
    assert trainer.num_devices == 4


def test_every_config_of_a_paper_is_tested():
    assert {path.stem for path in (REPOSITORY / "configs" / "papers").glob("*.yaml")} == set(PAPERS)
