"""Builds `.venv` from the pinned lock, and says beforehand what that costs. Needs Python and nothing else.

Run by make with the user's Python, so it must be understood by old versions in order to refuse them.
"""

import glob
import os
import subprocess
import sys

OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch==2.13.0"
LOCK = "requirements.lock"
VENV = ".venv"
STAMP = os.path.join(VENV, ".stamp")
MACHINE = 3


def main(force):
    """Make `.venv` fit the lock; an exit code. With `force` even when the stamp says that it does."""
    problem = find_problem(sys.version_info[:2])
    if problem:
        sys.stderr.write(problem + "\n")
        return MACHINE
    here = os.getcwd()
    if not force and read_stamp() == here and os.path.getmtime(STAMP) >= os.path.getmtime(LOCK):
        os.utime(STAMP, None)  # only this file is newer; make must not ask again
        return 0
    announce()
    python = os.path.join(VENV, "bin", "python")
    steps = []
    if read_stamp() not in ("", here) or not works(python):
        steps.append([sys.executable, "-m", "venv", "--clear", VENV])
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-q"]
    index = os.environ.get("TORCH_INDEX", "")
    steps.append(pip + [TORCH] + (["--index-url", index] if index else []))
    steps.append(pip + ["-r", LOCK])
    extras = os.environ.get("EXTRAS", "").replace(",", " ").split()
    if extras:
        steps.append(pip + ["-c", LOCK] + extra_requirements(extras))
    if os.path.exists(STAMP):
        os.remove(STAMP)  # a broken-off install must not look finished
    for step in steps:
        code = subprocess.call(step)
        if code:
            sys.stderr.write("install: %s failed\n  fix: see the lines above, then run the command again\n" % step[2:4])
            return MACHINE
    with open(STAMP, "w") as handle:
        handle.write(here)
    say("ready")
    return 0


def find_problem(version):
    """Why this Python cannot be used, with the remedy; empty when it can."""
    if not OLDEST <= tuple(version) <= NEWEST:
        found = ", ".join(other_pythons()) or "none found on PATH"
        return "install: Python 3.11 to 3.13 is needed, %s is %d.%d\n  fix: make PYTHON=python3.12 ... (here: %s)" % (
            sys.executable, version[0], version[1], found)  # fmt: skip
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        name = "python%d.%d-venv" % tuple(version)
        return "install: this Python has no %s\n  fix: apt install %s (Debian, Ubuntu), then again" % (error.name, name)
    return ""


def other_pythons():
    """Names of usable Pythons on PATH."""
    names = ["python%d.%d" % (3, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    return [name for name in names if any(os.path.exists(os.path.join(folder, name)) for folder in folders)]


def announce():
    """Say size and time before anything is downloaded."""
    say("building %s from %s: about 1.5 GB on disk, 2 to 5 minutes on a usual connection" % (VENV, LOCK))
    has_driver = bool(glob.glob("/proc/driver/nvidia/version"))
    if sys.platform.startswith("linux") and not has_driver and not os.environ.get("TORCH_INDEX"):
        say("no NVIDIA driver here: plain %s may still bring up to 5 GB of GPU libraries;" % TORCH)
        say("make install TORCH_INDEX=<an index with a CPU build of torch> avoids them")


def extra_requirements(names):
    """The requirements of the named extras in pyproject.toml."""
    import tomllib

    with open("pyproject.toml", "rb") as handle:
        extras = tomllib.load(handle)["project"]["optional-dependencies"]
    unknown = [name for name in names if name not in extras]
    if unknown:
        raise SystemExit("install: no extra called %r\n  fix: choose from %s" % (unknown[0], ", ".join(sorted(extras))))
    return [requirement for name in names for requirement in extras[name]]


def read_stamp():
    """The folder `.venv` was finished for, empty when it never was."""
    try:
        with open(STAMP) as handle:
            return handle.read().strip()
    except (IOError, OSError):  # noqa: UP024 - Python 2 spells it so
        return ""


def works(python):
    """True when the environment's own pip answers."""
    return os.path.exists(python) and subprocess.call([python, "-c", "import pip"], stderr=subprocess.DEVNULL) == 0


def say(text):
    """A line of progress."""
    sys.stdout.write("[install] %s\n" % text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main("--force" in sys.argv))
