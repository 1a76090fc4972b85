"""Any model in any layout to any layout: every element arrives once, comes back to the bit, no byte too many moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reshard_cases import MODELS, draw_layout, draw_model, execute, lower_bound, shard, whole_weights

from docklands.parallel.layout import Layout
from docklands.sync.plan import Options, plan_reshard
from docklands.sync.script import Script

CHECKS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
METHODS = ("minimal", "allgather_swap", "broadcast")


@CHECKS
@given(st.data(), st.sampled_from(METHODS), st.booleans())
def test_there_and_back_is_the_identity(data: st.DataObject, method: str, apart: bool) -> None:
    """Any model, any two layouts: every element is written once (see `execute`), bytes are the least there can be."""
    model = draw_model(data.draw)
    source, target = draw_layout(data.draw, model), draw_layout(data.draw, model)
    bucket = data.draw(st.sampled_from([40, 700, 1 << 20]))
    options = Options(method=method, bucket_bytes=bucket, node=data.draw(st.integers(1, 8)), apart=apart)  # type: ignore[arg-type]
    there = plan_reshard(model, source, target, options)
    whole = whole_weights(there)
    trained = [shard(Script(there, device).source, whole) for device in range(there.devices)]
    generators, received = execute(there, trained)
    for device, arrays in enumerate(generators):
        expected = shard(Script(there, device).target, whole)
        assert arrays.keys() == expected.keys()
        assert all((arrays[n] == expected[n]).all() for n in expected), f"device {device}"
    assert (received == there.traffic()[1]).all()
    if method != "allgather_swap":
        assert (received == lower_bound(there, whole)).all()
    back = plan_reshard(model, target, source, options)
    again, _ = execute(back, [generators[there.first_generator + r] for r in range(target.world_size)] + [{}] * 99)
    for rank in range(source.world_size):
        arrays = again[back.first_generator + rank]
        assert all((arrays[n] == trained[rank][n]).all() for n in arrays), f"rank {rank}"


@CHECKS
@given(st.data(), st.sampled_from(sorted(MODELS)), st.sampled_from(METHODS))
def test_counts_agree(data: st.DataObject, name: str, method: str) -> None:
    """Bytes of links, devices, buckets and steps are the same bytes; a second plan is the same plan."""
    model = MODELS[name]
    source, target = draw_layout(data.draw, model), draw_layout(data.draw, model)
    options = Options(method=method, bucket_bytes=600, node=data.draw(st.integers(1, 4)))  # type: ignore[arg-type]
    plan, same = plan_reshard(model, source, target, options), plan_reshard(model, source, target, options)
    sent, received = plan.traffic()
    assert plan.links().total == sent.sum() == received.sum()
    assert (sum(bucket.sent for bucket in plan.buckets) == sent).all()
    assert (sum(bucket.received for bucket in plan.buckets) == received).all()
    assert len(plan.buckets) == len(same.buckets)
    for mine, other in zip(plan.families, same.families):
        assert mine.names == other.names
        for column in ("boxes", "source", "target", "hop", "phase"):
            assert (getattr(mine, column) == getattr(other, column)).all()
    weights = {side: np.zeros(plan.devices, np.int64) for side in ("source", "target")}
    for side, total in weights.items():
        for _, itemsize, counts in plan.held(side):  # type: ignore[arg-type]
            total += counts * itemsize
    for device in range(plan.devices):
        script = Script(plan, device)
        found = np.array([script.message_bytes(step) for step in script.steps]).sum(0)
        assert (found == (sent[device], received[device])).all()
        assert sum(held.bytes for held in script.source.values()) == weights["source"][device]
        assert sum(held.bytes for held in script.target.values()) == weights["target"][device]
        peak = script.peak()
        assert max(weights[side][device] for side in weights) <= peak.total - 2 * script.room()
        assert peak.total <= weights["source"][device] + weights["target"][device] + 2 * script.room()


@pytest.mark.parametrize("method", METHODS)
def test_buckets_hold_their_limit(method: str) -> None:
    """No device sends or receives more at once, but where one row is larger."""
    limit = 2_000
    options = Options(method=method, bucket_bytes=limit)  # type: ignore[arg-type]
    target = Layout(tp=4, dp=2, ep=2, etp=4)
    plan = plan_reshard(MODELS["mla"], Layout(fsdp=4, tp=2, ep=4), target, options)
    assert len(plan.buckets) > 3
    for bucket in plan.buckets:
        if len(bucket.items) > 1:
            assert max(bucket.sent.max(), bucket.received.max()) <= limit
