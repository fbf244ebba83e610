"""Answers of a model: greedy batches for measuring, a stream for talking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, TextIteratorStreamer


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer, the tokens that end an answer, and the longest answer in tokens."""

    model: Any
    tokenizer: Any
    end_token_ids: Sequence[int]
    max_new_tokens: int

    def greedy(self) -> GenerationConfig:
        """The likeliest token each time, up to an end token of the template or of the model."""
        shipped = self.model.generation_config.eos_token_id or []
        ends = {*self.end_token_ids, *([shipped] if isinstance(shipped, int) else shipped)}
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=sorted(ends),
            pad_token_id=self.tokenizer.pad_token_id,
            bos_token_id=self.tokenizer.bos_token_id,
        )

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, mask: torch.Tensor, streamer: TextIteratorStreamer | None = None) -> Any:
        """Greedy continuation of `ids`, int64 [prompts, tokens], padded on the left.

        transformers fills what a generation config leaves open with the settings shipped with the model (a repetition
        penalty, forbidden tokens), so these are put aside meanwhile: they must not change what is measured.
        """
        greedy = self.greedy()
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        shipped, inner.generation_config = inner.generation_config, GenerationConfig()
        device = next(self.model.parameters()).device
        try:
            return self.model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=greedy, streamer=streamer
            )
        finally:
            inner.generation_config = shipped


def answer_batch(speaker: Speaker, prompts: Sequence[list[int]]) -> list[str]:
    """The greedy answer to each prompt (token ids), without special tokens, in order.

    Prompts are padded on the left, so that all answers start at the same place.
    """
    width = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), width), speaker.tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    out = speaker.generate(ids, mask)
    answers: list[str] = speaker.tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)
    return answers


def answer_all(
    speaker: Speaker,
    prompts: Sequence[list[int]],
    *,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Greedy answers to all prompts, in order; prompts of like length go together.

    `progress` hears how many are done.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        for i, text in zip(batch, answer_batch(speaker, [prompts[i] for i in batch]), strict=True):
            answers[i] = text
        progress(min(start + batch_size, len(order)))
    return answers


def stream_answer(speaker: Speaker, prompt: list[int]) -> Iterator[str]:
    """Pieces of the greedy answer to one prompt as they are made."""
    streamer = TextIteratorStreamer(speaker.tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = torch.tensor([prompt])
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(speaker.generate, ids, torch.ones_like(ids), streamer)
        work.add_done_callback(lambda _: streamer.end())  # else a failure would leave the reader waiting
        yield from streamer
        work.result()
