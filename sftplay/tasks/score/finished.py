"""Use a finished run of task score: its ablation, episodes of a file's rows, a talk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Pieces
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Literal

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.load import Prompts, not_asked
from sftplay.data.prompts.prompt import Prompt
from sftplay.data.prompts.questions import Question
from sftplay.errors import DataError, RunError
from sftplay.evaluate.evaluate import ready_to_answer
from sftplay.evaluate.rewarded import evenly_spaced
from sftplay.generate.chat import COMMANDS
from sftplay.generate.generate import Generator, stream_answer
from sftplay.generate.prompts import PromptFile
from sftplay.generate.sampling import Sampling, seed_of
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import RunFolder
from sftplay.model.load import load_result, load_untrained
from sftplay.model.weights import frozen_dtype, open_model
from sftplay.tasks.score.episode_rewards import EpisodeJudge, describe, expect_known, line_of, write_lines
from sftplay.tasks.score.role_models import ADAPTERS, Role
from sftplay.tasks.score.sample_episodes import Hints, Player, Template, diagnosis, make_templates, text_of, tokens_of


class FinishedCast:
    """Speaks with the adapter of each role, with a guide's own model, and with the base where a role has neither."""

    def __init__(self, model: Any, *, guide: Any = None) -> None:
        self.model, self._guide = model, guide
        self._adapters = getattr(model, "peft_config", {})

    @contextmanager
    def speaking(self, role: Role) -> Iterator[Any]:
        """The model of this role."""
        if role == "guide" and self._guide is not None:
            yield self._guide
        elif ADAPTERS[role] in self._adapters:
            self.model.set_adapter(ADAPTERS[role])
            yield self.model
        elif self._adapters:
            with self.model.disable_adapter():
                yield self.model
        else:
            yield self.model


def open_cast(cfg: RunConfig, folder: RunFolder, *, untrained: bool = False) -> FinishedCast:
    """The result of a run, or, `untrained`, what the run started from.

    Raises:
        MachineError: the weights cannot be read.
    """
    if untrained:
        return FinishedCast(load_untrained(cfg, folder.path))
    model = load_result(cfg, folder.path)
    name = ADAPTERS["guide"]
    if (adapter := folder.path / "adapter" / name).is_dir():
        model.load_adapter(str(adapter), name)
    whole = folder.path / "model" / name
    guide = open_model(cfg, str(whole), dtype=frozen_dtype(cfg)).eval() if whole.is_dir() else None
    return FinishedCast(model.eval(), guide=guide)


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
    measured = evenly_spaced(prompts.held_out if len(prompts.held_out) else prompts.train, cfg.eval.limit)
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


class RowPlayer:
    """Plays batches of rows; a row's number and the seed alone decide its tokens."""

    def __init__(self, cfg: RunConfig, cast: FinishedCast, *, renderer: Any, sampling: Sampling) -> None:
        self._cfg, self._cast, self._sampling = cfg, cast, sampling
        self._player = Player(cfg, cast, renderer=renderer, sampling=partial(Sampling, top_p=sampling.top_p))

    def answers(self, batch: Sequence[tuple[Prompt, list[int]]]) -> list[dict[str, str]]:
        """What each row gets: `first_answer`, `hint`, and `response`, which is the second answer."""
        with ready_to_answer(self._cast.model, self._cfg):
            episodes = self._player.play(
                [Question(row.number, ids, row.question, {}) for row, ids in batch],
                numbers=[row.number for row, _ in batch],
                seed=self._sampling.seed,
                temperature=self._sampling.temperature,
            )
        tokenizer = self._player.tokenizer
        return [
            {
                "first_answer": text_of(tokenizer, episode.first.ids),
                "hint": text_of(tokenizer, episode.hint_ids),
                "response": text_of(tokenizer, episode.second.ids),
            }
            for episode in episodes
        ]


def check_problems(questions: PromptFile, renderer: Any, *, cfg: RunConfig) -> None:
    """Make sure that every row has room for both answers and the hint, before any is played.

    Raises:
        DataError: one has not, or has more than a question, with its place.
    """
    for question in questions:
        if more := question.beside_question(cfg.data.system):
            raise DataError(not_asked(more), where=str(question.source), fix="put what matters into the last turn")
        n_tokens = len(question.prompt(renderer))
        if n_tokens > cfg.prompt_tokens:
            what = f"has {n_tokens} tokens; beside answers of {cfg.score.max_new_tokens} and a hint there is room for "
            fix = "shorten the row, or the answers: MAX_NEW_TOKENS="
            raise DataError(f"{what}{cfg.prompt_tokens}", where=str(question.source), fix=fix)


HELP = """\
/temperature X    0 takes the likeliest words, 1 draws them as the model weighs them; without X it is shown
/max N            longest answer in tokens; without N it is shown
/help             this list
/quit             end, as an empty line or the end of input does
Each line is a problem of its own. A line that begins with a space is said as it is. Ctrl-C ends an episode; at the
prompt it ends the program."""


class EpisodeTalk:
    """Episodes one after another; none knows of those before it. The nth always draws the same random numbers."""

    def __init__(self, cfg: RunConfig, cast: FinishedCast, *, renderer: Any, generator: Generator) -> None:
        """`generator` says how long an answer may be and how its tokens are chosen."""
        self.cfg, self.cast, self.generator = cfg, cast, generator
        self.templates = make_templates(cfg.score.prompts, renderer, system=cfg.data.system)
        self.n_asked = 0
        self.commands: dict[str, Callable[[Any, str], str]] = {
            **{name: COMMANDS[name] for name in ("/temperature", "/max")},
            "/help": lambda talk, rest: HELP,
        }

    def ask(self, text: str, stop: Event, *, note: Callable[[str], None]) -> Iterator[str]:
        """Parts of the three texts with a heading before each, until `stop` is set.

        Raises:
            DataError: the problem is too long.
        """
        self.n_asked += 1
        score, longest = self.cfg.score, self.generator.max_new_tokens
        known: dict[str, Sequence[int]] = {"problem": tokens_of(self.generator.tokenizer, text)}
        yield "[first answer]\n"
        known["attempt"] = yield from self._say(
            self.templates.solve, known, role="solver", turn=1, longest=longest, stop=stop
        )
        if stop.is_set():
            return
        if score.guidance in ("none", "static"):
            hint = score.prompts.static_hint if score.guidance == "static" else ""
            yield f"\n[hint, of score.guidance {score.guidance}]\n{hint}"
            known["hint"] = tokens_of(self.generator.tokenizer, hint)
        else:
            yield "\n[hint]\n"
            known["hint"] = yield from self._say(
                self.templates.guide, known, role="guide", turn=2, longest=score.max_hint_tokens, stop=stop
            )
        if stop.is_set():
            return
        yield "\n[second answer]\n"
        yield from self._say(self.templates.revise, known, role="solver", turn=3, longest=longest, stop=stop)

    def _say(
        self,
        template: Template,
        known: dict[str, Sequence[int]],
        *,
        role: Role,
        turn: int,
        longest: int,
        stop: Event,
    ) -> Pieces[str, None, list[int]]:
        """Parts of one text; its tokens without the end token."""
        try:
            prompt = template.filled(known, room=self.cfg.model.max_seq_len - longest)
        except RunError as error:
            raise DataError(error.what, fix="say it in fewer words, or ask for shorter answers: /max N") from error
        sampling = replace(self.generator.sampling, seed=seed_of(self.generator.sampling.seed, turn))
        with self.cast.speaking(role) as model:
            generator = replace(self.generator, model=model, max_new_tokens=longest, sampling=sampling)
            ids = yield from stream_answer(generator, prompt, row=self.n_asked, stop=stop)
        return ids[:-1] if ids and ids[-1] in generator.all_end_ids else ids
