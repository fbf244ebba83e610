"""The update of one micro-batch of actions on fake tensors: what the plan of task score is checked against.

Model and adapters are as in `oracle.trace`; the scores, the losses and the reference are the task's own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle.cases import TraceSettings
from oracle.gpu_kernels import CudaKernels, InPlaceSums, KernelTemporaries, replaced
from oracle.live_bytes import LiveBytes
from oracle.trace import _reads_answered, recompute
from oracle.traced_model import DTYPES, adapt, build_causal
from sftplay.tasks.score.episodes import cast as cast_module
from sftplay.tasks.score.episodes.cast import Cast
from sftplay.tasks.score.gradients.scoring import ActionBatch, score_actions


def trace_update(
    config: Mapping[str, Any], how: TraceSettings, *, longest: int, kl: str = "full", copies: int = 0
) -> dict[str, int]:
    """Peak bytes of a solver's micro-batch by phase: `rows` of `seq` tokens of which `longest` are an action's.

    `copies` are further models on this device. Gradients exist, as from the second micro-batch on.
    """
    with ExitStack() as stack:
        for context in _reads_answered(how, 1):
            stack.enter_context(context)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = stack.enter_context(LiveBytes())
        stack.enter_context(KernelTemporaries())
        stack.enter_context(InPlaceSums())
        return _run(config, how, live, longest=longest, kl=kl)


def _run(config: Mapping[str, Any], how: TraceSettings, live: LiveBytes, *, longest: int, kl: str) -> dict[str, int]:
    causal = build_causal(config, how)
    model = adapt(causal, how)
    # See `adapt`; a fake tensor's copy shares nothing with its parameter.
    as_it_is = replaced(nn.Module, "to", lambda module, *_args, **_more: module)
    with as_it_is, replaced(cast_module, "_copy", lambda *_: build_causal(config, how)):
        cast = Cast(model, has_guide=how.method != "full", guide_learns=how.method != "full", has_value=False)
    model.train()
    if how.checkpointing:
        options = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), CudaKernels(host_reads=0)),
        }
        recompute(causal, options)
    live.name_modules(causal)
    trained = [p for part in cast.parts.values() for p in part]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    live.forget_peaks()
    live.enter_phase("load")
    prompt = how.seq - longest
    ids = torch.zeros(how.batch, how.seq, dtype=torch.int64)
    batch = ActionBatch(
        ids, torch.ones_like(ids), ids.clone(), ids[:, prompt:].clone(), torch.ones(how.batch, longest),
        torch.zeros(how.batch, longest),
    )  # fmt: skip
    for _ in range(how.micro_batches):
        live.enter_phase("forward")
        with cast.speaking("solver"):
            with torch.autocast("cpu", dtype=DTYPES[how.autocast]) if how.autocast != "fp32" else nullcontext():
                scores = score_actions(cast, batch, role="solver", temperature=1.0, kl=kl)  # type: ignore[arg-type]
            live.enter_phase("loss")
            loss = (scores.log_probs.sum() + scores.kl.sum()) / 2
            del scores
            loss.backward()
    live.enter_phase("step")
    optimizer.step()
    held = live.at_peaks()
    for phase in ("forward", "loss"):
        print(phase, live.peaks_bytes[phase] / 2**20)
        for b in held[phase][:14]:
            print("   ", round(b.bytes / 2**20, 2), b.shape, b.dtype, b.created_by[:70], b.phase)
    return dict(live.peaks_bytes)
