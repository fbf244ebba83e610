"""Answers of a model: greedy batches for measuring, a stream for talking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

import torch
from transformers import GenerationConfig, TextIteratorStreamer


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token id that ends an answer: the tokenizer's own and those of the model's generation config."""
    configured = getattr(model.generation_config, "eos_token_id", None) or []
    configured = [configured] if isinstance(configured, int) else list(configured)
    return sorted({*configured, tokenizer.eos_token_id} - {None})


@torch.no_grad()
def answer_batch(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], *, max_new_tokens: int
) -> list[str]:
    """The greedy answer to each prompt (token ids), without special tokens, in order.

    Prompts are padded on the left, so that all answers start at the same place.
    """
    width = max(len(prompt) for prompt in prompts)
    pad = tokenizer.pad_token_id
    ids = torch.full((len(prompts), width), pad)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    device = next(model.parameters()).device
    out = model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        generation_config=_greedy(model, tokenizer, max_new_tokens),
    )
    return tokenizer.batch_decode(out[:, width:], skip_special_tokens=True)  # type: ignore[no-any-return]


def answer_all(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Greedy answers to all prompts, in order; prompts of like length go together. `progress` hears how many are done."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        texts = answer_batch(model, tokenizer, [prompts[i] for i in batch], max_new_tokens=max_new_tokens)
        for i, text in zip(batch, texts, strict=True):
            answers[i] = text
        progress(min(start + batch_size, len(order)))
    return answers


def stream_answer(model: Any, tokenizer: Any, prompt: list[int], *, max_new_tokens: int) -> Iterator[str]:
    """Pieces of the greedy answer to one prompt as they are made."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    ids = torch.tensor([prompt], device=next(model.parameters()).device)
    work = Thread(
        target=model.generate,
        kwargs={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "generation_config": _greedy(model, tokenizer, max_new_tokens),
            "streamer": streamer,
        },
        daemon=True,
    )
    work.start()
    yield from streamer
    work.join()


def _greedy(model: Any, tokenizer: Any, max_new_tokens: int) -> GenerationConfig:
    # A config of its own: sampling settings shipped with a model must not change what is measured.
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stop_tokens(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
