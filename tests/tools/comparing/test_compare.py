"""compare: cells and their keys, what is made of measurements, the report; and one comparison in real processes."""

from __future__ import annotations

import base64
import copy
import html
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from common import examples
from hypothesis import given
from hypothesis import strategies as st
from processes import Finished, run
from rich.console import Console

import lightning_gnn
from lightning_gnn import (
    CachedVertexCutStrategy,
    CoverStrategy,
    DGCLStrategy,
    GossipStrategy,
    SamplingStrategy,
    VertexCutStrategy,
)
from lightning_gnn.checks.stand_ins import draws_random_numbers
from lightning_gnn.tools.commands.compare import compare as command
from lightning_gnn.tools.comparing.cells import Cell, Comparison, make_cells, resolve_sections, section_of
from lightning_gnn.tools.comparing.report import report_html
from lightning_gnn.tools.comparing.results import (
    PARTS,
    ComparisonTable,
    curve_distance,
    middle_half,
    parity,
    parity_text,
    split_time,
    summarize,
)
from lightning_gnn.tools.comparing.run import write_json

GRAPH = {"num_nodes": 300, "num_features": 12, "num_classes": 5, "seed": 3}
GCN = {"in_channels": 12, "hidden_channels": 8, "num_layers": 2, "out_channels": 5}
SETTINGS: dict[str, Any] = {
    "model": {
        "class_path": "lightning_gnn.NodeClassifier",
        "init_args": {"model": {"class_path": "torch_geometric.nn.models.GCN", "init_args": GCN}},
    },
    "data": {
        "class_path": "lightning_gnn.GraphDataModule",
        "init_args": {"source": "lightning_gnn.planted_partition", "source_kwargs": GRAPH},
    },
    "runs": [
        {"strategy": "auto", "devices": 1},
        "dgcl",
        {"strategy": "dgcl", "codec": "int8"},
        {"strategy": "spmm_2d", "label": "no square of two ranks"},
    ],
    "epochs": 3,
    "trainer": {"accelerator": "cpu"},
}


def comparison(**changes: Any) -> Comparison:
    settings = {**SETTINGS, **changes}
    return Comparison(**{**settings, "runs": make_cells(settings["runs"], 2)})


# Cells ########################################################################


def test_cells_of_several_sizes():
    cells = make_cells(
        ["dgcl", {"strategy": "dgcl", "codec": "int8", "devices": 4}, {"strategy": "gossip", "label": "g"}], [2, 3]
    )
    names = ["dgcl x 2", "dgcl x 3", "dgcl codec=int8 x 4", "g x 2", "g x 3"]
    assert [cell.name for cell in cells] == names
    assert [cell.devices for cell in cells] == [2, 3, 4, 2, 3]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], "runs must be a list"),
        ("dgcl", "runs must be a list"),
        ([{"devices": 2}], "or have the key strategy: {strategy: dgcl}"),
        (["dgkl"], "unknown strategy 'dgkl', did you mean 'dgcl'"),
        ([{"strategy": "dgcl", "devices": 0}], "at least 1, or a list, got 0"),
        ([{"strategy": "dgcl", "devices": [2, "two"]}], "must be a number of ranks"),
        ([{"strategy": "auto", "codec": "int8"}], "does not support arguments here, got codec"),
        ([{"strategy": "vertex_cut", "cache": lightning_gnn.AdaptiveThreshold()}], "Pass an object as"),
        (["dgcl_spawn"], "use 'dgcl' instead of 'dgcl_spawn'"),
        (["dgcl", {"strategy": "dgcl"}], "two entries 'dgcl x 2'"),
    ],
)
def test_cells_that_cannot_be(cells, message):
    with pytest.raises(ValueError, match=message):
        make_cells(cells, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": [{"strategy": "dgcl", "devices": []}]}, "runs has no entries"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"warmup": 3}, "below epochs=3, got 3"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"rerun": "sometimes"}, "rerun must be one of none, failed, all"),
        ({"trainer": {"max_epochs": 3, "logger": True}}, "logger, max_epochs cannot be set here"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        comparison(**changes)


def test_key_is_of_all_that_decides_a_cell(tmp_path, monkeypatch):
    base = comparison()
    auto, dgcl = base.runs[:2]
    same = [comparison(timeout=5, tolerance=1.0, warmup=0, output=Path("elsewhere"), rerun="failed")]
    assert {each.key(dgcl) for each in [base, *same]} == {base.key(replace(dgcl, label="other"))}
    other_model = copy.deepcopy(SETTINGS["model"])
    other_model["init_args"]["model"]["init_args"]["hidden_channels"] = 9
    others = [comparison(seed=1), comparison(epochs=4), comparison(model=other_model), comparison(trainer={})]
    keys = [base.key(auto), base.key(replace(dgcl, devices=3)), base.key(replace(dgcl, arguments={"codec": "int8"}))]
    keys += [base.key(dgcl), *(each.key(dgcl) for each in others)]
    assert len(set(keys)) == len(keys)

    (tmp_path / "own_graph.py").write_text("def load(): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = comparison(data={"make": "own_graph.load"})
    before = own.key(dgcl)
    (tmp_path / "own_graph.py").write_text("def load(): ...  # changed")
    assert own.key(dgcl) != before


def own_model() -> None: ...


def test_sections_of_python_calls():
    assert section_of(own_model, "model") == {"make": "test_compare.own_model"}
    assert section_of({"source": "a.b"}, "data")["init_args"] == {"source": "a.b"}
    with pytest.raises(ValueError, match="model must be a function of a module.*got a Linear"):
        section_of(torch.nn.Linear(2, 2), "model")
    with pytest.raises(ValueError, match="cannot be imported by the runs' processes"):
        section_of(lambda: None, "model")


def test_sections_are_checked():
    for wrong, message in (
        ({"class_path": "lightning_gnn.NodeClasifier"}, "did you mean 'NodeClassifier'"),
        ({"class_path": "lightning_gnn.NodeClassifier", "init_args": {"modle": 1}}, "did you mean 'model'"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_sections({"model": wrong})
    with pytest.raises(ValueError, match="has no argument 'codek', did you mean 'codec'"):
        resolve_sections({"strategy": Cell("dgcl", 2, {"codek": "int8"}).trainer_strategy()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": ["dgkl"]}, "did you mean 'dgcl'"),
        ({"runs": None}, "runs must be a list of strategies"),
        ({"model": None}, "the section model is missing"),
        ({"runs": [{"strategy": "dgcl", "plan": "fastest"}]}, "cell 'dgcl plan=fastest x 2'"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"runs": ["dgcl", {"strategy": "dgcl", "label": "again"}]}, "are equal. Remove one"),
        ({"output": "file/folder"}, "cannot be written"),
    ],
)
def test_command_says_what_is_wrong(tmp_path, monkeypatch, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump({**SETTINGS, **changes}))
    with pytest.raises(SystemExit) as ended:
        command(["--config", "compare.yaml"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# Measurements #################################################################


def epoch(
    seconds: float,
    exchange: float = 0.0,
    gradients: float = 0.0,
    batches: float = 0.0,
    sums: float = 0.0,
    waited: float = 0.0,
    loss: float = 1.0,
) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "batches": batches,
        "gradients": gradients,
        "sums": sums,
        "waited": waited,
        "exchange": {"conv forward": [100, 2, 10, exchange]},
        "steps": 1,
        "logged": {"train_loss": loss, "val_acc": 0.5},
    }


def rank(number: int, epochs: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    report = {"nodes": [6, 4], "halo_rows": [2, 3], "cut_edges": 5, "node_balance": 1.2, "edge_balance": 1.1}
    return {
        "rank": number,
        "epochs": epochs,
        "memory": 500 + number,
        "memory_at_start": 400,
        "memory_cuda": None,
        "seconds_to_start": 1.0,
        "seconds_to_set_up": 2.0 + number,
        "partition": report,
        "counts": {"nodes": 10, "edges": 20, "ranks": 2},
        "approximation": "",
        "dropout": False,
        "initial_weights": "abc",
        "gradient_bytes": 40,
        "workers": {},
        "test": {"test_loss": 0.5, "test_acc": 0.75},
        **changes,
    }


def test_summary_leaves_out_the_warm_up():
    slow = [epoch(9.0, 4.0, loss=3.0), epoch(1.0, 0.2, 0.1, loss=2.0), epoch(1.0, 0.2, 0.1, loss=1.0)]
    fast = [epoch(8.0, 4.0), *[epoch(1.0, 0.5, 0.3, 0.05, 0.1, waited=0.6)] * 2]
    found = summarize([rank(0, slow), rank(1, fast)], warmup=1)
    assert found["epoch_seconds_by_epoch"] == [9.0, 1.0, 1.0] and found["epoch_seconds"] == 1.0
    assert found["seconds_by_rank"]["communication"] == pytest.approx([0.3, 0.3])
    assert found["seconds_by_rank"]["waiting"] == pytest.approx([0.0, 0.65])
    assert found["seconds_by_rank"]["compute"] == pytest.approx([0.7, 0.05])
    assert (found["row_bytes"], found["messages"], found["rows"], found["gradient_bytes"]) == (200, 4, 20, 80)
    assert found["curves"]["train_loss"] == [3.0, 2.0, 1.0] and found["test"]["test_acc"] == 0.75
    assert found["partition"]["replication"] == 1.5 and found["partition"]["cut_fraction"] == 0.25
    assert found["memory_bytes"] == [500, 501] and found["setup_seconds"] == 3.0


@examples(30)
@given(st.lists(st.tuples(*[st.floats(0, 10)] * 6), min_size=1, max_size=5))
def test_parts_of_a_time_add_up(times):
    epochs = [epoch(sum(each[:5]), *each) for each in times]
    found = split_time(epochs, [rank(number, [each]) for number, each in enumerate(epochs)])
    for number, each in enumerate(epochs):
        assert sum(found[part][number] for part in PARTS) == pytest.approx(each["seconds"])
        assert all(found[part][number] >= 0 for part in PARTS)


def test_workers_count_their_own_waiting():
    counts = {"1": {"waited": 0.8, "averages": 2}}
    epochs = [epoch(1.0, gradients=0.5)] * 2
    found = split_time([epochs[0]] * 2, [rank(number, epochs, workers=counts) for number in range(2)])
    assert found["waiting"] == pytest.approx([0.0, 0.4]) and found["communication"] == pytest.approx([0.5, 0.1])


def test_middle_half():
    assert middle_half(range(1, 5), [9, 4, 1, 2, 3]) == [3, 4]
    assert middle_half([0], [1.0]) == [0] and middle_half([0, 1, 2], [1, 5, 2]) == [0, 1, 2]


def test_parity():
    found = summarize([rank(0, [epoch(1.0, loss=2.0)] * 2)], 0)

    def held(loss: float = 2.0, test: float = 0.5, **changes: Any) -> dict[str, Any]:
        other = summarize([rank(0, [epoch(1.0, loss=loss)] * 2, test={"test_loss": test}, **changes)], 0)
        return parity(other, found, {"w": torch.ones(4)}, {"w": torch.full((4,), 2.0)}, "train_loss", 1e-4)

    assert held(2.0001)["ok"] is True and held(2.0001)["weights"] == 0.5
    assert held(2.001)["ok"] is False and parity_text(held(2.001)) == "differs 5.0e-04"
    assert held(float("nan"))["ok"] is False
    assert held(test=0.6)["ok"] is False and held(test=0.6)["metrics"]["test_loss"] == pytest.approx(0.1)
    assert held(3.0, approximation="codec int8")["ok"] is None
    assert parity_text(held(3.0, approximation="codec int8")) == "approx. 5.0e-01"
    assert held(3.0, dropout=True)["kind"] == "random" and held(3.0, dropout=True)["ok"] is None
    assert held(initial_weights="other")["kind"] == "unknown"
    assert parity(found, None, None, None, "train_loss", 1e-4)["kind"] == "unknown"
    assert curve_distance([1.0], [1.0, 1.0]) == float("inf")


def test_what_makes_strategies_approximate():
    exact = [DGCLStrategy(), CoverStrategy(), VertexCutStrategy()]
    assert [each.approximation for each in exact] == ["", "", ""]
    assert DGCLStrategy(codec="int8").approximation == "codec int8"
    assert CachedVertexCutStrategy().approximation == "cached messages, codec int8"
    assert SamplingStrategy().approximation and GossipStrategy().approximation
    assert draws_random_numbers(torch.nn.Sequential(torch.nn.Dropout(0.1)))
    assert not draws_random_numbers(torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(2, 2)))


def test_a_table_has_the_columns_for_which_there_is_room():
    """No number is folded where fewer columns help, and none is cut short anywhere."""
    parts = {"cut_fraction": 0.1474, "replication": 1.67, "edge_balance": 1.02}
    of = {"test": {"test_acc": 0.86831}, "final_loss": 0.4311, "epoch_seconds": 0.01651, "row_bytes": 711_000}
    of |= {"messages": 4, "gradient_bytes": 41_500, "memory_cuda_bytes": None, "memory_bytes": [701e6]}
    of |= {"seconds": dict.fromkeys(("compute", "communication", "waiting"), 0.01324), "setup_seconds": 7.36}
    of |= {"name": "sampling num_neighbors=[10, 5], batch_size=1024 x 2", "partition": parts, "status": "finished"}
    cell = {"parity": {"kind": "exact", "ok": True, "loss": 9.5e-8}, **of}

    def shown(width: int) -> str:
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(ComparisonTable([cell], "title"))
        text = console.export_text()
        assert all(len(line) <= width for line in text.splitlines())
        return text

    texts = {width: shown(width) for width in (30, 80, 110, 220)}
    assert all(each in texts[80] for each in ("ok 9.5e-08", "0.8683", "0.4311", "0.0165", "In a wider terminal"))
    assert [("0.0132" in text, "7.36" in text) for text in texts.values()] == [(False, False)] * 2 + [
        (True, False),
        (True, True),
    ]
    assert "In a wider terminal" not in texts[220]
    digits = [sorted(filter(str.isdigit, texts[width])) for width in (30, 80)]
    assert digits[0] == digits[1]  # folded letter by letter


def test_what_is_no_number_is_null_in_the_file(tmp_path):
    write_json(tmp_path, {"loss": [float("nan"), float("inf"), -float("inf"), 1.5], "inside": {"value": float("nan")}})
    text = (tmp_path / "comparison.json").read_text()
    assert json.loads(text) == {"loss": [None, None, None, 1.5], "inside": {"value": None}}


def test_table_and_report_of_what_has_failed():
    state = {"name": "dgcl [x] 2", "status": "failed", "error": ["ValueError: <no>"]}
    console = Console(width=200, record=True)
    console.print(ComparisonTable([state], "title"))
    assert "dgcl [x] 2" in console.export_text()
    head = {
        "loss": "train_loss",
        "epochs": 3,
        "warmup": 1,
        "seed": 0,
        "versions": {},
        "machine": {"cores": 1, "gpu": None},
    }
    assert "ValueError: &lt;no&gt;" in report_html({**head, "runs": [state]})


def test_timeout(tmp_path, monkeypatch):
    endless = {**SETTINGS, "runs": [{"strategy": "auto", "devices": 1}], "epochs": 10**9}
    found = lightning_gnn.compare(**endless, output=tmp_path, timeout=0.3)
    [cell] = found["runs"]
    assert cell["status"] == "timed out" and "timeout=0.3 s" in cell["error"][-1]
    assert json.loads((tmp_path / "comparison.json").read_text())["runs"][0]["status"] == "timed out"
    assert "timed out" in (tmp_path / "comparison.html").read_text()
    kept = lightning_gnn.compare(**endless, output=tmp_path, timeout=60)
    assert kept["runs"][0]["status"] == "timed out"  # rerun="failed" would run it
    monkeypatch.setenv("LIGHTNING_GNN_CELL", "a key")
    with pytest.raises(RuntimeError, match="Call it under"):
        lightning_gnn.compare(**SETTINGS, output=tmp_path)


# In real processes ############################################################


def compared(folder: Path) -> Finished:
    (folder / "compare.yaml").write_text(yaml.safe_dump(SETTINGS))
    return run("-m", "lightning_gnn.tools.cli", "compare", "--config", "compare.yaml", cwd=folder, timeout=450)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.program(runs=compared)
def test_compare(ran):
    folder, finished = ran
    assert finished.code == 1 and not finished.left_over, finished.output  # one has failed
    output = folder / "comparison"
    found = json.loads((output / "comparison.json").read_text())
    auto, dgcl, coded, failed = found["runs"]
    assert [cell["status"] for cell in found["runs"]] == ["finished", "finished", "finished", "failed"]
    assert auto["parity"]["kind"] == "reference"
    assert dgcl["parity"]["kind"] == "exact" and dgcl["parity"]["ok"] is True
    assert dgcl["parity"]["loss"] < 1e-5 and dgcl["parity"]["weights"] < 1e-3
    assert len(dgcl["curves"]["train_loss"]) == len(dgcl["curves"]["val_acc"]) == 3
    # Forward and backward of the second layer; the first's sums over features are kept after the warm-up.
    # Five columns, and a bit for each row of messages without rows of zeros.
    assert 0 < dgcl["rows"] * 5 * 4 <= dgcl["row_bytes"] < dgcl["rows"] * 5 * 4.2
    assert dgcl["messages"] == 4 and dgcl["partition"]["replication"] > 1 and len(dgcl["memory_bytes"]) == 2
    assert min(dgcl["memory_bytes"]) > 50e6 and 0 < dgcl["setup_seconds"] < 240
    parts = [sum(dgcl["seconds_by_rank"][part][rank] for part in PARTS) for rank in range(2)]
    assert max(parts) <= dgcl["epoch_seconds"] * 1.01
    assert min(dgcl["seconds"].values()) > 0
    # One device has nobody to wait for; what is left is the call itself, and taking the batch.
    assert max(auto["seconds"]["communication"], auto["seconds"]["waiting"]) < 0.5 * auto["epoch_seconds"]
    assert coded["parity"]["kind"] == "approximate" and coded["parity"]["ok"] is None
    assert coded["parity"]["loss"] > dgcl["parity"]["loss"] and coded["parity"]["why"] == "codec int8"
    assert coded["row_bytes"] < dgcl["row_bytes"] and coded["gradient_bytes"] == dgcl["gradient_bytes"] > 0
    assert any("square" in line for line in failed["error"])
    assert "approx. " in finished.output and "ok " in finished.output and "no square of two ranks" in finished.output

    page = (output / "comparison.html").read_text()
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert len(pictures) == 5 and not re.search(r'(src|href)="(?!data:)', page)
    for picture in pictures:
        ElementTree.fromstring(base64.b64decode(picture))
    assert all(cell["name"] in page for cell in found["runs"]) and failed["error"][-1] in html.unescape(page)

    # Again, by the function: nothing runs, and the numbers are the same.
    kept = {file: file.stat().st_mtime_ns for file in output.glob("runs/*/status.json")}
    again = lightning_gnn.compare(**SETTINGS, output=output)
    assert {file: file.stat().st_mtime_ns for file in output.glob("runs/*/status.json")} == kept and len(kept) == 4
    assert again["runs"][1]["epoch_seconds"] == dgcl["epoch_seconds"]
