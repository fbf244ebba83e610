"""Callbacks of task grpo: held-out answers, frozen weights that must not change, rewards that must differ."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import ExportableState

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Question
from sftplay.errors import RunError
from sftplay.evaluate.rewarded import (
    PASS,
    Rewarded,
    compute_figures,
    content_rewards,
    format_summary,
    reward_answers,
)
from sftplay.launch.run_folder import RunFolder
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.grpo.scoring import RewardScorer
from sftplay.tasks.grpo.turns import Tokens, count_sampled, read_records
from sftplay.train.eval_mode import eval_mode, random_numbers_kept
from sftplay.train.metrics import EvaluateAtSteps, Observer
from sftplay.train.upstream import replaced_attributes

GREEDY = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""All values are given: a missing one comes from the generation config that was shipped with the model."""


class EvaluatePrompts(EvaluateAtSteps):
    """Answers held-out prompts greedily, also at the start, and scores the answers."""

    prefix, logs_start = "held_out_", False  # the first line of metrics is that of step 1

    def __init__(
        self, cfg: RunConfig, questions: Sequence[Question], *,
        scorer: RewardScorer, folder: Path, every: int, prompt_version: str,
    ) -> None:  # fmt: skip
        super().__init__(cfg, questions, folder=folder, every=every)
        self.scorer, self.prompt_version = scorer, prompt_version

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            self.evaluate(0)

    def measures_at(self, step: int, state: Any) -> bool:
        return step == 0 or super().measures_at(step, state)

    def measure(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        with random_numbers_kept(), self.trainer.heartbeat.within("evaluation"):
            shares = gather_objects(self._score_share())
        by_row = {answer.asked.row: answer for share in shares for answer in share}
        answers, rewards = [by_row[row] for row in sorted(by_row)], self.cfg.rewards
        figures = compute_figures(answers, rewards=rewards)
        figures |= {"prompt_version": self.prompt_version, "executor": self.scorer.rewards.executor}
        content = content_rewards(rewards)
        return figures, [answer.as_json(content) for answer in answers]

    def summarize(self, figures: dict[str, Any]) -> tuple[dict[str, float], str]:
        return {key: figures[key] for key in ("reward", PASS) if key in figures}, f"held-out {format_summary(figures)}"

    def _score_share(self) -> list[Rewarded]:
        """Answer and score this rank's share of the questions.

        All ranks have equally many questions and batches, so a question may be answered twice.
        """
        n, world, trainer = len(self.rows), log.world_size(), self.trainer
        numbers = range(log.rank(), ceil(n / world) * world, world)
        share = sorted((self.rows[number % n] for number in numbers), key=lambda question: len(question.ids))
        with eval_mode(trainer.model_wrapped), greedy_generation(trainer), trainer.accelerator.autocast():
            tokens = trainer._generate_single_turn(list(map(Tokens, share)), None, {}, 1)[0]
        records = read_records(tokens)
        texts = [record.answer for record in records]
        return reward_answers(
            self.scorer.rewards,
            share,
            columns=self.scorer.columns,
            answers=texts or trainer.processing_class.batch_decode(tokens, skip_special_tokens=True),
            n_tokens=list(map(count_sampled, tokens)),
            records=records,
        )


def greedy_generation(trainer: Any) -> AbstractContextManager[None]:
    """Inside, the trainer generates the likeliest token each time."""
    if trainer.use_vllm:
        return replaced_attributes(trainer.vllm_generation, **GREEDY | {"temperature": 0.0})
    config = trainer.generation_config.__class__.from_dict(trainer.generation_config.to_dict())
    config.update(do_sample=False, **GREEDY)
    return replaced_attributes(trainer, generation_config=config)


CHUNK_WORDS = 2**21  # words of 8 bytes per chunk of a digest: a copy of a chunk takes 16 MiB


class WatchBaseWeights(Observer):
    """Ends the run when a frozen weight has changed. A checkpoint of such a step is not marked complete.

    It must come before the callback that marks checkpoints. Each rank checks the weights that it holds.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.digests: dict[str, str] = {}  # the digests at the start, by the name of the weight
        self.checked_steps: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.digests = compute_frozen_digests(self.trainer.model)
        self._check(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._check(state.global_step)

    on_train_end = on_save

    def _check(self, step: int) -> None:
        if self.checked_steps[-1:] == [step]:
            return
        now = compute_frozen_digests(self.trainer.model) if self.checked_steps else self.digests
        combined = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in now.items()).encode()).hexdigest()
        changed = [name for name in self.digests if now.get(name) != self.digests[name]]
        ranks = gather_objects((changed, combined), self.trainer.heartbeat)
        if changed_anywhere := sorted({name for names, _ in ranks for name in names}):
            shown = ", ".join(changed_anywhere[:3]) + (" ..." if len(changed_anywhere) > 3 else "")
            raise RunError(
                f"{len(changed_anywhere)} frozen weights have changed by step {step}: {shown}",
                where="base weights",
                fix="the adapter belongs to the weights of the start: continue from the last complete checkpoint, with "
                "grpo.generation=transformers, which merges nothing",
            )
        self.checked_steps.append(step)
        if log.is_main():
            facts = {
                "sha256": [digest for _, digest in ranks],
                "tensors": len(self.digests),
                "unchanged_at_steps": self.checked_steps,
            }
            self.folder.write_json("manifest.json", {**self.folder.read_json("manifest.json"), "base_weights": facts})


def compute_frozen_digests(model: Any) -> dict[str, str]:
    """Compute the digest of each frozen weight, of the part that this rank holds; it changes with any bit."""
    frozen: dict[str, Any] = {name: weight for name, weight in model.named_parameters() if not weight.requires_grad}
    # A 4-bit weight includes the scales of its blocks.
    states = {name: getattr(weight, "quant_state", None) for name, weight in frozen.items()}
    frozen |= {f"{name}.absmax": state.absmax for name, state in states.items() if state is not None}
    digests = {}
    for name, weight in frozen.items():
        # FSDP and ZeRO-3 shard it.
        part = weight.to_local() if hasattr(weight, "to_local") else getattr(weight, "ds_tensor", weight)
        digests[name] = compute_digest(part.detach())
    return digests


@torch.no_grad()
def compute_digest(tensor: Tensor) -> str:
    """Compute a digest of the bits, dtype and shape of a tensor, on the tensor's device.

    It is the sum of the tensor's 8-byte words, multiplied by consecutive odd numbers, modulo 2^64. A change of a single
    word always changes it, because an odd factor is invertible; two changes cancel by chance once in 2^64.
    """
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    sums = []
    for chunk in tensor.contiguous().reshape(-1).view(torch.uint8).split(CHUNK_WORDS * 8):
        rest = -chunk.numel() % 8
        if rest or chunk.storage_offset() % 8:  # the last word is padded with zeros
            chunk = torch.cat([chunk, chunk.new_zeros(rest)])
        words = chunk.view(torch.int64)
        sums.append((words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum())
    if sums:
        digest.update(torch.stack(sums).cpu().numpy().tobytes())
    return digest.hexdigest()


MEAN_WINDOW = 10  # rollout batches, or lines of metrics, in the mean of a figure that is checked

WARM_UP_FIX = (
    "warm it up first: fine-tune on examples of right answers (task_mode sft), and name that run in model.name, as "
    "workflows/sft_then_grpo.sh does; or take easier prompts"
)


@dataclass(frozen=True)
class SignalProblem:
    """A problem that a figure shows; `is_present` takes the first mean of the figure and the recent one."""

    name: str  # kept in checkpoints, so that a resumed run does not repeat the warning
    figure: str
    is_present: Callable[[float, float], bool]
    what: str
    fix: str


SIGNAL_PROBLEMS = (
    SignalProblem(
        "silent groups", "zero_variance_share", lambda _, now: now > 0.8,
        "{now:.0%} of the groups have equal rewards, which teach nothing",
        "set grpo.dynamic_sampling_rounds=2, sample more (grpo.num_generations), or take other prompts: easier where "
        "the reward is low, harder where it is high",
    ),
    SignalProblem(
        "truncation", "clipped_ratio", lambda _, now: now > 0.25,
        "{now:.0%} of the completions are cut off at grpo.max_completion_length",
        "raise it, or set grpo.mask_truncated_completions=true to learn nothing from them",
    ),
    SignalProblem(
        "longer", "completion_tokens", lambda first, now: now > 2 * first and now > first + 16,
        "completions have become longer: {now:.0f} tokens in the mean, {first:.0f} at the beginning",
        "see in samples/ whether length is rewarded; add a reward `overlong`, or set grpo.loss_type=dr_grpo",
    ),
    SignalProblem(
        "shorter", "completion_tokens", lambda first, now: now < 0.5 * first and now < first - 16,
        "completions have become shorter: {now:.0f} tokens in the mean, {first:.0f} at the beginning",
        "see in samples/ what is still answered; a reward that a short text earns may have to go",
    ),
    SignalProblem(
        "sure", "entropy", lambda first, now: now < 0.1 * first,
        "the model is nearly sure of each token: entropy {now:.3g}, {first:.3g} at the beginning; it tries nothing new",
        "set grpo.epsilon_high=0.28, raise grpo.temperature, or lower train.learning_rate",
    ),
    SignalProblem(
        "unsure", "entropy", lambda first, now: now > 3 * first and now > first + 1,
        "the model becomes unsure of its tokens: entropy {now:.3g}, {first:.3g} at the beginning",
        "lower train.learning_rate, or set grpo.beta=0.04",
    ),
    SignalProblem(
        "far from the start", "kl", lambda _, now: now > 1,
        "the model is far from the one that the run started with: KL {now:.3g}",
        "raise grpo.beta, or lower train.learning_rate",
    ),
    SignalProblem(
        "clipping", "policy_clip_share", lambda _, now: now > 0.3,
        "the ratio of {now:.0%} of the tokens is cut off, so they are not learned from",
        "lower train.learning_rate, grpo.num_iterations or grpo.steps_per_generation",
    ),
    SignalProblem(
        "stale sampler", "sampler_kl", lambda _, now: now > 0.1,
        "the weights that learn are far from those that sampled: KL {now:.3g}",
        "lower grpo.steps_per_generation, grpo.num_iterations or train.learning_rate",
    ),
)  # fmt: skip


class SignalHealth(Observer, ExportableState):
    """Warns, and raises RunError after grpo.stop_without_signal steps in which all groups had equal rewards."""

    trainer: Any

    def __init__(self, cfg: RunConfig) -> None:
        self.limit = 0 if cfg.grpo.placebo_reward == "constant" else cfg.grpo.stop_without_signal
        self.warns = cfg.grpo.placebo_reward is None
        self.steps_without = 0  # steps in a row without a signal
        self.extremes: list[float] = []  # the lowest and the highest mean reward of all rollout batches so far
        self.content = content_rewards(cfg.rewards)  # names of the rewards whose full value only a right answer gets
        self.seen_content = False  # whether any of these rewards was ever other than 0
        self.first: dict[str, float] = {}
        self.said: list[str] = []
        self._recent: dict[str, deque[float]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        for name, value in saved.get("attributes", {}).items():
            setattr(self, name, value)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        names = ("steps_without", "extremes", "seen_content", "first", "said")
        return {"args": {}, "attributes": {name: getattr(self, name) for name in names}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        figures = self.trainer.rollout_figures
        reward, share = figures.get("reward"), figures.get("zero_variance_share", 0.0)
        if reward is not None:
            self.extremes = [min([reward, *self.extremes]), max([reward, *self.extremes])]
        self.seen_content |= any(figures.get(f"reward/{name}") for name in self.content)
        if share is not None:  # None: too few rewards are known to tell
            self.steps_without = 0 if share < 1.0 else self.steps_without + 1
        learns_only_form = bool(self.content) and not self.seen_content
        if self.limit and self.steps_without >= self.limit:
            what = f"nothing was learned in the last {self.steps_without} steps: in each group all rewards were equal"
            samples = "read samples/ to see what the model tries"
            if self.extremes == [0, 0] or learns_only_form:
                kind = "reward" if self.extremes == [0, 0] else f"reward for content ({', '.join(self.content)})"
                what += f", and every {kind} since the first step was 0: the model never does what is asked"
                fix = f"{WARM_UP_FIX}. {samples}"
            else:
                what += f" (mean reward {self.trainer.rollout_figures['reward'] or 0:.3g})"
                fix = (
                    "stop here or take harder prompts where that is the highest reward; otherwise take easier prompts, "
                    "or a reward that pays parts of an answer; more grpo.num_generations and a higher grpo.temperature "
                    f"make answers differ. {samples}; grpo.stop_without_signal=0 goes on"
                )
            raise RunError(what, where=f"step {state.global_step}", fix=fix)
        self._check(figures)
        # Rewards for form have a signal, so that the limit does not end a run without a right answer.
        is_due = len(self._recent.get("reward", ())) >= MEAN_WINDOW and self.extremes != [0, 0]
        if is_due and self.warns and learns_only_form and "form alone" not in self.said:
            self.said.append("form alone")
            what = f"since the first step no answer got a reward for content ({', '.join(self.content)})"
            log.say(f"warning: {what}: only form is learned\n  fix: {WARM_UP_FIX}", "signal")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        names = ("entropy", "kl", "sampler_kl")
        self._check({**{name: logs.get(name) for name in names}, "policy_clip_share": read_policy_clip_share(logs)})

    def _check(self, figures: Mapping[str, float | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._recent.setdefault(name, deque(maxlen=MEAN_WINDOW)).append(value)
        for problem in SIGNAL_PROBLEMS:
            values = self._recent.get(problem.figure, ())
            if figures.get(problem.figure) is None or len(values) < MEAN_WINDOW:
                continue
            now = fmean(values)
            first = self.first.setdefault(problem.figure, now)
            if self.warns and problem.name not in self.said and problem.is_present(first, now):
                self.said.append(problem.name)
                log.say(f"warning: {problem.what.format(first=first, now=now)}\n  fix: {problem.fix}", "signal")


def read_policy_clip_share(logs: Mapping[str, Any]) -> float | None:
    """Read the share of tokens with a clipped ratio from TRL's logs; None for a loss without clipping."""
    names = ("clip_ratio/region_mean", "cispo_clip_ratio")
    return next((logs[name] for name in names if logs.get(name) is not None), None)
