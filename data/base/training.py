"""How `builtin:tiny` is trained from the texts of this folder. `generate.py --weights` calls it."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sftplay.atomic import write_text
from sftplay.data.render.templates import CHATML
from sftplay.model.builtin import MANIFEST, make_llama, save_model

PRACTICE = "practice.txt"

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights of `builtin:tiny`, except the texts."""

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


def fingerprint(recipe: Recipe, text_dir: Path) -> str:
    """Return twelve hex digits that change with a text, the chat template or the recipe."""
    digests = (
        f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in sorted(text_dir.glob("*.txt"))
    )
    parts = [json.dumps(asdict(recipe), sort_keys=True), CHATML, *digests]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def write_manifest(folder: Path, *, fingerprint: str, recipe: dict[str, Any], made_with: dict[str, str]) -> None:
    """Write a list of the files of `folder` with their hashes and their origin."""
    files = (path for path in sorted(folder.iterdir()) if path.name != MANIFEST)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    content = {"fingerprint": fingerprint, "sha256": hashes, "made_with": made_with, "recipe": recipe}
    write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


@torch.no_grad()
def set_induction_heads(model: LlamaForCausalLM, *, rope_theta: float) -> None:
    """Set the first three heads of two layers so that together they continue a text that repeats itself.

    This is the induction circuit of Olsson et al. 2022 (In-context Learning and Induction Heads): layer 0 writes down
    which token came one and two places before; layer 1 looks for earlier places that followed the present token, and
    passes on their tokens. Models of this size find it only after some millions of tokens, more than fit in a minute;
    from this start, training adapts it to the text. The figures were found by trial, they are starting values only.
    """

    def set_head(layer: int, head: int, *, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Set the weights of one head: query, key and value [width, size], output [size, width]."""
        attention = model.model.layers[layer].self_attn
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[rows] = query
        attention.k_proj.weight[rows] = key
        attention.v_proj.weight[rows] = value
        attention.o_proj.weight[:, rows] = output

    size, width = model.config.hidden_size, model.config.hidden_size // model.config.num_attention_heads
    half, embedding_std = width // 2, 0.5
    embeddings = model.model.embed_tokens.weight.normal_(0, embedding_std)
    embeddings[:, 0] = 4 * embedding_std  # a constant by which a head can attend by position
    model.model.norm.weight.fill_(0.1)  # keeps the first logits small although the embeddings are large
    rotated = torch.zeros(size, size)
    rotated[1:, 1:] = torch.linalg.qr(torch.randn(size - 1, size - 1))[0]
    content = rotated[1:].split(width)  # rows: directions of what a token is
    written = torch.linalg.qr(torch.randn(size, size))[0].split(width)  # rows: where layer 0 notes earlier tokens
    turns = rope_theta ** (-torch.arange(half) / half)  # radians a place, as rotary embeddings turn each pair
    fast = 1.9 * (torch.arange(half) < half * 3 // 8)
    slow = 3.0 * (torch.arange(half) >= half // 2).repeat(2).unsqueeze(1)
    for head, (places, what) in enumerate([(1, 0), (1, 1), (2, 0)]):
        query, key = torch.zeros(width, size), torch.zeros(width, size)
        key[:half, 0] = fast
        query[:, 0] = torch.cat([fast * torch.cos(places * turns), -fast * torch.sin(places * turns)])
        output = embedding_std * written[head].T
        set_head(0, head, query=query, key=key, value=content[what], output=output)
    matches = [(content[0], written[0]), (content[1], written[1]), (written[0], written[2])]
    for head, (query, key) in enumerate(matches):
        output = 8 * embedding_std * content[head].T
        set_head(1, head, query=slow * query, key=slow * key, value=content[head], output=output)


class Muon(torch.optim.Optimizer):
    """Momentum with Nesterov's step, made orthogonal; for matrices only.

    The formulas and defaults are torch.optim.Muon's (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).
    """

    def __init__(self, params: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update each matrix that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            for matrix in (weight for weight in group["params"] if weight.grad is not None):
                average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix.grad))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                rows, columns = matrix.shape
                matrix.add_(direction, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))
        return loss


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about U V^T of the matrix's U S V^T, with singular values from 0.7 to 1.2, by five Newton-Schulz steps."""
    a, b, c = 3.4445, -4.7750, 2.0315  # of the quintic step, as in torch 2.13, torch/optim/_muon.py
    is_tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


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


def make_base(folder: Path, *, recipe: Recipe, files: list[Path], say: Callable[[str], None]) -> None:
    """Train a tokenizer and a model on the texts in `files` and save both in `folder`, which must not exist."""
    started = time.monotonic()
    say(f"making {folder.name} from {files[0].parent.name}/*.txt (once, about a minute)")
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
