"""Every command of the guide on distributed GRPO stands in docs/guides.md, and its values are accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.launch.slurm.request import in_our_names

ROOT = Path(__file__).parents[2]
GUIDE = ROOT.parent / "shared/guides/grpo-code-execution-slurm.md"
pytestmark = pytest.mark.skipif(not GUIDE.exists(), reason="needs the guide on distributed GRPO in ../shared/guides")


def commands() -> list[list[str]]:
    """The words of each command in the guide's blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split() for line in lines if line.strip() and not line.startswith("#")]


def test_values_of_the_guide_are_accepted_on_two_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    seen = 0
    for words in commands():
        options = [word for word in words if word.startswith("--")]
        if options:
            cfg = load_config("configs/run_lora.yaml", in_our_names(options, world_size=2)[0])
            share = cfg.train.effective_batch_size // 2
            assert isinstance(cfg.train.batch_size, str) or share % cfg.train.batch_size == 0
            seen += 1
    assert seen == 5
