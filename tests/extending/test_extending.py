"""docs/extending.md, carried out in a copy of the repository: a task trains, a layout is read, a reward pays."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "extending.md"
BLOCK = re.compile(r"^   ```(sh|diff)\n(.*?)^   ```$", re.M | re.S)


def blocks(section: str) -> list[tuple[str, list[str]]]:
    """(sh or diff, lines) of the page's section, in order."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [(kind, [line[3:] for line in body.splitlines()]) for kind, body in BLOCK.findall(text)]


def apply(lines: list[str], root: Path) -> None:
    """A difference: its lines with minus or space occur once, and become its lines with plus or space."""
    path = root / lines[0].removeprefix("--- ")
    before = "".join(f"{line[1:]}\n" for line in lines[1:] if line[0] in " -")
    after = "".join(f"{line[1:]}\n" for line in lines[1:] if line[0] in " +")
    content = path.read_text()
    assert content.count(before) == 1, lines
    path.write_text(content.replace(before, after))


def carry_out(section: str, home: Path, model: Path) -> tuple[Path, str]:
    """The copy of the repository in which the section was carried out, and what its commands printed."""
    copy = home / "copy"
    kept = shutil.ignore_patterns("__pycache__")
    for name in ("sftplay", "tests/extending", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=kept)
    for config in (copy / "tests" / "extending").glob("*.yaml"):
        config.write_text(config.read_text().replace("MODEL", str(model)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = ""
    for kind, lines in blocks(section):
        if kind == "diff":
            apply(lines, copy)
            continue
        for command in lines:
            done = subprocess.run(
                command, shell=True, cwd=copy, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            printed += done.stdout
    return copy, printed


@pytest.mark.slow
def test_a_task_added_by_the_page_trains_and_learns(tiny_llama: Path, tmp_path: Path):
    copy, printed = carry_out("A task", tmp_path, tiny_llama)
    run = copy / "outputs" / "numbers"
    assert "54 rows of numbers to train on" in printed
    assert json.loads((run / "status.json").read_text())["state"] == "done"
    before, after = (json.loads((run / "eval" / f"{when}.json").read_text())["loss"] for when in ("before", "after"))
    assert after < before - 0.1
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 6
    assert (run / "model" / "model.safetensors").is_file()


def test_a_layout_added_by_the_page_is_read(tiny_llama: Path, tmp_path: Path):
    _, printed = carry_out("A layout", tmp_path, tiny_llama)
    report, _ = json.JSONDecoder().raw_decode(printed)
    assert (report["read"], report["kept"], report["refused"]) == (56, 56, 0)
    assert "better than" in printed.split("}")[-1]


def test_a_reward_added_by_the_page_tells_right_answers_from_junk(tiny_llama: Path, tmp_path: Path):
    _, printed = carry_out("A reward", tmp_path, tiny_llama)
    (words,) = json.loads(printed)
    assert (words["name"], words["verdict"], words["gold_mean"]) == ("words", "ok", 1.0)
    assert words["junk"]["nothing"] == words["junk"]["noise"] == 0.0


def test_a_check_added_by_the_page_is_a_row_of_the_table(tmp_path: Path):
    copy, printed = carry_out("A check", tmp_path, tmp_path)
    (row,) = json.loads((copy / "outputs" / "gpu-check.json").read_text())["rows"]
    assert (row["name"], row["state"]) == ("facts: enough cores", "ok")
    assert row["figure"] in printed


@pytest.mark.parametrize("name", ["tasks/numbers/task.py", "debate_layout.py", "same_length.py"])
def test_the_examples_are_short(name: str):
    assert len((ROOT / "tests" / "extending" / name).read_text().splitlines()) < 60
