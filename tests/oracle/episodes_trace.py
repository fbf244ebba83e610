"""The update of one micro-batch of actions on fake tensors: what the plan of task score is checked against.

Model and adapters are as in `oracle.trace`; scores, reference and losses are the task's own code.

    cd tests && PYTHONPATH=.. python -m oracle.episodes_trace

traces every case anew and rewrites recorded/episodes.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle.cases import FAMILIES, TraceSettings
from oracle.gpu_kernels import CudaKernels, InPlaceSums, KernelTemporaries, replaced
from oracle.live_bytes import LiveBytes
from oracle.score_update import batch_of_zeros, optimizer_with_state
from oracle.trace import reads_answered, recompute
from oracle.traced_model import DTYPES, adapt, build_causal
from sftplay.tasks.score import role_models as role_models_module
from sftplay.tasks.score.role_models import CriticInputs, PaddedTokens, RoleModels, critic_loss, value_loss
from sftplay.tasks.score.section import CriticConfig
from sftplay.tasks.score.update import score_actions

RECORD = Path(__file__).parent / "recorded" / "episodes.json"


def _case(method: Any, *, vocab: int, rows: int = 2, tokens: int = 1024, family: str = "llama", **more: Any) -> Any:
    how = TraceSettings(method=method, batch=rows, seq=tokens, layers=4, padded=True, micro_batches=2, **more)
    return {**FAMILIES[family], "vocab_size": vocab, "num_hidden_layers": 4}, how


VALUED = "adapters, with a critic and a value network of its own"
WIDTH, READ = 64, 8
"""Of critic and value; and how many tokens they read. A recurrent network takes minutes on fake tensors, and nearly all
of it is its table of tokens."""

CASES: dict[str, tuple[dict[str, Any], TraceSettings, int]] = {
    "adapters, scores decide": (*_case("lora", vocab=128_256), 512),
    "adapters, layers decide": (*_case("lora", vocab=2048), 512),
    "adapters, nothing computed anew": (*_case("lora", vocab=2048, checkpointing=False), 128),
    "adapters on 4 bits": (*_case("qlora", vocab=128_256), 512),
    "adapters, tied head": (*_case("lora", vocab=151_936, rows=4, tokens=512, family="qwen2"), 256),
    VALUED: (*_case("lora", vocab=128_256), 512),
    "whole models, scores decide": (*_case("full", vocab=128_256), 512),
    "whole models, layers decide": (*_case("full", vocab=2048), 512),
    "whole models, nothing computed anew": (*_case("full", vocab=32_000, rows=4, checkpointing=False), 512),
}
"""Name -> config.json, settings, and how many of a row's tokens are an action."""


def trace_update(name: str) -> dict[str, int]:
    """Peak bytes by phase where solver and guide learn, each from micro-batches of `batch` rows of `seq` tokens.

    Two adapters on one base; of whole models the solver alone and its reference, as on a device of its own.
    """
    config, how, longest = CASES[name]
    with ExitStack() as stack:
        for context in reads_answered(how, 1):
            stack.enter_context(context)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        live = stack.enter_context(LiveBytes())
        stack.enter_context(KernelTemporaries())
        stack.enter_context(InPlaceSums())
        return _run(_build_role_models(config, how, has_value=name == VALUED), how, live, longest=longest)


def _build_role_models(config: Mapping[str, Any], how: TraceSettings, *, has_value: bool) -> RoleModels:
    causal, has_guide = build_causal(config, how), how.method != "full"
    model = adapt(causal, how)
    # See `adapt`; a fake tensor's copy shares nothing with its parameter.
    as_it_is = replaced(nn.Module, "to", lambda module, *_args, **_more: module)
    with as_it_is, replaced(role_models_module, "_copy", lambda *_: build_causal(config, how)):
        critic = CriticConfig(width=WIDTH) if has_value else None
        role_models = RoleModels(
            model, has_guide=has_guide, guide_learns=has_guide, has_value=has_value, value_is_separate=True,
            critic=critic,
        )  # fmt: skip
    role_models.train()
    if how.checkpointing:
        options = {
            "use_reentrant": False,
            "preserve_rng_state": False,
            "context_fn": lambda: (nullcontext(), CudaKernels(host_reads=0)),
        }
        recompute(causal, options)
    return role_models


def _run(role_models: RoleModels, how: TraceSettings, live: LiveBytes, *, longest: int) -> dict[str, int]:
    optimizer = optimizer_with_state(role_models)
    live.forget_peaks()
    batch = batch_of_zeros(how.batch, how.seq, longest=longest)
    read, ones = PaddedTokens(batch.ids[:, :READ].clone(), torch.full((how.batch,), READ)), torch.ones(how.batch)
    live.enter_phase("learn")
    if role_models.critic is not None:
        for _ in range(how.micro_batches):
            turns, paid = (CriticInputs(read, read, read),) * 2, (ones, ones)
            losses = critic_loss(
                role_models.critic,
                role_models.target_critic,
                turns=turns,
                returns=paid,
                weight=ones,
                discount=1.0,
                n_episodes=2,
            )
            torch.stack(list(losses.values())).sum().backward()
            del losses
    for role in [each for each in ("guide", "solver") if each in role_models.trainable]:
        for _ in range(how.micro_batches):
            with role_models.use_role(role):  # type: ignore[arg-type]
                with torch.autocast("cpu", dtype=DTYPES[how.autocast]):
                    scores = score_actions(
                        role_models,
                        batch,
                        role=role,
                        temperature=1.0,
                        kl="full",  # type: ignore[arg-type]
                    )
                loss = (scores.log_probs.sum() + scores.kl.sum()) / 2
                if role == "guide" and role_models.has_value:
                    told = value_loss(
                        role_models.value_head, read, target=ones, flow="stop", value_coef=1.0, n_episodes=2
                    )
                    loss = loss + told
                    del told
                del scores
                loss.backward()
            del loss
    live.enter_phase("step")
    optimizer.step()
    return dict(live.peaks_bytes)


def main() -> int:
    """Trace every case and write the record."""
    traces = {}
    for name in CASES:
        traces[name] = trace_update(name)
        print(name, file=sys.stderr, flush=True)
    RECORD.write_text(json.dumps(traces, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
