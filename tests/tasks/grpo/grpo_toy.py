"""A tiny model that writes digits and letters, and TRL's GRPO trainer around it, for tests of the kit's parts."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

LETTERS = string.ascii_lowercase + string.digits + " +-*=."


def len_reward(completions: list[str], **_: Any) -> list[float]:
    """A number that differs between completions."""
    return [float(len(text)) for text in completions]


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    vocab = {token: n for n, token in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_llama(tokenizer: Any, *, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers of 32 numbers, with random weights."""
    torch.manual_seed(seed)
    shape = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2,
    }  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, **(shape | changes),
    )  # fmt: skip
    return LlamaForCausalLM(config)


def grpo_trainer(
    folder: Path,
    *,
    rows: list[dict[str, Any]],
    reward: Any = len_reward,
    kind: type[GRPOTrainer] = GRPOTrainer,
    model: Any = None,
    callbacks: Any = None,
    **changes: Any,
) -> Any:
    """A trainer of `kind` on the CPU, with `changes` to its GRPOConfig."""
    tokenizer = letter_tokenizer()
    values = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4,
        "max_completion_length": 12, "use_cpu": True, "bf16": False, "fp16": False, "activation_checkpointing": False,
        "report_to": "none", "logging_steps": 1, "save_strategy": "no", "shuffle_dataset": False, "max_steps": 1,
        "learning_rate": 1e-3, "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return kind(
        model=model if model is not None else tiny_llama(tokenizer),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(output_dir=str(folder), **(values | changes)),
        callbacks=callbacks,
    )
