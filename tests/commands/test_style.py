"""`make style` writes the system prompt into the file of a run, and says what it did."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sftplay.cli import main
from sftplay.config.load import load_config

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
RUN = """\
# my run
model:
  name: builtin:tiny
data:  # where
  train_path: rows.jsonl
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("run.yaml")
    path.write_text(RUN)
    return path


def test_the_prompt_is_written_replaced_and_printed_with_its_origin(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["style", "--config", "run.yaml"]) == 0
    assert "data.system = none, from default" in capsys.readouterr().out
    assert main(["style", "--config", "run.yaml", "--style=Be brief."]) == 0
    message = capsys.readouterr().out
    assert 'run.yaml data.system: none -> "Be brief."' in message
    assert "rows with a system message keep it" in message
    assert config.read_text() == RUN.replace("# where\n", '# where\n  system: "Be brief."\n')
    assert main(["style", "--config", "run.yaml", "--style", "Rhyme.", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {"file": "run.yaml", "was": "Be brief.", "system": "Rhyme.", "origin": "run.yaml:5"}
    assert main(["style", "--config", "run.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "run.yaml", "system": "Rhyme.", "origin": "run.yaml:5"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--style="], "--style data.system: is empty"),
        (["--style= "], "--style data.system: is empty"),
        (["--style=None"], "is a word in YAML"),
        (["--style=a\udcffb"], "--style: is not valid Unicode"),
        (["--style=x", "seed=3"], "'seed=3' would not be written into the file"),
    ],
)
def test_a_prompt_that_cannot_be_meant_is_refused_and_nothing_is_written(
    arguments: list[str], message: str, config: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["style", "--config", "run.yaml", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert config.read_text() == RUN
    assert list(Path().iterdir()) == [config]


def test_a_file_written_in_braces_gets_it_inside_them(config: Path):
    config.write_text("model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n")
    assert main(["style", "--config", "run.yaml", "--style", 'a "b"']) == 0
    assert config.read_text().splitlines()[1] == 'data: {system: "a \\"b\\"", train_path: rows.jsonl}'


AWKWARD = 'say "hi" to $5, $(x), ${y} and `ls`; it\'s 100% #1: \\n 😀\n--json $'


def test_make_hands_the_prompt_over_to_the_character(config: Path):
    arguments = [f"CONFIG={config.resolve()}", f"STYLE={AWKWARD}", "READY=", f"PY={sys.executable}"]
    # What the suite itself was given by `make test ARGS=...` is no override of this one.
    env = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKEOVERRIDES", "ARGS")}
    argv = ["make", "-s", "-C", str(ROOT), "style", *arguments]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert load_config(config).data.system == AWKWARD


def test_a_terminal_that_cannot_show_a_character_is_no_reason_to_stop(config: Path):
    config.write_text(RUN.replace("# where", "\n  system: 'ünï 😀'"))
    argv = [sys.executable, "-m", "sftplay", "style", "--config", str(config.resolve())]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r'"\xfcn\xef \U0001f600"' in done.stdout
