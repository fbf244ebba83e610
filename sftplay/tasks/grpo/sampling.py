"""The mixin that makes more of what is drawn: silent groups drawn again, less padding, the sampler compared.

It stands before `Rollouts`: `class PromptTrainer(Drawing, Rollouts, GRPOTrainer)`. None of it changes TRL's loss.
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
from sftplay.tasks.grpo.dynamic_sampling import Redraws, Share
from sftplay.tasks.grpo.length_order import depends_on_cut, has_relative_places, order_by_length
from sftplay.tasks.grpo.logprob_check import SAMPLED, SCORED, SamplerGauge, recorded
from sftplay.tasks.grpo.prompts import PromptRows
from sftplay.tasks.grpo.rollouts import Rollouts, fitted_tiles
from sftplay.tasks.grpo.scoring import Judged
from sftplay.train.eval_mode import eval_mode
from sftplay.train.preflight import has_sharded_weights

if TYPE_CHECKING:

    class Base(Rollouts):
        """The trainer that comes after the mixin."""

        processing_class: Any
        use_vllm: bool
        use_transformers_continuous_batching: bool
        eos_token_ids: Any

        def _generate_single_turn(self, prompt_ids: Any, *given: Any, **named: Any) -> Any: ...
        def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any: ...
else:
    Base = object


class Drawing(Base):
    """What happens between a drawing and its losses. `questions` are all those of the training."""

    def __init__(self, *given: Any, questions: Questions, **named: Any) -> None:
        super().__init__(*given, **named)
        grpo = self.cfg.grpo
        self.redraws = Redraws(
            PromptRows(questions),
            rows=questions.row_numbers,
            rounds=grpo.dynamic_sampling_rounds,
            num_generations=grpo.num_generations,
            seed=self.cfg.seed,
            together=has_sharded_weights(self) or self.use_vllm,
        )
        self.drawn = {"generated_tokens": 0, "redrawn_groups": 0, "passed_turns": 0}
        """Since the run's first step, on all ranks together; tokens that were thrown away are among them."""

        self.gauge = SamplerGauge(grpo.logprob_check_steps)
        self.keeps_cut = depends_on_cut(self)
        """Why micro-batches stay as TRL cuts them; empty where they are ordered by length."""

        self._trims_prompts = has_relative_places(self.model)
        self._inputs: list[dict[str, Any]] | None = None
        self._judged_ahead: Judged | None = None
        self._generated_tokens = 0

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        grpo = self.cfg.grpo
        if grpo.dynamic_sampling_rounds or grpo.skip_zero_variance:
            ranks = gather_objects([row["row"] for row in inputs], self.heartbeat)
            rows = [row for rank in ranks for row in rank]
            passed = self.redraws.skip_turns(rows) if grpo.skip_zero_variance else self.redraws.give_turns(inputs, rows)
            self.drawn["passed_turns"] += passed
        self._inputs, self._generated_tokens = inputs, 0
        try:
            drawn = super()._generate_and_score_completions(inputs)
        finally:
            self._inputs = self._judged_ahead = None
        self.drawn["generated_tokens"] += sum(gather_objects(self._generated_tokens, self.heartbeat))
        self.drawing.update(self.redraws.first_draw)
        if self.redraws.skipped:
            self._leave_out(drawn)
        return drawn

    def _leave_out(self, drawn: dict[str, Any]) -> None:
        """Learn nothing from rows for which nothing was drawn, and take their one token out of the figures."""
        rows = len(drawn["completion_mask"])
        places = self.redraws.places_drawn(log.rank() * rows, rows)
        is_drawn = torch.zeros(rows, 1, dtype=torch.bool, device=drawn["completion_mask"].device)
        is_drawn[places] = True
        drawn["completion_mask"] = drawn["completion_mask"] * is_drawn
        kept, everything = len(self.judged.rows), rows * log.world_size()
        # The losses that divide by tokens divide as if all groups were drawn: a step is no larger for what it skips.
        drawn["num_items_in_batch"] = drawn["num_items_in_batch"] - (everything - kept) + self.redraws.skipped_tokens
        mean = self.drawing["completion_tokens"] or 0.0
        self.drawing["completion_tokens"] = (mean * everything - (everything - kept)) / kept
        self.drawing["clipped_ratio"] = (self.drawing["clipped_ratio"] or 0.0) * everything / kept

    def last_advantages(self) -> list[float]:
        everything = len(self.judged.rows) + len(self.redraws.skipped) * self.num_generations
        advantages = list(self._logs["advantages"])[-everything:]
        return [advantages[n] for n in self.redraws.places_drawn(0, everything)]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> Any:
        inputs = self._inputs
        if inputs is None:  # the evaluation
            return super()._generate_single_turn(prompt_ids, *given, **named)

        def generate(prompts: list[list[int]]) -> Any:
            completion_ids, logps = self._draw(prompts, *given, **named)
            self._generated_tokens += sum(map(len, completion_ids))
            return completion_ids, logps

        if self.cfg.grpo.skip_zero_variance:
            return self._draw_some(inputs, prompt_ids, generate=generate)
        share = Share(inputs, prompt_ids, *generate(prompt_ids))
        if self.redraws.rounds:
            first = self._judge(inputs, share.completion_ids)
            self._judged_ahead, redrawn = self.redraws.run(share, first, generate=generate, judge=self._judge)
            self.drawn["redrawn_groups"] += redrawn
        return share.completion_ids, share.logps

    def _draw_some(self, inputs: list[dict[str, Any]], prompt_ids: list[list[int]], *, generate: Any) -> Any:
        """Completions of the groups that are drawn. A row of the others gets one token, which teaches nothing."""
        places = self.redraws.places_drawn(log.rank() * len(inputs), len(inputs))
        drawn, logps = generate([prompt_ids[n] for n in places]) if places else ([], None)
        self._judged_ahead = self._judge([inputs[n] for n in places], drawn)
        ranks = gather_objects([self._learned_tokens(ids) for ids in drawn], self.heartbeat)
        self.redraws.note_drawn(self._judged_ahead, tokens=[count for rank in ranks for count in rank])
        completion_ids = [[self.processing_class.eos_token_id] for _ in inputs]
        sampled = None if logps is None else [[float("nan")] for _ in inputs]
        for number, place in enumerate(places):
            completion_ids[place] = drawn[number]
            if sampled is not None:
                sampled[place] = logps[number]
        return completion_ids, sampled

    def _learned_tokens(self, ids: list[int]) -> int:
        """Tokens of a completion that TRL's loss has; none of a cut-off one with grpo.mask_truncated_completions."""
        ends = (*self.eos_token_ids, self.processing_class.pad_token_id)
        return 0 if self.args.mask_truncated_completions and ids[-1] not in ends else len(ids)

    def _draw(self, prompts: list[list[int]], *given: Any, **named: Any) -> Any:
        """Completions, and what the sampler says of their tokens: vLLM always, the module itself where it is due."""
        plain = not self.use_vllm and not self.use_transformers_continuous_batching
        if not plain or not self.gauge.is_due(self.state.global_step):
            return super()._generate_single_turn(prompts, *given, **named)
        with recorded(self.accelerator.unwrap_model(self.model_wrapped)) as rows:
            completion_ids, _ = super()._generate_single_turn(prompts, *given, **named)
        if len(rows) < len(completion_ids):  # a wrapper around the model hides its generation
            return completion_ids, None
        return completion_ids, [row[: len(ids)] for row, ids in zip(rows, completion_ids, strict=True)]

    def _judge(self, inputs: list[dict[str, Any]], completion_ids: list[list[int]]) -> Judged:
        # Of no completions transformers makes one empty text.
        texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True) if completion_ids else []
        return self.judge.judge(inputs, texts, heartbeat=self.heartbeat)

    def _calculate_rewards(self, inputs: list[Any], prompts: Any, completions: list[str], ids: Any) -> Tensor:
        if self._judged_ahead is None:
            return super()._calculate_rewards(inputs, prompts, completions, ids)
        self.judged = self._judged_ahead
        paid = self.as_tensor(self.judged)
        if not self.redraws.skipped:
            return paid
        everything = paid.new_full((len(inputs) * log.world_size(), paid.size(1)), torch.nan)
        everything[self.redraws.places_drawn(0, len(everything))] = paid
        return everything

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
        if self.gauge.is_due(self.state.global_step):
            self._score_again(self._buffered_inputs[0])
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    @torch.no_grad()
    def _score_again(self, inputs: dict[str, Any]) -> None:
        """Let the weights that drew say what they think of the tokens, in the micro-batch in which they are learned.

        Only then is a difference one of weights, and not of rounding. The first micro-batch stands for its step. Off
        policy TRL asks for all of them itself.
        """
        if "old_per_token_logps" not in inputs:
            ids, mask = (
                torch.cat([inputs[f"prompt_{part}"], inputs[f"completion_{part}"]], dim=1) for part in ("ids", "mask")
            )
            inputs[SCORED] = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, inputs["completion_ids"].size(1), compute_entropy=True
            )[0]

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        # What is not learned from has no dropout, as its tokens were drawn: the policy that drew, for the ratio, and
        # the reference, for KL. TRL 1.16 asks both with dropout.
        mode = nullcontext() if torch.is_grad_enabled() else eval_mode(self.model_wrapped)
        with mode, fitted_tiles(self.model.config.get_text_config().vocab_size):
            scored = super()._get_per_token_logps_and_entropies(*given, **named)
        self.gauge.learned = scored[0].detach() if torch.is_grad_enabled() else None
        return scored

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        sampled, scored = inputs.get(SAMPLED), inputs.get(SCORED)
        if not self.use_vllm:  # TRL would prefer these numbers where off_policy_mask_threshold is set
            inputs = {key: value for key, value in inputs.items() if key not in (SAMPLED, SCORED)}
        loss = super().compute_loss(model, inputs, *given, **named)
        before = inputs.get("old_per_token_logps", scored)
        self.gauge.compare(sampled=sampled, before=before, mask=inputs["completion_mask"])
        return loss

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """With what was drawn since the first step, and how far the sampler was from the model that learns."""
        return {**super().take_figures(logs), **self.drawn, **self.gauge.take(self.heartbeat)}
