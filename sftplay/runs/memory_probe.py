"""Measures a few steps of a run on its GPU before the launch, where that helps, and sizes the run by the result.

A measurement is kept below .cache. Every later run of the same model, method, machine and libraries uses it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from sftplay import __version__, log
from sftplay.atomic import write_text
from sftplay.config.cluster import SHARDED
from sftplay.config.keys import values_that_decide_weights
from sftplay.config.load import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.data.cache import ensure_folder, fingerprint
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.launch.command.command import cache_environment, gpu_environment, offline_environment, quiet_environment
from sftplay.log import FOLLOWED
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import Machine
from sftplay.places import cache_root
from sftplay.plan.memory.budget import find_device
from sftplay.plan.memory.forecast import Forecast, forecast
from sftplay.plan.memory.probe_fit import Fit, NoFit, Point, fit
from sftplay.plan.sizing.task_sizing import SizedRun
from sftplay.runs.inputs import needs_no_hub
from sftplay.units import format_bytes, format_seconds

STEP = "sftplay.tasks.probe_step"
REQUEST, MEASURED, LOG = "request.json", "measured.json", "probe.log"
CACHE = cache_root() / "probes"

LIMIT_S = 900
"""A model of tens of GB takes minutes to load from a slow disk."""

NO_MEMORY_KEYS = (
    "seed", "task_mode", "data.", "train.epochs", "train.max_steps", "train.learning_rate", "train.lr_scheduler",
    "train.warmup_ratio", "train.weight_decay", "train.effective_batch_size", "train.batch_size", "train.grad_accum",
    "train.batching", "train.eval_steps", "train.save_steps", "train.best_metric", "train.early_stopping",
    "train.lr_scaling", "train.lr_batch_size", "train.decay_ratio", "train.min_lr_ratio",
    "datasets", "cpt.weights_of", "cpt.on_source_end", "cpt.streaming", "cpt.train_tokens",
)  # fmt: skip
"""Keys, and beginnings of keys, that decide weights but not what one full micro-batch takes."""

FLAGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUBLAS_WORKSPACE_CONFIG")
"""Variables that change how torch's allocator hands out memory."""


class NoRoom(MachineError):
    """The GPU showed that the run does not fit."""


@dataclass(frozen=True)
class Bench:
    """The machine and the limits of a rehearsal."""

    machine: Machine
    local_processes: int
    """Number of the run's processes on this machine. Each has a GPU."""

    log_folder: Path
    limit_s: float = LIMIT_S

    @property
    def gpu(self) -> Gpu:
        """The GPU that the plan is made for: the smallest of those that the run will use."""
        wanted = find_device(self.machine, self.local_processes)
        used = self.machine.gpus[: self.local_processes]
        return next(gpu for gpu in used if gpu.plannable_bytes == wanted.free_bytes)


class Rehearse(Protocol):
    """Rehearses a sized run."""

    def __call__(self, sized: SizedRun, request: dict[str, Any], *, bench: Bench) -> dict[str, Any]:
        """The content of measured.json."""


def size_by_probe(
    sized: SizedRun, bench: Bench, *, resize: Callable[[Fit], SizedRun], rehearse: Rehearse | None = None
) -> tuple[SizedRun, dict[str, Any]]:
    """`sized`, sized again where a probe measured the run; and the record of the decision for plan.json.

    Where the probe fails or its points lie on no line, the estimate stands and a note is printed.

    Raises:
        MachineError: the measurement shows that it does not fit.
    """
    predicted, reason = sized.forecast, reason_not_to_probe(sized, bench)
    if reason or predicted is None:
        return sized, {"decision": "none", "why": reason}
    request = make_request(sized, predicted)
    key = fingerprint(identity(sized, bench, request=request))
    began = time.monotonic()
    try:
        measured, is_new = _measure(sized, request, bench=bench, key=key, rehearse=rehearse or run_rehearsal)
    except NoRoom:
        raise
    except SftplayError as error:
        log.say(f"note: the probe failed, the estimate stands: {error.what}", "probe")
        return sized, {"decision": "failed", "why": error.what, "fingerprint": key}
    record = {"decision": "measured" if is_new else "cached", "fingerprint": key, "request": request, **measured}
    record["seconds"] = round(time.monotonic() - began, 1)
    fitted = read_fit(measured, predicted)
    if isinstance(fitted, NoFit):
        log.say(f"note: the probe's points lie on no line, the estimate stands: {fitted.reason}", "probe")
        return sized, {**record, "refused": fitted.reason}
    resized = resize(fitted)
    record |= {"fit": fitted.as_dict(), "before": _sizes(sized), "after": _sizes(resized)}
    _print_measurement(record, fitted, predicted=predicted)
    return resized, record


def reason_not_to_probe(sized: SizedRun, bench: Bench) -> str:
    """The reason why this run is not probed; empty when it is probed."""
    predicted = sized.forecast
    if not bench.machine.gpus:
        return "there is no GPU"
    if sized.world_size != bench.local_processes:
        return "each node would size the run by itself, and they must agree"
    if sized.cfg.train.probe == "off":
        return "train.probe is off"
    if sized.cfg.task.learns_from_rewards:
        return "the probe measures steps on rows that are there, not the drawing of completions"
    if predicted is None:
        return "the model's shape is not known before its download"
    if sized.cfg.cluster.strategy in SHARDED:
        return f"one process cannot measure a run that {sized.cfg.cluster.strategy} splits over several"
    return "even without a margin the estimate does not fit" if predicted.verdict == "does_not_fit" else ""


def make_request(sized: SizedRun, predicted: Forecast) -> dict[str, Any]:
    """Two micro-batches well below the predicted limit, and a third in case no line goes through the two."""
    chosen, share = predicted.size.rows, sized.cfg.train.effective_batch_size // sized.world_size
    if chosen >= 4:
        return {"rows": [chosen // 4, chosen // 2], "if_bent": chosen, "accumulates": True}
    two = forecast(predicted.setting, replace(predicted.size, rows=2))
    rows = [1, 2] if share > 1 and two.verdict != "does_not_fit" else [1]
    return {"rows": rows, "if_bent": None, "accumulates": share > 1}


def identity(sized: SizedRun, bench: Bench, *, request: dict[str, Any]) -> dict[str, Any]:
    """Everything that a measurement depends on, as JSON values."""
    assert sized.forecast is not None
    gpu, values = bench.gpu, values_that_decide_weights(sized.cfg)
    return {
        "kit": __version__,
        "model": asdict(sized.forecast.setting.shape),
        "config": {key: value for key, value in values.items() if not key.startswith(NO_MEMORY_KEYS)},
        "gpu": [gpu.name, gpu.total_bytes, *gpu.capability],
        "driver": bench.machine.driver,
        "libraries": bench.machine.libraries,
        "flags": {name: value for name, value in (gpu_environment() | os.environ).items() if name in FLAGS},
        "accumulates": request["accumulates"],
    }


def _measure(
    sized: SizedRun, request: dict[str, Any], *, bench: Bench, key: str, rehearse: Rehearse
) -> tuple[dict[str, Any], bool]:
    """The measurement, and whether it is a new one."""
    made: list[bool] = []

    def make(unfinished: Path) -> None:
        made.append(True)
        rows = " and ".join(map(str, request["rows"]))
        log.say(f"measuring a few steps with {rows} full rows on {bench.gpu.name}, once for runs like this", "probe")
        result = _rehearsed(sized, request, bench=bench, rehearse=rehearse)
        result["context_bytes"] = _context(result["device"], bench.gpu)
        write_text(unfinished / MEASURED, json.dumps(result))

    if sized.cfg.train.probe == "always":
        shutil.rmtree(CACHE / key, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = ensure_folder(CACHE / key, make)
    return json.loads((folder / MEASURED).read_text(encoding="utf-8")), bool(made)


def _rehearsed(sized: SizedRun, request: dict[str, Any], *, bench: Bench, rehearse: Rehearse) -> dict[str, Any]:
    """The measurement. It is repeated with fewer rows until there is a point.

    Raises:
        NoRoom: a single row ran out of memory.
    """
    measured = rehearse(sized, request, bench=bench)
    while not measured["points"] and (exhausted := measured["out_of_memory_rows"]):
        if exhausted == 1:
            raise NoRoom(
                f"one full row at a time ran out of memory on {bench.gpu.name}",
                where="train.probe",
                fix="see `make memory-check` (who holds it) and `make plan` (what fits); train.probe=off tries anyway",
            )
        measured = rehearse(sized, {**request, "rows": [max(1, exhausted // 4)], "if_bent": None}, bench=bench)
        measured["out_of_memory_rows"] = measured["out_of_memory_rows"] or exhausted
    return measured


def run_rehearsal(sized: SizedRun, request: dict[str, Any], *, bench: Bench) -> dict[str, Any]:
    """Rehearse in a separate process on the bench's GPU.

    Raises:
        RunError: it failed or took too long; its output is in the run's logs.
    """
    log_path = bench.log_folder / LOG
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="sftplay-probe-") as scratch,
        log_path.open("w", encoding="utf-8") as output,
    ):
        folder = Path(scratch)
        write_text(folder / "config.resolved.yaml", dump_resolved(sized.cfg))
        write_text(folder / REQUEST, json.dumps(request))
        argv, env = [sys.executable, "-m", STEP, str(folder)], _environment(sized.cfg, bench)
        try:
            completed = subprocess.run(argv, env=env, stdout=output, stderr=output, timeout=bench.limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"no answer within {bench.limit_s:g} s", where=str(log_path), fix="set train.probe=off"
            ) from None
        if completed.returncode or not (folder / MEASURED).is_file():
            output.flush()
            last_line = (log_path.read_text(encoding="utf-8", errors="replace").splitlines() or [""])[-1]
            what = f"it ended with code {completed.returncode} ({last_line[:200]}), see {log_path}"
            raise RunError(what, where=str(log_path), fix="set train.probe=off")
        content: dict[str, Any] = json.loads((folder / MEASURED).read_text(encoding="utf-8"))
        return content


def _environment(cfg: RunConfig, bench: Bench) -> dict[str, str]:
    """A worker's environment, with one visible GPU and unmarked lines."""
    env = {**os.environ, **quiet_environment(), **cache_environment(), **gpu_environment()}
    env.pop(FOLLOWED, None)
    if needs_no_hub(cfg):
        env |= offline_environment()
    uuid = bench.gpu.uuid if bench.machine.gpus else ""
    return {**env, "CUDA_VISIBLE_DEVICES": uuid} if uuid else env


def read_fit(measured: dict[str, Any], predicted: Forecast) -> Fit | NoFit:
    """The lines through the measured points. A single point gets the estimate's slopes.

    Where a larger micro-batch ran out of memory, the line is made steep enough to predict that.
    """
    exhausted = measured["out_of_memory_rows"]
    points = [Point(**point) for point in measured["points"]][-1 if exhausted else 0 :]
    one, two = (_estimated(predicted, rows, accumulates=measured["accumulates"]) for rows in (1, 2))
    low, high = ({name: sum(parts.values()) for name, parts in e.footprint.phases.items()} for e in (one, two))
    fitted = fit(points, {name: (high[name] - low[name]) / predicted.size.seq for name in low})
    if isinstance(fitted, NoFit):
        return fitted
    if exhausted:
        fitted = fitted.reaching(exhausted * predicted.size.seq, predicted.budget_bytes)
    return replace(fitted, accumulates=measured["accumulates"], context_bytes=measured["context_bytes"])


def _estimated(predicted: Forecast, rows: int, *, accumulates: bool) -> Forecast:
    """The estimate, without measurement, for micro-batches of `rows` rows on one process."""
    alone = replace(predicted.setting, fit=None, strategy="single", world_size=1)
    return forecast(alone, replace(predicted.size, rows=rows, accumulates=accumulates))


def _context(device: dict[str, int] | None, gpu: Gpu) -> int | None:
    """Device memory taken outside the allocator; None when other processes freed memory during the measurement."""
    if device is None:
        return None
    taken = gpu.free_bytes - device["free_bytes"] - device["reserved_bytes"]
    return taken if taken > 0 else None


def _sizes(sized: SizedRun) -> dict[str, Any]:
    predicted, train = sized.forecast, sized.cfg.train
    assert predicted is not None
    return {
        "batch_size": train.batch_size,
        "grad_accum": train.grad_accum,
        "peak_bytes": predicted.peak_bytes,
        "allocated_bytes": predicted.allocated_bytes,
        "verdict": predicted.verdict,
    }


def _print_measurement(record: dict[str, Any], fitted: Fit, *, predicted: Forecast) -> None:
    last = fitted.points[-1]
    estimated = _estimated(predicted, last.rows, accumulates=fitted.accumulates)
    line, error = fitted.lines[fitted.peak_phase], estimated.allocated_bytes / last.peak_bytes - 1
    source = (
        f"measured in {format_seconds(record['seconds'])}" if record["decision"] == "measured" else "measured before"
    )
    log.say(
        f"{source}: {format_bytes(line.fixed_bytes)} and {format_bytes(line.bytes_per_token)} a token; "
        f"{last.rows} rows took {format_bytes(last.peak_bytes)} (the estimate was {error:+.1%} off)",
        "probe",
    )
    before, after = record["before"], record["after"]
    if before["batch_size"] != after["batch_size"]:
        log.say(f"batch size {before['batch_size']} by the estimate, {after['batch_size']} by the probe", "probe")
