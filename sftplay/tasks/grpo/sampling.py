"""The mixin around sampling: dynamic sampling, micro-batches ordered by length, and the log-probability check.

It stands before `RolloutMixin`: `class PromptTrainer(SamplingMixin, RolloutMixin, GRPOTrainer)`. It does not change
TRL's loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sftplay import log
from sftplay.data.prompts.questions import Questions
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.dynamic_sampling import DynamicSampler, LocalBatch
from sftplay.tasks.grpo.length_order import depends_on_cut, has_relative_positions, order_by_length
from sftplay.tasks.grpo.logprob_check import MODEL_LOGPS, SAMPLER_LOGPS, LogprobCheck, record_logprobs
from sftplay.tasks.grpo.prompts import PromptRows
from sftplay.tasks.grpo.rollouts import RolloutMixin, fitted_tiles
from sftplay.tasks.grpo.scoring import ScoredBatch
from sftplay.train.eval_mode import eval_mode
from sftplay.train.preflight import has_sharded_weights

if TYPE_CHECKING:

    class Base(RolloutMixin):
        """The trainer that comes after the mixin."""

        processing_class: Any
        use_vllm: bool
        use_transformers_continuous_batching: bool
        eos_token_ids: Any

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any: ...
        def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any: ...
else:
    Base = object


class SamplingMixin(Base):
    """The steps from sampling a rollout batch to its losses. `questions` are all training prompts."""

    def __init__(self, *given: Any, questions: Questions, **named: Any) -> None:
        super().__init__(*given, **named)
        grpo = self.cfg.grpo
        self.dynamic_sampler = DynamicSampler(
            PromptRows(questions),
            rows=questions.row_numbers,
            rounds=grpo.dynamic_sampling_rounds,
            num_generations=grpo.num_generations,
            seed=self.cfg.seed,
            in_lockstep=has_sharded_weights(self) or self.use_vllm,
        )
        self.sampling_totals = {"generated_tokens": 0, "redrawn_groups": 0, "passed_turns": 0}
        """Totals of all ranks since the run's first step, with the tokens of discarded completions."""

        self.logprob_check = LogprobCheck(grpo.logprob_check_steps)
        self.keeps_cut = depends_on_cut(self)
        """Why micro-batches stay as TRL cuts them; empty where they are ordered by length."""

        self._trims_prompts = has_relative_positions(self.model)
        self._inputs: list[dict[str, Any]] | None = None
        self._scored_early: ScoredBatch | None = None
        self._generated_tokens = 0

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        grpo, sampler = self.cfg.grpo, self.dynamic_sampler
        if grpo.dynamic_sampling_rounds or grpo.skip_zero_variance:
            ranks = gather_objects([row["row"] for row in inputs], self.heartbeat)
            rows = [row for rank in ranks for row in rank]
            if grpo.skip_zero_variance:
                self.sampling_totals["passed_turns"] += sampler.choose_skipped_groups(rows)
            else:
                self.sampling_totals["passed_turns"] += sampler.replace_skipped_prompts(inputs, rows)
        self._inputs, self._generated_tokens = inputs, 0
        try:
            batch = super()._generate_and_score_completions(inputs)
        finally:
            self._inputs = self._scored_early = None
        self.sampling_totals["generated_tokens"] += sum(gather_objects(self._generated_tokens, self.heartbeat))
        self.rollout_figures.update(sampler.first_figures)
        if sampler.skipped:
            self._mask_skipped(batch)
        return batch

    def _mask_skipped(self, batch: dict[str, Any]) -> None:
        """Mask the rows of skipped groups, and take their single token out of the figures."""
        rows = len(batch["completion_mask"])
        places = self.dynamic_sampler.find_sampled_places(log.rank() * rows, rows)
        is_sampled = torch.zeros(rows, 1, dtype=torch.bool, device=batch["completion_mask"].device)
        is_sampled[places] = True
        batch["completion_mask"] = batch["completion_mask"] * is_sampled
        n_sampled, n_rows = len(self.scored_batch.rows), rows * log.world_size()
        # Losses that divide by tokens divide as if all groups were sampled: skipping groups makes no step larger.
        batch["num_items_in_batch"] = (
            batch["num_items_in_batch"] - (n_rows - n_sampled) + self.dynamic_sampler.skipped_tokens
        )
        mean = self.rollout_figures["completion_tokens"] or 0.0
        self.rollout_figures["completion_tokens"] = (mean * n_rows - (n_rows - n_sampled)) / n_sampled
        self.rollout_figures["clipped_ratio"] = (self.rollout_figures["clipped_ratio"] or 0.0) * n_rows / n_sampled

    def read_advantages(self) -> list[float]:
        n_rows = len(self.scored_batch.rows) + len(self.dynamic_sampler.skipped) * self.num_generations
        advantages = list(self._logs["advantages"])[-n_rows:]
        return [advantages[n] for n in self.dynamic_sampler.find_sampled_places(0, n_rows)]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> Any:
        inputs = self._inputs
        if inputs is None:  # the evaluation
            return super()._generate_single_turn(prompt_ids, *given, **named)

        def generate(prompts: list[list[int]]) -> Any:
            completion_ids, logps = self._sample(prompts, *given, **named)
            self._generated_tokens += sum(map(len, completion_ids))
            return completion_ids, logps

        if self.cfg.grpo.skip_zero_variance:
            return self._sample_unskipped(inputs, prompt_ids, generate=generate)
        local = LocalBatch(inputs, prompt_ids, *generate(prompt_ids))
        if self.dynamic_sampler.rounds:
            first = self._score(inputs, local.completion_ids)
            self._scored_early, resampled = self.dynamic_sampler.resample(
                local, first, generate=generate, score=self._score
            )
            self.sampling_totals["redrawn_groups"] += resampled
        return local.completion_ids, local.logps

    def _sample_unskipped(self, inputs: list[dict[str, Any]], prompt_ids: list[list[int]], *, generate: Any) -> Any:
        """Sample completions of the groups that are not skipped. A row of the others gets one token without a loss."""
        places = self.dynamic_sampler.find_sampled_places(log.rank() * len(inputs), len(inputs))
        sampled_ids, sampled_logps = generate([prompt_ids[n] for n in places]) if places else ([], None)
        self._scored_early = self._score([inputs[n] for n in places], sampled_ids)
        # The tokens in TRL's loss; a truncated completion has none with grpo.mask_truncated_completions.
        ends = (*self.eos_token_ids, self.processing_class.pad_token_id)
        loss_tokens = [
            0 if self.args.mask_truncated_completions and ids[-1] not in ends else len(ids) for ids in sampled_ids
        ]
        ranks = gather_objects(loss_tokens, self.heartbeat)
        self.dynamic_sampler.record_sampled(self._scored_early, tokens=[count for rank in ranks for count in rank])
        completion_ids = [[self.processing_class.eos_token_id] for _ in inputs]
        logps = None if sampled_logps is None else [[float("nan")] for _ in inputs]
        for number, place in enumerate(places):
            completion_ids[place] = sampled_ids[number]
            if logps is not None:
                logps[place] = sampled_logps[number]
        return completion_ids, logps

    def _sample(self, prompts: list[list[int]], *given: Any, **named: Any) -> Any:
        """Sample completions, with the sampler's log-probabilities: always by vLLM, by the model itself when due."""
        is_plain = not self.use_vllm and not self.use_transformers_continuous_batching
        if not is_plain or not self.logprob_check.is_due(self.state.global_step):
            return super()._generate_single_turn(prompts, *given, **named)
        with record_logprobs(self.accelerator.unwrap_model(self.model_wrapped)) as rows:
            completion_ids, _ = super()._generate_single_turn(prompts, *given, **named)
        if len(rows) < len(completion_ids):  # a wrapper around the model hides its generation
            return completion_ids, None
        return completion_ids, [row[: len(ids)] for row, ids in zip(rows, completion_ids, strict=True)]

    def _score(self, inputs: list[dict[str, Any]], completion_ids: list[list[int]]) -> ScoredBatch:
        # transformers decodes an empty list to one empty text.
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True) if completion_ids else []
        return self.scorer.score(inputs, texts, heartbeat=self.heartbeat)

    def _calculate_rewards(self, inputs: list[Any], prompts: Any, completions: list[str], ids: Any) -> Tensor:
        if self._scored_early is None:
            return super()._calculate_rewards(inputs, prompts, completions, ids)
        self.scored_batch = self._scored_early
        rewards = self.make_reward_tensor(self.scored_batch)
        if not self.dynamic_sampler.skipped:
            return rewards
        rewards_of_all = rewards.new_full((len(inputs) * log.world_size(), rewards.size(1)), torch.nan)
        rewards_of_all[self.dynamic_sampler.find_sampled_places(0, len(rewards_of_all))] = rewards
        return rewards_of_all

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._buffered_inputs is before:
            return inputs
        accum = self.args.gradient_accumulation_steps
        if not self.keeps_cut:
            self._buffered_inputs = order_by_length(
                self._buffered_inputs, accum=accum, trims_prompts=self._trims_prompts
            )
        if self.logprob_check.is_due(self.state.global_step):
            self._add_model_logps(self._buffered_inputs[0])
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @torch.no_grad()
    def _add_model_logps(self, inputs: dict[str, Any]) -> None:
        """Add the log-probabilities by the weights that sampled, in the micro-batch that is trained on.

        In the same micro-batch a difference comes from the weights, and not from rounding. The first micro-batch stands
        for its step. Off policy TRL computes them for all micro-batches itself.
        """
        if "old_per_token_logps" not in inputs:
            ids, mask = (
                torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
            )
            inputs[MODEL_LOGPS] = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
            )[0]

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        # Forward passes without gradients have no dropout, as sampling has none: the policy that sampled, for the
        # ratio, and the reference, for KL. TRL 1.16 runs both with dropout.
        mode = nullcontext() if torch.is_grad_enabled() else eval_mode(self.model_wrapped)
        with mode, fitted_tiles(self.model.config.get_text_config().vocab_size):
            logps_and_entropies = super()._get_per_token_logps_and_entropies(*given, **named)
        self.logprob_check.trained_logps = logps_and_entropies[0].detach() if torch.is_grad_enabled() else None
        return logps_and_entropies

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        sampler_logps, model_logps = inputs.get(SAMPLER_LOGPS), inputs.get(MODEL_LOGPS)
        if not self.use_vllm:  # TRL would prefer these numbers where off_policy_mask_threshold is set
            inputs = {key: value for key, value in inputs.items() if key not in (SAMPLER_LOGPS, MODEL_LOGPS)}
        loss = super().compute_loss(model, inputs, *given, **named)
        before = inputs.get("old_per_token_logps", model_logps)
        self.logprob_check.compare(sampled=sampler_logps, before=before, mask=inputs["completion_mask"])
        return loss

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures with the sampling totals and the log-probability check."""
        return {**super().take_figures(logs), **self.sampling_totals, **self.logprob_check.take(self.heartbeat)}
