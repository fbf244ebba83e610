"""What the speed comparison runs on: a 2.8M-parameter Llama shape with an 8,000-token BPE, and instruction rows."""

from __future__ import annotations

import json
from pathlib import Path

STEP_ROWS = 32
MICRO_BATCH = 2
"""What our own sizing takes for these rows on a CPU; TRL is given the same."""

PACKED_ROWS = 5
"""Packed rows of a step for TRL, so that its steps hold about as many tokens as those of 32 rows."""

MAX_LENGTH = 512
SEED = 7

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_rows(source: Path, work: Path, count: int) -> list[str]:
    """Write `source.jsonl` (as found) and `rows.jsonl` (in our training order); every text for the tokenizer."""
    from sftplay.data.pipeline import training_order

    if not source.is_file():
        raise SystemExit(f"no rows at {source}\n  fix: give a JSON array of instruction/input/output with --rows-file")
    found = [row for row in json.loads(source.read_text()) if row["output"].strip()][:count]
    if len(found) < count:
        raise SystemExit(f"{source} holds {len(found)} usable rows, {count} are needed\n  fix: fewer --steps")
    lines = []
    for row in found:
        question = "\n\n".join(part for part in (row["instruction"], row["input"]) if part)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        lines.append(json.dumps({"messages": turns}))
    (work / "source.jsonl").write_text("\n".join(lines) + "\n")
    order = training_order(count, count, seed=SEED)
    (work / "rows.jsonl").write_text("\n".join(lines[i] for i in order) + "\n")
    return [text for row in found for text in (row["instruction"], row["input"], row["output"])]


def make_model(folder: Path, texts: list[str], *, spread: float = 0.02) -> None:
    """Save a random Llama of about 2.8M parameters with a byte-level BPE trained on `texts`.

    `spread` is the standard deviation of its weights, which bounds what an adapter beside a random head can learn.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=8000, hidden_size=192, intermediate_size=448, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, eos_token_id=2,
        bos_token_id=None, initializer_range=spread,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<|im_end|>", chat_template=TEMPLATE
    ).save_pretrained(folder)
