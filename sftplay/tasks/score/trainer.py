"""transformers' Trainer over episodes: a batch is a rank's share of the minibatch of one step.

Loop, checkpoints, optimizer and logging are the Trainer's. It overrides `training_step`, `create_optimizer`,
`_clip_grad_norm`, `_save_checkpoint`, `_load_from_checkpoint` and `_load_best_model`, and implements
`train.observer.StepTrainer`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.generate.sampling import derive_seed
from sftplay.launch.checkpoints import step_of
from sftplay.tasks.score.advantages import Advantages
from sftplay.tasks.score.checkpoint_weights import load_weights, save_weights
from sftplay.tasks.score.episode_rewards import RewardScorer, describe, gather_results, write_episode_samples
from sftplay.tasks.score.losses import find_learning_rates
from sftplay.tasks.score.problems import MinibatchSchedule
from sftplay.tasks.score.role_models import RoleModels
from sftplay.tasks.score.rollout_batch import RolloutBatch, load_rollout_batch, save_rollout_batch
from sftplay.tasks.score.sample_episodes import Episode, EpisodeSampler, count_padded_tokens
from sftplay.tasks.score.update import MinibatchSetup, PolicyUpdate, ScoredEpisodes, group_actions
from sftplay.tasks.score.value_model import soft_update
from sftplay.train.exact_batch import StepSetup
from sftplay.train.gradients import average_gradients, gradient_norm
from sftplay.train.interval import StepCounts
from sftplay.train.random_numbers import random_numbers_kept


class EpisodeTrainer(Trainer):
    """Samples and scores rollout batches of episodes, and learns from a batch in one or more steps."""

    def __init__(
        self,
        step: StepSetup,
        *,
        cfg: RunConfig,
        run_folder: Path,
        role_models: RoleModels,
        episode_sampler: EpisodeSampler,
        reward_scorer: RewardScorer,
        questions: Sequence[Question],
        **named: Any,
    ) -> None:
        super().__init__(**named)
        self.cfg, self.run_folder, self.role_models = cfg, run_folder, role_models
        self.episode_sampler, self.reward_scorer = episode_sampler, reward_scorer
        self.other_models = {"guide": role_models.models["guide"]} if role_models.is_separate else {}
        """Models of the result that the Trainer does not save."""

        self.questions, self.heartbeat, self.schedule = questions, step.heartbeat, MinibatchSchedule.from_config(cfg)
        self.rollout_batch: RolloutBatch | None = None
        """The episodes that the current steps learn from."""

        self.micro_batcher, self.replay = step.micro_batcher, None
        self.source_names: tuple[str, ...] = ()
        self.held_out_sources: dict[str, dict[str, float]] = {}
        self.counts, self.last_loss = StepCounts(), 0.0
        self.last_rows: list[int] = []
        self.held_out_figures: dict[str, float] = {}
        """Evaluation figures since the last line of metrics."""

        self.figures: dict[str, float | None] = {}
        """Figures of the last step."""

        self._figures: dict[str, list[float | None]] = defaultdict(list)
        self._grad_norms: dict[str, float] = {}
        episode_sampler.beat = lambda: self.heartbeat.enter(self.heartbeat.phase)

    def train(self, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Train with the reward processes open."""
        with self.reward_scorer:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def training_step(self, model: nn.Module, inputs: Mapping[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Sample and score this rank's episodes, compute the gradients of all parts, and return the loss.

        Where a rollout batch feeds several steps, the first one samples it.
        """
        step = self.state.global_step + 1
        number, age = divmod(step - 1, self.schedule.steps)
        self._reset_optimizer(step)
        self.role_models.zero_extra_gradients()
        scored = self._sample(number, step=step) if age == 0 else self._current_batch(number).scored
        first_place, score = self.schedule.rank_places(number).start, self.cfg.score
        part = [int(place) - first_place for place in inputs["place"]]
        self.heartbeat.enter("forward")
        policy_update = PolicyUpdate(
            scored, part=part, role_models=self.role_models, score=score, heartbeat=self.heartbeat, step=step,
            batch=self._create_minibatch_setup(len(scored.results), is_on_policy=age == 0),
        )  # fmt: skip
        if age == 0:
            advantages = policy_update.compute_advantages()
            self.rollout_batch = RolloutBatch(number, scored, advantages)
            write_episode_samples(
                scored.episodes, scored.results, run_folder=self.run_folder, step=step, limit=score.samples,
                tokenizer=self.episode_sampler.tokenizer,
                gains={"t1": advantages.first, "guide": advantages.guide, "t2": advantages.second},
            )  # fmt: skip
        advantages = self._current_batch(number).advantages
        self.role_models.train()
        policy_update.learn(advantages)
        if log.world_size() > 1:
            with self.heartbeat.within("communication"):
                average_gradients(self.model_wrapped, others=self.role_models.extra_parameters())
                self._drop_guide_gradients(policy_update)
        return self._record_step(policy_update, advantages)

    def _current_batch(self, number: int) -> RolloutBatch:
        """Return the rollout batch of an earlier step, or of a checkpoint; `number` checks that it is the right one."""
        assert self.rollout_batch is not None
        assert self.rollout_batch.number == number
        return self.rollout_batch

    def _questions(self, number: int) -> list[Question]:
        """List the questions of this rank's episodes in a rollout batch."""
        episodes = self.train_dataset.episodes
        return [self.questions[episodes[place]["row"]] for place in self.schedule.rank_places(number)]

    def _sample(self, number: int, *, step: int) -> ScoredEpisodes:
        """Sample this rank's episodes of a rollout batch, and gather the results of all ranks."""
        score, questions = self.cfg.score, self._questions(number)
        self.role_models.eval()
        with self.heartbeat.within("generation"), torch.no_grad(), self.accelerator.autocast():
            settings: dict[str, Any] = {
                "numbers": self.schedule.rank_places(number),
                "seed": derive_seed(self.cfg.seed, step),
                "temperature": score.temperature,
            }
            episodes = self.episode_sampler.sample_episodes(questions, **settings)
            resampled = self.episode_sampler.resample_answers(episodes, **settings) if self.role_models.critic else []
        results = gather_results(self.reward_scorer.score(episodes, heartbeat=self.heartbeat), self.heartbeat)
        return ScoredEpisodes(episodes, results, resampled)

    def _reset_optimizer(self, step: int) -> None:
        """Clear the optimizer's state at the start of stage 2, where the config asks for it."""
        if self.cfg.score.reset_adam and step == self.cfg.score.stage1_steps + 1:
            getattr(self.optimizer, "optimizer", self.optimizer).state.clear()

    def _create_minibatch_setup(self, n_episodes: int, *, is_on_policy: bool) -> MinibatchSetup:
        """`n_episodes` counts the rollout batch over all ranks."""
        assert self.micro_batcher is not None
        return MinibatchSetup(
            micro_batch=self.micro_batcher.micro_batch,
            n_episodes=n_episodes / self.schedule.minibatches / log.world_size(),
            is_on_policy=is_on_policy,
            pad=self.episode_sampler.tokenizer.pad_token_id,
            backward=self._backward,
            context=self.compute_loss_context_manager,
        )

    def _backward(self, loss: Tensor) -> None:
        self.heartbeat.enter("backward")
        # DDP would send gradients in each backward pass; they are averaged once, after the last pass.
        with self.model_wrapped.no_sync() if log.world_size() > 1 else nullcontext():
            self.accelerator.backward(loss)
        self.heartbeat.enter("forward")

    def _drop_guide_gradients(self, policy_update: PolicyUpdate) -> None:
        """Drop the guide's zero gradients, which averaging creates: the optimizer would count them as a step."""
        if not policy_update.guide_learns:
            for parameter in self.role_models.trainable.get("guide", ()):
                parameter.grad = None

    def _record_step(self, policy_update: PolicyUpdate, advantages: Advantages) -> Tensor:
        """Record counts and figures of the step; return the loss of this rank."""
        scored = policy_update.scored
        self._count([scored.episodes[n] for n in policy_update.part])
        self.figures = {
            **describe(scored.results),
            **advantages.figures,
            **policy_update.figures(),
            "stage": policy_update.stage,
        }
        for name, value in self.figures.items():
            self._figures[name].append(value)
        self.last_loss = policy_update.gradients.sums["loss"]
        return torch.tensor(self.last_loss, device=self.args.device)

    def _count(self, episodes: Sequence[Episode]) -> None:
        assert self.micro_batcher is not None
        groups = [*group_actions(episodes).values()]
        actions = [action for group in groups for action in group]
        self.last_rows = [episode.question.row for episode in episodes]
        self.counts.rows += self.last_rows
        lengths = [len(action.prompt) + len(action.ids) for action in actions]
        self.counts.lengths += lengths
        self.counts.tokens += sum(lengths)
        self.counts.padded_tokens += sum(
            count_padded_tokens(group, rows=self.micro_batcher.micro_batch) for group in groups
        )
        self.counts.label_tokens += sum(len(action.ids) for action in actions)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create one optimizer with a group and a learning rate for each part; all follow the same schedule."""
        optimizer: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if optimizer is None:
            rates = find_learning_rates(self.cfg, peak=self.args.learning_rate)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = [
                {"params": parameters, "lr": rates[name], "weight_decay": self.args.weight_decay}
                for name, parameters in self.role_models.trainable.items()
            ]
            optimizer = self.optimizer = kind(groups, **options)
            if self.role_models.critic is not None:
                optimizer.register_step_post_hook(self._update_target_critic)
        return optimizer

    def _update_target_critic(self, *_: Any) -> None:
        """Move the target critic toward the critic after an optimizer step."""
        assert self.role_models.critic is not None
        soft_update(self.role_models.target_critic, self.role_models.critic, tau=self.cfg.score.critic.tau)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradient of each part by that part's norm; return the norm of all parts before clipping."""
        self.accelerator.unscale_gradients()
        squares = torch.zeros(())
        for name, parameters in self.role_models.trainable.items():
            norm = gradient_norm(parameters)
            self._grad_norms[name] = float(norm)
            squares = squares + norm.cpu().square()
            if norm > self.args.max_grad_norm:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(float(self.args.max_grad_norm / norm))
        return squares.sqrt()

    def _save_checkpoint(self, *given: Any) -> None:
        with random_numbers_kept():
            super()._save_checkpoint(*given)
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        save_weights(self.role_models, checkpoint)
        if self.rollout_batch is not None and self.state.global_step % self.schedule.steps:
            save_rollout_batch(self.rollout_batch, checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        self._load_weights(checkpoint)
        number, age = divmod(step_of(checkpoint), self.schedule.steps)
        if age:
            self.rollout_batch = load_rollout_batch(checkpoint, questions=self._questions(number))

    def _load_weights(self, checkpoint: Path) -> None:
        load_weights(self.role_models, checkpoint)
        if not hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(str(checkpoint))

    def _load_best_model(self) -> None:
        """Load the weights of solver and guide with the highest accuracy of second answers."""
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def take_counts(self) -> StepCounts:
        """Return the counts so far, and reset them."""
        taken, self.counts = self.counts, StepCounts()
        return taken

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return means over the steps since the last line, and the figures of the last evaluation."""
        figures = {name: _mean(values) for name, values in self._figures.items()}
        held_out, self.held_out_figures = self.held_out_figures, {}
        self._figures.clear()
        norms = {f"grad_norm/{name}": norm for name, norm in self._grad_norms.items()}
        return {**figures, **norms, **held_out}

    def rows_not_finite(self) -> list[int]:
        """Return no rows: an episode's loss depends on the other episodes."""
        return []


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
