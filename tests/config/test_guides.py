"""Every command and YAML or JSON block of the multi-GPU guide is accepted, as docs/guides.md says."""

import re
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.launch.deepspeed_json import read_deepspeed

ROOT = Path(__file__).parents[2]
GUIDE = ROOT.parent / "shared/guides/multi-gpu.md"
PLACEHOLDERS = {"configs/your_config.yaml", "your_config.yaml", "configs/deepspeed_custom.json"}

needs_guide = pytest.mark.skipif(not GUIDE.exists(), reason="needs the multi-GPU guide in ../shared/guides")


@pytest.mark.contract
@needs_guide
def test_every_yaml_block_of_the_guide_is_accepted(tmp_path):
    blocks = _blocks("yaml")
    assert len(blocks) == 2
    for index, block in enumerate(blocks):
        path = tmp_path / f"block{index}.yaml"
        path.write_text(block, encoding="utf-8")
        required = ["model.name=builtin:tiny", "data.train_path=rows.jsonl"]
        given = [word for word in required if f"\n{word.split('.')[0]}:" not in f"\n{block}"]
        cfg = load_config(path, given)
        assert cfg.train.precision == "bf16"
        assert cfg.train.batch_size == "auto"


@needs_guide
def test_the_json_block_of_the_guide_is_accepted_once_its_outdated_name_is_replaced(tmp_path):
    (block,) = _blocks("json")
    assert re.search(r'"(\w+)"', block)[1] in _named("Accepted")
    path = tmp_path / "deepspeed.json"
    path.write_text(block)
    with pytest.raises(ConfigError, match="cpu_offload: is an outdated name") as caught:
        read_deepspeed(path)
    assert "offload_optimizer" in caught.value.fix
    path.write_text(block.replace('"cpu_offload": true', '"offload_optimizer": {"device": "cpu"}'))
    assert read_deepspeed(path)["zero_optimization"]["stage"] == 3


@needs_guide
def test_every_make_command_of_the_guide_is_listed_and_a_target():
    accepted = _targets("Accepted")
    assert set(re.findall(r"make ([a-z-]+)", _guide())) == accepted
    assert accepted <= set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


@needs_guide
def test_every_config_file_of_the_guide_is_shipped_or_a_placeholder():
    for name in set(re.findall(r"CONFIG=(\S+\.(?:yaml|json))", _guide())):
        assert (ROOT / name).is_file() or name in PLACEHOLDERS, name


@needs_guide
def test_every_task_and_variable_of_the_guide_is_accepted(load):
    for name in re.findall(r"`task_mode: (\w+)`", _guide()):
        assert f"task_mode: {name}" in _named("Accepted")
        assert load("").with_values({"task_mode": name}, "test").task_mode == name
    for name in re.findall(r"export (\w+)=", _guide()):
        assert name in _text("Accepted")


def test_the_batch_settings_of_the_guide_do_what_the_table_says(load, refusals):
    assert load("train: {batch_size: 1, grad_accum: 32}\n").train.grad_accum == 32
    assert load("train: {batch_size: 1, grad_accum: 64, effective_batch_size: 64}\n")
    (problem,) = refusals("train: {batch_size: 1, grad_accum: 64}\n")
    assert problem.fix == "write train.effective_batch_size: 64 or 128"


def _guide():
    return GUIDE.read_text(encoding="utf-8")


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", _guide(), re.M | re.S)


def _text(title):
    document = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", document, re.M | re.S)[1]


def _named(title):
    """The code words of a table's first column."""
    rows = [line.split(" | ")[0] for line in _text(title).splitlines() if line.startswith("| ")]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row)}


def _targets(title):
    return {word.split()[1] for word in _named(title) if word.startswith("make ")}
