"""The newest complete checkpoint of a run that has no result yet, laid out as a finished run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sftplay.atomic import locked
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, RunError
from sftplay.launch.checkpoints import newest_complete, read_step
from sftplay.launch.run_folder import RunFolder

NOT_NEEDED = ("optimizer", "scheduler", "rng_state", "random_states", "drawing-", "trainer_state", "scaler")
"""How the names of files of a checkpoint begin that belong to the training alone."""


@contextmanager
def checkpoint_as_run(cfg: RunConfig, folder: RunFolder) -> Iterator[tuple[RunFolder, Path]]:
    """Yield a folder that looks as if the run had ended with its newest complete checkpoint, and that checkpoint.

    The files are linked, not copied: the run may remove the checkpoint meanwhile. Nothing of the run is written. What a
    killed process has left is removed: its links keep a checkpoint's room on the disk.

    Raises:
        ConfigError: there is no complete checkpoint yet.
        RunError: the checkpoint holds its weights in parts of ranks, or was removed before it could be linked.
    """
    with ExitStack() as held:
        with locked(folder.path):  # otherwise another process takes the new folder for one that was left
            for left in folder.path.glob(".parity-*"):
                with suppress(OSError), locked(left, waits=False):
                    shutil.rmtree(left)
            view = RunFolder(Path(tempfile.mkdtemp(prefix=".parity-", dir=folder.path)))
            held.enter_context(locked(view.path))
        held.callback(_remove, folder, view)
        for path in folder.path.iterdir():
            if not path.name.startswith(".parity-"):
                (view.path / path.name).symlink_to(path.absolute())
        yield view, _link_newest(folder, view.path / ("model" if cfg.tuning.mode == "full" else "adapter"))


def _remove(folder: RunFolder, view: RunFolder) -> None:
    if view.path.is_dir():  # else the run was moved, and a lock would make a file where it was
        with locked(folder.path):
            shutil.rmtree(view.path)


def _link_newest(folder: RunFolder, target: Path) -> Path:
    """Link the newest complete checkpoint of a run into `target`, and return it."""
    checkpoint = None
    for _ in range(3):  # a run that saves often may remove it meanwhile
        checkpoint, _ = newest_complete(folder.checkpoints)
        if checkpoint is None:
            what, fix = "this run has neither a result nor a complete checkpoint yet", "wait for its first one"
            raise ConfigError(what, where=str(folder.path), fix=f"{fix} (train.save_steps), or `make resume`")
        with suppress(FileNotFoundError):
            _link_weights(checkpoint, target)
            return checkpoint
    raise RunError("was removed while it was read", where=str(checkpoint), fix="try again")


def _link_weights(checkpoint: Path, target: Path) -> None:
    """Link the weights and the tokenizer of a checkpoint into a new folder."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    names = [path.name for path in checkpoint.iterdir() if path.is_file() and not path.name.startswith(NOT_NEEDED)]
    if not any(name.endswith(".safetensors") for name in names):
        what = "it holds its weights in parts, one for each process"
        fix = "wait for the end of the run, which writes them whole"
        raise RunError(what, where=str(checkpoint), fix=fix)
    for name in names:
        try:
            os.link(checkpoint / name, target / name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(checkpoint / name, target / name)


def describe_step(checkpoint: Path) -> str:
    return f"the run has no result yet: these are the weights of step {read_step(checkpoint)} ({checkpoint.name})"
