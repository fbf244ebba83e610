"""What becomes of a start that made no step: its name is free again, and what it wrote is kept with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sftplay import log
from sftplay.errors import ConfigError, DataError, MachineError, SftplayError
from sftplay.launch.run_folder import RESOLVED, RunFolder, name_taken
from sftplay.launch.supervise.follow import FolderGone

REFUSALS = (ConfigError.exit_code, MachineError.exit_code, DataError.exit_code)
"""Exit codes of a run that could not begin as it was asked to."""

REMAINS = (RESOLVED, "status.json", "plan.json", "metrics.jsonl", "checkpoints", "logs")
"""What a start leaves. Other files under the name of a run are the user's, and stay."""


MARKS = (".lock", RESOLVED, "status.json")
"""What tells a run of this kit, however early it ended: the lock is made before anything else."""


def free_name(folder: RunFolder) -> None:
    """Set aside what an earlier start without a step has left under the name of `folder`.

    Raises:
        ConfigError: the run has made a step, or runs, or the folder was never a run.
        MachineError: its folder cannot be moved.
    """
    found = [name for name in REMAINS if (folder.path / name).exists()]
    if not found:
        return
    if not any((folder.path / name).exists() for name in MARKS):
        what = f"this folder has {', '.join(found)}, and was never a run of this kit"
        raise ConfigError(what, where=str(folder.path), fix="choose another run_name, or move the folder away")
    with folder.locked():
        if folder.resolved.exists() and folder.has_made_step:
            raise name_taken(folder.name, str(folder.path))
        status = folder.read_json("status.json")
        why = (status.get("error") or {}).get("what", "").split("\n")[0] or status.get("signal") or "it was ended"
        log.say(f"the earlier start of {folder.name} made no step ({why}): kept in {folder.set_aside().path}")


def free_refused(folder: RunFolder) -> RunFolder:
    """Set a run aside that was refused before its first step, so that its name is free; the folder that it is in now.

    The caller holds the run's lock.
    """
    if folder.has_made_step:
        return folder
    try:
        kept = folder.set_aside()
    except MachineError as error:
        log.say(f"note: {error}")
        return folder
    log.say(f"no step was made: the name {folder.name} is free, and this start is kept in {kept.path}")
    return kept


@contextmanager
def refusals_free_name(folder: RunFolder, *, is_alone: bool) -> Iterator[None]:
    """Set the run aside where the block refuses to start it. Other nodes look for the folder where it is.

    The caller holds the run's lock.
    """
    try:
        yield
    except SftplayError as error:
        if is_alone and folder.path.exists() and not folder.has_made_step and not isinstance(error, FolderGone):
            folder.update_status(state="failed", exit_code=error.exit_code, error=error.as_json())
            free_refused(folder)
        raise
