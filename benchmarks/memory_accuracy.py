"""Predicted against measured peak memory, over figures that others published.

    python benchmarks/memory_accuracy.py --csv FILE [--json]

A row is predicted from its method columns and its `harness`, never from its source, notes, place or measured value;
what a harness does is in `HARNESSES`, each fact with its public source. An unknown harness is taken to run
transformers' Trainer and PEFT as they come. Rows that the closed form does not model are counted with the reason.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sftplay.plan.memory.execution import Adapter, Execution, Optimizer
from sftplay.plan.memory.step import Size, estimate
from sftplay.plan.shape.find import find_shape
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.units import GIB

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Harness:
    """What a public measuring script does beyond what a row's columns say."""

    source: str
    targets: tuple[str, ...] | None = None
    """Linears with an adapter; None is all of them."""

    has_autocast: bool = True
    qlora_autocast: bool = True
    qlora_stream_bytes: tuple[int, ...] = (2,)
    """4 where PEFT's k-bit preparation made the norms, and with them the residual stream, fp32. Two values: the
    harness's table holds both paths, which its columns do not tell apart; the first is the one without its own code."""

    qlora_other_bytes: int = 2
    """Of embedding and head beside 4-bit weights: 4 where that preparation reached them too."""

    full_bytes: int = 2
    """Of a weight where everything trains."""

    double_quant: bool = True
    has_dropout: bool = False
    holds_scores: bool = False
    shifts_scores: bool = False
    repeats_kv: bool = False


HARNESSES: Mapping[str, Harness] = {
    # Weights in fp16 and no autocast; `labels=batch`, the output kept until backward has ended; AdamW without fused;
    # adapters on q, k, v, o; 4-bit bases through prepare_model_for_kbit_training, which makes every other weight fp32;
    # keys and values copied out to the heads (build_model, measure, _install_gqa_sdpa_shim). Where everything trains,
    # weights become fp32 first (build_optimizer).
    "fitcheck": Harness(
        source="github.com/Anassbzdd/fitcheck scripts/measure.py",
        targets=QKVO,
        has_autocast=False,
        qlora_autocast=False,
        qlora_stream_bytes=(4,),
        qlora_other_bytes=4,
        full_bytes=4,
        double_quant=False,
        holds_scores=True,
        repeats_kv=True,
    ),
    # torch_dtype float16, with autocast (fp16) for 4 bits only; q, k, v, o; dropout 0.1 (scenarios.yaml). Double
    # quantisation; TRL prepares the baseline on one device, and not the accelerated path (framework_plugin_bnb.py).
    # transformers of that time (4.45) copies the scores to shift them. The size after loading that the same table gives
    # leaves room for fp32 norms only, not for fp32 embeddings.
    "fms": Harness(
        source="github.com/foundation-model-stack/fms-acceleration scripts/benchmarks/scenarios.yaml, "
        "plugins/accelerated-peft/src/fms_acceleration_peft/framework_plugin_bnb.py",
        targets=QKVO,
        has_autocast=False,
        qlora_stream_bytes=(4, 2),
        has_dropout=True,
        shifts_scores=True,
    ),
    # bfloat16, use_amp false, the output kept in the loop (run.py, default_training_params.json); adapters where PEFT
    # puts them on a Llama by itself, q and v, except in experiments that say otherwise (`PEFT_TARGETS`).
    "peft-bench": Harness(
        source="github.com/huggingface/peft method_comparison/MetaMathQA",
        targets=("q_proj", "v_proj"),
        has_autocast=False,
        qlora_autocast=False,
        holds_scores=True,
    ),
}

GENERIC = Harness(source="transformers' Trainer with PEFT as they come: 16-bit base, autocast, all linears adapted")

PEFT_TARGETS: Mapping[str, tuple[str, ...] | None] = {
    # experiments/lora/llama-3.2-3B-rank10-target-mlp and -rank16-all-linear
    "10": ("gate_proj", "up_proj", "down_proj"),
    "16": None,
}

MODERN = ("fitcheck", "fms", "peft-bench")
"""Harnesses on today's libraries, for whose single-GPU dense rows the accuracy is promised."""

NAMES = {
    "qwen-1.8b": "Qwen/Qwen-1_8B",
    "qwen-1_8b-chat": "Qwen/Qwen-1_8B",
    "qwen-7b-chat": "Qwen/Qwen-7B",
    "qwen-14b-chat": "Qwen/Qwen-14B",
    "qwen-72b-chat": "Qwen/Qwen-72B",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
}
"""Spellings of the sources -> names on the hub."""

METHODS = ("full", "LoRA", "QLoRA", "DoRA", "LoRA-FA")
FOUR_BIT = ("nf4", "fp4", "bnb-4")


@dataclass(frozen=True)
class Judged:
    """One row: its columns, and either a prediction or why there is none."""

    row: Mapping[str, str]
    predicted_gib: float | None = None
    phase: str = ""
    excluded: str = ""

    @property
    def measured_gib(self) -> float:
        return float(self.row["peak_gb"])

    @property
    def error(self) -> float | None:
        """As a fraction of the measured value; None without a prediction."""
        return None if self.predicted_gib is None else self.predicted_gib / self.measured_gib - 1

    @property
    def counts(self) -> bool:
        return self.predicted_gib is not None and not self.excluded

    def as_dict(self) -> dict[str, Any]:
        names = ("harness", "source", "model", "method", "lora_r", "batch", "seq_len", "grad_ckpt", "attn", "gpu")
        shown = {name: self.row[name] for name in names}
        judged = {"measured": self.measured_gib, "predicted": self.predicted_gib, "error": self.error}
        return {**shown, "n_gpus": int(self.row["n_gpus"]), **judged, "phase": self.phase, "excluded": self.excluded}


def judge(rows: Sequence[Mapping[str, str]]) -> list[Judged]:
    """A prediction, or the reason why there is none, for each row."""
    alike = Counter(_columns(row) for row in rows)
    return [_judge(row, is_alone=alike[_columns(row)] == 1) for row in rows]


def _columns(row: Mapping[str, str]) -> tuple[str, ...]:
    """What a prediction may depend on."""
    hidden = ("source", "peak_gb", "notes", "params_b")
    return tuple(value for name, value in row.items() if name not in hidden)


def _judge(row: Mapping[str, str], *, is_alone: bool) -> Judged:
    shape = find_shape(NAMES.get(row["model"].lower(), row["model"]))
    if reason := _not_modelled(row, shape):
        return Judged(row, excluded=reason)
    assert shape is not None
    size = Size(rows=int(row["batch"]), seq=int(row["seq_len"].lstrip("<=")))
    found = [estimate(shape, execution, size=size) for execution in _executions(row)]
    fitting = [each for each in found if each.peak_bytes <= _card_bytes(row["gpu"])] or found[-1:]
    chosen = fitting[0]
    reason = "" if len(fitting) == 1 or is_alone else "its table holds two code paths under the same columns"
    if int(row["n_gpus"]) > 1:
        reason = "several GPUs"
    return Judged(row, chosen.peak_bytes / GIB, chosen.peak_phase, reason)


def _not_modelled(row: Mapping[str, str], shape: ModelShape | None) -> str:
    if shape is None:
        return "a model whose config.json is not in the table"
    if shape.experts:
        return "a mixture of experts"
    if row["method"] not in METHODS:
        return f"method {row['method']}"
    if row["method"] == "QLoRA" and not row["quant"].startswith(FOUR_BIT):
        return f"quantisation {row['quant']}"
    if int(row["n_gpus"]) > 1:
        return "several GPUs"
    return ""


def _card_bytes(gpu: str) -> float:
    """Memory of the card that a row names, as its maker counts it; endless where the name has no number."""
    sizes = [int(word[:-2]) for word in gpu.replace("-", " ").replace("/", " ").split() if word.endswith("GB")]
    return sizes[0] * 1e9 if sizes else float("inf")


def _executions(row: Mapping[str, str]) -> list[Execution]:
    """What may have run, the harness's own stock code first."""
    harness = HARNESSES.get(row["harness"], GENERIC)
    common = Execution(
        weight_bytes=2,
        compute_bytes=2,
        stream_bytes=2,
        checkpointing=row["grad_ckpt"] == "True",
        attention={"eager": "eager", "sdpa-efficient": "efficient"}.get(row["attn"], "flash"),  # type: ignore[arg-type]
        repeats_kv=harness.repeats_kv,
        holds_scores=harness.holds_scores,
        shifts_scores=harness.shifts_scores,
        optimizer=_optimizer(row["optimizer"]),
        is_foreach=_optimizer(row["optimizer"]) == "adamw",
    )
    if row["method"] == "full":
        wide = harness.full_bytes
        return [replace(common, weight_bytes=wide, compute_bytes=wide, stream_bytes=wide, logits_bytes=wide)]
    if row["method"] != "QLoRA":
        return [replace(common, has_autocast=harness.has_autocast, adapter=_adapter(row, harness))]
    return [
        replace(
            common,
            weight_bytes=harness.qlora_other_bytes,
            stream_bytes=stream,
            logits_bytes=harness.qlora_other_bytes,
            four_bit=True,
            double_quant=harness.double_quant and "no dq" not in row["quant"],
            has_autocast=harness.qlora_autocast,
            adapter=_adapter(row, harness),
        )
        for stream in harness.qlora_stream_bytes
    ]


def _adapter(row: Mapping[str, str], harness: Harness) -> Adapter:
    targets = harness.targets
    if row["harness"] == "peft-bench":
        targets = PEFT_TARGETS.get(row["lora_r"], targets)
    return Adapter(
        rank=int(row["lora_r"]), targets=targets, has_dropout=harness.has_dropout, is_dora=row["method"] == "DoRA"
    )


def _optimizer(name: str) -> Optimizer:
    words = name.lower()
    if "8bit" in words or "8-bit" in words:
        return "adamw_8bit"
    return "adafactor" if "adafactor" in words else "sgd" if words.startswith("sgd") else "adamw"


def summarise(judged: Sequence[Judged]) -> dict[str, Any]:
    """Count, mean, ninth decile and worst of the absolute errors, and the worst under-prediction."""
    errors = [each.error for each in judged if each.counts and each.error is not None]
    sizes = sorted(map(abs, errors))
    reasons = Counter(each.excluded for each in judged if each.excluded)
    figures: dict[str, Any] = {"n": len(errors), "excluded": sum(reasons.values()), "excluded_because": dict(reasons)}
    if not errors:
        return {**figures, "mean_abs": None, "p90_abs": None, "worst": None, "worst_under": None, "within_6": None}
    return {
        **figures,
        "mean_abs": sum(sizes) / len(sizes),
        "p90_abs": sizes[max(0, -(-9 * len(sizes) // 10) - 1)],
        "worst": max(errors, key=abs),
        "worst_under": min(0.0, *errors),
        "within_6": sum(size <= 0.06 for size in sizes) / len(sizes),
    }


def tables(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """`summary` by source, `methods` by harness and method, `modern` over the rows for which accuracy is promised."""

    def by(key: Any) -> dict[str, Any]:
        names = dict.fromkeys(key(each.row) for each in judged)
        return {name: summarise([each for each in judged if key(each.row) == name]) for name in names}

    modern = [each for each in judged if each.row["harness"] in MODERN]
    return {
        "summary": by(lambda row: row["source"]),
        "methods": by(lambda row: f"{row['harness']} {row['method']}"),
        "modern": summarise(modern),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--csv", required=True, help="measured rows; columns as in shared/data/memory")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    args = parser.parse_args(argv)
    with open(args.csv, encoding="utf-8", newline="") as file:
        judged = judge(list(csv.DictReader(file)))
    found = tables(judged)
    if args.json:
        print(json.dumps({"rows": [each.as_dict() for each in judged], **found}, indent=1))
        return 0
    for each in judged:
        print(_line(each))
    for title in ("summary", "methods"):
        print(f"\n{title}: rows, excluded, mean |error|, 90 % within, worst")
        for name, figures in found[title].items():
            print(f"  {_figures(figures)}  {name}")
    modern = found["modern"]
    under = f"worst under {modern['worst_under']:+.1%}" if modern["n"] else ""
    print(f"\nmodern single-GPU dense rows\n  {_figures(modern)}  {under}")
    return 0


def _line(each: Judged) -> str:
    row = each.row
    what = f"{row['harness']:13.13} {row['model']:28.28} {row['method']:7.7} {row['batch']:>3} x {row['seq_len']:<6}"
    if each.predicted_gib is None:
        return f"{what} measured {each.measured_gib:7.2f}  not predicted: {each.excluded}"
    note = f"  (not counted: {each.excluded})" if each.excluded else ""
    return f"{what} measured {each.measured_gib:7.2f} predicted {each.predicted_gib:7.2f} {each.error:+7.1%}{note}"


def _figures(figures: Mapping[str, Any]) -> str:
    if not figures["n"]:
        return f"{0:3} {figures['excluded']:3}       -       -       -"
    return (
        f"{figures['n']:3} {figures['excluded']:3} {figures['mean_abs']:7.2%} {figures['p90_abs']:7.2%} "
        f"{figures['worst']:+7.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
