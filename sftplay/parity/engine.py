"""What `parity` asks an engine, and what the engine answers: token ids and their log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Question:
    """One prompt, as a client sends it and as the trained model reads it."""

    row: int
    messages: Sequence[Mapping[str, Any]] | None
    """The dialogue before the answer; None where the run learned plain text."""

    text: str
    """The prompt as text: the chat template's, or the plain one."""

    prompt_ids: Sequence[int]
    """The prompt by the run's tokenizer."""

    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that the assistant may call, in OpenAI's form."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    prompt_ids: Sequence[int]
    """The prompt's ids by the engine's tokenizer and template; empty where it does not give them."""

    answer_ids: Sequence[int]
    """Without the end token, if the engine does not give it; empty where it gives `text` alone."""

    logprobs: Sequence[float]
    """Natural logarithm of the probability of each id of the answer; empty where the engine does not give them."""

    text: str | None = None
    """The answer as text, where that is all that the engine gives."""


@dataclass(frozen=True)
class EngineReply:
    """The answers to all questions, in order."""

    version: str
    """The engine's name and version, such as `vLLM 0.31.0`."""

    answers: Sequence[Answer]
    template: str | None = None
    """The chat template that the engine uses, None where it does not say."""

    dtype: str | None = None
    """What the engine computes in, as torch names it; None where it does not say."""
