"""Whether the sampler and the model that learns are one: log-probabilities of the same tokens, compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.train.upstream import last_logits_processor

SAMPLER_LOGPS = "sampling_per_token_logps"
"""TRL's key for the sampler's log-probabilities of the tokens; TRL moves and cuts them with their rows."""

MODEL_LOGPS = "scored_per_token_logps"
"""Key for the log-probabilities by the trained model, before the first step on the tokens."""


class SampledRow(list[float]):
    """The log-probabilities of a completion's tokens by its sampler."""

    top: tuple[Tensor, Tensor] | None = None
    """The likeliest tokens at each place with their log-probabilities, int64 and float [tokens, k]."""

    def cut(self, tokens: int) -> SampledRow:
        """Return the first `tokens` of it."""
        row = SampledRow(self[:tokens])
        row.top = self.top and (self.top[0][:tokens], self.top[1][:tokens])
        return row


class TokenRecord:
    """Records the log-probability of each token that a model samples; the last of the logits processors."""

    def __init__(self, top: int = 0) -> None:
        """`top`: how many of the likeliest tokens are recorded as well."""
        self._logps: list[Tensor] = []
        self._next_logps: Tensor | None = None
        self._top, self._likeliest = top, list[tuple[Tensor, Tensor]]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record the distribution of the next token; `generate` calls it before each token, with all tokens so far."""
        self._add_token(input_ids[:, -1])
        self._next_logps = scores.float().log_softmax(-1)
        if self._top:
            logps, ids = self._next_logps.topk(min(self._top, scores.size(-1)))
            self._likeliest.append((ids, logps))
        return scores

    def finish(self, completion_ids: Tensor) -> list[SampledRow]:
        """Return the log-probabilities of the sampled tokens, int64 [rows, tokens]; values after a row's end mean
        nothing."""
        self._add_token(completion_ids[:, -1])
        if not self._logps:
            return []
        rows = [SampledRow(row) for row in torch.stack(self._logps, dim=1).tolist()]
        if self._top:
            ids, logps = (torch.stack(part, dim=1).cpu() for part in zip(*self._likeliest, strict=True))
            for number, row in enumerate(rows):
                row.top = ids[number], logps[number]
        return rows

    def _add_token(self, tokens: Tensor) -> None:
        if self._next_logps is not None:
            self._logps.append(self._next_logps.gather(1, tokens[:, None])[:, 0])


@contextmanager
def record_logprobs(model: Any, *, top: int = 0) -> Iterator[list[SampledRow]]:
    """Inside, add the log-probabilities of each row that `model.generate` samples, and the `top` likeliest tokens."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    rows: list[SampledRow] = []
    records: list[TokenRecord] = []
    generate = model.generate

    def generate_and_record(*given: Any, **named: Any) -> Any:
        records.append(TokenRecord(top))
        sampled = generate(*given, **named)  # where memory runs out, it is called again for fewer rows
        rows.extend(records[-1].finish(sampled[:, named["input_ids"].size(1) :]))
        return sampled

    model.generate = generate_and_record
    try:
        with last_logits_processor(base, lambda: records[-1]):
            yield rows
    finally:
        del model.generate


class LogprobCheck:
    """Compares log-probabilities; sums over this rank's tokens since the last line of metrics."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self.trained_logps: Tensor | None = None
        """Log-probabilities of the current micro-batch's tokens by the trained model."""

        self._sums = {"sampler_gap": (0.0, 0), "sampler_kl": (0.0, 0)}

    def is_due(self, step: int) -> bool:
        """Return whether the rollout batch after `step` steps is checked."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def compare(self, *, sampled: Tensor | None, before: Tensor | None, mask: Tensor) -> None:
        """Add a micro-batch: `sampled` by the sampler, `before` by the weights that sampled, where they are known."""
        if self.trained_logps is None:
            return
        now, kept = self.trained_logps.float(), mask.bool()
        if sampled is not None:
            self._add("sampler_gap", (now - sampled.float())[kept & ~torch.isnan(sampled)].abs())
        if before is not None:
            # Schulman's third estimator, joschu.net/blog/kl-approx.html; TRL estimates its KL by it, too.
            change = (now - before.float())[kept]
            self._add("sampler_kl", change.exp() - 1 - change)

    def take(self, heartbeat: Heartbeat) -> dict[str, float | None]:
        """Return the means over the tokens of all ranks, None where nothing was measured, and reset the sums.

        Every rank must call it.
        """
        ranks = gather_objects(self._sums, heartbeat)
        self._sums = dict.fromkeys(self._sums, (0.0, 0))
        means: dict[str, float | None] = {}
        for name in self._sums:
            total, count = (sum(rank[name][n] for rank in ranks) for n in (0, 1))
            means[name] = total / count if count else None
        return means

    def _add(self, name: str, values: Tensor) -> None:
        total, count = self._sums[name]
        self._sums[name] = (total + float(values.double().sum()), count + values.numel())
