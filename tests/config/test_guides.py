"""Every command and YAML or JSON block of the multi-GPU guide is accepted, as docs/guides.md says."""

import re
from pathlib import Path

import pytest

from sftplay.config.load import load_config

ROOT = Path(__file__).parents[2]
GUIDE = ROOT.parent / "shared/guides/multi-gpu.md"

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


def _guide():
    return GUIDE.read_text(encoding="utf-8")


def _blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", _guide(), re.M | re.S)
