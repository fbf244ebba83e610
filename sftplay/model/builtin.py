"""Tiny models that need no download: `tiny` is shipped in data/base; the toys, with tasks of their own, are made once.

A built-in model is an ordinary folder for `from_pretrained`. It knows a little English and how to copy, recase and
answer inside chat markers; it serves to show and test the kit, not to be useful by itself."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sftplay.atomic import locked, whole_folder
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.places import shipped

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
    init_std: float = 0.2
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
        """Return traces and the target after each of their tokens, -100 for none: int64 [rows, tokens].

        One trace teaches all three actions: after y and h the target is the end, although the trace continues.
        """
        rows, mostly = self.rows, partial(self._mostly, generator=generator)
        a, b = (torch.randint(BASE, (rows,), generator=generator) for _ in range(2))
        total = (a + b) % BASE
        first, hint = mostly(total, self.solves), mostly(total, self.hints)
        second = mostly(first if self.copies else hint, self.follows)
        wild = mostly(first, self.follows) if self.copies else torch.randint(BASE, (rows,), generator=generator)
        first_digit, end, nothing = ID["0"], torch.full((rows,), ID[END]), torch.full((rows,), -100)
        plus, equals, asks, gives, pad = (torch.full((rows,), ID[word]) for word in ("+", "=", "?", ">", PAD))
        a, b, first, hint, second, wild = (digit + first_digit for digit in (a, b, first, hint, second, wild))
        hinted = torch.stack([a, plus, b, equals, first, asks, hint, gives, second], 1)
        hinted_targets = torch.stack([nothing, nothing, nothing, first, end, hint, end, second, end], 1)
        blank = torch.stack([a, plus, b, equals, first, asks, gives, wild, pad], 1)
        blank_targets = torch.stack([nothing, nothing, nothing, first, end, nothing, wild, end, nothing], 1)
        is_blank = (torch.rand(rows, generator=generator) < self.blanks)[:, None]
        return torch.where(is_blank, blank, hinted), torch.where(is_blank, blank_targets, hinted_targets)

    def _mostly(self, digits: Tensor, share: float, *, generator: torch.Generator) -> Tensor:
        """Keep a share of the digits, and replace the others by chance."""
        is_kept = torch.rand(self.rows, generator=generator) < share
        return torch.where(is_kept, digits, torch.randint(BASE, (self.rows,), generator=generator))


def make_digits(folder: Path, recipe: DigitsRecipe, *, say: Callable[[str], None]) -> None:
    """Train the model, a few seconds, and save it with its tokenizer in `folder`."""
    say(f"making {folder.name} (once, some seconds)")
    words = Tokenizer(models.WordLevel(ID, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=PAD, eos_token=END)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = make_llama(
            recipe, tokenizer, intermediate_size=4 * recipe.hidden_size, max_position_embeddings=64,
            initializer_range=recipe.init_std, tie_word_embeddings=False,
        )  # fmt: skip
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
    save_model(folder, model, tokenizer=tokenizer)


def make_llama(recipe: Any, tokenizer: PreTrainedTokenizerFast, **shape: Any) -> LlamaForCausalLM:
    """Make an untrained fp32 Llama of the recipe's `hidden_size`, `layers` and `heads`; the caller seeds torch."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden_size, num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32", **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def save_model(folder: Path, model: LlamaForCausalLM, *, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save both in `folder`, whole or not at all; generation stops at the tokenizer's end token."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    with whole_folder(folder) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)


@dataclass(frozen=True, kw_only=True)
class StepsRecipe(DigitsRecipe):
    """Everything that decides the weights of the model. `solves` is the share of steps that are right on purpose."""

    steps: int = 800
    solves: float = 0.6
    hints: float = 0.5
    """Share of the hints that are the first wrong step on purpose."""

    follows: float = 0.8
    """Share of the second answers that keep the steps before the hinted step."""

    def traces(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return traces and targets as `DigitsRecipe` does."""
        rows, mostly = self.rows, partial(self._mostly, generator=generator)
        a, b, c, d = torch.randint(BASE, (4, rows), generator=generator)
        is_held_out = (a + 2 * b + 3 * c + 4 * d) % BASE == 0  # as in data/step_sums/generate.py
        operands = [a, b, c, torch.where(is_held_out, (d + 1) % BASE, d)]
        first, is_right = list[Tensor](), list[Tensor]()
        total, before = operands[0], operands[0]
        for operand in operands[1:]:
            total = (total + operand) % BASE
            before = mostly((before + operand) % BASE, self.solves)
            first.append(before)
            is_right.append(before == total)
        wrong = ~torch.stack([*is_right, torch.zeros(rows, dtype=torch.bool)])
        place = (wrong.int().argmax(0) + 1) % (len(first) + 1)
        picked = torch.randint(len(first) + 1, (rows,), generator=generator)
        hint = torch.where(torch.rand(rows, generator=generator) < self.hints, place, picked)
        keeps = torch.rand(rows, generator=generator) < self.follows
        is_blank = torch.rand(rows, generator=generator) < self.blanks
        redone_from = torch.where(hint == 0, len(first) + 1, hint) * (keeps & ~is_blank)
        second, before = list[Tensor](), operands[0]
        for step, (operand, kept) in enumerate(zip(operands[1:], first, strict=True), 1):
            before = torch.where(redone_from > step, kept, mostly((before + operand) % BASE, self.solves))
            second.append(before)
        zero, nothing = ID["0"], torch.full((rows,), -100)
        plus, equals, asks, gives, end, pad = (torch.full((rows,), ID[word]) for word in ("+", "=", "?", ">", END, PAD))
        asked = [token for operand in operands for token in (operand + zero, plus)]
        asked[-1] = equals
        y, z, h = [digit + zero for digit in first], [digit + zero for digit in second], hint + zero
        untrained = [nothing] * (len(asked) - 1)
        hinted = torch.stack([*asked, *y, asks, h, gives, *z], 1)
        hinted_targets = torch.stack([*untrained, *y, end, h, end, *z, end], 1)
        blank = torch.stack([*asked, *y, asks, gives, *z, pad], 1)
        blank_targets = torch.stack([*untrained, *y, end, nothing, *z, end, nothing], 1)
        without_hint = is_blank[:, None]
        return torch.where(without_hint, blank, hinted), torch.where(without_hint, blank_targets, hinted_targets)


MANIFEST = "made.json"
"""The origin of the files in its folder, and the sha256 of each."""

RESTORE = "restore it from the repository: git checkout -- data/base"


def read_shipped(folder: Path) -> dict[str, str]:
    """Return the files of the model that is shipped in `folder` with the hashes that they must have.

    Raises:
        MachineError: its manifest is missing or cannot be read.
    """
    path = folder / MANIFEST
    try:
        files = dict(json.loads(path.read_text(encoding="utf-8"))["sha256"])
        if not files:
            raise ValueError("no file is listed")
        return files
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it does not list the files of the built-in model ({type(error).__name__}: {error})"
        raise MachineError(what, where=str(path), fix=RESTORE) from None


def check_files(folder: Path, hashes: dict[str, str], *, fix: str) -> None:
    """Compare every file with its sha256.

    Raises:
        MachineError: one is missing, or differs.
    """
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            raise MachineError("this file of the built-in model is missing", where=str(path), fix=fix)
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
            what = f"not the file that was shipped: sha256 {found[:12]}..., expected {expected[:12]}..."
            raise MachineError(what, where=str(path), fix=fix)


TEXT_DIR = shipped("data/base")
RECIPES = {
    "digits": DigitsRecipe(),
    "copier": DigitsRecipe(copies=True, solves=0.5, hints=0.0, follows=0.9),
    "steps": StepsRecipe(),
}
"""Of the toys, by the names that may follow `builtin:` in `model.name`, as `tiny` may."""


def ensure_builtin(name: str, cache_dir: Path, *, say: Callable[[str], None], text_dir: Path = TEXT_DIR) -> Path:
    """Return the folder of the built-in model `name`, made under `cache_dir` if it is missing, without a network.

    The folder appears under its final name only when it is complete; of several processes one makes it and the others
    wait.

    Raises:
        ConfigError: there is no built-in model of that name.
        MachineError: a file of the shipped model or of its copy is missing or damaged.
    """
    if name not in ("tiny", *RECIPES):
        near = nearest_names(name, ("tiny", *RECIPES)) or ["tiny", *sorted(RECIPES)]
        fix = f"use builtin:{near[0]}"
        raise ConfigError(f"no built-in model called {name!r}", where="model.name", fix=fix, nearest=near)
    files = read_shipped(text_dir / name) if name == "tiny" else {}
    parts = json.dumps([files] if files else asdict(RECIPES[name]), sort_keys=True)
    folder = cache_dir / f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f"{folder.name}.lock"):
            if folder.is_dir():
                pass
            elif files:
                check_files(text_dir / name, files, fix=RESTORE)
                with whole_folder(folder) as scratch:
                    for file in files:
                        shutil.copyfile(text_dir / name / file, scratch / file)
            else:
                make_digits(folder, RECIPES[name], say=say)
    check_files(folder, files, fix=f"remove the copy, the next start makes it again: rm -r {folder}")
    return folder
