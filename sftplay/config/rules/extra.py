"""Rules about `train.extra` and `grpo.extra`: fields of TRL's own config that the kit does not name."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sftplay.config.explain.other_kits import kit_answer
from sftplay.config.explain.trl_arguments import config_fields, unfit
from sftplay.config.read.resolved import flow
from sftplay.config.rules.violation import Violation
from sftplay.config.schema.run import RunConfig
from sftplay.errors import nearest_names


def broken_extra_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Every field that the kit sets itself, that TRL does not have, or whose value it would not take."""
    draws = cfg.task_mode == "grpo"
    for name, value in cfg.train.extra.items():
        yield from _field(f"train.extra.{name}", value, kind="GRPOConfig" if draws else "SFTConfig")
    for name, value in cfg.grpo.extra.items():
        yield from _field(f"grpo.extra.{name}", value, kind="GRPOConfig")
        if name in cfg.train.extra:
            what = "is given in train.extra too"
            yield Violation((f"grpo.extra.{name}", f"train.extra.{name}"), what, fix="keep one of the two")


def _field(key: str, value: object, *, kind: str) -> Iterator[Violation]:
    name, draws = key.rpartition(".")[2], kind == "GRPOConfig"
    fields = config_fields(kind)
    if answer := kit_answer(name, draws=draws):
        yield Violation((key,), answer.what, fix=answer.fix, nearest=(answer.key,) if answer.key else ())
    elif fields is not None and name not in fields:
        near = [known for known in nearest_names(name, sorted(fields)) if not kit_answer(known, draws=draws)]
        fix = f"did you mean {near[0]!r}?" if near else f"remove it; see the fields of trl.{kind}"
        yield Violation((key,), f"TRL's {kind} has no field {name!r}", fix=fix, nearest=tuple(near))
    elif isinstance(value, float) and not math.isfinite(value):
        yield Violation((key,), f"{flow(value)} is no number to train with", fix="write a finite number")
    elif wanted := unfit(kind, name, value=value):
        yield Violation((key,), f"{flow(value)} is not {wanted}", fix=f"write {wanted}")
