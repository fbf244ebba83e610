"""A run as a job on machines that are not here: planned for them as `make plan` does, then handed to a renderer."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from sftplay.control.inputs import load_checked
from sftplay.control.known_lengths import known_lengths
from sftplay.control.model_shape import known_shape
from sftplay.control.start import refuse_restarts
from sftplay.errors import ConfigError, MachineError
from sftplay.launch.job_files import ClusterJob
from sftplay.machine.probe import Gpu, probe
from sftplay.model.start_point import resolve_names
from sftplay.plan.devices.cards import Card, find_card, parse_fleet
from sftplay.plan.sizing.size_run import size_run
from sftplay.units import format_bytes

NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""What all three tools take as a name."""


def plan_job(args: Namespace) -> ClusterJob:
    """The job, for the GPUs that were named, else for those of this machine.

    Raises:
        ConfigError: no GPU is known to plan for; the effective batch cannot be split.
        MachineError: the run does not fit those GPUs.
    """
    cfg = load_checked(args.config, args.overrides, asks_hub=False)
    refuse_restarts(cfg, nnodes=args.nodes)
    count, card = _gpus(args.gpus)
    gpus = tuple(Gpu(i, card.name, card.total_bytes, card.total_bytes, card.capability) for i in range(count))
    machine = replace(probe(), gpus=gpus, gpu_reason="")
    resolved = resolve_names(cfg)
    sized = size_run(
        resolved, machine, world_size=args.nodes * count, shape=known_shape(resolved), local_processes=count,
        lengths=known_lengths(resolved),
    )  # fmt: skip
    forecast = sized.forecast
    if forecast is not None and forecast.verdict == "does_not_fit":
        what = f"takes {format_bytes(forecast.peak_bytes)} of {format_bytes(forecast.budget_bytes)} on each {card.name}"
        raise MachineError(what, where=args.config, fix=f"make plan CONFIG={args.config} GPUS={count}x{card.name}")
    name = cfg.run_name or Path(args.config).stem
    tidy = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    if not NAME.fullmatch(tidy):
        raise ConfigError(f"{name!r} makes no name of a job", where="run_name", fix="begin it with a letter")
    return ClusterJob(
        name=tidy, config=args.config, overrides=tuple(args.overrides), nodes=args.nodes, gpus=count, gpu=card.name,
        gpu_bytes=card.total_bytes, output_dir=cfg.output_dir, image=args.image,
    )  # fmt: skip


def _gpus(text: str | None) -> tuple[int, Card]:
    if text:
        return parse_fleet(text, "--gpus (GPUS=)")
    here = probe().gpus
    card = find_card(here[0].name) if here else None
    if card is None:
        fix = "name those of one node: GPUS=2xH200"
        raise ConfigError("there is no GPU here to plan the job for", where="--gpus (GPUS=)", fix=fix)
    return len(here), card
