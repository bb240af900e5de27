"""``lightning-gnn plan``: predictions against sums by hand, the command's JSON and print, pictures, refusals. No ranks."""

from __future__ import annotations

import json
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import campaign, examples
from hypothesis import given
from launched import GRAPH
from lightning.pytorch.strategies import StrategyRegistry
from planning import problems, random_relation, random_topology
from processes import REPOSITORY

from lightning_gnn import DGCLStrategy, GraphDataModule
from lightning_gnn.callbacks.pictures import save_picture
from lightning_gnn.data.shards import cut_graph
from lightning_gnn.data.sources import prepare_graph
from lightning_gnn.data.synthetic import planted_partition
from lightning_gnn.extensions.plans.exchanges import Workload, edge_exchange, exchange_costs
from lightning_gnn.extensions.plans.pictures import draw_links, draw_stages
from lightning_gnn.extensions.plans.plan import p2p
from lightning_gnn.extensions.plans.plan_cost import balance, hop_labels, link_loads, plan_cost, swap_cost
from lightning_gnn.extensions.plans.presets import dgx1, find_topology, pcie8
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.ways import fastest, fastest_plans
from lightning_gnn.extensions.plans.wiring import topology_from_dict, topology_to_dict, uniform
from lightning_gnn.partition.layout import LayoutSpec, Replicas
from lightning_gnn.partition.replicas import hold
from lightning_gnn.partition.shard import Relabelling
from lightning_gnn.strategies import GNNStrategy, Scheme, register
from lightning_gnn.strategies.dgcl.costs import plan_exchanges
from lightning_gnn.tools.commands.partition import partition
from lightning_gnn.tools.commands.plan import plan
from lightning_gnn.tools.commands.plan_report import PlanReport

PLANS = ("p2p", "spst", "swap", "replicate", "dgcl_r")

DATA = ("--data.source=lightning_gnn.planted_partition", f"--data.source_kwargs={json.dumps(GRAPH)}")


def workload(num_devices: int, num_layers: int = 3, seed: int = 0, **options: Any) -> Workload:
    rng = np.random.default_rng(seed)
    order = Relabelling.from_assignment(rng.integers(0, num_devices, 400), num_devices)
    edge_index = order.new_ids()[rng.integers(0, 400, (2, 1500))]
    relation = Relation.from_edges(edge_index, order.offsets)
    return Workload(relation, edge_index, num_layers, columns=16, features=50, **options)


# Exchanges ###################################################################


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_exchanges_are_those_of_the_cost_model(num_layers):
    work, topology = workload(8, num_layers), dgx1()
    found = {each.scheme: each for each in plan_exchanges(work, topology)}
    assert tuple(found) == PLANS
    per_part = np.bincount(work.owner[work.edge_index[1]], minlength=8)
    costs = {
        "p2p": plan_cost(p2p(work.relation, topology), topology),
        "spst": fastest(fastest_plans(work.relation, topology), 64).cost,
        "swap": swap_cost(work.relation, topology),
    }
    for scheme, cost in costs.items():
        each = found[scheme]
        assert not each.reason and each.seconds == pytest.approx(cost.seconds(64))
        assert np.array_equal(each.edges, per_part) and each.edge_balance == pytest.approx(per_part.max() * 8 / 1500)
        assert each.replication == pytest.approx(work.replication_factors[0])
    assert found["p2p"].rows == work.relation.pair_rows.sum() <= found["spst"].rows
    assert found["swap"].rows == 400 + work.relation.pair_rows.sum()

    alone = tuple((device,) for device in range(8))
    copies, expected = found["replicate"], hold(work.edge_index, work.relation.offsets, Replicas(num_layers, alone))
    assert copies.rows == copies.seconds == 0
    assert copies.replication == pytest.approx(work.replication_factors[-1])
    assert np.array_equal(copies.edges, expected.num_edges)
    assert copies.replication == pytest.approx(expected.offsets[-1] / 400)


def test_schemes_that_do_not_apply_say_why():
    found = {each.scheme: each for each in plan_exchanges(workload(16), find_topology("dgx1x2", 16))}
    assert "memory of one machine" in found["swap"].reason
    assert found["dgcl_r"].seconds > 0
    assert 1 < found["dgcl_r"].replication < found["replicate"].replication
    assert found["dgcl_r"].edges.max() < found["replicate"].edges.max()
    found = {each.scheme: each for each in plan_exchanges(workload(4), uniform(4))}
    assert "host memory" in found["swap"].reason and "one machine" in found["dgcl_r"].reason
    links = [{"a": a, "b": a + 1, "gb_per_s": 1.0} for a in range(3)]
    line = topology_from_dict({"devices": 4, "links": links, "name": "line"})
    found = {each.scheme: each for each in plan_exchanges(workload(4), line)}
    assert "no link between them" in found["p2p"].reason and found["spst"].seconds > 0
    assert found["p2p"].as_dict()["seconds"] is None and found["p2p"].as_dict()["reason"] == found["p2p"].reason
    with pytest.raises(ValueError, match="one device per part of the graph, 4,"):
        plan_exchanges(workload(4), dgx1())
    with pytest.raises(ValueError, match=r"num_layers must be a number above 0"):
        workload(4, 0)


@examples(30)
@given(problems(most=8))
def test_loads_of_links_against_a_count(problem):
    relation, topology = problem
    plan = spst(relation, topology)
    loads = link_loads(plan, topology, row_bytes=12)
    rows: dict[tuple[int, int, int], int] = {}
    busy = [0.0] * len(topology.hops)
    for group, count in enumerate(plan.counts.tolist()):
        for device in np.flatnonzero(plan.parent[group] >= 0).tolist():
            pair = int(plan.parent[group, device]), device
            key = (*pair, int(plan.stage[group, device]))
            rows[key] = rows.get(key, 0) + count
            for hop in topology.links[pair]:
                busy[hop] += 12 * count / (topology.hops[hop].gb_per_s * 1e9)
    listed = {(x.sender, x.receiver, k): n for x in loads for k, n in enumerate(x.rows) if n}
    assert listed == rows
    for load in loads:
        via = topology.links[load.sender, load.receiver]
        assert load.hop_seconds == pytest.approx(max(busy[hop] for hop in via))
        assert load.busiest_hop in {hop_labels(topology)[hop] for hop in via}
        assert load.kinds == tuple(dict.fromkeys(topology.hops[hop].kind for hop in via))
    assert [load.hop_seconds for load in loads] == sorted((load.hop_seconds for load in loads), reverse=True)
    assert len(set(hop_labels(topology))) == len(topology.hops)


def test_balance_between_kinds():
    work = workload(8)
    cost = plan_cost(p2p(work.relation, dgx1()), dgx1())
    found = balance(cost, 64)
    assert found.kinds == cost.kind_seconds(64)
    assert found.spread == pytest.approx(max(found.kinds.values()) / min(found.kinds.values()) - 1)
    kinds = np.array([hop.kind for hop in dgx1().hops])
    others = cost.hop_seconds[:, kinds != "nvlink"].max(1).sum() * 64
    assert found.others_seconds == pytest.approx(others)
    assert found.paper_spread == pytest.approx(max(others / found.kinds["nvlink"], found.kinds["nvlink"] / others) - 1)
    found = balance(plan_cost(p2p(work.relation, pcie8()), pcie8()))
    assert found.others_seconds is None and found.paper_spread is None
    empty = Relation.from_masks(np.zeros(8, np.uint64), np.arange(9))
    assert balance(plan_cost(p2p(empty, dgx1()), dgx1())).spread is None


def test_hops_have_names():
    labels = hop_labels(dgx1())
    assert {"0→3", "3→0", "qpi0", "qpi0 back", "pcie1 back"} <= set(labels)


# Pictures ####################################################################


def texts(file: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def check_pictures(folder: Path, num_devices: int) -> None:
    for name in ("links", "stages"):
        head = (folder / f"{name}.png").read_bytes()
        assert head.startswith(b"\x89PNG\r\n\x1a\n") and b"IEND" in head[-12:]
        width, height = struct.unpack(">II", head[16:24])
        assert width > 800 and height > 300
    assert {str(device) for device in range(num_devices)} <= set(texts(folder / "links.svg"))
    assert any(text.startswith("spst") for text in texts(folder / "stages.svg"))


TOPOLOGIES = {
    "dgx1": dgx1(),
    "dgx1x2": dgx1(2),
    "pcie8": pcie8(),
    "uniform": uniform(3),
    "random": random_topology(np.random.default_rng(0), 9, 0.3),
    "hosts of one device": topology_from_dict(
        {
            "devices": 3,
            "links": [{"a": a, "b": b, "gb_per_s": 1.0} for a, b in ((0, 1), (0, 2), (1, 2))],
            "hosts": [{"devices": [device]} for device in range(3)],
        }
    ),
}


@pytest.mark.parametrize("name", ["dgx1", *campaign(*(name for name in TOPOLOGIES if name != "dgx1"))])
def test_pictures(name: str, tmp_path: Path):
    topology = TOPOLOGIES[name]
    relation = random_relation(np.random.default_rng(0), topology.num_devices, 2000)
    plan = spst(relation, topology)
    loads = link_loads(plan, topology, 64)
    save_picture(draw_links(loads, topology, "spst"), tmp_path / "links")
    costs = {"p2p": "There is no link.", "spst": plan_cost(plan, topology)}
    files = save_picture(draw_stages(costs, topology, 64), tmp_path / "stages")
    check_pictures(tmp_path, topology.num_devices)
    assert any("There is no link." in text for text in texts(tmp_path / "stages.svg"))
    first = files[1].read_bytes()
    save_picture(draw_stages(costs, topology, 64), tmp_path / "stages")
    assert files[1].read_bytes() == first


def test_pictures_of_nothing(tmp_path):
    empty = Relation.from_masks(np.zeros(3, np.uint64), np.arange(4))
    plan = spst(empty, uniform(3))
    save_picture(draw_links(link_loads(plan, uniform(3)), uniform(3), "spst"), tmp_path / "links")
    save_picture(draw_stages({"spst": plan_cost(plan, uniform(3))}, uniform(3), 4), tmp_path / "stages")
    check_pictures(tmp_path, 3)


# The command #################################################################


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_GNN_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(GraphDataModule, "_build_in_subprocess", GraphDataModule.build)
    return tmp_path / "store"


def test_json_has_all_and_the_print_has_its_numbers(store, tmp_path, capsys):
    file = tmp_path / "new" / "plan.json"
    plan([*DATA, "--parts=4", "--topology=dgx1", "--columns=8192", "--layers=3", f"--json={file}"])
    output = capsys.readouterr().out
    found = json.loads(file.read_text())
    assert f"Written: {file}" in output and found.pop("memory") == []  # of no model

    # By hand: what the command finds in the store is what a cut in memory gives.
    data = prepare_graph(planted_partition(**GRAPH), None, None, 0, 0, masks_needed=True)
    [entry] = store.glob("*/manifest.json")
    offsets = np.array(json.loads(entry.read_text())["offsets"])
    n_id = np.load(entry.parent / "n_id.npy")
    part = np.empty(len(n_id), np.int64)
    part[n_id] = np.repeat(np.arange(4), np.diff(offsets))
    cut = cut_graph(data, part, 4)
    relation = Relation.from_halos(cut.halos, offsets)
    new = np.empty(len(n_id), np.int64)
    new[n_id] = np.arange(len(n_id))
    work = Workload(relation, new[data.edge_index.numpy()], 3, 8192, GRAPH["num_features"])
    topology = find_topology("dgx1", 4)
    expected = PlanReport.of("dgcl", DGCLStrategy(plan="spst").scheme, work, topology, cut).as_dict()
    assert found == json.loads(json.dumps(expected))

    planned = fastest(fastest_plans(relation, topology), 32768).plan
    cost = plan_cost(planned, topology)
    assert found["row_bytes"] == 32768 and found["stages"] == planned.num_stages and found["plan"] == "spst"
    traffic = np.zeros_like(planned.traffic)
    for load in found["links"]:
        traffic[:, load["sender"], load["receiver"]] = load["rows"]
        assert load["bytes"] == [32768 * rows for rows in load["rows"]]
    assert np.array_equal(traffic, planned.traffic)
    schemes = {each["scheme"]: each for each in found["exchanges"]}
    assert tuple(schemes)[:5] == PLANS and schemes["spst"]["seconds"] == pytest.approx(cost.seconds(32768))
    assert found["follows"] == "spst" and [name for name, each in schemes.items() if each["followed"]] == ["spst"]
    assert {"spmm_1d", "spmm_15d c=2 blocks", "spmm_2d"} <= schemes.keys()
    assert found["stage_seconds"] == pytest.approx(cost.stage_seconds(32768))
    tables = [rank_plan(planned, rank).table_bytes for rank in range(4)]
    assert found["tables"]["table_bytes"] == tables
    share = max(table / peak for table, peak in zip(tables, found["tables"]["training_bytes"]))
    assert found["tables"]["largest_share"] == pytest.approx(share) and f"at most {share:.4f}" in output
    assert found["replication_factors"] == pytest.approx(work.replication_factors)
    assert f"{work.replication_factors[2]:.2f} after 3" in output
    for count in (planned.traffic.sum(), relation.pair_rows.sum()):
        assert f"{count:,}" in output
    assert "lightning-gnn advise" in output
    assert "dgcl_r does not apply: It replicates" in output


def test_a_later_fit_finds_the_parts_and_a_config_gives_the_rest(store, tmp_path, capsys):
    (tmp_path / "machine.json").write_text(json.dumps(topology_to_dict(dgx1())))
    strategy = {"class_path": "lightning_gnn.DGCLStrategy", "init_args": {"topology": str(tmp_path / "machine.json")}}
    arguments = [f"--config={REPOSITORY / 'configs' / 'dgcl.yaml'}", *DATA, "--trainer.devices=8"]
    arguments.append(f"--trainer.strategy={json.dumps(strategy)}")
    plan([*arguments, f"--output={tmp_path / 'pictures'}"])
    output = capsys.readouterr().out
    assert "2 layers (the model's), rows of 64 columns (the model's)" in output and "others" in output
    check_pictures(tmp_path / "pictures", 8)
    assert sorted(file.name for file in (tmp_path / "pictures").iterdir()) == [
        "links.png",
        "links.svg",
        "stages.png",
        "stages.svg",
    ]
    partition(arguments)
    assert "The store had it already" in capsys.readouterr().out


def test_says_what_fit_would_follow(store, capsys):
    plan([*DATA, "--parts=3", "--topology=uniform"])
    assert "Plan p2p:" in (output := capsys.readouterr().out) and "p2p *" in output
    assert f"rows of {GRAPH['num_features']} columns (the features')" in output and "2 layers (DGCL's)" in output


def strategy_of(name: str, **options: Any) -> str:
    return f"--trainer.strategy={json.dumps({'class_path': f'lightning_gnn.{name}', 'init_args': options})}"


@pytest.mark.parametrize(
    ("strategy", "follows"),
    [
        ("spmm_1d", "spmm_1d"),
        ("spmm_2d", "spmm_2d"),
        (strategy_of("SpMM15DStrategy", replication_factor=2), "spmm_15d c=2"),
        (strategy_of("SpMM1DStrategy", sparsity_aware=False), "spmm_1d blocks"),
        ("spmm_15d", None),
        (strategy_of("SpMM15DStrategy", sparsity_aware=False), "spmm_15d c=2 blocks"),
    ],
)
def test_products_are_followed(strategy, follows, store, tmp_path, capsys):
    option = strategy if strategy.startswith("--") else f"--trainer.strategy={strategy}"
    arguments = [*DATA, "--parts=4", "--columns=32", option, f"--json={tmp_path / 'plan.json'}"]
    plan([*arguments, "--topology=dgx1"])
    output, found = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    schemes = {each["scheme"]: each for each in found["exchanges"]}
    if follows is None:
        sparse = [each for name, each in schemes.items() if name in ("spmm_1d", "spmm_15d c=2")]
        follows = min(sparse, key=lambda each: each["rows_to_choose_by"])["scheme"]
    assert found["follows"] == follows and f"│ {follows} *" in output
    assert {*PLANS, "spmm_1d", "spmm_2d"} <= schemes.keys() and schemes[follows]["seconds"] > 0
    assert "plan" not in found and "Plan" not in output
    # Nobody names a topology: what moves stays, times go.
    plan(arguments)
    output, bare = capsys.readouterr().out, json.loads((tmp_path / "plan.json").read_text())
    assert "No times, since there is no topology: give --topology" in output
    assert bare["topology"] is None and bare["follows"] == follows
    for each in bare["exchanges"]:
        if each["scheme"] != "p2p":
            assert each == schemes[each["scheme"]] | {"seconds": None}
        assert f"{each['rows']:,}" in output and each["seconds"] is None


def test_products_that_lack_a_link_say_so(store, tmp_path, capsys):
    links = [{"a": a, "b": a + 1, "gb_per_s": 1.0} for a in range(3)]
    (tmp_path / "line.json").write_text(
        json.dumps(topology_to_dict(topology_from_dict({"devices": 4, "links": links})))
    )
    topology = f"--topology={tmp_path / 'line.json'}"
    for strategy in ("dgcl", "spmm_2d"):
        plan([*DATA, "--parts=4", topology, f"--trainer.strategy={strategy}"])
        [line] = [line for line in capsys.readouterr().out.splitlines() if "spmm_2d" in line and "not apply" in line]
        assert "has no link between them, and products" in line


def test_products_of_the_strategys_cut(store, capsys):
    """A random cut moves more rows than METIS."""
    rows = []
    for permute in ("metis", "random"):
        plan([*DATA, "--parts=4", strategy_of("SpMM1DStrategy", node_order=permute)])
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ spmm_1d *")]
        rows.append(int(line.split("│")[2].replace(",", "")))
    assert rows[0] < rows[1]


class OwnScheme(Scheme):
    """A scheme of a user's, in an edge cut."""

    def layout(self, world_size: int, num_hosts: int = 1) -> LayoutSpec:
        return LayoutSpec("edge_cut", world_size)

    def exchange(self, shard: Any, world: Any, meter: Any) -> Any:
        raise NotImplementedError


class OwnStrategy(GNNStrategy):
    strategy_name = "of_a_user"

    def __init__(self, **options: Any) -> None:
        super().__init__(OwnScheme(), **options)


def test_a_registered_strategy_joins(store, tmp_path, capsys):
    """The user's own is planned for where its scheme says what it costs, and stands beside the others when one of them is."""
    register(OwnStrategy)
    arguments = [*DATA, "--parts=3", "--trainer.strategy=of_a_user", "--topology=uniform"]
    try:
        plan(arguments)
        assert "no prediction, since OwnScheme registers no exchange_costs" in " ".join(capsys.readouterr().out.split())
        exchange_costs.register(OwnScheme, lambda _, work, topology: [edge_exchange("", work, topology, followed=True)])
        for strategy in ("of_a_user", "spmm_1d"):
            file = tmp_path / f"{strategy}.json"
            arguments = [*DATA, "--parts=3", f"--trainer.strategy={strategy}", "--topology=uniform", f"--json={file}"]
            plan(arguments)
            found = json.loads(file.read_text())
            exchanges = {each["scheme"]: each for each in found["exchanges"]}
            assert found["follows"] == strategy and f"│ {strategy} *" in capsys.readouterr().out
            assert exchanges["of_a_user"]["rows"] == exchanges["p2p"]["rows"] > 0
            assert exchanges["of_a_user"]["seconds"] == pytest.approx(exchanges["p2p"]["seconds"])
    finally:
        for name in ("of_a_user", "of_a_user_spawn", "of_a_user_notebook"):
            StrategyRegistry.remove(name)


def test_edges_of_a_vertex_cut_lie_where_it_puts_them(store, tmp_path, capsys):
    file = tmp_path / "plan.json"
    arguments = ["--parts=3", "--trainer.strategy=vertex_cut", "--topology=uniform", f"--json={file}"]
    plan([*DATA, *arguments])
    [found] = json.loads(file.read_text())["exchanges"]
    [entry] = store.glob("*/manifest.json")
    report = json.loads(entry.read_text())["report"]
    assert found["scheme"] == "vertex_cut" and found["followed"] and found["edge_balance"] == report["edge_balance"]
    assert found["rows"] > 0 and found["seconds"] > 0


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        plan([*DATA, *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--parts=2"], "one of dgx1, dgx1x2, pcie8, summit, uniform or a JSON file"),
        (["--parts=2", "--topology=dgx2"], "one of dgx1, dgx1x2, pcie8, summit, uniform or a JSON file (got 'dgx2')"),
        (["--parts=9", "--topology=dgx1"], "'dgx1' has 8 devices, but there are 9 ranks"),
        (["--topology=dgx1"], "Pass --parts"),
        (["--parts=1", "--topology=dgx1"], "plans need at least 2 parts, got 1"),
        (["--parts=65", "--trainer.strategy=spmm_1d"], "plans support at most 64 parts, got 65"),
        (["--parts=6", "--trainer.strategy=spmm_2d"], "such as 4 or 9 (got 6)"),
        (["--parts=6", strategy_of("SpMM15DStrategy", replication_factor=4)], "got 4. Use one of 1, 2, 3, 6"),
        (["--parts=9", "--trainer.strategy=spmm_1d", "--topology=dgx1"], "has 8 devices, but there are 9 ranks"),
        (["--parts=2", "--trainer.strategy=spmm_1d", "--output=x"], "--output draws a plan"),
        (["--parts=2", "--topology=dgx1", "--layers=0"], "--layers must be above 0, got 0"),
        (["--parts=2", "--topology=dgx1", "--columns=-3"], "--columns must be above 0, got -3"),
        (["--parts=2", "--topology=dgx1", "--colums=3"], "did you mean 'columns'?"),
    ],
)
def test_refusals_come_first(arguments, reason, store, monkeypatch, capsys):
    monkeypatch.setattr(GraphDataModule, "prepare_for", lambda *_: pytest.fail("the graph was loaded"))
    assert reason in refusal(arguments, capsys)


def test_output_that_cannot_be_written(store, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(GraphDataModule, "prepare_for", lambda *_: pytest.fail("the graph was loaded"))
    (tmp_path / "file").touch()
    for option in ("--output", "--json"):
        said = refusal(["--parts=2", "--topology=dgx1", f"{option}={tmp_path / 'file' / 'x'}"], capsys)
        assert f"{option}: the folder" in said and "cannot be written" in said and "Pass another" in said
    assert "is a folder" in refusal(["--parts=2", "--topology=dgx1", f"--json={tmp_path}"], capsys)


def test_a_plan_that_does_not_apply(store, tmp_path):
    links = [{"a": a, "b": a + 1, "gb_per_s": 1.0} for a in range(3)]
    (tmp_path / "line.json").write_text(
        json.dumps(topology_to_dict(topology_from_dict({"devices": 4, "links": links})))
    )
    strategy = {"class_path": "lightning_gnn.DGCLStrategy", "init_args": {"plan": "p2p"}}
    with pytest.raises(SystemExit, match="error: Device . has rows for device ., but topology"):
        plan([*DATA, "--parts=4", f"--topology={tmp_path / 'line.json'}", f"--trainer.strategy={json.dumps(strategy)}"])


def test_on_cora(store, shared, tmp_path, capsys):
    source = json.dumps({"root": str(shared / "planetoid"), "name": "Cora"})
    arguments = [f"--config={REPOSITORY / 'configs' / 'dgcl.yaml'}", f"--data.source_kwargs={source}", "--parts=8"]
    plan([*arguments, "--topology=dgx1", f"--json={tmp_path / 'cora.json'}", f"--output={tmp_path}"])
    assert "2,708 nodes and 10,556 edges in 8 parts on dgx1" in capsys.readouterr().out
    check_pictures(tmp_path, 8)
    found = json.loads((tmp_path / "cora.json").read_text())
    schemes = {each["scheme"]: each for each in found["exchanges"]}
    assert schemes["spst"]["seconds"] == schemes["p2p"]["seconds"]  # 18 us, most of them for starting a stage
    assert 1 < found["replication_factors"][0] < found["replication_factors"][1] < 8
    assert sum(sum(load["rows"]) for load in found["links"]) == schemes["spst"]["rows"]
