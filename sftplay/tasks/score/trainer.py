"""The trainer of two-turn episodes, its order of problems, and the rollout batch that its steps learn from."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Prompts, Question
from sftplay.data.pipeline import order_hash, training_order
from sftplay.errors import RunError
from sftplay.generate.generate import derive_seed
from sftplay.launch.checkpoints import read_step
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.evaluation import EpisodeResult, RewardScorer, describe, format_episode
from sftplay.tasks.score.role_models import (
    FSDPModels,
    RoleModels,
    copy_into,
    gather_tensor,
    gather_weights,
    load_full_weights,
    shard_like,
    soft_update,
)
from sftplay.tasks.score.sample_episodes import Action, Episode, EpisodeSampler, count_padded_tokens
from sftplay.tasks.score.update import (
    Advantages,
    MinibatchSetup,
    PolicyUpdate,
    ScoredEpisodes,
    find_learning_rates,
    group_actions,
)
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.exact_batch import StepSetup, StepTrainerMixin, average_gradients, gradient_norm
from sftplay.train.metrics import write_lines
from sftplay.train.task import RowOrder


@dataclass(frozen=True, kw_only=True)
class MinibatchSchedule:
    """How a rollout batch is cut into minibatches of `step_episodes`, one for each of its optimizer steps.

    A pass over the batch (PPO's epoch) takes `minibatches` steps.
    """

    step_episodes: int
    minibatches: int = 1
    passes: int = 1
    seed: int = 0

    @classmethod
    def from_config(cls, cfg: RunConfig) -> MinibatchSchedule:
        """Read the schedule from a run's config."""
        passes, episodes = cfg.score.num_iterations, cfg.train.effective_batch_size
        return cls(step_episodes=episodes, minibatches=cfg.score.steps_per_generation, passes=passes, seed=cfg.seed)

    @property
    def steps(self) -> int:
        """Optimizer steps of a rollout batch."""
        return self.minibatches * self.passes

    @property
    def episodes(self) -> int:
        """Episodes of a rollout batch."""
        return self.minibatches * self.step_episodes

    def find_place(self, row: int) -> int:
        """Return the place of the episode at `row` of the training order, which lists the steps in sequence.

        Every `minibatches` adjacent episodes are shuffled over as many steps. So a step gets an episode of every
        problem, or nearly, and a rank's steps together have the episodes that the rank has sampled.
        """
        step, at = divmod(row, self.step_episodes)
        batch, step = divmod(step, self.steps)
        number, minibatch = divmod(step, self.minibatches)
        first = (batch * self.step_episodes + at) * self.minibatches
        random = Random(derive_seed(derive_seed(self.seed, batch * self.passes + number), at)).random
        keys = [random() for _ in range(self.minibatches)]
        return first + sorted(range(self.minibatches), key=keys.__getitem__)[minibatch]

    def rank_places(self, batch: int) -> range:
        """Return the adjacent places of the episodes that this rank samples."""
        share = self.episodes // log.world_size()
        first = batch * self.episodes + log.rank() * share
        return range(first, first + share)


class StepRows:
    """The episodes of all optimizer steps in sequence; each of `problems` has `repeats` adjacent episodes."""

    def __init__(self, problems: Sequence[int], *, repeats: int, schedule: MinibatchSchedule, steps: int) -> None:
        self.problems, self.repeats, self.schedule = problems, repeats, schedule
        self._length = steps * schedule.step_episodes

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        place = self.schedule.find_place(row)
        return {"place": place, "row": self.find_problem(place)}

    def find_problem(self, place: int) -> int:
        """Return the number of an episode's problem."""
        return self.problems[place // self.repeats]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Stack `place` and `row` (the number of the problem), int64 [episodes]."""
    return {key: torch.tensor([row[key] for row in rows]) for key in ("place", "row")}


def create_run_order(cfg: RunConfig, prompts: Prompts) -> tuple[StepRows, RowOrder]:
    """Return the episodes of the whole run, and the order that the run's setup records."""
    score, n, schedule = cfg.score, len(prompts.train), MinibatchSchedule.from_config(cfg)
    steps = cfg.train.max_steps or score.stage1_steps + score.stage2_steps
    problems_per_batch = schedule.episodes // score.episodes_per_problem
    order = training_order(n, math.ceil(steps / schedule.steps) * problems_per_batch, seed=cfg.seed)
    digest = hashlib.sha256(f"{prompts.fingerprint} {order_hash(order)}".encode()).hexdigest()
    known = RowOrder(steps=steps, steps_per_epoch=math.ceil(n / problems_per_batch) * schedule.steps, digest=digest)
    return StepRows(order, repeats=score.episodes_per_problem, schedule=schedule, steps=steps), known


EPISODES_FILE = "episodes.json"

RENAMED = {"leak": "leaks"}
"""Field of `EpisodeResult` -> its key in the file."""


class RolloutBatch(NamedTuple):
    """Episodes that were sampled together, with their results and advantages."""

    number: int
    scored: ScoredEpisodes
    advantages: Advantages


def save_rollout_batch(rollout_batch: RolloutBatch, checkpoint: Path) -> None:
    """Write what the next steps still learn from. Every rank must call it."""
    scored, advantages = rollout_batch.scored, rollout_batch.advantages._asdict()
    episodes = [
        {name: part._asdict() if isinstance(part, Action) else part for name, part in episode._asdict().items()}
        for episode in scored.episodes
    ]
    for episode in episodes:
        del episode["question"]
    resampled = [[action._asdict() for action in pair] for pair in scored.resampled]
    ranks = gather_objects((episodes, resampled))
    if log.is_main():
        advantages["paid"] = advantages.pop("returns")
        kept = {
            "number": rollout_batch.number,
            "episodes": [episode for episodes, _ in ranks for episode in episodes],
            "fresh": [pair for _, pairs in ranks for pair in pairs],
            "verdicts": [{RENAMED.get(key, key): v for key, v in asdict(result).items()} for result in scored.results],
            "credit": advantages,
        }
        # JSON brings fp32 numbers back as they were.
        write_text(checkpoint / EPISODES_FILE, json.dumps(kept, default=Tensor.tolist))


def load_rollout_batch(checkpoint: Path, *, questions: Sequence[Question]) -> RolloutBatch:
    """Read what `save_rollout_batch` wrote; `questions` are those of this rank's episodes, in their order.

    Raise RunError where the file is missing, or cannot be read.
    """
    path, n = checkpoint / EPISODES_FILE, len(questions)
    rank_slice = slice(log.rank() * n, (log.rank() + 1) * n)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        episodes = []
        for described, question in zip(kept["episodes"][rank_slice], questions, strict=True):
            parts: dict[str, Any] = {
                name: Action(**part) if isinstance(part, dict) else part for name, part in described.items()
            }
            episodes.append(Episode(question=question, **parts))
        resampled = [(Action(**first), Action(**second)) for first, second in kept["fresh"][rank_slice]]
        renamed = {key: name for name, key in RENAMED.items()}
        results = [EpisodeResult(**{renamed.get(key, key): v for key, v in row.items()}) for row in kept["verdicts"]]
        credit = kept["credit"]
        turns = (credit["first"], credit["second"], credit["guide"], *credit["paid"])
        first, second, guide, *returns = (None if turn is None else torch.tensor(turn) for turn in turns)
        advantages = Advantages(first, second, guide, credit["figures"], (returns[0], returns[1]))
        return RolloutBatch(kept["number"], ScoredEpisodes(episodes, results, resampled), advantages)
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"the episodes of its rollout batch cannot be read: {error}"
        fix = "continue from the checkpoint before it: set this one aside"
        raise RunError(what, where=str(path), fix=fix) from error


WEIGHTS_FILE = "score.safetensors"


def save_weights(role_models: RoleModels, checkpoint: Path) -> None:
    """Write the file. Every rank must call it."""
    weights = {}
    for name, parameter in role_models.find_checkpoint_weights().items():
        whole = gather_tensor(parameter.detach())
        if log.is_main():
            weights[name] = whole.contiguous()
    if log.is_main():
        save_file(weights, checkpoint / WEIGHTS_FILE)


def load_weights(role_models: RoleModels, checkpoint: Path) -> None:
    """Load the weights of the file, on the devices where they lie; raise RunError where it is missing.

    Every rank must call it.
    """
    path = checkpoint / WEIGHTS_FILE
    if not path.is_file():
        fix = "continue from a checkpoint of task mode score"
        raise RunError("the checkpoint has no weights of solver and guide", where=str(path), fix=fix)
    weights = role_models.find_checkpoint_weights()
    for name, whole in load_file(path).items():
        copy_into(whole, weights[name])


class EpisodeTrainer(StepTrainerMixin, Trainer):
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
        super().__init__(step, **named)
        self.cfg, self.run_folder, self.role_models = cfg, run_folder, role_models
        self.episode_sampler, self.reward_scorer = episode_sampler, reward_scorer
        self.other_models = {"guide": role_models.models["guide"]} if role_models.is_separate else {}
        """Models of the result that the Trainer does not save."""

        self.questions, self.schedule = questions, MinibatchSchedule.from_config(cfg)
        self.rollout_batch: RolloutBatch | None = None
        """The episodes that the current steps learn from."""

        self.last_rows: list[int] = []
        self.figures: dict[str, float | None] = {}
        """Figures of the last step."""

        self._figures: dict[str, list[float | None]] = defaultdict(list)
        self._grad_norms: dict[str, float] = {}
        episode_sampler.beat = lambda: self.heartbeat.enter(self.heartbeat.phase)

    def train(self, resume_from_checkpoint: str | None = None, **named: Any) -> Any:
        """Train with the reward processes open."""
        with self.reward_scorer:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **named)

    def _reset_optimizer(self, step: int) -> None:
        """Forget the optimizer's moments at the first step of stage 2, where the config asks for it."""
        if self.cfg.score.reset_adam and step == self.cfg.score.stage1_steps + 1:
            getattr(self.optimizer, "optimizer", self.optimizer).state.clear()

    def training_step(self, model: nn.Module, inputs: Mapping[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Sample and score this rank's episodes, compute the gradients of all parts, and return the loss.

        Where a rollout batch feeds several steps, the first one samples it.
        """
        step, world = self.state.global_step + 1, log.world_size()
        number, age = divmod(step - 1, self.schedule.steps)
        self._reset_optimizer(step)
        for parameter in self.role_models.extra_parameters():
            parameter.grad = None  # the Trainer does not know them
        rollout = self.rollout_batch
        assert age == 0 or (rollout is not None and rollout.number == number)
        scored = self._sample(number, step=step) if rollout is None or age == 0 else rollout.scored
        first_place, score = self.schedule.rank_places(number).start, self.cfg.score
        assert self.micro_batcher is not None
        self.heartbeat.enter("forward")
        policy_update = PolicyUpdate(
            scored,
            part=[int(place) - first_place for place in inputs["place"]],
            role_models=self.role_models,
            score=score,
            heartbeat=self.heartbeat,
            step=step,
            batch=MinibatchSetup(
                micro_batch=self.micro_batcher.micro_batch,
                n_episodes=len(scored.results) / self.schedule.minibatches / world,
                is_on_policy=age == 0,
                pad=self.episode_sampler.tokenizer.pad_token_id,
                backward=self._backward,
                context=self.compute_loss_context_manager,
            ),
        )
        if rollout is None or age == 0:
            advantages = policy_update.compute_advantages()
            rollout = self.rollout_batch = RolloutBatch(number, scored, advantages)
            self._write_samples(rollout, step)
        self.role_models.train()
        policy_update.learn(rollout.advantages)
        if world > 1:
            with self.heartbeat.within("communication"):
                average_gradients(self.model_wrapped, others=self.role_models.extra_parameters())
                if not policy_update.guide_learns:
                    # Averaging creates zero gradients, which the optimizer would count as a step.
                    for parameter in self.role_models.trainable.get("guide", ()):
                        parameter.grad = None
        return self._record_step(policy_update, rollout.advantages)

    def _questions(self, number: int) -> list[Question]:
        """List the questions of this rank's episodes in a rollout batch."""
        find_problem = self.train_dataset.find_problem
        return [self.questions[find_problem(place)] for place in self.schedule.rank_places(number)]

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
        ranks = gather_objects(self.reward_scorer.score(episodes, heartbeat=self.heartbeat), self.heartbeat)
        return ScoredEpisodes(episodes, [result for rank in ranks for result in rank], resampled)

    def _write_samples(self, rollout: RolloutBatch, step: int) -> None:
        """Write the main rank's first episodes with their advantages."""
        limit, (_, scored, advantages) = self.cfg.score.samples, rollout
        if not log.is_main() or limit == 0:
            return
        lines, gains = [], {"t1": advantages.first, "guide": advantages.guide, "t2": advantages.second}
        for at, (episode, result) in enumerate(zip(scored.episodes[:limit], scored.results, strict=False)):
            line = format_episode(episode, result, tokenizer=self.episode_sampler.tokenizer)
            line["advantages"] = {name: None if g is None else round(float(g[at]), 6) for name, g in gains.items()}
            lines.append(line)
        write_lines(self.run_folder / "samples" / f"step-{step}.jsonl", lines)

    def _record_step(self, policy_update: PolicyUpdate, advantages: Advantages) -> Tensor:
        assert self.micro_batcher is not None
        scored, rows = policy_update.scored, self.micro_batcher.micro_batch
        episodes = [scored.episodes[n] for n in policy_update.part]
        self.last_rows = [episode.question.row for episode in episodes]
        groups = group_actions(episodes).values()
        self.count_step(
            self.last_rows,
            [len(action.prompt) + len(action.ids) for group in groups for action in group],
            padded_tokens=sum(count_padded_tokens(group, rows=rows) for group in groups),
            label_tokens=sum(len(action.ids) for group in groups for action in group),
        )
        figures = {**describe(scored.results), **advantages.figures, **policy_update.figures()}
        self.figures = {**figures, "stage": policy_update.stage}
        for name, value in self.figures.items():
            self._figures[name].append(value)
        self.last_loss = policy_update.gradients.sums["loss"]
        return torch.tensor(self.last_loss, device=self.args.device)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Create one optimizer with a group and a learning rate for each part; all follow the same schedule."""
        optimizer: torch.optim.Optimizer | None = getattr(self, "optimizer", None)
        if optimizer is None:
            rates, role_models = find_learning_rates(self.cfg, peak=self.args.learning_rate), self.role_models
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, self.model)
            groups = [
                {"params": parameters, "lr": rates[name], "weight_decay": self.args.weight_decay}
                for name, parameters in role_models.trainable.items()
            ]
            optimizer = self.optimizer = kind(groups, **options)
            if (critic := role_models.critic) is not None:
                tau = self.cfg.score.critic.tau
                optimizer.register_step_post_hook(lambda *_: soft_update(role_models.target_critic, critic, tau=tau))
        return optimizer

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
        number, age = divmod(read_step(checkpoint), self.schedule.steps)
        if age:
            self.rollout_batch = load_rollout_batch(checkpoint, questions=self._questions(number))

    def _load_weights(self, checkpoint: Path) -> None:
        load_weights(self.role_models, checkpoint)
        if not hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(str(checkpoint))

    def _load_best_model(self) -> None:
        """Load the weights of solver and guide with the highest accuracy of second answers."""
        self._load_weights(Path(str(self.state.best_model_checkpoint)))

    def take_figures(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        """Return means over the steps since the last line, and the figures of the last evaluation."""
        known = {name: [value for value in values if value is not None] for name, values in self._figures.items()}
        figures = {name: fmean(values) if values else None for name, values in known.items()}
        self._figures.clear()
        norms = {f"grad_norm/{name}": norm for name, norm in self._grad_norms.items()}
        return {**figures, **norms, **self.take_held_out_figures()}


class ShardedEpisodeTrainer(EpisodeTrainer):
    """Shards the models after they are checked and loaded, and before the optimizer is created."""

    _models: FSDPModels | None = None

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self._models is None:
            self._models = FSDPModels(self.role_models.shard(self.accelerator.mixed_precision))
        return super().create_optimizer(model)

    def _wrap_model(self, *_: Any, **__: Any) -> nn.Module:
        assert self._models is not None
        return self._models

    def whole_weights(self) -> dict[str, dict[str, Tensor]]:
        """Gather model name ("" for the solver) -> weights on the main rank. Every rank must call it."""
        models = {"": self.model, **self.other_models}
        return {name: gather_weights(model) for name, model in models.items()}

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._save(output_dir, state_dict=gather_weights(self.model))

    def _load_weights(self, checkpoint: Path) -> None:
        if self._models is None:
            super()._load_weights(checkpoint)
            return
        load_weights(self.role_models, checkpoint)
        load_full_weights(self.model, checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state as of an unsharded optimizer, so that any layout can resume. Every rank must call it."""
        state, kept = self.optimizer.state_dict(), {}
        for number, values in state["state"].items():
            whole = {key: gather_tensor(value) if isinstance(value, Tensor) else value for key, value in values.items()}
            if log.is_main():
                kept[number] = whole
        if log.is_main():
            torch.save({**state, "state": kept}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for number, values in state["state"].items():
            weight = weights[number]
            for name, value in values.items():
                # A moment is sharded like its weight; a step count is not.
                if isinstance(weight, DTensor) and isinstance(value, Tensor) and value.shape == weight.shape:
                    values[name] = shard_like(value, weight)
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
