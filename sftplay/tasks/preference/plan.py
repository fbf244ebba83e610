"""Preferences in the plan: memory of a step of pairs, and what the pass of the reference costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from sftplay.config.run import RunConfig
from sftplay.data.cache import read_lengths
from sftplay.machine.probe import Machine
from sftplay.model.source import BUILTIN_CONFIGS
from sftplay.plan.activations import FP32, norm_kept, norm_out_bytes
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import (
    SHARDING,
    DeviceShare,
    Footprint,
    Forecast,
    Hardware,
    RowLengths,
    Setting,
    Size,
    estimate,
    standing_bytes,
    with_loading,
)
from sftplay.plan.memory_setup import MemorySetup
from sftplay.plan.report import CPU_FLOPS_PER_CORE, USED_SHARE, TaskReport, Workload, estimate_workload
from sftplay.plan.shape import ModelShape
from sftplay.plan.sizing import Decision, Decisions, TaskSizing
from sftplay.tasks.grpo.plan import forward_layer
from sftplay.tasks.preference.spec import KINDS, USUAL_BETA, find_reference_model, uses_reference
from sftplay.units import format_bytes, format_seconds

PASS, OTHER = "reference pass", "reference"

LOGP_BYTES = 2 * FP32  # the reference's two log-probabilities of a row

COPIES = 2  # of these on the disk: next to the data, and in the run folder

PART_SCORES = 2**22
"""Scores that are turned to fp32 at a time where log-probabilities are taken (`shared_prompt.TargetLogps`)."""

FEW_ROWS = 16
"""Rows of a step from which on kto's KL term is usually estimated (Ethayarajh 2024, section 4: 32 to 128)."""


@dataclass(frozen=True, kw_only=True)
class PairMemory:
    """Memory of a step in which both answers to a prompt are computed, and of the reference's pass before it."""

    shares: Literal["yes", "no", "open"]
    """Whether the prompt is computed once for both answers; open until a proof with the model's weights."""

    scores_one: bool = False  # True where a step learns from one answer of a row (kto); the other gives no gradient
    has_reference: bool = False
    other: ModelShape | None = None  # another model that is the reference
    rows: int | None = None  # to train on, where they are known
    row_tokens: float = 0.0  # tokens of a row, the mean where it is known
    joined: int | None = None  # most tokens of a prompt with both answers; None: twice those with one answer
    answer_labels: int | None = None  # most labels of both answers; None: every token may have one
    labels: ClassVar[Mapping[str, str]] = {
        PASS: "while the reference's probabilities are computed",
        OTHER: "the reference model",
    }
    learners: ClassVar[int] = 1

    def forecast(self, setting: Setting, size: Size, *, sampled: int, share: DeviceShare) -> Forecast:
        """Forecast a step of so many pairs, and the pass before it; `size.seq` counts a prompt with one answer."""
        found = [
            self._estimate(setting, setup, size=part, share=share)
            for setup, part in self._forms(setting.execution, size)
        ]
        footprint = max(found, key=lambda one: one.peak_bytes)
        return with_loading(Forecast(setting, size, footprint, round(share.host)), share=share)

    def _forms(self, setup: MemorySetup, size: Size) -> Iterator[tuple[MemorySetup, Size]]:
        """Yield the forms in which a micro-batch may run: joined rows with a mask, or each answer in a row."""
        if self.scores_one:
            yield setup, size
            return
        labelled = None if self.answer_labels is None else size.rows * self.answer_labels
        if self.shares != "no":
            attention = "efficient" if setup.attention == "flash" else setup.attention
            masked = replace(setup, attention=attention, is_masked=True, repeats_kv=True)
            yield masked, replace(size, seq=min(2 * size.seq, self.joined or 2 * size.seq), labelled=labelled)
        if self.shares != "yes":
            yield setup, replace(size, rows=2 * size.rows, labelled=labelled)

    def _estimate(self, setting: Setting, setup: MemorySetup, *, size: Size, share: DeviceShare) -> Footprint:
        shape = setting.shape
        step = estimate(shape, setup, size=size, standing=share.standing, communication=share.communication)
        phases = {name: dict(parts) for name, parts in step.phases.items()}
        if setup.head != "score":  # a reward model has no scores over the vocabulary
            phases["head"]["head"] = _backward_head(shape, setup, size=size)
        if not self.has_reference and not self.scores_one:
            return Footprint(phases)
        # Before the first step the optimizer has no state yet, but that of DeepSpeed's, which keeps fp32 weights there.
        is_zero = setting.strategy.startswith("zero")
        head = _forward_head(shape, setup, size=size)
        layer = forward_layer(shape, setup, rows=size.rows, seq=size.seq)
        phases[PASS] = {
            "weights": share.standing.weights,
            "adapters": share.standing.adapters,
            # kto computes the answers without a gradient in every step.
            "optimizer": share.standing.optimizer if is_zero or self.scores_one else 0.0,
            OTHER: _count_other(self.other, setup),
            SHARDING: share.communication.buffers + share.communication.gathered,
            "workspace": float(setup.workspace_bytes),
            **({"head": head} if head >= layer else {"layer": layer}),
        }
        return Footprint(phases)

    def describe_costs(self, setting: Setting) -> Iterator[str]:
        """Yield what the pass takes, and a line for each reference."""
        seconds = self.pass_seconds(setting)
        rows = "all rows" if self.rows is None else f"{self.rows:,} rows"
        time = "" if seconds is None else f", about {format_seconds(seconds)}"
        disk = "8 bytes a row" if self.rows is None else format_bytes(COPIES * LOGP_BYTES * self.rows)
        yield f"reference   one forward pass over {rows} before the first step{time}, {disk} on disk"
        yield "            later runs on these rows and weights read it from data.processed_dir"
        yield "              start        the pass; the model is loaded anyway"
        adapts = not setting.execution.trains_all
        yield f"              adapter_off  {'the pass; it is the same model' if adapts else 'needs an adapter'}"
        other = format_bytes(int(_count_other(self.other or setting.shape, setting.execution)))
        size = other if self.other else f"about {other}"
        yield f"              a path       the pass, and {size} of memory until it ends"
        yield "              none         nothing"

    def pass_seconds(self, setting: Setting) -> float | None:
        """Estimate the seconds of the pass over all rows; None where the rows or the device's speed are not known."""
        device, shape = setting.device, self.other or setting.shape
        if self.rows is None or (device.is_gpu and device.tflops is None):
            return None
        flops = 2 * (shape.product_params + shape.vocab * shape.hidden) * self.rows * self.row_tokens
        if device.is_gpu:
            return flops / (float(device.tflops or 0) * 1e12 * USED_SHARE * setting.world_size)
        return float(flops / (CPU_FLOPS_PER_CORE * device.cores))


def _count_other(other: ModelShape | None, setup: MemorySetup) -> float:
    """Count the bytes of another model that is the reference. It is whole on every device, and has no adapter."""
    return standing_bytes(other, setup).weights if other is not None else 0.0


def _forward_head(shape: ModelShape, setup: MemorySetup, *, size: Size) -> float:
    """Count the bytes of the scores of labels, or of a chunk of them, without gradients."""
    labelled = size.tokens if size.labelled is None else size.labelled
    scores = _count_scores(shape, setup, labelled)
    bytes_ = scores * setup.logits_bytes + FP32 * min(PART_SCORES, scores)
    return float(bytes_ + (size.tokens + labelled) * shape.hidden * norm_out_bytes(shape, setup))


def _backward_head(shape: ModelShape, setup: MemorySetup, *, size: Size) -> float:
    """Count the bytes at the end of the head, or while the log-probabilities and the head are differentiated."""
    labelled = size.tokens if size.labelled is None else size.labelled
    scores, matrix = _count_scores(shape, setup, labelled), shape.vocab * shape.hidden
    is_half = setup.logits_bytes < FP32
    capped = 2 * setup.logits_bytes if shape.softcap_final else 0  # its tanh, and the gradient of that
    # The scores, their gradient in fp32, and that as narrow as the scores (`TargetLogps.backward`).
    loss = scores * (setup.logits_bytes + FP32 + (setup.logits_bytes if is_half else 0) + capped)
    product = scores * setup.logits_bytes
    is_rounded = setup.has_autocast and setup.weight_bytes != setup.compute_bytes
    if setup.trains_all:
        gradient = matrix * (setup.compute_bytes + (setup.weight_bytes if is_rounded else 0))
        # The gradients of chunks are added up, outside the weight.
        so_far = matrix * setup.weight_bytes if setup.head == "chunked" and labelled > setup.chunk_tokens else 0
        loss, product = loss + so_far, product + gradient + 2 * so_far
    states = labelled * shape.hidden * (norm_out_bytes(shape, setup) + FP32) + size.tokens * norm_kept(shape, setup)
    rounded = matrix * setup.compute_bytes if is_rounded else 0
    return float(max(_forward_head(shape, setup, size=size), states + max(loss, product)) + rounded)


def _count_scores(shape: ModelShape, setup: MemorySetup, labelled: int) -> int:
    """Count the scores over the vocabulary that exist at a time."""
    return (min(labelled, setup.chunk_tokens) if setup.head == "chunked" else labelled) * shape.vocab


class PreferencePlan(TaskSizing, TaskReport):
    """The prompt of a pair is computed with both of its answers."""

    def unit(self, cfg: RunConfig) -> str:
        return "answers" if cfg.task.takes_answers else "pairs"

    def rows_per_record(self, cfg: RunConfig) -> int:
        """Return 2 in kto where the first row that can be read is a pair, and its answers were not yet counted."""
        if not cfg.task.takes_answers or read_lengths(cfg):
            return 1
        from sftplay.tasks.preference.pairs import sample_pairs

        return 2 if any(pair.desirable is None for pair in sample_pairs(cfg, cfg.rows_path, is_plain=True)[:1]) else 1

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> PairMemory:
        has_kernel = cfg.model.attn in ("sdpa", "eager", "auto")
        wanted = cfg.preference.shared_prompt
        other = None
        if uses_reference(cfg) and cfg.preference.reference not in KINDS:
            found = find_reference_model(cfg)
            other = find_shape(found.name, found.revision, builtin=BUILTIN_CONFIGS)
        lengths = hardware.lengths
        return PairMemory(
            shares="no" if wanted is False or not has_kernel else "yes" if wanted is True else "open",
            scores_one=cfg.task.takes_answers,
            has_reference=uses_reference(cfg),
            other=other,
            rows=lengths.count if lengths else None,
            row_tokens=lengths.mean if lengths else 2 * cfg.row_tokens,
            # A micro-batch that is formed by tokens has more rows than one where they are short.
            joined=lengths.joined if lengths and cfg.train.batching != "tokens" else None,
            answer_labels=lengths.labels if lengths and cfg.train.batching != "tokens" else None,
        )

    def refuse_machine(self, cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
        if uses_reference(cfg) and cfg.preference.reference not in KINDS:
            find_reference_model(cfg)

    def decide_more(self, cfg: RunConfig, machine: Machine) -> Decisions:
        return {
            "train.packing": Decision(False, "answers share the row of their prompt"),
            "preference.beta": Decision(USUAL_BETA[cfg.task_mode], f"what the paper of {cfg.task_mode} uses"),
        }

    def notes(self, cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
        notes, rows, reference = list[str](), cfg.train.effective_batch_size, cfg.preference.reference
        if cfg.task.takes_answers and rows < FEW_ROWS:
            why = f"kto estimates its KL term by the rows of a step, and {FEW_ROWS} or more are usual"
            notes.append(f"train.effective_batch_size {rows}: {why}")
        if cfg.task_mode in ("dpo", "ipo") and reference == "none":
            notes.append("preference.reference none: nothing measures how far the model moves from where it starts")
        if uses_reference(cfg) and reference not in KINDS:
            why = "is held next to the model while its log-probabilities are computed, whole on each device"
            notes.append(f"preference.reference {reference} {why}")
        return tuple(notes)

    def describe_length(self, cfg: RunConfig) -> str:
        return "every answer at full length"

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        limit = cfg.model.max_seq_len
        shorter = f", the longest of these files (model.max_seq_len {limit})" if planned < limit else ""
        return f"prompts of {planned} tokens with {'an answer' if cfg.task_mode == 'kto' else 'each answer'}{shorter}"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        memory = seen.setting.task
        assert isinstance(memory, PairMemory)
        if memory.has_reference:
            yield from memory.describe_costs(seen.setting)

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        work, memory = estimate_workload(cfg, seen.setting, lengths=lengths), seen.setting.task
        assert isinstance(memory, PairMemory)
        if lengths is None and work.tokens is not None:  # counted for one answer a row
            work = replace(work, tokens=2 * work.tokens, seconds=None if work.seconds is None else 2 * work.seconds)
        if not memory.has_reference:
            return work
        seconds, basis = work.seconds, work.time_basis
        if (of_pass := memory.pass_seconds(seen.setting)) is not None and seconds is not None:
            seconds, basis = seconds + of_pass, f"{basis}; {format_seconds(of_pass)} of it for the reference"
        disk = work.disk_bytes + COPIES * LOGP_BYTES * (memory.rows or 0)
        return replace(work, seconds=seconds, time_basis=basis, disk_bytes=disk)


PLAN = PreferencePlan()
