"""Every command and YAML key of the guide on distributed BiLevel SCoRe stands in docs/guides.md, and is answered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftplay.config.keys import all_keys, all_sections
from sftplay.config.load import load_config
from sftplay.config.other_kits import find_key, read_foreign_keys
from sftplay.errors import ConfigErrors

ROOT = Path(__file__).parents[2]
GUIDE = ROOT.parent / "shared/guides/bilevel-score-distributed.md"
TITLE = "# The guide on distributed BiLevel SCoRe, command by command"
needs_guide = pytest.mark.skipif(not GUIDE.exists(), reason="needs the guide on BiLevel SCoRe in ../shared/guides")


def listed(title: str) -> set[str]:
    """The code words in the first column of a table."""
    document = (ROOT / "docs/guides.md").read_text(encoding="utf-8").partition(TITLE)[2]
    text = re.search(rf"^## {title}\n(.*?)(?=^#|\Z)", document, re.M | re.S)[1]
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S)


def leaves(values: Any, above: str = "") -> Iterator[str]:
    """Dotted keys whose values are no sections."""
    if not isinstance(values, dict):
        yield above
        return
    for name, inner in values.items():
        yield from leaves(inner, f"{above}.{name}".lstrip("."))


@needs_guide
def test_every_key_of_its_yaml_is_answered_with_a_key_of_ours_and_listed(tmp_path):
    known = listed("What its YAML says")
    assert len(blocks("yaml")) == 5
    seen = set()
    for number, block in enumerate(blocks("yaml")):
        path = tmp_path / f"block{number}.yaml"
        path.write_text(block)
        with pytest.raises(ConfigErrors) as caught:
            load_config(path, ["model.name=builtin:tiny", "data.train_path=rows.jsonl"])
        problems = {problem.where.rpartition(" ")[2]: problem for problem in caught.value.problems}
        wanted = {re.sub(r"(offload_\w+)\.device$", r"\1", leaf) for leaf in leaves(yaml.safe_load(block))}
        assert set(problems) == wanted
        for problem in problems.values():
            assert problem.fix.startswith("write ")
            assert re.match(r".*block\d\.yaml:\d+ ", problem.where)
        seen |= wanted
    assert seen == known == {f"{name}.{key}" for name, keys in read_foreign_keys().guides.items() for key in keys}


def test_every_answer_begins_with_a_key_that_exists():
    names = {*all_keys(), *all_sections()}
    assert {find_key(action) for keys in read_foreign_keys().guides.values() for action in keys.values()} <= names
    assert not set(read_foreign_keys().guides) & names


ANSWERS = sorted({action for keys in read_foreign_keys().guides.values() for action in keys.values()})
VALUE = re.compile(r"([a-z_]+(?:\.\w+)+): (\w+)(?=[,;]|$| and )")
"""A key with a value to write as it stands."""


@pytest.mark.contract
@pytest.mark.parametrize("action", [action for action in ANSWERS if VALUE.search(action)])
def test_what_an_answer_says_to_write_is_accepted(monkeypatch: pytest.MonkeyPatch, action):
    monkeypatch.chdir(ROOT)
    said = dict(VALUE.findall(action))
    cfg = load_config("configs/run_score_gsm8k.yaml", [f"{key}={value}" for key, value in said.items()])
    assert {key: str(cfg.get_value(key)) for key in said} == said


@pytest.mark.contract
def test_values_of_the_guide_are_accepted_by_our_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for coefficient in (0.1, 0.01, 0.001):
        for flow in ("shared_trunk", "stop"):
            words = [f"score.value_coef={coefficient}", f"score.value_flow={flow}", "train.precision=bf16",
                     "train.gradient_checkpointing=true", "train.batch_size=4", "train.effective_batch_size=64",
                     "score.stage1_steps=138", "score.stage2_steps=142", "score.guidance_warmup=28",
                     "cluster.timeout=1800", "cluster.max_restarts=3"]  # fmt: skip
            assert load_config("configs/run_score_gsm8k.yaml", words).score.value_coef == coefficient


@pytest.mark.parametrize(("word", "ours"), [("full", "shared_trunk"), ("partial", "stop")])
def test_words_for_the_gradient_flow_are_answered(refusals, word, ours):
    (problem,) = refusals(f"score: {{value_flow: {word}}}\n")
    assert (problem.where, problem.fix) == ("run.yaml:1 score.value_flow", f"write {ours}")


def test_another_key_in_a_section_of_the_guide_is_refused_by_itself(refusals):
    first, second = refusals("distributed: {device_placement: {critic_device: cpu}, speed: 3}\n")
    assert first.fix == "write score.devices.critic"
    assert second.where == "run.yaml:1 distributed.speed"
