"""What must hold of the closed form whatever the model and the size: it grows, splits and adds up as memory does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle.cases import FAMILIES

from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import Size, estimate, find_share, standing_bytes
from sftplay.plan.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape_from_config import shape_from_config

SHAPES = {name: shape_from_config(config, name=name) for name, config in FAMILIES.items()}
shapes = st.sampled_from(sorted(SHAPES)).map(SHAPES.get)
methods = st.sampled_from(("full", "lora", "qlora"))
rows = st.integers(1, 32)
seqs = st.integers(1, 8192)
ranks = st.integers(1, 256)


def execution_for(method: str, *, rank: int = 16, **more) -> MemorySetup:
    wide = 4 if method == "full" else 2
    fields = {
        "weight_bytes": wide,
        "compute_bytes": 2,
        "stream_bytes": wide,
        "four_bit": method == "qlora",
        "double_quant": True,
        "has_autocast": True,
        "adapter": None if method == "full" else Adapter(rank=rank),
    }
    return MemorySetup(**(fields | more))


@st.composite
def executions(draw, method=methods) -> MemorySetup:
    return execution_for(
        draw(method),
        rank=draw(ranks),
        checkpointing=draw(st.booleans()),
        head=draw(st.sampled_from(("standard", "chunked", "liger"))),
        attention=draw(st.sampled_from(("flash", "efficient", "eager"))),
        is_masked=draw(st.booleans()),
    )


def peak(shape, execution, n, seq) -> int:
    return estimate(shape, execution, size=Size(rows=n, seq=seq)).peak_bytes


@given(shapes, executions(), rows, seqs)
def test_more_rows_tokens_or_layers_and_no_checkpointing_never_need_less(shape, execution, n, seq):
    least = peak(shape, execution, n, seq)
    assert least <= peak(shape, execution, n + 1, seq)
    assert least <= peak(shape, execution, n, seq + 1)
    assert least < peak(replace(shape, layers=shape.layers + 1), execution, n, seq)
    on, off = (peak(shape, replace(execution, checkpointing=c), n, seq) for c in (True, False))
    assert on <= off * 1.001
    half = estimate(shape, execution, size=Size(rows=n, seq=seq, labelled=max(1, n * seq // 2))).peak_bytes
    assert half <= least


@given(shapes, executions(), rows, seqs)
def test_components_add_up_to_the_peak_and_the_peak_is_the_largest_phase(shape, execution, n, seq):
    found = estimate(shape, execution, size=Size(rows=n, seq=seq))
    assert sum(found.components.values()) == found.peak_bytes
    assert found.peak_bytes == pytest.approx(max(sum(parts.values()) for parts in found.phases.values()), abs=16)
    assert all(size >= 0 for parts in found.phases.values() for size in parts.values())


def test_zero_holds_two_four_and_twelve_bytes_a_parameter_as_its_paper_says():
    # Rajbhandari et al. 2020, figure 1: 7.5 B parameters on 64 devices, 31.4, 16.6 and 1.9 GB (mixed precision, Adam).
    config = FAMILIES["llama"]
    shape = shape_from_config(config, name="x")
    execution = execution_for("full")
    params = shape.total_params
    for strategy, published in (("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.9)):
        share = find_share(
            shape, execution, standing=standing_bytes(shape, execution), strategy=strategy, world_size=64
        )
        held = sum(vars(share.standing).values())
        assert held / params * 7.5 == pytest.approx(published, abs=0.06)


def test_a_device_of_fsdp_gathers_what_lies_outside_the_layers_and_two_layers():
    # Zhao et al. 2023, section 3.4: the root's weights stay gathered, and the next layer comes while this one computes.
    shape = find_shape("meta-llama/Llama-2-7b-hf")
    assert shape is not None
    execution = replace(execution_for("full"), weight_bytes=4, compute_bytes=2)
    share = find_share(shape, execution, standing=standing_bytes(shape, execution), strategy="fsdp", world_size=8)
    root, layer = 2 * 32_000 * 4096 + 4096, 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert (share.communication.gathered, share.communication.ahead) == (2 * (root + layer), 2 * layer)
