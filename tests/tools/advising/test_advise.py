"""Advice: rehearsed steps move what training moves, machines are priced as by hand, and what is said is complete."""

from __future__ import annotations

import copy
import json
import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from common import CLASSES, OwnConv, assert_same, awkward_graph, build, campaign, examples, quiet_trainer, single, train
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import lightning_gnn
from lightning_gnn import DGCLStrategy, GraphDataModule, NodeClassifier
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.plans.presets import dgx1
from lightning_gnn.extensions.plans.wiring import machines, uniform
from lightning_gnn.launching import script
from lightning_gnn.strategies import register
from lightning_gnn.strategy.scheme import bind_module
from lightning_gnn.tools.advising.advice import (
    CLOSE,
    Advice,
    Candidate,
    advise_on,
    candidates,
    choose_candidates,
    explain_advice,
    extrapolate,
    smaller,
)
from lightning_gnn.tools.advising.machine import Machine, measured_contention, timing, with_trainer_messages
from lightning_gnn.tools.advising.rehearsal import Compute, Event, Rehearsal, Send, Take, rehearse
from lightning_gnn.tools.cli import main


def classifier(model: str = "gcn") -> NodeClassifier:
    return NodeClassifier(build(model), num_classes=CLASSES).double()


def tried(ranks: int) -> list[Candidate]:
    return [each for each in candidates(ranks) if each.full_graph]


# Rehearsals ###################################################################


def rehearsed(candidate: Candidate, ranks: int, module: NodeClassifier) -> Rehearsal:
    scheme, data = candidate.strategy().scheme, GraphDataModule(awkward_graph())
    data.prepare_for(scheme.layout(ranks))
    cut = data.stored_cut()
    shards = [cut.shard(rank) for rank in range(ranks)]
    return rehearse(module, shards, partial(bind_module, scheme, meter=Meter()), quiet_trainer("dgcl", 1))


def logged(rank: int, world_size: int, every: list[Candidate], model: str) -> list[float]:
    """Returns what each scheme logs as sent in its last epoch, by layers and steps."""
    found = []
    for candidate in every:
        trainer = quiet_trainer(
            candidate.kind(**candidate.arguments, self_check=False), world_size, max_epochs=3, limit_val_batches=0
        )
        trainer.fit(classifier(model), datamodule=GraphDataModule(awkward_graph()))
        found.append(sum(float(trainer.callback_metrics[f"comm/{of}bytes_sent"]) for of in ("", "step_")))
    return found


@pytest.mark.parametrize(("world_size", "model"), [(2, "gcn"), *campaign((4, "gcn"), (3, "gat"), (3, "sage_max"))])
def test_a_rehearsal_sends_what_training_sends(ranks, world_size, model):
    exact = [each for each in tried(world_size) if each.exact]
    module = classifier(model)
    gradients = sum(parameter.nbytes for parameter in module.parameters()) * (world_size - 1) * world_size
    for candidate, expected in zip(exact, ranks.run(world_size, logged, exact, model)[0], strict=True):
        assert sum(rehearsed(candidate, world_size, module).bytes_sent) - gradients == expected, str(candidate)


class Counting(OwnConv):
    """Notes how many edges it computes, by the thread that stands for a rank."""

    def message(self, x_i: torch.Tensor, x_j: torch.Tensor) -> torch.Tensor:
        SEEN.setdefault(threading.current_thread().name, set()).add(len(x_j))
        return super().message(x_i, x_j)


SEEN: dict[str, set[int]] = {}


@pytest.mark.parametrize("model", ["own_sum", *campaign("gat_edges")])
def test_a_vertex_cut_of_layers_that_compute_loaded_edges(ranks, model):
    """They are rehearsed as they train: with the edges that each rank loads, and the rows that these read."""
    [plain] = [each for each in tried(3) if str(each) == "vertex_cut"]
    module = classifier(model)
    SEEN.clear()
    if model == "own_sum":
        module.model.second = Counting(8, CLASSES, "sum").double()
    found = rehearsed(plain, 3, module)
    gradients = 2 * 3 * sum(parameter.nbytes for parameter in module.parameters())
    assert sum(found.bytes_sent) - gradients == ranks.run(3, logged, [plain], model)[0][0]
    data = GraphDataModule(awkward_graph())
    data.prepare_for(plain.strategy().scheme.layout(3))
    loaded = data.stored_cut().shard(0).edge_counts
    assert model != "own_sum" or {f"rank {rank}": {count} for rank, count in enumerate(loaded)} == SEEN


def test_a_rehearsal_changes_nothing_and_counts_what_is_kept():
    module = classifier("sage")
    before = copy.deepcopy(module.state_dict())
    state = torch.get_rng_state()
    found = rehearsed(tried(3)[0], 3, module)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(found.events) == 3 and all(seconds > 0 for seconds in found.compute_seconds)
    owned = min(len(shard) for shard in torch.arange(60).chunk(3))
    assert all(sum(piece.bytes for piece in each.pieces if piece.saved) > owned * 8 * 4 for each in found.footprints)


class OfAUser(DGCLStrategy):
    strategy_name = "of_a_user"

    @classmethod
    def variants(cls, ranks: int, links_alike: bool = True) -> list[dict[str, Any]]:
        return [{"cache_input_aggregation": False}, {"plan": "replicate"}]  # the second wants hops


def test_a_registered_strategy_is_advised_on():
    register(OfAUser)
    try:
        [own] = choose_candidates(["of_a_user"], 2)
        assert str(own) == "of_a_user cache_input_aggregation=False" and own.exact and own.full_graph
        [found] = advise_on(
            Machine.of(2, cores=1), classifier(), GraphDataModule(awkward_graph()), only=[own], overhead=0.0
        )
        assert found.applies and found.bytes_sent and found.peak_bytes > 0
    finally:
        for suffix in ("", "_spawn", "_notebook"):
            StrategyRegistry.remove(f"of_a_user{suffix}")
    assert "of_a_user" not in {each.name for each in candidates(2)}


# Machines #####################################################################


def machine(ranks: int = 2, gb_per_s: float = 1e-3, **options: Any) -> Machine:
    """Returns a machine whose links carry a MB a second, without latency."""
    return Machine(uniform(ranks, gb_per_s), **{"latency": 0.0, **options})


def test_messages_take_bytes_over_bandwidth_and_hide_behind_computing():
    alone: list[list[Event]] = [[Compute(1.0), Send(1, 500_000)], [Take(0), Compute(2.0)]]
    found = timing(alone, machine())
    # Rank 0 sends at 1 and, in the next step, at 2; rank 1 has what it needs at 1.5, and computes for 2 s each.
    assert found.seconds == pytest.approx(2.0) and found.compute_seconds == pytest.approx(2.0)
    both: list[list[Event]] = [[Compute(1.0), Send(1, 500_000), Take(1)], [Compute(1.0), Send(0, 500_000), Take(0)]]
    assert timing(both, machine()).seconds == pytest.approx(1.5)
    assert timing(both, machine()).exchange_seconds == pytest.approx(0.5)
    assert timing(both, machine(speed=2.0)).seconds == pytest.approx(1.0)
    assert timing(both, machine(latency=0.25)).seconds == pytest.approx(1.75)
    hidden: list[list[Event]] = [
        [Compute(1.0), Send(1 - rank, 500_000), Compute(0.75), Take(1 - rank)] for rank in range(2)
    ]
    assert timing(hidden, machine()).exchange_seconds == pytest.approx(0.0)


def test_ranks_share_cores_and_ports():
    work: list[list[Event]] = [[Compute(1.0)] for _ in range(4)]
    assert timing(work, machine(4)).seconds == pytest.approx(1.0)
    assert timing(work, machine(4, cores=2)).seconds == pytest.approx(2.0)
    two_hosts = Machine(machines([2, 2], 1.0, 1e-3), cores=None, latency=0.0)
    across: list[list[Event]] = [[Send((rank + 2) % 4, 500_000), Take((rank + 2) % 4)] for rank in range(4)]
    assert timing(across, two_hosts).seconds == pytest.approx(1.0)  # two messages leave each port
    inside: list[list[Event]] = [[Send(rank ^ 1, 500_000), Take(rank ^ 1)] for rank in range(4)]
    assert timing(inside, two_hosts).seconds == pytest.approx(0.0005)


def test_sockets_take_time_of_cores_and_shared_memory_does_not():
    both: list[list[Event]] = [[Send(1 - rank, 1_000), Take(1 - rank)] for rank in range(2)]
    sockets = {"cores": 1, "socket_s": 0.1, "socket_s_per_byte": 1e-4, "socket_latency": 0.0}
    assert timing(both, machine(**sockets)).seconds == pytest.approx(0.001)
    # Two messages, two ends each, on one core.
    assert timing(both, machine(**sockets, shared_memory=False)).seconds == pytest.approx(0.8, abs=0.01)
    apart = Machine(machines([1, 1], 1e-3, 1e-3), latency=0.0, **sockets)
    assert timing(both, apart).seconds == pytest.approx(0.4, abs=0.01)
    assert timing(both, replace(apart, cores=None)).seconds == pytest.approx(0.001)


def test_ranks_talk_once_a_step_whatever_the_scheme():
    alone: list[list[Event]] = [[Compute(1.0)], [Compute(2.0)], []]
    found = timing(with_trainer_messages(alone), machine(3, latency=0.01))
    # Three times round a ring of three.
    assert found.compute_seconds == pytest.approx(2.0) and found.seconds == pytest.approx(2.06)


def test_cores_that_share_caches_are_no_faster_together():
    assert 1.0 <= measured_contention(2) < 5.0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 10**6)), max_size=12), st.integers(1, 3))
@examples(50)
def test_any_run_ends_and_takes_no_less_than_its_parts(messages, cores):
    events: list[list[Event]] = [[], [], []]
    for sender, receiver, size in messages:
        if sender != receiver:
            events[sender] += [Compute(0.01), Send(receiver, size)]
            events[receiver].append(Take(sender))
    found = timing(events, machine(3, 1e-2, cores=cores))
    busy = [sum(event.seconds for event in each if isinstance(event, Compute)) for each in events]
    assert found.seconds >= 0.99 * max(*busy, sum(busy) / cores)


# What is said #################################################################


def test_the_usual_scheme_goes_before_what_is_hardly_faster():
    seconds = {"dgcl": 1.0, "spmm_1d": 0.95, "spmm_15d": 0.99, "spmm_2d": 0.85, "vertex_cut": 1.01}
    known = {each.name: each for each in candidates(4) if each.exact}
    found = explain_advice([Advice(known[name], seconds=each) for name, each in seconds.items()])
    assert [each.candidate.name for each in found] == ["spmm_2d", "dgcl", "spmm_1d", "spmm_15d", "vertex_cut"]


def test_advice_has_every_scheme_exact_ones_first():
    module, data = classifier(), GraphDataModule(awkward_graph())
    before = copy.deepcopy(module.state_dict())
    found = lightning_gnn.advise(module, data, devices=4)
    assert {str(each.candidate) for each in found} == {str(each) for each in candidates(4)}
    for each in found:
        assert each.applies, (str(each.candidate), each.reason)
        assert each.seconds > 0 and each.why
        assert each.seconds == pytest.approx(each.compute_seconds + each.exchange_seconds, rel=0.3)
    # dgcl may stand before what is hardly faster: test_the_usual_scheme_goes_before_what_is_hardly_faster.
    exact = [each.seconds for each in found if each.candidate.exact and each.candidate.name != "dgcl"]
    assert exact == sorted(exact) and [each.candidate.exact for each in found] == sorted(
        (each.candidate.exact for each in found), reverse=True
    )
    sizes = {str(each.candidate): each.bytes_sent for each in found}
    assert sizes["vertex_cut codec=int8"] < sizes["vertex_cut"] and sizes["spmm_2d"] > sizes["dgcl plan=p2p"]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    json.dumps([each.as_dict() for each in found])


def test_links_decide():
    module, data = classifier(), GraphDataModule(awkward_graph())
    exact = [each for each in tried(4) if each.exact]
    found = advise_on(Machine(uniform(4, 1e-5), latency=0.0), module, data, only=exact, overhead=0.0)
    sizes = [each.bytes_sent or 0 for each in found]
    assert sizes[0] <= (1 + CLOSE) * min(sizes)
    assert sorted(sizes)[-2:] == sorted(sizes[-2:])  # 1D and 1.5D in whole blocks, between which a millisecond decides
    assert found[0].exchange_seconds > 0.9 * found[0].seconds and "% of the time" in found[0].why


@pytest.mark.campaign
def test_more_ranks_are_continued_from_fewer():
    module, data = classifier(), GraphDataModule(awkward_graph(600))
    found = {
        str(each.candidate): each for each in extrapolate(12, smaller(12, 1, 1, 1.0, [2, 3, 6]), module, data, ["dgcl"])
    }
    [itself] = advise_on(Machine.of(12, cores=1), module, data, only=choose_candidates(["dgcl"], 12))
    advice = found["dgcl plan=p2p"]
    assert advice.extrapolated_from == (2, 3, 6) and not itself.extrapolated_from
    assert advice.bytes_sent == pytest.approx(itself.bytes_sent, rel=0.5) and advice.messages > 36
    assert [len(each.topology.hosts) for each in smaller(256, 32, None, 1.0)] == [2, 4, 8]
    for ranks, hosts in ((100, 3), (96, 4)):
        with pytest.raises(ValueError, match="a power of two on each machine"):
            smaller(ranks, hosts, None, 1.0)


class Broken(NodeClassifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError("no such layer")


def test_what_does_not_run_is_told():
    found = lightning_gnn.advise(Broken(build("gcn"), num_classes=CLASSES), GraphDataModule(awkward_graph()), devices=2)
    assert all(not each.applies and "no such layer" in each.reason for each in found)


@pytest.mark.parametrize("started", [True, False])
def test_a_rank_of_a_script_or_of_a_launcher_predicts_too(monkeypatch, started):
    # Ranks that a script's Trainer started run the script again, and torchrun's ranks run all of it.
    variables = {"LOCAL_RANK": "1", "RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    variables |= {} if started else {"MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0"}
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    monkeypatch.setattr(script._script, "size", 2 if started else None)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    one = [choose_candidates([name], 2)[0] for name in ("dgcl", "sampling")]
    found = advise_on(Machine.of(2, cores=1), classifier(), GraphDataModule(awkward_graph()), only=one)
    assert [each.reason for each in found] == ["", ""]
    assert dict(os.environ) == before and rank_zero_only.rank == 1


def test_machines_one_does_not_have():
    assert Machine.of(8, topology="dgx1").topology == dgx1()
    assert Machine.of(8, topology="dgx1").cores is None
    assert len(Machine.of(4, hosts=2).topology.hosts) == 2
    for options, message in (
        ({"ranks": 1}, "at least 2 ranks"),
        ({"ranks": 4, "cores": 0}, "at least 1"),
        ({"ranks": 4, "speed": 0.0}, "above 0"),
        ({"ranks": 4, "hosts": 3}, "divided equally"),
        ({"ranks": 4, "topology": "dgx9"}, "must be one of"),
        ({"ranks": 9, "topology": "dgx1"}, "9 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            Machine.of(**options)


# The command line and the Trainer #############################################

CONFIG = """
model:
  class_path: lightning_gnn.NodeClassifier
  init_args:
    model:
      class_path: torch_geometric.nn.models.GCN
      init_args: {in_channels: 32, hidden_channels: 16, num_layers: 2, out_channels: 8}
data:
  class_path: lightning_gnn.GraphDataModule
  init_args: {source: lightning_gnn.planted_partition, source_kwargs: {num_nodes: 500}}
trainer: {devices: 2, accelerator: cpu}
"""


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    config = ["--config", str(tmp_path / "run.yaml")]
    monkeypatch.setattr("sys.argv", ["lightning-gnn", "advise", *config, *arguments])
    main()


def test_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    run(
        monkeypatch,
        tmp_path,
        "--parts",
        "4",
        "--topology",
        "dgx1",
        "--schemes",
        "[dgcl,spmm_2d]",
        "--json",
        str(tmp_path / "all.json"),
    )
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    assert "An epoch on 4 ranks, dgx1, 4 of 8, one core each" in shown
    assert sorted(each["strategy"] for each in found) == ["dgcl", "dgcl", "spmm_2d"]
    for each in found:
        assert each["applies"] and each["why"] in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "1"], "at least 2 ranks"),
        (["--parts", "2", "--cores", "0"], "cores must be at least 1"),
        (["--parts", "2", "--topology", "nowhere"], "must be one of dgx1"),
        (["--parts", "2", "--json", "/proc/none/all.json"], "--json: the folder"),
        (["--parts", "2", "--schemes", "[spmm_2d]"], "None of spmm_2d runs on 2 ranks"),
        (["--trainer.devices", "auto"], "number of parts must be known"),
    ],
)
def test_command_refuses(monkeypatch, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path, *arguments)
    assert ended.value.code and message in capsys.readouterr().err


def test_command_without_a_model(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["lightning-gnn", "advise", "--data.source", "x", "--parts", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "a model is needed" in capsys.readouterr().err


@pytest.mark.parametrize("world_size", [3, *campaign(1)])
def test_auto_trains_as_one_device(ranks, world_size):
    expected = single(awkward_graph(), "gcn")
    for found in ranks.run(world_size, train, awkward_graph(), "gcn", strategy="auto_gnn"):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def chosen_by_auto(rank: int, world_size: int) -> tuple[str, int]:
    trainer = quiet_trainer("auto_gnn", world_size, max_epochs=1)
    trainer.fit(classifier(), datamodule=GraphDataModule(awkward_graph()))
    trainer.test(trainer.lightning_module, datamodule=GraphDataModule(awkward_graph()), verbose=False)
    return type(trainer.strategy.scheme).__name__, len(trainer.strategy.advice)


def test_auto_chooses_once_and_alike(ranks):
    first, *others = ranks.run(2, chosen_by_auto)
    assert first[1] >= 5 and all(each == (first[0], 0) for each in others)  # users may have registered more


def broken(rank: int, world_size: int) -> None:
    trainer = quiet_trainer("auto_gnn", world_size, max_epochs=1)
    trainer.fit(Broken(build("gcn"), num_classes=CLASSES).double(), datamodule=GraphDataModule(awkward_graph()))


def test_auto_says_why_it_cannot(ranks):
    with pytest.raises(Exception, match="could not rehearse the model under any scheme"):
        ranks.run(2, broken)
