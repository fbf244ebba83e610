"""The tiny models that need no download: made on the spot from the text shipped in data/base, once, then cached.

A built-in model is an ordinary folder for `from_pretrained`. It knows a little English and how to copy, recase and
answer inside chat markers; it is there to show and test the kit, not to be useful by itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sftplay.errors import ConfigError, MachineError, nearest_names

TEXT_DIR = Path(__file__).resolve().parents[2] / "data" / "base"
SECONDS_BETWEEN_LINES = 5.0

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights of a built-in model besides the shipped text."""

    vocab_size: int = 768
    hidden_size: int = 128
    intermediate_size: int = 384
    layers: int = 4
    heads: int = 4
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    steps: int = 500
    rows: int = 12
    """Windows of text in a step."""

    tokens: int = 128
    """Tokens in a window."""

    learning_rate: float = 0.02
    """Peak of Muon, for the matrices inside the layers."""

    embedding_learning_rate: float = 3e-3
    """Peak of AdamW, for embeddings and norms."""

    practice_share: float = 0.75
    """Part of the windows drawn from practice.txt; the other texts share the rest equally."""

    drill_share: float = 0.4
    """Part of the windows in which a short excerpt, half of the time with its tokens shuffled, repeats to the end: the
    quickest way to learn copying, because nothing but copying predicts them."""

    seed: int = 7
    version: int = 1
    """Raised when this file's way of training changes, so that older caches are not taken for new ones."""


RECIPES = {"tiny": Recipe()}


def builtin_names() -> list[str]:
    """The names that may follow `builtin:` in `model.name`."""
    return sorted(RECIPES)


def ensure_builtin(
    name: str, cache_dir: Path, say: Callable[[str], None], *, recipe: Recipe | None = None, text_dir: Path = TEXT_DIR
) -> Path:
    """Return the folder of the built-in model `name`, making it under `cache_dir` if it is not there.

    Making it takes about a minute on two cores and needs no network. The folder appears under its final name only when
    it is complete; of several processes one makes it and the others wait. `recipe` replaces the shipped recipe.

    Raises:
        ConfigError: there is no built-in model of that name.
        MachineError: the shipped text is missing.
    """
    if name not in RECIPES:
        near = nearest_names(name, RECIPES)
        raise ConfigError(
            f"no built-in model called {name!r}",
            where="model.name",
            fix=f"use builtin:{(near or builtin_names())[0]}",
            nearest=near or builtin_names(),
        )
    chosen = recipe or RECIPES[name]
    folder = cache_dir / f"{name}-{fingerprint(chosen, text_dir)}"
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f"{folder.name}.lock"):
        if not folder.is_dir():
            _make(folder, chosen, text_dir, say)
    return folder


def fingerprint(recipe: Recipe, text_dir: Path = TEXT_DIR) -> str:
    """Twelve hex digits that change when the shipped text, the chat template or the recipe changes."""
    parts = [json.dumps(asdict(recipe), sort_keys=True), CHAT_TEMPLATE]
    for path in text_files(text_dir):
        parts.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def text_files(text_dir: Path) -> list[Path]:
    """The shipped texts in the order of their names."""
    files = sorted(text_dir.glob("*.txt"))
    if not files:
        raise MachineError(
            f"the text of the built-in models is missing from {text_dir}",
            where="model.name",
            fix="run from a full checkout, or name a model folder instead of builtin:tiny",
        )
    return files


def train_tokenizer(files: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` ids, trained on `files`; every text survives the round trip.

    A word's tokens never hold the space before it and digits go in pairs from the left, so a name or a number has the
    same ids wherever it occurs: a model of a million weights can then copy one it has never seen.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\p{L}+|\p{N}{1,2}|\s+|[^\s\p{L}\p{N}]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines(keepends=True)]
    pairs = [f"{number:02d}" for number in range(100)] * len(lines)  # so often that each pair is one id
    tokenizer.train_from_iterator(lines + pairs, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of the recipe's shape in fp32; the caller seeds torch."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=recipe.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def _make(folder: Path, recipe: Recipe, text_dir: Path, say: Callable[[str], None]) -> None:
    """Build under a name no reader looks for, then rename: a broken-off build leaves nothing that looks finished."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    started = time.monotonic()
    say(f"making {folder.name} from {text_dir.name}/*.txt (once, about a minute)")
    files = text_files(text_dir)
    tokenizer = train_tokenizer(files, recipe.vocab_size)
    with _two_threads(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = new_model(recipe, tokenizer)
        _train_base(model, _token_streams(files, tokenizer), recipe, say)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.rename(unfinished, folder)
    say(f"{folder.name} is ready after {time.monotonic() - started:.0f} s")


def _token_streams(files: list[Path], tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    """Each text as one int64 [tokens] tensor; chat markers in the text become their special ids."""
    streams = {}
    for path in files:
        ids = tokenizer.backend_tokenizer.encode(path.read_text(encoding="utf-8")).ids
        streams[path.name] = torch.tensor(ids, dtype=torch.int64)
    return streams


def _draw(streams: dict[str, torch.Tensor], recipe: Recipe, generator: torch.Generator) -> torch.Tensor:
    """Windows at random places of the texts: int64 [rows, tokens]."""
    others = [stream for file, stream in streams.items() if file != "practice.txt"]
    windows = []
    for _ in range(recipe.rows):
        practises = torch.rand((), generator=generator).item() < recipe.practice_share or not others
        stream = streams.get("practice.txt") if practises else None
        if stream is None:
            stream = others[int(torch.randint(len(others), (), generator=generator))]
        start = int(torch.randint(len(stream) - recipe.tokens, (), generator=generator))
        window = stream[start : start + recipe.tokens]
        drills = torch.rand((), generator=generator).item() < recipe.drill_share
        windows.append(_drill(window, generator) if drills else window)
    return torch.stack(windows)


def _drill(window: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The first tokens of `window`, in order or shuffled, repeated until its length is reached: int64 [tokens]."""
    tokens = len(window)
    period = int(torch.randint(6, tokens // 2, (), generator=generator))
    excerpt = window[:period]
    if torch.rand((), generator=generator).item() < 0.5:
        excerpt = excerpt[torch.randperm(period, generator=generator)]
    return excerpt.repeat(tokens // period + 1)[:tokens]


def _train_base(
    model: LlamaForCausalLM, streams: dict[str, torch.Tensor], recipe: Recipe, say: Callable[[str], None]
) -> None:
    """Plain language modelling on the shipped text, in place: every token is predicted from those before it."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    rest = [weight for weight in model.parameters() if id(weight) not in inside]
    # Muon reaches copying of unseen names in well under half of AdamW's steps; it is made for matrices only.
    optimizers = [
        torch.optim.Muon(matrices, lr=recipe.learning_rate, weight_decay=0.0, momentum=0.95),
        torch.optim.AdamW(rest, lr=recipe.embedding_learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    warm_up = max(1, recipe.steps // 20)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / warm_up, 0.02 + 0.98 * (1 + math.cos(math.pi * step / recipe.steps)) / 2),
        )
        for optimizer in optimizers
    ]
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    said = time.monotonic()
    for step in range(recipe.steps):
        input_ids = _draw(streams, recipe, generator)
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if time.monotonic() - said >= SECONDS_BETWEEN_LINES or step == recipe.steps - 1:
            said = time.monotonic()
            say(f"base training: step {step + 1} of {recipe.steps}, loss {loss.item():.2f}")
    model.eval()


@contextmanager
def _two_threads() -> Iterator[None]:
    """Two torch threads inside: the order of sums, and so the weights, do not follow the machine's core count."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` for this process; the system lets go of it when the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
