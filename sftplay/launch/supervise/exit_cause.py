"""Which process of a launch died without reporting an error, and of what.

After a death the run may be started again. An error that the run reported itself would come again. Nothing is started
or ended here.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Mapping
from itertools import dropwhile
from typing import Any

from sftplay.errors import RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.signals import STOP_SIGNALS

REPORTED_CODES = (0, 1, 2, 3, 4, 5, *(128 + number for number in STOP_SIGNALS))
"""Exit codes of a worker that has reported why it ends, in status.json or by a traceback."""

ROOT_CAUSE = "Root Cause"
RANK_LINE = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")
CODE_LINE = re.compile(r"\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)")
"""Lines in torchrun's list of failed ranks. The rank that failed first comes last, under the title `ROOT_CAUSE`
(torch/distributed/elastic/multiprocessing/errors/__init__.py). Without the list a death is noticed with less detail."""

LOST = "rank {rank} (pid {pid}) died"
LOST_LINE = re.compile(r"rank \d+ \(pid (\d+)\) died")  # what a rank says that has lost another one of its node
DEEPSPEED_LINE = re.compile(r"\[ERROR\] \[launch\.py:.*\] exits with return code = (-?\d+)$")
"""DeepSpeed's launcher writes it for the first process that failed. It does not name the rank (launcher/launch.py)."""


class Death(RunError):
    """A process of the run has ended and has not reported why."""

    code = "death"


def find_death(lines: Iterable[str], *, said: str = "") -> str:
    """Which rank died first and of what, from the launcher's `lines`; empty when that rank reported why it ended.

    Only the first one counts: torchrun ends all others, at last with SIGKILL, and lists them too. Where `said`, the
    reason that a rank recorded, is the loss of another one, that one died first, whichever torchrun noticed first.
    """
    lines = list(lines)
    if lost := LOST_LINE.fullmatch(said):
        causes = [cause for pid, cause in _listed_deaths(lines) if pid == lost[1]]
        if any(causes):
            return causes[0]
    if first := next(_listed_deaths(dropwhile(lambda line: not line.startswith(ROOT_CAUSE), lines)), None):
        return first[1]
    codes = [int(match[1]) for line in lines if (match := DEEPSPEED_LINE.search(line))]
    cause = describe_code(codes[0]) if codes else ""
    return f"a rank {cause}" if cause else ""


def _listed_deaths(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The pid and the death of each rank of torchrun's list; the death is empty for one that reported why it ended."""
    rank = ""
    for line in lines:
        if match := RANK_LINE.match(line):
            rank = match[1]
        elif rank and (match := CODE_LINE.match(line)):
            cause = describe_code(int(match[1]))
            yield match[2], f"rank {rank} {cause}" if cause else ""


def describe_code(code: int) -> str:
    """How a process with this exit code died (negative: by a signal); empty when it reported why it ended."""
    if code in REPORTED_CODES or -code in STOP_SIGNALS:
        return ""
    return f"ended with code {code} and no message" if code > 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """SIGKILL for 9. Real-time signals have only a number."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def follows_from_death(status: Mapping[str, Any]) -> bool:
    """True when the end in status.json may be that of a rank which only lost another rank: a library fails in it, or
    torchrun stops it. An error class of our own is the run's error, even if another rank died at the same time.
    """
    error = status.get("error") or {"code": Death.code}
    return bool(status.get("exit_code") != 0 and error.get("code") == Death.code)


def cause_of_death(folder: RunFolder) -> str:
    """The death that ended the run's last launch; empty when it ended in another way."""
    error = folder.read_json("status.json").get("error") or {}
    return str(error["what"]) if error.get("code") == Death.code else ""
