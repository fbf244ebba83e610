"""Problems that a person types, each played as an episode whose three texts appear as they are written.

It reads no keyboard and prints nothing; `commands/use/infer` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Generator as Pieces
from dataclasses import replace
from threading import Event
from typing import Any

from sftplay.config.schema.run import RunConfig
from sftplay.errors import DataError, RunError
from sftplay.generate.chat import COMMANDS
from sftplay.generate.generate import Generator, stream_answer
from sftplay.generate.sampling import seed_of
from sftplay.tasks.score.episodes.cast import Role
from sftplay.tasks.score.episodes.templates import Template, make_templates, tokens_of
from sftplay.tasks.score.finished.cast import FinishedCast

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
