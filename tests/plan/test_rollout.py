"""GRPO's phases: what answers being written take, what scoring takes, and that learning is SFT's own estimate."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sftplay.plan.memory.execution import Adapter, Execution
from sftplay.plan.memory.rollout import Rollout, cache_bytes, estimate_grpo
from sftplay.plan.memory.step import Size, estimate
from sftplay.plan.shape.find import find_shape

LLAMA = find_shape("meta-llama/Llama-3.1-8B")
LORA = Execution(weight_bytes=2, compute_bytes=2, stream_bytes=2, has_autocast=True, adapter=Adapter(rank=16))
FULL = Execution(weight_bytes=4, compute_bytes=2, stream_bytes=4, has_autocast=True)
SHORT = Rollout(answers=16, prompt_tokens=512, answer_tokens=512, learned_at_a_time=2)


def test_the_cache_of_llama_3_8b_is_128_kib_a_token():
    # 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072, as Meta's grouped keys and values give.
    assert cache_bytes(LLAMA, LORA, rollout=SHORT) == 16 * 1024 * 131_072


def test_learning_takes_what_supervised_tuning_takes():
    update = estimate(LLAMA, LORA, size=Size(rows=2, seq=1024, accumulates=True))
    assert estimate_grpo(LLAMA, LORA, rollout=SHORT).phases["step"]["gradients"] == update.phases["step"]["gradients"]
    largest = max(sum(parts.values()) for parts in update.phases.values())
    assert estimate_grpo(LLAMA, LORA, rollout=SHORT).peak_bytes >= largest - 8


def test_many_long_answers_move_the_peak_to_generation():
    assert estimate_grpo(LLAMA, LORA, rollout=SHORT).peak_phase != "generate"
    many = replace(SHORT, answers=512)
    assert estimate_grpo(LLAMA, LORA, rollout=many).peak_phase == "generate"


@pytest.mark.parametrize("phase", ["generate", "score", "head", "layer", "step"])
def test_a_reference_adds_the_frozen_weights_to_every_phase_when_all_trains(phase):
    without = estimate_grpo(LLAMA, FULL, rollout=SHORT).phases[phase]
    reference = estimate_grpo(LLAMA, FULL, rollout=replace(SHORT, has_reference=True)).phases[phase]
    assert sum(reference.values()) - sum(without.values()) == pytest.approx(without["weights"])


def test_with_an_adapter_the_reference_is_the_base_and_costs_nothing():
    with_it = estimate_grpo(LLAMA, LORA, rollout=replace(SHORT, has_reference=True))
    assert with_it.peak_bytes == estimate_grpo(LLAMA, LORA, rollout=SHORT).peak_bytes
