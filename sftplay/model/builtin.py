"""Tiny models that need no download: `tiny` is shipped in data/base, the toys are made in seconds, once.

A built-in model is an ordinary folder for `from_pretrained`. It knows a little English and how to copy, recase and
answer inside chat markers; it serves to show and test the kit, not to be useful by itself."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sftplay.atomic import locked, whole_folder, write_text
from sftplay.data.render.templates import CHATML
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.model.toys import DigitsRecipe, Muon, StepsRecipe, make_digits, make_llama, save_model, set_induction_heads
from sftplay.places import shipped

MANIFEST = "made.json"
"""The origin of the files in its folder, and the sha256 of each."""

RESTORE = "restore it from the repository: git checkout -- data/base"


def read_shipped(folder: Path) -> tuple[dict[str, str], str]:
    """Return the files of the model that is shipped in `folder` with the hashes that they must have, and the
    fingerprint of the recipe, the texts and the template that made it; nothing where there is no such folder.

    Raises:
        MachineError: its manifest is missing or cannot be read.
    """
    if not folder.is_dir():
        return {}, ""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["sha256"]), content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it does not list the files of the built-in model ({type(error).__name__}: {error})"
        raise MachineError(what, where=str(path), fix=RESTORE) from None


def write_manifest(folder: Path, *, fingerprint: str, recipe: dict[str, Any], made_with: dict[str, str]) -> None:
    """Write a list of the files of `folder` with their hashes and their origin."""
    files = (path for path in sorted(folder.iterdir()) if path.name != MANIFEST)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    content = {"fingerprint": fingerprint, "sha256": hashes, "made_with": made_with, "recipe": recipe}
    write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


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
PRACTICE = "practice.txt"

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights of a built-in model, except the shipped text."""

    vocab_size: int = 768
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    max_position_embeddings: int = 2048
    steps: int = 300
    rows: int = 16
    """Windows of text in a step."""

    tokens: int = 96
    """Tokens in a window."""

    learning_rate: float = 0.01
    """Peak of Muon, for the matrices inside the layers."""

    embedding_learning_rate: float = 6e-3
    """Peak of AdamW, for embeddings and norms."""

    practice_share: float = 0.8
    """Share of the windows sampled from practice.txt; the other texts share the rest."""

    seed: int = 7
    version: int = 2
    """Raised when the training in this file changes, so that older caches are not taken for new ones."""


RECIPES: dict[str, Recipe | DigitsRecipe] = {
    "tiny": Recipe(),
    "digits": DigitsRecipe(),
    "copier": DigitsRecipe(copies=True, solves=0.5, hints=0.0, follows=0.9),
    "steps": StepsRecipe(),
}
"""By the names that may follow `builtin:` in `model.name`."""


def ensure_builtin(
    name: str,
    cache_dir: Path,
    *,
    say: Callable[[str], None],
    recipe: Recipe | DigitsRecipe | None = None,
    text_dir: Path = TEXT_DIR,
) -> Path:
    """Return the folder of the built-in model `name`, made under `cache_dir` if it is missing.

    The shipped weights are copied. Another recipe or text is trained, about a minute on two cores. Neither needs a
    network. The folder appears under its final name only when it is complete; of several processes one makes it and the
    others wait. `recipe` replaces the shipped recipe.

    Raises:
        ConfigError: there is no built-in model of that name.
        MachineError: the shipped text is missing, or a file of the shipped model or of its copy is damaged.
    """
    if name not in RECIPES:
        near = nearest_names(name, RECIPES) or sorted(RECIPES)
        fix = f"use builtin:{near[0]}"
        raise ConfigError(f"no built-in model called {name!r}", where="model.name", fix=fix, nearest=near)
    chosen = recipe or RECIPES[name]
    mark = fingerprint(chosen, text_dir)
    files, made_of = read_shipped(text_dir / name) if isinstance(chosen, Recipe) else ({}, "")
    if files and made_of != mark:
        say(f"{text_dir / name} was made of another text or recipe")
        files = {}
    if files:  # twelve hex digits that change with any file
        mark = hashlib.sha256(json.dumps([made_of, files]).encode()).hexdigest()[:12]
    folder = cache_dir / f"{name}-{mark}"
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
            elif isinstance(chosen, Recipe):
                make_base(folder, recipe=chosen, text_dir=text_dir, say=say)
            else:
                make_digits(folder, chosen, say=say)
    check_files(folder, files, fix=f"remove the copy, the next start makes it again: rm -r {folder}")
    return folder


def fingerprint(recipe: Recipe | DigitsRecipe, text_dir: Path = TEXT_DIR) -> str:
    """Return twelve hex digits that change with the shipped text, the chat template or the recipe."""
    parts = [json.dumps(asdict(recipe), sort_keys=True), CHATML]
    if isinstance(recipe, Recipe):
        parts += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in text_files(text_dir)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def text_files(text_dir: Path) -> list[Path]:
    """Return the shipped texts in the order of their names."""
    if files := sorted(text_dir.glob("*.txt")):
        return files
    fix = "run from a full checkout, or name a model folder instead of builtin:tiny"
    raise MachineError(f"the text of the built-in models is missing from {text_dir}", where="model.name", fix=fix)


def train_tokenizer(files: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of `vocab_size` ids on `files`; every text survives the round trip.

    A word's tokens never hold the space before it and digits go in pairs from the left, so a name or a number has the
    same ids wherever it occurs: a model of a million weights can then copy one it has never seen.
    """
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r"\p{L}+|\p{N}{1,2}|\s+|[^\s\p{L}\p{N}]")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior="isolated"), to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, TURN_START, TURN_END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    pairs = [f"{number:02d}" for number in range(100)] * len(lines)  # so often that each pair is one id
    tokenizer.train_from_iterator(lines + pairs, trainer)
    names = {"pad_token": PAD, "eos_token": TURN_END, "additional_special_tokens": [TURN_START]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML, **names)


def make_base(folder: Path, *, recipe: Recipe, text_dir: Path, say: Callable[[str], None]) -> None:
    """Train a tokenizer and a model on the texts and save both in `folder`, which must not exist."""
    started = time.monotonic()
    files = text_files(text_dir)
    say(f"making {folder.name} from {text_dir.name}/*.txt (once, about a minute)")
    tokenizer = train_tokenizer(files, recipe.vocab_size)
    with _two_threads(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        rope_theta = 10_000.0
        model = make_llama(
            recipe, tokenizer, intermediate_size=recipe.intermediate_size, tie_word_embeddings=True,
            max_position_embeddings=recipe.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        )  # fmt: skip
        if recipe.layers > 1 and recipe.heads > 2:
            set_induction_heads(model, rope_theta=rope_theta)
        # Each text as int64 [tokens]; chat markers in the text become their special ids.
        encode = tokenizer.backend_tokenizer.encode
        streams = {path.name: torch.tensor(encode(path.read_text(encoding="utf-8")).ids) for path in files}
        _train_base(model, streams, recipe=recipe, say=say)
    save_model(folder, model, tokenizer=tokenizer)
    say(f"{folder.name} is ready after {time.monotonic() - started:.0f} s")


def _train_base(
    model: LlamaForCausalLM, streams: dict[str, torch.Tensor], *, recipe: Recipe, say: Callable[[str], None]
) -> None:
    """Train the model in place by plain language modelling on the shipped text."""
    generator = torch.Generator().manual_seed(recipe.seed)
    others = [stream for file, stream in streams.items() if file != PRACTICE]

    def sample_window() -> torch.Tensor:
        """Sample `recipe.tokens` tokens at a random place of the texts."""
        is_practice = torch.rand((), generator=generator).item() < recipe.practice_share
        stream = streams[PRACTICE] if is_practice else others[int(torch.randint(len(others), (), generator=generator))]
        start = int(torch.randint(len(stream) - recipe.tokens, (), generator=generator))
        return stream[start : start + recipe.tokens]

    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    # Muon ends at a lower loss than AdamW in the same minute.
    optimizers = [
        Muon(matrices, lr=recipe.learning_rate),
        torch.optim.AdamW(rest, lr=recipe.embedding_learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]

    def share_of_peak(step: int) -> float:
        return min(20 * (step + 1) / recipe.steps, 0.02 + 0.49 * (1 + math.cos(math.pi * step / recipe.steps)))

    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_peak) for optimizer in optimizers]
    model.train()
    last_line_at = time.monotonic()
    for step in range(recipe.steps):
        input_ids = torch.stack([sample_window() for _ in range(recipe.rows)])
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if time.monotonic() - last_line_at >= 5.0 or step == recipe.steps - 1:
            last_line_at = time.monotonic()
            say(f"base training: step {step + 1} of {recipe.steps}, loss {loss.item():.2f}")
    model.eval()


@contextmanager
def _two_threads() -> Iterator[None]:
    """Use two torch threads inside, so that the order of sums, and so the weights, do not depend on the core count."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)
