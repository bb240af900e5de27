"""Training over a vertex cut equals one device, and its caches agree about what was sent (gloo ranks, float64)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from common import (
    CLASSES,
    assert_same,
    awkward_graph,
    build,
    campaign,
    one_training_node,
    quiet_trainer,
    single,
    strategy_of_config,
    three_nodes,
    train,
)
from torch_geometric.data import Data
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.nn.models import GCN

import lightning_gnn.comm.matrix
import lightning_gnn.strategies.vertex_cut.strategy
from lightning_gnn import (
    AdaptiveThreshold,
    CachedVertexCutStrategy,
    DGCLStrategy,
    GraphDataModule,
    NodeClassifier,
    VertexCutStrategy,
)
from lightning_gnn.comm.exchange import Triples
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.matrix import distribute
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.partition.shard import owners_of
from lightning_gnn.strategies.vertex_cut.cache import _Channel
from lightning_gnn.strategies.vertex_cut.cutters import assign_edges
from lightning_gnn.strategy.scheme import bind_module


@cache
def on_one_device(model: Any, module: str = "library") -> dict[str, Any]:
    return single(awkward_graph(), model, module=module)


def trained(rank: int, world_size: int, model: Any, options: dict[str, Any], **others: Any) -> dict[str, Any]:
    return train(rank, world_size, awkward_graph(), model, strategy=VertexCutStrategy, options=options, **others)


@pytest.mark.parametrize(("world_size", "partition"), [(2, "ne"), (3, "streaming"), *campaign((3, "ne"), (4, "ne"))])
def test_trained_as_on_one_device(ranks, world_size, partition):
    for found in ranks.run(world_size, trained, "gcn", {"partition": partition}):
        assert_same(found, on_one_device("gcn"), rtol=1e-8, atol=1e-10)


KINDS = ("graphconv", "gat", "gin_batch_norm", "own", "pna")  # all convs: test_convs.py


@pytest.mark.parametrize("model", [pytest.param(KINDS, id="together"), *campaign(*KINDS)])
def test_every_kind_of_conv(ranks, model):
    for found in ranks.run(3, trained, model, {"partition": "random"}, self_check=False):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


def test_parts_without_nodes_or_edges(ranks):
    graph, _ = one_training_node()
    expected = single(graph, "sage")
    for found in ranks.run(4, train, graph, "sage", strategy="vertex_cut"):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def test_more_ranks_than_nodes(ranks):
    expected = single(three_nodes(), "gcn")
    for found in ranks.run(4, train, three_nodes(), "gcn", strategy="vertex_cut"):
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def test_users_module_over_sockets_on_two_hosts(ranks):
    options = {"shared_memory": False, "num_machines": 2}
    for found in ranks.run(4, trained, "sage", options, module="user", self_check=False):
        assert_same(found, on_one_device("sage", "user"), rtol=1e-8, atol=1e-10)


# Who computes what, and what travels ##########################################


def star_and_more() -> Data:
    """A node that most others lead to, beside edges at random, some of them parallel."""
    rng = np.random.default_rng(0)
    star = np.stack([np.arange(1, 600), np.zeros(599, np.int64)])
    ends = rng.integers(1, 600, (2, 1800))
    edges = np.concatenate([star, ends[:, ends[0] != ends[1]], ends[:, ends[0] != ends[1]][:, :20]], 1)
    mask = torch.ones(600, dtype=torch.bool)
    return Data(
        x=torch.from_numpy(rng.standard_normal((600, 4))).float(),
        edge_index=torch.from_numpy(edges),
        y=torch.from_numpy(rng.integers(0, CLASSES, 600)),
        **{f"{name}_mask": mask for name in ("train", "val", "test")},
    )


@pytest.mark.parametrize("method", ["ne", *campaign("ebv")])
def test_ranks_compute_the_edges_that_they_were_given(monkeypatch, method):
    """Not those of their own nodes, which no edge cut balances; copies and partial sums go where these edges ask for them."""
    graph, size, width = star_and_more(), 8, 4
    edge_index = graph.edge_index.numpy()
    data = GraphDataModule(graph)
    data.prepare_for(DGCLStrategy().scheme.layout(size))
    of_dgcl = data.stored_cut().report["edge_balance"]
    data.prepare_for(VertexCutStrategy(method).scheme.layout(size))
    cut = data.stored_cut()
    part, n_id = assign_edges(edge_index, 600, size, method).part, cut.n_id.numpy()
    master = np.empty(600, np.int64)
    master[n_id] = owners_of(cut.offsets, np.arange(600))

    entries: dict[int, list[Triples]] = {rank: [] for rank in range(size)}

    def keeping(given: Triples, holders: Any, world: Any) -> Triples:
        found = distribute(given, holders, world)
        entries[world.rank].append(found)
        return found

    monkeypatch.setattr(lightning_gnn.comm.matrix, "distribute", keeping)
    meeting = Meeting(size)

    def work(rank: int) -> Meter:
        shard, meter = cut.shard(rank), Meter()
        convs = torch.nn.ModuleList([GCNConv(width, width), GATConv(width, width)])
        binding = bind_module(VertexCutStrategy(method).scheme, convs, shard, InProcessWorld(rank, meeting), meter)
        binding.context.begin_step()
        x = shard.batch.x.clone().requires_grad_()  # no constant, which is sent once
        convs[1](convs[0](x, shard.batch.edge_index), shard.batch.edge_index).sum().backward()
        return meter

    meters = meeting.run(work)
    reads, adds = (np.zeros((600, size), bool) for _ in range(2))
    reads[edge_index[0], part] = adds[edge_index[1], part] = True
    computed = []
    for rank, meter in enumerate(meters):
        given = sorted(map(tuple, edge_index[:, part == rank].T.tolist()))
        of_gcn, of_gat = (n_id[torch.stack([each.col, each.row]).numpy()] for each in entries[rank])
        for source, target in (of_gcn, of_gat):
            assert sorted((s, t) for s, t in zip(source.tolist(), target.tolist()) if s != t) == given
            assert sorted(source[source == target]) == np.flatnonzero(master == rank).tolist()
        computed.append(len(given))
        for direction, here, there in (("forward", reads, adds), ("backward", adds, reads)):
            rows = {
                peer: int((here[:, peer] & (master == rank)).sum() + (there[:, rank] & (master == peer)).sum())
                for peer in range(size)
                if peer != rank
            }
            assert meter.by_layer["0", direction].to == {peer: 4 * width * count for peer, count in rows.items()}
    assert max(computed) <= 1.05 * np.mean(computed) and of_dgcl > 1.9


def told_of_loaded_edges(rank: int, world_size: int, models: list[str]) -> list[Any]:
    """Returns what each run has said of loaded edges, and how many each rank loads."""
    found = []
    for model in models:
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lightning_gnn.strategies.vertex_cut.strategy, "rank_zero_info", said.append)
            trainer = quiet_trainer(VertexCutStrategy(timeout=60, self_check=False), world_size)
            module = NodeClassifier(build(model), num_classes=CLASSES).double()
            data = GraphDataModule(awkward_graph())
            trainer.fit(module, datamodule=data)
        found.append((said, data.shard.edge_counts))
    return found


def test_layers_that_compute_loaded_edges_are_named_once(ranks):
    layers = {
        "gcn": [],
        "gat": [],
        "gat_edges": ["model.convs.0", "model.convs.1"],
        "own": ["model.first", "model.second"],
    }
    for found in ranks.run(2, told_of_loaded_edges, [*layers]):
        for names, (said, edge_counts) in zip(layers.values(), found):
            assert len(said) == bool(names)
            most = max(edge_counts)
            for message in said:
                assert f"edges of the vertex cut: {', '.join(map(repr, names))}. " in message
                assert (
                    f"Rank {edge_counts.index(most)} loads most edges: {most}, {2 * most / sum(edge_counts):.2f} times the"
                    in message
                )


# Cache ########################################################################


CACHED = ("gcn", "gat", "sage_max")


@pytest.mark.parametrize("model", [pytest.param(CACHED, id="together"), *campaign(*CACHED)])
def test_a_cache_that_lets_every_change_through_is_exact(ranks, model):
    for found in ranks.run(3, trained, model, {"cache": 0.0}, self_check=False):
        assert_same(found, on_one_device(model), rtol=1e-8, atol=1e-10)


class Watch(L.Callback):
    """Keeps what is logged, and the weights before the last epoch; may save a checkpoint within validation."""

    def __init__(self, save: str | None = None) -> None:
        self.save = save
        self.epochs: list[dict[str, float]] = []
        self.before: dict[str, torch.Tensor] = {}

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.before = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.save is not None and trainer.current_epoch == 3:
            trainer.save_checkpoint(self.save)


def fit(
    world_size: int,
    strategy: Any,
    epochs: int,
    checkpoint: Any = None,
    model: str = "gcn",
    save: str | None = None,
) -> tuple[Watch, Any]:
    watch = Watch(save)
    trainer = quiet_trainer(strategy, world_size, max_epochs=epochs, callbacks=[watch])
    module = NodeClassifier(build(model), num_classes=CLASSES, lr=0.05).double()
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()), ckpt_path=checkpoint)
    return watch, trainer


def cached_and_exact(rank: int, world_size: int, shared_memory: bool) -> Any:
    options: dict[str, Any] = {"timeout": 60, "shared_memory": shared_memory}
    cached, _ = fit(
        world_size,
        CachedVertexCutStrategy(cache=AdaptiveThreshold(epsilon=0.1), codec="int8", cache_within_hosts=True, **options),
        12,
    )
    exact, _ = fit(world_size, VertexCutStrategy(timeout=60), 12)
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    module.load_state_dict(cached.before)
    graph = awkward_graph()
    mask = graph.train_mask & (graph.y >= 0)
    out = module.model(graph.x, graph.edge_index, graph.edge_weight)
    return cached.epochs, exact.epochs, float(torch.nn.functional.cross_entropy(out[mask], graph.y[mask]))


@pytest.mark.parametrize("shared_memory", [True, *campaign(False)])
def test_as_published(ranks, shared_memory):
    """Fewer rows, in fewer bytes, close to exact training; and exact in the first epoch and in the last."""
    found = ranks.run(3, cached_and_exact, shared_memory)
    for each, _, _ in found:  # what is logged is of all ranks
        for ours, first in zip(each, found[0][0]):
            of_run = [name for name in first if name.startswith(("comm/", "cache/", "codec/"))]
            assert of_run and all(ours[name] == first[name] for name in of_run)
    cached, exact, last_loss = found[0]
    assert cached[0]["train_loss"] == pytest.approx(exact[0]["train_loss"], rel=1e-12)
    assert cached[-1]["train_loss"] == pytest.approx(last_loss, rel=1e-9)
    assert [each["train_loss"] for each in cached] == pytest.approx([each["train_loss"] for each in exact], rel=0.1)
    for key in ("comm/sent_fraction/model.convs.1/forward", "comm/sent_fraction/model.convs.1/backward"):
        fractions = [each[key] for each in cached]
        assert fractions[0] == fractions[-1] == 1 and 0 < min(fractions) < 1
    assert sum(each["comm/halo_rows"] for each in cached) < sum(each["comm/halo_rows"] for each in exact)
    middle = slice(1, -1)  # in the first epoch, flags come on top
    for key in ("comm/bytes_sent", "comm/halo_rows"):
        assert all(ours[key] <= theirs[key] for ours, theirs in zip(cached[middle], exact[middle]))
    assert 0 < cached[5]["codec/error"] < 0.01
    assert len({each["cache/epsilon"] for each in cached}) > 1


def on_two_machines(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """Ranks 0 and 1 on the one, 2 and 3 on the other; returns the epochs, and to whom rows went that were left out or encoded."""
    shortened = set()
    messages = _Channel.messages

    def noted(channel: Any, *args: Any) -> Any:
        found = messages(channel, *args)
        shortened.update(peer for peer, _ in found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Channel, "messages", noted)
        options = {"cache": 0.5, "timeout": 60, "self_check": False, **options}
        watch, _ = fit(world_size, CachedVertexCutStrategy(**options), 4)
    return watch.epochs, shortened


@pytest.mark.parametrize(
    ("options", "far"),
    [({}, {}), ({"cache_within_hosts": True}, None), ({"num_machines": 2}, {0: {2, 3}, 1: {2, 3}, 2: {0, 1}, 3: {0, 1}})],
    ids=["one machine", "also within", "two machines"],
)
def test_rows_are_cached_between_machines_only(ranks, options, far):
    for rank, (epochs, shortened) in enumerate(ranks.run(4, on_two_machines, options)):
        expected = {*range(4)} - {rank} if far is None else far.get(rank, set())
        assert shortened == expected
        fraction = epochs[2]["comm/sent_fraction/model.convs.1/backward"]
        assert fraction == 1 if far == {} else fraction < 1
        assert (epochs[2]["codec/error"] > 0) == bool(expected)


def largest_changes(rank: int, world_size: int) -> Any:
    cached, _ = fit(
        world_size,
        CachedVertexCutStrategy("topk", "bfp4", cache_within_hosts=True, timeout=60, self_check=False),
        12,
    )
    exact, _ = fit(world_size, VertexCutStrategy(timeout=60, self_check=False), 12)
    return cached.epochs, exact.epochs


def test_largest_changes_send_their_share(ranks):
    cached, exact = ranks.run(3, largest_changes)[0]
    for key in ("comm/sent_fraction/model.convs.1/forward", "comm/sent_fraction/model.convs.1/backward"):
        fractions = [each[key] for each in cached]
        middle = fractions[1:-1]
        assert fractions[0] == fractions[-1] == 1 and middle == sorted(middle) and 0 < middle[0] < middle[-1] < 0.6
    assert "cache/epsilon" not in cached[0]
    assert cached[0]["train_loss"] == pytest.approx(exact[0]["train_loss"], rel=1e-12)
    assert [each["train_loss"] for each in cached] == pytest.approx([each["train_loss"] for each in exact], rel=0.1)


def resumed(rank: int, world_size: int, folder: str) -> Any:
    def strategy() -> CachedVertexCutStrategy:
        return CachedVertexCutStrategy(
            cache="adaptive", timeout=60, self_check=False, codec=None, cache_within_hosts=True
        )

    within = f"{folder}/within.ckpt"
    watch, trainer = fit(world_size, strategy(), 6, save=within)
    trainer.save_checkpoint(f"{folder}/six.ckpt")
    threshold = trainer.strategy.scheme.state_dict()["threshold"]
    again, trainer = fit(world_size, strategy(), 8, checkpoint=f"{folder}/six.ckpt")
    # An epoch that was left in its validation ends first, without a batch.
    ended, _ = fit(world_size, strategy(), 6, checkpoint=within)
    return threshold, watch.epochs, again.epochs, ended.epochs


def test_resume_takes_the_threshold_up_and_starts_exactly(ranks, tmp_path):
    for threshold, before, after, ended in ranks.run(2, resumed, str(tmp_path)):
        assert len(after) == 2 and len(ended) == 3 and "train_acc" not in ended[0] and "train_acc" in ended[2]
        assert before[-1]["cache/epsilon"] == threshold["epsilon"] == after[0]["cache/epsilon"] != 0.01
        assert after[0]["comm/sent_fraction/model.convs.1/forward"] == 1


class Draws(Watch):
    """Beside what is logged: which entries dropout was given and has kept, by epoch, and what hooks and validation draw."""

    def __init__(self, save: str | None = None) -> None:
        super().__init__(save)
        self.masks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.of_steps: list[float] = []
        self.of_hooks: list[float] = []
        self.of_validation: list[float] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.model.dropout.register_forward_hook(self.look)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.of_hooks.append(float(torch.rand(())))

    def look(self, module: torch.nn.Module, given: Any, out: torch.Tensor) -> None:
        if module.training:
            self.masks.append((given[0] != 0, out != 0))
            self.of_steps.append(float(torch.rand(())))
        else:
            self.of_validation.append(float(torch.rand(())))


def same_masks(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Returns whether two masks agree where both have something to keep."""
    both = one[0] & other[0]
    assert both.sum() > 100
    return torch.equal(one[1][both], other[1][both])


def with_dropout(rank: int, world_size: int, root: Any, folder: Any) -> list[dict[str, Any]]:
    """Trains on Cora with masks that are drawn in each epoch, in every third, and so where that run goes on from a checkpoint."""
    graph, path = Planetoid(root / "planetoid", "Cora")[0], str(folder / "within.ckpt")

    def run(every: int, resumes: bool = False) -> dict[str, Any]:
        torch.manual_seed(5 if resumes else 1)  # the seed of what is gone on with holds
        watch = Draws(None if resumes else path)
        strategy = VertexCutStrategy(
            cache=0.1, cache_within_hosts=True, timeout=60, self_check=False, dropout_seed_every_n_epochs=every
        )
        trainer = quiet_trainer(strategy, world_size, max_epochs=10, callbacks=[watch], num_sanity_val_steps=0)
        module = NodeClassifier(GCN(1433, 8, 2, 7, dropout=0.5), lr=0.001)
        trainer.fit(module, datamodule=GraphDataModule(graph), ckpt_path=path if resumes else None)
        return {name: getattr(watch, name) for name in ("epochs", "masks", "of_steps", "of_hooks", "of_validation")}

    return [run(1), run(3), run(3, True)]


def test_masks_of_dropout_stay_for_some_epochs(ranks, shared, tmp_path):
    """So long, rows differ by weights only, and far fewer are sent; hooks and validation draw anew."""
    Planetoid(shared / "planetoid", "Cora")  # processed once
    found = ranks.run(2, with_dropout, shared, tmp_path)
    for anew, kept, resumed in found:
        for run, period in ((anew, 1), (kept, 3)):
            for epoch, (before, after) in enumerate(pairwise(run["masks"]), 1):
                assert same_masks(before, after) == (epoch % period != 0)
                assert (run["of_steps"][epoch - 1] == run["of_steps"][epoch]) == (epoch % period != 0)
            assert len({*run["of_validation"]}) == 10
        assert len({*kept["of_hooks"]}) == len({*anew["of_hooks"]}) == 10
        assert len(resumed["masks"]) == 6 and all(map(same_masks, kept["masks"][4:], resumed["masks"]))
    (anew, kept, _), (_, of_other, _) = found
    assert kept["masks"][0][0].shape != of_other["masks"][0][0].shape or not same_masks(
        kept["masks"][0], of_other["masks"][0]
    )  # each rank has its own
    sent, sent_anew = (
        [each["comm/sent_fraction/model.convs.1/forward"] for each in run["epochs"]] for run in (kept, anew)
    )
    assert min(sent_anew) > 0.9 and sent[3] > 0.9 and sent[6] > 0.9  # new masks
    assert all(sent[epoch] < 0.9 for epoch in (1, 2, 4, 5, 7, 8)) and sum(sent) < 0.8 * sum(sent_anew)


def split_thresholds(rank: int, world_size: int) -> Any:
    """Returns the epochs under thresholds of several kinds, and what is said of a layer that is not there."""
    found = []
    for factors in ({"model.convs.1": 30.0, "backward": 0.0}, {"model.conv.1": 3.0}):
        cache = AdaptiveThreshold(epsilon=0.1, factors=factors)
        strategy = CachedVertexCutStrategy(cache, None, cache_within_hosts=True, timeout=60, self_check=False)
        try:
            found.append(fit(world_size, strategy, 6)[0].epochs)
        except ValueError as error:
            found.append(str(error))
    return found


def test_thresholds_by_layer_and_direction(ranks):
    for epochs, said in ranks.run(2, split_thresholds):
        for each in epochs[1:]:
            for direction, factor in (("forward", 30.0), ("backward", 0.0)):
                assert each[f"cache/epsilon/model.convs.1/{direction}"] == factor * each["cache/epsilon"]
        middle = epochs[1:-1]
        assert all(each["comm/sent_fraction/model.convs.1/forward"] < 0.5 for each in middle)
        assert all(each["comm/sent_fraction/model.convs.1/backward"] > 0.5 for each in middle)
        assert "factors has 'model.conv.1'" in said and "'model.convs.0', 'model.convs.1'" in said


class NoAccuracy(NodeClassifier):
    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        if name != "train_acc":
            super().log(name, *args, **kwargs)


def without_accuracy(rank: int, world_size: int) -> str:
    strategy = CachedVertexCutStrategy("adaptive", monitor="train_acc", timeout=60, self_check=False)
    trainer = quiet_trainer(strategy, world_size)
    with pytest.raises(ValueError, match="monitor=") as caught:
        trainer.fit(NoAccuracy(build("gcn"), num_classes=CLASSES).double(), datamodule=GraphDataModule(awkward_graph()))
    return str(caught.value)


def test_an_accuracy_that_is_named_is_asked_for(ranks):
    for message in ranks.run(2, without_accuracy):
        assert "monitor='train_acc', which was not logged (logged: " in message and "train_loss" in message


class ByHand(NodeClassifier):
    """Manual optimisation in steps that return nothing."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def following(rank: int, world_size: int, kind: type[NodeClassifier], monitor: str | None) -> Any:
    strategy, watch = (
        VertexCutStrategy(cache="adaptive", monitor=monitor, timeout=60, self_check=False, cache_within_hosts=True),
        Watch(),
    )
    trainer = quiet_trainer(strategy, world_size, max_epochs=12, callbacks=[watch])
    module = kind(build("gcn"), num_classes=CLASSES, lr=0.05).double()
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return watch.epochs


@pytest.mark.parametrize("kind", [NodeClassifier, ByHand])
@pytest.mark.parametrize("monitor", [None, "train_acc"])
def test_the_threshold_follows_the_loss_or_what_is_named(ranks, kind, monitor):
    """By hand: from what was logged in an epoch comes the threshold of the next."""
    for epochs in ranks.run(2, following, kind, monitor):
        expected = AdaptiveThreshold()
        for before, after in pairwise(epochs):
            if monitor is None:
                expected.update_by_loss(before["train_loss"])
            else:
                expected.update(before[monitor])
            assert after["cache/epsilon"] == pytest.approx(expected.epsilon, rel=1e-12)
        assert expected.epsilon != 0.01


def poisoned(rank: int, world_size: int) -> str:
    module = NodeClassifier(build("gcn"), num_classes=CLASSES).double()
    with torch.no_grad():
        next(module.parameters())[0] = float("nan")
    trainer = quiet_trainer(CachedVertexCutStrategy(timeout=60, self_check=False, cache_within_hosts=True), world_size)
    with pytest.raises(ValueError) as caught:
        trainer.fit(module, datamodule=GraphDataModule(awkward_graph()))
    return str(caught.value)


def test_nan_stops_the_run_with_the_layers_name(ranks):
    assert all("model.convs." in message and "nan" in message for message in ranks.run(2, poisoned))


# Refusals #####################################################################


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "metis"}, r"partition must be one of 'auto', 'ebv', .* \(got 'metis'\)"),
        ({"cache": "always"}, "cache must be 'adaptive'"),
        ({"cache": -0.5}, "cache must be 'adaptive'"),
        ({"num_machines": 0}, "num_machines must be at least 1"),
        ({"host_weight": 2}, "host_weight must be from 0 to 1"),
        ({"codec": "int7"}, "codec must be one of 'int8'"),
        ({"cache": "adaptive", "dropout_seed_every_n_epochs": 0}, "every_n_epochs must be at least 1"),
        ({"cache": "adaptive", "dropout_seed_every_n_epochs": 1.5}, "dropout_seed_every_n_epochs must be an integer"),
        ({"dropout_seed_every_n_epochs": 5}, "dropout_seed_every_n_epochs=5 is not supported without a cache"),
    ],
)
def test_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        VertexCutStrategy(**options)


def test_hosts_that_do_not_divide_the_ranks():
    with pytest.raises(ValueError, match="num_machines must divide the number of ranks, 4, got 3. Use one of 1, 2, 4"):
        VertexCutStrategy(num_machines=3).scheme.layout(4)


def test_from_yaml(tmp_path):
    asked = "{class_path: lightning_gnn.VertexCutStrategy, init_args: {partition: ne, cache: 0.05, codec: int4}}"
    strategy = strategy_of_config(tmp_path / "config.yaml", asked)
    assert (strategy.scheme.partition, strategy.scheme.cache, strategy.codec) == ("ne", 0.05, "int4")
