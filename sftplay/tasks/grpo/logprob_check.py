"""Compare the sampler's log-probabilities with the learner's, and count copies of answers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sftplay.errors import ConfigError
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects


def send_copies(generation: Any) -> None:
    """Make TRL's `VLLMGeneration` send merged copies.

    Raises:
        ConfigError: the base is held in 4 bits, or in shards; copies of such layers cannot be merged one by one.
    """
    if generation._dist.is_fsdp or any(hasattr(weight, "ds_id") for weight in generation.model.parameters()):
        raise ConfigError(
            "vLLM cannot be sent an adapter whose base is sharded",
            where="grpo.generation",
            fix="set cluster.strategy=ddp, or grpo.generation=transformers",
        )
    if any(hasattr(weight, "quant_state") for weight in generation.model.parameters()):
        raise ConfigError(
            "vLLM cannot be sent an adapter whose base is held in 4 bits",
            where="grpo.generation",
            fix="set tuning.mode=lora, or grpo.generation=transformers",
        )
    generation._iter_named_params = lambda: merged_copies(generation.model)


def merged_copies(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The weights of a PEFT model by the names of its base, each with its adapter merged in; `model` is only read."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = model.get_base_model()
    adapted = {name: module for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)}
    for name, layer in adapted.items():
        merged = copy.deepcopy(layer)
        merged.merge()
        for part, weight in merged.get_base_layer().named_parameters():
            yield f"{name}.{part}", weight.data
    for name, weight in base.named_parameters():
        owner = next((each for each in adapted if name.startswith(f"{each}.")), None)
        if owner is None and ".modules_to_save." not in name and ".original_module." not in name:
            yield name, weight.data
    for name, weight in base.named_parameters():
        before, _, after = name.partition(".modules_to_save.default.")
        if after:
            yield f"{before}.{after}", weight.data


SAMPLED = "sampling_per_token_logps"
"""TRL's key for what the sampler said of the tokens; it moves and cuts them with their rows."""

SCORED = "scored_per_token_logps"
"""The same tokens by the trained module, before the first of its steps."""


class TokenRecord:
    """Notes the log-probability of each token that a model draws; put behind all that bends the distribution."""

    def __init__(self) -> None:
        self._settled: list[Tensor] = []
        self._open: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Called by `generate` before each draw, with all tokens so far."""
        self._settle(input_ids[:, -1])
        self._open = scores.float().log_softmax(-1)
        return scores

    def of(self, drawn: Tensor) -> list[list[float]]:
        """The numbers of the tokens that were drawn, int64 [rows, tokens]; those behind a row's end mean nothing."""
        self._settle(drawn[:, -1])
        if not self._settled:
            return []
        return [list(row) for row in torch.stack(self._settled, dim=1).tolist()]

    def _settle(self, tokens: Tensor) -> None:
        if self._open is not None:
            self._settled.append(self._open.gather(1, tokens[:, None])[:, 0])


@contextmanager
def recorded(model: Any) -> Iterator[list[list[float]]]:
    """Meanwhile each row that `model.generate` draws adds a list. TRL passes no processors of its own to it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    rows: list[list[float]] = []
    records: list[TokenRecord] = []
    generate, processors = model.generate, base._get_logits_processor

    def with_record(*given: Any, **named: Any) -> Any:
        chosen = processors(*given, **named)
        chosen.append(records[-1])
        return chosen

    def noted(*given: Any, **named: Any) -> Any:
        records.append(TokenRecord())
        drawn = generate(*given, **named)  # where memory runs out, it is called again for fewer rows
        rows.extend(records[-1].of(drawn[:, named["input_ids"].size(1) :]))
        return drawn

    model.generate, base._get_logits_processor = noted, with_record
    try:
        yield rows
    finally:
        del model.generate, base._get_logits_processor


class SamplerGauge:
    """Sums of this rank since the last line of metrics."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.learned: Tensor | None = None
        """What the model that learns said of the tokens of the micro-batch at hand."""

        self._sums = {"sampler_gap": (0.0, 0), "sampler_kl": (0.0, 0)}

    def is_due(self, step: int) -> bool:
        """Whether the drawing after `step` steps is measured."""
        return self.every > 0 and step % self.every == 0

    def compare(self, *, sampled: Tensor | None, before: Tensor | None, mask: Tensor) -> None:
        """Add a micro-batch: what the sampler noted, and what the weights that drew say, where these are known."""
        if self.learned is None:
            return
        now, kept = self.learned.float(), mask.bool()
        if sampled is not None:
            self._add("sampler_gap", (now - sampled.float())[kept & ~torch.isnan(sampled)].abs())
        if before is not None:
            # Schulman's third estimator, joschu.net/blog/kl-approx.html; TRL estimates its KL by it, too.
            change = (now - before.float())[kept]
            self._add("sampler_kl", change.exp() - 1 - change)

    def take(self, heartbeat: Heartbeat) -> dict[str, float | None]:
        """The means over the tokens of all ranks; None where nothing was measured. Every rank must call it."""
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
