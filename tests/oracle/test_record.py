"""The recorded traces are those that a trace gives now."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oracle.cases import Case, recorded_cases
from oracle.record import installed_versions, read_record

TOLERANCE = 1e-5
"""The first trace of a process holds about a hundred bytes more than later ones."""

ANEW = "look at what changed, then record anew: cd tests && python -m oracle.record"


def test_the_record_holds_every_case_and_no_other():
    assert list(read_record()["traces"]) == [case.key for case in recorded_cases()]


def one_of_each_family() -> list[Case]:
    """A Llama by each method, and each other family by one of its methods, in turn."""
    turns: dict[str, dict[str, Case]] = {}
    for case in recorded_cases():
        turns.setdefault(case.family, {}).setdefault(case.settings.method, case)
    llama, *others = (list(methods.values()) for methods in turns.values())
    return [*llama, *(methods[turn % len(methods)] for turn, methods in enumerate(others))]


@pytest.mark.parametrize(
    "choose",
    [
        pytest.param(one_of_each_family, marks=pytest.mark.slow),
        pytest.param(recorded_cases, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
    ids=["one of each family", "all"],
)
def test_recorded_traces_are_those_of_the_installed_libraries(choose: Callable[[], list[Case]]):
    from oracle.trace import trace_step

    # What a library changes shows in many traces.
    traced = {case.key: trace_step(case.config, case.settings).peaks_bytes for case in choose()}
    known = read_record()["traces"]
    changed = {key: peaks for key, peaks in traced.items() if peaks != pytest.approx(known[key], rel=TOLERANCE)}
    recorded, installed = read_record()["versions"], installed_versions()
    assert changed == {}, f"recorded with {recorded}, traced with {installed}; {ANEW}"
