"""transformers' Trainer over episodes: a batch is those that a rank learns from in one step.

Loop, checkpoints, optimizer and logging are the Trainer's. It overrides `training_step`, `create_optimizer`,
`_clip_grad_norm`, `_save_checkpoint`, `_load_from_checkpoint` and `_load_best_model`, and provides what
`train.observer.StepTrainer` asks for.
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
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.generate.sampling import seed_of
from sftplay.launch.checkpoints import step_of
from sftplay.tasks.score.advantages import Advantages
from sftplay.tasks.score.episode_rewards import EpisodeJudge, describe, keep_episodes, of_all_ranks
from sftplay.tasks.score.kept_weights import load_weights, save_weights
from sftplay.tasks.score.losses import rates_of
from sftplay.tasks.score.problems import MinibatchSchedule
from sftplay.tasks.score.role_models import Cast
from sftplay.tasks.score.rollout_batch import Drawing, load_drawing, save_drawing
from sftplay.tasks.score.sample_episodes import Episode, Player, padded_tokens
from sftplay.tasks.score.update import Batch, Played, PolicyUpdate, actions_of
from sftplay.tasks.score.value_model import soft_update
from sftplay.train.exact_batch import StepSetup
from sftplay.train.gradients import average_gradients, gradient_norm
from sftplay.train.interval import StepCounts
from sftplay.train.random_numbers import random_numbers_kept


class EpisodeTrainer(Trainer):
    """Plays and judges drawings of episodes, and learns from each in one step, or in several."""

    def __init__(
        self,
        step: StepSetup,
        *,
        cfg: RunConfig,
        run_folder: Path,
        cast: Cast,
        player: Player,
        judge: EpisodeJudge,
        questions: Sequence[Question],
        **named: Any,
    ) -> None:
        super().__init__(**named)
        self.cfg, self.run_folder, self.cast, self.player, self.judge = cfg, run_folder, cast, player, judge
        self.beside = {"guide": cast.models["guide"]} if cast.is_separate else {}
        """Models of the result that are not the Trainer's."""

        self.questions, self.heartbeat, self.dealing = questions, step.heartbeat, MinibatchSchedule.of(cfg)
        self.drawing: Drawing | None = None
        """What the current steps learn from."""

        self.micro_batcher, self.replay = step.micro_batcher, None
        self.source_names: tuple[str, ...] = ()
        self.held_out_sources: dict[str, dict[str, float]] = {}
        self.counts, self.last_loss = StepCounts(), 0.0
        self.last_rows: list[int] = []
        self.held_out_figures: dict[str, float] = {}
        """What was measured since the last line of metrics."""

        self.figures: dict[str, float | None] = {}
        """Those of the last step."""

        self._figures: dict[str, list[float | None]] = defaultdict(list)
        self._grad_norms: dict[str, float] = {}
        player.beat = lambda: self.heartbeat.enter(self.heartbeat.phase)

    def train(self, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Train with the judge's processes open."""
        with self.judge:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def training_step(self, model: nn.Module, inputs: Mapping[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Episodes of this rank's problems, their verdicts, and the gradients of both models; the loss.

        Where a drawing feeds several steps, those after the first learn from the episodes that were played then.
        """
        step = self.state.global_step + 1
        number, age = divmod(step - 1, self.dealing.steps)
        self._forget_moments(step)
        self.cast.forget_gradients()
        played = self._play(number, step=step) if age == 0 else self._kept(number).played
        own, score = self.dealing.own(number), self.cfg.score
        part = [int(place) - own.start for place in inputs["place"]]
        self.heartbeat.enter("forward")
        policy_update = PolicyUpdate(
            played, part=part, cast=self.cast, score=score, heartbeat=self.heartbeat, step=step,
            batch=self._batch(len(played.verdicts), is_fresh=age == 0),
        )  # fmt: skip
        if age == 0:
            credit = policy_update.credit()
            self.drawing = Drawing(number, played, credit)
            keep_episodes(
                played.episodes, played.verdicts, run_folder=self.run_folder, step=step, limit=score.samples,
                tokenizer=self.player.tokenizer,
                gains={"t1": credit.first, "guide": credit.guide, "t2": credit.second},
            )  # fmt: skip
        credit = self._kept(number).credit
        self.cast.train()
        policy_update.learn(credit)
        if log.world_size() > 1:
            with self.heartbeat.within("communication"):
                average_gradients(self.model_wrapped, beside=self.cast.beside())
                self._drop_idle(policy_update)
        return self._finish(policy_update, credit)

    def _kept(self, number: int) -> Drawing:
        """The drawing with this number, which was played in an earlier step or lay in a checkpoint."""
        assert self.drawing is not None
        assert self.drawing.number == number
        return self.drawing

    def _questions(self, number: int) -> list[Question]:
        """Those of this rank's episodes in a drawing."""
        episodes = self.train_dataset.episodes
        return [self.questions[episodes[place]["row"]] for place in self.dealing.own(number)]

    def _play(self, number: int, *, step: int) -> Played:
        """The episodes of a drawing, and the verdicts of all ranks on theirs."""
        score, questions = self.cfg.score, self._questions(number)
        self.cast.eval()
        with self.heartbeat.within("generation"), torch.no_grad(), self.accelerator.autocast():
            draw: dict[str, Any] = {
                "numbers": self.dealing.own(number),
                "seed": seed_of(self.cfg.seed, step),
                "temperature": score.temperature,
            }
            episodes = self.player.play(questions, **draw)
            fresh = self.player.answer_again(episodes, **draw) if self.cast.critic else []
        verdicts = of_all_ranks(self.judge.judge(episodes, heartbeat=self.heartbeat), self.heartbeat)
        return Played(episodes, verdicts, fresh)

    def _forget_moments(self, step: int) -> None:
        """Begin stage 2 with an optimizer that has seen nothing, where the config asks for it."""
        if self.cfg.score.reset_adam and step == self.cfg.score.stage1_steps + 1:
            getattr(self.optimizer, "optimizer", self.optimizer).state.clear()

    def _batch(self, n_episodes: int, *, is_fresh: bool) -> Batch:
        """`n_episodes` are those of the drawing."""
        assert self.micro_batcher is not None
        return Batch(
            micro_batch=self.micro_batcher.micro_batch,
            n_episodes=n_episodes / self.dealing.portions / log.world_size(),
            is_fresh=is_fresh,
            pad=self.player.tokenizer.pad_token_id,
            backward=self._backward,
            context=self.compute_loss_context_manager,
        )

    def _backward(self, loss: Tensor) -> None:
        self.heartbeat.enter("backward")
        # DDP would send gradients in each backward pass; they are averaged once, behind all of them.
        with self.model_wrapped.no_sync() if log.world_size() > 1 else nullcontext():
            self.accelerator.backward(loss)
        self.heartbeat.enter("forward")

    def _drop_idle(self, policy_update: PolicyUpdate) -> None:
        """Averaging makes gradients of zeros where there are none; an optimizer would count them as a step."""
        if not policy_update.guide_learns:
            for parameter in self.cast.parts.get("guide", ()):
                parameter.grad = None

    def _finish(self, policy_update: PolicyUpdate, credit: Advantages) -> Tensor:
        """Counts and figures of the step; the loss of this rank."""
        played = policy_update.played
        self._count([played.episodes[n] for n in policy_update.part])
        self.figures = {
            **describe(played.verdicts),
            **credit.figures,
            **policy_update.figures(),
            "stage": policy_update.stage,
        }
        for name, value in self.figures.items():
            self._figures[name].append(value)
        self.last_loss = policy_update.update.sums["loss"]
        return torch.tensor(self.last_loss, device=self.args.device)

    def _count(self, episodes: Sequence[Episode]) -> None:
        assert self.micro_batcher is not None
        roles = [*actions_of(episodes).values()]
        actions = [action for each in roles for action in each]
        self.last_rows = [episode.question.row for episode in episodes]
        self.counts.rows += self.last_rows
        lengths = [len(action.prompt) + len(action.ids) for action in actions]
        self.counts.lengths += lengths
        self.counts.tokens += sum(lengths)
        self.counts.padded_tokens += sum(padded_tokens(each, rows=self.micro_batcher.micro_batch) for each in roles)
        self.counts.label_tokens += sum(len(action.ids) for action in actions)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """One optimizer with a group for each part, each with its own rate; all follow the same schedule."""
        made: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if made is None:
            rates = rates_of(self.cfg, peak=self.args.learning_rate)
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = [
                {"params": parameters, "lr": rates[name], "weight_decay": self.args.weight_decay}
                for name, parameters in self.cast.parts.items()
            ]
            made = self.optimizer = kind(groups, **options)
            if self.cast.critic is not None:
                made.register_step_post_hook(self._follow_critic)
        return made

    def _follow_critic(self, *_: Any) -> None:
        """After each step of the critic, its slow copy comes nearer."""
        assert self.cast.critic is not None
        soft_update(self.cast.slow_critic, self.cast.critic, tau=self.cfg.score.critic.tau)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradient of each part by its own norm; the norm of all together before that."""
        self.accelerator.unscale_gradients()
        squares = torch.zeros(())
        for name, parameters in self.cast.parts.items():
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
        save_weights(self.cast, checkpoint)
        if self.drawing is not None and self.state.global_step % self.dealing.steps:
            save_drawing(self.drawing, checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoint = Path(resume_from_checkpoint)
        self._load_weights(checkpoint)
        number, age = divmod(step_of(checkpoint), self.dealing.steps)
        if age:
            self.drawing = load_drawing(checkpoint, questions=self._questions(number))

    def _load_weights(self, checkpoint: Path) -> None:
        load_weights(self.cast, checkpoint)
        if not hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(str(checkpoint))

    def _load_best_model(self) -> None:
        """Take the weights with which second answers were right most often, of solver and guide alike."""
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def take_counts(self) -> StepCounts:
        """The counts so far; counting starts again from zero."""
        taken, self.counts = self.counts, StepCounts()
        return taken

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Means over the steps since the last line, and what the last evaluation measured."""
        figures = {name: _mean(values) for name, values in self._figures.items()}
        held_out, self.held_out_figures = self.held_out_figures, {}
        self._figures.clear()
        norms = {f"grad_norm/{name}": norm for name, norm in self._grad_norms.items()}
        return {**figures, **norms, **held_out}

    def rows_not_finite(self) -> list[int]:
        """None are told apart: an episode's loss depends on the others."""
        return []


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
