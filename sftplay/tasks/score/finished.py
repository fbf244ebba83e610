"""Use a finished run of task score: ablation of hints, episodes of a file's rows, chat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as TextStream
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Prompts, Question, not_asked
from sftplay.data.prompts import Prompt
from sftplay.errors import DataError, RunError
from sftplay.evaluate.evaluate import evenly_spaced, ready_to_answer
from sftplay.generate.chat import COMMANDS
from sftplay.generate.generate import Generator, Sampling, derive_seed, stream_answer
from sftplay.generate.prompts import PromptFile
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import RunFolder
from sftplay.model.load import load_result, load_untrained
from sftplay.model.weights import frozen_dtype, open_model
from sftplay.tasks.score.evaluation import RewardScorer, describe, expect_known, format_episode
from sftplay.tasks.score.role_models import ADAPTER_NAMES, Role
from sftplay.tasks.score.sample_episodes import (
    EpisodeSampler,
    HintKind,
    Template,
    decode_text,
    diagnose,
    make_templates,
    tokenize_texts,
)
from sftplay.train.metrics import write_measured


class FinishedRoleModels:
    """The models of a finished run: a role's adapter, a separate guide, or the base where a role has neither."""

    def __init__(self, model: Any, *, guide: Any = None) -> None:
        self.model, self._guide = model, guide
        self._adapters = getattr(model, "peft_config", {})

    @contextmanager
    def use_role(self, role: Role) -> Iterator[Any]:
        if role == "guide" and self._guide is not None:
            yield self._guide
        elif ADAPTER_NAMES[role] in self._adapters:
            self.model.set_adapter(ADAPTER_NAMES[role])
            yield self.model
        elif self._adapters:
            with self.model.disable_adapter():
                yield self.model
        else:
            yield self.model


def open_role_models(cfg: RunConfig, folder: RunFolder, *, untrained: bool = False) -> FinishedRoleModels:
    """Load the result of a run, or with `untrained` the model that the run started from.

    Raise MachineError where the weights cannot be read.
    """
    if untrained:
        return FinishedRoleModels(load_untrained(cfg, folder.path))
    model = load_result(cfg, folder.path)
    name = ADAPTER_NAMES["guide"]
    if (adapter := folder.path / "adapter" / name).is_dir():
        model.load_adapter(str(adapter), name)
    separate = folder.path / "model" / name
    guide = open_model(cfg, str(separate), dtype=frozen_dtype(cfg)).eval() if separate.is_dir() else None
    return FinishedRoleModels(model.eval(), guide=guide)


def measure_ablation(
    role_models: FinishedRoleModels, prompts: Prompts, *, cfg: RunConfig, path: Path
) -> dict[str, Any]:
    """Sample the held-out problems with each source of hints; write figures to `path`, and episodes next to it.

    The top-level figures are those of the run's source of hints; `hints` has the figures of each source.
    """
    score, tag, tokenizer = cfg.score, path.stem, prompts.renderer.tokenizer
    has_guide = score.guidance not in ("none", "static")
    measured = evenly_spaced(prompts.held_out if len(prompts.held_out) else prompts.train, cfg.eval.limit)
    questions = [question for question in measured for _ in range(score.eval_samples)]
    log.say(f"playing {len(questions):,} episodes with each kind of hint ({tag})", "eval")
    rows = {"score.generation_rows": score.generation_rows or cfg.eval.batch_size}
    episode_sampler = EpisodeSampler(cfg.with_values(rows, "eval"), role_models, renderer=prompts.renderer)
    settings: dict[str, Any] = {"numbers": range(len(questions)), "seed": cfg.seed}
    settings["temperature"] = score.eval_temperature
    hint_kinds: dict[str, HintKind] = {"none": "empty", "static": "static", **({"model": "own"} if has_guide else {})}
    lines, by_source = list[dict[str, Any]](), dict[str, dict[str, Any]]()
    with RewardScorer(cfg, columns=prompts.report["columns"], tokenizer=tokenizer) as reward_scorer:
        firsts = None  # the same with each source of hints
        for source, kind in hint_kinds.items():
            with ready_to_answer(role_models.model, cfg):
                episodes = episode_sampler.sample_episodes(questions, hints=kind, firsts=firsts, **settings)
            firsts = [episode.first for episode in episodes]
            results = reward_scorer.score(episodes, heartbeat=Heartbeat())
            expect_known(results)
            by_source[source] = describe(results)
            formatted = [format_episode(*pair, tokenizer=tokenizer) for pair in zip(episodes, results, strict=True)]
            lines += [{"hints": source, "number": number, **line} for number, line in enumerate(formatted)]
    run_figures = by_source["model" if has_guide else score.guidance]
    figures = {"n": len(questions), **run_figures, "diagnosis": diagnose(run_figures), "hints": by_source}
    write_measured(path, figures, lines=lines)
    log.say(f"{tag}: acc_t1 {figures['acc_t1']:.3f}, acc_t2 {figures['acc_t2']:.3f}: {figures['diagnosis']}", "eval")
    return figures


def ablation_table(figures: dict[str, dict[str, Any]]) -> str:
    """Format a line for each source of hints, `before` and `after` training."""
    names, metrics = {"before": "base", "after": "tuned"}, ("acc_t1", "acc_t2", "delta", "i2c", "c2i")
    hints = {"none": "no hint", "static": "static", "model": "guide"}
    lines = [f"{'':<8}{'hint':<10}" + "".join(f"{name:>9}" for name in metrics)]
    for side, measured_side in figures.items():
        for kind, measured in measured_side["hints"].items():
            cells = "".join(f"{measured[name]:9.3f}" for name in metrics)
            lines.append(f"{names[side]:<8}{hints[kind]:<10}{cells}")
    lines += [f"{names[side]}: {measured_side['diagnosis']}" for side, measured_side in figures.items()]
    return "\n".join([*lines, f"{next(iter(figures.values()))['n']} episodes each"])


class RowEpisodeSampler:
    """Samples episodes of rows in batches; a row's number and the seed alone decide the tokens."""

    def __init__(self, cfg: RunConfig, role_models: FinishedRoleModels, *, renderer: Any, sampling: Sampling) -> None:
        self._cfg, self._role_models, self._sampling = cfg, role_models, sampling
        self._episode_sampler = EpisodeSampler(
            cfg, role_models, renderer=renderer, sampling=partial(Sampling, top_p=sampling.top_p)
        )

    def sample_answers(self, batch: Sequence[tuple[Prompt, list[int]]]) -> list[dict[str, str]]:
        """Sample `first_answer`, `hint`, and `response` (the second answer) of the rows."""
        sampling, tokenizer = self._sampling, self._episode_sampler.tokenizer
        questions = [Question(row.number, ids, row.question, {}) for row, ids in batch]
        numbers = [row.number for row, _ in batch]
        with ready_to_answer(self._role_models.model, self._cfg):
            episodes = self._episode_sampler.sample_episodes(
                questions, numbers=numbers, seed=sampling.seed, temperature=sampling.temperature
            )
        return [
            {
                "first_answer": decode_text(tokenizer, episode.first.ids),
                "hint": decode_text(tokenizer, episode.hint_ids),
                "response": decode_text(tokenizer, episode.second.ids),
            }
            for episode in episodes
        ]


def check_problems(questions: PromptFile, renderer: Any, *, cfg: RunConfig) -> None:
    """Raise DataError, before any row is sampled, where one has no room for both answers and the hint, or has more than
    a question."""
    for question in questions:
        if more := question.extra_content(cfg.data.system):
            raise DataError(not_asked(more), where=str(question.source), fix="put what matters into the last turn")
        n_tokens = len(question.prompt(renderer))
        if n_tokens > cfg.prompt_tokens:
            what = f"has {n_tokens} tokens; next to answers of {cfg.score.max_new_tokens} and a hint there is room for "
            fix = "shorten the row, or the answers: MAX_NEW_TOKENS="
            raise DataError(f"{what}{cfg.prompt_tokens}", where=str(question.source), fix=fix)


HELP = """\
/temperature X    0 takes the likeliest words, 1 draws them as the model weighs them; without X it is shown
/max N            longest answer in tokens; without N it is shown
/help             this list
/quit             end, as an empty line or the end of input does
Each line is a problem of its own. A line that begins with a space is said as it is. Ctrl-C ends an episode; at the
prompt it ends the program."""


class EpisodeChat:
    """Chat of independent episodes. The nth episode always uses the same random numbers."""

    def __init__(self, cfg: RunConfig, role_models: FinishedRoleModels, *, renderer: Any, generator: Generator) -> None:
        """`generator` sets the most tokens of an answer and the sampling."""
        self.cfg, self.role_models, self.generator = cfg, role_models, generator
        self.templates = make_templates(cfg.score.prompts, renderer, system=cfg.data.system)
        self.n_asked = 0
        self.commands: dict[str, Callable[[Any, str], str]] = {
            **{name: COMMANDS[name] for name in ("/temperature", "/max")},
            "/help": lambda chat, rest: HELP,
        }

    def ask(self, text: str, stop: Event, *, notify: Callable[[str], None]) -> Iterator[str]:
        """Stream the three texts, with a heading before each, until `stop` is set.

        Raise DataError where the problem is too long.
        """
        self.n_asked += 1
        score, tokenizer = self.cfg.score, self.generator.tokenizer
        known: dict[str, Sequence[int]] = {"problem": tokenize_texts(tokenizer, [text])[0]}
        yield "[first answer]\n"
        known["attempt"] = yield from self._stream_text(self.templates.solve, known, turn=1, stop=stop)
        if stop.is_set():
            return
        if score.guidance in ("none", "static"):
            hint = score.prompts.static_hint if score.guidance == "static" else ""
            yield f"\n[hint, of score.guidance {score.guidance}]\n{hint}"
            (known["hint"],) = tokenize_texts(tokenizer, [hint])
        else:
            yield "\n[hint]\n"
            known["hint"] = yield from self._stream_text(self.templates.guide, known, turn=2, stop=stop)
        if stop.is_set():
            return
        yield "\n[second answer]\n"
        yield from self._stream_text(self.templates.revise, known, turn=3, stop=stop)

    def _stream_text(
        self, template: Template, known: dict[str, Sequence[int]], *, turn: int, stop: Event
    ) -> TextStream[str, None, list[int]]:
        """Stream one text; return the tokens without the end token. Turn 2 is the hint."""
        role: Role = "guide" if turn == 2 else "solver"
        longest = self.cfg.score.max_hint_tokens if turn == 2 else self.generator.max_new_tokens
        try:
            prompt = template.fill(known, max_tokens=self.cfg.model.max_seq_len - longest)
        except RunError as error:
            raise DataError(error.what, fix="say it in fewer words, or ask for shorter answers: /max N") from error
        sampling = replace(self.generator.sampling, seed=derive_seed(self.generator.sampling.seed, turn))
        with self.role_models.use_role(role) as model:
            generator = replace(self.generator, model=model, max_new_tokens=longest, sampling=sampling)
            ids = yield from stream_answer(generator, prompt, row=self.n_asked, stop=stop)
        return ids[:-1] if ids and ids[-1] in generator.all_end_ids else ids
