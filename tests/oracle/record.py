"""Records the traces with which fast tests compare the closed form.

    cd tests && python -m oracle.record

traces every case anew and rewrites recorded/traces.json with the versions of the libraries that a trace runs. A slow
test traces one case of each family and compares it with the record.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from oracle.cases import Case, recorded_cases

RECORD = Path(__file__).parent / "recorded" / "traces.json"
LIBRARIES = ("torch", "transformers", "peft", "trl", "accelerate", "bitsandbytes")


@cache
def read_record() -> dict[str, Any]:
    """`versions` of the libraries, and `traces`: key of a case -> peak bytes by phase."""
    content: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return content


def recorded_peaks(case: Case) -> dict[str, int]:
    """The recorded peaks of a case in bytes, by phase of the trace."""
    traces = read_record()["traces"]
    assert case.key in traces, f"{case.key!r} is not recorded: cd tests && python -m oracle.record"
    peaks: dict[str, int] = traces[case.key]
    return peaks


def installed_versions() -> dict[str, str]:
    """The libraries that a trace runs."""
    return {name: metadata.version(name) for name in LIBRARIES}


def main() -> int:
    """Trace every case and write the record."""
    from oracle.trace import trace_step

    cases, traces = recorded_cases(), {}
    for number, case in enumerate(cases, 1):
        traces[case.key] = trace_step(case.config, case.settings).peaks_bytes
        print(f"{number}/{len(cases)}  {case.key}", file=sys.stderr, flush=True)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(peaks)}" for key, peaks in traces.items())
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(f'{{"versions": {json.dumps(installed_versions())},\n "traces": {{\n{lines}\n}}}}\n', "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
