"""What steps do on a GPU of Ampere or later, as far as a CPU shows it: the condition is set by hand.

Sources: transformers 5.23 `integrations/sdpa_attention.py`, torch 2.13 `ATen/native/transformers/cuda/sdp_utils.cpp`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from in_process import Inputs, built, sized, train, written_config
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
)

from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.evaluate.evaluate import held_out_loss, ready_to_answer
from sftplay.machine.gpu import Gpu
from sftplay.machine.probe import Machine
from sftplay.plan import decisions
from sftplay.plan.decisions import decide_numerics
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import find_device
from sftplay.plan.forecast import on_device as on_planned_device
from sftplay.plan.memory_setup import read_memory_setup
from sftplay.tasks.hrm import plan
from sftplay.tasks.hrm.plan import PLAN
from sftplay.train import guards, loss_heads
from sftplay.train.loss_heads import chunk_tokens, prove_label_head, put_chunked_head
from sftplay.train.micro_batches import Collator, MicroBatcher, ignores_padding, needs_no_mask, on_device

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "attn_implementation": "sdpa",
}  # fmt: skip
CUDA = torch.device("cuda", 0)


def model_of(kind: type, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(kind(**{**SMALL, **changes}), attn_implementation="sdpa")


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))


@pytest.mark.parametrize("kind", [LlamaConfig, Qwen2Config])
def test_a_plain_decoder_in_16_bits_needs_no_mask_on_ampere_and_one_on_older_gpus(
    kind: type, ampere: None, monkeypatch: pytest.MonkeyPatch
):
    model = model_of(kind)
    assert needs_no_mask(model, CUDA, is_half=True)
    assert not needs_no_mask(model, CUDA, is_half=False)
    assert not needs_no_mask(model, torch.device("cpu"), is_half=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 0))
    assert not needs_no_mask(model, CUDA, is_half=True)


@pytest.mark.parametrize(
    "model",
    [
        model_of(MistralConfig, sliding_window=8),
        model_of(Gemma3TextConfig, head_dim=8, sliding_window=8),
        model_of(MixtralConfig, num_local_experts=2, output_router_logits=True, sliding_window=None),
        AutoModelForCausalLM.from_config(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)),
    ],
    ids=["a window that slides", "layers with windows", "a router's loss", "positions by the mask"],
)
def test_models_that_need_the_mask_for_more_keep_it(model: Any, ampere: None):
    assert not needs_no_mask(model, CUDA, is_half=True)


def test_a_model_in_which_tokens_see_what_stands_behind_them_is_found_by_the_proof(ampere: None):
    def everything(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("both_ways", everything)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation="both_ways")
    assert not ignores_padding(model)
    assert ignores_padding(model_of(LlamaConfig))


def test_gradients_of_a_padded_window_are_the_same_without_its_mask(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trainer = built(tmp_path, inputs, tuning__mode="full", data__split=None).trainer
    trainer.model.double()
    rows = [
        {"input_ids": list(range(3, 3 + n)), "labels": [-100] * 2 + list(range(5, 3 + n)), "row": n}
        for n in (5, 17, 9, 30)
    ]
    given: list[set[str]] = []
    trainer.model.register_forward_pre_hook(lambda _m, _a, named: given.append({*named}), with_kwargs=True)
    found = []
    for drops in (False, True):
        trainer.micro_batcher, trainer._drops_mask = MicroBatcher(4), drops
        trainer.model.zero_grad()
        count = torch.tensor(sum(n - 2 for n in (5, 17, 9, 30)))
        loss = trainer.training_step(trainer.model, Collator(0)(rows), count)
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
        found.append((float(loss.detach()), gradient))
    assert "attention_mask" in given[0]
    assert "attention_mask" not in given[-1]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-9, atol=1e-12)


def refuse_fp32(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> tuple[Any, None]:
    """As transformers' `flash_attention_forward`, which takes autocast's dtype for fp32, and flash-attn behind it."""
    if query.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        query, key, value = (each.to(torch.get_autocast_dtype("cpu")) for each in (query, key, value))
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).contiguous(), None


def test_a_model_with_fp32_weights_is_measured_in_the_precision_of_its_run(inputs: Inputs, tmp_path: Path):
    AttentionInterface.register("refuses_fp32", refuse_fp32)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation="refuses_fp32")
    rows = {"input_ids": [[3, 4, 5, 6]], "labels": [[-100, 4, 5, 6]]}

    class Rows:
        def __getitem__(self, key: str) -> Any:
            return rows[key]

        def __len__(self) -> int:
            return 1

    cfg = sized(written_config(tmp_path, inputs, tuning__mode="full", train__precision="bf16"))
    with ready_to_answer(model, cfg):
        assert held_out_loss(model, Rows(), pad_token_id=0) > 0
    with (
        ready_to_answer(model, cfg.with_values({"train.precision": "fp32"}, "test")),
        pytest.raises(RuntimeError, match="only support"),
    ):
        held_out_loss(model, Rows(), pad_token_id=0)


def test_memory_that_runs_out_in_the_proof_of_the_head_is_no_property_of_the_model(monkeypatch: pytest.MonkeyPatch):
    def run_out(*_: Any) -> bool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(loss_heads, "_agrees", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        prove_label_head(model_of(LlamaConfig))


def test_a_head_that_is_off_is_said_and_stands_in_the_plan(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def differ(*_: Any) -> bool:
        raise ValueError("scores of another shape")

    monkeypatch.setattr(loss_heads, "_agrees", differ)
    done = train(tmp_path, inputs, train__max_steps=1)
    what = "scores are computed at every position, not only at labels: ValueError: scores of another shape"
    assert f"note: {what}" in capsys.readouterr().out
    plan = json.loads((done.folder.path / "plan.json").read_text())
    assert plan["label_head_off"] == what.partition("labels: ")[2]
    assert what in plan["notes"]


def test_a_loss_in_the_chunks_of_a_gpu_is_the_models_own(monkeypatch: pytest.MonkeyPatch):
    assert (chunk_tokens(CUDA, 32_000), chunk_tokens(torch.device("cpu"), 32_000)) == (2048, 256)
    monkeypatch.setattr(loss_heads, "chunk_tokens", lambda *_: 7)
    ids = torch.randint(1, 64, (3, 17), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :9] = -100
    found = []
    for chunked in (False, True):
        model = model_of(LlamaConfig)
        if chunked:
            put_chunked_head(model, proves=False)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=torch.tensor(11.0)).loss
        loss.backward()
        assert model.lm_head.weight.grad.dtype == torch.float32
        found.append((float(loss.detach()), model.lm_head.weight.grad))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-2)
    assert float((found[1][1] - found[0][1]).norm() / found[0][1].norm()) < 2e-2


def test_windows_stay_on_the_host_and_micro_batches_travel_from_pinned_memory(inputs: Inputs, tmp_path: Path):
    assert built(tmp_path, inputs).trainer.get_train_dataloader().device is None
    batch = {"input_ids": Mock()}
    on_device(batch, CUDA)
    batch["input_ids"].pin_memory.return_value.to.assert_called_once_with(CUDA, non_blocking=True)
    assert on_device(batch, torch.device("cpu")) is batch


def test_the_norm_of_sharded_gradients_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    guard = guards.StopOnBadStep(tmp_path / "bad_step.json")
    norm = SimpleNamespace(full_tensor=lambda: torch.tensor(float("nan")))
    trainer = SimpleNamespace(last_loss=1.0, clipped_norm=norm, heartbeat=None, rows_not_finite=list, last_rows=[3])
    guard.attach(trainer)  # type: ignore[arg-type]
    args, state = SimpleNamespace(device=torch.device("cpu"), fp16=False), SimpleNamespace(global_step=4)
    with pytest.raises(Exception, match="the gradient of step 5 is not finite"):
        guard.on_pre_optimizer_step(args, state, None)


def machine_with(*gpus: Gpu) -> Machine:
    return Machine(
        gpus=gpus,
        gpu_reason="" if gpus else "none",
        ram_bytes=2**36,
        cores=8,
        python="3.11",
        system="Linux",
        libraries={},
    )


H100 = Gpu(0, "NVIDIA H100 80GB HBM3", total_bytes=80 * 2**30, free_bytes=79 * 2**30, capability=(9, 0))
V100 = Gpu(0, "Tesla V100-SXM2-16GB", total_bytes=16 * 2**30, free_bytes=15 * 2**30, capability=(7, 0))
PUBLIC = ("model.name=Qwen/Qwen2.5-0.5B", "data.train_path=rows.jsonl")


def config_of(*changes: str) -> RunConfig:
    return load_config("configs/config_base.yaml", [*PUBLIC, *changes])


def test_a_v100_gets_an_optimizer_whose_steps_can_be_left_out_and_the_fused_one_is_refused():
    decided = decide_numerics(config_of(), machine_with(V100))
    assert (decided["train.precision"].value, decided["train.optim"].value) == ("fp16", "adamw_torch")
    assert decide_numerics(config_of(), machine_with(H100))["train.optim"].value == "adamw_torch_fused"
    with pytest.raises(ConfigError, match="hides from the schedule which steps overflowed") as refusal:
        decide_numerics(config_of("train.optim=adamw_torch_fused"), machine_with(V100))
    assert refusal.value.fix == "write train.optim: adamw_torch, or leave it on auto"


def test_built_flash_attention_of_the_hub_is_taken_with_its_package_and_refused_without(
    monkeypatch: pytest.MonkeyPatch,
):
    cfg, there = config_of("model.attn=kernels-community/flash-attn2"), {"kernels"}
    monkeypatch.setattr(decisions, "find_spec", lambda name: name in there or None)
    decided = decide_numerics(cfg, machine_with(H100))
    assert decided["train.packing"].value is True
    execution = read_memory_setup(sized_for(cfg, H100))
    assert (execution.attention, execution.is_masked) == ("flash", False)
    there.clear()
    with pytest.raises(MachineError, match=r"kernels-community/flash-attn2 needs .* the package kernels"):
        decide_numerics(cfg, machine_with(H100))


def sized_for(cfg: RunConfig, gpu: Gpu) -> RunConfig:
    return cfg.with_values(
        {
            key: each.value
            for key, each in decide_numerics(cfg, machine_with(gpu)).items()
            if cfg.get_value(key) == "auto"
        },
        "test",
    )


@pytest.mark.parametrize(("gpu", "is_masked", "chunk"), [(H100, False, 768), (V100, True, 768), (None, True, 256)])
def test_the_plan_counts_the_mask_and_the_chunks_of_the_device(gpu: Gpu | None, is_masked: bool, chunk: int):
    cfg = sized_for(config_of("model.attn=sdpa", "train.loss_head=chunked"), gpu or H100)
    shape = find_shape("Qwen/Qwen2.5-0.5B")
    assert shape is not None
    found = on_planned_device(read_memory_setup(cfg), shape, device=find_device(machine_with(*([gpu] if gpu else []))))
    assert (found.is_masked, found.repeats_kv, found.chunk_tokens) == (is_masked, is_masked, chunk)


def test_a_puzzle_model_is_compiled_on_a_gpu_with_a_compiler(monkeypatch: pytest.MonkeyPatch):
    cfg = load_config("configs/run_hrm_sudoku4.yaml")
    assert PLAN.decide_more(cfg, machine_with())["hrm.compile"].value is False
    monkeypatch.setattr(plan, "find_compiler_problem", lambda: "")
    assert PLAN.decide_more(cfg, machine_with(H100))["hrm.compile"].value is True
    monkeypatch.setattr(plan, "find_compiler_problem", lambda: "there is no C compiler (gcc or clang)")
    assert PLAN.decide_more(cfg, machine_with(H100))["hrm.compile"].value is False
