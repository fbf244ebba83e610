"""The recorded traces are those that a trace gives now."""

from __future__ import annotations

import pytest

from oracle.cases import recorded_cases
from oracle.record import installed_versions, read_record

TOLERANCE = 1e-5
"""The first trace of a process holds about a hundred bytes more than later ones."""

ANEW = "look at what changed, then record anew: cd tests && python -m oracle.record"


def test_the_record_holds_every_case_and_no_other():
    assert list(read_record()["traces"]) == [case.key for case in recorded_cases()]


@pytest.mark.slow
def test_every_third_recorded_trace_is_the_one_of_the_installed_libraries():
    from oracle.trace import trace_step

    # What a library changes shows in many traces; `python -m oracle.record` traces all.
    traced = {case.key: trace_step(case.config, case.settings).peaks_bytes for case in recorded_cases()[::3]}
    known = read_record()["traces"]
    changed = {key: peaks for key, peaks in traced.items() if peaks != pytest.approx(known[key], rel=TOLERANCE)}
    recorded, installed = read_record()["versions"], installed_versions()
    assert changed == {}, f"recorded with {recorded}, traced with {installed}; {ANEW}"
