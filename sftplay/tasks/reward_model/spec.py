"""Rules about the reward model: what cannot go together with a head of one score."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.run import RunConfig
from sftplay.config.section import Problem, TaskSpec
from sftplay.tasks.preference.spec import idle_dropout


class RewardModelSpec(TaskSpec):
    """A new head of one score replaces the output head."""

    def broken_rules(self, cfg: RunConfig) -> Iterator[Problem]:
        train, tuning, model = cfg.train, cfg.tuning, cfg.model
        adds_rows = tuning.new_tokens.path is not None and tuning.mode != "full"
        table = (
            ("model.merge_adapter", model.adapter is not None and not model.merge_adapter,
             "false continues an adapter, but one that writes cannot become one that scores", "true"),
            ("data.format", cfg.data.format != "auto", "the layout of each row is found by its keys", "auto"),
            ("train.packing", train.packing is True, "true packs rows, but a score needs a row's own end", "false"),
            ("train.loss_head", train.loss_head in ("chunked", "liger"),
             f"{train.loss_head} computes a loss over the vocabulary, and a score has none", "auto"),
            ("train.batching", train.batching == "tokens", "a micro-batch has a fixed number of pairs", "examples"),
            ("tuning.backend", tuning.backend == "unsloth", "unsloth is not offered", "bnb"),
            ("train.extra.label_smoothing_factor", bool(train.extra.get("label_smoothing_factor")),
             "it smooths the labels of tokens, and a score has none", "0"),
            ("tuning.new_tokens.path", adds_rows, "an adapter cannot train rows of new tokens without a head", "null"),
        )  # fmt: skip
        for key, is_asked, why, remedy in table:
            if is_asked:
                yield Problem((key, "task_mode"), f"{why}, in task_mode {cfg.task_mode}", fix=f"write {key}: {remedy}")

    def idle_keys(self, cfg: RunConfig) -> Iterator[tuple[str, str, str]]:
        for name in ("metrics", "max_new_tokens"):
            yield f"eval.{name}", "task_mode", f"task_mode {cfg.task_mode} writes no answers to measure"
        yield from idle_dropout(cfg)


SPEC = RewardModelSpec()
