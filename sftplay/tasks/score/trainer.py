"""transformers' Trainer over episodes: a batch is a rank's problems of one step, each as often as it is played.

Loop, checkpoints, optimizer and logging are the Trainer's. It overrides `training_step`, `create_optimizer`,
`_clip_grad_norm`, `_save_checkpoint` and `_load_from_checkpoint`, and provides what `monitor.observer.StepTrainer` asks
for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Trainer

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.questions import Question
from sftplay.deliver.infer.sampling import seed_of
from sftplay.errors import RunError
from sftplay.monitor.gradient_norm import gradient_norm
from sftplay.monitor.interval import StepCounts
from sftplay.monitor.metrics import gather_objects
from sftplay.tasks.score.episodes.cast import Cast
from sftplay.tasks.score.episodes.judge import EpisodeJudge, Verdict, describe, of_all_ranks
from sftplay.tasks.score.episodes.play import Episode, Player
from sftplay.tasks.score.episodes.samples import keep_episodes
from sftplay.tasks.score.gradients.update import Batch, Update
from sftplay.tasks.score.learning.credit import Credit, Outcome, credit_of
from sftplay.tasks.score.learning.schedule import kl_coefficients, stage_of
from sftplay.tasks.step.gradient_average import average_gradients
from sftplay.tasks.step.random_numbers import random_numbers_kept
from sftplay.tasks.step.window import StepSetup

WEIGHTS = "score.safetensors"
"""File of a checkpoint with everything that trains: both adapters and the value head, exact to the bit."""

GUIDE_RATE = 0.2
"""Rate of the guide over that of the solver, where nothing is said."""


class EpisodeTrainer(Trainer):
    """Plays, judges and learns from one batch of episodes a step."""

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
        self.questions, self.heartbeat = questions, step.heartbeat
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
        """Episodes of this rank's problems, their verdicts, and the gradients of both models; the loss."""
        step = self.state.global_step + 1
        self._forget_moments(step)
        places = [int(place) for place in inputs["place"]]
        score, n = self.cfg.score, len(places)
        questions = [self.questions[int(row)] for row in inputs["row"]]
        model.eval()
        with self.heartbeat.within("generation"), torch.no_grad(), self.accelerator.autocast():
            episodes = self.player.play(
                questions, numbers=places, seed=seed_of(self.cfg.seed, step), temperature=score.temperature
            )
        verdicts = of_all_ranks(self.judge.judge(episodes, heartbeat=self.heartbeat), self.heartbeat)
        self.heartbeat.enter("forward")
        update = Update(self.cast, score, batch=self._batch(len(verdicts)))
        credit = self._credit(episodes, verdicts, update=update, step=step)
        own = slice(log.rank() * n, (log.rank() + 1) * n)
        keep_episodes(
            episodes, verdicts, run_folder=self.run_folder, step=step, tokenizer=self.player.tokenizer,
            limit=score.samples, gains={"t1": credit.first, "guide": credit.guide, "t2": credit.second},
        )  # fmt: skip
        model.train()
        self._learn(episodes, verdicts, update=update, credit=credit, own=own, step=step)
        if log.world_size() > 1:
            with self.heartbeat.within("communication"):
                average_gradients(self.model_wrapped)
                self._drop_idle(step)
        return self._finish(episodes, verdicts, update=update, credit=credit, step=step)

    def _forget_moments(self, step: int) -> None:
        """Begin stage 2 with an optimizer that has seen nothing, where the config asks for it."""
        if self.cfg.score.reset_adam and step == self.cfg.score.stage1_steps + 1:
            getattr(self.optimizer, "optimizer", self.optimizer).state.clear()

    def _batch(self, n_episodes: int) -> Batch:
        assert self.micro_batcher is not None
        return Batch(
            micro_batch=self.micro_batcher.micro_batch,
            n_episodes=n_episodes / log.world_size(),
            pad=self.player.tokenizer.pad_token_id,
            device=self.accelerator.device,
            backward=self._backward,
            context=self.compute_loss_context_manager,
        )

    def _backward(self, loss: Tensor) -> None:
        self.heartbeat.enter("backward")
        # DDP would send gradients in each backward pass; they are averaged once, behind all of them.
        with self.model_wrapped.no_sync() if log.world_size() > 1 else nullcontext():
            self.accelerator.backward(loss)
        self.heartbeat.enter("forward")

    def _credit(self, episodes: Sequence[Episode], verdicts: Sequence[Verdict], *, update: Update, step: int) -> Credit:
        """Advantages of the episodes of all ranks."""
        value = None
        if self.cast.has_value:
            mine = update.values([episode.hint for episode in episodes if episode.hint is not None])
            value = torch.tensor([each for rank in gather_objects(mine.tolist(), self.heartbeat) for each in rank])

        def column(name: str) -> Tensor:
            return torch.tensor([float(getattr(verdict, name)) for verdict in verdicts])

        outcome = Outcome(
            first=column("first"),
            second=column("second"),
            is_known=column("is_known"),
            form_first=column("form_first"),
            form_second=column("form_second"),
            leak=column("leaks"),
            value=value,
        )
        return credit_of(outcome, self.cfg.score, stage=stage_of(step, self.cfg.score))

    def _learn(
        self,
        episodes: Sequence[Episode],
        verdicts: Sequence[Verdict],
        *,
        update: Update,
        credit: Credit,
        own: slice,
        step: int,
    ) -> None:
        """Gradients of guide and solver, from this rank's share."""
        score = self.cfg.score
        turns = [[episode.first for episode in episodes], [episode.second for episode in episodes]]
        hints = [episode.hint for episode in episodes if episode.hint is not None]
        counts = [sum(len(action.ids) for action in actions) for actions in (*turns, hints)]
        totals = [sum(each) / log.world_size() for each in zip(*gather_objects(counts, self.heartbeat), strict=True)]
        outcome = torch.tensor([verdict.second for verdict in verdicts[own]])
        if self._guide_learns(step):
            update.guide(hints, advantage=credit.guide[own], outcome=outcome, n_tokens=totals[2])
        elif self.cast.has_value and score.value_coef:
            update.value_head(hints, outcome=outcome)
        beta = kl_coefficients(stage_of(step, score), score)
        first = None if credit.first is None else credit.first[own]
        update.solver(turns[0], turn=1, advantage=first, beta=beta.first, n_tokens=totals[0])
        update.solver(turns[1], turn=2, advantage=credit.second[own], beta=beta.second, n_tokens=totals[1])

    def _guide_learns(self, step: int) -> bool:
        return "guide" in self.cast.parts and step > self.cfg.score.guidance_warmup

    def _drop_idle(self, step: int) -> None:
        """Averaging makes gradients of zeros where there are none; an optimizer would count them as a step."""
        if not self._guide_learns(step):
            for parameter in self.cast.parts.get("guide", ()):
                parameter.grad = None

    def _finish(
        self,
        episodes: Sequence[Episode],
        verdicts: Sequence[Verdict],
        *,
        update: Update,
        credit: Credit,
        step: int,
    ) -> Tensor:
        """Counts and figures of the step; the loss of this rank."""
        self._count(episodes)
        sums = [dict(each) for each in gather_objects(dict(update.sums), self.heartbeat)]
        means = {name: fmean(each[name] for each in sums) for name in sums[0] if name != "loss"}
        self.figures = {**describe(verdicts), **credit.figures, **means, "stage": stage_of(step, self.cfg.score)}
        for name, value in self.figures.items():
            self._figures[name].append(value)
        self.last_loss = update.sums["loss"]
        return torch.tensor(self.last_loss, device=self.args.device)

    def _count(self, episodes: Sequence[Episode]) -> None:
        actions = [a for e in episodes for a in (e.first, e.hint, e.second) if a is not None]
        self.last_rows = [episode.question.row for episode in episodes]
        self.counts.rows += self.last_rows
        lengths = [len(action.prompt) + len(action.ids) for action in actions]
        self.counts.lengths += lengths
        self.counts.tokens += sum(lengths)
        self.counts.padded_tokens += sum(lengths)
        self.counts.label_tokens += sum(len(action.ids) for action in actions)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """One optimizer with a group for each part, each with its own rate; all follow the same schedule."""
        made: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if made is None:
            score, peak = self.cfg.score, self.args.learning_rate
            solver = score.solver_learning_rate or peak
            rates = {
                "solver": solver,
                "guide": score.guide_learning_rate or GUIDE_RATE * solver,
                "value": score.value_learning_rate,
            }
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = [
                {"params": parameters, "lr": rates[name], "weight_decay": self.args.weight_decay}
                for name, parameters in self.cast.parts.items()
            ]
            made = self.optimizer = kind(groups, **options)
        return made

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
                        parameter.grad.mul_(self.args.max_grad_norm / norm)
        return squares.sqrt()

    def _save_checkpoint(self, *given: Any) -> None:
        with random_numbers_kept():
            super()._save_checkpoint(*given)
        if log.is_main():
            names = {id(p) for part in self.cast.parts.values() for p in part}
            weights = {n: p.detach().contiguous() for n, p in self.model.named_parameters() if id(p) in names}
            save_file(weights, Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}" / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / WEIGHTS
        if not path.is_file():
            fix = "continue from a checkpoint of task mode score"
            raise RunError("the checkpoint has no weights of solver and guide", where=str(path), fix=fix)
        weights, mine = load_file(path), dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                mine[name].copy_(weight)

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
