"""A character model that adds two digits badly, names answers to others, and believes what it is told: `builtin:digits`.

It is warmed up on noisy traces of three kinds, a and b in 0..4, everything modulo 5:
`a+b=` y, `a+b=y?` h, and `a+b=y?h>` z. y and h are the sum in some of the traces, else any digit. z is h in some of
them, else any digit; where the hint is empty, z is any digit. So it can use a hint, which a random model cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sftplay.atomic import whole_folder

BASE = 5
PAD, END = "<pad>", "<end>"
ALPHABET = (PAD, END, *map(str, range(BASE)), "+", "=", "?", ">")


@dataclass(frozen=True, kw_only=True)
class DigitsRecipe:
    """Everything that decides the weights of the model."""

    hidden_size: int = 48
    layers: int = 2
    heads: int = 4
    steps: int = 300
    rows: int = 128
    learning_rate: float = 2e-3
    solves: float = 0.16
    """Share of the first answers that are the sum on purpose; of the others a fifth is by chance."""

    hints: float = 0.6
    follows: float = 0.6
    blanks: float = 0.15
    """Share of the second answers that follow an empty hint."""

    seed: int = 7
    version: int = 1


def make_digits(folder: Path, recipe: DigitsRecipe, *, say: Callable[[str], None]) -> None:
    """Train the model, a few seconds, and save it with its tokenizer in `folder`."""
    say(f"making {folder.name} (once, some seconds)")
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(ALPHABET),
                hidden_size=recipe.hidden_size,
                intermediate_size=4 * recipe.hidden_size,
                num_hidden_layers=recipe.layers,
                num_attention_heads=recipe.heads,
                num_key_value_heads=recipe.heads,
                max_position_embeddings=64,
                tie_word_embeddings=False,
                bos_token_id=None,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                dtype="float32",
            )
        )
        _warm_up(model, recipe)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(ALPHABET)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def _warm_up(model: LlamaForCausalLM, recipe: DigitsRecipe) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    for _ in range(recipe.steps):
        traces = [_trace(recipe, generator) for _ in range(recipe.rows)]
        width = max(len(prompt) + 2 for prompt, _ in traces)
        ids = torch.full((recipe.rows, width), ALPHABET.index(PAD))
        labels = torch.full_like(ids, -100)
        for n, (prompt, answer) in enumerate(traces):
            row = [ALPHABET.index(character) for character in (*prompt, answer, END)]
            ids[n, : len(row)] = torch.tensor(row)
            labels[n, len(row) - 2 : len(row)] = ids[n, len(row) - 2 : len(row)]
        model(input_ids=ids, attention_mask=(ids != ALPHABET.index(PAD)).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _trace(recipe: DigitsRecipe, generator: torch.Generator) -> tuple[str, str]:
    """A prompt and what follows it."""

    def digit() -> int:
        return int(torch.randint(BASE, (), generator=generator))

    def mostly(value: int, share: float) -> int:
        other = digit()
        return value if torch.rand((), generator=generator).item() < share else other

    a, b, kind = digit(), digit(), int(torch.randint(3, (), generator=generator))
    first = mostly((a + b) % BASE, recipe.solves)
    hint = mostly((a + b) % BASE, recipe.hints)
    if kind == 0:
        return f"{a}+{b}=", str(first)
    if kind == 1:
        return f"{a}+{b}={first}?", str(hint)
    if torch.rand((), generator=generator).item() < recipe.blanks:
        return f"{a}+{b}={first}?>", str(digit())
    told = digit()  # any digit: following needs no sum
    return f"{a}+{b}={first}?{told}>", str(mostly(told, recipe.follows))
