"""Every command, option and block of the guide on distributed HRM stands in docs/guides.md, which says what is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigErrors

ROOT = Path(__file__).parents[2]
GUIDE = ROOT.parent / "shared/guides/hrm-distributed.md"
TITLE = "# The guide on distributed HRM, command by command"
needs_guide = pytest.mark.skipif(not GUIDE.exists(), reason="needs the guide on distributed HRM in ../shared/guides")


def table(title: str) -> dict[str, str]:
    """First column -> second column."""
    document = (ROOT / "docs/guides.md").read_text(encoding="utf-8").partition(TITLE)[2]
    text = re.search(rf"^## {title}\n(.*?)(?=^#|\Z)", document, re.M | re.S)[1]
    rows = [line.strip("| ").split(" | ", maxsplit=1) for line in text.splitlines() if line.startswith("| ")]
    return dict(rows[2:])


def blocks(language: str) -> list[tuple[str, str]]:
    """Heading above without its number, and text."""
    found, heading = [], ""
    for match in re.finditer(r"^##+ ([^\n]*)$|^```(\w+)\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S):
        heading = re.sub(r"^\d+\. ", "", match[1]) if match[1] else heading
        if match[2] == language:
            found.append((heading, match[3]))
    return found


def commands() -> list[list[str]]:
    """The words of each command in the guide's blocks, without comments."""
    lines = "".join(text for _, text in blocks("bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := line.partition("#")[0].split())]


def options() -> dict[str, str]:
    words = [word for command in commands() if command[0] != "export" for word in command]
    return dict(word.split("=") for word in words if re.match(r"[a-z_]+=", word))


@pytest.mark.contract
@needs_guide
def test_every_option_is_refused_with_the_name_that_is_listed_and_accepted_by_that_name(monkeypatch):
    monkeypatch.chdir(ROOT)
    ours = {first.strip("`"): re.match(r"`([\w.]+)`", second)[1] for first, second in table("Its options").items()}
    assert len(options()) == 7
    assert set(options()) | {"global_batch_size"} == set(ours)
    with pytest.raises(ConfigErrors) as caught:
        load_config("configs/run_hrm_sudoku.yaml", [f"{name}=1" for name in ours])
    answers = {problem.where.rpartition(" ")[2]: problem.fix for problem in caught.value.problems}
    assert set(answers) == set(ours)
    for name, answer in answers.items():
        assert ours[name] in answer
    values = {**options(), "data_path": "anywhere", "eval_interval": "2604"}
    cfg = load_config("configs/run_hrm_sudoku.yaml", [f"{ours[name]}={value}" for name, value in values.items()])
    assert (cfg.hrm.epochs, cfg.train.learning_rate, cfg.hrm.puzzle_emb_weight_decay) == (20_000, 1e-4, 1.0)


@pytest.mark.contract
def test_the_command_with_eight_processes_is_accepted(monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["hrm.epochs=20000", "train.learning_rate=1e-4", "hrm.puzzle_emb_lr=1e-4"]
    cfg = load_config("configs/run_hrm_sudoku.yaml", words)
    assert cfg.task_mode == "hrm"
    assert cfg.train.effective_batch_size % 8 == 0
