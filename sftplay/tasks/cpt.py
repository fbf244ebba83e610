"""Continued pre-training: learn every token of documents, alone or mixed with chats."""

from __future__ import annotations

from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.tasks.run.task import Rows


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Blocks of the sources of a config."""
    raise ConfigError(f"{cfg.task_mode} cannot be trained yet", where="task_mode", fix="write task_mode: sft")
