"""Sampling of rollout batches: prompts in order, micro-batches by length, and the log-probability check."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Prompts, Questions
from sftplay.data.pipeline import order_hash, steps_for, training_order
from sftplay.environments.rollouts import RolloutIds, Rollouts
from sftplay.errors import ConfigError, RunError, ran_out_of_memory
from sftplay.evaluate.rewarded import find_mean
from sftplay.model.adapter import trained_weights_kept
from sftplay.model.out_of_memory import AdaptiveBatches, gather_objects
from sftplay.model.recomputation import nothing_recomputed
from sftplay.tasks.grpo.generate import PromptSampler
from sftplay.tasks.grpo.rollouts import (
    dtypes_kept,
    gathered_root,
    keep_reference,
    load_window,
    save_window,
)
from sftplay.tasks.grpo.sampler_check import (
    MODEL_LOGPS,
    SAMPLER_LOGPS,
    SamplerCheck,
    find_facts,
    find_precision,
    record_logprobs,
)
from sftplay.tasks.grpo.scoring import (
    DynamicSampler,
    LocalBatch,
    RewardScorer,
    ScoredBatch,
    cut_samples,
    write_samples,
)
from sftplay.tasks.grpo.shared_groups import (
    decide_sharing,
    depends_on_cut,
    has_relative_positions,
    loss_mask,
    order_by_length,
    score_groups,
)
from sftplay.tasks.grpo.turns import Tokens, as_rollouts, count_sampled, read_records, roll_out
from sftplay.tasks.grpo.variants import LossVariants
from sftplay.tasks.grpo.watch import read_policy_clip_share
from sftplay.train.eval_mode import eval_mode, random_numbers_kept
from sftplay.train.exact_batch import StepSetup, StepTrainerMixin
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.task import RowOrder
from sftplay.train.upstream import (
    count_micro_steps,
    fitted_tiles,
    read_completion_figures,
    read_last_advantages,
    read_micro_batches,
    replace_micro_batches,
    replaced_attributes,
)

CACHED_QUESTIONS = 1024
"""Questions in the cache. TRL reads a row once for each completion and micro-batch."""


class PromptRow(dict[str, Any]):
    """A prompt in the form of TRL's trainer."""

    def to(self, *_: Any, **__: Any) -> Self:
        """Return itself: it holds no tensor. Otherwise accelerate searches each token and each column for one."""
        return self


class PromptRows:
    """Prompts in the form of TRL's trainer. Without an order they are in the order of their file."""

    def __init__(self, questions: Questions, order: Sequence[int] | None = None) -> None:
        self.questions = questions
        self.order = range(len(questions)) if order is None else order
        self._read = lru_cache(CACHED_QUESTIONS)(questions.__getitem__)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, row: int) -> PromptRow:
        """Return a row. `prompt` holds token ids, so that TRL uses the kit's tokens, and takes completions as text."""
        question = self._read(self.order[row])
        return PromptRow(
            prompt=Tokens(question), row=question.row, question=question.question, columns=question.columns
        )


def find_run_order(cfg: RunConfig, prompts: Prompts) -> tuple[list[int], RowOrder]:
    """Return the numbers of the prompts of the whole run, in order, and the RowOrder for the run's set-up."""
    n, grpo = len(prompts.train), cfg.grpo
    batch_prompts = cfg.train.effective_batch_size * grpo.steps_per_generation // grpo.num_generations
    batch_steps = grpo.steps_per_generation * grpo.num_iterations
    steps = cfg.train.max_steps or steps_for(n, cfg.train.epochs, effective_batch=batch_prompts) * batch_steps
    order = training_order(n, math.ceil(steps / batch_steps) * batch_prompts, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    return order, RowOrder(steps=steps, steps_per_epoch=math.ceil(n / batch_prompts) * batch_steps, digest=digest)


class SamplingMixin(StepTrainerMixin):
    """Stands before TRL's trainer: `class PromptTrainer(SamplingMixin, GRPOTrainer)`.

    `questions` are all training prompts.
    """

    def __init__(
        self, step: StepSetup, *, cfg: RunConfig, run_folder: Path, scorer: RewardScorer, questions: Questions,
        model: Any, args: Any, rollouts: Rollouts | None = None, **named: Any,
    ) -> None:  # fmt: skip
        has_adapter, grpo = hasattr(model, "get_base_model"), cfg.grpo
        # TRL converts the adapter of a 4-bit base to bf16. With a beta above 0 it copies every adapter, also a new one.
        beta = {"beta": 0.0} if has_adapter else {}
        with trained_weights_kept(model) if has_adapter else nullcontext(), replaced_attributes(args, **beta):
            named["reward_funcs"] = [_make_reward_stub(name) for name in scorer.training_weights]
            super().__init__(step, model=model, args=args, **named)
        self.beta = args.beta
        if has_adapter and args.beta and cfg.model.adapter:
            keep_reference(model)
        self.cfg, self.run_folder, self.scorer, self.rollouts = cfg, run_folder, scorer, rollouts
        if rollouts is not None:  # TRL takes prompts and masks from it; it is set here to keep its warning out
            self.rollout_func = lambda prompts, _: as_rollouts(
                prompts, *self._generate_single_turn(prompts, None, {}, self.num_generations)
            )
        batch_rows = grpo.generation_rows
        if not isinstance(batch_rows, int):  # all completions of a rollout batch
            batch_rows = int(args.per_device_train_batch_size * args.steps_per_generation)
        self._generation_batches = AdaptiveBatches(batch_rows, "generation")
        self.prompt_sampler = PromptSampler(
            self._generation_batches,
            rows_per_prompt=grpo.num_generations,
            beat=lambda: self.heartbeat.enter(self.heartbeat.phase),
        )
        self.micro_batcher = None  # TRL cuts a rollout batch
        self.last_rows: list[int] = []  # prompts in this rank's last step
        self.facts = {"rewards": scorer.training_weights, "executor": scorer.rewards.executor or None}
        """The task's entries in the manifest."""

        self.rollout_figures: dict[str, float | None] = {}  # figures of the current rollout batch
        self._figures: dict[str, list[float | None]] = defaultdict(list)
        self._seen_step = -1
        self._check_loss = step.check_loss if self.is_deepspeed_enabled and not self.args.fp16 else None
        self.dynamic_sampler = DynamicSampler(
            PromptRows(questions),
            rows=questions.row_numbers,
            rounds=grpo.dynamic_sampling_rounds,
            num_generations=grpo.num_generations,
            seed=cfg.seed,
            in_lockstep=has_sharded_weights(self) or self.use_vllm,
        )
        self.sampling_totals = {"generated_tokens": 0, "redrawn_groups": 0, "passed_turns": 0}
        """Totals of all ranks since the run's first step, with the tokens of discarded completions."""

        self.logprob_check = SamplerCheck(grpo.logprob_check_steps, find_precision(self), facts=find_facts(self))
        self.questions = questions
        self.variants = LossVariants(cfg, self)
        self.keeps_cut = depends_on_cut(self)
        """Why micro-batches stay as TRL cuts them; empty where they are ordered by length."""

        self._trims_prompts = has_relative_positions(self.model)
        self.sharing = decide_sharing(self, cfg)
        self._inputs: list[dict[str, Any]] | None = None
        self._scored_early: ScoredBatch | None = None
        self._generated_tokens = 0

    @property
    def generation_rows(self) -> int:
        """Completions that this rank generates at a time."""
        return self._generation_batches.batch_size

    def train(self, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Train; from a checkpoint within a rollout batch with the completions in the checkpoint."""
        with self.scorer, self.rollouts or nullcontext():
            if resume_from_checkpoint:
                load_window(self, Path(resume_from_checkpoint))
            cut_samples(self.run_folder, after_step=count_micro_steps(self) // self.args.gradient_accumulation_steps)
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = read_micro_batches(self)
        inputs = super()._prepare_inputs(generation_batch)
        step = self.state.global_step
        if step != self._seen_step:
            self._seen_step, self.last_rows, self.last_loss = step, [], 0.0
            for name, value in self.rollout_figures.items():
                self._figures[name].append(value)
        micro_batches = read_micro_batches(self)
        if not self.model.training or micro_batches is None or micro_batches is before:
            return inputs
        accum = self.args.gradient_accumulation_steps
        if not self.keeps_cut:
            micro_batches = order_by_length(
                micro_batches, accum=accum, trims_prompts=self._trims_prompts, sharing=self.sharing
            )
            replace_micro_batches(self, micro_batches)
        self.variants.count_step_tokens(micro_batches, accum=accum, masks=[loss_mask(batch) for batch in micro_batches])
        first = micro_batches[0]
        if self.logprob_check.is_due(step) and "old_per_token_logps" not in first:  # else TRL has computed them
            # By the weights that sampled, in the micro-batch that is trained on: a difference comes from the weights,
            # and not from rounding. The first micro-batch stands for its step.
            keys = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
            ids, mask = (torch.cat([first[key] for key in pair], dim=1) for pair in keys)
            with torch.no_grad():
                first[MODEL_LOGPS] = self._get_per_token_logps_and_entropies(
                    self.model, ids, mask, first["completion_ids"].size(1), compute_entropy=True
                )[0]
        self.logprob_check.judge(self, micro_batches)
        return micro_batches[count_micro_steps(self) % self.args.steps_per_generation]

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        grpo, sampler, totals = self.cfg.grpo, self.dynamic_sampler, self.sampling_totals
        if grpo.dynamic_sampling_rounds or grpo.skip_zero_variance:
            ranks = gather_objects([row["row"] for row in inputs], self.heartbeat)
            rows = [row for rank in ranks for row in rank]
            if grpo.skip_zero_variance:
                totals["passed_turns"] += sampler.choose_skipped_groups(rows)
            else:
                totals["passed_turns"] += sampler.replace_skipped_prompts(inputs, rows)
        self._inputs, self._generated_tokens = inputs, 0
        try:
            batch = self.variants.add_likeliest(super()._generate_and_score_completions(inputs))
        finally:
            self._inputs = self._scored_early = None
        self.rollout_figures = {
            **self.scored_batch.compute_figures(self.num_generations),
            **read_completion_figures(self),
            **sampler.first_figures,
        }
        n_rows = len(self.scored_batch.rows) + len(sampler.skipped) * self.num_generations
        advantages = read_last_advantages(self, n_rows)
        lines = self.scored_batch.make_sample_lines([advantages[n] for n in sampler.find_sampled_places(0, n_rows)])
        write_samples(self.run_folder, lines[: grpo.samples], step=self.state.global_step + 1)
        totals["generated_tokens"] += sum(gather_objects(self._generated_tokens, self.heartbeat))
        if sampler.skipped:
            # Their rows are masked, and their single token leaves the figures.
            n_local, figures = len(batch["completion_mask"]), self.rollout_figures
            is_sampled = torch.zeros(n_local, 1, dtype=torch.bool, device=batch["completion_mask"].device)
            is_sampled[sampler.find_sampled_places(log.rank() * n_local, n_local)] = True
            batch["completion_mask"] = batch["completion_mask"] * is_sampled
            n_sampled, n_rows = len(self.scored_batch.rows), n_local * log.world_size()
            # Losses that divide by tokens divide as if all groups were sampled: skipping groups makes no step larger.
            batch["num_items_in_batch"] = batch["num_items_in_batch"] - (n_rows - n_sampled) + sampler.skipped_tokens
            mean = figures["completion_tokens"] or 0.0
            figures["completion_tokens"] = (mean * n_rows - (n_rows - n_sampled)) / n_sampled
            figures["clipped_ratio"] = (figures["clipped_ratio"] or 0.0) * n_rows / n_sampled
        return {**batch, "row": torch.tensor([row["row"] for row in inputs], device=self.accelerator.device)}

    def _tokenize_prompts(self, prompts: list[list[int]]) -> tuple[list[list[int]], None, dict[str, Any]]:
        return prompts, None, {}

    def _generate(self, prompts: list[list[int]]) -> Any:
        # The same precision as in the later forward passes that compute log-probabilities.
        with self.heartbeat.within("generation"), self.accelerator.autocast():
            generated = super()._generate(prompts)
        self.variants.keep_sampled(generated[4])
        return generated

    def _generate_single_turn(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> Any:
        inputs = self._inputs
        if inputs is None:  # the evaluation
            return self._answer(prompt_ids, self._generate_rows, *given, **named)

        def generate(prompts: list[list[int]]) -> Any:
            completion_ids, logps = self._answer(prompts, self._sample, *given, **named)
            self._generated_tokens += sum(map(count_sampled, completion_ids))
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

    def _answer(self, prompts: list[Any], sample: Any, *given: Any, **named: Any) -> Any:
        """Return completions by `sample`: of one turn, or of several with an environment or tools."""
        if self.rollouts is None:
            return sample(prompts, *given, **named)
        return roll_out(self, [prompt.question for prompt in prompts], sample)

    def _sample_unskipped(self, inputs: list[dict[str, Any]], prompt_ids: list[list[int]], *, generate: Any) -> Any:
        """Sample completions of the groups that are not skipped. A row of the others gets one token without a loss."""
        places = self.dynamic_sampler.find_sampled_places(log.rank() * len(inputs), len(inputs))
        sampled_ids, sampled_logps = generate([prompt_ids[n] for n in places]) if places else ([], None)
        self._scored_early = self._score([inputs[n] for n in places], sampled_ids)
        # The tokens in TRL's loss; a truncated completion has none with grpo.mask_truncated_completions.
        ends = (*self.eos_token_ids, self.processing_class.pad_token_id)
        loss_tokens = [
            0 if self.args.mask_truncated_completions and ids[-1] not in ends else count_sampled(ids)
            for ids in sampled_ids
        ]
        ranks = gather_objects(loss_tokens, self.heartbeat)
        self.dynamic_sampler.record_sampled(self._scored_early, tokens=[count for rank in ranks for count in rank])
        completion_ids = [[self.processing_class.eos_token_id] for _ in inputs]
        logps = None if sampled_logps is None else [[float("nan")] for _ in inputs]
        LocalBatch(inputs, prompt_ids, completion_ids, logps).replace_completions(places, (sampled_ids, sampled_logps))
        return completion_ids, logps

    def _sample(self, prompts: list[list[int]], *given: Any, **named: Any) -> Any:
        """Sample completions, with the sampler's log-probabilities: always by vLLM, by the model itself when due."""
        is_needed = self.variants.needs_sampler
        if self.use_vllm or not (is_needed or self.logprob_check.is_due(self.state.global_step)):
            return self._generate_rows(prompts, *given, **named)
        if self._shares_prompts(prompts, *given, **named):
            with replaced_attributes(self.prompt_sampler, records=True, top=self.variants.top):
                return self._generate_rows(prompts, *given, **named)
        with record_logprobs(self.accelerator.unwrap_model(self.model_wrapped), top=self.variants.top) as rows:
            completion_ids, _ = self._generate_rows(prompts, *given, **named)
        if len(rows) < len(completion_ids):  # a wrapper around the model hides its generation
            if is_needed:
                what, fix = "the model's wrapper hides its generation", "remove grpo.sampler_correction"
                raise RunError(what, where="grpo.generation", fix=f"{fix} and grpo.score_centering")
            return completion_ids, None
        return completion_ids, [row.cut(len(ids)) for row, ids in zip(rows, completion_ids, strict=True)]

    def _shares_prompts(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> bool:
        """Return whether the kit's sampler is used, which the first call decides."""
        if self.cfg.grpo.generation != "transformers" or has_sharded_weights(self):  # there ranks generate in lockstep
            return False
        model, generate = self.accelerator.unwrap_model(self.model_wrapped), super()._generate_single_turn
        with sampling_mode(self):
            return self.prompt_sampler.is_usable(model, lambda: generate(prompt_ids, *given, **named))

    def _generate_rows(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> Any:
        """Generate as TRL does, without dropout; with transformers as many completions at a time as memory allows."""
        if self._shares_prompts(prompt_ids, *given, **named):
            sampler = self.prompt_sampler
            with sampling_mode(self), sampler.within(self.accelerator.unwrap_model(self.model_wrapped)):
                completion_ids, _ = super()._generate_single_turn(prompt_ids, *given, **named)
            return completion_ids, sampler.take_logps(map(len, completion_ids))
        if self.cfg.grpo.generation != "transformers":
            is_continuous = self.cfg.grpo.generation == "continuous"
            keeps_dtypes = dtypes_kept(self.args, self.accelerator.device) if is_continuous else nullcontext()
            try:
                with eval_mode(self.model_wrapped), keeps_dtypes:
                    sampled = super()._generate_single_turn(prompt_ids, *given, **named)
                if is_continuous and not (len(sampled[0]) == len(prompt_ids) and all(map(len, sampled[0]))):
                    raise ValueError("it gave no token for a prompt, for the reason above")
            except (AttributeError, RuntimeError, ValueError) as error:
                if not is_continuous or ran_out_of_memory(error):
                    raise
                what = f"transformers' continuous batching fails with this model: {str(error).split('. ')[0]}"
                fix = "write grpo.generation: transformers"
                raise ConfigError(what, where="grpo.generation continuous", fix=fix) from error
            return sampled

        def generate(part: slice) -> list[list[int]]:
            self.heartbeat.enter(self.heartbeat.phase)  # a beat for each batch: only a single one can take too long
            with sampling_mode(self), gathered_root(self.model_wrapped):
                ids, _ = super(SamplingMixin, self)._generate_single_turn(prompt_ids[part], *given, **named)
            return list(ids)

        rows, size = len(prompt_ids), self._generation_batches.batch_size
        if has_sharded_weights(self):  # ranks generate together: none may take smaller batches than the others
            parts = [generate(slice(at, at + size)) for at in range(0, rows, size)]
        else:
            parts = list(self._generation_batches.map(rows, generate))
        return [ids for part in parts for ids in part], None

    def _score(self, inputs: list[dict[str, Any]], completion_ids: list[list[int]]) -> ScoredBatch:
        # transformers decodes an empty list to one empty text.
        records = read_records(completion_ids)
        texts = [record.answer for record in records]
        if completion_ids and self.rollouts is None:
            texts = self.processing_class.batch_decode(completion_ids, skip_special_tokens=True)
        written = [ids.written if isinstance(ids, RolloutIds) else ids for ids in completion_ids]
        return self.scorer.score(inputs, texts, heartbeat=self.heartbeat, records=records, completion_ids=written)

    def _calculate_rewards(self, inputs: list[Any], _prompts: Any, completions: list[str], ids: Any) -> Tensor:
        """Score the completions of all ranks: float [completions, rewards], NaN where a reward abstains."""
        batch, sampler = self._scored_early, self.dynamic_sampler
        if batch is None:
            if self.rollouts is None:  # TRL has decoded them already
                batch = self.scorer.score(inputs, completions, heartbeat=self.heartbeat, completion_ids=ids)
            else:
                batch = self._score(inputs, ids)
        self.scored_batch = batch
        rewards = torch.tensor(batch.make_reward_matrix(), dtype=torch.float32, device=self.accelerator.device)
        if not sampler.skipped:
            return rewards
        rewards_of_all = rewards.new_full((len(inputs) * log.world_size(), rewards.size(1)), torch.nan)
        rewards_of_all[sampler.find_sampled_places(0, len(rewards_of_all))] = rewards
        return rewards_of_all

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        # Forward passes without gradients have no dropout, as sampling has none: the policy that sampled, for the
        # ratio, and the reference, for KL. TRL 1.16 runs both with dropout.
        mode = nullcontext() if torch.is_grad_enabled() else eval_mode(self.model_wrapped)
        with mode, fitted_tiles(self.model.config.get_text_config().vocab_size):
            logps_and_entropies = score_groups(self, *given, **named)
            self._is_joined = logps_and_entropies is not None
            if logps_and_entropies is None:
                logps_and_entropies = super()._get_per_token_logps_and_entropies(*given, **named)
        self.logprob_check.trained_logps = logps_and_entropies[0].detach() if torch.is_grad_enabled() else None
        if torch.is_grad_enabled():
            self.variants.see(logps_and_entropies[0], logps_and_entropies[1])
        return logps_and_entropies

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Keep the norm, which `StopOnBadStep` looks at."""
        self.clipped_norm = super()._clip_grad_norm(model)
        return self.clipped_norm

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *given: Any, **named: Any) -> Any:
        sampler_logps, model_logps = inputs.get(SAMPLER_LOGPS), inputs.get(MODEL_LOGPS)
        if not self.use_vllm:  # TRL would prefer these numbers where off_policy_mask_threshold is set
            inputs = {key: value for key, value in inputs.items() if key not in (SAMPLER_LOGPS, MODEL_LOGPS)}
        prompts, completions, counts = inputs["prompt_mask"], inputs["completion_mask"], self.counts
        learned = loss_mask(inputs)
        rows, lengths = inputs["row"].tolist(), (prompts.sum(1) + completions.sum(1)).tolist()
        self.last_rows += rows
        counts.rows += rows
        counts.lengths += lengths
        counts.tokens += sum(lengths)
        counts.label_tokens += int(learned.sum())
        self.heartbeat.enter("forward")
        with self.variants.applied(inputs, mask=learned, sampled=sampler_logps) as changed:
            loss = super().compute_loss(model, changed, *given, **named)
            loss = self.variants.complete_loss(loss, inputs["advantages"])
        counts.padded_tokens += sum(lengths) if self._is_joined else prompts.numel() + completions.numel()
        self.last_loss = self.last_loss + loss.detach()
        if self._check_loss is not None:
            self._check_loss(loss.detach())
        self.heartbeat.enter("backward")
        before = inputs.get("old_per_token_logps", model_logps)
        sampled = None if before is None else sampler_logps  # else dropout and later steps would count, too
        self.logprob_check.compare(sampled=sampled, before=before, mask=learned)
        return loss

    def _save_checkpoint(self, *given: Any) -> None:
        with random_numbers_kept():
            super()._save_checkpoint(*given)
        save_window(self, Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the task's figures for a line of metrics: means over the steps since the last line, and totals."""
        figures: dict[str, Any] = {name: find_mean(values) for name, values in self._figures.items()}
        self._figures.clear()
        figures |= {name: logs.get(name) for name in ("entropy", "kl")}
        figures["policy_clip_share"] = read_policy_clip_share(logs)
        if (scaler := self.accelerator.scaler) is not None:
            # transformers advances the schedule only after a step of the optimizer.
            skipped = self.state.global_step - self.lr_scheduler.last_epoch
            figures |= {"loss_scale": scaler.get_scale(), "skipped_steps": skipped}
        return {
            **figures,
            **self.take_held_out_figures(),
            **self.sampling_totals,
            **self.logprob_check.take(self.heartbeat),
            **self.variants.take_figures(self.heartbeat),
        }


@contextmanager
def sampling_mode(trainer: Any) -> Iterator[None]:
    """Inside, the model has no dropout and recomputes nothing; afterwards it is as before, also where an error leaves
    TRL's context, which then would not switch recomputation on again (trl 1.16, models/utils.py)."""
    with eval_mode(trainer.model_wrapped), nothing_recomputed(trainer.accelerator.unwrap_model(trainer.model_wrapped)):
        yield


def _make_reward_stub(name: str) -> Any:
    """Return a function with a reward's name for TRL's logs; `_calculate_rewards` calls the reward itself."""

    def reward(**_: Any) -> list[float | None]:
        raise AssertionError(f"the RewardScorer calls the reward {name}")

    reward.__name__ = name
    return reward
