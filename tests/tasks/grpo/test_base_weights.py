"""The frozen base under an adapter: its digest sees every bit, and what is sent to a second engine leaves it alone."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_toy import letter_tokenizer, tiny_llama
from peft import LoraConfig, get_peft_model
from trl.generation.vllm_generation import VLLMGeneration

from sftplay.errors import ConfigError, RunError
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.grpo.vllm_weights import merged_copies, send_adapter, send_copies
from sftplay.tasks.grpo.watch import CHUNK_WORDS, WatchBaseWeights, compute_digest, compute_frozen_digests


def adapted(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A model with an adapter that has learned something."""
    model = tiny_llama(letter_tokenizer()).to(dtype)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | changes
    model = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.05)
    return model


def vllm_generation(model: Any) -> Any:
    """TRL's class without an engine: only what its walk over the weights uses."""
    generation = object.__new__(VLLMGeneration)
    generation.model = model
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda _: torch.no_grad())
    return generation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("place", [0, 12_345, -1])
def test_one_flipped_bit_anywhere_is_another_digest(dtype: torch.dtype, place: int):
    tensor = torch.zeros(CHUNK_WORDS * 8 // dtype.itemsize + 5, dtype=dtype)
    digest = compute_digest(tensor)
    assert compute_digest(tensor.clone()) == digest
    tensor.view(torch.uint8)[place * dtype.itemsize if place >= 0 else -1] ^= 1
    assert compute_digest(tensor) != digest


def watch(model: Any, tmp_path: Any) -> WatchBaseWeights:
    watcher = WatchBaseWeights(RunFolder(tmp_path))
    watcher.attach(SimpleNamespace(model=model, heartbeat=Heartbeat()))
    return watcher


def at(step: int) -> dict[str, Any]:
    return {"args": None, "state": SimpleNamespace(global_step=step), "control": None}


def test_a_base_that_is_merged_and_unmerged_in_16_bits_ends_the_run(tmp_path):
    model = adapted()
    watcher = watch(model, tmp_path)
    watcher.on_train_begin(**at(0))
    watcher.on_save(**at(5))
    for _ in range(3):
        model.merge_adapter()
        model.unmerge_adapter()
    with pytest.raises(RunError, match=r"frozen weights have changed by step 7: base_model\.model\.model\.layers"):
        watcher.on_train_end(**at(7))
    assert RunFolder(tmp_path).read_json("manifest.json")["base_weights"]["unchanged_at_steps"] == [0, 5]


def test_trl_itself_changes_a_16_bit_base_that_it_sends_and_copies_do_not():
    model = adapted()
    before = compute_frozen_digests(model)
    send_copies(generation := vllm_generation(model))
    for _ in range(20):
        sent = {name: weight.clone() for name, weight in generation._iter_named_params()}
    assert compute_frozen_digests(model) == before

    # what TRL sends the first time, from a base that is still whole
    others = {name: weight.clone() for name, weight in VLLMGeneration._iter_named_params(vllm_generation(model))}
    assert sent.keys() == others.keys()
    assert all(torch.equal(sent[name], others[name]) for name in sent)
    assert compute_frozen_digests(model) != before  # the positive control: one round by TRL has changed the base


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_copies_are_what_peft_merges_for_good(changes: dict[str, Any]):
    target = ["q_proj", "down_proj"] if "modules_to_save" in changes else "all-linear"
    model = adapted(torch.float32, target_modules=target, **changes)
    sent = dict(merged_copies(model))
    expected = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in sent)


def test_a_base_whose_layers_cannot_be_copied_one_by_one_is_refused():
    generation = vllm_generation(adapted())
    generation._dist.is_fsdp = True
    with pytest.raises(ConfigError, match="sharded"):
        send_copies(generation)
    four_bit = vllm_generation(adapted())
    next(iter(four_bit.model.parameters())).quant_state = SimpleNamespace()
    with pytest.raises(ConfigError, match="4 bits"):
        send_copies(four_bit)


def test_a_server_that_holds_the_adapter_of_an_earlier_run_takes_the_next_one(tmp_path: Path):
    loaded, resets = {"trained": "an earlier run's"}, []

    def post(url: str, json: dict[str, Any]) -> Any:
        if json["lora_name"] in loaded and not json["load_inplace"]:  # vllm 0.31, entrypoints/openai/models/serving.py
            return SimpleNamespace(status_code=400, text="has already been loaded")
        loaded[json["lora_name"]] = json["lora_path"]
        return SimpleNamespace(status_code=200)

    client = SimpleNamespace(
        base_url="http://x:1", model="base", session=SimpleNamespace(post=post),
        reset_prefix_cache=lambda: resets.append(loaded["trained"]),
    )  # fmt: skip
    accelerator, model = SimpleNamespace(is_main_process=True, unwrap_model=lambda model: model), adapted()
    # A class of vLLM that mounts an adapter of text under other names: it is written anew for each step.
    model.get_base_model().config.architectures = ["Qwen3_5ForConditionalGeneration"]
    trainer = SimpleNamespace(accelerator=accelerator, model=model, vllm_generation=SimpleNamespace(vllm_client=client))
    for _ in range(2):
        send_adapter(trainer, folder=tmp_path)
    assert (client.model, resets) == ("trained", [str(tmp_path / "adapter-vllm")] * 2)
