"""GRPO's phases against a real model on the CPU: its cache, what drawing takes, TRL's scores in tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle.live_bytes import LiveBytes
from oracle.trace import recompute
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.utils import add_fused_lm_head

from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.plan.find_shape import find_shape
from sftplay.plan.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape_from_config import shape_from_config
from sftplay.tasks.grpo import generate
from sftplay.tasks.grpo.generate import PromptSampler
from sftplay.tasks.grpo.plan import CACHE, DRAW, ENGINE, SCORE, Rollout, cache_bytes, estimate_rollout
from sftplay.train.upstream import fitted_tiles

LLAMA = find_shape("meta-llama/Llama-3.1-8B")
LORA = MemorySetup(
    weight_bytes=2, compute_bytes=2, stream_bytes=2, has_autocast=True, adapter=Adapter(rank=16), head="tiled"
)
ON_CPU = MemorySetup(
    weight_bytes=4, compute_bytes=4, stream_bytes=4, attention="efficient", repeats_kv=True, is_masked=True,
    head="tiled", folds_tiles=False, logits_bytes=4,
)  # fmt: skip
SHORT = Rollout(completions=4, prompt_tokens=512, completion_tokens=512, micro_batch=2)


def tiny(vocab: int = 2_000, **changes: Any) -> tuple[Qwen2ForCausalLM, Any]:
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=8,
        max_position_embeddings=512, tie_word_embeddings=True, **({"num_key_value_heads": 2} | changes),
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval(), shape_from_config(config.to_dict(), name="tiny")


def padded(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 50, (rows, tokens))
    mask = torch.ones_like(ids)
    ids[0, :3] = mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


class Beside(LiveBytes):
    """Counts what lives beside a model's weights and gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __enter__(self) -> Beside:
        super().__enter__()
        for parameter in self.model.parameters():
            held = [parameter.detach(), *([parameter.grad.detach()] if parameter.grad is not None else [])]
            assert held
        self.enter_phase("run")
        self.resting = self.live_bytes
        return self

    @property
    def peak(self) -> int:
        return self.peaks_bytes["run"] - self.resting


@pytest.mark.parametrize(
    ("prompt", "completion", "vocab", "changes", "options"),
    [
        (8, 56, 200, {"num_key_value_heads": 8}, {}),  # the cache decides
        (100, 4, 200, {}, {}),  # the prompts decide
        (8, 4, 20_000, {}, {}),  # the scores decide
        (8, 4, 20_000, {}, {"top_p": 0.9}),
    ],
)
def test_drawing_takes_what_a_real_model_takes(prompt, completion, vocab, changes, options):
    model, shape = tiny(vocab, **changes)
    how = GenerationConfig(do_sample=True, max_new_tokens=completion, top_k=0, pad_token_id=0, **options)
    with Beside(model) as live, torch.no_grad():
        made = model.generate(**padded(16, prompt), generation_config=how, return_dict_in_generate=True)
    assert made.sequences.shape == (16, prompt + completion)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in made.past_key_values.layers)
    # The last token is drawn and never read.
    assert cache == cache_bytes(shape, ON_CPU, completions=16, tokens=prompt + completion - 1)
    rollout = Rollout(
        completions=16, prompt_tokens=prompt, completion_tokens=completion, micro_batch=1,
        limits_probability="top_p" in options,
    )  # fmt: skip
    parts = estimate_rollout(shape, ON_CPU, rollout=rollout).phases[DRAW]
    beside = sum(parts[name] for name in (CACHE, "layer", "head"))
    assert beside == pytest.approx(live.peak, rel=0.06)


@pytest.mark.parametrize(("prompt", "completion"), [(8, 56), (100, 4)])  # the cache decides, the prompts do
def test_sampling_with_shared_prompts_takes_what_a_real_model_takes(prompt, completion):
    model, shape = tiny(200, num_key_value_heads=8)
    how = GenerationConfig(do_sample=True, max_new_tokens=completion, top_k=0, pad_token_id=0, eos_token_id=None)
    sampler = PromptSampler(AdaptiveBatches(16, "generation"), rows_per_prompt=4)
    sampler.usable = True
    with Beside(model) as live, torch.no_grad(), sampler.within(model):
        # An evaluation: each prompt is another one, and as many as in training are computed at a time.
        model.generate(**padded(16, prompt), generation_config=how)
    rollout = Rollout(completions=16, prompt_tokens=prompt, completion_tokens=completion, micro_batch=1, group=4)
    parts = estimate_rollout(shape, ON_CPU, rollout=rollout).phases[DRAW]
    beside = sum(parts[name] for name in (CACHE, "layer", "head"))
    assert beside == pytest.approx(live.peak, rel=0.1)
    alone = estimate_rollout(shape, ON_CPU, rollout=replace(rollout, group=1)).phases[DRAW]
    assert beside <= sum(alone[name] for name in (CACHE, "layer", "head"))


@pytest.mark.parametrize("at_a_time", [16, 4])
def test_random_numbers_for_the_whole_batch_as_a_gpu_draws_them_take_no_more_than_planned(monkeypatch, at_a_time):
    monkeypatch.setattr(generate, "draws_one_by_one", lambda: False)
    model, shape = tiny(40_000)
    how = GenerationConfig(do_sample=True, max_new_tokens=4, top_k=0, pad_token_id=0, eos_token_id=None)
    sampler = PromptSampler(AdaptiveBatches(at_a_time, "generation"), rows_per_prompt=4)
    sampler.usable = True
    with Beside(model) as live, torch.no_grad(), sampler.within(model):
        model.generate(**padded(16, 8), generation_config=how)
    sizes = {"prompt_tokens": 8, "completion_tokens": 4, "micro_batch": 1, "group": 4, "drawn": 16}
    rollout = Rollout(completions=at_a_time, **sizes)
    parts = estimate_rollout(shape, ON_CPU, rollout=rollout).phases[DRAW]
    assert live.peak <= sum(parts[name] for name in (CACHE, "layer", "head"))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_learning_and_scoring_take_what_trl_takes_on_a_real_model(checkpointing):
    model, shape = tiny(40_000)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    batch = padded(2, 40)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :-30] = -100
    with fitted_tiles(shape.vocab):
        with Beside(model) as scoring, torch.no_grad():
            model(**batch, labels=labels, fused_lm_head=True)
        model.train()
        if checkpointing:
            recompute(model, {"use_reentrant": False})
        model(**batch, labels=labels, fused_lm_head=True).log_probs.sum().backward()
        with Beside(model) as learning:
            model(**batch, labels=labels, fused_lm_head=True).log_probs.sum().backward()
    execution = replace(ON_CPU, checkpointing=checkpointing)
    rollout = Rollout(completions=2, prompt_tokens=10, completion_tokens=30, micro_batch=2, scores_first=True)
    phases = estimate_rollout(shape, execution, rollout=rollout).phases
    moving = ("mask", "activations", "head", "layer")
    assert sum(phases[SCORE].get(name, 0) for name in moving) == pytest.approx(scoring.peak, rel=0.03)
    assert sum(phases["head"].get(name, 0) for name in moving) == pytest.approx(learning.peak, rel=0.03)


def test_an_engine_beside_the_trainer_takes_its_share_and_gives_it_back_while_it_sleeps():
    beside = replace(SHORT, engine="vllm_colocate", engine_bytes=2**34, scores_first=True)
    awake = estimate_rollout(LLAMA, LORA, rollout=beside).phases
    asleep = estimate_rollout(LLAMA, LORA, rollout=replace(beside, engine_sleeps=True)).phases
    assert {name: parts[ENGINE] for name, parts in awake.items()} == dict.fromkeys(awake, 2**34)
    # What its graphs and libraries took stays: about 1.5 GiB, and never more than its share.
    assert {name: parts[ENGINE] for name, parts in asleep.items()} == {
        **dict.fromkeys(asleep, 1.5 * 2**30),
        DRAW: 2**34,
    }
    small = replace(beside, engine_bytes=2**30, engine_sleeps=True)
    assert estimate_rollout(LLAMA, LORA, rollout=small).phases["layer"][ENGINE] == 2**30
    assert CACHE not in awake[DRAW]  # it is within the share
    server = estimate_rollout(LLAMA, LORA, rollout=replace(SHORT, engine="vllm_server")).phases
    assert sum(server[DRAW].values()) < sum(awake[DRAW].values())
