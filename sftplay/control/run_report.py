"""report.html behind a run or a measurement."""

from __future__ import annotations

from sftplay.launch.run_folder import RunFolder
from sftplay.launch.supervise.console import Screen


def leave_report(folder: RunFolder) -> None:
    """Write report.html after a run or a measurement and say where; where it fails, only say so.

    What the page is about has ended already: nothing that goes wrong here may change its outcome.
    """
    try:
        from sftplay.deliver.report.report import write_report

        text = f"report: {write_report(folder)}"
    except Exception as error:  # noqa: BLE001 - see above
        text = f"note: no report ({getattr(error, 'strerror', None) or f'{type(error).__name__}: {error}'})"
    Screen()(f"[report] {text}\n")  # nor may a reader that has left change it
