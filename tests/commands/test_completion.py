"""Shell completion of verbs, flags and keys: the shells themselves read it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sftplay.cli import VERBS, find_flags, list_flags, main
from sftplay.commands.completion import bash_text, fish_text, zsh_text
from sftplay.config.keys import all_keys, list_keys

ROOT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or ""

ASK = """
source {script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
{function}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def offered(tmp_path: Path, *words: str, function: str = "_sftplay") -> list[str]:
    """What bash offers for the last of the words."""
    script = tmp_path / "completion.bash"
    script.write_text(bash_text())
    quoted = " ".join(f"'{word}'" for word in words)
    text = ASK.format(script=script, words=quoted, function=function)
    done = subprocess.run([BASH, "--norc", "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(not BASH, reason="needs bash")
def test_bash_offers_verbs_flags_keys_files_and_the_targets_of_make(tmp_path):
    assert offered(tmp_path, "sftplay", "infer") == ["infer", "infer-batch"]
    assert offered(tmp_path, "sftplay", "plan", "--") == ["--config", "--json", *find_flags("plan")]
    assert offered(tmp_path, "sftplay", "train", "model.max") == ["model.max_seq_len="]
    assert offered(tmp_path, "sftplay", "train", "--config", "configs/run_de") == ["configs/run_demo.yaml"]
    assert "train-distributed" in offered(tmp_path, "make", "train-d", function="_sftplay_make")
    assert offered(tmp_path, "make", "train", "CONF", function="_sftplay_make") == ["CONFIG="]
    assert offered(tmp_path, "make", "sweep", "GRI", function="_sftplay_make") == ["GRID="]


@pytest.mark.parametrize("text", [bash_text(), zsh_text(), fish_text()], ids=["bash", "zsh", "fish"])
def test_every_verb_flag_and_key_is_in_each_script_and_no_place_is_left_open(text):
    assert not [verb for verb in VERBS if verb not in text]
    assert not [flag for verb in VERBS for flag in list_flags(verb) if flag.removeprefix("--") not in text]
    single = [key for key in all_keys() if key.partition(".")[0] not in list_keys()]
    assert not [key for key in single if f"{key}=" not in text]
    assert "@" not in text.replace("[@]", "")


@pytest.mark.parametrize(("shell", "text"), [("zsh", zsh_text()), ("fish", fish_text()), ("bash", bash_text())])
def test_the_shell_itself_finds_no_fault_with_its_script(shell, text, tmp_path):
    program = shutil.which(shell)
    if not program:
        pytest.skip(f"needs {shell}")
    script = tmp_path / "script"
    script.write_text(text)
    done = subprocess.run([program, "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_shell_is_refused_with_those_there_are(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "bash | zsh | fish; by make: FOR=bash" in capsys.readouterr().err
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == bash_text()
