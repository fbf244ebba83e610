"""Generate answers in batches; a sampled answer depends on its own row's seed, never on its batch."""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_right
from collections.abc import Callable, Sequence
from collections.abc import Generator as Pieces
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from sftplay import log
from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.model.tokenizer import shipped_end_ids
from sftplay.units import plural


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token each time. Only `top_p` cuts tokens off."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42

    def processors(self, rows: Sequence[int]) -> LogitsProcessorList:
        """Return the logits processors of transformers, for a batch of the rows with these numbers."""
        if self.temperature == 0:
            return LogitsProcessorList()
        steps: list[Any] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_p < 1:
            steps.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList([*steps, SampleByRow(self.seed, rows)])


GREEDY = Sampling()

AHEAD = 32
"""Random numbers of a row in the first batch: a call for each token costs as much as a small model's layer."""


class SampleByRow(LogitsProcessor):
    """Leaves one token per row, sampled by the scores. Seed, row number and position alone decide which one.
    transformers samples a whole batch with one generator, so there an answer depends on its neighbours.

    One random number a token is looked up in the summed probabilities (inverse transform sampling), so the greedy
    choice after it takes the sampled token. Numbers are generated ahead, many of a row at once: they are the same.
    """

    def __init__(self, seed: int, rows: Sequence[int]) -> None:
        self._seeds = [derive_seed(seed, row) for row in rows]
        self._n_generated = 0
        self._ahead: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, float [rows, vocabulary], with all but the sampled token at minus infinity."""
        return only(self.tokens(scores), scores)

    def tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row, int64 [rows, 1]."""
        sums = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        if not self._ahead:
            # Twice as many numbers as before. All rows share one source, which is seeded again for each of them. This
            # is faster than a source for each row, although the earlier numbers are generated once more.
            source, done = torch.Generator(), self._n_generated
            self._n_generated = 2 * done or AHEAD
            numbers = torch.empty(len(self._seeds), self._n_generated, dtype=torch.float64)
            for row, seed in zip(numbers.unbind(), self._seeds, strict=True):
                row.uniform_(generator=source.manual_seed(seed))
            self._ahead = list(numbers[:, done:, None].to(sums.device).unbind(1))[::-1]
        # Each number is below the last sum, however that is rounded. The first sum above it is never a cut-off token's.
        places = self._ahead.pop() * sums[:, -1:]
        return torch.searchsorted(sums, places, right=True).clamp(max=scores.shape[-1] - 1)


def only(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return scores like `scores` that allow only these tokens, int64 [rows, 1]."""
    return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def derive_seed(seed: int, row: int) -> int:
    """Return a seed for one row, independent of the seeds of its neighbours and of neighbouring seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest()) >> 1


def learned_positions(model: Any) -> int | None:
    """Return how many positions a model has learned vectors for, and so cannot read beyond; None where it has none."""
    most, words = getattr(model.config.get_text_config(), "max_position_embeddings", None), model.get_input_embeddings()
    if not isinstance(most, int):
        return None
    tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding) and module is not words)
    return most if any(table.num_embeddings in range(most, most + 3) for table in tables) else None  # OPT: 2 more


@dataclass(frozen=True)
class Generator:
    """A model with its tokenizer, the tokens that end an answer, and the longest answer in tokens."""

    model: Any
    tokenizer: Any
    end_token_ids: Sequence[int]
    max_new_tokens: int
    sampling: Sampling = GREEDY

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of prompt and answer together, None if the model has no such limit."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def all_end_ids(self) -> list[int]:
        """End tokens of the template and of the model."""
        return sorted({*self.end_token_ids, *shipped_end_ids(self.model.generation_config)})

    def greedy(self) -> GenerationConfig:
        """Return the config for greedy decoding up to an end token of the template or of the model."""
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self.all_end_ids,
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
        )

    @torch.no_grad()
    def generate(
        self, ids: torch.Tensor, mask: torch.Tensor, *, rows: Sequence[int] = (), streamer: TextStreamer | None = None
    ) -> Any:
        """Generate a continuation of `ids`, int64 [prompts, tokens], padded on the left; `rows` number the prompts.

        transformers fills what a generation config leaves open with the settings shipped with the model (a repetition
        penalty, forbidden tokens). These are set aside meanwhile: they must not change the measurement.
        """
        greedy = self.greedy()
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        shipped, inner.generation_config = inner.generation_config, GenerationConfig()
        device = next(self.model.parameters()).device
        try:
            # Not PeftModel.generate: it parses versions at each token, for kinds of adapters that the kit refuses.
            return inner.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=greedy,
                logits_processor=self.sampling.processors(rows or range(len(ids))),
                stopping_criteria=StoppingCriteriaList(
                    [_StopOnEvent(streamer.stop), _StopOnEvent(streamer.left)] if streamer else []
                ),
                streamer=streamer,
                # A model in shards (FSDP2) needs all ranks for each token, also of those that have answered already.
                synced_gpus=hasattr(self.model, "unshard") or None,
            )
        finally:
            inner.generation_config = shipped


def answer_batch(generator: Generator, prompts: Sequence[list[int]], *, rows: Sequence[int] = ()) -> list[str]:
    """Return the answer to each prompt (token ids), without special tokens, in order; `rows` are their numbers.

    Prompts are padded on the left, so that all answers start at the same place.
    """
    ids, mask = left_padded(prompts, generator.tokenizer.pad_token_id)
    out = generator.generate(ids, mask, rows=rows)
    return generator.tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask, int64 [prompts, tokens], with the padding before the tokens."""
    # All rows at once, with numpy: filling tensors row by row takes longer than a small model.
    lengths = np.array([len(prompt) for prompt in prompts])
    mask = np.arange(lengths.max()) >= lengths.max() - lengths[:, None]
    ids = np.full(mask.shape, pad)
    ids[mask] = list(chain.from_iterable(prompts))
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))


def answer_all(
    generator: Generator,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    rows: Sequence[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Return the answers to all prompts, in order; prompts of similar length share a batch.

    `rows` are the numbers that seed the random numbers, None for the places in `prompts`. `progress` is called with
    the number of answers so far; None shows it to the user.
    """
    show = progress or partial(log.progress, total=len(prompts), what="answered", tag="eval")
    ids = answer_ids(generator, prompts, batch_size=batch_size, rows=rows, progress=show)
    return list(generator.tokenizer.batch_decode(ids, skip_special_tokens=True))


def answer_ids(
    generator: Generator,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    rows: Sequence[int] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Return the ids of the answer to each prompt, in order, up to its end token, which is among them; else as
    `answer_all`. An answer ends at the last of the model's learned positions, which is said.
    """
    numbers = range(len(prompts)) if rows is None else rows
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    ends, answers = set(generator.all_end_ids), [list[int]() for _ in prompts]

    limit, longest = learned_positions(generator.model), generator.max_new_tokens
    n_whole = bisect_right(order, (limit or sys.maxsize) - longest, key=lambda n: len(prompts[n]))

    def answer(part: slice, *, places: list[int]) -> int:
        places = places[part]
        ids, mask = left_padded([prompts[n] for n in places], generator.tokenizer.pad_token_id)
        made = generator if limit is None else replace(generator, max_new_tokens=min(longest, limit - ids.shape[1]))
        out = made.generate(ids, mask, rows=[numbers[n] for n in places])[:, ids.shape[1] :].tolist()
        for n, found in zip(places, out, strict=True):
            length = next((at + 1 for at, token in enumerate(found) if token in ends), len(found))
            answers[n] = found[:length]
        return part.stop

    if n_cut := len(order) - n_whole:
        log.say(f"note: {plural(n_cut, 'answer')} cut at the {limit} positions that the model has", "eval")
    # Prompts of one length share their room: what is answered must not depend on the batch.
    shorter = [list(group) for _, group in groupby(order[n_whole:], key=lambda n: len(prompts[n]))]
    batches, before = AdaptiveBatches(batch_size, "answering"), 0
    for places in [order[:n_whole], *shorter]:
        for done in batches.map(len(places), partial(answer, places=places)):
            progress(before + done)
        before += len(places)
    return answers


def stream_answer(
    generator: Generator, prompt: list[int], *, row: int = 0, stop: Event | None = None
) -> Pieces[str, None, list[int]]:
    """Yield parts of the answer to one prompt as they are made, until `stop` is set; together they are the answer.

    The generator returns the answer's tokens, with an end token.
    """
    streamer = TextStreamer(generator.tokenizer, stop or Event())
    ids = torch.tensor([prompt])
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(generator.generate, ids, torch.ones_like(ids), rows=[row], streamer=streamer)
        work.add_done_callback(lambda _: streamer.end())  # else the reader would wait forever after a failure
        try:
            yield from iter(streamer.queue.get, None)
        finally:
            streamer.left.set()  # if the reader left early, wait for one token, not for the whole answer
        work.result()
    return streamer.ids


class TextStreamer(BaseStreamer):
    """The text of one answer as its tokens come; a character is held back until all its bytes are there.

    transformers' own streamers decode a few tokens at a time, and with some tokenizers lose the space before a word.
    """

    def __init__(self, tokenizer: Any, stop: Event) -> None:
        self.queue: SimpleQueue[str | None] = SimpleQueue()
        self.stop, self.left = stop, Event()
        """The second is set when nobody reads any more."""
        self._tokenizer = tokenizer
        self._ids: list[int] | None = None
        self._shown = ""

    def put(self, value: torch.Tensor) -> None:
        """Take new tokens; the first are the prompt."""
        if self._ids is None:
            self._ids = []
            return
        self._ids.extend(value.flatten().tolist())
        text = self._text().rstrip("\N{REPLACEMENT CHARACTER}")
        if text.startswith(self._shown):
            self._put_new(text)

    def end(self) -> None:
        """Put the rest of the text, and the end mark."""
        self._put_new(self._text())
        self.queue.put(None)

    @property
    def ids(self) -> list[int]:
        """The tokens so far."""
        return self._ids or []

    def _text(self) -> str:
        return str(self._tokenizer.decode(self.ids, skip_special_tokens=True))

    def _put_new(self, text: str) -> None:
        # A tokenizer that tidies white space may change the text that it wrote before.
        changed = (place for place, (old, new) in enumerate(zip(self._shown, text)) if old != new)
        known = next(changed, min(len(self._shown), len(text)))
        if text[known:]:
            self.queue.put(text[known:])
            self._shown = text


class _StopOnEvent(StoppingCriteria):
    """Ends an answer when an event is set."""

    def __init__(self, stop: Event) -> None:
        self._stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._stop.is_set(), dtype=torch.bool, device=input_ids.device)
