"""Speed: tokens a second and MFU of random models of public shapes, beside a plain TRL script of the same settings."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from sftplay.atomic import read_lines, write_text
from sftplay.control.gpu_check.frame.check import Broken, Check, NotPossible, Place, a_gpu
from sftplay.control.gpu_check.frame.kit import run_script, train
from sftplay.control.gpu_check.runs import a_bf16_gpu

PUBLISHED = "12,473 tokens/s published (NeMo Automodel, one H100)"
"""Of Llama 3 8B with LoRA r 16 on all projections, sequence 4096, micro-batch 2, global batch 32, mock data."""

LEAST_RATIO = 0.95
"""Of TRL's tokens a second, what the kit must reach."""

LEAST_PADDED = 0.5
"""Of the packed rows' tokens a second. A guess until a card has shown it."""


def beside_trl(place: Place, *, case: str, published: str = "") -> str:
    """Steps of full rows by the kit and by TRL, each in a process of its own."""
    found = {who: measure(place, case=case, who=who) for who in ("ours", "trl")}
    place.details.update(found)
    return judge(found["ours"], found["trl"], published=published)


def measure(place: Place, *, case: str, who: str) -> dict[str, Any]:
    """What benchmarks/gpu_speed.py measured of one contestant."""
    target = place.folder / f"{who}.json"
    run_script("gpu_speed.py", "--case", case, "--contestant", who, "--out", str(target))
    content: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    if content.get("does_not_fit"):
        raise NotPossible(f"the card is too small: {content['does_not_fit']}")
    return content


def judge(ours: dict[str, Any], trl: dict[str, Any], *, published: str) -> str:
    """The figure.

    Raises:
        Broken: the kit is slower than TRL, or the two did not train on the same.
    """
    ratio = ours["tokens_per_s"] / trl["tokens_per_s"]
    mfu = f", MFU {ours['mfu']:.1%}" if ours["mfu"] is not None else ""
    told = (
        f"{ours['tokens_per_s']:,.0f} tokens/s{mfu}, {ratio:.2f} of plain TRL's {trl['tokens_per_s']:,.0f}"
        f"; checkpointing {'on' if ours['gradient_checkpointing'] else 'off'}"
    )
    told += f"; {published}" if published else ""
    if abs(ours["losses"][0] / trl["losses"][0] - 1) > 0.01:
        raise Broken(f"{told}; the first losses differ: {ours['losses'][0]:.4f} and {trl['losses'][0]:.4f}")
    if ratio < LEAST_RATIO:
        raise Broken(f"{told}; at least {LEAST_RATIO} is expected")
    return told


def padded_beside_packed(place: Place) -> str:
    """Rows of uneven lengths: tokens a second with padding left out, beside the same rows packed."""
    model, rows = place.folder / "model", place.folder / "uneven.jsonl"
    run_script("gpu_sizing.py", "--make", "meta-llama/Llama-3.2-1B", str(model))
    texts = (" ".join(f"word{(n * word) % 97}" for word in range(8 + (n * 37) % 240)) for n in range(192))
    write_text(rows, "".join(json.dumps({"text": text}) + "\n" for text in texts))
    speeds = {}
    for name, packs in (("padded", False), ("packed", True)):
        values = {
            "model.name": str(model), "model.max_seq_len": 1024, "data.train_path": str(rows), "train.packing": packs,
            "train.precision": "bf16", "train.batch_size": "auto", "train.effective_batch_size": 32,
            "train.max_steps": 6, "train.learning_rate": 1e-4,
        }  # fmt: skip
        run = train(place, name, values=values)
        lines = read_lines(run.folder.metrics)[0][2:]  # kernels are chosen in the first steps
        speeds[name] = sum(line["tokens_per_s"] for line in lines) / len(lines)
    place.details.update(speeds)
    ratio = speeds["padded"] / speeds["packed"]
    told = f"{speeds['padded']:,.0f} tokens/s padded, {speeds['packed']:,.0f} packed ({ratio:.2f})"
    if ratio < LEAST_PADDED:
        raise Broken(f"{told}; at least {LEAST_PADDED} is expected")
    return told


CHECKS = (
    Check(
        name="speed: 8B shape, LoRA",
        run=partial(beside_trl, case="llama-8b-lora", published=PUBLISHED),
        needs=a_gpu,
        limit_s=1800,
        is_long=True,
    ),
    Check(
        name="speed: 1B shape, QLoRA",
        run=partial(beside_trl, case="llama-1b-qlora"),
        needs=a_gpu,
        limit_s=1800,
        is_long=True,
    ),
    Check(
        name="speed: padded rows beside packed",
        run=padded_beside_packed,
        needs=a_bf16_gpu,
        limit_s=1800,
        is_long=True,
    ),
)
