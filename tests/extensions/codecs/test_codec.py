"""Codecs: bounds and bytes of each, and training with them under several schemes (no ranks, then gloo ranks)."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from common import (
    CLASSES,
    FEATURES,
    all_rows_sent,
    awkward_graph,
    campaign,
    examples,
    quiet_trainer,
    strategy_of_config,
)
from hypothesis import example, given
from hypothesis import strategies as st
from torch_geometric.nn.models import GAT, GCN

from lightning_gnn import CoverStrategy, DGCLStrategy, GraphDataModule, NodeClassifier, SpMM2DStrategy, SpMM15DStrategy
from lightning_gnn.comm.exchange import HaloExchange
from lightning_gnn.comm.group import World
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.codecs.codec import Codec, make_codec
from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.extensions.plans.planned_exchange import PlannedExchange
from lightning_gnn.extensions.plans.relation import Relation
from lightning_gnn.extensions.plans.spst import spst
from lightning_gnn.extensions.plans.tables import rank_plan
from lightning_gnn.extensions.plans.topology import Topology
from lightning_gnn.extensions.plans.wiring import topology_from_dict
from lightning_gnn.partition.shard import halo_plan

NAMES: Any = ("int8", "int4", "int2", "bfp8", "bfp4", "bf16")
BITS = {"int8": 8, "int4": 4, "int2": 2}
BLOCK_BITS = {"bfp8": 8, "bfp4": 4}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def codec_of(name: Any, stochastic: bool = False, seed: int = 0) -> Codec:
    codec = make_codec(name, stochastic, seed)
    assert codec is not None
    return codec


def encoded(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    data = torch.full((len(rows), codec.row_bytes(rows.size(1), rows.dtype)), 255, dtype=torch.uint8)
    codec.encode(rows, data)
    return data


def decoded(codec: Codec, data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, 7)
    codec.decode(data, out)
    return out


def there_and_back(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return decoded(codec, encoded(codec, rows), rows)


@st.composite
def rows_of_any_kind(draw: Any) -> torch.Tensor:
    """Rows of every magnitude, around zero or far from it, at times constant or of few values."""
    rng = np.random.default_rng(draw(st.integers(0, 100_000)))
    shape = draw(st.integers(0, 5)), draw(st.integers(1, 70))
    dtype = draw(st.sampled_from(DTYPES))
    most = 300 if dtype == torch.float64 else 30
    values = rng.standard_normal(shape) * 10.0 ** draw(st.integers(-most, most))
    values += draw(st.sampled_from([0.0, 1.0, -1e6])) * np.abs(values).max(initial=0)
    kind = draw(st.sampled_from(["normal", "constant", "few"]))
    if kind == "constant":
        values[:] = values[:, :1]
    elif kind == "few":
        values = values[:, rng.integers(0, min(3, shape[1]), shape[1])]
    return torch.from_numpy(values).to(dtype)


@examples(150)
@example(torch.tensor([[2540.1909, 3905.5378]]), "bfp4", False)  # the largest rounds up to a power of two
@given(rows_of_any_kind(), st.sampled_from(NAMES), st.booleans())
def test_there_and_back(rows, name, stochastic):
    codec = codec_of(name, stochastic)
    data = encoded(codec, rows)
    back = decoded(codec, data, rows)
    assert torch.equal(back.nan_to_num(), decoded(codec, data, rows).nan_to_num())
    assert torch.equal(there_and_back(codec, back).nan_to_num(), back.nan_to_num()), (
        "what was decoded is encoded without loss"
    )
    if rows.numel() == 0:
        return
    exact, error = rows.double(), (back.double() - rows.double()).abs()
    rounding = torch.finfo(rows.dtype).eps * exact.abs().amax(1, keepdim=True)
    if name == "bf16":
        bound = exact.abs() * 2.0 ** (-7 if stochastic else -8) + 1e-38
        assert (error[exact.abs() < 3e38] <= bound[exact.abs() < 3e38]).all()
        return
    if name in BLOCK_BITS:
        largest = exact.abs().amax(1, keepdim=True)
        bound = (
            largest / (2.0 ** (BLOCK_BITS[name] - 1) - 0.5) * (2 if stochastic else 1) * (1 + 1e-6)
            + rounding
            + 2.0**-120
        )
        within = (largest < 2.0**120).view(-1)
        assert (error <= bound)[within].all() and back[~within].isnan().all()
        return
    low, high = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
    extent = (high / 4 - low / 4) * 4  # of float64's ends
    step = high / (2 ** BITS[name] - 1) - low / (2 ** BITS[name] - 1)
    assert (error <= step * (1 if stochastic else 0.5) * (1 + 1e-9) + rounding).all()
    assert torch.equal(back.amin(1), rows.amin(1)) and torch.equal(back.amax(1), rows.amax(1))
    assert torch.equal(back[(extent == 0).view(-1)], rows[(extent == 0).view(-1)])


@pytest.mark.parametrize(
    ("name", "row", "bound"), [("bfp4", [0.9375, 0.125], 2 / 15), ("bfp8", [0.99609375, 0.0078125], 2 / 255)]
)
def test_the_bound_of_block_floats_is_reached(name, row, bound):
    """The largest rounds up to a power of two, so steps are twice as wide; the other entry is half a step."""
    rows = torch.tensor([row])
    assert (there_and_back(codec_of(name), rows) - rows).abs().max() / rows.max() == pytest.approx(bound, rel=1e-6)


@examples(100)
@given(st.sampled_from(NAMES), st.integers(1, 70), st.sampled_from(DTYPES))
def test_bytes(name, width, dtype):
    if name in BLOCK_BITS:
        expected = 1 + -(-width * BLOCK_BITS[name] // 8)
    else:
        expected = 2 * width if name == "bf16" else 2 * dtype.itemsize + -(-width * BITS[name] // 8)
    assert codec_of(name).row_bytes(width, dtype) == expected


def test_short_numbers_share_bytes():
    """All that a row of 64 numbers takes beside its ends is their bits: each of the levels once, in its place."""
    for name, bits in BITS.items():
        levels = 2**bits - 1
        rows = (torch.arange(64) % (levels + 1)).float().repeat(2, 1)
        rows[:, -1] = levels
        data = encoded(codec_of(name), rows)
        assert data.shape == (2, 8 + 64 * bits // 8)
        assert torch.equal(data[:, :8].clone().view(torch.float32), torch.tensor([[0.0, levels]] * 2))
        num_bytes = 64 * bits // 8
        parts = [(data[:, 8:] >> shift) & levels for shift in range(0, 8, bits)]
        assert torch.equal(torch.cat(parts, 1).float(), rows) and parts[0].size(1) == num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(name, stochastic, dtype, strange):
    rows = torch.randn(3, 20).to(dtype)
    rows[1, 4] = strange
    back = there_and_back(codec_of(name, stochastic), rows)
    assert not back[1, 4].isfinite() and back[[0, 2]].isfinite().all()
    assert name == "bf16" or back[1].isnan().all()
    assert name != "bf16" or torch.equal(back[1, 4].isnan(), rows[1, 4].isnan())


def test_a_nan_of_any_digits():
    bits = torch.tensor([[0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF]], dtype=torch.int32)
    for stochastic in (False, True):
        assert there_and_back(codec_of("bf16", stochastic), bits.view(torch.float32)).isnan().all()


def test_bf16_is_torchs():
    rows = torch.randn(100, 33) * 10.0 ** torch.randint(-40, 38, (100, 1))
    assert torch.equal(there_and_back(codec_of("bf16"), rows), rows.bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_stochastic_rounding_is_right_in_the_mean(name):
    # Block floats end at 7/8 of a power of two: a largest number beyond that would be cut, whatever is drawn.
    rows = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).double()
    codec, times = codec_of(name, True), 4000
    mean = there_and_back(codec, rows.repeat(times, 1)).mean(0)
    step = (rows.max() - rows.min()) / (2 ** BITS[name] - 1) if name in BITS else rows.abs() * 2.0**-7
    if name in BLOCK_BITS:
        step = rows.abs().max() * 2.0 ** (2 - BLOCK_BITS[name])
    assert ((mean - rows).abs() <= 6 * step / 2 / times**0.5).all()
    nearest = there_and_back(codec_of(name), rows)
    assert ((nearest - rows).abs() > 6 * step / 2 / times**0.5).any()


def test_rounding_repeats_with_its_seed_and_is_new_in_each_message():
    rows = torch.randn(20, 50)
    first, again = codec_of("int4", True, seed=5), codec_of("int4", True, seed=5)
    one, two = encoded(first, rows), encoded(first, rows)
    assert torch.equal(one, encoded(again, rows)) and torch.equal(two, encoded(again, rows))
    assert not torch.equal(one, two) and not torch.equal(one, encoded(codec_of("int4", True, seed=6), rows))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_error_is_that_of_what_was_encoded(name, threads):
    rows, codec, before = torch.randn(5000, 40), codec_of(name), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        back = there_and_back(codec, rows)
    finally:
        torch.set_num_threads(before)
    wrong, total = codec.take_squares()
    assert wrong == pytest.approx(float((back.double() - rows.double()).square().sum()), rel=1e-5)
    assert total == pytest.approx(float(rows.double().square().sum()), rel=1e-6)
    assert codec.take_squares() == (0.0, 0.0)


@examples(100)
@given(rows_of_any_kind(), st.sampled_from(tuple(BITS.values())))
def test_other_devices_do_alike(rows, bits):
    """What CUDA ranks compute, here on the CPU: the same but for numbers that lie half way between two steps."""
    from lightning_gnn.extensions.codecs import codec as codes

    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if rows.numel():
        ends, packed, squares = codes.quantise(wide, bits)
        other_ends, other_packed, other_squares = codes._quantise(wide, bits, 0.0, None)
        assert torch.equal(ends, other_ends)
        if squares[1] < 1e300:
            torch.testing.assert_close(squares, other_squares.sum(0), rtol=1e-6, atol=1e-28 * float(squares[1]))
        out, other_out = torch.empty_like(wide), torch.empty_like(wide)
        for data, into in ((packed, out), (other_packed, other_out)):
            codes.dequantise(ends, data, bits, into)
            assert torch.equal(into, codes._dequantise(ends, data, bits, rows.size(1)).to(wide.dtype))
        exact = wide.double()
        rounding = torch.finfo(wide.dtype).eps * exact.abs()
        assert ((other_out.double() - exact).abs() <= (out.double() - exact).abs() * (1 + 1e-9) + 2 * rounding).all()


# Messages #####################################################################


def everyone(num_nodes: int, width: int) -> torch.Tensor:
    return torch.randn(num_nodes, width, generator=torch.Generator().manual_seed(3)) * 10


OFFSETS = np.array([0, 20, 45, 60])
HALOS = [np.arange(15, 60)[5:], np.r_[np.arange(10), np.arange(50, 60)], np.arange(0, 45)]


def three_ranks_over(world: Any, codec: Codec) -> None:
    """Rows that are read by all ranks, on rank 2 over rank 1, as a coded message; and what travels as it is."""
    rank, transport = world.rank, world.transport
    relation, meter = Relation.from_halos(HALOS, OFFSETS), Meter()
    direct = HaloExchange(halo_plan(rank, OFFSETS, HALOS), world, meter)
    planned = PlannedExchange(rank_plan(spst(relation, chain(3)), rank), world, meter)
    assert planned.num_relayed > 0 or rank != 1
    tolerance = {"int8": 0.2, "int4": 3.0, "bf16": 0.2}[codec.name]
    for width in (1, 2, 17, 64):
        x = everyone(60, width)
        own, halo = x[OFFSETS[rank] : OFFSETS[rank + 1]], x[HALOS[rank]]
        row_bytes, plain_bytes = codec.row_bytes(width, x.dtype), 4 * width
        as_decoded = there_and_back(codec, halo) if row_bytes < plain_bytes else halo
        for exchange in (direct, planned):
            meter.take()
            plain = exchange.expand(own, "layer")
            assert torch.equal(plain[len(own) :], halo)
            before = meter.take()["layer", "forward"]
            assert before.bytes_sent == before.rows * plain_bytes
            with transport.approximating():
                coded = exchange.expand(own, "layer")
                with transport.approximating(False):
                    assert torch.equal(exchange.expand(own, "layer"), plain)
                assert torch.equal(exchange.expand(own[:, 0].contiguous(), "none"), plain[:, 0])
                assert torch.equal(exchange.expand((10 * own).long(), "none"), (10 * plain).long())
            traffic = meter.take()["layer", "forward"]
            assert traffic.rows == 2 * before.rows
            assert traffic.bytes_sent == before.rows * (min(row_bytes, plain_bytes) + plain_bytes)
            # Relays send on what they have decoded, and lose nothing more.
            assert torch.equal(coded[len(own) :], as_decoded) and torch.equal(coded[: len(own)], own)
            several = [own, own[:, :1].contiguous(), own.view(len(own), 1, width)]
            with transport.approximating():
                for got, expected in zip(exchange.expand_all(several, "layer"), [plain, plain[:, :1], plain]):
                    torch.testing.assert_close(got.flatten(1), expected.flatten(1), rtol=0, atol=tolerance)
            exact_sum = exchange.reduce(plain, "layer")
            with transport.approximating():
                close = exchange.reduce(plain, "layer")
            torch.testing.assert_close(close, exact_sum, rtol=0, atol=2 * tolerance)
            assert width < 3 or rank == 1 or not torch.equal(close, exact_sum)


def chain(num_devices: int) -> Topology:
    links = [{"a": a, "b": a + 1, "gb_per_s": 1.0} for a in range(num_devices - 1)]
    return topology_from_dict({"name": "chain", "devices": num_devices, "links": links})


def test_messages_of_threads():
    meeting = Meeting(3)

    def work(rank: int) -> None:
        world = InProcessWorld(rank, meeting)
        world.wrap_transport(partial(EncodingTransport, codec=codec_of("int8")))
        three_ranks_over(world, codec_of("int8"))

    for result in meeting.run(work):
        if result is not None:
            raise result


def messages(rank: int, world_size: int, shared_memory: bool, name: Any) -> None:
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    try:
        world.wrap_transport(partial(EncodingTransport, codec=codec_of(name)))
        three_ranks_over(world, codec_of(name))
    finally:
        world.close()


@pytest.mark.parametrize(("shared_memory", "name"), [(True, "int8"), (False, "int8"), (True, "int4"), (False, "bf16")])
def test_messages_of_ranks(ranks, shared_memory, name):
    ranks.run(3, messages, shared_memory, name)


def test_what_one_transport_cannot_the_one_around_it_cannot():
    """NCCL does one thing after the other, so plans must not receive before they have sent."""
    for early in (True, False):
        assert EncodingTransport(SimpleNamespace(receives_early=early), codec_of("int8")).receives_early == early


def mixed(rank: int, world_size: int, shared_memory: bool) -> None:
    """Rows for several ranks, beside bytes and a row too narrow, in one go; memory to send from is used again."""
    world = World(rank, world_size, torch.device("cpu"), timedelta(seconds=30), shared_memory)
    codec = codec_of("int4")
    try:
        world.wrap_transport(partial(EncodingTransport, codec=codec))
        rows = [everyone(9, 33) * (1 + peer) for peer in range(world_size)]
        others = [peer for peer in range(world_size) if peer != rank]
        for _ in range(4):
            payload, narrow = torch.arange(7, dtype=torch.uint8) + rank, torch.full((3, 1), rank + 0.5)
            arrived = [(torch.empty(9, 33), torch.empty(7, dtype=torch.uint8), torch.empty(3, 1)) for _ in others]
            with world.transport.approximating():
                for kind in range(3):  # one message a pair in flight, as schemes have it
                    sent = (rows[rank], payload, narrow)
                    send = [(peer, sent[(kind + peer) % 3]) for peer in others]
                    receive = [(peer, parts[(kind + rank) % 3]) for peer, parts in zip(others, arrived)]
                    world.transport.start_each(send, receive)()
            for peer, (coded, as_it_is, thin) in zip(others, arrived):
                assert torch.equal(coded, there_and_back(codec, rows[peer]))
                assert torch.equal(as_it_is, torch.arange(7, dtype=torch.uint8) + peer) and (thin == peer + 0.5).all()
    finally:
        world.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world_size", [2, 3])
def test_beside_what_travels_as_it_is(ranks, world_size, shared_memory):
    ranks.run(world_size, mixed, shared_memory)


# Training #####################################################################

HIDDEN = 48


def fit(world_size: int, strategy: type, options: dict[str, Any], model: str = "gcn", evaluate: bool = False) -> Any:
    """Trains; returns losses, epochs' bytes and rows by layer, logged errors and weights.

    With `evaluate`, what was validated, tested and predicted has the bits of the same weights without a codec.
    """
    L.seed_everything(1)
    found: dict[str, Any] = {"losses": [], "traffic": [], "errors": []}

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch + 1 == trainer.max_epochs:  # which is exact
                assert not trainer.callback_metrics.get("codec/error")
                return
            found["losses"].append(float(trainer.callback_metrics["train_loss"]))
            found["errors"].append(trainer.callback_metrics.get("codec/error"))
            by_layer = trainer.callbacks[0].by_layer
            found["traffic"].append({key: (value.bytes_sent, value.rows) for key, value in by_layer.items()})

    built = {
        "gcn": lambda: GCN(FEATURES, HIDDEN, 3, CLASSES),
        "gat": lambda: GAT(FEATURES, HIDDEN, 3, CLASSES, heads=4),
    }
    module = NodeClassifier(built[model](), num_classes=CLASSES)
    data = GraphDataModule(awkward_graph(dtype=torch.float32))
    run = quiet_trainer(strategy(timeout=60, self_check=False, **options), world_size, max_epochs=5)
    run.callbacks.append(Look())  # type: ignore[attr-defined]
    with all_rows_sent():
        run.fit(module, datamodule=data)
    found["weights"] = [value.clone() for value in module.state_dict().values()]
    if not evaluate:
        return found
    validated = float(run.callback_metrics["val_loss"])
    [tested] = run.test(module, datamodule=data, verbose=False)
    exact = quiet_trainer(strategy(timeout=60, self_check=False, **{**options, "codec": None}), world_size)
    [expected] = exact.test(module, datamodule=data, verbose=False)
    assert tested == expected
    [expected] = exact.validate(module, datamodule=data, verbose=False)
    assert validated == expected["val_loss"]
    assert torch.equal(exact.predict(module, datamodule=data)[0], run.predict(module, datamodule=data)[0])
    return found


def exact_and_coded(
    rank: int, world_size: int, strategy: type, options: dict[str, Any], name: Any, model: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    options = {**options, "topology": chain(world_size)} if options.get("plan") == "spst" else options
    coded = fit(world_size, strategy, {**options, "codec": name}, model, evaluate=model == "gcn" and world_size < 4)
    return fit(world_size, strategy, options, model), coded


SCHEMES = [
    *campaign((2, DGCLStrategy, {}, "int8")),
    (3, DGCLStrategy, {"plan": "spst"}, "int8"),
    (3, DGCLStrategy, {"shared_memory": False}, "int4"),
    (3, CoverStrategy, {}, "int8"),
    *campaign((2, DGCLStrategy, {"cache_input_aggregation": False}, "bf16")),
    (3, SpMM15DStrategy, {"replication_factor": 1, "sparsity_aware": False}, "int8"),
    *campaign(
        (2, SpMM15DStrategy, {"replication_factor": 2}, "int8"),
        (3, SpMM15DStrategy, {"replication_factor": 1, "shared_memory": False}, "int8"),
    ),
]


@pytest.mark.parametrize(("world_size", "strategy", "options", "name"), SCHEMES)
def test_training(ranks, world_size, strategy, options, name):
    """Losses near the exact ones; evaluation exact, see `fit`; bytes as the codec says; the same weights on all ranks."""
    results = ranks.run(world_size, exact_and_coded, strategy, options, name, "gcn")
    codec = codec_of(name)
    widths = {"model.convs.1": HIDDEN, "model.convs.2": CLASSES}
    for exact, coded in results:
        assert coded["losses"] == pytest.approx(exact["losses"], rel=0.1 if name == "int4" else 0.01)
        assert coded["losses"] != exact["losses"]
        assert all(map(torch.equal, coded["weights"], results[0][1]["weights"]))
        assert exact["errors"] == [None] * 4
        low, high = {"int8": (1e-4, 0.01), "int4": (0.01, 0.2), "bf16": (1e-4, 0.004)}[name]
        assert all(low < float(error) < high for error in coded["errors"])
        for plain, short in zip(exact["traffic"][2:], coded["traffic"][2:]):
            assert plain.keys() == short.keys()
            for (layer, direction), (before, rows) in plain.items():
                width = widths.get(layer, HIDDEN)
                evaluated = rows / 2 if direction == "forward" else 0  # by validation, exactly
                if layer == "model.convs.0":
                    width = FEATURES
                assert before == rows * 4 * width
                bytes_sent, rows_sent = short[layer, direction]
                assert rows_sent == rows
                coded_bytes = codec.row_bytes(width, torch.float32)
                assert bytes_sent == evaluated * 4 * width + (rows - evaluated) * coded_bytes
        # What is made once and kept: the rest of the first epoch.
        if "cache_input_aggregation" not in options:
            assert exact["traffic"][0].get(("model.convs.0", "forward")) == coded["traffic"][0].get(
                ("model.convs.0", "forward")
            )


@pytest.mark.parametrize("options", [{"replication_factor": 2, "sparsity_aware": False}, *campaign({"replication_factor": 1})])
def test_attention(ranks, options):
    """The softmax that is completed over ranks is that of the scores, whatever rows lose on the way."""
    for exact, coded in ranks.run(2, exact_and_coded, SpMM15DStrategy, options, "int8", "gat"):
        assert coded["losses"] == pytest.approx(exact["losses"], rel=0.02)
        assert coded["losses"] != exact["losses"]


def test_2d(ranks):
    for exact, coded in ranks.run(4, exact_and_coded, SpMM2DStrategy, {}, "int8", "gcn"):
        assert coded["losses"] == pytest.approx(exact["losses"], rel=0.01)
        before, after = (each["traffic"][-1]["model.convs.1", "backward"] for each in (exact, coded))
        assert after[0] < before[0] and after[1] == before[1]


def fit_twice(rank: int, world_size: int) -> Any:
    options = {"codec": "int4", "stochastic_rounding": True}
    return [fit(world_size, DGCLStrategy, options) for _ in range(2)], fit(world_size, DGCLStrategy, {"codec": "int4"})


def test_stochastic_rounding_repeats(ranks):
    for (first, second), nearest in ranks.run(2, fit_twice):
        assert first["losses"] == second["losses"] != nearest["losses"]
        assert all(map(torch.equal, first["weights"], second["weights"]))


def plain_wire(rank: int, world_size: int) -> bool:
    seen = []

    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(isinstance(trainer.strategy.world.transport, EncodingTransport))

    trainer = quiet_trainer(DGCLStrategy(timeout=30), world_size, max_epochs=1, callbacks=[Look()])
    module = NodeClassifier(GCN(FEATURES, 8, 2, CLASSES), num_classes=CLASSES)
    trainer.fit(module, datamodule=GraphDataModule(awkward_graph(dtype=torch.float32)))
    return seen[0]


def test_without_a_codec_nothing_is_in_between(ranks):
    assert not any(ranks.run(2, plain_wire))


# Refusals #####################################################################


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"codec": "int3"},
            r"codec must be one of 'int8', 'int4', 'int2', 'bfp8', 'bfp4', 'bf16' or None \(got 'int3'\)",
        ),
        ({"stochastic_rounding": True}, 'not supported without a codec. Add codec="int8"'),
        ({"codec": "int8", "plan": "swap"}, "plan='swap'.* Use plan='p2p' or 'spst'"),
    ],
)
def test_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        DGCLStrategy(**options)


def test_from_yaml(tmp_path):
    asked = "{class_path: lightning_gnn.SpMM15DStrategy, init_args: {codec: int8, stochastic_rounding: true}}"
    strategy = strategy_of_config(tmp_path / "config.yaml", asked)
    assert (strategy.codec, strategy.stochastic_rounding) == ("int8", True)
