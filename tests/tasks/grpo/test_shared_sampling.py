"""The kit's sampler against `generate` of transformers: the same tokens, random numbers and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from grpo_toy import LETTERS, grpo_trainer, letter_tokenizer, tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.tasks.grpo import generate
from sftplay.tasks.grpo.generate import CannotShare, PromptSampler

ENDS = [1, 5, 9, 30]
"""Four of 45 tokens end a completion, so that lengths differ."""


def prompts(*, groups: int = 3, rows: int = 4, seed: int = 1) -> dict[str, torch.Tensor]:
    """Prompts of 4, 9, 14.. tokens, each for so many rows in a row, padded on the left."""
    torch.manual_seed(seed)
    width = 5 * groups - 1
    ids, mask = torch.zeros(groups, width, dtype=torch.long), torch.zeros(groups, width, dtype=torch.long)
    for n in range(groups):
        length = 4 + 5 * n
        ids[n, -length:], mask[n, -length:] = torch.randint(3, 40, (length,)), 1
    return {"input_ids": ids.repeat_interleave(rows, 0), "attention_mask": mask.repeat_interleave(rows, 0)}


def config(**changes: Any) -> GenerationConfig:
    values = {"do_sample": True, "max_new_tokens": 24, "pad_token_id": 0, "eos_token_id": ENDS, "top_k": 0}
    return GenerationConfig(**(values | changes))


def sample(model: Any, how: GenerationConfig, sampler: PromptSampler | None, **inputs: Any) -> tuple[Any, Any]:
    """The tokens, and the state of the random numbers after them."""
    inputs = inputs or prompts()
    if sampler is not None and sampler.usable is None:
        with torch.no_grad():
            assert sampler.is_usable(model, lambda: model.generate(**inputs, generation_config=how))
    torch.manual_seed(7)
    with sampler.within(model) if sampler else nullcontext(), torch.no_grad():
        return model.generate(**inputs, generation_config=how), torch.get_rng_state()


def sampler_of(rows: int, *, group: int = 4) -> PromptSampler:
    return PromptSampler(AdaptiveBatches(rows, "generation"), rows_per_prompt=group)


def assert_same(model: Any, how: GenerationConfig, *, sizes: Sequence[int] = (5,), **inputs: Any) -> None:
    wanted, state = sample(model, how, None, **inputs)
    for size in sizes:
        found, left = sample(model, how, sampler_of(size), **inputs)
        assert torch.equal(found, wanted)
        assert torch.equal(left, state)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(letter_tokenizer()).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 20, "min_p": 0.2, "temperature": 1.5},
        {"repetition_penalty": 1.5},
        {"do_sample": False, "repetition_penalty": 1.2},
        {"suppress_tokens": [7, 8]},
        {"eos_token_id": None, "max_new_tokens": 6},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_tokens_and_random_numbers_are_those_of_generate_however_many_rows_fit(changes: dict[str, Any], model: Any):
    assert_same(model, config(**changes), sizes=[12, 5] if changes.get("do_sample", True) else [5])


def test_rows_of_a_prompt_need_not_stand_together_and_prompts_may_be_alone(model: Any):
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    assert_same(model, config(), sizes=[12, 1], **{name: each[order] for name, each in prompts().items()})
    assert_same(model, config(), **prompts(groups=5, rows=1))
    assert_same(model, config(), **prompts(groups=1, rows=6))  # nothing is padded


def test_keys_that_heads_share_other_attention_and_adapters_change_nothing():
    grouped = tiny_llama(letter_tokenizer(), num_key_value_heads=1).eval()
    assert_same(grouped, config())
    grouped.set_attn_implementation("eager")
    assert_same(grouped, config())
    adapted = get_peft_model(grouped, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    assert_same(adapted.eval(), config())


def test_a_cpu_whose_kernel_draws_a_tensor_at_once_gives_the_same(model: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "draws_one_by_one", lambda: False)
    assert_same(model, config())


def test_log_probabilities_are_those_of_the_scores_that_generate_sampled_from(model: Any):
    how = config(temperature=0.6, return_dict_in_generate=True, output_scores=True)
    wanted, _ = sample(model, how, None)
    tokens = wanted.sequences[:, -len(wanted.scores) :]
    for size in (12, 5):
        sampler = sampler_of(size)
        sampler.records = True
        found, _ = sample(model, config(temperature=0.6), sampler)
        assert torch.equal(found, wanted.sequences)
        kept = sampler.take_logps([len(wanted.scores)] * 12)
        assert kept is not None
        logps = torch.tensor(kept)
        for step, scores in enumerate(wanted.scores):
            of_step = scores.log_softmax(-1).gather(1, tokens[:, step, None])[:, 0]
            ongoing = ~torch.isin(tokens[:, :step], torch.tensor(ENDS)).any(1)
            torch.testing.assert_close(logps[ongoing, step], of_step[ongoing], rtol=1e-5, atol=1e-5)


def test_each_prompt_is_computed_once_and_rows_that_have_ended_are_not_computed(model: Any):
    sampler, how = sampler_of(12), config(suppress_tokens=[0])  # no row samples the padding
    sample(model, how, sampler)  # with the proof before it
    seen: list[torch.Size] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, named: seen.append(named["input_ids"].shape), with_kwargs=True
    )
    found, _ = sample(model, how, sampler)
    hook.remove()
    answers = found[:, 14:]
    lengths = [int(row.ne(0).sum()) for row in answers]
    assert len(set(lengths)) > 4
    assert seen[0] == (3, 14)
    assert [shape[0] for shape in seen[1:]] == [
        sum(length > step for length in lengths) for step in range(1, max(lengths))
    ]
    assert all(shape[1] == 1 for shape in seen[1:])


def test_memory_that_runs_out_changes_no_answer(model: Any, capsys: pytest.CaptureFixture[str]):
    wanted, state = sample(model, config(), None)
    sampler, calls = sampler_of(12), []

    def run_out(_: Any, __: Any, named: dict[str, Any]) -> None:
        calls.append(len(named["input_ids"]))
        if len(calls) == 25:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.model.register_forward_pre_hook(run_out, with_kwargs=True)
    found, left = sample(model, config(), sampler)
    hook.remove()
    assert len(calls) > 25
    assert sampler.batches.batch_size == 6
    assert "it goes on with 6 rows at a time" in "".join(capsys.readouterr())
    assert torch.equal(found, wanted)
    assert torch.equal(left, state)


@pytest.mark.parametrize(
    ("changes", "how", "why"),
    [
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, {}, "layers of another kind"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}, {}, "the longest row"),
        ({}, {"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({}, {"max_time": 60.0}, "MaxTimeCriteria"),
        ({}, {"cache_implementation": "static"}, "no plain cache"),
        ({}, {"num_return_sequences": 2}, "num_return_sequences"),
    ],
    ids=str,
)
def test_what_is_not_sampled_row_by_row_is_refused_before_anything_is_drawn(
    changes: dict[str, Any], how: dict[str, Any], why: str
):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    other = Qwen2ForCausalLM(Qwen2Config(vocab_size=45, num_key_value_heads=2, **shape, **changes)).eval()
    asked = prompts()
    before = torch.get_rng_state()
    with pytest.raises(CannotShare, match=why), sampler_of(12).within(other):
        other.generate(**asked, generation_config=config(disable_compile=True, **how))
    assert torch.equal(torch.get_rng_state(), before)
    assert "generate" not in vars(other)


def test_a_model_whose_rows_depend_on_each_other_is_found_out_by_the_proof(capsys: pytest.CaptureFixture[str]):
    model = tiny_llama(letter_tokenizer()).eval()
    model.model.layers[0].register_forward_hook(lambda _, __, states: states + 0.1 * states.mean(0, keepdim=True))
    sampler = sampler_of(12)
    with torch.no_grad():
        assert not sampler.is_usable(model, lambda: model.generate(**prompts(), generation_config=config()))
    assert "by transformers, each with a prompt of its own: log-probabilities differ" in capsys.readouterr().out
    assert "generate" not in vars(model)


def test_nan_is_refused_as_torch_refuses_it(model: Any):
    hook = model.lm_head.register_forward_hook(lambda _, __, scores: scores * torch.nan)
    sampler = sampler_of(12)
    sampler.usable = True
    with pytest.raises(RuntimeError, match=r"inf.*nan"):
        sample(model, config(), sampler)
    hook.remove()


def test_trls_trainer_samples_the_same_through_it(tmp_path: Any):
    trainer = grpo_trainer(tmp_path, rows=[{"prompt": LETTERS[:5]}])
    asked = [row[mask.bool()].tolist() for row, mask in zip(*prompts().values(), strict=True)]
    trainer.model.eval()
    torch.manual_seed(7)
    wanted, _ = trainer._generate_single_turn(asked, None, {}, 4)
    sampler = sampler_of(5)
    assert sampler.is_usable(trainer.model, lambda: trainer._generate_single_turn(asked, None, {}, 4))
    torch.manual_seed(7)
    with sampler.within(trainer.model):
        found, _ = trainer._generate_single_turn(asked, None, {}, 4)
    assert list(found) == list(wanted)
