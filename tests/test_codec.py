"""Codecs: bounds and bytes of each, and training with them under several schemes (no ranks, then gloo ranks)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gnn.comm.codec import Codec, make_codec

NAMES: Any = ("int8", "int4", "int2", "bf16")
BITS = {"int8": 8, "int4": 4, "int2": 2}
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
    most = 300 if dtype == torch.float64 else 35
    values = rng.standard_normal(shape) * 10.0 ** draw(st.integers(-most, most))
    values += draw(st.sampled_from([0.0, 1.0, -1e6])) * np.abs(values).max(initial=0)
    kind = draw(st.sampled_from(["normal", "constant", "few"]))
    if kind == "constant":
        values[:] = values[:, :1]
    elif kind == "few":
        values = values[:, rng.integers(0, min(3, shape[1]), shape[1])]
    return torch.from_numpy(values).to(dtype)


@settings(max_examples=400, deadline=None)
@given(rows_of_any_kind(), st.sampled_from(NAMES), st.booleans())
def test_there_and_back(rows, name, stochastic):
    codec = codec_of(name, stochastic)
    data = encoded(codec, rows)
    back = decoded(codec, data, rows)
    assert torch.equal(back, decoded(codec, data, rows))
    assert torch.equal(there_and_back(codec, back), back), "what was decoded is encoded without loss"
    if rows.numel() == 0:
        return
    exact, error = rows.double(), (back.double() - rows.double()).abs()
    rounding = torch.finfo(rows.dtype).eps * exact.abs().amax(1, keepdim=True)
    if name == "bf16":
        bound = exact.abs() * 2.0 ** (-7 if stochastic else -8) + 1e-38
        assert (error[exact.abs() < 3e38] <= bound[exact.abs() < 3e38]).all()
        return
    low, high = exact.amin(1, keepdim=True), exact.amax(1, keepdim=True)
    extent = (high / 4 - low / 4) * 4  # of float64's ends
    step = high / (2 ** BITS[name] - 1) - low / (2 ** BITS[name] - 1)
    assert (error <= step * (1 if stochastic else 0.5) * (1 + 1e-9) + rounding).all()
    assert torch.equal(back.amin(1), rows.amin(1)) and torch.equal(back.amax(1), rows.amax(1))
    assert torch.equal(back[(extent == 0).view(-1)], rows[(extent == 0).view(-1)])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 70), st.sampled_from(DTYPES))
def test_bytes(name, width, dtype):
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
    codec, rows = codec_of(name, True), torch.randn(1, 50).double()
    times = 4000
    mean = there_and_back(codec, rows.repeat(times, 1)).mean(0)
    step = (rows.max() - rows.min()) / (2 ** BITS[name] - 1) if name in BITS else rows.abs() * 2.0**-7
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
    assert total == pytest.approx(float(rows.double().square().sum()), rel=1e-9)
    assert codec.take_squares() == (0.0, 0.0)


@settings(max_examples=100, deadline=None)
@given(rows_of_any_kind(), st.sampled_from(tuple(BITS.values())))
def test_other_devices_get_the_same_bits(rows, bits):
    """What CUDA ranks compute, here on the CPU."""
    from lightning_gnn.kernels import codes

    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if rows.numel():
        ends, packed, squares = codes.quantise(wide, bits)
        other_ends, other_packed, other_squares = codes._quantise(wide, bits, 0.0, None)
        assert torch.equal(ends, other_ends) and torch.equal(packed, other_packed)
        torch.testing.assert_close(squares, other_squares.sum(0), rtol=1e-6, atol=0)
        out = torch.empty_like(wide)
        codes.dequantise(ends, packed, bits, out)
        assert torch.equal(out, codes._dequantise(ends, packed, bits, rows.size(1)).to(wide.dtype))
