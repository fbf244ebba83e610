"""GRPO on a simulated V100 (compute capability 7.0): fp16 with the scaler, fp32 where weights train, bf16 nowhere.

torch computes fp16 on a CPU and accelerate refuses its scaler there, so the model is built as on the card, and the
arguments are looked at before they reach TRL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import in_process
import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import built
from trl import GRPOConfig

from sftplay.machine.probe import Gpu, Machine
from sftplay.tasks.grpo import task

GIB = 2**30
V100 = Machine(
    gpus=(Gpu(0, "Tesla V100-SXM2-16GB", 16 * GIB, 15 * GIB, (7, 0)),),
    gpu_reason="", ram_bytes=64 * GIB, cores=8, python="3.11.0", system="Linux", libraries={},
)  # fmt: skip


def mentions(value: Any, word: str) -> bool:
    if isinstance(value, dict):
        return any(mentions(each, word) for each in value.values())
    return word in str(value)


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_a_v100_computes_in_fp16_and_trains_in_fp32(mode, tiny_llama: Path, tmp_path: Path):
    given: list[dict[str, Any]] = []

    def recorded(**arguments: Any) -> GRPOConfig:
        given.append(arguments)
        return GRPOConfig(**{**arguments, "fp16": False})

    inputs = grpo_inputs(tiny_llama, tmp_path / "data")
    options = grpo_options(inputs, tuning__mode=mode, train__precision="auto")
    with patch.object(in_process, "probe", lambda: V100), patch.object(task, "GRPOConfig", recorded):
        run = built(tmp_path, inputs, **options)
    cfg, model, (arguments,) = run.cfg, run.trainer.model, given
    assert (cfg.train.precision, cfg.model.attn, cfg.grpo.generation) == ("fp16", "sdpa", "transformers")
    assert (arguments["fp16"], arguments["bf16"]) == (True, False)  # TRL takes bf16 where neither is said
    assert not run.trainer.args.bf16
    assert not mentions(arguments, "bf16")
    assert not mentions(arguments, "bfloat16")
    assert "bf16" not in run.folder.resolved.read_text()
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    assert torch.bfloat16 not in {tensor.dtype for tensor in tensors.values()}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    frozen = {p.dtype for p in model.parameters() if not p.requires_grad}
    assert frozen == {"full": set(), "lora": {torch.float16}, "qlora": {torch.float16, torch.uint8}}[mode]
    if mode == "qlora":
        states = {p.quant_state.dtype for p in model.parameters() if p.dtype == torch.uint8}
        computed = {module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}
        assert states == computed == {torch.float16}
    assert model.config.dtype != torch.bfloat16
    assert model.config._attn_implementation == "sdpa"
