"""The text of a new config: every value that a beginner changes, with the reason for its value beside it."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.config.load import load_config
from sftplay.config.read.resolved import flow
from sftplay.config.schema.run import RunConfig
from sftplay.control.inputs import check_model
from sftplay.control.model_shape import known_shape
from sftplay.control.new_config.choice import TOY, choose_model
from sftplay.control.new_config.lengths import USUAL_SHARE, Measured, estimate, limit_for, measure
from sftplay.control.new_config.survey import SURVEYED_ROWS, Survey, survey_rows
from sftplay.errors import ConfigErrors
from sftplay.machine.probe import Machine
from sftplay.model.start_point import resolve_names
from sftplay.plan.sizing.size_run import size_run

EFFECTIVE_BATCHES = (32, 16, 8)
ENOUGH_STEPS = 100
"""A run of fewer steps hardly leaves its warm-up: small data gets smaller batches."""

MOST_TOKENS = 4096
"""Longest limit that is proposed; the memory of a row grows with it."""

COMMENT_COLUMN, LONGEST_LINE = 44, 120

NEXT = {"validate": "is it right?", "inspect": "what is learned of a row", "plan": "does it fit, how long does it take",
        "train": "then eval, infer, infer-batch and report"}  # fmt: skip
COMMAND_LINE = "command line"


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The text of a config and the figures it rests on."""

    text: str
    model: str
    max_seq_len: int
    n_rows: int


def draft_config(data: str, overrides: Sequence[str], *, machine: Machine, out: str) -> Draft:
    """A config that trains on `data` here. Values of `overrides` are taken as they are, whatever was found.

    Raises:
        ConfigErrors: an override is wrong.
        DataError: the rows cannot be read, or nothing tells what is asked in them and what answered.
    """
    values = _Values(_bare(data, overrides))
    if "model.name" in values.given:
        check_model(resolve_names(values.cfg), asks_hub=False)
    survey = survey_rows(values.cfg)
    n_rows = len(survey.records)
    values.set("data.train_path", data, why=f"layout {' and '.join(survey.layouts)}")
    _set_data(values, survey)
    if values.cfg.train.max_steps is None:
        values.set("train.epochs", values.cfg.train.epochs, why="passes over the rows")
    values.set("train.effective_batch_size", _batch(values.cfg, n_rows), why=f"rows a step; {n_rows:,} rows were found")
    values.set("train.learning_rate", "auto", why="auto takes the usual peak rate of the mode")
    _set_model(values, survey, machine=machine)
    measured = measure(values.cfg, survey.records)
    limit, why = _limit(values.cfg, measured, machine=machine)
    values.set("model.max_seq_len", limit, why=why)
    for key in sorted(values.given - set(values.lines)):
        values.set(key, None, why="")
    text = _text(values.lines, survey=survey, out=out)
    cfg = _loaded(text, ())
    return Draft(text=text, model=cfg.model.name, max_seq_len=cfg.model.max_seq_len, n_rows=n_rows)


class _Values:
    """The values of the new config, each with its reason; those that the user gave stay as they are."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg = cfg
        self.given = {key for key, origin in cfg.origins.items() if origin == COMMAND_LINE}
        self.lines: dict[str, tuple[Any, str]] = {}

    def set(self, key: str, value: Any, *, why: str) -> None:
        """Take a value for a key that the user did not give."""
        if key in self.given:
            value, why = self.cfg.value_of(key), "as asked"
        else:
            self.cfg = self.cfg.with_values({key: value}, "init")
        self.lines[key] = (value, why)


def _set_data(values: _Values, survey: Survey) -> None:
    if survey.columns:
        values.set("data.columns", dict(survey.columns), why="guessed from the names: look at `make inspect`")
    if survey.refused:
        why = f"{len(survey.refused):,} rows cannot be read, first {survey.refused[0]}"
        values.set("data.on_bad_row", "skip", why=why[:160])


def _set_model(values: _Values, survey: Survey, *, machine: Machine) -> None:
    mode: str = values.cfg.tuning.mode
    name, reason = values.cfg.model.name, ""
    if "model.name" not in values.given:
        guess = estimate(survey.records)
        lengths = guess.within(min(limit_for(guess.at(USUAL_SHARE)), MOST_TOKENS))
        wanted = values.cfg.with_values({"model.max_seq_len": limit_for(lengths.longest)}, "init")
        choice = choose_model(wanted, machine, lengths=lengths)
        name, mode, reason = choice.name, choice.mode, choice.reason
    values.set("model.name", name, why=reason)
    values.set("tuning.mode", mode, why="lora: an adapter beside a frozen base; full: all weights")


def _bare(data: str, overrides: Sequence[str]) -> RunConfig:
    """The config of `data` and `overrides` alone, checked."""
    return _loaded(json.dumps({"model": {"name": TOY}, "data": {"train_path": data}}), overrides)


def _loaded(text: str, overrides: Sequence[str]) -> RunConfig:
    with tempfile.TemporaryDirectory(prefix="sftplay-init-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return load_config(path, overrides)
        except ConfigErrors as errors:
            for error in (errors, *errors.problems):
                error.where = error.where.replace(f"{path}:1", "init")  # the file is nobody's but ours
            raise


def _batch(cfg: RunConfig, rows: int) -> int:
    steps = {size: cfg.train.epochs * rows / size for size in EFFECTIVE_BATCHES}
    return next((size for size, n in steps.items() if n >= ENOUGH_STEPS), EFFECTIVE_BATCHES[-1])


def _limit(cfg: RunConfig, measured: Measured, *, machine: Machine) -> tuple[int, str]:
    """A limit that keeps every row whole where model and machine can, else one that keeps nearly all, and why."""
    shape = known_shape(cfg)
    most = min(MOST_TOKENS, shape.max_positions or MOST_TOKENS) if shape else MOST_TOKENS
    longest, usual = measured.tokens[-1], measured.at(USUAL_SHARE)
    told = "estimated by bytes, as its tokenizer cannot be opened here" if measured.is_estimate else ""
    whole = f"the longest of {len(measured.tokens):,} rows has {longest:,} tokens"
    for tokens in (longest, usual):
        limit = min(limit_for(tokens), most)
        tried = cfg.with_values({"model.max_seq_len": limit, "train.batch_size": "auto"}, "init")
        seen = size_run(tried, machine, shape=shape).forecast if shape else None
        if limit >= tokens and (seen is None or seen.verdict == "fits"):
            break
    cut = measured.cut(limit)
    why = f"{whole}; {cut:,} rows are longer than the limit and lose their end" if cut else whole
    return limit, f"{why} ({told})" if told else why


def command_for(verb: str, config: str) -> str:
    """How the user starts a verb: by make, where this process was started so."""
    words = shlex.quote(config)
    return f"make {verb} CONFIG={words}" if "MAKELEVEL" in os.environ else f"sftplay {verb} --config {words}"


def _text(lines: dict[str, tuple[Any, str]], *, survey: Survey, out: str) -> str:
    rows = f"{len(survey.records):,} rows" if survey.is_all else f"the first {SURVEYED_ROWS:,} rows"
    source = _one_line(str(lines["data.train_path"][0]))
    head = [
        f"# Made by `sftplay init` on {time.strftime('%Y-%m-%d')} from {rows} of {source}, for this machine.",
        "# Every other key and its default: `sftplay manual`.",
        "#",
        *(f"# {_one_line(command_for(verb, out)):<42} {what}" for verb, what in NEXT.items()),
    ]
    sections: dict[str, list[str]] = {}
    order = list(RunConfig.model_fields)
    for key in sorted(lines, key=lambda key: order.index(key.partition(".")[0])):
        value, comment = lines[key]
        section, _, rest = key.partition(".")
        if not rest:
            head.append("")
            head.append(_line(key, value, comment=comment, indent=""))
            continue
        *path, last = rest.split(".")
        inside = sections.setdefault(section, [f"{section}:"])
        for depth, name in enumerate(path):
            opened = f"{'  ' * (depth + 1)}{name}:"
            if opened not in inside:
                inside.append(opened)
        inside.append(_line(last, value, comment=comment, indent="  " * (len(path) + 1)))
    if "data.val_path" not in lines:
        sections["data"].append("  # val_path: held-out rows of your own; without it one prompt in twenty is held out")
    sections.setdefault("eval", ["# eval:", *(f"#   {key}: true" for key in ("before", "after"))])
    return "\n".join([*head, *(f"\n{chr(10).join(inside)}" for inside in sections.values())]) + "\n"


def _line(key: str, value: Any, *, comment: str, indent: str) -> str:
    text, comment = f"{indent}{key}: {flow(value)}", _one_line(comment)
    line = f"{text:<{COMMENT_COLUMN}} # {comment}"
    return line if len(line) <= LONGEST_LINE else f"{indent}# {comment}\n{text}"


def _one_line(text: str) -> str:
    """The text as a comment can hold it."""
    return "".join(character if character.isprintable() else " " for character in text)
