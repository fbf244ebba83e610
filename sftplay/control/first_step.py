"""What becomes of a start that made no step: its name is free again, and what it wrote is kept with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch

from sftplay import log
from sftplay.errors import ConfigError, DataError, MachineError, SftplayError
from sftplay.launch.run_folder import RESOLVED, RunFolder, name_taken
from sftplay.launch.supervise.follow import FolderGone

REFUSALS = (ConfigError.exit_code, MachineError.exit_code, DataError.exit_code)
"""Exit codes of a run that could not begin as it was asked to."""

MARKS = (RESOLVED, "status.json", "manifest.json")
"""Files of which every run of the kit has one soon after its start."""

FIRST = ("logs", "base", "slurm*", ".lock", ".status.lock")
"""What a start, or a job that waits for one, makes before that."""


def free_name(folder: RunFolder) -> None:
    """Set aside what an earlier start without a step has left under the name of `folder`.

    Raises:
        ConfigError: the run has made a step, or runs; or the folder holds files that no run of the kit has made.
        MachineError: its folder cannot be moved.
    """
    if not any((folder.path / name).exists() for name in MARKS):
        refuse_files_of_others(folder)
        return
    with folder.locked():
        if folder.resolved.exists() and folder.has_made_step:
            raise name_taken(folder.name, str(folder.path))
        status = folder.read_json("status.json")
        why = (status.get("error") or {}).get("what", "").split("\n")[0] or status.get("signal") or "it was ended"
        log.say(f"the earlier start of {folder.name} made no step ({why}): kept in {folder.set_aside().path}")


def refuse_files_of_others(folder: RunFolder) -> None:
    """Raise ConfigError where a folder that was never a run holds more than a run makes first: it is not ours."""
    names = [path.name for path in folder.path.iterdir()] if folder.path.is_dir() else []
    if others := sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in FIRST)):
        more = f" and {len(others) - 3:,} more" if len(others) > 3 else ""
        what = f"holds {', '.join(map(repr, others[:3]))}{more}, and was never a run of this kit"
        raise ConfigError(what, where=str(folder.path), fix="choose another run_name or output_dir, or move the files")


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
