"""What cannot be combined under `cluster`, by the support matrix and by what each strategy reads.

Nothing here looks at the machine or at the number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.config.rules.matrix import PRECISIONS, STRATEGIES, TABLE
from sftplay.config.rules.violation import Violation
from sftplay.config.schema.run import RunConfig

KEY = "cluster.strategy"
ZERO = ("zero1", "zero2", "zero3")


def broken_cluster_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Combinations that upstream cannot run, and settings that the chosen strategy would not read."""
    strategy = cfg.cluster.strategy
    if strategy in STRATEGIES:
        yield from _blocked(cfg)
    if cfg.cluster.deepspeed is not None and strategy not in (*ZERO, "auto"):
        what = f"names a DeepSpeed file, but {KEY} {strategy} does not use one"
        yield Violation(
            ("cluster.deepspeed", KEY), what, f"write {KEY}: {', '.join(ZERO)}; or remove cluster.deepspeed"
        )
    if cfg.cluster.launcher == "deepspeed" and strategy not in (*ZERO, "auto"):
        what = f"deepspeed starts runs of {', '.join(ZERO)} only, but {KEY} is {strategy}"
        fix = f"write cluster.launcher: torchrun or accelerate; or {KEY}: {', '.join(ZERO)}"
        yield Violation(("cluster.launcher", KEY), what, fix)
    if cfg.tuning.backend == "unsloth" and strategy not in ("auto", "ddp"):  # of one process, ddp is what auto becomes
        what = f"{strategy} needs several processes, and tuning.backend unsloth trains in one"
        yield Violation((KEY, "tuning.backend"), what, "write tuning.backend: bnb")


def _blocked(cfg: RunConfig) -> Iterator[Violation]:
    """A blocked combination; where the precision is auto, one that is blocked in every precision."""
    mode, strategy, precision = cfg.tuning.mode, cfg.cluster.strategy, cfg.train.precision
    cells = dict(zip(PRECISIONS, TABLE[mode, strategy], strict=True))
    asked = [cells[precision]] if precision in cells else list(cells.values())
    if all(cell.state == "blocked" for cell in asked):
        always = all(TABLE[method, strategy][0].state == "blocked" for method in ("full", "lora", "qlora"))
        what = f"{strategy}{'' if always else f' with tuning.mode {mode}'}: {asked[0].why}"
        keys = (KEY,) if always else (KEY, "tuning.mode", "train.precision")
        yield Violation(keys, what, f"write {asked[0].nearest}")
