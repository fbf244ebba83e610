"""The verb `plan`: what a run takes, on this machine or on a named one, before anything is downloaded."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import replace
from functools import partial

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.gpu import Gpu, Machine, ram_free_bytes, ram_limit_bytes
from sftplay.plan.devices import Card, find_card, parse_fleet
from sftplay.plan.forecast import Forecast, Hardware, find_device
from sftplay.plan.report import describe_memory, describe_model, describe_workload, find_report
from sftplay.plan.sizing import size_run
from sftplay.runs.inputs import known_lengths, load_checked, require_shape, resolve_names
from sftplay.units import parse_bytes

DOES_NOT_FIT = 3


def plan(args: Namespace) -> int:
    """`plan`: bytes of every component, the sizes, the verdict, and what would fit; exit code 3 when it does not."""
    cfg = resolve_names(load_checked(args.config, args.overrides, asks_hub=False, needs_data=False))
    shape = require_shape(cfg)
    machine, world_size = _planned_machine(args, cfg)
    task, lengths = find_report(cfg), known_lengths(cfg)
    sizing = partial(size_run, machine=machine, lengths=lengths)
    fitted = partial(task.size, sizing=sizing, world_size=world_size, is_free=not args.nproc)
    sized = fitted(cfg, shape=shape)
    world_size = sized.world_size
    hardware = Hardware(find_device(machine, world_size), world_size, lengths)
    forecast = sized.forecast
    assert forecast is not None
    if args.compare:
        rows, table = task.compare(sized.cfg, shape, hardware=hardware)
        if args.json:
            print(json.dumps({"model": shape.name, "rows": [row.as_dict() for row in rows]}))
        for line in [] if args.json else [*describe_model(forecast), *table]:
            log.show(line)
        return 0
    work = task.workload(sized.cfg, forecast, lengths=lengths)
    suggestions = [] if forecast.verdict == "fits" else task.suggest(cfg, sized, sizing=fitted, hardware=hardware)
    cost, about_cost = _estimate_cost(cfg, forecast, seconds=work.seconds)
    if args.json:
        more = {"suggestions": list(map(vars, suggestions)), **vars(work), "cost": cost, "notes": list(sized.notes)}
        print(json.dumps({**sized.as_plan(), **more}))
        return DOES_NOT_FIT if forecast.verdict == "does_not_fit" else 0
    advice: list[str] = []
    if suggestions:
        from sftplay.plan.advice import describe_suggestions

        advice = [
            "what would fit:" if suggestions[0].fits else "what comes nearest:",
            *describe_suggestions(suggestions),
        ]
    train = sized.cfg.train
    sizes = f"{train.batch_size} x {train.grad_accum} x {world_size} processes = {train.effective_batch_size}"
    lines = [
        *describe_model(forecast),
        f"tuning      {sized.cfg.tuning.mode}, {train.precision}, {task.describe_tokens(sized.cfg, forecast.size.seq)}",
        f"batch       {sizes} {task.unit(cfg)} a step (batch_size x grad_accum x processes = effective batch)",
        *task.describe_sampling(forecast, sized.as_plan()),
        *(f"            {key} = {_as_yaml(made.value)}: {made.reason}" for key, made in sized.decisions.items()),
        "memory on each device, at its peak",
        *describe_memory(forecast),
        *task.describe_phases(forecast),
        *describe_workload(work),
        *about_cost,
        *advice,
        *(f"note        {note}" for note in sized.notes),
    ]
    for line in lines:
        log.show(line)
    return DOES_NOT_FIT if forecast.verdict == "does_not_fit" else 0


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _estimate_cost(cfg: RunConfig, seen: Forecast, *, seconds: float | None) -> tuple[float | None, list[str]]:
    """The cost of a run of so many seconds, and the line about it; None and no line without a price."""
    if (price := cfg.cluster.price_per_hour) is None:
        return None, []
    from sftplay.launch.cost import compute_cost, count_gpus, format_cost

    setting = seen.setting
    gpus = count_gpus(cfg, world_size=setting.world_size, has_gpu=setting.device.is_gpu, devices=seen.by_device)
    machines = f"{gpus} GPU{'s' if gpus > 1 else ''} x " if gpus else ""
    rate = f"{machines}{price:g} an hour, without restarts"
    if seconds is None:
        return None, [f"cost        not estimated: {rate}"]
    cost = compute_cost(seconds, gpus=gpus, price_per_hour=price)
    return cost, [f"cost        about {format_cost(cost)}: {rate}"]


def _planned_machine(args: Namespace, cfg: RunConfig) -> tuple[Machine, int]:
    """The machine to plan for, and the number of processes."""
    if args.gpus and args.vram:
        raise ConfigError("--gpus and --vram do not go together", where="command line", fix="leave one out")
    count, card = 0, find_card("A10") or Card("", 0, (8, 0), 0)
    if args.gpus:
        count, card = parse_fleet(args.gpus, "--gpus (GPUS=)")
    elif args.vram:
        try:
            mib = parse_bytes(args.vram) >> 20
        except ValueError as error:
            raise ConfigError(str(error), where="--vram (VRAM=)", fix="write VRAM=24GiB") from None
        count, card = 1, replace(card, name=f"GPU of {args.vram}", total_mib=mib, tflops=0)
    gpus = tuple(Gpu(i, card.name, card.total_bytes, card.total_bytes, card.capability) for i in range(count))
    if gpus and cfg.tuning.backend == "bnb" and not cfg.task.learns_from_rewards:
        # Nothing that is installed here decides, so neither the driver nor any library is asked.
        machine = Machine(
            gpus=gpus, gpu_reason="", ram_bytes=ram_limit_bytes(), ram_free_bytes=ram_free_bytes(),
            cores=os.cpu_count() or 1, python="", system="", libraries={},
        )  # fmt: skip
    else:
        from sftplay.machine.probe import probe

        machine = replace(probe(), gpus=gpus, gpu_reason="") if gpus else probe()
    world_size = args.nproc or max(1, len(machine.gpus))
    if 0 < len(machine.gpus) < world_size:
        what = f"{world_size} processes need {world_size} GPUs, there are {len(machine.gpus)}"
        fix = f"use --nproc {len(machine.gpus)}, or plan for others with GPUS={world_size}xA100"
        raise MachineError(what, where="--nproc", fix=fix)
    return machine, world_size
