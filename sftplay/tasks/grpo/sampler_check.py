"""Whether the sampler and the model that learns are one: log-probabilities of the same tokens, compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sftplay import log
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import RunFolder
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.sampler_faults import (
    DTYPE_FIX,
    ROWS,
    TOKENS,
    Diagnosis,
    Explanation,
    Learner,
    Row,
    SamplerFacts,
    find_old_heads,
    find_old_weights,
    list_other_prompts,
    read_server_facts,
)
from sftplay.tasks.grpo.shared_groups import loss_mask
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.upstream import last_logits_processor

SAMPLER_LOGPS = "sampling_per_token_logps"
"""TRL's key for the sampler's log-probabilities of the tokens; TRL moves and cuts them with their rows."""

MODEL_LOGPS = "scored_per_token_logps"
"""Key for the log-probabilities by the trained model, before the first step on the tokens."""


DEPTHS = (0, 16, 64, 256)
"""Where the stretches of an answer begin that have bounds of their own."""

BOUNDS = {
    "float32": (1e-5, 1e-5, 1e-5, 1e-5),
    "tf32": (5e-4, 7e-4, 7e-4, 7e-4),
    "float16": (3e-3, 5e-3, 7e-3, 1.5e-2),
    "bfloat16": (2e-2, 3e-2, 3e-2, 4.5e-2),
}
"""Largest mean difference of log-probabilities in each stretch, by the coarser precision of both sides.

Measured with transformers on one H200 (torch 2.11): a Llama of 24 layers and width 768, trained to 1.02 nats a byte on
Python code, sampled 16 answers of 768 tokens with its cache, which it then read whole, 4 at a time. Mean differences in
the four stretches, sampler | learner:

    float32 | float32    7.6e-7  8.6e-7  9.1e-7  9.3e-7    largest of a token 1.3e-5
    tf32 | tf32          6.0e-5  8.2e-5  8.3e-5  9.1e-5    1.5e-3
    float16 | float16    2.9e-4  4.5e-4  5.1e-4  5.1e-4    1.0e-2
    float16 | float32    6.0e-4  8.7e-4  1.3e-3  3.0e-3    1.1e-1
    bfloat16 | bfloat16  2.3e-3  4.1e-3  3.8e-3  4.2e-3    1.1e-1
    bfloat16 | float32   4.3e-3  5.7e-3  6.3e-3  9.0e-3    2.9e-1
    bfloat16 | float32 weights in bf16 autocast  4.1e-3  5.6e-3  6.2e-3  9.2e-3

A bound is about five times the worst of its precision (seven to ten times the mean in tf32, ten times in float32), for
models that are deeper, of more tokens, or computed by other kernels.
"""

DIFFERS = "sampler_differs"
"""The event of a run whose sampler is not the model that learns."""

FEWEST = 16
"""Fewest tokens whose mean is judged; a stretch with fewer is not, unless no stretch has more."""


def find_bound(one: str, other: str, *, depth: int) -> float:
    """Return the largest mean difference at a depth of the answer; an unknown precision counts as bfloat16."""
    stretch = sum(depth >= begin for begin in DEPTHS) - 1
    return max(BOUNDS.get(name, BOUNDS["bfloat16"])[stretch] for name in (one, other))


def find_precision(trainer: Any, *, is_sampling: bool = False) -> str:
    """Return what a GRPOTrainer's model computes in: a name of BOUNDS."""
    # Continuous batching computes without autocast (`rollouts.dtypes_kept`).
    if not (is_sampling and trainer.use_transformers_continuous_batching):
        if trainer.args.bf16:
            return "bfloat16"
        if trainer.args.fp16:
            return "float16"
    kinds = {w.dtype for name, w in trainer.model.named_parameters() if w.is_floating_point() and "lora_" not in name}
    if kinds & {torch.bfloat16, torch.float16} or not kinds:
        return "float16" if kinds == {torch.float16} else "bfloat16"
    is_tf32 = trainer.accelerator.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if is_tf32 else "float32"


def find_facts(trainer: Any) -> SamplerFacts:
    """Return what is known of a GRPOTrainer's sampler. All ranks get the same, but for how a server is asked."""
    if not trainer.use_vllm:
        return SamplerFacts(dtype=find_precision(trainer, is_sampling=True))
    generation, facts = trainer.vllm_generation, SamplerFacts("vLLM")
    if trainer.vllm_mode == "server":
        if trainer.accelerator.is_main_process:
            facts = read_server_facts(generation.vllm_client)
    else:
        facts = SamplerFacts("vLLM", str(generation.llm.llm_engine.model_config.dtype).removeprefix("torch."))
    dtype = gather_objects(facts.dtype)[0]
    return replace(facts, dtype=dtype if dtype in BOUNDS else None)


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
    """Inside, add the log-probabilities of each row that `model.generate` samples, and the `top` likeliest tokens; of
    rows by `generate_batch` the log-probabilities alone.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    rows: list[SampledRow] = []
    generate, generate_batch = model.generate, getattr(model, "generate_batch", None)
    replaced = {name: vars(model)[name] for name in ("generate", "generate_batch") if name in vars(model)}

    def generate_and_record(*given: Any, **named: Any) -> Any:
        record = TokenRecord(top)
        with last_logits_processor(base, lambda: record):
            sampled = generate(*given, **named)  # where memory runs out, it is called again for fewer rows
        rows.extend(record.finish(sampled[:, named["input_ids"].size(1) :]))
        return sampled

    def generate_batch_and_record(*given: Any, continuous_batching_config: Any, **named: Any) -> Any:
        assert generate_batch is not None
        config = copy.copy(continuous_batching_config)
        config.return_logprobs = True
        outputs = generate_batch(*given, continuous_batching_config=config, **named)
        rows.extend(SampledRow(output.logprobs) for output in outputs.values())
        return outputs

    model.generate, model.generate_batch = generate_and_record, generate_batch_and_record
    try:
        yield rows
    finally:
        del model.generate, model.generate_batch
        vars(model).update(replaced)


@dataclass(frozen=True)
class Reading:
    """How far sampler and learner were apart in a rollout batch."""

    step: int
    sums: tuple[float, ...]
    """Sum of the differences in each stretch of the answers, of all ranks."""

    counts: tuple[int, ...]
    largest: float
    """Of one token."""

    bounds: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Mean difference of all tokens."""
        return sum(self.sums) / max(1, sum(self.counts))

    @property
    def worst(self) -> int:
        """The stretch that is furthest above its bound, or nearest to it."""
        enough = [n for n, count in enumerate(self.counts) if count >= FEWEST] or [
            max(range(len(self.counts)), key=self.counts.__getitem__)
        ]
        return max(enough, key=lambda n: self.sums[n] / max(1, self.counts[n]) / self.bounds[n])

    @property
    def worst_gap(self) -> float:
        return self.sums[self.worst] / max(1, self.counts[self.worst])

    @property
    def is_within(self) -> bool:
        """False also where a difference is no number."""
        return self.worst_gap <= self.bounds[self.worst]


class SamplerCheck:
    """Compares log-probabilities, sums over this rank's tokens since the last line of metrics, and finds the cause of a
    difference.
    """

    def __init__(self, every_steps: int, precision: str = "float32", *, facts: SamplerFacts | None = None) -> None:
        """`precision` is the learner's, a name of BOUNDS; the sampler has the same where `facts` do not say another."""
        self.every_steps, self.precision, self.facts = every_steps, precision, facts or SamplerFacts()
        self.trained_logps: Tensor | None = None
        """Log-probabilities of the current micro-batch's tokens by the trained model."""

        self.reading: Reading | None = None
        self.cause: Explanation | None = None
        self._explained = 0.0  # the largest difference whose cause was looked for
        self._largest: float | None = None
        self._sums = {"sampler_gap": (0.0, 0), "sampler_kl": (0.0, 0)}

    def is_due(self, step: int) -> bool:
        """Return whether the rollout batch after `step` steps is checked."""
        return self.every_steps > 0 and step % self.every_steps == 0

    def compare(self, *, sampled: Tensor | None, before: Tensor | None, mask: Tensor) -> None:
        """Add a micro-batch: `sampled` by the sampler, `before` by the weights that sampled, where they are known.

        The gap is that of the weights that sampled, without dropout; what the weights have moved since is the KL's.
        """
        if self.trained_logps is None:
            return
        now, kept = self.trained_logps.float(), mask.bool()
        if sampled is not None:
            gap = (now if before is None else before.float()) - sampled.float()
            self._add("sampler_gap", gap[kept & ~torch.isnan(sampled)].abs())
        if before is not None:
            # Schulman's third estimator, joschu.net/blog/kl-approx.html; TRL estimates its KL by it, too.
            change = (now - before.float())[kept]
            self._add("sampler_kl", change.exp() - 1 - change)

    def take(self, heartbeat: Heartbeat) -> dict[str, Any]:
        """Return the means over the tokens of all ranks, None where nothing was measured, and reset the sums; with the
        largest gap of a token, the bound of the mean, and the cause of a gap above it.

        Every rank must call it.
        """
        ranks = gather_objects(self._sums, heartbeat)
        self._sums = dict.fromkeys(self._sums, (0.0, 0))
        means: dict[str, Any] = {}
        for name in self._sums:
            total, count = (sum(rank[name][n] for rank in ranks) for n in (0, 1))
            means[name] = total / count if count else None
        reading, self.reading = self.reading, None
        largest, self._largest = self._largest, None
        bound = None if reading is None else reading.bounds[reading.worst]
        cause = self.cause.name if reading is not None and self.cause is not None else None
        return {**means, "sampler_gap_max": largest, "sampler_gap_bound": bound, "sampler_cause": cause}

    def _add(self, name: str, values: Tensor) -> None:
        total, count = self._sums[name]
        self._sums[name] = (total + float(values.double().sum()), count + values.numel())

    def judge(self, trainer: Any, micro_batches: Sequence[Mapping[str, Any]]) -> None:
        """Judge a rollout batch before it is learned from; every rank calls it. Above the bound, say the cause at once:
        once for each, and again where the difference has doubled.
        """
        if not self.every_steps or all(read_before(batch) is None for batch in micro_batches):
            return
        known = [batch for batch in micro_batches if read_gaps(batch) is not None]
        # A rank may have sampled nothing (grpo.skip_zero_variance): the others would wait for it.
        if not any(gather_objects(bool(known), trainer.heartbeat)):
            return
        reading = self._read(known, step=trainer.state.global_step, heartbeat=trainer.heartbeat)
        self.reading, self._largest = reading, max(reading.largest, self._largest or 0.0)
        bound = reading.bounds[reading.worst]
        if reading.is_within:
            begin, self.cause = DEPTHS[reading.worst], None
            fine = find_bound(self.precision, self.precision, depth=begin)
            if reading.worst_gap > fine:  # it is of the size of the sampler's own, coarser precision
                words = f"another dtype: the sampler computes in {self.facts.dtype}, the learner in {self.precision}"
                self.cause, bound = Explanation("another dtype", words, DTYPE_FIX), fine
        elif not reading.worst_gap <= 2 * self._explained:
            self._explained = reading.worst_gap if reading.worst_gap < float("inf") else 0.0
            rows = choose_rows(known, DEPTHS[reading.worst])
            with trainer.heartbeat.within("forward"):
                self.cause = self._diagnose(trainer, reading, rows)
        if self.cause is not None and log.is_main():
            self._say(RunFolder(trainer.run_folder), reading, self.cause, bound=bound)

    def _read(self, batches: Sequence[Mapping[str, Any]], *, step: int, heartbeat: Heartbeat) -> Reading:
        sums, counts, largest = [0.0] * len(DEPTHS), [0] * len(DEPTHS), 0.0
        for batch in batches:
            gaps = read_gaps(batch)
            assert gaps is not None
            for n, begin in enumerate(DEPTHS):
                part = gaps[:, begin : (*DEPTHS[1:], None)[n]]
                part = part[~torch.isnan(part)].double()
                sums[n] += float(part.sum())
                counts[n] += part.numel()
                largest = max(largest, float(part.max()) if part.numel() else 0.0)
        ranks = gather_objects((sums, counts, largest), heartbeat)
        sampler = self.facts.dtype or self.precision
        return Reading(
            step, tuple(sum(rank[0][n] for rank in ranks) for n in range(len(DEPTHS))),
            tuple(sum(rank[1][n] for rank in ranks) for n in range(len(DEPTHS))), max(rank[2] for rank in ranks),
            tuple(find_bound(self.precision, sampler, depth=begin) for begin in DEPTHS),
        )  # fmt: skip

    def _diagnose(self, trainer: Any, reading: Reading, rows: list[tuple[float, Row]]) -> Explanation:
        """Return the cause; the main rank looks for it, or all of them where the weights lie on several."""
        ranks = gather_objects(rows, trainer.heartbeat)
        worst = sorted((pair for rank in ranks for pair in rank), key=lambda pair: -pair[0])[:ROWS]
        is_sharded, found = has_sharded_weights(trainer), None
        if worst and (log.is_main() or is_sharded):
            learner = Learner(
                trainer.model, trainer.temperature, self.facts, is_sharded,
                old_weights=lambda: find_old_weights(trainer), old_heads=lambda: find_old_heads(trainer),
                other_prompts=lambda row: list_other_prompts(trainer, row),
                autocast=trainer.accelerator.autocast,
            )  # fmt: skip
            largest = {name: BOUNDS[name][-1] for name in ("bfloat16", "float16")}
            bound = reading.bounds[reading.worst]
            try:
                found = Diagnosis(learner, [row for _, row in worst], bound=bound, dtype_bounds=largest).run()
            except torch.OutOfMemoryError:
                fix = "lower train.batch_size to leave room for the search"
                found = Explanation("unknown", "unknown: the memory does not suffice to look for it", fix, 0.0)
        cause: Explanation | None = gather_objects(found, trainer.heartbeat)[0]
        return cause or Explanation("unknown", "unknown: no token's log-probability is a number", "see samples/", 0.0)

    def _say(self, folder: RunFolder, reading: Reading, cause: Explanation, *, bound: float) -> None:
        if any(event["event"] == DIFFERS and event.get("cause") == cause.name for event in folder.read_events()):
            return  # also before a resume
        place, last = reading.worst, (*DEPTHS[1:], None)[reading.worst]
        is_own = bound < reading.bounds[place]
        sides = self.precision if is_own else " and ".join(
            dict.fromkeys((self.precision, self.facts.dtype or self.precision))
        )  # fmt: skip
        where = f"tokens from {DEPTHS[place]} on" if last is None else f"tokens {DEPTHS[place]} to {last - 1}"
        what = (
            f"sampler and learner are not one model in step {reading.step + 1}: the log-probabilities of the answers' "
            f"{where} differ by {reading.worst_gap:.2g} in the mean; {sides} allows {bound:.2g}"
        )
        log.say(f"warning: {what}\n  cause: {cause.words}\n  fix: {cause.fix}", "sampler")
        folder.add_event(
            DIFFERS, step=reading.step + 1, cause=cause.name, words=cause.words, fix=cause.fix, gap=reading.worst_gap,
            bound=bound,
        )  # fmt: skip


def read_before(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the log-probabilities by the weights that sampled; where a rank has them, all ranks do."""
    return batch.get("old_per_token_logps", batch.get(MODEL_LOGPS))


def read_gaps(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the differences of a micro-batch's tokens, NaN where there is none; None where nothing is known."""
    sampled, before = batch.get(SAMPLER_LOGPS), read_before(batch)
    if sampled is None or before is None:
        return None
    return (before.float() - sampled.float()).abs().masked_fill(~loss_mask(dict(batch)).bool(), torch.nan)


def choose_rows(batches: Sequence[Mapping[str, Any]], depth: int) -> list[tuple[float, Row]]:
    """Return the rows that differ most in sum from the token `depth` of their answers on, with that sum: by the mean
    they would be short ones, whose few tokens fit many hypotheses.
    """
    found = []
    for batch in batches:
        gaps = read_gaps(batch)
        assert gaps is not None
        part = gaps[:, depth : depth + TOKENS]
        for n in range(len(part)):
            known = ~torch.isnan(part[n])
            if not bool(known.any()):
                continue
            end = depth + int(known.nonzero().max()) + 1
            prompt = batch["prompt_ids"][n][batch["prompt_mask"][n].bool()].tolist()
            said = batch[SAMPLER_LOGPS][n, depth:end].float().masked_fill(torch.isnan(gaps[n, depth:end]), torch.nan)
            row = Row(int(batch["row"][n]), prompt, batch["completion_ids"][n, :end].tolist(), said.tolist())
            found.append((float(part[n][known].sum()), row))
    return sorted(found, key=lambda pair: -pair[0])[:ROWS]
