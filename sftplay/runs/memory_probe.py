"""Measures a few steps of a run on its GPU before the launch, where that helps, and sizes the run by the result.

A measurement is kept below .cache. Every later run of the same model, method, machine and libraries uses it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sftplay import __version__, log
from sftplay.atomic import write_text
from sftplay.config.cluster import SHARDED
from sftplay.config.keys import values_that_decide_weights
from sftplay.config.resolved import dump_resolved
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.launch.command import cache_environment, gpu_environment, offline_environment, quiet_environment
from sftplay.launch.processes import run_with_limit
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import Machine
from sftplay.places import cache_root
from sftplay.plan.fit import Fit, NoFit, Point, fit
from sftplay.plan.forecast import Forecast, find_device, forecast
from sftplay.plan.sizing import SizedRun
from sftplay.runs.inputs import needs_no_hub
from sftplay.units import format_bytes, format_seconds

REQUEST, MEASURED = "request.json", "measured.json"
CACHE = cache_root() / "probes"

NO_MEMORY_KEYS = (
    "seed", "task_mode", "data.", "train.epochs", "train.max_steps", "train.learning_rate", "train.lr_scheduler",
    "train.warmup_ratio", "train.weight_decay", "train.effective_batch_size", "train.batch_size", "train.grad_accum",
    "train.batching", "train.eval_steps", "train.save_steps", "train.best_metric", "train.early_stopping",
    "train.lr_scaling", "train.lr_batch_size", "train.decay_ratio", "train.min_lr_ratio",
    "datasets", "cpt.weights_of", "cpt.on_source_end", "cpt.train_tokens",
)  # fmt: skip
"""Keys, and beginnings of keys, that decide weights but not what one full micro-batch takes."""

FLAGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG")
"""Variables that change how torch's allocator hands out memory."""


class NoRoom(MachineError):
    """The GPU showed that the run does not fit."""


@dataclass(frozen=True)
class ProbeTarget:
    """The machine and the limits of a probe."""

    machine: Machine
    local_processes: int
    """Number of the run's processes on this machine. Each has a GPU."""

    log_folder: Path
    limit_s: float = 900.0
    """A model of tens of GB takes minutes to load from a slow disk."""

    @property
    def gpu(self) -> Gpu:
        """The GPU that the plan is made for: the smallest of those that the run will use."""
        wanted = find_device(self.machine, self.local_processes)
        used = self.machine.gpus[: self.local_processes]
        return next(gpu for gpu in used if gpu.plannable_bytes == wanted.free_bytes)


def size_by_probe(
    sized: SizedRun,
    target: ProbeTarget,
    *,
    resize: Callable[[Fit], SizedRun],
    run: Callable[..., dict[str, Any]] | None = None,
) -> tuple[SizedRun, dict[str, Any]]:
    """Return `sized`, sized again where a probe measured the run, and the record of the decision for plan.json.

    Where the probe fails or its points lie on no line, the estimate stands and a note is printed. `run` measures as
    `run_probe` does. Raise MachineError where the measurement shows that it does not fit.
    """
    predicted, reason = sized.forecast, reason_not_to_probe(sized, target)
    if reason or predicted is None:
        return sized, {"decision": "none", "why": reason}
    request = make_request(sized, predicted)
    key = fingerprint(_identify(sized, target, request=request))
    began = time.monotonic()
    try:
        measured, is_new = _measure(sized, request, target=target, key=key, run=run or run_probe)
    except NoRoom:
        raise
    except SftplayError as error:
        log.say(f"note: the probe failed, the estimate stands: {error.what}", "probe")
        return sized, {"decision": "failed", "why": error.what, "fingerprint": key}
    record = {"decision": "measured" if is_new else "cached", "fingerprint": key, "request": request, **measured}
    record["seconds"] = round(time.monotonic() - began, 1)
    fitted = _fit(measured, predicted)
    if isinstance(fitted, NoFit):
        log.say(f"note: the probe's points lie on no line, the estimate stands: {fitted.reason}", "probe")
        return sized, {**record, "refused": fitted.reason}
    record["fit"], resized = fitted.as_dict(), resize(fitted)
    for name, sizing in (("before", sized), ("after", resized)):
        planned, train = sizing.forecast, sizing.cfg.train
        assert planned is not None
        sizes = {"batch_size": train.batch_size, "grad_accum": train.grad_accum, "peak_bytes": planned.peak_bytes}
        record[name] = {**sizes, "allocated_bytes": planned.allocated_bytes, "verdict": planned.verdict}
    last, line = fitted.points[-1], fitted.lines[fitted.peak_phase]
    error_share = _estimate(predicted, last.rows, accumulates=fitted.accumulates).allocated_bytes / last.peak_bytes - 1
    source = f"measured in {format_seconds(record['seconds'])}" if is_new else "measured before"
    log.say(
        f"{source}: {format_bytes(line.fixed_bytes)} and {format_bytes(line.bytes_per_token)} a token; "
        f"{last.rows} rows took {format_bytes(last.peak_bytes)} (the estimate was {error_share:+.1%} off)",
        "probe",
    )
    before, after = record["before"]["batch_size"], record["after"]["batch_size"]
    if before != after:
        log.say(f"batch size {before} by the estimate, {after} by the probe", "probe")
    return resized, record


def reason_not_to_probe(sized: SizedRun, target: ProbeTarget) -> str:
    """Return the reason why this run is not probed; empty when it is probed."""
    predicted = sized.forecast
    if not target.machine.gpus:
        return "there is no GPU"
    if sized.world_size != target.local_processes:
        return "each node would size the run by itself, and they must agree"
    if sized.cfg.train.probe == "off":
        return "train.probe is off"
    if not sized.cfg.task.is_probed:
        return f"the probe measures steps of sft, not those of task_mode {sized.cfg.task_mode}"
    if predicted is None:
        return "the model's shape is not known before its download"
    if sized.world_size > 1 and sized.cfg.cluster.strategy in SHARDED:
        return f"one process cannot measure a run that {sized.cfg.cluster.strategy} splits over several"
    return "even without a margin the estimate does not fit" if predicted.verdict == "does_not_fit" else ""


def make_request(sized: SizedRun, predicted: Forecast) -> dict[str, Any]:
    """Return two micro-batches well below the predicted limit, and a third in case no line goes through the two."""
    chosen, share = predicted.size.rows, sized.cfg.train.effective_batch_size // sized.world_size
    if chosen >= 4:
        return {"rows": [chosen // 4, chosen // 2], "if_bent": chosen, "accumulates": True}
    two = forecast(predicted.setting, replace(predicted.size, rows=2))
    rows = [1, 2] if share > 1 and two.verdict != "does_not_fit" else [1]
    return {"rows": rows, "if_bent": None, "accumulates": share > 1}


def _identify(sized: SizedRun, target: ProbeTarget, *, request: dict[str, Any]) -> dict[str, Any]:
    """Return everything that a measurement depends on, as JSON values."""
    assert sized.forecast is not None
    gpu, values = target.gpu, values_that_decide_weights(sized.cfg)
    return {
        "kit": __version__,
        "model": asdict(sized.forecast.setting.shape),
        "config": {key: value for key, value in values.items() if not key.startswith(NO_MEMORY_KEYS)},
        "gpu": [gpu.name, gpu.total_bytes, *gpu.capability],
        "driver": target.machine.driver,
        "libraries": target.machine.libraries,
        "flags": {name: value for name, value in (gpu_environment() | os.environ).items() if name in FLAGS},
        "accumulates": request["accumulates"],
    }


def _measure(
    sized: SizedRun, request: dict[str, Any], *, target: ProbeTarget, key: str, run: Callable[..., dict[str, Any]]
) -> tuple[dict[str, Any], bool]:
    """Return the measurement, and whether it is a new one. It is repeated with fewer rows until there is a point. Raise
    NoRoom where a single row ran out of memory.
    """
    made: list[bool] = []

    def make(unfinished: Path) -> None:
        made.append(True)
        gpu, rows = target.gpu, " and ".join(map(str, request["rows"]))
        log.say(f"measuring a few steps with {rows} full rows on {gpu.name}, once for runs like this", "probe")
        result = run(sized, request, target=target)
        while not result["points"] and (too_many := result["out_of_memory_rows"]):
            if too_many == 1:
                fix = "see `make memory-check` (who holds it) and `make plan` (what fits); train.probe=off tries anyway"
                raise NoRoom(f"one full row at a time ran out of memory on {gpu.name}", where="train.probe", fix=fix)
            result = run(sized, {**request, "rows": [max(1, too_many // 4)], "if_bent": None}, target=target)
            result["out_of_memory_rows"] = result["out_of_memory_rows"] or too_many
        # Device memory taken outside the allocator; none is known when others freed memory during the measurement.
        device = result["device"]
        taken = gpu.free_bytes - device["free_bytes"] - device["reserved_bytes"] if device else 0
        result["context_bytes"] = taken if taken > 0 else None
        write_text(unfinished / MEASURED, json.dumps(result))

    if sized.cfg.train.probe == "always":
        shutil.rmtree(CACHE / key, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = ensure_folder(CACHE / key, make)
    return json.loads((folder / MEASURED).read_text(encoding="utf-8")), bool(made)


def run_probe(sized: SizedRun, request: dict[str, Any], *, target: ProbeTarget) -> dict[str, Any]:
    """Measure in a separate process on the target's GPU; return the content of measured.json. Raise RunError where it
    failed or took too long; its output is in the run's logs.
    """
    log_path = target.log_folder / "probe.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    env = quiet_environment() | cache_environment() | gpu_environment()
    env |= offline_environment() if needs_no_hub(sized.cfg) else {}
    if target.machine.gpus and (uuid := target.gpu.uuid):
        env["CUDA_VISIBLE_DEVICES"] = uuid
    with tempfile.TemporaryDirectory(prefix="sftplay-probe-") as scratch:
        folder, where, fix = Path(scratch), str(log_path), "set train.probe=off"
        write_text(folder / "config.resolved.yaml", dump_resolved(sized.cfg))
        write_text(folder / REQUEST, json.dumps(request))
        argv = [sys.executable, "-m", "sftplay.tasks.probe_step", scratch]
        code = run_with_limit(argv, env=env, output=log_path, limit_s=target.limit_s)
        if code is None:
            raise RunError(f"no answer within {target.limit_s:g} s", where=where, fix=fix)
        if code or not (folder / MEASURED).is_file():
            last_line = (log_path.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[-1]
            raise RunError(f"it ended with code {code} ({last_line[:200]}), see {log_path}", where=where, fix=fix)
        return json.loads((folder / MEASURED).read_text(encoding="utf-8"))


def _fit(measured: dict[str, Any], predicted: Forecast) -> Fit | NoFit:
    """Fit the lines through the measured points. A single point gets the estimate's slopes.

    Where a larger micro-batch ran out of memory, the line is made steep enough to predict that.
    """
    too_many = measured["out_of_memory_rows"]
    points = [Point(**point) for point in measured["points"]][-1 if too_many else 0 :]
    one, two = (_estimate(predicted, rows, accumulates=measured["accumulates"]) for rows in (1, 2))
    low, high = ({name: sum(parts.values()) for name, parts in e.footprint.phases.items()} for e in (one, two))
    fitted = fit(points, {name: (high[name] - low[name]) / predicted.size.seq for name in low})
    if isinstance(fitted, NoFit):
        return fitted
    if too_many:
        fitted = fitted.reaching(too_many * predicted.size.seq, predicted.budget_bytes)
    return replace(fitted, accumulates=measured["accumulates"], context_bytes=measured["context_bytes"])


def _estimate(predicted: Forecast, rows: int, *, accumulates: bool) -> Forecast:
    """Return the estimate, without measurement, for micro-batches of `rows` rows on one process."""
    alone = replace(predicted.setting, fit=None, strategy="single", world_size=1)
    return forecast(alone, replace(predicted.size, rows=rows, accumulates=accumulates))
