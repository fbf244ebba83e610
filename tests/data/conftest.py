"""A small byte-level tokenizer with the special tokens of every template style, and configs that point at files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_reference import CONTROL, shipped_templates
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sftplay.config.run import RunConfig

SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<bos>", "<|eot_id|>"]
SPECIALS += ["<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>"]
SPECIALS += ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|endoftext|>"]
WORDS = ["the", "old", "boat", "carries", "green", "salt", "and", "seven", "stones", "over", "a", "quiet", "hill"]

# How Llama 3, Qwen and most later tokenizers cut a text before merging: line breaks stay together.
PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="session")
def modern() -> str:
    """A tokenizer of today's kind, with every control token of trl's templates, as json text."""
    found = {token for text in shipped_templates().values() for token in CONTROL.findall(text)}
    specials = [*SPECIALS, "[INST]", "[/INST]", "<｜begin▁of▁sentence｜>", "<|end_of_turn|>", *sorted(found)]
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(set(specials)) + 600,
        special_tokens=list(dict.fromkeys(specials)),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 12)) + f", {i}.\n\n" for i in range(300)]
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer.to_str()


@pytest.fixture
def modern_tokenizer(modern: str) -> PreTrainedTokenizerFast:
    """A fresh tokenizer of today's kind: a test may change it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(modern), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture(scope="session")
def trained() -> str:
    """The trained tokenizer as the json text of the tokenizers library."""
    lines = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 12)).capitalize() + f", {i}.\n" for i in range(300)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer.to_str()


@pytest.fixture
def tokenizer(trained: str) -> PreTrainedTokenizerFast:
    """A fresh tokenizer: a test may change it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RunConfig]:
    """`config(train_path, **data options)`: ChatML rows of at most 128 tokens, cached below tmp_path."""

    def make(train_path: Path | str, *, max_seq_len: int = 128, **data: Any) -> RunConfig:
        data = {"template": "chatml", "processed_dir": str(tmp_path / "processed"), **data}
        tree = {"model": {"name": "x", "max_seq_len": max_seq_len}, "data": {"train_path": str(train_path), **data}}
        # Whoever writes it down may lose most of a row; tests that do not are in test_cut_rows.py.
        return RunConfig.model_validate(tree).with_origins({"data.too_long": "a test"})

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """`write_rows(rows, name)`: a jsonl file of them."""

    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
