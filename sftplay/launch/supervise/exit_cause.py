"""A process of a launch that died without a word: which one, and of what.

It tells a death, which another start may outlive, from an error that the run itself reported and would meet again.
Nothing is started or ended here.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from itertools import dropwhile
from typing import Any

from sftplay.errors import RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.signals import STOP_SIGNALS

WORDS = (0, 1, 2, 3, 4, 5, *(128 + number for number in STOP_SIGNALS))
"""Exit codes of a worker that has said why it ends: in status.json, or by a traceback."""

ROOT = "Root Cause"
RANK = re.compile(r"\s*rank\s*: (\d+) \(local_rank: \d+\)")
CODE = re.compile(r"\s*exitcode\s*: (-?\d+) \(pid: \d+\)")
"""Lines of the account that torchrun gives of the ranks that failed, the first one last, under this title (torch/
distributed/elastic/multiprocessing/errors/__init__.py). Without it a death is still seen, but less is known of it."""

DEEPSPEED = re.compile(r"\[ERROR\] \[launch\.py:.*\] exits with return code = (-?\d+)$")
"""What DeepSpeed's launcher says of the first process that failed, not which one that is (launcher/launch.py)."""


class Death(RunError):
    """A process of the run is gone and has not said why."""

    code = "death"


def find_death(lines: Iterable[str]) -> str:
    """Which rank died first and of what, by the lines of its launcher; empty when the first to end had a word to say.

    Only the first one counts: torchrun ends all others, in the end by SIGKILL, and lists them too.
    """
    lines = list(lines)
    account = dropwhile(lambda line: not line.startswith(ROOT), lines)
    rank = None
    for line in account:
        if match := RANK.match(line):
            rank = match[1]
        elif rank and (match := CODE.match(line)):
            cause = describe_code(int(match[1]))
            return f"rank {rank} {cause}" if cause else ""
    codes = [int(match[1]) for line in lines if (match := DEEPSPEED.search(line))]
    cause = describe_code(codes[0]) if codes else ""
    return f"a rank {cause}" if cause else ""


def describe_code(code: int) -> str:
    """What killed a process that ended with this code (negative: by a signal); empty when it had a word to say."""
    if code in WORDS or -code in STOP_SIGNALS:
        return ""
    return f"ended with code {code} without a word" if code > 0 else f"was killed by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have a number only."""
    return signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"


def follows_from_death(status: Mapping[str, Any]) -> bool:
    """True when the ending in status.json may be that of a rank which only lost another one.

    Such a rank's library fails, or torchrun stops it. An error of our own is the run's, whoever died with it.
    """
    error = status.get("error") or {"code": Death.code}
    return bool(status.get("exit_code") != 0 and error.get("code") == Death.code)


def cause_of_death(folder: RunFolder) -> str:
    """Of which death the run's last launch ended; empty when it ended otherwise."""
    error = folder.read_json("status.json").get("error") or {}
    return str(error["what"]) if error.get("code") == Death.code else ""
