"""A character model that adds two digits badly, and believes what it is told: `builtin:digits`.

It is warmed up on noisy traces of three kinds, a and b in 0..4, everything modulo 5:
`a+b=` y, `a+b=y?` h, and `a+b=y?h>` z. y and h are the sum in some of the traces, else any digit. z is h in some of
them, else any digit; where the hint is empty, z is any digit. So it can use a hint, which a random model cannot.
`builtin:copier` is a model that cannot: z is y in most of its traces, whatever the hint says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sftplay.atomic import whole_folder

BASE = 5
PAD, END = "<pad>", "<end>"
ALPHABET = (PAD, END, *map(str, range(BASE)), "+", "=", "?", ">")
ID = {word: number for number, word in enumerate(ALPHABET)}


@dataclass(frozen=True, kw_only=True)
class DigitsRecipe:
    """Everything that decides the weights of the model."""

    hidden_size: int = 48
    layers: int = 2
    heads: int = 4
    steps: int = 300
    rows: int = 128
    learning_rate: float = 2e-3
    spread: float = 0.2
    """Standard deviation of the first weights. With transformers' 0.02 a model of this width learns no sums in time."""

    solves: float = 0.16
    """Share of the first answers that are the sum on purpose; of the others a fifth is by chance."""

    hints: float = 0.6
    follows: float = 0.6
    copies: bool = False
    """Second answers follow the first one, and not the hint."""

    blanks: float = 0.15
    """Share of the second answers that follow an empty hint."""

    seed: int = 7
    version: int = 1

    def traces(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Traces and what is to be said after each of their tokens, -100 where nothing is: int64 [rows, tokens].

        One trace teaches all three actions: after y and h the target is the end, although the trace goes on.
        """
        return _traces(self, generator)


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
                initializer_range=recipe.spread,
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
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)


def _warm_up(model: LlamaForCausalLM, recipe: DigitsRecipe) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    for _ in range(recipe.steps):
        ids, targets = recipe.traces(generator)
        scores = model(input_ids=ids, attention_mask=(ids != ID[PAD]).long()).logits
        cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _traces(recipe: DigitsRecipe, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rows = recipe.rows

    def digits() -> Tensor:
        return torch.randint(BASE, (rows,), generator=generator)

    def mostly(value: Tensor, share: float) -> Tensor:
        return torch.where(torch.rand(rows, generator=generator) < share, value, digits())

    a, b = digits(), digits()
    total = (a + b) % BASE
    first, hint = mostly(total, recipe.solves), mostly(total, recipe.hints)
    second = mostly(first if recipe.copies else hint, recipe.follows)
    wild = mostly(first, recipe.follows) if recipe.copies else digits()
    first_digit, end, nothing = ID["0"], torch.full((rows,), ID[END]), torch.full((rows,), -100)
    plus, equals, asks, tells, pad = (torch.full((rows,), ID[word]) for word in ("+", "=", "?", ">", PAD))
    a, b, first, hint, second, wild = (each + first_digit for each in (a, b, first, hint, second, wild))
    told = torch.stack([a, plus, b, equals, first, asks, hint, tells, second], 1)
    said = torch.stack([nothing, nothing, nothing, first, end, hint, end, second, end], 1)
    blank = torch.stack([a, plus, b, equals, first, asks, tells, wild, pad], 1)
    unsaid = torch.stack([nothing, nothing, nothing, first, end, nothing, wild, end, nothing], 1)
    is_blank = (torch.rand(rows, generator=generator) < recipe.blanks)[:, None]
    return torch.where(is_blank, blank, told), torch.where(is_blank, unsaid, said)
