"""Process that tokenises into a store while training reads: `python -m sftplay.data.mixture.tokenize_process JOB`."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

from sftplay import log
from sftplay.atomic import write_bytes, write_text
from sftplay.data.mixture.sources import SourceJob
from sftplay.data.mixture.store import get_failure_path
from sftplay.errors import SftplayError
from sftplay.signals import popen_tied

NICENESS = 10  # training goes first where both want a core


def start_tokenize_process(job: SourceJob) -> subprocess.Popen[bytes]:
    """Start the process; it ends together with this one. Its lines go to this rank's log.

    Several may be started for one store, also by other runs: one fills it, the others wait and then have nothing to do.
    """
    folder = job.folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    get_failure_path(folder).unlink(missing_ok=True)
    path = folder.with_name(f"{folder.name}.job.{os.getpid()}")
    write_bytes(path, pickle.dumps(job))
    command = [sys.executable, "-m", "sftplay.data.mixture.tokenize_process", str(path)]
    return popen_tied(command, output=1, env={log.FOLLOWED: "", "TOKENIZERS_PARALLELISM": "false"})


def fill(path: Path) -> int:
    """Fill the store of the job in the file `path`, and remove that file; return the exit code."""
    job: SourceJob = pickle.loads(path.read_bytes())
    path.unlink()
    os.nice(NICENESS)
    try:
        job.ensure(is_streamed=True)
    except SftplayError as error:
        write_text(get_failure_path(job.folder), json.dumps(error.as_json()))
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(fill(Path(sys.argv[1])))
