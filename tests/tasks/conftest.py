"""What runs on rewards start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from grpo_run import grpo_inputs
from small_run import Inputs


@pytest.fixture(scope="module")
def prompts(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return grpo_inputs(tiny_llama, tmp_path_factory.mktemp("prompts"))
