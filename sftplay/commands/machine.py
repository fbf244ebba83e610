"""The verbs about this machine and this repository, and what goes together on a machine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from sftplay import log
from sftplay.errors import ConfigError, MachineError
from sftplay.log import is_terminal
from sftplay.machine.probe import probe
from sftplay.units import format_bytes

CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))


def gpu_info(args: Namespace) -> int:
    """`gpu-info`: GPUs with the driver's facts, or why there are none; processor, memory, disk, library versions."""
    from sftplay.machine.gpu_info import describe_host, describe_machine

    machine, torch_facts = probe(in_detail=True), {}
    if args.torch:
        from sftplay.machine.doctor import ask_torch

        torch_facts = ask_torch()
    if args.json:
        torch_says = {"torch_says": torch_facts} if torch_facts else {}
        print(json.dumps({"n_gpus": len(machine.gpus), **machine.as_dict(), **torch_says}))
        return 0
    for line in (*describe_machine(machine), *describe_host(machine)):
        log.show(line)
    for name, value in torch_facts.items():
        log.show(f"torch says {name}: {value}")
    return 0


def memory_check(args: Namespace) -> int:
    """`memory-check`: memory by process, and the plans of the runs that are going on; with --watch until Ctrl-C."""
    output = _output_folder(args)
    from sftplay.commands.status import watch

    return watch(args, lambda: _show_memory(output, as_json=args.json))


def doctor(args: Namespace) -> int:
    """`doctor`: findings with their remedies; exit code 3 when one of them would stop a run."""
    from sftplay.machine.doctor import RunNeeds, diagnose

    if args.config:
        from sftplay.config.load import load_config
        from sftplay.model.source import is_local
        from sftplay.runs.inputs import checkpoint_bytes

        cfg = load_config(args.config, args.overrides)
        needs = RunNeeds(
            output=Path(cfg.output_dir), hub_model=None if is_local(cfg.model.name) else cfg.model.name,
            checkpoint_bytes=checkpoint_bytes(cfg), checkpoints_kept=cfg.train.save_total_limit,
            wants_4bit=cfg.tuning.mode == "qlora",
        )  # fmt: skip
    else:
        needs = RunNeeds(output=_output_folder(args))
    findings = diagnose(probe(in_detail=True), needs, is_fast=args.fast)
    counts = {level: sum(finding.level == level for finding in findings) for level in ("ok", "warn", "stop")}
    if args.json:
        print(json.dumps({**counts, "findings": [asdict(finding) for finding in findings]}, ensure_ascii=False))
    else:
        for finding in findings:
            log.show(finding.as_text())
        log.show(", ".join(f"{n} {level}" for level, n in counts.items()))
        log.show("`make gpu-check` then tries here what the kit promises, and writes a file to attach to a report")
    return MachineError.exit_code if counts["stop"] else 0


def check(args: Namespace) -> int:
    """`check`: ruff's lint and format and mypy over this repository; 1 when one of them fails, else 0."""
    from sftplay.places import ROOT

    failed = [" ".join(argv) for argv in CHECKS if subprocess.call([sys.executable, "-m", *argv], cwd=ROOT)]
    if failed:
        log.say(f"failed: {', '.join(failed)}", "check")
        return 1
    log.say("lint, format and types are clean", "check")
    return 0


def matrix(args: Namespace) -> int:
    """`matrix`: a table on a terminal; docs/strategies.md in a file or a pipe; its cells as JSON."""
    from sftplay.config.matrix import as_markdown, as_table, rows

    if args.json:
        print(json.dumps({"cells": [row.as_dict() for row in rows()]}))
        return 0
    width = min(100, shutil.get_terminal_size().columns)
    print(as_table(width) if is_terminal(sys.stdout) else as_markdown(), end="")
    return 0


def setup_accelerate(args: Namespace) -> int:
    """`setup-accelerate`: write an accelerate config for this machine; with --interactive accelerate asks for it."""
    from sftplay.launch.accelerate_settings import accelerate_text, write_accelerate

    path = Path(args.out)
    if args.interactive:
        path.parent.mkdir(parents=True, exist_ok=True)
        cli = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]
        return subprocess.call([*cli, "config", "--config_file", str(path)])
    machine = probe()
    has_bf16 = bool(machine.gpus) and all(gpu.has_bf16 for gpu in machine.gpus)
    text = accelerate_text(path, gpus=len(machine.gpus), has_bf16=has_bf16)
    write_accelerate(path, text)
    if args.json:
        print(json.dumps({"path": str(path), "text": text}))
        return 0
    log.say(f"wrote {path}", "setup-accelerate")
    log.show(text.rstrip())
    return 0


def _show_memory(output: Path, *, as_json: bool) -> None:
    from sftplay.machine.memory_use import describe_gpus, describe_run, read_runs

    machine = probe(in_detail=True)
    runs = read_runs(output, machine)
    if as_json:
        memory = {"ram_bytes": machine.ram_bytes, "ram_free_bytes": machine.ram_available}
        gpus = machine.as_dict()["gpus"]
        print(json.dumps({**memory, "n_gpus": len(gpus), "gpus": gpus, "runs": [run.as_dict() for run in runs]}))
        return
    lines = describe_gpus(machine) or [f"No GPU: {machine.gpu_reason}"]
    used, free = format_bytes(machine.ram_bytes - machine.ram_available), format_bytes(machine.ram_available)
    lines.append(f"memory: {format_bytes(machine.ram_bytes)}: {used} used, {free} free")
    for run in runs:
        lines += describe_run(run)
    for line in lines if runs else [*lines, f"no run is going on in {output}"]:
        log.show(line)


def _output_folder(args: Namespace) -> Path:
    """The config's output_dir. Without a config: the override of it, or the default."""
    if args.config:
        from sftplay.config.load import load_config

        return Path(load_config(args.config, args.overrides).output_dir)
    overrides = dict(override.split("=", 1) for override in args.overrides)
    if unknown := next((key for key in overrides if key != "output_dir"), None):
        raise ConfigError(f"{unknown} needs a config", where="command line", fix="name one with CONFIG=")
    return Path(overrides.get("output_dir", "outputs"))
