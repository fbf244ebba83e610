"""Speed: tokens a second and MFU of random models of public shapes, and of plain TRL with the same settings."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from sftplay.atomic import read_lines
from sftplay.runs.gpu_check.check import (
    Broken,
    Check,
    CheckContext,
    NotPossible,
    a_gpu,
    random_model,
    run_script,
    train,
)

PUBLISHED = "12,473 tokens/s published (NeMo Automodel, one H100)"
"""Of Llama 3 8B with LoRA r 16 on all projections, sequence 4096, micro-batch 2, global batch 32, mock data."""

SHAPE = "Qwen/Qwen2.5-0.5B"


def compare_with_trl(context: CheckContext, *, case: str, published: str = "") -> str:
    """Steps of full rows by the kit and by TRL, each in a separate process."""
    found = {who: measure(context, case=case, who=who) for who in ("ours", "trl")}
    context.details.update(found)
    return judge(found["ours"], found["trl"], published=published)


def measure(context: CheckContext, *, case: str, who: str) -> dict[str, Any]:
    """Return what benchmarks/gpu_speed.py measured of one contestant."""
    target = context.folder / f"{who}.json"
    run_script("gpu_speed.py", "--case", case, "--contestant", who, "--out", str(target))
    content: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    if content.get("does_not_fit"):
        raise NotPossible(f"the card is too small: {content['does_not_fit']}")
    return content


def judge(ours: dict[str, Any], trl: dict[str, Any], *, published: str) -> str:
    """Return the figure, or raise Broken where the kit is slower than TRL or the two did not train on the same."""
    ratio = ours["tokens_per_s"] / trl["tokens_per_s"]
    mfu = f", MFU {ours['mfu']:.1%}" if ours["mfu"] is not None else ""
    figure = (
        f"{ours['tokens_per_s']:,.0f} tokens/s{mfu}, {ratio:.2f} of plain TRL's {trl['tokens_per_s']:,.0f}"
        f"; checkpointing {'on' if ours['gradient_checkpointing'] else 'off'}"
    )
    figure += f"; {published}" if published else ""
    if abs(ours["losses"][0] / trl["losses"][0] - 1) > 0.01:
        raise Broken(f"{figure}; the first losses differ: {ours['losses'][0]:.4f} and {trl['losses'][0]:.4f}")
    if ratio < 0.95:
        raise Broken(f"{figure}; at least 0.95 is expected")
    return figure


def compare_packing(context: CheckContext) -> str:
    """Tokens a second of a LoRA run on the demo's rows, padded and packed; padding is not counted."""
    model, speeds = str(random_model(context, SHAPE)), {}
    for name, packs in (("padded", False), ("packed", True)):
        values = {"model.name": model, "train.packing": packs, "train.learning_rate": 1e-4}
        lines = read_lines(train(context, name, values=values).folder.metrics)[0]
        speeds[name] = [line["tokens_per_s"] for line in lines]
    context.details.update(speeds)
    padded, packed = (sorted(speeds[name])[len(speeds[name]) // 2] for name in ("padded", "packed"))
    return f"{padded:,.0f} tokens/s padded, {packed:,.0f} packed, of the shape {SHAPE}"


CHECKS = (
    Check(name="speed: padded rows against packed", run=compare_packing, needs=a_gpu),
    *(
        Check(name=name, run=run, needs=a_gpu, limit_s=1800, is_long=True)
        for name, run in (
            ("speed: 8B shape, LoRA", partial(compare_with_trl, case="llama-8b-lora", published=PUBLISHED)),
            ("speed: 1B shape, QLoRA", partial(compare_with_trl, case="llama-1b-qlora")),
        )
    ),
)
