"""The verbs `tensorboard` and `tb-stop`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.load import load_config
from sftplay.control.tensorboard import PID_FILE, end_board, running, start_board


def start(args: Namespace) -> int:
    """`tensorboard`: start it over all runs of the output folder, or print the address of the one that runs."""
    output = Path(load_config(args.config, args.overrides).output_dir) if args.config else Path("outputs")
    start_board(output / args.run if args.run else output, args.port)
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
