"""One check of `make gpu-check`, and how it uses the kit as a user would."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from sftplay.atomic import read_lines, read_object, write_text
from sftplay.launch.command import gpu_environment
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import Machine
from sftplay.places import ROOT, shipped
from sftplay.signals import popen_tied

STEPS = 12

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

Values = dict[str, Any]
"""Config values by dotted key."""

PLAIN: Values = {"train.precision": "fp32", "model.attn": "sdpa", "train.packing": False}
"""The run that others are compared with."""


class NotPossible(Exception):
    """This machine cannot show it. The text says why."""


class Broken(Exception):
    """The promise does not hold here. The text says what was found."""


@dataclass(frozen=True)
class CheckContext:
    machine: Machine
    folder: Path
    """The check's own, empty at its start and removed behind it."""

    shared: Path
    """That of all checks, for what several of them need."""

    details: dict[str, Any] = field(default_factory=dict)
    """Figures for the JSON file that do not fit into a line of the table."""

    @property
    def has_gpu(self) -> bool:
        return bool(self.machine.gpus)

    @property
    def bound(self) -> float:
        """How far two runs of the same steps may be apart, as a share: on a CPU they are equal bit for bit."""
        return 1e-3 if self.has_gpu else 0.0


@dataclass(frozen=True)
class Check:
    """A row of the table. `run` returns its figure, and raises `Broken`, `NotPossible` or any other error."""

    name: str
    run: Callable[[CheckContext], str]
    _: KW_ONLY
    needs: Callable[[Machine], str] = lambda _: ""
    """Why this machine cannot show it; empty where it can. It is asked before a process is started."""

    limit_s: float = 600.0
    """After that the check counts as hanging, and its processes are killed. A busy machine needs minutes for a row that
    takes seconds on an idle one."""

    is_long: bool = False
    """True for what FAST=1 leaves out."""


def expect(holds: bool, figure: str, *, bound: str = "") -> str:
    """Return the figure of a row. Where it does not hold, raise Broken with it and the words about its bound."""
    if not holds:
        raise Broken(figure + bound)
    return figure


@dataclass(frozen=True)
class Run:
    """A run of the kit, and the config that it was started from."""

    config: Path
    folder: RunFolder

    @property
    def losses(self) -> list[float]:
        """The loss of every step."""
        return [line["loss"] for line in read_lines(self.folder.metrics)[0]]

    @property
    def status(self) -> dict[str, Any]:
        return read_object(self.folder.path / "status.json")


def write_run(folder: Path, name: str, *, values: Values | None = None) -> Run:
    """Write the config of a short run of this name below `folder`; `values` replace or add keys."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    if not rows.is_file():
        lines = shipped("data/demo/train.jsonl").read_text(encoding="utf-8").splitlines()
        write_text(rows, "\n".join(lines[: 16 * STEPS]) + "\n")  # a step has 16: the first ones read each row once
    values = values or {}
    every: Values = {
        "run_name": name,
        "output_dir": str(folder / "outputs"),
        "model.name": "builtin:tiny",
        "model.max_seq_len": 128,
        "train.max_steps": STEPS,
        "train.effective_batch_size": 16,
        "train.batch_size": 16,
        # High, so that few steps show that the tiny model learns.
        "train.learning_rate": 1e-3 if values.get("tuning.mode") == "full" else 4e-3,
        "train.warmup_ratio": 0.0,
        "train.gradient_checkpointing": False,
        "train.probe": "off",
        "data.train_path": str(rows),
        "data.split": 0.0,
        "data.processed_dir": str(folder / "processed"),
        "logging.steps": 1,
        "logging.backend": "none",
        "eval.before": False,
        "eval.after": False,
        **values,
    }
    tree: dict[str, Any] = {}
    for dotted, value in every.items():
        *path, last = dotted.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    config = folder / f"{name}.yaml"
    write_text(config, json.dumps(tree, indent=1))  # JSON is YAML
    return Run(config, RunFolder(folder / "outputs" / name))


def call(verb: str, run: Run | None, *words: str, env: dict[str, str] | None = None, expects: int = 0) -> None:
    """Run a verb to its end, on a run's config where one is given. Its lines go to this check's output.
    Raise Broken where its exit code is not the expected one.
    """
    argv = [sys.executable, "-m", "sftplay", verb, *(["--config", str(run.config)] if run else []), *words]
    code = popen_tied(argv, output=sys.stdout.fileno(), env=env).wait()
    if code != expects:
        error = (run.status.get("error") if run else None) or {}
        what = f": {error['what']}" if error.get("what") else ""
        raise Broken(f"`{verb}` ended with code {code}, not {expects}{what}")


def train(context: CheckContext, name: str, *, values: Values | None = None, env: dict[str, str] | None = None) -> Run:
    """Train a run in the check's own folder to its end."""
    run = write_run(context.folder, name, values=values)
    call("train", run, env=env)
    return run


def shared_run(
    context: CheckContext, name: str, *, values: Values | None = None, env: dict[str, str] | None = None
) -> Run:
    """Return a finished run in the folder of all checks, trained by the first of them that asks for it."""
    run = write_run(context.shared, name, values=values)
    if run.status.get("state") != "done":
        shutil.rmtree(run.folder.path, ignore_errors=True)
        call("train", run, env=env)
    return run


def learned(context: CheckContext, *, mode: str = "lora", precision: str = "fp32", on_cpu: bool = False) -> Run:
    """The shared run of this tuning mode and precision, on this machine's GPU where it has one, or on its CPU."""
    values = {**PLAIN, "tuning.mode": mode, "train.precision": precision}
    if on_cpu and context.has_gpu:
        return shared_run(context, f"{mode}-{precision}-cpu", values=values, env=NO_GPU)
    return shared_run(context, f"{mode}-{precision}", values=values)


def weights_apart(one: Run, two: Run) -> float:
    """Return how far the adapters of two runs are apart: the norm of their difference as a share of the norm."""
    import numpy as np
    from safetensors.numpy import load_file

    a, b = (load_file(run.folder.path / "adapter" / "adapter_model.safetensors") for run in (one, two))
    apart = sum(float(np.square(a[name].astype("float64") - b[name]).sum()) for name in a)
    norm = sum(float(np.square(weights.astype("float64")).sum()) for weights in a.values())
    return float((apart / norm) ** 0.5)


def losses_apart(one: list[float], two: list[float]) -> float:
    """Return the largest difference between the losses of the same steps, as a share. Raise Broken where they are not
    of as many steps, or not finite.
    """
    if len(one) != len(two) or not one:
        raise Broken(f"{len(one)} steps next to {len(two)}")
    if not all(map(math.isfinite, (*one, *two))):
        raise Broken("a loss is not finite")
    return max(abs(a - b) / abs(b) for a, b in zip(one, two, strict=True))


def random_model(context: CheckContext, name: str) -> Path:
    """The folder of a model of the shape `name`, made by benchmarks/gpu_sizing.py with random weights."""
    folder = context.folder / "model"
    run_script("gpu_sizing.py", "--make", name, str(folder))
    return folder


def run_script(script: str, *words: str) -> None:
    """Run a script of benchmarks/ to its end. Raise NotPossible where the kit was installed without it, and Broken
    where it failed.
    """
    path = ROOT / "benchmarks" / script
    if not path.is_file():
        raise NotPossible(f"needs a checkout of the kit: benchmarks/{script} is not here")
    argv = [sys.executable, str(path), *words]
    if code := popen_tied(argv, output=sys.stdout.fileno(), env=gpu_environment()).wait():
        raise Broken(f"benchmarks/{script} ended with code {code}")
