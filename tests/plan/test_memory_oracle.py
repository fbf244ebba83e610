"""The closed form against the fake-tensor trace, which knows nothing of it: families, methods, depths, token counts.

Fast tests compare with the recorded traces; `tests/oracle/test_record.py` holds the record against new ones.
"""

from __future__ import annotations

from itertools import product

import pytest
from oracle.cases import (
    FAMILIES,
    LAYERED,
    METHODS,
    RECORDED_FAMILIES,
    VARIANTS,
    Case,
    TraceSettings,
    attention_of,
    cases_by_depth,
    cases_of_layers,
    cases_of_variant,
    cases_with_few_scores,
)
from oracle.closed_form import Compared, by_closed_forms_phases, closed_bytes, compare

TOLERANCE = 0.03


def assert_close(found: Compared) -> None:
    assert found.peak_error == pytest.approx(0, abs=TOLERANCE)
    assert found.errors() == pytest.approx(dict.fromkeys(found.errors(), 0), abs=TOLERANCE)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", RECORDED_FAMILIES)
def test_the_closed_form_is_within_three_percent_of_the_trace(family, method):
    for case in cases_by_depth(family, method):
        assert_close(compare(case))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", RECORDED_FAMILIES)
def test_it_is_so_where_a_layer_decides_the_peak(family, method):
    for case in cases_with_few_scores(family, method):
        assert_close(compare(case))


@pytest.mark.parametrize("family", LAYERED)
def test_it_is_so_where_layers_are_of_several_kinds_or_have_experts(family):
    for case in cases_of_layers(family):
        assert_close(compare(case))


@pytest.mark.parametrize("name", VARIANTS)
def test_it_is_so_for_every_execution_of_the_kit(name):
    for method in METHODS:
        for case in cases_of_variant(name, method):
            assert_close(compare(case))


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_so_for_more_families_depths_and_heads(family, method):
    from oracle.trace import trace_step

    for layers, tokens, checkpointing, head in product((2, 4), (512, 1024), (True, False), ("standard", "chunked")):
        # Gemma 3 repeats its layers in sixes.
        depth = 3 * layers if family == "gemma3" else layers
        settings = TraceSettings(
            method=method,
            layers=depth,
            batch=2,
            seq=tokens,
            checkpointing=checkpointing,
            head=head,
            attention=attention_of(family),
        )
        case = Case(family, settings)
        traced = by_closed_forms_phases(trace_step(case.config, settings).peaks_bytes)
        assert_close(Compared(traced, closed_bytes(case)))
