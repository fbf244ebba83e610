"""make: no setting of any target reaches a shell or make's own expansion, and its words are those of who typed it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay.cli import main
from sftplay.errors import ConfigError, ConfigErrors
from sftplay.make_arguments import put_flags, refuse_unused, split_args

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.M)
SETTINGS = re.search(r"^override SETTINGS := (.*?[^\\])\n", MAKEFILE, re.M | re.S)[1].replace("\\\n", " ").split()
PROGRAMS = ["PY", "PYTHON", "UNSLOTH_PY"]
OWN_NAMES = sorted({*re.findall(r"^([A-Za-z_]+) [:?]?=", MAKEFILE, re.M)} - {*SETTINGS})

ATTACKS = {
    "make's shell": "$(shell touch pwned)",
    "make's shell, in braces": "${shell touch pwned}",
    "make's eval": "$(eval $(shell touch pwned))",
    "for the second expansion": "$$(touch pwned) $$$$(touch pwned)",
    "command substitution": "$(touch pwned)",
    "backquotes": "`touch pwned`",
    "single quotes": "'; touch pwned; '",
    "double quotes": '"; touch pwned; "',
    "double quotes and backquotes": '"`touch pwned`"',
    "a backslash": "\\\"; touch pwned; \\' touch pwned",
    "semicolon": "; touch pwned;",
    "ampersand and pipe": "& touch pwned | touch pwned && touch pwned",
    "a line": "x\ntouch pwned\n\ttouch pwned\n",
    "redirection": "> pwned < /dev/null 2>pwned",
    "a word of its own": "x --json -- pwned=1",
    "dollars": "$pwned ${pwned} $1 $$ $@ $< %",
}

RECORDER = """\
#!/bin/sh
{ printf '%s\\0' "$TORCH_INDEX" "$EXTRAS" "$INSTALLER" "$@"; printf '\\0\\0END\\0\\0'; } >> "$RECORDED"
"""


class Place:
    """A folder with the Makefile, in which each program only writes down how it was called."""

    def __init__(self, root: Path):
        self.root, self.recorded, self.recorder = root, root / "recorded", root / "record it"
        for name in (
            "Makefile",
            "docs",
            "sftplay",
            "requirements.lock",
            "requirements-unsloth.lock",
            "requirements-vllm.lock",
        ):
            (root / name).symlink_to(ROOT / name)
        self.recorder.write_text(RECORDER)
        self.recorder.chmod(0o755)

    def make(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        known = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TYPED_"))}
        return subprocess.run(
            ["make", *words], cwd=self.root, env={**known, "RECORDED": str(self.recorded), **env},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip

    def calls(self) -> list[list[str]]:
        """The arguments of each call, behind the environment's three."""
        text = self.recorded.read_bytes().decode() if self.recorded.exists() else ""
        return [call.removesuffix("\0").split("\0") for call in text.split("\0\0END\0\0")[:-1]]

    @property
    def is_untouched(self) -> bool:
        return not (self.root / "pwned").exists()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    root = tmp_path / "a place"
    root.mkdir()
    return Place(root)


@pytest.fixture
def recording(place: Place) -> list[str]:
    return ["READY=", "UNSLOTH_READY=", "VLLM_READY=", *(f"{name}={place.recorder}" for name in PROGRAMS)]


EXPORTED = ("make's shell", "command substitution", "double quotes", "a line")
"""The attacks that are tried as exported settings too, which make treats like typed ones."""


@pytest.mark.contract
@pytest.mark.parametrize(
    ("attack", "from_environment"), [*((attack, False) for attack in ATTACKS), *((attack, True) for attack in EXPORTED)]
)
def test_every_setting_of_every_target_arrives_as_it_was_typed(
    attack: str, from_environment: bool, place: Place, recording: list[str]
):
    left_out = [*PROGRAMS, "NAME"] if from_environment else PROGRAMS  # a NAME of the environment is WSL's
    values = {name: name + ATTACKS[attack] for name in SETTINGS if name not in left_out}
    words = [] if from_environment else [f"{name}={value}" for name, value in values.items()]
    done = place.make("-s", "-k", *recording, *words, *TARGETS, **(values if from_environment else {}))
    assert place.is_untouched
    assert done.returncode == 0, done.stderr
    switches = {"COMPARE", "CONTROL", "DRY_RUN", "FAST", "INTERACTIVE", "JSON", "SUBMIT", "TORCH", "WATCH", "WEAK"}
    whole = {values[name] for name in values.keys() - switches}
    arrived = set()
    for call in place.calls():
        for argument in call:
            held = {value for value in whole if argument.endswith(value)}
            assert held or ATTACKS[attack] not in argument
            arrived |= held
    assert arrived == whole
    # Only what the launching targets start, and what shows a plan, has the flags that a setting merely switches.
    assert sum("--dry-run" in call for call in place.calls()) > 5


@pytest.mark.contract
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_is_one_file_and_no_command_line(attack: str, place: Place):
    words = ["READY=", "UNSLOTH_READY=", "VLLM_READY=", *(f"{program}={ATTACKS[attack]}" for program in PROGRAMS)]
    done = place.make("-k", *words, "install", "plan", "test-unsloth", "trian")
    assert done.returncode == 2
    assert place.is_untouched


@pytest.mark.contract
@pytest.mark.parametrize("name", [*OWN_NAMES, "SHELL", ".SHELLFLAGS", "CURDIR", "MAKECMDGOALS", "FOO"])
def test_what_is_no_setting_is_refused_and_never_expanded(name: str, place: Place, recording: list[str]):
    done = place.make("-s", *recording, f"{name}=$(shell touch pwned); touch pwned", "help")
    assert (done.returncode, place.is_untouched) == (2, True)
    assert f"no setting called {name}" in done.stderr


@pytest.mark.contract
def test_ready_and_a_python_in_the_environment_build_nothing_and_are_used(place: Place):
    done = place.make("-s", "gpu-check", READY="1", PY=str(place.recorder), PYTHON="false")
    assert done.returncode == 0, done.stderr
    assert [call[3:6] for call in place.calls()] == [["-m", "sftplay", "gpu-check"]]


@pytest.mark.contract
def test_the_page_of_engines_is_written_by_the_python_that_has_the_libraries(place: Place):
    done = place.make("-s", "engines", READY="1", PY=str(place.recorder), PYTHON="false")
    assert done.returncode == 0, done.stderr
    assert [call[3:] for call in place.calls()] == [["docs/engines.py"]]


@pytest.mark.contract
def test_what_the_make_of_another_project_passes_on_is_let_be(place: Place):
    done = place.make("-s", "FOO=$(shell touch pwned)", "SETTINGS=$(shell touch pwned)", "help", MAKELEVEL="1")
    assert (done.returncode, place.is_untouched) == (0, True)


@pytest.mark.contract
def test_ready_builds_nothing_whatever_stands_in_it(place: Place, recording: list[str]):
    given = [word for word in recording if not word.startswith("READY=")]
    done = place.make("-s", *given, "READY=x:;touch pwned", "gpu-info")
    assert (done.returncode, place.is_untouched) == (0, True)
    assert [call[3:] for call in place.calls()] == [["-m", "sftplay", "gpu-info", "--make-args="]]


@pytest.mark.contract
@pytest.mark.parametrize("typed", [False, True])
def test_ready_builds_nothing_when_it_and_the_python_are_exported(place: Place, typed: bool):
    """As `PY=python3 READY=1 make gpu-check` gives them on a machine that brings its own libraries."""
    given = {"READY": "1", "PY": str(place.recorder)}
    words = [f"{name}={value}" for name, value in given.items()] if typed else []
    done = place.make("-s", *words, "PYTHON=false", "gpu-check", "FAST=1", **({} if typed else given))
    assert (done.returncode, done.stderr) == (0, "")
    assert [call[3:7] for call in place.calls()] == [["-m", "sftplay", "gpu-check", "--fast"]]


@pytest.mark.contract
def test_a_python_of_the_shell_alone_is_not_taken(place: Place):
    assert place.make("-s", "PYTHON=false", "gpu-check", PY=str(place.recorder)).returncode == 2
    assert place.calls() == []


@pytest.mark.contract
def test_a_goal_is_no_command_either(place: Place):
    goals = [attack for attack in ATTACKS.values() if "=" not in attack]  # else it would be a setting
    done = place.make("-s", "-k", *goals, "PYTHON=false")
    assert (done.returncode, place.is_untouched) == (2, True)
    assert len(re.findall(r"\*\*\*", done.stderr)) == len(goals)
    assert place.make("-s", *goals).returncode == 2
    assert place.is_untouched


@pytest.mark.contract
def test_a_goal_that_is_no_target_is_answered_with_the_nearest(place: Place):
    done = place.make("trian", "CONFIG=x")
    assert done.returncode == 2
    assert done.stderr.splitlines()[:2] == ["make: no target called 'trian'", "  fix: did you mean 'train'?"]
    assert "fix: see `make help`" in place.make("qqqqq").stderr


@pytest.mark.contract
def test_a_setting_that_the_target_does_not_take_is_refused(place: Place):
    words = ["READY=", f"PY={sys.executable}"]
    done = place.make(*words, "train", "CONFIG=run.yaml", "RUN=mine")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "make: train takes no RUN=")
    assert "it takes ARGS, CONFIG, DRY_RUN," in done.stderr
    assert "bench-startup takes no RUN=" in place.make(*words, "bench-startup", "RUN=mine").stderr
    assert "takes no" not in place.make(*words, "gpu-info", "validate", "TORCH=1", "CONFIG=run.yaml").stderr
    assert "takes no" not in place.make(*words, "train", "CONFIG=run.yaml", RUN="of the shell").stderr


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_takes_the_settings_that_its_help_names(target: str):
    line = re.search(rf"^{target}:.*?##(.*)$", MAKEFILE, re.M)[1]
    named = [name for name in re.findall(r"\b([A-Z_]+)=", line) if name in SETTINGS]
    refuse_unused(named, [target], ROOT / "Makefile")


@pytest.mark.contract
def test_the_machines_name_that_wsl_exports_names_no_sweep(place: Place, recording: list[str]):
    place.make(*recording, "sweep", "CONFIG=a.yaml", "GRID=a.b=1", NAME="DESKTOP-1")
    place.make(*recording, "sweep", "CONFIG=a.yaml", "GRID=a.b=1", "NAME=mine", NAME="DESKTOP-1")
    named = [[word for word in call if word.startswith("--name")] for call in place.calls()]
    assert named == [[], ["--name=mine"]]


def test_settings_become_flags(place: Place, recording: list[str]):
    words = ["NPROC=2", "NNODES=3", "NODE_RANK=1", "MASTER_ADDR=h", "MASTER_PORT=5", "DRY_RUN=1", "CONFIG=a b.yaml"]
    place.make(*recording, "train", *words, "ARGS=a.b=c")
    expected = ["-m", "sftplay", "train", "--config=a b.yaml", "--nproc=2", "--nnodes=3", "--node-rank=1"]
    expected += ["--master-addr=h", "--master-port=5", "--dry-run", "--make-args=a.b=c"]
    assert [call[3:] for call in place.calls()] == [expected]


@pytest.mark.contract
def test_the_words_of_args_reach_a_program_that_is_not_the_kit(place: Place):
    (place.root / "benchmarks").mkdir()
    (place.root / "benchmarks" / "startup.py").write_text("import sys; print(sys.argv[1:])")
    done = place.make("READY=", f"PY={sys.executable}", "bench-startup", "ARGS=--n 2 'two words' $(touch pwned) *")
    assert done.stdout.splitlines()[-1] == "['--n', '2', 'two words', '$(touch', 'pwned)', '*']"
    assert place.is_untouched


@pytest.mark.contract
def test_args_with_an_open_quotation_mark_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="No closing quotation"):
        split_args("a='b")
    assert main(["plan", "--config=x", "--make-args=a='b"]) == 2
    assert capsys.readouterr().err.startswith("ARGS: cannot be split into words")


IN_MAKES_WORDS = {
    "train": ("CONFIG: train needs a config", "make train CONFIG=configs/run_lora.yaml"),
    "compare": ("the following arguments are required: RUN_A, RUN_B", "make help"),
    "infer-batch --config=x": ("the following arguments are required: IN, OUT", "make help"),
    "serve --config=x --port=y": ("make: PORT: not a port: 'y'", "make help"),
    "inspect --config=x --n=many": ("make: N: not a number of rows: 'many'", "make help"),
    "eval-code --config=x --make-args=--limit=0": ("ARGS: --limit: not a number, 1 or more: '0'", "eval-code --help"),
    "export --config=x --quant=q8_0": ("QUANT: is of the format gguf", "add FORMAT=gguf, or leave it out"),
    "inspect --config=x --make-args=--nn": ("ARGS: inspect does not know '--nn'", "did you mean '--n'?"),
}


@pytest.mark.contract
@pytest.mark.parametrize("typed", IN_MAKES_WORDS)
def test_a_refusal_names_settings_to_who_typed_make_and_flags_to_who_typed_the_verb(
    typed: str, capsys: pytest.CaptureFixture[str]
):
    words = typed.split()
    assert main([*words, *([] if "--make-args" in typed else ["--make-args="])]) == 2
    said = capsys.readouterr().err
    for part in IN_MAKES_WORDS[typed]:
        assert part in said
    if "--make-args" not in typed:
        assert "--" not in said
        assert main(words) == 2
        assert "--" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fix", "flags"),
    [
        ("choose another file with OUT=, or remove that one", "choose another file with --out=, or remove that one"),
        ("name one: ARGS=data.test_path=FILE", "name one: data.test_path=FILE"),
        ("write TOP_P=0.9 (N=1), or `make eval OUT=a`", "write --top-p=0.9 (--n=1), or `make eval OUT=a`"),
        ("make cancel OUT=x, or give N=2", "make cancel OUT=x, or give --n=2"),
        ("export HF_HUB_OFFLINE=0; make room, or PORT=1", "export HF_HUB_OFFLINE=0; make room, or PORT=1"),
        ("leave FOR= out", "leave --shell= out"),
    ],
)
def test_who_types_the_verb_reads_flags_where_make_has_settings(fix: str, flags: str):
    error = ConfigErrors([ConfigError("odd", fix=fix), ConfigError("odd too", fix=fix)])
    put_flags(error, ["--out", "--n", "--top-p", "--shell"])
    assert [error.fix, *(problem.fix for problem in error.problems)] == [flags] * 3
