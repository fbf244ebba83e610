"""Held-out problems played without a hint, with the static one and with the guide's: who has learned what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.load import Prompts
from sftplay.evaluate.evaluate import ready_to_answer
from sftplay.evaluate.rewarded import spread
from sftplay.heartbeat import Heartbeat
from sftplay.tasks.score.episodes.figures import diagnosis
from sftplay.tasks.score.episodes.judge import EpisodeJudge, describe, expect_known
from sftplay.tasks.score.episodes.play import Hints, Player
from sftplay.tasks.score.episodes.samples import line_of, write_lines
from sftplay.tasks.score.finished.cast import FinishedCast

Kind = Literal["none", "static", "model"]

HINTS: dict[Kind, Hints] = {"none": "empty", "static": "static", "model": "own"}
"""Kind of guidance -> what the player is asked for."""

SHOWN = ("acc_t1", "acc_t2", "delta", "i2c", "c2i")


def kinds_of(cfg: RunConfig) -> list[Kind]:
    """Kinds of guidance that a run can be played with; the guide's where it has one."""
    return [kind for kind in HINTS if kind != "model" or cfg.score.guidance in ("model", "model_trained")]


def measure_ablation(cast: FinishedCast, prompts: Prompts, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Play the held-out problems with each kind of hint; write `path` and every episode beside it, return the figures.

    The run's own kind gives the figures at the top; `hints` holds those of each kind.
    """
    score, tag = cfg.score, path.stem
    own = score.guidance if score.guidance in ("none", "static") else "model"
    measured = spread(prompts.held_out if len(prompts.held_out) else prompts.train, cfg.eval.limit)
    questions = [question for question in measured for _ in range(score.eval_samples)]
    log.say(f"playing {len(questions):,} episodes with each kind of hint ({tag})", "eval")
    at_once = {"score.generation_rows": score.generation_rows or cfg.eval.batch_size}
    player = Player(cfg.with_values(at_once, "eval"), cast, renderer=prompts.renderer)
    tokenizer, lines, by_kind = prompts.renderer.tokenizer, list[dict[str, Any]](), dict[str, dict[str, Any]]()
    with EpisodeJudge(cfg, columns=prompts.report["columns"], tokenizer=tokenizer) as judge:
        firsts = None  # they are the same with each kind of hint
        for kind in kinds_of(cfg):
            with ready_to_answer(cast.model, cfg):
                episodes = player.play(
                    questions,
                    numbers=range(len(questions)),
                    seed=cfg.seed,
                    temperature=score.eval_temperature,
                    hints=HINTS[kind],
                    firsts=firsts,
                )
            firsts = [episode.first for episode in episodes]
            verdicts = judge.judge(episodes, heartbeat=Heartbeat())
            expect_known(verdicts)
            by_kind[kind] = describe(verdicts)
            told = [line_of(*pair, tokenizer=tokenizer) for pair in zip(episodes, verdicts, strict=True)]
            lines += [{"hints": kind, "number": number, **line} for number, line in enumerate(told)]
    figures = {"n": len(questions), **by_kind[own], "diagnosis": diagnosis(by_kind[own]), "hints": by_kind}
    write_lines(path.with_suffix(".jsonl"), lines)
    write_text(path, json.dumps(figures, indent=1) + "\n")
    log.say(f"{tag}: acc_t1 {figures['acc_t1']:.3f}, acc_t2 {figures['acc_t2']:.3f}: {figures['diagnosis']}", "eval")
    return figures


def ablation_table(figures: dict[str, dict[str, Any]]) -> str:
    """A line for each kind of hint of each side, `before` and `after`."""
    names = {"before": "base", "after": "tuned"}
    hints = {"none": "no hint", "static": "static", "model": "guide"}
    lines = [f"{'':<8}{'hint':<10}" + "".join(f"{name:>9}" for name in SHOWN)]
    for side, of in figures.items():
        for kind, measured in of["hints"].items():
            cells = "".join(f"{measured[name]:9.3f}" for name in SHOWN)
            lines.append(f"{names[side]:<8}{hints[kind]:<10}{cells}")
    lines += [f"{names[side]}: {of['diagnosis']}" for side, of in figures.items()]
    return "\n".join([*lines, f"{next(iter(figures.values()))['n']} episodes each"])
