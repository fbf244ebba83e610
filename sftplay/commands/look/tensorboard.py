"""The verbs `tensorboard` and `tb-stop`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import load_config
from sftplay.control.tensorboard import PID_FILE, end_board, running, start_board
from sftplay.errors import ConfigError, nearest_names
from sftplay.launch.run_folder import RESOLVED


def start(args: Namespace) -> int:
    """`tensorboard`: start it over all runs of the output folder, or print the address of the one that runs.

    Raises:
        ConfigError: there is no run of the name that is given.
    """
    output = Path(load_config(args.config, args.overrides).output_dir) if args.config else Path("outputs")
    start_board(_folder_of(args.run, output) if args.run else output, args.port)
    return 0


def _folder_of(run: str, output: Path) -> Path:
    """The folder of a run, by its name or by its path."""
    if found := next((path for path in (output / run, Path(run)) if path.is_dir()), None):
        return found
    known = sorted(path.parent.name for path in output.glob(f"*/{RESOLVED}"))
    near = nearest_names(run, known)
    fix = f"did you mean RUN={near[0]}?" if near else f"name one with RUN=; there is {', '.join(known[:5]) or 'none'}"
    raise ConfigError(f"no run {run!r}", where=str(output), fix=fix, nearest=near)


def stop(args: Namespace) -> int:
    """`tb-stop`: end the TensorBoard that this kit started, and no other."""
    record = running()
    if record is None:
        log.say("no TensorBoard of ours is running", "tensorboard")
        PID_FILE.unlink(missing_ok=True)
        return 0
    end_board(record)
    log.say(f"stopped (process {record['pid']})", "tensorboard")
    return 0
