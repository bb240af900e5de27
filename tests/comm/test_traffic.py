"""What is counted of messages."""

from lightning_gnn.comm.traffic import Meter, Traffic


def test_what_was_counted_until_now_stays_as_it_was():
    meter = Meter()
    meter.record("conv", "forward", Traffic(8, 1, 2, 0.5, {1: 8}))
    before = dict(meter.by_layer)
    meter.record("conv", "forward", Traffic(16, 1, 4, 0.5, {1: 8, 2: 8}))
    now = meter.by_layer["conv", "forward"]
    assert now == Traffic(24, 2, 6, 1.0, {1: 16, 2: 8})
    assert now - before["conv", "forward"] == Traffic(16, 1, 4, 0.5, {1: 8, 2: 8})
