"""What loggers are told of a run on several ranks; monitor, warning and spans of a profiler (gloo ranks; two launches)."""

from __future__ import annotations

import csv
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from common import CLASSES, FEATURES, awkward_graph, build, quiet_trainer
from conftest import RankFailed
from hypothesis import given
from hypothesis import strategies as st
from launched import GRAPH
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from lightning_utilities.core.imports import RequirementCache
from offline_runs import offline_runs
from processes import REPOSITORY, Finished, run

from lightning_gnn import CommunicationMonitor, GraphDataModule, NodeClassifier
from lightning_gnn.callbacks.communication import PartSize, explain_waiting
from lightning_gnn.comm.traffic import Moment, span
from lightning_gnn.tools import cli

SWEEPS = REPOSITORY / "configs" / "sweeps"
TENSORBOARD = bool(RequirementCache("tensorboard"))


def of_trial(folder: Path, choice: dict[str, Any]) -> dict[str, str]:
    """Returns what an agent of W&B adds to the environment of a trial; W&B keeps its files in the folder."""
    from wandb.sdk.lib.config_util import save_config_file_from_dict

    parameters = folder / "choice.yaml"
    save_config_file_from_dict(str(parameters), {name: {"value": value} for name, value in choice.items()})
    folders = {f"WANDB_{name}_DIR": str(folder / name) for name in ("CACHE", "DATA", "CONFIG", "ARTIFACT")}
    trial = {"WANDB_RUN_ID": "trial7", "WANDB_SWEEP_ID": "sweep3", "WANDB_SWEEP_PARAM_PATH": str(parameters)}
    return {"WANDB_MODE": "offline", **trial, **folders}


def agents_command(sweep: Path, choice: dict[str, Any]) -> list[str]:
    """Returns the command of a trial as wandb_agent.py makes it, behind the name of the program."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    pieces = create_sweep_command_args({"args": {name: {"value": value} for name, value in choice.items()}})
    pieces["env"] = ["/usr/bin/env"]
    command: list[str] = []
    for word in create_sweep_command(yaml.safe_load(sweep.read_text())["command"]):
        command += pieces[word[2:-1]] if word.startswith("${") else [word]
    assert command[:2] == ["/usr/bin/env", "lightning-gnn"]
    return command[2:]


CHOICE = {"trainer.strategy": "spmm_15d", "trainer.devices": 2, "model.model.hidden_channels": 24}
LOGGERS = """
trainer:
  max_epochs: 2
  logger:
  - {class_path: lightning.pytorch.loggers.WandbLogger, init_args: {project: test, save_dir: FOLDER}}
  - {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: FOLDER}}
"""
OF_TENSORBOARD = (
    "  - {class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: FOLDER/tensorboard}}\n"
)


def trial(folder: Path) -> Finished:
    loggers = folder / "loggers.yaml"
    loggers.write_text((LOGGERS + OF_TENSORBOARD * TENSORBOARD).replace("FOLDER", str(folder)))
    fit, config, *choice = agents_command(SWEEPS / "schemes.yaml", CHOICE)
    on_another_graph = [
        "--data.source=lightning_gnn.planted_partition",
        f"--data.source_kwargs={json.dumps(GRAPH)}",
        f"--model.model.in_channels={GRAPH['num_features']}",
        f"--model.model.out_channels={GRAPH['num_classes']}",
    ]
    config = config.replace("configs/", f"{REPOSITORY / 'configs'}/")
    program = Path(sys.executable).with_name("lightning-gnn")
    return run(
        *(program, fit, config, f"--config={loggers}", *on_another_graph, *choice),
        cwd=folder,
        variables=of_trial(folder, CHOICE),
    )


@pytest.mark.campaign
@pytest.mark.program(runs=trial)
def test_a_trial_of_a_sweep_is_one_run_in_all_loggers(ran):
    folder, finished = ran
    finished.succeeded()
    [found] = offline_runs(folder)
    assert (found.id, found.sweep) == ("trial7", "sweep3")
    assert {name: found.config[name] for name in CHOICE} == CHOICE
    config = found.config
    assert config["strategy"]["name"] == "spmm_15d" and config["strategy"]["sparsity_aware"] is True
    assert config["world_size"] == 2 and config["plan"] == {"name": "products", "replication_factor": 1}
    assert config["graph"]["nodes"] == GRAPH["num_nodes"] and config["graph"]["features"] == GRAPH["num_features"]
    assert config["partition"]["method"] == "metis" and config["partition"]["halo_rows"] > 0
    # The command line's own configuration, too.
    assert config["model"]["init_args"]["model"]["init_args"]["hidden_channels"] == 24
    assert {name: set(files) for name, files in found.artifacts.items()} == {
        "partition-trial7": {"partition.json", "partition.txt", "partition.png"},
        "communication-trial7": {"communication.json", "communication.png"},
    }

    logs = folder / "lightning_logs" / "version_0"
    with (logs / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    names = ("train_loss", "val_acc", "comm/bytes_sent", "throughput/nodes_per_s", "comm/wait_fraction")
    for name in names:
        in_csv = [float(row[name]) for row in rows if row[name]]
        assert in_csv == pytest.approx([row[name] for row in found.history if name in row]) and in_csv
    described = yaml.safe_load((logs / "hparams.yaml").read_text())
    for name in ("strategy", "graph", "partition", "model"):
        assert described[name] == config[name]
    sent = json.loads((logs / "communication.json").read_text())
    assert {each["rank"] for each in sent} == {0, 1}
    assert sum(each["bytes_sent"] for each in sent) == found.last("comm/bytes_sent")
    if TENSORBOARD:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        [events] = (folder / "tensorboard").rglob("events.*")
        scalars = EventAccumulator(str(events)).Reload()
        for name in names:
            assert scalars.Scalars(name)[-1].value == pytest.approx(found.last(name), rel=1e-6)


def script(folder: Path) -> Finished:
    return run(
        REPOSITORY / "tests" / "sweep_script.py",
        "dgcl",
        folder,
        cwd=folder,
        variables=of_trial(folder, {"columns": 24}),
    )


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.program(runs=script)
def test_a_script_that_asks_for_the_choice_itself(ran):
    folder, finished = ran
    output = finished.succeeded().output
    assert "rank 0 trained 24 columns" in output and "rank 1 trained 24 columns" in output
    [found] = offline_runs(folder)
    assert (found.id, found.sweep, found.config["columns"]) == ("trial7", "sweep3", 24)
    assert found.config["plan"]["name"] == "p2p" and "plan.png" in found.artifacts["plan-trial7"]
    assert found.last("comm/bytes_sent") > 0


@pytest.mark.parametrize("sweep", ["schemes", "model"])
def test_the_command_line_takes_what_sweeps_choose(sweep, monkeypatch, capsys):
    file = SWEEPS / f"{sweep}.yaml"
    parameters = yaml.safe_load(file.read_text())["parameters"]
    choice = {name: each.get("value", each.get("values", [0.01])[0]) for name, each in parameters.items()}
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setattr(sys, "argv", ["lightning-gnn", *agents_command(file, choice), "--print_config"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    config = yaml.safe_load(capsys.readouterr().out)
    if sweep == "schemes":
        assert (config["trainer"]["strategy"], config["trainer"]["devices"]) == ("dgcl", "2")
    else:
        strategy, arguments = config["trainer"]["strategy"]["class_path"], config["trainer"]["strategy"]["init_args"]
        assert strategy.endswith("DGCLStrategy") and arguments["codec"] is None
        assert config["model"]["init_args"]["lr"] == 0.01


# Every strategy ##############################################################


def described(rank: int, world_size: int, strategy: str, folder: Path) -> None:
    trainer = quiet_trainer(strategy, world_size, logger=CSVLogger(folder), max_epochs=1)
    trainer.fit(NodeClassifier(build("gcn", FEATURES, CLASSES)).double(), datamodule=GraphDataModule(awkward_graph()))


@pytest.mark.parametrize(
    ("strategy", "world_size", "arguments"),
    [
        ("dgcl", 2, {"plan": "auto", "codec": None, "timeout": 1800.0}),
        ("spmm_2d", 4, {"node_order": "random"}),
        ("vertex_cut_cached", 2, {"codec": "int8", "monitor": None}),
        ("sampling", 2, {"num_neighbors": [15, 10], "sampler": "neighbor"}),
        ("cluster_allreduce", 2, {"num_clusters": 40, "average_every_n_batches": 1}),
    ],
)
def test_every_strategy_is_described(ranks, tmp_path, strategy, world_size, arguments):
    ranks.run(world_size, described, strategy, tmp_path)
    [version] = (tmp_path / "lightning_logs").iterdir()
    found = yaml.safe_load((version / "hparams.yaml").read_text())
    assert found["strategy"]["name"] == strategy and found["world_size"] == world_size
    assert {name: found["strategy"][name] for name in arguments} == arguments
    assert found["graph"]["nodes"] == 60 and found["partition"]["largest_part_nodes"] < 60
    assert sum(json.loads((version / "partition.json").read_text())["nodes"]) == 60
    assert "train_loss" in (version / "metrics.csv").read_text()


def tried_out(rank: int, world_size: int) -> None:
    options: dict[str, Any] = {"logger": True, "fast_dev_run": True, "callbacks": [CommunicationMonitor()]}
    module = NodeClassifier(build("gcn", FEATURES, CLASSES)).double()
    quiet_trainer("dgcl", world_size, **options).fit(module, datamodule=GraphDataModule(awkward_graph()))


def test_fast_dev_run_leaves_nothing(ranks):
    before = set(Path.cwd().iterdir())
    ranks.run(2, tried_out)
    assert set(Path.cwd().iterdir()) == before


# Monitor, warning, spans #####################################################


class Slow(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(0.4)


def watched(rank: int, world_size: int, folder: Path) -> tuple[list[int], list[str]]:
    data = GraphDataModule(awkward_graph())
    callbacks = [CommunicationMonitor(every_n_epochs=3), Slow()]
    trainer = quiet_trainer("dgcl", world_size, logger=CSVLogger(folder), max_epochs=4, callbacks=callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(NodeClassifier(build("gcn", FEATURES, CLASSES)).double(), datamodule=data)
    told = [str(each.message) for each in caught if "waited for others" in str(each.message)]
    return [len(rows) for rows in data.shard.plan.send_rows], told


def test_monitor_and_warning(ranks, tmp_path):
    counts, told = zip(*ranks.run(3, watched, tmp_path))
    [logs] = (tmp_path / "lightning_logs").iterdir()

    [warning] = told[0]
    assert "rank 1 is the slowest" in warning and "in-edges" in warning
    assert not told[1] and not told[2]

    sent = json.loads((logs / "communication.json").read_text())
    assert {each["direction"] for each in sent} == {"forward", "backward"}
    for each in sent:
        to = [each["bytes_to"].get(str(peer), 0) for peer in range(3)]
        assert sum(to) == each["bytes_sent"] > 0
        if each["direction"] == "forward":
            shares = torch.tensor(counts[each["rank"]]) / sum(counts[each["rank"]])
            torch.testing.assert_close(torch.tensor(to) / sum(to), shares)
    pictures = sorted(file.name for file in (logs / "communication").iterdir())
    assert pictures == ["heat_map-step=1.png", "heat_map-step=4.png"]


def profiled(rank: int, world_size: int, folder: Path) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    profiler = PyTorchProfiler(folder, "trace", schedule=schedule)
    trainer = quiet_trainer("dgcl", world_size, max_epochs=6, profiler=profiler, callbacks=[Slow()])
    model = NodeClassifier(build("gcn", FEATURES, CLASSES)).double()
    trainer.fit(model, datamodule=GraphDataModule(awkward_graph()))


def test_spans_of_a_profilers_trace(ranks, tmp_path):
    """Each layer's exchange on each rank, forward and backward, what is sent apart from what is waited for."""
    ranks.run(2, profiled, tmp_path)
    spans: dict[int, list[tuple[str, float, float]]] = {0: [], 1: []}
    for file in tmp_path.glob("*training_step*.pt.trace.json"):
        trace = json.loads(file.read_text())
        events = [each for each in trace["traceEvents"] if each.get("cat") == "user_annotation"]
        begins_and_ends = [(each["name"], each["ts"], each["ts"] + each["dur"]) for each in events]
        spans[trace["distributedInfo"]["rank"]] += sorted(begins_and_ends, key=lambda each: each[1])
    for direction in ("forward", "backward"):
        wanted = {f"{what} model.convs.{layer} {direction}" for what in ("send", "wait") for layer in (0, 1)}
        for of_rank in spans.values():
            assert wanted <= {name for name, *_ in of_rank}
            ends: dict[str, float] = {}
            for name, begin, end in of_rank:
                if name in wanted:
                    what, exchange = name.split(" ", 1)
                    assert what == "send" or ends[exchange] <= begin  # not before its rows were sent
                    ends[exchange] = end
    assert all("Sum of gradients" in {name for name, *_ in of_rank} for of_rank in spans.values())
    # The ranks' clocks agree: rank 0 waits while rank 1 sleeps, until it has sent.
    [(_, begin, end), *_] = [
        each for each in spans[0] if each[0] == "wait model.convs.0 forward" and each[2] - each[1] > 2e5
    ]
    assert any(name == "send model.convs.0 forward" and begin < at < end for name, at, _ in spans[1])


def test_there_are_no_spans_without_a_profiler():
    assert Moment.now(torch.device("cpu"), "send", "layer", "forward").span is None
    assert not isinstance(span("Sum"), torch.profiler.record_function)
    with torch.profiler.profile() as found:
        assert Moment.now(torch.device("cpu")).span is None
        Moment.now(torch.device("cpu"), "send", "layer", "forward")
        with span("Sum", "of gradients"):
            pass
    assert {"send layer forward", "Sum of gradients"} <= {event.name for event in found.events()}


def test_the_trace_callback_names_its_replacement():
    with pytest.raises(ImportError, match="CommunicationTrace was removed. .*PyTorchProfiler"):
        from lightning_gnn import CommunicationTrace  # noqa: F401


def test_monitor_refuses_ranks_that_exchange_nothing(ranks, tmp_path):
    with pytest.raises(RankFailed, match="CommunicationMonitor requires messages of layers"):
        ranks.run(2, monitored_apart)


def monitored_apart(rank: int, world_size: int) -> None:
    trainer = quiet_trainer("cluster_allreduce", world_size, callbacks=[CommunicationMonitor()])
    trainer.fit(NodeClassifier(build("gcn", FEATURES, CLASSES)).double(), datamodule=GraphDataModule(awkward_graph()))


parts = st.integers(1, 10**6).map(lambda n: PartSize(n, 10 * n, n // 2))


@given(st.lists(st.tuples(st.floats(0, 10), parts), min_size=2, max_size=8))
def test_waiting_is_explained(ranks_of_run):
    waited, sizes = zip(*ranks_of_run)
    found = explain_waiting(waited, 10.0, sizes)
    assert (found is None) == (max(waited) <= 3.0)
    if found is not None:
        names_one = min(waited) <= max(waited) / 2
        slowest = waited.index(min(waited))
        assert (f"rank {slowest} is the slowest" in found) == names_one
        assert (f"{sizes[slowest].nodes:,} nodes" in found) == names_one
