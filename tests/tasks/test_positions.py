"""Rows that are longer than the positions of the model, or of tokens that it does not have."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import Inputs, built, train
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from sftplay.cli import main
from sftplay.errors import ConfigError
from sftplay.generate.generate import Generator, answer_ids


def save(kind: str, folder: Path, tiny_llama: Path, *, positions: int) -> Path:
    """A random model with the small run's tokenizer."""
    shutil.copytree(tiny_llama, folder)
    ends: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None}
    if kind == "gpt2":
        GPT2LMHeadModel(
            GPT2Config(vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=positions, **ends)
        ).save_pretrained(folder)
    else:
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                max_position_embeddings=positions, **ends,
            )
        ).save_pretrained(folder)  # fmt: skip
    return folder


RUN = {"tuning__mode": "full", "train__max_steps": 1, "eval__before": False, "eval__after": False}


def test_rows_behind_learned_positions_are_refused_and_rows_within_them_are_not(
    inputs: Inputs, tiny_llama: Path, tmp_path: Path
):
    """Otherwise torch ends the run with "index out of range in self", and CUDA with an assert that names no row."""
    model = save("gpt2", tmp_path / "model", tiny_llama, positions=32)
    given = Inputs(model, inputs.train, inputs.held_out)
    with pytest.raises(
        ConfigError, match=r"rows of up to \d+ tokens do not fit the 32 positions that .* has"
    ) as refusal:
        built(tmp_path / "long", given, **RUN, model__max_seq_len=512)
    assert "max_seq_len" in refusal.value.where
    assert "model.max_seq_len: 32" in refusal.value.fix
    assert train(tmp_path / "short", given, **RUN, model__max_seq_len=32, data__too_long="drop").losses


def test_answers_end_at_the_last_learned_position_whatever_batch_they_are_in(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = save("gpt2", tmp_path / "model", tiny_llama, positions=24)
    model, tokenizer = GPT2LMHeadModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    lengths = [4, 20, 9, 23, 14, 20, 4, 14]
    prompts = [[(7 * n + k) % 397 + 3 for k in range(length)] for n, length in enumerate(lengths)]
    found = answer_ids(Generator(model, tokenizer, [2], 12), prompts, batch_size=4)
    assert "note: 5 answers cut at the 24 positions that the model has" in capsys.readouterr().out
    for prompt, answer in zip(prompts, found, strict=True):
        most = min(12, 24 - len(prompt))
        asked = torch.tensor([prompt])
        alone = model.generate(asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=most)
        assert answer == alone[0, len(prompt) :].tolist()


def test_prompts_and_completions_behind_learned_positions_are_refused(tiny_llama: Path, tmp_path: Path):
    prompts = grpo_inputs(save("gpt2", tmp_path / "model", tiny_llama, positions=24), tmp_path / "rows")
    with pytest.raises(ConfigError, match="do not fit the 24 positions") as refusal:
        built(tmp_path, prompts, **grpo_options(prompts))
    assert "grpo.max_completion_length" in refusal.value.fix


def test_rows_behind_positions_that_are_computed_are_trained_on_with_a_note(
    inputs: Inputs, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = save("llama", tmp_path / "model", tiny_llama, positions=32)
    given = Inputs(model, inputs.train, inputs.held_out)
    assert train(tmp_path / "long", given, **RUN, model__max_seq_len=512).losses
    said = capsys.readouterr().out
    assert "tokens are longer than the 32 positions that" in said
    assert "model.max_seq_len: 32" in said
    train(tmp_path / "enough", Inputs(tiny_llama, inputs.train, inputs.held_out), **RUN, model__max_seq_len=512)
    assert "was made for" not in capsys.readouterr().out


@pytest.mark.parametrize("pads", [False, True], ids=["a token of the rows", "the token that pads"])
def test_a_token_without_an_embedding_is_refused_before_a_step(
    pads: bool, inputs: Inputs, tiny_llama: Path, tmp_path: Path
):
    """As where a token was added to the tokenizer alone; torch would say "index out of range in self"."""
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"filler{n}" for n in range(400 - len(tokenizer))])
    tokenizer.add_tokens(["[PAD]"])
    if pads:
        tokenizer.pad_token = "[PAD]"
    tokenizer.save_pretrained(model)
    given = Inputs(model, inputs.train, inputs.held_out)
    if not pads:
        assert train(tmp_path / "unused", given, **RUN).losses  # no row has it
        rows = tmp_path / "rows.jsonl"
        rows.write_text(inputs.train.read_text() + '{"prompt": "a stone", "completion": "a [PAD] b"}\n')
        given = Inputs(model, rows, inputs.held_out)
    with pytest.raises(ConfigError, match=r"token 400 \('\[PAD\]'\) has no embedding: .* has 400, .* 401 tokens"):
        built(tmp_path / "used", given, **RUN)


def test_test_rows_behind_learned_positions_are_refused_as_those_to_train_on_are(
    inputs: Inputs, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The run's own rows fit, whatever `model.max_seq_len` would allow."""
    model = save("gpt2", tmp_path / "model", tiny_llama, positions=40)
    short, long = tmp_path / "short.jsonl", tmp_path / "long.jsonl"
    short.write_text('{"prompt": "a stone", "completion": "light"}\n{"prompt": "a river", "completion": "boats"}\n')
    long.write_text('{"prompt": "how long", "completion": "' + "river stone light boats " * 20 + '"}\n')
    train(tmp_path, Inputs(model, short, short), **RUN, model__max_seq_len=512, data__val_path=None, data__split=0)
    capsys.readouterr()
    assert main(["eval-test", "--config", str(tmp_path / "run.yaml"), f"data.test_path={long}"]) == 2
    assert "do not fit the 40 positions" in capsys.readouterr().err
