"""Runs on the built-in tiny model: they learn in every precision and mode, and as well with any kernel."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from sftplay.atomic import read_lines, read_object
from sftplay.machine.probe import Machine
from sftplay.places import shipped
from sftplay.runs.gpu_check.check import (
    NEEDS_GPU,
    Broken,
    Check,
    CheckContext,
    Run,
    Values,
    a_gpu,
    learned,
    losses_apart,
    random_model,
    shared_run,
    train,
)
from sftplay.units import format_bytes

BOUNDS = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 5e-2}
"""How far the first losses may be from those of the same run on a CPU in fp32, as a share."""


LEAST_FALL = 0.2
"""The share by which the loss of the last steps must be below that of the first."""


LEAST_EXACT_MATCH = 0.5
"""What the demo reaches on a CPU is about 0.97; the untrained model answers nothing right."""


LEAST_RISE = 0.3
"""Of the sampled rewards: on a CPU they rise from 0.28 to 1 within six steps."""


def learns(context: CheckContext, *, mode: str, precision: str) -> str:
    """The loss falls; on a GPU it begins as on a CPU."""
    losses = learned(context, mode=mode, precision=precision).losses
    context.details["losses"] = losses
    fall = 1 - sum(losses[-3:]) / sum(losses[:3])
    figure = f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
    if not fall >= LEAST_FALL:
        raise Broken(f"{figure} in {len(losses)} steps: it does not fall by {LEAST_FALL:.0%}")
    if not context.has_gpu:
        return figure
    count = 1 if precision == "fp16" else 3  # in fp16 the loss scale may skip the first steps
    on_cpu = learned(context, mode=mode, precision="fp32", on_cpu=True).losses
    context.details["losses_cpu"] = on_cpu
    apart = losses_apart(losses[:count], on_cpu[:count])
    if not apart <= BOUNDS[precision]:
        raise Broken(f"{figure}; the first {count} are {apart:.2%} from the CPU's, more than {BOUNDS[precision]:.1%}")
    return f"{figure}; first {count} within {apart:.3%} of the CPU's"


def same_with(context: CheckContext, *, changes: Values, precision: str, other: Values | None = None) -> str:
    """A LoRA run with other kernels has the losses of the run without them, or of the run with `other` values."""

    def run(values: Values) -> Run:
        name = f"run-{len(list(context.folder.glob('*.yaml')))}"
        return train(context, name, values={"model.attn": "sdpa", "train.packing": False, **values})

    usual = learned(context, mode="lora", precision=precision) if other is None else run(other)
    changed = run({"train.precision": precision, **changes})
    context.details.update(losses=changed.losses, losses_beside=usual.losses)
    first, worst = losses_apart(changed.losses[:1], usual.losses[:1]), losses_apart(changed.losses, usual.losses)
    figure = f"the first loss within {first:.2g} as a share, all within {worst:.2g}"
    # For the first loss and for all: steps of Adam enlarge what rounding has begun.
    bounds = (1e-4, 1e-3) if precision == "fp32" else (5e-3, 5e-2)
    if not (first <= bounds[0] and worst <= bounds[1]):
        raise Broken(f"{figure}; the bounds are {bounds[0]:g} and {bounds[1]:g}")
    return figure


def grouped_heads(context: CheckContext, *, precision: str = "fp16") -> str:
    """A model with fewer heads of keys than of queries, one row at a time and so without a mask: sdpa is right there.

    Before Ampere and in fp32 only torch's plain kernel takes such heads as they are, with heads x tokens^2 scores.
    """
    model = random_model(context, "tiny")
    one_row: Values = {"model.name": str(model), "train.batch_size": 1, "train.precision": precision}
    eager = {**one_row, "model.attn": "eager"}
    return same_with(context, changes={**one_row, "model.attn": "sdpa"}, precision=precision, other=eager)


def scores_not_written(_context: CheckContext) -> str:
    """Fewer heads of keys than of queries and one long row without a mask, in fp16: attention holds no scores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from sftplay.model.weights import repeat_shared_keys

    repeat_shared_keys()
    heads, tokens = 16, 4096
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=heads, vocab_size=256,
        num_key_value_heads=2, max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to("cuda", torch.float16)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(ids[:, :64])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(ids)
    held, scores = torch.cuda.max_memory_allocated() - before, 2 * heads * tokens**2
    figure = f"{format_bytes(held)} for {tokens:,} tokens; scores alone would be {format_bytes(scores)}"
    if held > 0.5 * scores:  # a fused kernel holds none
        raise Broken(figure)
    return figure


def measured_before(context: CheckContext) -> str:
    """Full tuning with the kernels and the precision that are chosen here: held-out rows are measured before it."""
    measured: Values = {"eval.before": True, "eval.after": True, "eval.limit": 8, "eval.max_new_tokens": 4}
    run = train(context, "measured", values={"tuning.mode": "full", "data.split": 0.1, **measured})
    before, after = (read_object(run.folder.eval / f"{name}.json")["loss"] for name in ("before", "after"))
    figure = f"held-out loss {before:.3f} before, {after:.3f} after"
    if not after < before:
        raise Broken(f"{figure}: it does not fall")
    return figure


def exact_match_rises(context: CheckContext) -> str:
    """The demo's run: answers that were all wrong are mostly right."""
    values = {
        "data.train_path": str(shipped("data/demo/train.jsonl")),
        "data.val_path": str(shipped("data/demo/held_out.jsonl")),
        "data.split": None,
        "tuning.lora.r": 32,
        "train.max_steps": 1000,
        "train.warmup_ratio": 0.05,
        "eval.before": True,
        "eval.after": True,
        "eval.limit": None,
        "eval.max_new_tokens": 48,
    }
    run = shared_run(context, "demo", values=values)
    before, after = (read_object(run.folder.eval / f"{name}.json")["exact_match"] for name in ("before", "after"))
    figure = f"exact match {before:.3f} to {after:.3f} in {run.status['train_seconds']:.0f} s of training"
    if not after >= LEAST_EXACT_MATCH > before:
        raise Broken(f"{figure}; {LEAST_EXACT_MATCH} is expected")
    return figure


def rewards_rise(context: CheckContext) -> str:
    """Task grpo: sampled answers get the digit that is paid for, full tuning, eight answers to a question."""
    values: Values = {
        "task_mode": "grpo",
        "tuning.mode": "full",
        "rewards": [{"name": "digit", "use": "regex", "options": {"pattern": "[0-9]", "whole": False}}],
        "grpo.num_generations": 8,
        "grpo.max_completion_length": 8,
        "grpo.logprob_check_steps": 1,
        "train.max_steps": 8,
        "train.effective_batch_size": 64,
        "train.batch_size": 32,
        "train.learning_rate": 3e-4,
        "train.lr_scheduler": "constant",
    }
    lines = read_lines(train(context, "rewards", values=values).folder.metrics)[0]
    rewards = [line["reward"] for line in lines]
    context.details.update(rewards=rewards, sampler_gap=[line["sampler_gap"] for line in lines])
    before, after = rewards[0], sum(rewards[-3:]) / 3
    figure = f"reward {before:.2f} to {after:.2f}, sampler within {max(line['sampler_gap'] for line in lines):.1g}"
    if not after - before >= LEAST_RISE:
        raise Broken(f"{figure}: it does not rise by {LEAST_RISE}")
    return figure


def a_bf16_gpu(machine: Machine) -> str:
    if not machine.gpus:
        return NEEDS_GPU
    return "" if all(gpu.has_bf16 for gpu in machine.gpus) else "needs a GPU with bf16, of Ampere or later"


def a_bf16_gpu_with(package: str, machine: Machine) -> str:
    return a_bf16_gpu(machine) or ("" if find_spec(package.replace("-", "_")) else f"needs the package {package}")


flash_attention, liger = partial(a_bf16_gpu_with, "flash-attn"), partial(a_bf16_gpu_with, "liger-kernel")


FLASH: Values = {"model.attn": "flash_attention_2"}

CHECKS = (
    *(
        Check(name=f"run: {precision} {mode}", run=partial(learns, mode=mode, precision=precision), needs=needs)
        for precision, needs in (("fp32", lambda _: ""), ("bf16", a_bf16_gpu), ("fp16", a_gpu))
        for mode in ("full", "lora", "qlora")
    ),
    Check(
        name="run: exact match rises",
        run=exact_match_rises,
        needs=lambda machine: a_gpu(machine) and f"{NEEDS_GPU}; on a CPU `make demo` shows it, in minutes",
    ),
    Check(name="run: rewards rise", run=rewards_rise),
    Check(name="run: grouped heads without a mask in fp16", run=grouped_heads, needs=a_gpu),
    Check(name="run: grouped heads hold no scores in fp16", run=scores_not_written, needs=a_gpu),
    Check(name="run: measured before full tuning", run=measured_before),
    Check(name="run: eager against sdpa", run=partial(same_with, changes={"model.attn": "eager"}, precision="fp32")),
    Check(
        name="run: flash attention against sdpa",
        run=partial(same_with, changes=FLASH, precision="bf16"),
        needs=flash_attention,
    ),
    Check(
        name="run: packed by varlen kernels against padded",
        run=partial(
            same_with,
            changes={**FLASH, "train.packing": True},
            precision="bf16",
            other={**FLASH, "train.precision": "bf16"},
        ),
        needs=flash_attention,
    ),
    Check(
        name="run: liger against the standard loss head",
        run=partial(same_with, changes={"train.loss_head": "liger"}, precision="bf16"),
        needs=liger,
    ),
)
