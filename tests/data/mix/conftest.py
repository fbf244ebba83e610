"""Configs of mixtures."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.run import RunConfig
from tests.data.mix.sources_at_hand import chat, document

Write = Callable[..., Path]


@pytest.fixture
def mixed(tmp_path: Path) -> Callable[..., RunConfig]:
    """`mixed(sources, size, train=..., cpt=..., **data)`: sources as in `datasets`, blocks of `size` tokens."""

    def make(
        sources: list[dict[str, Any]], *, size: int = 64, seed: int = 1,
        train: dict[str, Any] | None = None, cpt: dict[str, Any] | None = None, **data: Any,
    ) -> RunConfig:  # fmt: skip
        tree = {
            "task_mode": "cpt_mixed",
            "seed": seed,
            "model": {"name": "x", "max_seq_len": size},
            "datasets": [{**source, "path": str(source["path"])} for source in sources],
            "train": {"epochs": 1, "effective_batch_size": 4, **(train or {})},
            "cpt": cpt or {},
            "data": {"template": "chatml", "processed_dir": str(tmp_path / "processed"), **data},
        }
        return RunConfig.model_validate(tree)

    return make


@pytest.fixture
def domain(write_rows: Write) -> dict[str, Any]:
    """Documents of a few tokens and of many."""
    generator = random.Random(0)
    rows = [document(n, generator.choice([0, 1, 5, 30, 200])) for n in range(120)]
    return {"name": "domain", "path": write_rows(rows, "domain.jsonl"), "type": "cpt", "weight": 0.9}


@pytest.fixture
def chats(write_rows: Write) -> dict[str, Any]:
    return {
        "name": "chat",
        "path": write_rows([chat(n) for n in range(80)], "chat.jsonl"),
        "type": "chat",
        "weight": 0.1,
    }
