"""Builds `.venv` or `.venv-unsloth` from the pinned locks and announces the cost first. It needs Python only.

make runs it with the user's Python. Old versions must be able to parse it, because it is what refuses them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch==2.13.0"
CU126 = "https://download.pytorch.org/whl/cu126"
"""torch's own index of builds for CUDA 12.6, the last with code for Volta. torch 2.15 has no CUDA 12."""

CUDA_12_DRIVER, CUDA_13_DRIVER = 525, 580
OLDEST_OF_CU130, NEWEST_OF_CU126 = 7.5, 9.0
"""First driver branch of each CUDA (CUDA release notes), and bounds of its torch's code. Plain torch is CUDA 13."""

LOCK = Path("requirements.lock")
LOG = Path(".cache") / "install.log"
CONFIG, MACHINE = 2, 3
BEGUN = "begun"  # stands in the stamp of an environment that the kit makes: it is not finished, but the kit's own
SIGN_OF_LIFE_S = 9.0

LAST_LINES = 15


@dataclass(frozen=True)
class Environment:
    """A folder with its own Python packages: those of the lock, and those of `unpinned` without their dependencies."""

    venv: Path
    unpinned: Path | None = None

    @property
    def stamp(self) -> Path:
        return self.venv / ".stamp"

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def is_fresh(self) -> bool:
        """True when it was finished in this folder, and none of its locks has changed since."""
        locks = [LOCK, self.unpinned] if self.unpinned else [LOCK]
        state, index = read_stamp(self)
        if state != str(Path.cwd()) or (os.environ.get("TORCH_INDEX") or index) != index:
            return False
        return all(self.stamp.stat().st_mtime >= lock.stat().st_mtime for lock in locks)


KIT = Environment(Path(".venv"))
UNSLOTH = Environment(Path(".venv-unsloth"), Path("requirements-unsloth.lock"))
"""unsloth changes other libraries when it is imported, and asks for some that a machine without a GPU cannot use."""


def main(force: bool, wanted: Environment = KIT) -> int:
    """Make the wanted environment fit its locks; an exit code. With `force`, also when it is fresh already."""
    problem = find_problem(sys.version_info[:2])
    if problem:
        return refuse(problem, MACHINE)
    here = str(Path.cwd())
    if not force and wanted.is_fresh():
        os.utime(wanted.stamp, None)  # only this module is newer; make must not call it again
        return 0
    extras = os.environ.get("EXTRAS", "").replace(",", " ").split() if wanted == KIT else []
    problem = find_extra_problem(extras)
    if problem:
        return refuse(problem, CONFIG)
    state, before = read_stamp(wanted)
    is_new = state not in (BEGUN, here) or not Path(wanted.python).exists()
    is_new = is_new or subprocess.call([wanted.python, "-c", "import pip"], stderr=subprocess.DEVNULL) != 0
    problem = find_owner_problem(wanted, is_new)
    if problem:
        return refuse(problem, MACHINE)
    index, why = choose_index(before)
    announce(wanted, why)
    wanted.venv.mkdir(exist_ok=True)
    wanted.stamp.write_text(f"{BEGUN}\n{index}".rstrip())
    steps = list_steps(wanted, extras, index=index)
    if not is_new and (index != before or (index and state == BEGUN)):
        # pip would leave torch of another index as it is: "already satisfied".
        steps.insert(0, [wanted.python, "-m", "pip", "uninstall", "--yes", "torch"])
    if is_new:
        for path in wanted.venv.iterdir():  # the stamp stays: by it the kit knows its folder after an interruption
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != wanted.stamp:
                path.unlink()
        steps.insert(0, [sys.executable, "-m", "venv", str(wanted.venv)])
    for step in steps:
        if run_logged(step):
            words = " ".join(step[1:4])
            return refuse(f"install: {words} failed\n  fix: see {LOG}, then run the command again", MACHINE)
    wanted.stamp.write_text(f"{here}\n{index}".rstrip())
    say("ready")
    return 0


def refuse(problem: str, exit_code: int) -> int:
    """Say the problem; its exit code."""
    sys.stderr.write(problem + "\n")
    return exit_code


def find_owner_problem(wanted: Environment, is_new: bool) -> str:
    """Why nothing is installed into the folder; empty when it is missing, empty or the kit's own."""
    venv = wanted.venv
    inner = (venv / "bin", venv / "lib")
    # A folder that is new would be cleared; what a link names is never cleared.
    link = next((path for path in ((venv, *inner) if is_new else inner) if path.is_symlink()), None)
    if link:
        what, fix = f"{link} is a link to {link.readlink()}, which the kit has not made", f"rm {link}"
    elif venv.exists() and not venv.is_dir():
        what, fix = f"{venv} is a file", f"mv {venv} {venv}.mine"
    elif venv.exists() and not wanted.stamp.exists() and any(venv.iterdir()):
        what, fix = f"{venv} was not made by the kit", f"mv {venv} {venv}.mine"
    else:
        return ""
    return f"install: {what}; nothing there is changed\n  fix: {fix}, then run the command again"


def choose_index(before: str) -> tuple[str, str]:
    """The index of torch, and why the machine decides it: TORCH_INDEX, else that of before, else by driver and GPUs."""
    named = os.environ.get("TORCH_INDEX") or before
    driver, capabilities = ("", []) if named or os.environ.get("PIP_NO_INDEX") else read_gpus()
    branch = int(driver.partition(".")[0] or 0)
    oldest = min(capabilities, default=OLDEST_OF_CU130)
    if branch < CUDA_12_DRIVER or max(capabilities, default=0.0) > NEWEST_OF_CU126:
        return named, ""
    if branch < CUDA_13_DRIVER:
        return CU126, f"driver {driver} runs CUDA 12 at most, and plain {TORCH} is for CUDA 13"
    return (CU126, f"plain {TORCH} has no code for capability {oldest}") if oldest < OLDEST_OF_CU130 else ("", "")


def read_gpus() -> tuple[str, list[float]]:
    """The NVIDIA driver's version and the GPUs' compute capabilities; empty where no driver answers."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "", []
    rows = [line.split(",") for line in answer.splitlines() if line.count(",") == 1]
    return (rows[0][0].strip() if rows else ""), [float(cell) for _, cell in rows if cell.strip()[:1].isdigit()]


def list_steps(wanted: Environment, extras: list[str], *, index: str = "") -> list[list[str]]:
    """pip's commands, in order: torch, the lock, the packages of `unpinned`, the extras."""
    pip = [wanted.python, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    steps = [[*pip, TORCH, *(["--index-url", index] if index else [])], [*pip, "-r", str(LOCK)]]
    if wanted.unpinned:
        steps.append([*pip, "--no-deps", "-r", str(wanted.unpinned)])
    if extras:
        known = known_extras()
        requirements = [requirement for name in extras for requirement in known[name]]
        # The base install does without the packages of an extra, so some extras have locks.
        locks = [LOCK.with_name(f"requirements-{name}.lock") for name in extras]
        constraints = [word for lock in [LOCK, *filter(Path.exists, locks)] for word in ("-c", str(lock))]
        # torch is named again: the lock does not contain it, and an extra must not change its version.
        steps.append([*pip, *constraints, TORCH, *requirements])
    return steps


def find_extra_problem(extras: list[str]) -> str:
    """Why one of the named extras is not installed here, with the remedy; empty when all can be."""
    known = [name for name in known_extras() if name != "unsloth"] if extras else []
    if "unsloth" in extras:
        return "install: unsloth has an environment of its own\n  fix: make train-unsloth CONFIG=... builds and uses it"
    unknown = next((name for name in extras if name not in known), None)
    return f"install: no extra called {unknown!r}\n  fix: choose from {', '.join(known)}" if unknown else ""


def format_title(argv: list[str]) -> str:
    """What a step does, in words."""
    if "venv" in argv:
        return f"making {argv[-1]}"
    with_value = ("--progress-bar", "--index-url", "-c")
    named = [word for before, word in pairwise(argv[3:]) if not word.startswith("-") and before not in with_value]
    verb = "removing" if "uninstall" in argv else "installing"
    return f"{verb} {', '.join(named)}" if "pip" in argv else " ".join(argv[1:3])[:40]


def run_logged(argv: list[str]) -> int:
    """Run a step with its output in the log and a sign of life on the screen; show the last lines if it fails."""
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("ab") as output, LOG.open("rb") as reader:
        started = time.monotonic()
        reader.seek(0, os.SEEK_END)
        process, said = subprocess.Popen(argv, stdout=output, stderr=subprocess.STDOUT), b""
        while True:
            try:
                exit_code = process.wait(SIGN_OF_LIFE_S)
                break
            except subprocess.TimeoutExpired:
                said += reader.read()
                begins = ("Collecting", "Downloading", "Installing", "Building")  # pip's lines that tell where it is
                lines = map(str.strip, said.decode(errors="replace").splitlines())
                steps = [line for line in lines if line.startswith(begins)]
                newest = f": {steps[-1][:80]}" if steps else ""
                say(f"{format_title(argv)}, {time.monotonic() - started:.0f} s{newest}")
        said += reader.read()
    if exit_code:
        sys.stderr.write("".join(said.decode(errors="replace").splitlines(keepends=True)[-LAST_LINES:]))
    return exit_code


def find_problem(version: tuple[int, ...]) -> str:
    """Why this Python cannot be used, with the remedy; empty when it can."""
    if not OLDEST <= tuple(version) <= NEWEST:
        names = [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
        folders = os.environ.get("PATH", "").split(os.pathsep)
        pythons = ", ".join(name for name in names if any(Path(folder, name).exists() for folder in folders))
        this = ".".join(map(str, version))
        return (
            f"install: Python 3.11 to 3.13 is needed, {sys.executable} is {this}\n"
            f"  fix: make PYTHON=python3.12 ... (found here: {pythons or 'none found on PATH'})"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python{version[0]}.{version[1]}-venv"
        return f"install: this Python has no {error.name}\n  fix: apt install {package} (Debian, Ubuntu), then again"
    return ""


def announce(wanted: Environment = KIT, why: str = "") -> None:
    """Print size and duration before anything is downloaded, and why torch comes from CU126 where it does."""
    size = "about 1.5 GB on disk, with torch's GPU libraries up to 6.5 GB"
    say(f"building {wanted.venv} from {LOCK}: {size}; 2 to 5 minutes on a usual connection")
    if why:
        say(f"{why}: torch for CUDA 12.6 comes from {CU126} (TORCH_INDEX= names another)")
    has_driver = Path("/proc/driver/nvidia/version").exists()
    if sys.platform.startswith("linux") and not has_driver and not os.environ.get("TORCH_INDEX"):
        say(f"no NVIDIA driver here: plain {TORCH} may still bring up to 5 GB of GPU libraries;")
        say("make install TORCH_INDEX=<an index with a CPU build of torch> avoids them")


def known_extras() -> dict[str, list[str]]:
    """Extra -> requirements."""
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras


def read_stamp(wanted: Environment) -> tuple[str, str]:
    """The working folder in which the environment was finished, or BEGUN, and torch's index; empty for none."""
    try:
        state, _, index = wanted.stamp.read_text().strip().partition("\n")
    except OSError:
        return "", ""
    return state, index


def say(text: str) -> None:
    sys.stdout.write(f"[install] {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main("--force" in sys.argv, UNSLOTH if "--unsloth" in sys.argv else KIT))
