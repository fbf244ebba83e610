"""Rules about `tuning.new_tokens`: what it cannot stand beside."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.violation import Violation
from sftplay.config.schema.cluster import SPLIT_WEIGHTS
from sftplay.config.schema.run import RunConfig

COUNT, PATH = "tuning.new_tokens.count", "tuning.new_tokens.path"
KEYS = (COUNT, PATH)


def broken_new_token_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Two sources of terms, and settings under which the rows of new tokens would not train."""
    wanted = cfg.tuning.new_tokens
    if not wanted.is_on:
        return
    if wanted.count and wanted.path is not None:
        what = f"{wanted.count} terms are to be found, but {PATH} lists them"
        yield Violation(KEYS, what, fix="keep one of the two")
    if cfg.model.adapter is not None and not cfg.model.merge_adapter:
        what = "an adapter that is continued has no rows for new tokens"
        fix = "write model.merge_adapter: true, which trains a new adapter, or remove tuning.new_tokens"
        yield Violation((*_given(cfg), "model.adapter"), what, fix=fix)
    if not cfg.tuning.trains_single_rows:
        return
    if cfg.cluster.strategy in SPLIT_WEIGHTS:
        what = (
            f"the rows of new tokens train where each process has the whole matrix, which {cfg.cluster.strategy} splits"
        )
        fix = "write cluster.strategy: ddp or zero2, or tuning.mode: full"
        yield Violation(("cluster.strategy", *_given(cfg)), what, fix=fix)
    if cfg.train.loss_head == "liger":
        what = "liger was not tried with rows of new tokens, which PEFT puts into the head's weight at each step"
        yield Violation(("train.loss_head", *_given(cfg)), what, fix="write train.loss_head: chunked")


def idle_new_token_keys(cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, the key that takes its effect away, and why."""
    wanted, key = cfg.tuning.new_tokens, "tuning.new_tokens.min_count"
    if wanted.path is not None:
        yield key, PATH, f"{PATH} lists the terms"
    elif not wanted.count:
        yield key, COUNT, f"{COUNT} 0 finds no terms"


def _given(cfg: RunConfig) -> tuple[str, ...]:
    return (COUNT,) if cfg.tuning.new_tokens.count else (PATH,)
