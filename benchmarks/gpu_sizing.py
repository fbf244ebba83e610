"""What the plan foretells and what a GPU then holds, and how fast the chosen batch is beside all others.

    make bench-gpu ARGS="[--configs N] [--quick] [--out DIR]"

Models have the shapes of public ones and random weights; each config is sized as `make train` would size it, probe
included, then the run's own trainer takes steps on rows of full length. Every config works in processes of its own with
a time limit, so that one that dies is a row of the table and not the end. Without a GPU tiny shapes take the same way:
allocated is then what live tensors hold, since a CPU's allocator keeps no count, and there is nothing reserved.

Leaves gpu_sizing.json and, for docs/benchmarks.md, gpu_sizing.md in `--out`, both whole after every config.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
"""Holds `oracle`, whose gauges measure without a GPU."""

sys.path.insert(0, str(ROOT))

from benchmarks.gpu_sizing_table import as_line, as_markdown, summarise  # noqa: E402
from sftplay.atomic import write_text  # noqa: E402
from sftplay.config.load import load_config  # noqa: E402
from sftplay.config.run import RunConfig  # noqa: E402
from sftplay.errors import SftplayError  # noqa: E402
from sftplay.machine.probe import Machine, probe  # noqa: E402
from sftplay.plan.find_shape import find_shape, read_table  # noqa: E402
from sftplay.plan.forecast import RUNTIME, Forecast, forecast  # noqa: E402
from sftplay.plan.sizing import PLATEAU_TOKENS, SizedRun, size_run  # noqa: E402
from sftplay.runs.memory_probe import ProbeTarget, run_probe, size_by_probe  # noqa: E402

TINY = "tiny"
TINY_CONFIG = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One config: a model of the shipped table, what is tuned, tokens a row, and rows a step."""

    model: str
    mode: str
    tokens: int
    effective: int


GPU_CASES = (
    Case("HuggingFaceTB/SmolLM2-135M", "full", 512, 256),
    Case("HuggingFaceTB/SmolLM2-135M", "lora", 8192, 32),
    Case("EleutherAI/pythia-410m", "full", 2048, 64),
    Case("Qwen/Qwen2.5-0.5B", "full", 1024, 128),
    Case("Qwen/Qwen2.5-0.5B", "lora", 512, 256),
    Case("Qwen/Qwen2.5-1.5B", "full", 2048, 64),
    Case("Qwen/Qwen2.5-1.5B", "qlora", 4096, 32),
    Case("google/gemma-2-2b", "lora", 2048, 48),
    Case("Qwen/Qwen2.5-3B", "full", 1024, 64),
    Case("Qwen/Qwen2.5-3B", "lora", 4096, 32),
    Case("Qwen/Qwen2.5-7B", "lora", 2048, 48),
    Case("Qwen/Qwen2.5-7B", "qlora", 8192, 16),
    Case("meta-llama/Llama-3.1-8B", "lora", 8192, 16),
    Case("meta-llama/Llama-3.1-8B", "qlora", 512, 128),
    Case("Qwen/Qwen2.5-14B", "lora", 2048, 32),
    Case("Qwen/Qwen2.5-14B", "qlora", 4096, 16),
)
"""Of a model one after the other: its weights are made once."""

CPU_CASES = (Case(TINY, "full", 64, 8), Case(TINY, "lora", 128, 8), Case(TINY, "qlora", 128, 6))


def main(argv: list[str] | None = None) -> int:
    """Measure every config and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--configs", type=int, default=None, help="only the first so many")
    parser.add_argument(
        "--quick", action="store_true", help="sweep half, chosen and twice the batch only, one step each"
    )
    parser.add_argument("--out", type=Path, default=Path("outputs") / "bench")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for each process of a config")
    parser.add_argument("--make", nargs=2, metavar=("MODEL", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.make:
        make_model(options.make[0], Path(options.make[1]))
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    machine, began = probe(), time.time()
    cases = (GPU_CASES if machine.gpus else CPU_CASES)[: options.configs]
    rows: list[dict[str, Any]] = []
    markdown = write_tables(rows, options.out, machine=machine, began=began)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as scratch:
        for number, case in enumerate(cases):
            place = Place(machine, Path(scratch), options)
            rows.append(row := measure_case(case, place))
            print(f"{number + 1}/{len(cases)}  {as_line(row)}", file=sys.stderr, flush=True)
            markdown = write_tables(rows, options.out, machine=machine, began=began)
            if case.model not in [later.model for later in cases[number + 1 :]]:
                shutil.rmtree(place.folder_of(case.model), ignore_errors=True)
    print(markdown)
    return 0


def write_tables(rows: list[dict[str, Any]], out: Path, *, machine: Machine, began: float) -> str:
    """Write both files with the rows so far; the table in Markdown."""
    report = {"machine": describe(machine), "seconds": round(time.time() - began), "summary": summarise(rows)}
    markdown = as_markdown(report, rows)
    write_text(out / "gpu_sizing.json", json.dumps({**report, "rows": rows}, indent=1) + "\n")
    write_text(out / "gpu_sizing.md", markdown)
    return markdown


@dataclass(frozen=True)
class Place:
    """Where configs are measured."""

    machine: Machine
    scratch: Path
    options: argparse.Namespace

    def folder_of(self, model: str) -> Path:
        return self.scratch / "models" / model.replace("/", "--")

    @property
    def target(self) -> ProbeTarget:
        return ProbeTarget(self.machine, 1, self.scratch, self.options.limit_s)

    def gauge(self, without_gpu: str) -> dict[str, str]:
        """Part of a request: the rehearsal's own gauge on a GPU, else the tests' gauge of that name."""
        return {} if self.machine.gpus else {"gauge": f"oracle.memory_gauges:{without_gpu}"}


def make_model(name: str, folder: Path) -> None:
    """Save a model of the shape `name` with random 16-bit weights, and a tokenizer of few words."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from sftplay.model.builtin import TEXT_DIR

    entry = dict(TINY_CONFIG if name == TINY else read_table()[name])
    kind = entry.pop("model_type")
    config = AutoConfig.for_model(kind, **entry)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    unfinished = folder.with_suffix(".unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(TEXT_DIR / "tiny").save_pretrained(unfinished)
    unfinished.rename(folder)


def ensure_model(name: str, place: Place) -> Path:
    """The folder of a model, made in a process of its own when it is not there."""
    folder = place.folder_of(name)
    if not folder.is_dir():
        argv = [sys.executable, __file__, "--make", name, str(folder)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=place.options.limit_s, check=False)
        if done.returncode:
            raise RuntimeError(f"the model was not made: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return folder


def measure_case(case: Case, place: Place) -> dict[str, Any]:
    """One row of the table; with `error` where the config died, and what was known until then."""
    row: dict[str, Any] = {**asdict(case), "error": None}
    try:
        cfg = config_of(case, ensure_model(case.model, place), place.scratch)
        shape = find_shape(cfg.model.name)

        def size(fit: Any = None) -> SizedRun:
            return size_run(cfg, place.machine, shape=shape, fit=fit)

        estimated = size()
        sized, record = size_by_probe(estimated, place.target, resize=size)
        row |= {"probe": record["decision"], "probe_seconds": record.get("seconds")}
        row |= foretold(estimated, sized)
        row |= hold(sized, place)
        row |= sweep(sized, place)
    except (SftplayError, RuntimeError, subprocess.TimeoutExpired) as error:
        row["error"] = " ".join(str(error).split())[:300]
    return row


def config_of(case: Case, model: Path, scratch: Path) -> RunConfig:
    """The config of a case as a user would write it; its data is never read."""
    values = {
        "model": {"name": str(model), "max_seq_len": case.tokens},
        "tuning": {"mode": case.mode},
        "train": {"effective_batch_size": case.effective, "probe": "always"},
        "data": {"train_path": str(scratch / "unread.jsonl")},
    }
    path = scratch / "run.yaml"
    path.write_text(json.dumps(values))
    return load_config(path)


def foretold(estimated: SizedRun, sized: SizedRun) -> dict[str, Any]:
    """What the estimate alone and, after the probe, the plan say of the batch that was chosen."""
    plain, seen = estimated.forecast, sized.forecast
    assert plain is not None
    assert seen is not None
    alone = forecast(plain.setting, seen.size)
    return {
        "estimated_rows": plain.size.rows,
        "rows": sized.cfg.train.batch_size,
        "accum": sized.cfg.train.grad_accum,
        "verdict": seen.verdict,
        "peak_phase": seen.peak_phase,
        "budget_bytes": seen.budget_bytes,
        "total_bytes": seen.setting.device.total_bytes,
        "estimated_allocated_bytes": countable(alone),
        "predicted_allocated_bytes": countable(seen),
        "predicted_process_bytes": seen.allocated_bytes + seen.components[RUNTIME],
    }


def countable(seen: Forecast) -> int:
    """Of a forecast, what the gauge can see: without a GPU there is no workspace of cuBLAS."""
    return seen.allocated_bytes - (0 if seen.setting.device.is_gpu else seen.components["workspace"])


def hold(sized: SizedRun, place: Place) -> dict[str, Any]:
    """What the chosen batch takes, in a fresh process."""
    rows, accum = int(sized.cfg.train.batch_size), int(sized.cfg.train.grad_accum)
    request = {"rows": [rows], "accumulates": accum > 1, "repeats": 2, **place.gauge("TensorGauge")}
    found = run_probe(sized, request, target=place.target)
    if not found["points"]:
        return {"out_of_memory": True}
    point, device = found["points"][0], found["device"]
    process = None
    if device is not None:
        # The device is read after the cache was released; the most that the allocator held was read before that.
        beside = place.target.gpu.free_bytes - device["free_bytes"] - device["reserved_bytes"]
        process = beside + (point["reserved_bytes"] or 0)
    return {
        "out_of_memory": False,
        "allocated_bytes": max(point["peaks_bytes"].values()),
        "peaks_bytes": point["peaks_bytes"],
        "reserved_bytes": point["reserved_bytes"],
        "process_bytes": process,
    }


def sweep(sized: SizedRun, place: Place) -> dict[str, Any]:
    """Tokens a second of every batch that divides the step's rows, up to the first that runs out of memory."""
    chosen, share = int(sized.cfg.train.batch_size), sized.cfg.train.effective_batch_size
    most = 2 * max(chosen, PLATEAU_TOKENS // sized.cfg.model.max_seq_len)
    sizes = [n for n in range(1, share + 1) if share % n == 0 and n <= most]
    if place.options.quick:
        at = sizes.index(chosen)
        sizes = sizes[max(0, at - 1) : at + 2]
    # A step of two micro-batches even where the run has one: all sizes then do the same besides the batch.
    request = {"rows": sizes, "repeats": 1 if place.options.quick else 3, **place.gauge("ProcessGauge")}
    found = run_probe(sized, request, target=place.target)
    speeds = {str(p["rows"]): round(2 * p["tokens"] / p["seconds"], 1) for p in found["points"]}
    best = max(speeds, key=lambda rows: speeds[rows], default=None)
    relative = speeds[str(chosen)] / speeds[best] if best and str(chosen) in speeds else None
    return {
        "tokens_per_s": speeds,
        "best_rows": best and int(best),
        "speed_of_best": relative,
        "sweep_out_of_memory_rows": found["out_of_memory_rows"],
    }


def describe(machine: Machine) -> dict[str, Any]:
    libraries = {name: machine.libraries.get(name) for name in ("torch", "transformers", "trl", "peft", "bitsandbytes")}
    device = ", ".join(gpu.name for gpu in machine.gpus) or f"no GPU ({machine.cores} CPU cores)"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "driver": machine.driver,
        "python": platform.python_version(),
        "libraries": libraries,
        "alloc_conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF"),
        "allocated_is": "torch's allocator" if machine.gpus else "live tensors; no allocator counts on a CPU",
    }


if __name__ == "__main__":
    raise SystemExit(main())
