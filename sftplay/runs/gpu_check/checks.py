"""The checks of `make gpu-check`, and at the end their table in the order in which they run."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

from sftplay.atomic import read_lines, read_object
from sftplay.launch.checkpoints import newest_complete
from sftplay.launch.command import gpu_environment
from sftplay.launch.run_folder import OUT_OF_MEMORY
from sftplay.machine.gpu_info import holders, label
from sftplay.machine.ports import free_port
from sftplay.machine.probe import Machine, probe
from sftplay.places import shipped
from sftplay.plan.find_shape import read_table
from sftplay.plan.shape_from_config import shape_from_config
from sftplay.runs.gpu_check.check import (
    NO_GPU,
    PLAIN,
    STEPS,
    Broken,
    Check,
    CheckContext,
    NotPossible,
    Run,
    Values,
    call,
    expect,
    learned,
    losses_apart,
    random_model,
    run_script,
    shared_run,
    train,
    weights_apart,
    write_run,
)
from sftplay.runs.gpu_check.fault import environment
from sftplay.units import format_bytes

# facts


def driver_and_torch(context: CheckContext) -> str:
    """Number, names, memory, capability, MIG and peer access agree, and this build of torch has code for each card."""
    os.environ.update(gpu_environment())  # torch then numbers the GPUs as the driver does
    import torch

    machine, count = probe(in_detail=True), torch.cuda.device_count()
    context.details["machine"] = machine.as_dict()
    if not machine.gpus:
        if torch.cuda.is_available():
            raise Broken(f"torch sees {count} GPUs, the driver none: {machine.gpu_reason}")
        return f"no GPU, says torch {torch.__version__} too: {machine.gpu_reason}"
    if count != len(machine.gpus):
        raise Broken(f"torch sees {count} GPUs, the driver {len(machine.gpus)}")
    by_torch = [torch.cuda.get_device_properties(gpu.index) for gpu in machine.gpus]
    if found := list_differences(machine, by_torch, can_access=torch.cuda.can_device_access_peer):
        raise Broken("; ".join(found))
    kinds = ", ".join(
        f"{gpu.name}{' (MIG)' if gpu.is_mig else ''} {format_bytes(gpu.total_bytes)}, capability "
        f"{gpu.capability[0]}.{gpu.capability[1]}"
        for gpu in machine.gpus
    )
    return f"{kinds}; torch {torch.__version__} says the same"


def list_differences(machine: Machine, by_torch: list[Any], *, can_access: Any) -> list[str]:
    """List where torch's properties of the devices and their access to each other's memory differ from the driver's,
    and the devices that this build of torch has no code for.
    """
    odd, build = [], machine.torch
    for gpu, seen in zip(machine.gpus, by_torch, strict=True):
        if (seen.major, seen.minor) != gpu.capability:
            by_name = f"capability {seen.major}.{seen.minor} by torch, {gpu.capability} by the driver"
            odd.append(f"GPU {gpu.index}: {by_name}")
        # The driver may keep 3 % of a card's memory from torch, and torch may see 1 % more.
        if not 0.97 * gpu.total_bytes <= seen.total_memory <= 1.01 * gpu.total_bytes:
            sizes = f"{format_bytes(seen.total_memory)} by torch, {format_bytes(gpu.total_bytes)} by the driver"
            odd.append(f"GPU {gpu.index}: {sizes}")
        if build and build.runs_on(gpu.capability) is False:
            odd.append(f"GPU {gpu.index}: torch was built for {' '.join(build.archs)} only")
    return odd + [
        f"GPUs {a} and {b}: torch and the driver differ about peer access"
        for a, b in combinations(range(len(machine.gpus)), 2)
        if bool(can_access(a, b)) == ((a, b) in machine.without_peer_access)
    ]


def other_users(_context: CheckContext) -> str:
    """Who else holds the GPUs' memory: figures of speed and memory mean little then. It never fails."""
    return "; ".join(
        f"GPU {gpu.index}: {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free, in use by "
        + (", ".join(map(label, holders(gpu))) or "nobody")
        for gpu in probe(in_detail=True).gpus
    )


# runs on the built-in tiny model

BOUNDS = {"fp32": 2e-3, "fp16": 2e-2, "bf16": 5e-2}
"""How far the first losses may be from those of the same run on a CPU in fp32, as a share."""


def learns(context: CheckContext, *, mode: str, precision: str) -> str:
    """The loss falls by a fifth; on a GPU it begins as on a CPU."""
    losses = learned(context, mode=mode, precision=precision).losses
    context.details["losses"] = losses
    fall, figure = 1 - sum(losses[-3:]) / sum(losses[:3]), f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
    expect(fall >= 0.2, figure, bound=f" in {len(losses)} steps: it does not fall by 20%")
    if not context.has_gpu:
        return figure
    count = 1 if precision == "fp16" else 3  # in fp16 the loss scale may skip the first steps
    on_cpu = learned(context, mode=mode, on_cpu=True).losses
    context.details["losses_cpu"] = on_cpu
    apart, bound = losses_apart(losses[:count], on_cpu[:count]), BOUNDS[precision]
    missed = f"; the first {count} are {apart:.2%} from the CPU's, more than {bound:.1%}"
    return f"{expect(apart <= bound, figure, bound=missed)}; first {count} within {apart:.3%} of the CPU's"


def same_with(context: CheckContext, *, changes: Values, precision: str, other: Values | None = None) -> str:
    """A LoRA run with other kernels has the losses of the run without them, or of the run with `other` values."""

    def run(values: Values) -> Run:
        name = f"run-{len(list(context.folder.glob('*.yaml')))}"
        return train(context, name, values={**PLAIN, "train.precision": precision, **values})

    usual = learned(context, precision=precision) if other is None else run(other)
    changed = run(changes)
    context.details.update(losses=changed.losses, losses_beside=usual.losses)
    first, worst = losses_apart(changed.losses[:1], usual.losses[:1]), losses_apart(changed.losses, usual.losses)
    figure = f"the first loss within {first:.2g} as a share, all within {worst:.2g}"
    # For the first loss and for all: steps of Adam enlarge what rounding has begun.
    bounds = (1e-4, 1e-3) if precision == "fp32" else (5e-3, 5e-2)
    missed = f"; the bounds are {bounds[0]:g} and {bounds[1]:g}"
    return expect(first <= bounds[0] and worst <= bounds[1], figure, bound=missed)


def grouped_heads(context: CheckContext, *, precision: str = "fp16") -> str:
    """A model with fewer heads of keys than of queries, one row at a time and so without a mask: sdpa is right there.

    Before Ampere and in fp32 only torch's plain kernel takes such heads as they are, with heads x tokens^2 scores.
    """
    one_row: Values = {"model.name": str(random_model(context, "tiny")), "train.batch_size": 1}
    return same_with(context, changes=one_row, precision=precision, other={**one_row, "model.attn": "eager"})


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
    return expect(held <= 0.5 * scores, figure)  # a fused kernel holds none


def measured_before(context: CheckContext) -> str:
    """Full tuning with the kernels and the precision that are chosen here: held-out rows are measured before it."""
    measured: Values = {"eval.before": True, "eval.after": True, "eval.limit": 8, "eval.max_new_tokens": 4}
    run = train(context, "measured", values={"tuning.mode": "full", "data.split": 0.1, **measured})
    before, after = (read_object(run.folder.eval / f"{name}.json")["loss"] for name in ("before", "after"))
    figure = f"held-out loss {before:.3f} before, {after:.3f} after"
    return expect(after < before, figure, bound=": it does not fall")


def exact_match_rises(context: CheckContext) -> str:
    """The demo's run: answers that were all wrong are mostly right. On a CPU about 0.97 of them are."""
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
    return expect(after >= 0.5 > before, figure, bound="; 0.5 is expected")


def rewards_rise(context: CheckContext) -> str:
    """Task grpo: sampled answers get the digit that is paid for, full tuning, eight answers to a question.

    On a CPU the rewards rise from 0.28 to 1 within six steps.
    """
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
    rewards, gaps = ([line[key] for line in lines] for key in ("reward", "sampler_gap"))
    context.details.update(rewards=rewards, sampler_gap=gaps)
    before, after = rewards[0], sum(rewards[-3:]) / 3
    figure = f"reward {before:.2f} to {after:.2f}, sampler within {max(gaps):.1g}"
    return expect(after - before >= 0.3, figure, bound=": it does not rise by 0.3")


# recovery

SAVED = {**PLAIN, "train.save_steps": 4}
"""The plain run's settings, with checkpoints, which do not change it."""

LARGE = {"train.effective_batch_size": 256, "train.batch_size": 256, "train.max_steps": 5}
"""So many rows at once that a step takes some hundred MB, far more than one block of the allocator."""

FREE_AGAIN_S = 20.0


def out_of_memory(context: CheckContext) -> str:
    """A real out-of-memory of CUDA inside a step: the same rows run again, and the weights are the same."""
    usual = train(context, "usual", values={**SAVED, **LARGE})
    run = train(context, "capped", values={**SAVED, **LARGE}, env=environment(context.folder, "cap", step=2))
    events = [event for event in run.folder.read_events() if event["event"] == OUT_OF_MEMORY]
    context.details["events"] = events
    expect(bool(events), "memory did not run out under the cap")
    apart = weights_apart(run, usual)
    sizes = f"{events[0]['batch_size_before']} rows at a time, then {events[-1]['batch_size']}"
    # After a step was cut into other micro-batches: sums in another order, through Adam.
    return expect(apart <= 0.01, f"{sizes}; weights within {apart:.2g} as a share", bound=", more than 0.01")


def kill_and_resume(context: CheckContext) -> str:
    """kill -9 in a step; the resumed run is the undisturbed one."""
    usual, used = learned(context), used_bytes()
    run = write_run(context.folder, "killed", values=SAVED)
    call("train", run, env=environment(context.folder, "kill", step=6), expects=5)
    left = await_free(used)
    saved = newest_complete(run.folder.checkpoints)[0]
    if saved is None:
        raise Broken("the killed run has no complete checkpoint")
    call("resume", run)
    losses, weights = losses_apart(run.losses, usual.losses), weights_apart(run, usual)
    figure = f"losses {losses:.2g} and weights {weights:.2g} apart"
    if not (losses <= context.bound and weights <= context.bound):
        raise Broken(f"resumed: {figure}, more than {context.bound:g}")
    return f"resumed from {saved.name}; {figure}{left}"


def stop_by_signal(context: CheckContext) -> str:
    """SIGTERM in a step: a complete checkpoint of that step, and code 143."""
    used = used_bytes()
    run = write_run(context.folder, "stopped", values={**SAVED, "train.save_steps": STEPS})
    call("train", run, env=environment(context.folder, "term", step=3), expects=128 + signal.SIGTERM)
    left = await_free(used)
    saved = newest_complete(run.folder.checkpoints)[0]
    if saved is None or saved.name != "checkpoint-3":
        raise Broken(f"a complete checkpoint of step 3 is expected, found: {saved and saved.name}")
    return f"state {run.status.get('state')}, code {run.status.get('exit_code')}, with {saved.name}{left}"


def used_bytes() -> int:
    """Count the bytes of the GPUs that anyone uses now."""
    return sum(gpu.used_bytes for gpu in probe().gpus)


def await_free(before: int) -> str:
    """Return words about the GPUs' memory, none without a GPU; raise Broken where more stays used than before."""
    if not probe().gpus:
        return ""
    deadline = time.monotonic() + FREE_AGAIN_S
    while (more := used_bytes() - before) > 64 * 2**20:
        if time.monotonic() > deadline:
            raise Broken(f"{format_bytes(more)} of GPU memory are not free again {FREE_AGAIN_S:g} s later")
        time.sleep(0.2)
    return "; the GPU's memory is free again"


# delivery


def merge_and_export(context: CheckContext) -> str:
    """Both folders open in plain transformers, as a stranger would open them, and greedily write the same answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, answers = learned(context), {}
    question = json.loads((context.shared / "rows.jsonl").read_text(encoding="utf-8").splitlines()[0])["messages"][:1]
    for verb in ("merge", "export"):
        folder = context.folder / verb
        call(verb, run, "--run", str(run.folder.path), "--out", str(folder))
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(folder).to("cuda" if context.has_gpu else "cpu")
        words = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        written = model.generate(**words, max_new_tokens=12, do_sample=False)
        answers[verb] = str(tokenizer.decode(written[0, words["input_ids"].shape[1] :], skip_special_tokens=True))
    context.details["answers"] = answers
    if len(set(answers.values())) != 1 or not answers["export"].strip():
        raise Broken(f"the answers differ or are empty: {answers}")
    return f"merged and exported model write the same {len(answers['export'])} characters"


# several processes


def exchange(_context: CheckContext, *, on_gpus: bool) -> str:
    """`comm-check`: every sum is right. Its table is in the output."""
    call("comm-check", None, "--nproc", "gpu" if on_gpus else "2", env={} if on_gpus else NO_GPU)
    return "every sum is right"


def same_losses(context: CheckContext, *, strategy: str, on_gpus: bool = True) -> str:
    """As many processes as GPUs, or two on the CPU, have the losses of one but for sums in another order."""
    usual = learned(context, on_cpu=not on_gpus)
    count = count_processes(context.machine) if on_gpus else 2
    values = {**PLAIN, "train.batch_size": "auto", "cluster.strategy": strategy}
    run = write_run(context.folder, strategy, values=values)
    call("train", run, "--nproc", str(count), env={} if on_gpus else NO_GPU)
    apart = losses_apart(run.losses, usual.losses)
    figure = f"{count} processes; losses within {apart:.2g} as a share of one process's"
    return expect(apart <= 1e-3, figure, bound=", more than 0.001")


def one_of_several(context: CheckContext) -> str:
    """A single process trains on the first of the visible GPUs, and the others stay empty."""
    run = train(context, "one", values=PLAIN)
    apart = losses_apart(run.losses[:3], learned(context, on_cpu=True).losses[:3])
    command = (run.folder.path / "launch.txt").read_text(encoding="utf-8")
    visible = next((word for word in command.split() if word.startswith("CUDA_VISIBLE_DEVICES=")), "")
    figure = f"{len(context.machine.gpus)} are visible, {visible or 'all'} for the worker; losses within {apart:.2g}"
    return expect(bool(visible) and "," not in visible and apart <= BOUNDS["fp32"], figure)


def larger_than_one(context: CheckContext) -> str:
    """FSDP fully tunes a model whose weights, gradients and Adam state exceed one card."""
    count = count_processes(context.machine)
    name = choose_split_model(context.machine, count)
    values = {"model.name": str(random_model(context, name)), "tuning.mode": "full", "train.max_steps": 3}
    sizes = {"train.batch_size": 1, "train.gradient_checkpointing": True, "train.learning_rate": 1e-5}
    run = write_run(context.folder, "split", values={**values, **sizes, "cluster.strategy": "fsdp"})
    call("train", run, "--nproc", str(count))
    figure = f"{name} on {count} GPUs; losses {', '.join(f'{loss:.3f}' for loss in run.losses)}"
    return expect(len(run.losses) == 3 and all(map(math.isfinite, run.losses)), figure)


def choose_split_model(machine: Machine, count: int) -> str:
    """Choose the smallest model of the shipped table that one of these GPUs cannot hold and `count` can.

    Raise NotPossible where there is none, or no room on the disk for its weights.
    """
    table, least = read_table(), min(gpu.plannable_bytes for gpu in machine.gpus)
    for name in (f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B")):
        params = shape_from_config(table[name], name=name).total_params
        resident = 16 * params  # full tuning in fp32 with Adam, which may take 0.8 of all GPUs
        if least < resident < 0.8 * least * count:
            if (machine.disk_free_bytes or 0) < 3 * 2 * params:
                raise NotPossible(f"{name} needs more room on the disk")
            return name
    raise NotPossible(f"no shape exceeds one of these GPUs and fits {count}")


def count_processes(machine: Machine) -> int:
    """Return as many as there are GPUs, but a power of two up to 16, which divides the rows of a step."""
    return 1 << min(4, len(machine.gpus).bit_length() - 1)


def wrapped_alone(context: CheckContext) -> str:
    """DDP and FSDP2 on a single process compute the plain model's gradients, by NCCL on a GPU."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device, backend = ("cuda", "nccl") if context.has_gpu else ("cpu", "gloo")

    def small_model() -> Any:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        return torch.nn.Sequential(*layers).to(device)

    def gradient_norm(model: Any) -> float:
        rows = torch.randn(8, 256, generator=torch.Generator().manual_seed(1)).to(device)
        model(rows).square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
        return float(torch.stack([grad.float().square().sum() for grad in whole]).sum().sqrt())

    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port(29600)}", rank=0, world_size=1)
    try:
        plain = gradient_norm(small_model())
        by_ddp = gradient_norm(torch.nn.parallel.DistributedDataParallel(small_model()))
        sharded, mesh = small_model(), init_device_mesh(device, (1,))
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        by_fsdp = gradient_norm(sharded)
    finally:
        dist.destroy_process_group()
    figure = f"gradient norm {plain:.6g}, by DDP {by_ddp:.6g}, by FSDP2 {by_fsdp:.6g} over {backend}"
    return expect(max(abs(by_ddp - plain), abs(by_fsdp - plain)) <= 1e-5 * plain, figure)


# memory and speed

MOST_OFF = 0.15
"""How far a plan may be from what is held, as a share."""

LEAST_SPEED = 0.85
"""Of the fastest batch's tokens a second, what the chosen batch must reach."""

PUBLISHED = "12,473 tokens/s published (NeMo Automodel, one H100)"
"""Of Llama 3 8B with LoRA r 16 on all projections, sequence 4096, micro-batch 2, global batch 32, mock data."""

SHAPE = "Qwen/Qwen2.5-0.5B"


def compare_plan(context: CheckContext) -> str:
    """Five configs: allocated and reserved bytes against the plan's, and a sweep over all batches."""
    run_script("gpu_sizing.py", "--configs", "5", "--out", str(context.folder), "--limit-s", "150")
    report = read_report(context.folder / "gpu_sizing.json")
    context.details.update(report)
    found = report["summary"]
    for row in report["rows"]:
        expect(not row["error"], f"{row['model']} {row['mode']}: {row['error']}")
    died = f"{found['out_of_memory']} of {found['configs']} ran out of memory with the chosen batch"
    expect(not found["out_of_memory"], died)
    figure = (
        f"plan off by {found['plan_mean_abs']:.1%}, at worst {found['plan_worst']:+.1%}; chosen batch at "
        f"{found['speed_of_best_mean']:.0%} of the fastest's speed, at worst {found['speed_of_best_least']:.0%}"
    )
    holds = abs(found["plan_worst"]) <= MOST_OFF and found["speed_of_best_least"] >= LEAST_SPEED
    return expect(holds, figure, bound=f"; {MOST_OFF:.0%} and {LEAST_SPEED:.0%} are the bounds")


def compare_plan_on_cpu(context: CheckContext) -> str:
    """On a CPU the plan counts the whole process: its resident set stays within what is planned."""
    target = context.folder / "cpu_memory.json"
    run_script("cpu_memory.py", "--only", "full", "--json", str(target))
    (seen,) = read_report(target).values()
    plan, peak = seen["plan"], seen["peak_rss_bytes"]
    without_margin = plan["peak_bytes"] - plan["components"]["margin"]
    context.details.update(plan=plan["components"], peak_rss_bytes=peak)
    figure = f"{format_bytes(without_margin)} planned, {format_bytes(peak)} resident ({without_margin / peak - 1:+.1%})"
    missed = f": above the plan with its margin, {format_bytes(plan['peak_bytes'])}"
    return expect(peak <= plan["peak_bytes"], figure, bound=missed)


def read_report(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Broken(f"{path.name} was not written")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def compare_with_trl(context: CheckContext, *, case: str, published: str = "") -> str:
    """Steps of full rows by the kit and by TRL, each in a separate process: as fast, and on the same rows."""
    for who in ("ours", "trl"):
        target = context.folder / f"{who}.json"
        run_script("gpu_speed.py", "--case", case, "--contestant", who, "--out", str(target))
        context.details[who] = read_report(target)
        if larger := context.details[who].get("does_not_fit"):
            raise NotPossible(f"the card is too small: {larger}")
    ours, trl = context.details["ours"], context.details["trl"]
    ratio = ours["tokens_per_s"] / trl["tokens_per_s"]
    mfu = f", MFU {ours['mfu']:.1%}" if ours["mfu"] is not None else ""
    figure = (
        f"{ours['tokens_per_s']:,.0f} tokens/s{mfu}, {ratio:.2f} of plain TRL's {trl['tokens_per_s']:,.0f}"
        f"; checkpointing {'on' if ours['gradient_checkpointing'] else 'off'}"
    ) + (f"; {published}" if published else "")
    losses = f"; the first losses differ: {ours['losses'][0]:.4f} and {trl['losses'][0]:.4f}"
    expect(abs(ours["losses"][0] / trl["losses"][0] - 1) <= 0.01, figure, bound=losses)
    return expect(ratio >= 0.95, figure, bound="; at least 0.95 is expected")


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


# what a machine must have: why it cannot show a row, empty where it can


def anything(_machine: Machine) -> str:
    return ""


def a_gpu(machine: Machine, *, instead: str = "") -> str:
    return "" if machine.gpus else f"needs a CUDA GPU{instead}"


def no_gpu(machine: Machine) -> str:
    return "is for machines without a GPU; the row above counts the GPU's memory" if machine.gpus else ""


def several_gpus(machine: Machine) -> str:
    return "" if len(machine.gpus) > 1 else "needs two CUDA GPUs"


def a_bf16_gpu(machine: Machine, *, package: str = "") -> str:
    if missing := a_gpu(machine):
        return missing
    if not all(gpu.has_bf16 for gpu in machine.gpus):
        return "needs a GPU with bf16, of Ampere or later"
    return f"needs the package {package}" if package and not find_spec(package.replace("-", "_")) else ""


flash_attention, liger = partial(a_bf16_gpu, package="flash-attn"), partial(a_bf16_gpu, package="liger-kernel")
demo_instead = partial(a_gpu, instead="; on a CPU `make demo` shows it, in minutes")
next_row_instead = partial(a_gpu, instead="; the next row counts the process's memory")

FLASH: Values = {"model.attn": "flash_attention_2"}
in_bf16 = partial(same_with, precision="bf16")

CHECKS = (
    Check("facts: driver and torch agree", driver_and_torch),
    Check("facts: who else uses the GPUs", other_users, needs=a_gpu),
    *(
        Check(f"run: {precision} {mode}", partial(learns, mode=mode, precision=precision), needs=needs)
        for precision, needs in (("fp32", anything), ("bf16", a_bf16_gpu), ("fp16", a_gpu))
        for mode in ("full", "lora", "qlora")
    ),
    Check("run: exact match rises", exact_match_rises, needs=demo_instead),
    Check("run: rewards rise", rewards_rise),
    Check("run: grouped heads without a mask in fp16", grouped_heads, needs=a_gpu),
    Check("run: grouped heads hold no scores in fp16", scores_not_written, needs=a_gpu),
    Check("run: measured before full tuning", measured_before),
    Check("run: eager against sdpa", partial(same_with, changes={"model.attn": "eager"}, precision="fp32")),
    Check("run: flash attention against sdpa", partial(in_bf16, changes=FLASH), needs=flash_attention),
    Check(
        "run: packed by varlen kernels against padded",
        partial(in_bf16, changes={**FLASH, "train.packing": True}, other=FLASH),
        needs=flash_attention,
    ),
    Check(
        "run: liger against the standard loss head", partial(in_bf16, changes={"train.loss_head": "liger"}), needs=liger
    ),
    Check("recovery: out of memory inside a step", out_of_memory, needs=a_gpu),
    Check("recovery: kill -9 and resume", kill_and_resume),
    Check("recovery: SIGTERM", stop_by_signal),
    Check("delivery: merge, export, plain transformers", merge_and_export),
    Check("processes: comm-check over gloo", partial(exchange, on_gpus=False)),
    Check("processes: DDP over gloo", partial(same_losses, strategy="ddp", on_gpus=False)),
    Check("processes: one of two visible GPUs", one_of_several, needs=several_gpus),
    Check(
        "processes: a split model larger than one card", larger_than_one, needs=several_gpus, limit_s=1800, is_long=True
    ),
    Check("processes: DDP and FSDP2 on one GPU", wrapped_alone, needs=a_gpu),
    Check("processes: comm-check over NCCL", partial(exchange, on_gpus=True), needs=several_gpus),
    *(
        Check(f"processes: {title} over NCCL", partial(same_losses, strategy=strategy), needs=several_gpus)
        for title, strategy in (("DDP", "ddp"), ("FSDP2", "fsdp"), ("ZeRO-2", "zero2"), ("ZeRO-3", "zero3"))
    ),
    Check(
        "memory: planned against held on five configs", compare_plan, needs=next_row_instead, limit_s=1800, is_long=True
    ),
    Check("memory: planned against the resident set", compare_plan_on_cpu, needs=no_gpu),
    Check("speed: padded rows against packed", compare_packing, needs=a_gpu),
    *(
        Check(name, partial(compare_with_trl, case=case, published=published), needs=a_gpu, limit_s=1800, is_long=True)
        for name, case, published in (
            ("speed: 8B shape, LoRA", "llama-8b-lora", PUBLISHED),
            ("speed: 1B shape, QLoRA", "llama-1b-qlora", ""),
        )
    ),
)
