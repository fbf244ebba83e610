"""Recovery: a run survives an out-of-memory, kill -9 and SIGTERM, and gives the GPU's memory back."""

from __future__ import annotations

import signal
import time

from sftplay.launch.checkpoints import newest_complete
from sftplay.launch.run_folder import OUT_OF_MEMORY
from sftplay.machine.probe import probe
from sftplay.runs.gpu_check.check import (
    STEPS,
    Broken,
    Check,
    CheckContext,
    a_gpu,
    call,
    losses_apart,
    undisturbed,
    weights_apart,
    write_run,
)
from sftplay.runs.gpu_check.fault import environment
from sftplay.units import format_bytes

SAVED = {"train.precision": "fp32", "model.attn": "sdpa", "train.packing": False, "train.save_steps": 4}
"""The undisturbed run's settings, with checkpoints, which do not change it."""

LARGE = {"train.effective_batch_size": 256, "train.batch_size": 256, "train.max_steps": 5}
"""So many rows at once that a step takes some hundred MB, far more than one block of the allocator."""

APART = 0.01
"""How far weights may be after a step was cut into other micro-batches: sums in another order, through Adam."""

FREE_AGAIN_S = 20.0


def out_of_memory(context: CheckContext) -> str:
    """A real out-of-memory of CUDA inside a step: the same rows run again, and the weights are the same."""
    usual = write_run(context.folder, "usual", values={**SAVED, **LARGE})
    call("train", usual)
    run = write_run(context.folder, "capped", values={**SAVED, **LARGE})
    call("train", run, env=environment(context.folder, "cap", step=2))
    events = [event for event in run.folder.read_events() if event["event"] == OUT_OF_MEMORY]
    context.details["events"] = events
    if not events:
        raise Broken("memory did not run out under the cap")
    apart = weights_apart(run, usual)
    sizes = f"{events[0]['batch_size_before']} rows at a time, then {events[-1]['batch_size']}"
    figure = f"{sizes}; weights within {apart:.2g} as a share"
    if not apart <= APART:
        raise Broken(f"{figure}, more than {APART}")
    return figure


def kill_and_resume(context: CheckContext) -> str:
    """kill -9 in a step; the resumed run is the undisturbed one."""
    usual, used = undisturbed(context), used_bytes()
    run = write_run(context.folder, "killed", values=SAVED)
    call("train", run, env=environment(context.folder, "kill", step=6), expects=5)
    left = await_free(used)
    saved = newest_complete(run.folder.checkpoints)[0]
    if saved is None:
        raise Broken("the killed run has no complete checkpoint")
    call("resume", run)
    losses, weights = losses_apart(run.losses, usual.losses), weights_apart(run, usual)
    if not (losses <= context.bound and weights <= context.bound):
        raise Broken(f"resumed: losses {losses:.2g} and weights {weights:.2g} apart, more than {context.bound:g}")
    return f"resumed from {saved.name}; losses {losses:.2g} and weights {weights:.2g} apart{left}"


def stop_by_signal(context: CheckContext) -> str:
    """SIGTERM in a step: a complete checkpoint of that step, and code 143."""
    used = used_bytes()
    run = write_run(context.folder, "stopped", values={**SAVED, "train.save_steps": STEPS})
    call("train", run, env=environment(context.folder, "term", step=3), expects=128 + signal.SIGTERM)
    left = await_free(used)
    saved = newest_complete(run.folder.checkpoints)[0]
    if saved is None or saved.name != "checkpoint-3":
        raise Broken(f"a complete checkpoint of step 3 is expected, found: {saved and saved.name}")
    status = run.status
    return f"state {status.get('state')}, code {status.get('exit_code')}, with {saved.name}{left}"


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


CHECKS = (
    Check(name="recovery: out of memory inside a step", run=out_of_memory, needs=a_gpu),
    Check(name="recovery: kill -9 and resume", run=kill_and_resume),
    Check(name="recovery: SIGTERM", run=stop_by_signal),
)
