"""Totals of the shipped table against published parameter counts, and against hand arithmetic where none is built."""

from __future__ import annotations

import pytest

from sftplay.plan.find_shape import find_shape

SAFETENSORS = "total in the metadata of the repository's safetensors files, as public pages about it quote it (2026-11)"
QUOTED = "total of the loaded checkpoint, as public pages about it quote it (2026-11)"
CARD = "the model's card on the hub"
PYTHIA = "EleutherAI/pythia, README.md, table of models"
PUBLISHED = [
    ("Qwen/Qwen2.5-7B", 7_615_616_512, SAFETENSORS),
    ("Qwen/Qwen1.5-1.8B", 1_836_828_672, SAFETENSORS),
    ("Qwen/Qwen1.5-MoE-A2.7B", 14_315_784_192, SAFETENSORS),
    ("meta-llama/Llama-3.1-8B", 8_030_261_248, SAFETENSORS),
    ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1_100_048_384, SAFETENSORS),
    ("HuggingFaceTB/SmolLM3-3B", 3_075_098_624, SAFETENSORS),
    ("mistralai/Mistral-7B-v0.1", 7_241_732_096, SAFETENSORS),
    ("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400, SAFETENSORS),
    ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704, SAFETENSORS),
    ("google/gemma-2-9b", 9_241_705_984, SAFETENSORS),
    ("google/gemma-3-27b-it", 27_432_406_640, SAFETENSORS),
    ("microsoft/phi-2", 2_779_683_840, SAFETENSORS),
    ("deepseek-ai/deepseek-coder-1.3b-instruct", 1_346_471_936, SAFETENSORS),
    ("01-ai/Yi-6B", 6_061_035_520, SAFETENSORS),
    ("allenai/OLMo-2-1124-7B", 7_298_617_344, SAFETENSORS),
    ("bigcode/starcoder2-15b", 15_957_889_024, SAFETENSORS),
    ("stabilityai/stablelm-2-1_6b", 1_644_515_328, SAFETENSORS),
    ("ibm-granite/granite-3.1-8b-instruct", 8_170_848_256, SAFETENSORS),
    ("internlm/internlm2-1_8b", 1_889_110_016, SAFETENSORS),
    ("Qwen/Qwen2.5-72B-Instruct", 72_706_203_648, SAFETENSORS),
    ("Qwen/Qwen3-8B", 8_190_735_360, SAFETENSORS),
    ("Qwen/Qwen3-30B-A3B", 30_532_122_624, SAFETENSORS),
    ("mistralai/Ministral-8B-Instruct-2410", 8_019_808_256, QUOTED),
    ("google/gemma-3-1b-it", 999_885_952, QUOTED),
    ("google/gemma-3-4b-it", 4_300_079_472, SAFETENSORS),
    ("microsoft/Phi-3-mini-4k-instruct", 3_821_079_552, QUOTED),
    ("deepseek-ai/deepseek-llm-7b-base", 6_910_365_696, QUOTED),
    ("allenai/OLMoE-1B-7B-0924", 6_919_161_856, SAFETENSORS),
    ("EleutherAI/gpt-j-6b", 6_050_882_784, QUOTED),
    ("EleutherAI/pythia-6.9b", 6_857_302_016, PYTHIA),
    ("EleutherAI/gpt-neox-20b", 20_554_567_680, CARD),
    ("bigscience/bloom-560m", 559_214_592, CARD),
    ("Qwen/Qwen-72B", 72_287_920_128, CARD),
    ("facebook/opt-1.3b", 1_315_758_080, "num_parameters() of the checkpoint, printed in public notebooks"),
    ("togethercomputer/RedPajama-INCITE-Base-3B-v1", 2_775_864_320, QUOTED),
    ("Qwen/Qwen3.5-0.8B", 852_985_920 - 100_592_896, "the model's count in public code, without its image tower's"),
    ("Qwen/Qwen3.5-2B", 2_213_241_664 - 331_416_576, "the model's count in public code, without its image tower's"),
    ("openai-community/gpt2", 124_439_808, "num_parameters() of the checkpoint, printed in public notebooks"),
]


@pytest.mark.parametrize(("name", "total", "source"), PUBLISHED, ids=[row[0] for row in PUBLISHED])
def test_the_total_is_the_published_one(name, total, source):
    shape = find_shape(name)
    assert shape.total_params + shape.vision_params == total, source


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # two tables of V x h; a layer: c_attn with bias, c_proj, w1, w2, c_proj, two norms; the last norm
        ("Qwen-1_8B", 2 * 151936 * 2048 + 24 * (2048 * 6144 + 6144 + 2048**2 + 3 * 2048 * 5504 + 4096) + 2048),
        ("Qwen-7B", 2 * 151936 * 4096 + 32 * (4096 * 12288 + 12288 + 4096**2 + 3 * 4096 * 11008 + 8192) + 4096),
        ("Qwen-14B", 2 * 152064 * 5120 + 40 * (5120 * 15360 + 15360 + 5120**2 + 3 * 5120 * 13696 + 10240) + 5120),
        ("Qwen-72B", 2 * 152064 * 8192 + 80 * (8192 * 24576 + 24576 + 8192**2 + 3 * 8192 * 24576 + 16384) + 8192),
        # wqkv for 32 + 2 x 8 heads of 128, wo, w1, w3, w2, two norms
        ("internlm2-7b", 2 * 92544 * 4096 + 32 * (4096 * 6144 + 4096**2 + 3 * 4096 * 14336 + 8192) + 4096),
    ],
)
def test_families_with_code_of_their_own_are_counted_as_by_hand(name, total):
    assert find_shape(name).total_params == total


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("openai/gpt-oss-20b", 20.91),
        ("openai/gpt-oss-120b", 116.83),
        ("nvidia/Nemotron-Mini-4B-Instruct", 4.19),
        ("arcee-ai/AFM-4.5B", 4.62),
        ("zai-org/GLM-4-9B-0414", 9.40),
        ("ByteDance-Seed/Seed-OSS-36B-Base", 36.15),
    ],
)
def test_the_total_is_the_one_of_the_card(name, billions):
    # gpt-oss: arXiv 2508.10925, table 1; the others: their cards
    assert find_shape(name).total_params / 1e9 == pytest.approx(billions, abs=0.005)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        # Names: 4B, 27B, 35B-A3B, 122B-A10B, 397B-A17B (with a tower of 0.46 that is not loaded), 80B-A3B, 106B-A12B.
        # What counts as active differs between cards by the embeddings.
        ("Qwen/Qwen3.5-4B", 4, None),
        ("Qwen/Qwen3.5-27B", 27, None),
        ("Qwen/Qwen3.5-35B-A3B", 35, 3),
        ("Qwen/Qwen3.5-122B-A10B", 122, 10),
        ("Qwen/Qwen3.5-397B-A17B", 396, 17),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 80, 3),
        ("zai-org/GLM-4.5-Air", 107, 12),
    ],
)
def test_a_layered_model_has_the_parameters_of_its_name(name, billions, active):
    shape = find_shape(name)
    assert round(shape.total_params / 1e9) == billions
    if active is not None:
        embedding = shape.vocab * shape.hidden
        assert shape.product_params / 1e9 - 1 < active < (shape.product_params + 2 * embedding) / 1e9 + 0.5


def test_gemma_3_adds_its_vision_tower():
    # Gemma 3 report (arXiv 2503.19786), table 1: vision encoder 417M for 4B, 12B and 27B; the rest is the projector
    assert find_shape("google/gemma-3-4b-it").vision_params == pytest.approx(417e6, rel=0.01)
    assert find_shape("google/gemma-3-1b-it").vision_params == 0
