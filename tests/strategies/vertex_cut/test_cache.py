"""Cached messages: both ends agree about what was sent, whatever is sent, and nothing is lost once the threshold is 0."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from common import examples, random_cut
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_gnn.comm.call import Call, Step
from lightning_gnn.comm.group import CommunicationError
from lightning_gnn.comm.in_process import InProcessWorld, Meeting
from lightning_gnn.comm.traffic import Meter
from lightning_gnn.extensions.codecs.codec import make_codec
from lightning_gnn.extensions.codecs.transport import EncodingTransport
from lightning_gnn.partition.shard import halo_plan
from lightning_gnn.strategies.vertex_cut.cache import LargestChangesCache, MessageCache, NotFiniteError, _bits, _flags
from lightning_gnn.strategies.vertex_cut.thresholds import AdaptiveThreshold, TopKChanges

NODES, WIDTH = 12, 6


def on_ranks(size: int, seed: int, work: Any, make: Any = lambda: MessageCache(0.0)) -> list[Any]:
    """Runs ``work(exchange, own rows, halo rows, cache)`` on ranks that read rows of each other at random."""
    offsets, halos = random_cut(NODES, size, seed)
    meeting = Meeting(size)

    def one(rank: int) -> Any:
        cache = make()
        exchange = cache.make_exchange(
            halo_plan(rank, offsets, halos), halos, offsets, InProcessWorld(rank, meeting), Meter()
        )
        return work(exchange, slice(*offsets[rank : rank + 2]), halos[rank], cache)

    found = meeting.run(one)
    errors = [each for each in found if isinstance(each, BaseException)]
    for error in sorted(
        errors, key=lambda each: isinstance(each, CommunicationError)
    ):  # those of ranks that waited last
        raise error
    return found


def pair(exchange: Any, rows: Tensor, layer: str = "a", approximate: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the halo rows that come of own rows, and what comes home of halo rows."""
    halo = rows.new_empty(exchange.num_halo, *rows.shape[1:])
    home = torch.zeros_like(rows)
    with exchange.world.transport.approximating(approximate):
        call = exchange.world.call(layer)
        exchange.start_expand(rows, halo, call)()
        exchange.start_reduce(halo * 2, call.backward())(home)
    return halo, home


def agree(exchanges: list[Any]) -> None:
    """What each rank holds of a peer's message is what that peer knows to have sent."""
    for rank, exchange in enumerate(exchanges):
        for key, channel in exchange._channels.items():
            for peer, part in enumerate(channel.sent_rows.split(channel._out_counts)):
                if len(part):
                    other = exchanges[peer]._channels[key]
                    assert torch.equal(part, other.received_rows[rank])


@pytest.mark.parametrize("codec", [None, "int8", "int2", "bf16"])
@examples(15)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**20), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_both_ends_agree_and_nothing_is_lost(codec, size, seed, dtype):
    def work(exchange: Any, own: slice, halo: np.ndarray, cache: MessageCache) -> Any:
        plain, coder = exchange.world.transport, make_codec(codec)
        if coder is not None:
            exchange.world.wrap_transport(partial(EncodingTransport, codec=coder))
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(NODES, WIDTH, generator=g).to(dtype)
        for step in range(8):
            cache.epsilon = float(torch.rand((), generator=g)) if step < 6 else 0.0
            if step < 7:
                moved = torch.rand(NODES, 1, generator=g) < 0.5
                x = x + moved * torch.randn(NODES, WIDTH, generator=g) * 10.0 ** float(torch.randn((), generator=g))
            if step == 6:
                exchange.world.transport = plain
            exchange.world.begin_step(Step())
            found, home = pair(exchange, x[own].contiguous())
            if step == 0:
                torch.testing.assert_close(found, x[halo], rtol=0, atol=0)
        return exchange, found, x[halo], home

    results = on_ranks(size, seed, work)
    agree([exchange for exchange, *_ in results])
    for _, found, exact, _ in results:
        assert torch.equal(found, exact)


@examples(20)
@given(seed=st.integers(0, 2**20), epsilon=st.floats(0, 1))
def test_rows_are_off_by_no_more_than_the_threshold(seed, epsilon):
    def work(exchange: Any, own: slice, halo: np.ndarray, cache: MessageCache) -> Any:
        g = torch.Generator().manual_seed(seed)
        cache.epsilon = epsilon
        for _ in range(4):
            x = torch.randn(NODES, WIDTH, generator=g)
            exchange.world.begin_step(Step())
            found, _ = pair(exchange, x[own].contiguous())
            off = (found - x[halo]).abs().amax(1)
            assert (off <= epsilon * found.abs().amax(1) * (1 + 1e-6)).all()
        return cache.take()

    for sent in on_ranks(3, seed, work):
        for each in sent.values():
            assert 0 <= each.rows <= each.total


@pytest.mark.parametrize("codec", [None, "bfp4", "int8"])
@examples(15)
@given(size=st.integers(2, 4), seed=st.integers(0, 2**20), share=st.sampled_from([0.2, 0.5, 1.0]))
def test_both_ends_guess_alike(codec, size, seed, share):
    """Whatever was sent and guessed, ends agree, and no more than the share is sent; a share of 1 is exact."""

    def work(exchange: Any, own: slice, halo: np.ndarray, cache: Any) -> Any:
        coder = make_codec(codec)
        if coder is not None:
            exchange.world.wrap_transport(partial(EncodingTransport, codec=coder))
        g = torch.Generator().manual_seed(seed)
        for step in range(8):
            x = torch.randn(NODES, WIDTH, generator=g) * 10.0 ** float(torch.randn((), generator=g))
            exchange.world.begin_step(Step())
            found, _ = pair(exchange, x[own].contiguous())
            for sent in cache.take().values():
                assert step == 0 or sent.rows < share * sent.total + 1
        if codec is None and share == 1:
            torch.testing.assert_close(found, x[halo], rtol=0, atol=0)
        return exchange

    agree(on_ranks(size, seed, work, lambda: LargestChangesCache(share)))


def test_a_common_change_needs_no_rows():
    """Columns that all rows change alike, by a factor and a shift, arrive by the guess."""

    def work(exchange: Any, own: slice, halo: np.ndarray, cache: Any) -> Any:
        x = torch.randn(NODES, WIDTH, generator=torch.Generator().manual_seed(1)).double()
        found, moved = x[halo], x
        for step in range(3):
            exchange.world.begin_step(Step())
            moved = x * (1 + step * torch.arange(WIDTH)) - step
            found, _ = pair(exchange, moved[own].contiguous())
        torch.testing.assert_close(found, moved[halo])

    on_ranks(3, 4, work, lambda: LargestChangesCache(1e-9))


def test_shares_out_of_range():
    for share, growth in ((0, 0.5), (1.5, 0.5), (0.3, -1), (0.3, 2)):
        with pytest.raises(ValueError, match="share"):
            TopKChanges(share, growth)


@given(st.floats(0.01, 0.5), st.floats(0, 1), st.integers(2, 300))
def test_the_share_grows_around_its_mean(share, growth, epochs):
    shares = [TopKChanges(share, growth).share_in(epoch, epochs) for epoch in range(epochs)]
    assert sum(shares) / epochs == pytest.approx(share) and shares == sorted(shares)
    assert shares[-1] - shares[0] == pytest.approx(2 * growth * share)


def test_without_an_end_the_share_stays():
    assert {TopKChanges(0.2).share_in(epoch, -1) for epoch in range(9)} == {0.2}


def test_layers_and_repeated_messages_are_told_apart():
    def work(exchange: Any, own: slice, halo: np.ndarray, cache: MessageCache) -> Any:
        g = torch.Generator().manual_seed(0)
        tensors = [torch.randn(NODES, WIDTH, generator=g) for _ in range(3)]
        for step in range(3):
            exchange.world.begin_step(Step())
            cache.epsilon = 1.0 if step else 0.0
            for layer, x in zip(("a", "b", "b"), tensors):
                found, _ = pair(exchange, x[own].contiguous(), layer)
                assert torch.equal(found, x[halo])
        return [(key, sent.rows, sent.total) for key, sent in cache.take().items()]

    for found in on_ranks(2, 5, work):
        for _, rows, of in found:
            assert of == 3 * rows  # in the first step only


def test_off_outside_of_training_and_what_is_kept_then():
    def work(exchange: Any, own: slice, halo: np.ndarray, cache: MessageCache) -> Any:
        cache.epsilon = 10.0
        x = torch.ones(NODES, WIDTH)
        exchange.world.begin_step(Step())
        pair(exchange, x[own].contiguous())
        exchange.world.begin_step(Step())
        exact, _ = pair(exchange, 2 * x[own].contiguous(), approximate=False)
        assert torch.equal(exact, 2 * x[halo])
        exchange.world.begin_step(Step())
        cached, _ = pair(exchange, 3 * x[own].contiguous())
        assert torch.equal(cached, x[halo])

    on_ranks(3, 1, work)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stops_the_run(bad):
    def work(exchange: Any, own: slice, halo: np.ndarray, cache: MessageCache) -> bool:
        x = torch.ones(NODES, WIDTH)
        exchange.world.begin_step(Step())
        pair(exchange, x[own].contiguous(), "convs.1")
        exchange.world.begin_step(Step())
        x[:, 2] = bad
        if not len(exchange.send_rows):
            return False
        with pytest.raises(NotFiniteError, match=r"convs\.1.*forward.*rank"), exchange.world.transport.approximating():
            exchange.start_expand(x[own].contiguous(), x[halo], Call("convs.1"))
        return all(bool(torch.isfinite(channel.sent_rows).all()) for channel in exchange._channels.values())

    assert sum(on_ranks(3, 3, work)) >= 2


@examples(100)
@given(flags=st.lists(st.booleans(), max_size=140))
def test_bits(flags):
    given_flags = torch.tensor(flags, dtype=torch.bool)
    assert len(_bits(given_flags)) == -(-len(flags) // 64) * 8
    assert torch.equal(_flags(_bits(given_flags), len(flags)), given_flags)


def test_threshold_by_both_rules():
    """Equations 6 and 7, worked out by hand."""
    text, printed = AdaptiveThreshold(epsilon=0.1), AdaptiveThreshold(epsilon=0.1, rule="printed")
    for each in (text, printed):
        each.update(0.5)
        assert (each.epsilon, each.mean) == (0.1, 0.5)
        each.update(0.6)  # rises by more than mu2
    assert text.epsilon == pytest.approx(0.105)  # lambda1 is less than xi here
    assert printed.epsilon == pytest.approx(0.09)
    assert text.mean == printed.mean == pytest.approx(0.52)
    text.update(0.5)  # falls by more than mu1
    assert text.epsilon == pytest.approx(0.095)  # xi is less than lambda2 here
    text.update(text.mean)
    assert text.epsilon == pytest.approx(0.095)
    for _ in range(400):
        text.update((text.mean or 0) + 1)
    assert text.epsilon == 0.3
    for _ in range(400):
        text.update((text.mean or 0) - 1)
    assert text.epsilon == 0.001


def test_threshold_by_the_loss():
    """What stands for the accuracy is the share of the first loss that is gone."""
    by_loss, by_accuracy = AdaptiveThreshold(), AdaptiveThreshold()
    for loss in (2.0, 1.8, 1.2, 1.3, math.nan, 1.3, 5.0):
        by_loss.update_by_loss(loss)
        if not math.isnan(loss):
            by_accuracy.update(1 - loss / 2.0)
    assert by_loss.epsilon == pytest.approx(by_accuracy.epsilon) and by_loss.epsilon != 0.01
    relaxed, tightened = AdaptiveThreshold(), AdaptiveThreshold()
    for each, losses in (
        (relaxed, (-1.0, -1.1)),
        (tightened, (-1.0, -0.9)),
    ):  # of a loss below 0 as well, less is better
        for loss in losses:
            each.update_by_loss(loss)
    assert tightened.epsilon < 0.01 < relaxed.epsilon
    nothing = AdaptiveThreshold()
    nothing.update_by_loss(0.0)
    nothing.update_by_loss(1.0)
    assert nothing.epsilon < 0.01


def held_after(values: list[float], epsilon: float) -> list[float]:
    """Returns what a receiver holds after each of growing values, of which those are sent that differ by more than epsilon."""
    held = [values[0]]
    for value in values[1:]:
        held.append(value if value - held[-1] > epsilon * held[-1] else held[-1])
    return held


def test_factors_of_messages_multiply():
    """By hand: a row passes that has grown by more than epsilon times the factors of all names of its message."""
    factors = {"a": 2.0, "backward": 4.0, "b/forward": 0.0}
    epsilons = {("a", "forward"): 0.2, ("a", "backward"): 0.8, ("b", "forward"): 0.0, ("b", "backward"): 0.4}
    sizes = [1.01**step for step in range(90)]

    def work(exchange: Any, own: slice, halo: np.ndarray, cache: MessageCache) -> Any:
        x = torch.ones(NODES, WIDTH, dtype=torch.float64)
        for size in sizes:
            exchange.world.begin_step(Step())
            for layer in ("a", "b"):
                pair(exchange, size * x[own].contiguous(), layer)
        return cache.take()

    for sent in on_ranks(2, 5, work, lambda: MessageCache(0.1, factors=factors)):
        for layer in ("a", "b"):
            there = held_after(sizes, epsilons[layer, "forward"])
            home = held_after(there, epsilons[layer, "backward"])  # what comes home is twice what has come
            for direction, held in (("forward", there), ("backward", home)):
                found = sent[layer, direction]
                assert found.total and found.rows * len(sizes) == len({*held}) * found.total, (layer, direction)


def test_factors_that_name_nothing():
    split = AdaptiveThreshold(factors={"convs.1": 2, "backward": 0.5, "convs.0/forward": 0})
    split.check_names(["convs.0", "convs.1"])
    for wrong in ("convs.2", "convs.1/up", "convs.2/forward", "forwards", ""):
        with pytest.raises(ValueError, match=rf"factors has '{wrong}'.* Use a layer .'convs.0', 'convs.1'"):
            AdaptiveThreshold(factors={wrong: 2.0}).check_names(["convs.0", "convs.1"])
    for wrong_factors in ({"backward": -1}, {"backward": "2"}, {"backward": math.nan}, {1: 2}, 3):
        with pytest.raises(ValueError, match="factors"):
            AdaptiveThreshold(factors=wrong_factors)  # type: ignore[arg-type]


def test_threshold_refuses_what_it_cannot_follow():
    with pytest.raises(ValueError, match="rule must be"):
        AdaptiveThreshold(rule="equation")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nu2 <= epsilon <= nu1"):
        AdaptiveThreshold(epsilon=0.5)
    with pytest.raises(ValueError, match="lambda1"):
        AdaptiveThreshold(lambda1=0.5)
    with pytest.raises(ValueError, match="first must be a finite number"):
        AdaptiveThreshold(first={"a": 1})  # type: ignore[arg-type]
