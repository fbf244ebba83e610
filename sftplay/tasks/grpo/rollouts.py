"""Rollout batches of task grpo: the trained model samples completions, and optimizer steps train on exact batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from trl.kernels import chunked_logprob
from trl.trainer import utils

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.machine.libraries import compiler_remedy, find_compiler_problem
from sftplay.model.adapter import trained_weights_kept
from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.tasks.grpo.scoring import RewardScorer, ScoredBatch, cut_samples, samples_path, write_samples
from sftplay.tasks.grpo.watch import read_policy_clip_share
from sftplay.tasks.grpo.window_state import load_window, save_window
from sftplay.train.eval_mode import eval_mode
from sftplay.train.exact_batch import StepSetup
from sftplay.train.interval import StepCounts
from sftplay.train.observer import TrainerView
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.random_numbers import random_numbers_kept


@contextmanager
def dtypes_kept(args: Any, device: torch.device) -> Iterator[None]:
    """Inside, TRL does not convert the model to 16 bits before it generates; the model computes in its weights' dtypes.

    TRL would convert the whole model for good, with fp32 trainable weights and rotary frequencies (trl 1.16,
    `_generate_single_turn`).
    """
    before = args.bf16, args.fp16
    args.bf16 = args.fp16 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        args.bf16, args.fp16 = before


@contextmanager
def gathered_root(model: Any) -> Iterator[None]:
    """Inside, every rank holds the weights outside the layers of `model`, where FSDP shards a model with an adapter."""
    if not (hasattr(model, "unshard") and hasattr(model, "peft_config")):
        yield
        return
    model._get_fsdp_state()._lazy_init()  # else the first layer that is called would take itself for the outermost
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextmanager
def fitted_tiles(vocab: int) -> Iterator[None]:
    """Inside, TRL's forward passes take a buffer of `vocab` columns for each token, where that is fewer than 32768.

    Columns beyond the vocabulary are never used, but they take memory. On a CPU they are huge pages, which the kernel
    fills with zeros each time. On a CPU TRL also computes the logits of prompts and padding and discards them; only
    on GPUs it leaves them out, because other devices would compile each shape anew (trl 1.16, `_fused_forward`). The
    values are the same; gradients are the same up to rounding.
    """
    width, use_triton = utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton

    def leaves_out_padding(device: torch.device) -> bool:
        return device.type == "cpu" or bool(use_triton(device))

    utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton = min(width, vocab), leaves_out_padding
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE, utils._use_triton = width, use_triton


def avoid_triton() -> None:
    """Let TRL compute its tiles by torch from now on, where Triton cannot build kernels for this process's GPU.

    TRL chooses in every forward and backward pass (trl 1.16, kernels/chunked_logprob.py, `_use_triton`).
    """
    if torch.cuda.is_available() and (problem := find_compiler_problem()):
        chunked_logprob._use_triton = lambda device: False
        log.say(
            f"{problem}: log-probabilities are computed by torch, not by TRL's Triton kernels ({compiler_remedy()})"
        )


REFERENCE = "ref"
"""TRL's name of the reference adapter (`_generate_and_score_completions`)."""


@contextmanager
def no_copy_by_trl(model: Any, args: Any) -> Iterator[None]:
    """Inside, TRL's constructor sees beta 0 where an adapter trains; TRL would copy every adapter, also a new one."""
    beta = args.beta
    if hasattr(model, "get_base_model"):
        args.beta = 0.0
    try:
        yield
    finally:
        args.beta = beta


def keep_reference(model: Any) -> None:
    """Add a frozen copy of the current adapter."""
    weights = get_peft_model_state_dict(model, adapter_name="default")
    model.add_adapter(REFERENCE, model.peft_config["default"])
    set_peft_model_state_dict(model, weights, adapter_name=REFERENCE)
    model.set_adapter("default")
    for name, parameter in model.named_parameters():
        if f".{REFERENCE}." in f"{name}.":
            parameter.requires_grad_(False)


if TYPE_CHECKING:

    class Base(TrainerView):
        """The trainer that comes after the mixin."""

        num_generations: int
        num_iterations: int
        beta: float
        lr_scheduler: Any
        _step: int
        _buffered_inputs: Any
        _metrics: Any
        _logs: Any

        def __init__(self, **named: Any) -> None: ...
        def train(self, resume_from_checkpoint: Any = None, **named: Any) -> Any: ...
        def _generate(self, prompts: list[Any]) -> Any: ...
        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any: ...
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]: ...
        def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]: ...
        def compute_loss(self, model: nn.Module, inputs: Any, *given: Any, **named: Any) -> Any: ...
        def _save_checkpoint(self, *given: Any) -> None: ...
else:
    Base = object


class RolloutMixin(Base):
    """Stands before TRL's trainer: `class PromptTrainer(RolloutMixin, GRPOTrainer)`."""

    def __init__(
        self,
        step: StepSetup,
        *,
        cfg: RunConfig,
        run_folder: Path,
        scorer: RewardScorer,
        model: Any,
        args: Any,
        **named: Any,
    ) -> None:
        has_adapter = hasattr(model, "get_base_model")
        # TRL converts the adapter of a 4-bit base to bf16.
        with trained_weights_kept(model) if has_adapter else nullcontext(), no_copy_by_trl(model, args):
            named["reward_funcs"] = [_reward_stub(name) for name in scorer.training_weights]
            super().__init__(model=model, args=args, **named)
        self.beta = args.beta
        if has_adapter and args.beta and cfg.model.adapter:
            keep_reference(model)
        self.cfg, self.run_folder, self.scorer, self.heartbeat = cfg, run_folder, scorer, step.heartbeat
        batch_rows = cfg.grpo.generation_rows
        if not isinstance(batch_rows, int):  # all completions of a rollout batch
            batch_rows = int(args.per_device_train_batch_size * args.steps_per_generation)
        self._generation_batches = AdaptiveBatches(batch_rows, "generation")
        self.micro_batcher = self.replay = None
        self.source_names: tuple[str, ...] = ()
        self.held_out_sources: dict[str, dict[str, float]] = {}
        self.counts, self.last_loss = StepCounts(), 0.0
        self.last_rows: list[int] = []
        """Prompts in this rank's last step."""

        self.facts = {"rewards": scorer.training_weights, "executor": scorer.rewards.executor or None}
        """The task's entries in the manifest."""

        self.rollout_figures: dict[str, float | None] = {}
        """Figures of the current rollout batch."""

        self.held_out_figures: dict[str, float] = {}
        """Figures of evaluations since the last line of metrics."""

        self._figures: dict[str, list[float | None]] = defaultdict(list)
        self._seen_step = -1
        self._check_loss = step.check_loss if self.is_deepspeed_enabled and not self.args.fp16 else None

    @property
    def generation_rows(self) -> int:
        """Completions that this rank generates at a time."""
        return self._generation_batches.batch_size

    def train(self, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Train; from a checkpoint within a rollout batch with the completions in the checkpoint."""
        with self.scorer:
            if resume_from_checkpoint:
                load_window(self, Path(resume_from_checkpoint))
            cut_samples(self.run_folder, after_step=self._step // self.args.gradient_accumulation_steps)
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return prompts, None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> Any:
        """Generate as TRL does, without dropout; with transformers as many completions at a time as memory allows."""
        if self.cfg.grpo.generation != "transformers":
            is_continuous = self.cfg.grpo.generation == "continuous"
            keeps_dtypes = dtypes_kept(self.args, self.accelerator.device) if is_continuous else nullcontext()
            with eval_mode(self.model_wrapped), keeps_dtypes:
                return super()._generate_single_turn(prompt_ids, *given, **named)

        def generate(part: slice) -> list[list[int]]:
            self.heartbeat.enter(self.heartbeat.phase)  # a beat for each batch: only a single one can take too long
            with eval_mode(self.model_wrapped), gathered_root(self.model_wrapped):
                ids, _ = super(RolloutMixin, self)._generate_single_turn(prompt_ids[part], *given, **named)
            return list(ids)

        rows, size = len(prompt_ids), self._generation_batches.batch_size
        if has_sharded_weights(self):  # ranks generate together: none may take smaller batches than the others
            parts = [generate(slice(at, at + size)) for at in range(0, rows, size)]
        else:
            parts = list(self._generation_batches.map(rows, generate))
        return [ids for part in parts for ids in part], None

    def _generate(self, prompts: list[list[int]]) -> Any:
        # The same precision as in the later forward passes that compute log-probabilities.
        with self.heartbeat.within("generation"), self.accelerator.autocast():
            return super()._generate(prompts)

    def _calculate_rewards(self, inputs: list[Any], _prompts: Any, completions: list[str], _ids: Any) -> Tensor:
        """Score the completions of all ranks: float [completions, rewards], NaN where a reward abstains."""
        self.scored_batch = self.scorer.score(inputs, completions, heartbeat=self.heartbeat)
        return self.make_reward_tensor(self.scored_batch)

    def make_reward_tensor(self, batch: ScoredBatch) -> Tensor:
        """Return the batch's rewards as TRL takes them."""
        return torch.tensor(batch.make_reward_matrix(), dtype=torch.float32, device=self.accelerator.device)

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        metrics = self._metrics["train"]
        self.rollout_figures = {
            **self.scored_batch.compute_figures(self.num_generations),
            "clipped_ratio": metrics["completions/clipped_ratio"][-1],
            "completion_tokens": metrics["completions/mean_length"][-1],
        }
        n_kept = self.cfg.grpo.samples
        lines = self.scored_batch.make_sample_lines(self.read_advantages())[:n_kept]
        write_samples(samples_path(self.run_folder, self.state.global_step + 1), lines)
        rows = torch.tensor([row["row"] for row in inputs], device=self.accelerator.device)
        return {**batch, "row": rows}

    def read_advantages(self) -> list[float]:
        """Return the advantages of the scored completions of all ranks."""
        return list(self._logs["advantages"])[-len(self.scored_batch.rows) :]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch)
        if self.state.global_step != self._seen_step:
            self._seen_step, self.last_rows, self.last_loss = self.state.global_step, [], 0.0
            for name, value in self.rollout_figures.items():
                self._figures[name].append(value)
        return inputs

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        self._count(inputs)
        self.heartbeat.enter("forward")
        loss = super().compute_loss(model, inputs, *given, **named)
        self.last_loss = self.last_loss + loss.detach()
        if self._check_loss is not None:
            self._check_loss(loss.detach())
        self.heartbeat.enter("backward")
        return loss

    def _count(self, inputs: Mapping[str, Tensor]) -> None:
        prompts, completions = inputs["prompt_mask"].sum(1), inputs["completion_mask"].sum(1)
        rows, lengths = inputs["row"].tolist(), (prompts + completions).tolist()
        self.last_rows += rows
        self.counts.rows += rows
        self.counts.lengths += lengths
        self.counts.tokens += sum(lengths)
        self.counts.label_tokens += int(completions.sum())
        self.counts.padded_tokens += inputs["prompt_mask"].numel() + inputs["completion_mask"].numel()

    def _save_checkpoint(self, *given: Any) -> None:
        with random_numbers_kept():
            super()._save_checkpoint(*given)
        save_window(self, Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    def take_counts(self) -> StepCounts:
        """Return the counts since the last call, and reset them."""
        counts, self.counts = self.counts, StepCounts()
        return counts

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the task's figures for a line of metrics: means over the steps since the last line."""
        figures: dict[str, float | None] = {}
        for name, values in self._figures.items():
            known = [value for value in values if value is not None]
            figures[name] = fmean(known) if known else None
        held_out, self.held_out_figures = self.held_out_figures, {}
        self._figures.clear()
        trl_figures = {
            "entropy": logs.get("entropy"),
            "kl": logs.get("kl"),
            "policy_clip_share": read_policy_clip_share(logs),
        }
        if (scaler := self.accelerator.scaler) is not None:
            trl_figures |= read_loss_scale(scaler, steps=self.state.global_step, taken=self.lr_scheduler.last_epoch)
        return {**figures, **trl_figures, **held_out}

    def rows_not_finite(self) -> list[int]:
        """Return no rows: a completion's loss depends on its group, so no single row is at fault."""
        return []


def read_loss_scale(scaler: Any, *, steps: int, taken: int) -> dict[str, float]:
    """Return the scale of torch's GradScaler for fp16, and the steps that it skipped since the first one.

    `taken` counts the steps of the schedule, which transformers advances only after a step of the optimizer.
    """
    return {"loss_scale": scaler.get_scale(), "skipped_steps": steps - taken}


def _reward_stub(name: str) -> Any:
    """Return a function with a reward's name for TRL's logs; `_calculate_rewards` calls the reward itself."""

    def reward(**_: Any) -> list[float | None]:
        raise AssertionError(f"the RewardScorer calls the reward {name}")

    reward.__name__ = name
    return reward
