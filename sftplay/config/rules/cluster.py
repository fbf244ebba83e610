"""What several processes and the backend unsloth cannot do, or would not follow.

Nothing here looks at the machine or at the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.problem import Problem
from sftplay.config.schema.run import RunConfig

STRATEGY = "cluster.strategy"
BACKEND = "tuning.backend"
ZERO = ("zero1", "zero2", "zero3")


def broken_cluster_rules(cfg: RunConfig) -> Iterator[Problem]:
    """Combinations that upstream cannot run, and settings that the chosen strategy or backend would not follow."""
    strategy, uses_zero = cfg.cluster.strategy, cfg.cluster.strategy in (*ZERO, "auto")
    if strategy != "auto":
        yield from _blocked(cfg)
    if cfg.cluster.deepspeed is not None and not uses_zero:
        what = f"names a DeepSpeed file, but {STRATEGY} {strategy} does not use one"
        fix = f"write {STRATEGY}: {', '.join(ZERO)}; or remove cluster.deepspeed"
        yield Problem(("cluster.deepspeed", STRATEGY), what, fix=fix)
    if cfg.cluster.launcher == "deepspeed" and not uses_zero:
        what = f"deepspeed starts runs of {', '.join(ZERO)} only, but {STRATEGY} is {strategy}"
        fix = f"write cluster.launcher: torchrun or accelerate; or {STRATEGY}: {', '.join(ZERO)}"
        yield Problem(("cluster.launcher", STRATEGY), what, fix=fix)
    if cfg.tuning.backend == "unsloth":
        if strategy not in ("auto", "ddp"):  # in a single process, auto becomes ddp
            what = f"{strategy} needs several processes, and {BACKEND} unsloth trains in one"
            yield Problem((STRATEGY, BACKEND), what, fix=f"write {BACKEND}: bnb")
        yield from unsloth_conflicts(cfg)


def unsloth_conflicts(cfg: RunConfig) -> Iterator[Problem]:
    """Every key that unsloth would not follow, whatever backend is asked for.

    Source: unsloth and unsloth_zoo 2026.10.9.
    """
    for key, conflicts, what, remedy in _unsloth_table(cfg):
        if conflicts:
            yield Problem((key, BACKEND), f"{what}, with {BACKEND} unsloth", fix=f"write {remedy}, or {BACKEND}: bnb")


def _unsloth_table(cfg: RunConfig) -> Iterator[tuple[str, bool, str, str]]:
    """Key, whether it conflicts, what would happen, what to write instead."""
    model, tuning, train = cfg.model, cfg.tuning, cfg.train
    in_4_bits = tuning.mode == "qlora"
    yield "tuning.mode", tuning.mode == "full", "full is not offered", "tuning.mode: lora or qlora"
    # Both loaders write nf4 and double quantisation into a BitsAndBytesConfig of their own.
    fixed = in_4_bits and tuning.quant_type != "nf4"
    yield "tuning.quant_type", fixed, f"{tuning.quant_type} would be ignored for nf4", "tuning.quant_type: nf4"
    fixed = in_4_bits and not tuning.double_quant
    yield "tuning.double_quant", fixed, "false would be ignored", "tuning.double_quant: true"
    # It reopens an adapter with a base that it chooses by the adapter's own file.
    continued = model.adapter is not None and not model.merge_adapter
    yield "model.adapter", continued, "an adapter cannot be continued", "model.merge_adapter: true"
    source = "tuning.new_tokens.path" if tuning.new_tokens.path else "tuning.new_tokens.count"
    yield source, tuning.new_tokens.is_on, "the rows of new tokens would not train", "tuning.new_tokens.count: 0"
    yield "model.attn", model.attn == "eager", "eager would be ignored for its own attention", "model.attn: auto"
    # Its attention separates packed rows by a list of lengths from its own trainer, not by the position ids used here.
    kept_apart = cfg.learns_documents
    yield "task_mode", kept_apart, f"{cfg.task_mode} would not keep the documents of a block apart", "task_mode: sft"
    yield "train.packing", train.packing is True, "packed rows would not be kept apart", "train.packing: auto"
    other = train.loss_head in ("chunked", "liger")
    yield "train.loss_head", other, f"{train.loss_head} would meet a loss of its own", "train.loss_head: auto"


def _blocked(cfg: RunConfig) -> Iterator[Problem]:
    """A blocked combination; with train.precision auto, one that is blocked in every precision."""
    from sftplay.config.explain.matrix import METHODS, PRECISIONS, STRATEGIES, TABLE

    mode, strategy, precision = cfg.tuning.mode, cfg.cluster.strategy, cfg.train.precision
    if strategy not in STRATEGIES:
        return
    cells = dict(zip(PRECISIONS, TABLE[mode, strategy], strict=True))
    asked = [cells[precision]] if precision in cells else list(cells.values())
    if all(cell.state == "blocked" for cell in asked):
        always = all(cell.state == "blocked" for method in METHODS for cell in TABLE[method, strategy])
        what = f"{strategy}{'' if always else f' with tuning.mode {mode}'}: {asked[0].why}"
        keys = (STRATEGY,) if always else (STRATEGY, "tuning.mode", "train.precision")
        yield Problem(keys, what, fix=f"write {asked[0].nearest}")
