"""The verb `plan`: what a run takes, on this machine or on a named one, before anything is downloaded."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.probe import Gpu, Machine, probe
from sftplay.model.start_point import resolve_names
from sftplay.plan.devices.cards import Card, find_card, parse_fleet
from sftplay.plan.memory.budget import device_of
from sftplay.plan.memory.forecast import Forecast, Place
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.puzzles import PuzzleModelShape
from sftplay.plan.report.advice import Suggestion, suggest, suggest_for_episodes
from sftplay.plan.report.compare import compare
from sftplay.plan.report.layouts import compare_layouts, describe_layout, describe_layouts
from sftplay.plan.report.puzzle_cost import suggest_for_puzzles, workload_of_puzzles
from sftplay.plan.report.run_cost import Workload, workload_of
from sftplay.plan.report.tables import (
    describe_drawing,
    describe_memory,
    describe_model,
    describe_phases,
    describe_rows,
    describe_suggestions,
    describe_table,
    describe_workload,
)
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.size_run import SizedRun, size_run
from sftplay.runs.inputs import known_lengths, load_checked
from sftplay.runs.model_shape import require_shape
from sftplay.units import parse_bytes

DOES_NOT_FIT = 3


def plan(args: Namespace) -> int:
    """`plan`: bytes of every component, the sizes, the verdict, and what would fit; exit code 3 when it does not."""
    cfg = resolve_names(load_checked(args.config, args.overrides, asks_hub=False, needs_puzzles=False))
    shape = require_shape(cfg)
    machine, world_size = _planned_machine(args)
    sizing = partial(_sized, args, machine=machine, world_size=world_size)
    sized = sizing(cfg, shape=shape)
    world_size = sized.world_size
    place = Place(device_of(machine, world_size), world_size, known_lengths(cfg))
    if args.compare:
        return _compare(args, sized, shape=shape, place=place)
    forecast = sized.forecast
    assert forecast is not None
    work = _workload(sized.cfg, forecast, lengths=place.lengths)
    suggestions = [] if forecast.verdict == "fits" else _suggested(cfg, sized, sizing=sizing, place=place)
    if args.json:
        extra = {"suggestions": [each.as_dict() for each in suggestions], **vars(work), "notes": list(sized.notes)}
        print(json.dumps({**sized.as_plan(), **extra}))
        return DOES_NOT_FIT if forecast.verdict == "does_not_fit" else 0
    train = sized.cfg.train
    sizes = f"{train.batch_size} x {train.grad_accum} x {world_size} processes = {train.effective_batch_size}"
    unit = {"grpo": "completions", "score": "episodes"}.get(sized.cfg.task_mode, "rows")
    lines = [
        *describe_model(forecast),
        f"tuning      {sized.cfg.tuning.mode}, {train.precision}, {_rows(sized)}",
        f"batch       {sizes} {unit} a step (batch_size x grad_accum x processes = effective batch)",
        *describe_drawing(forecast, sized.as_plan()),
        *describe_layout(forecast),
        *describe_table(forecast),
        *(f"            {key} = {each.value}: {each.reason}" for key, each in sized.decisions.items()),
        "memory on each device, at its peak",
        *describe_memory(forecast),
        *(describe_phases(forecast) if cfg.task_mode == "hrm" else []),
        *describe_workload(work),
        *(["what would fit:" if suggestions and suggestions[0].fits else "what comes nearest:"] if suggestions else []),
        *describe_suggestions(suggestions),
        *(f"note        {note}" for note in sized.notes),
    ]
    for line in lines:
        log.show(line)
    return DOES_NOT_FIT if forecast.verdict == "does_not_fit" else 0


def refuse_compare(cfg: RunConfig) -> None:
    """Raise the ConfigError of a task that has nothing to compare."""
    if cfg.task_mode == "hrm":
        what = "task mode hrm trains every weight, and by ddp alone: there is nothing to compare"
        raise ConfigError(what, where="--compare (COMPARE=1)", fix="leave it out")


def _suggested(cfg: RunConfig, sized: SizedRun, *, sizing: Callable[..., SizedRun], place: Place) -> list[Suggestion]:
    """What would fit, of the config as the user wrote it, and as it is sized."""
    assert sized.forecast is not None
    shape = sized.forecast.setting.shape
    if isinstance(shape, PuzzleModelShape):
        return suggest_for_puzzles(cfg, shape, sizing=sizing)
    if cfg.task_mode == "score":
        return suggest_for_episodes(cfg, shape, sizing=sizing)
    return suggest(sized.cfg, shape, place=place)


def _workload(cfg: RunConfig, forecast: Forecast, *, lengths: RowLengths | None) -> Workload:
    if cfg.task_mode == "hrm":
        return workload_of_puzzles(cfg, forecast)
    return workload_of(cfg, forecast.setting, lengths=lengths)


def _sized(args: Namespace, cfg: RunConfig, *, machine: Machine, world_size: int, shape: ModelShape) -> SizedRun:
    """Sized; two-turn episodes take one process where nobody named a number and their parts need several GPUs."""
    lengths, may_be_one = known_lengths(cfg), cfg.task_mode == "score" and not args.nproc and world_size > 1
    if may_be_one and cfg.score.placement in ("roles", "roles4"):
        world_size = 1
    sized = size_run(cfg, machine, world_size=world_size, shape=shape, lengths=lengths)
    seen = sized.forecast
    if may_be_one and cfg.score.placement == "auto" and seen is not None and seen.verdict == "does_not_fit":
        one = size_run(cfg, machine, world_size=1, shape=shape, lengths=lengths)
        return one if one.forecast is not None and one.forecast.peak_bytes < seen.peak_bytes else sized
    return sized


def _rows(sized: SizedRun) -> str:
    """The rows that memory is planned for."""
    limit = sized.cfg.row_tokens
    planned = sized.forecast.size.seq if sized.forecast else limit
    if sized.cfg.learns_documents:
        return f"full blocks of {planned} tokens, every one learned"
    if sized.cfg.task_mode == "hrm":
        return f"grids of {planned} positions, their puzzle's embedding among them"
    if sized.cfg.task_mode == "grpo":
        return f"prompts and completions of {planned} tokens together"
    if sized.cfg.task_mode == "score":
        return f"prompts and answers of {planned} tokens together"
    shorter = f", the longest of these files (model.max_seq_len {limit})" if planned < limit else ""
    return f"rows of {planned} tokens{shorter}"


def _compare(args: Namespace, sized: SizedRun, *, shape: ModelShape, place: Place) -> int:
    refuse_compare(sized.cfg)
    is_score = sized.cfg.task_mode == "score"
    rows: Any = (compare_layouts if is_score else compare)(sized.cfg, shape, place=place)
    if args.json:
        print(json.dumps({"model": shape.name, "rows": [row.as_dict() for row in rows]}))
        return 0
    assert sized.forecast is not None
    for line in (*describe_model(sized.forecast), *(describe_layouts if is_score else describe_rows)(rows)):
        log.show(line)
    return 0


def _planned_machine(args: Namespace) -> tuple[Machine, int]:
    """The machine to plan for, and the number of processes."""
    if args.gpus and args.vram:
        raise ConfigError("--gpus and --vram do not go together", where="command line", fix="leave one out")
    machine = probe()
    if args.gpus:
        count, card = parse_fleet(args.gpus, "--gpus (GPUS=)")
        machine = _with_gpus(machine, count, card=card)
    elif args.vram:
        machine = _with_gpus(machine, 1, card=_card_of_size(args.vram))
    world_size = args.nproc or max(1, len(machine.gpus))
    if 0 < len(machine.gpus) < world_size:
        raise MachineError(
            f"{world_size} processes need {world_size} GPUs, there are {len(machine.gpus)}",
            where="--nproc",
            fix=f"use --nproc {len(machine.gpus)}, or plan for others with GPUS={world_size}xA100",
        )
    return machine, world_size


def _card_of_size(text: str) -> Card:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(str(error), where="--vram (VRAM=)", fix="write VRAM=24GiB") from None
    return replace(find_card("A10") or Card("", 0, (8, 0), 0), name=f"GPU of {text}", total_mib=size >> 20, tflops=0)


def _with_gpus(machine: Machine, count: int, *, card: Card) -> Machine:
    gpus = tuple(Gpu(i, card.name, card.total_bytes, card.total_bytes, card.capability) for i in range(count))
    return replace(machine, gpus=gpus, gpu_reason="")
