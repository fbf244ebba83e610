"""The verbs `tensorboard` and `tb-stop`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import load_config
from sftplay.config.read.resolved import RESOLVED
from sftplay.errors import ConfigError, nearest_names
from sftplay.runs.tensorboard import PID_FILE, end_board, running, start_board


def start(args: Namespace) -> int:
    """`tensorboard`: start it over all runs of the output folder, or print the address of the one that runs.

    Raises:
        ConfigError: there is no run of the name that is given.
    """
    output = Path(load_config(args.config, args.overrides).output_dir) if args.config else Path("outputs")
    folder = output
    if args.run:
        named = (output / args.run, Path(args.run))
        found = next((each for each in named if (each / RESOLVED).is_file() or (each / "tb").is_dir()), None)
        if found is None:
            runs = [path.parent.name for path in output.glob(f"*/{RESOLVED}")]
            near = nearest_names(args.run, runs)
            fix = f"did you mean RUN={near[0]}?" if near else "leave RUN= out to see all runs"
            raise ConfigError(f"no run {args.run!r}", where=str(output), fix=fix, nearest=near)
        folder = found
    start_board(folder, args.port)
    return 0


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
