"""Completions of several turns: tools and an environment answer what the model samples, in one stream of tokens."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from sftplay import log
from sftplay.data.records import Call, Message, chat_from_json
from sftplay.environments.dialogue import Dialogue, Malformed
from sftplay.environments.processes import CLOSE_S, EnvironmentHost, EnvironmentProcess, EnvironmentSpec, Failed
from sftplay.errors import DataError
from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import ENVIRONMENT_REWARD, RewardValues

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig
    from sftplay.data.load_prompts import Prompts, Question

Ended = Literal["done", "answer", "turns", "tokens", "end_token", "failure"]
"""Why a completion ended: the environment said done; the model answered without a call and there is no environment; at
max_turns; at max_completion_length; with a token that does not end a turn in the chat template; the environment failed.
"""

Sample = Callable[[list[list[int]], int], tuple[list[list[int]], list[list[float]] | None]]
"""Samples one turn: prompts of token ids and the most new tokens -> ids of each turn, and their log-probabilities."""

MOST_AT_ONCE, FEWEST_AT_ONCE = 16, 4
"""Requests to environments that run at the same time: as many as cores, within these."""

BEAT_S = 5.0
"""Time between two looks for answers."""

SAID = 8  # different failures that are said; all are counted


@dataclass(kw_only=True)
class TurnRecord:
    """What happened in a completion; plain data, which ranks exchange."""

    turns: list[dict[str, Any]] = field(default_factory=list)
    """The messages behind the prompt: {role, content}, with the name of the tool where it is a result."""

    n_turns: int = 0  # turns of the model
    n_calls: int = 0
    n_failures: int = 0  # calls that failed
    environment_tokens: int = 0
    reward: float = 0.0  # the sum of what the environment gave
    ended: Ended | None = None
    failure: str = ""  # why the environment failed; then nothing is known of the completion

    @property
    def answer(self) -> str:
        """What the model wrote in its last turn."""
        return next((turn["content"] for turn in reversed(self.turns) if turn["role"] == "assistant"), "")

    def as_json(self) -> dict[str, Any]:
        """Return what files of samples and answers say of the turns."""
        failure = {"failure": self.failure} if self.failure else {}
        return {"turns": self.turns, "ended": self.ended, "tool_failures": self.n_failures, **failure}


class RolloutIds(list[int]):
    """The token ids of a completion, all turns joined, with what else is known of it. TRL and the kit hand completions
    on as lists of ids; so what belongs to one stays with it."""

    def __init__(self, prompt_ids: list[int]) -> None:
        super().__init__()
        self.prompt_ids = prompt_ids
        self.mask: list[int] = []  # 1 where the model wrote the token
        self.logps: list[float] = []
        self.turn_logps: list[tuple[int, list[float]]] = []
        """Where each turn of the model begins, and what the sampler said of its tokens."""

        self.record = TurnRecord()

    @property
    def written(self) -> list[int]:
        """The tokens that the model wrote."""
        return [token for token, flag in zip(self, self.mask, strict=True) if flag]

    @property
    def n_sampled(self) -> int:
        """Tokens that the model wrote."""
        return sum(self.mask)


class Rollouts:
    """Runs completions of several turns. A context manager: its end closes the processes."""

    def __init__(
        self, spec: EnvironmentSpec, dialogue: Dialogue, *, max_turns: int, max_tokens: int, max_prompt_tokens: int,
        end_ids: Sequence[int], seed: int,
    ) -> None:  # fmt: skip
        """`end_ids` are the tokens at which sampling stops; `max_tokens` counts all turns of a completion.
        Raise what `EnvironmentHost` raises.
        """
        self.dialogue, self.max_turns, self.max_tokens, self.seed = dialogue, max_turns, max_tokens, seed
        self.max_prompt_tokens, self.end_ids = max_prompt_tokens, frozenset(end_ids)
        self.has_environment = spec.environment is not None
        self.beat: Callable[[], object] = lambda: None
        """Called now and then while answers come: a rollout batch may take longer than a run may be silent."""

        self.n_answers = 0  # of environments and tools so far

        self.failures: Counter[str] = Counter()
        """What failed, and how often."""

        self.host = EnvironmentHost(spec)
        at_once = min(MOST_AT_ONCE, max(FEWEST_AT_ONCE, len(os.sched_getaffinity(0))))
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="environment")

    @classmethod
    def open(cls, cfg: RunConfig, prompts: Prompts, *, end_ids: Sequence[int]) -> Rollouts | None:
        """Return what runs completions of several turns; None where the config has neither environment nor tools.

        Raises:
            ConfigError, MachineError: the environment or a tool cannot be opened.
            DataError: the chat template is refused for turns.
        """
        spec = EnvironmentSpec.from_config(cfg)
        if spec is None:
            return None
        return cls(
            spec, prove_dialogue(cfg, prompts), max_turns=cfg.grpo.max_turns, max_tokens=cfg.grpo.max_completion_length,
            max_prompt_tokens=cfg.prompt_tokens, end_ids=end_ids, seed=cfg.seed,
        )  # fmt: skip

    def run(
        self, questions: Sequence[Question], sample: Sample, *, count_going: Callable[[int], int] = int
    ) -> list[RolloutIds]:
        """Return a completion of each question, in order.

        `count_going` takes the number of completions that go on here and returns how many are sampled in the next turn:
        more where ranks sample in lockstep. The first prompt fills the places that are over.
        """
        rollouts = [_Rollout(self, question) for question in questions]
        try:
            self._all(_Rollout.begin, rollouts)
            going = [rollout for rollout in rollouts if rollout.is_going]
            while n_sampled := count_going(len(going)):
                prompts = [rollout.ids.prompt_ids + rollout.ids for rollout in going]
                prompts += [questions[0].ids] * (n_sampled - len(going))
                room = max([self.max_tokens - len(rollout.ids) for rollout in going], default=1)
                sampled, logps = sample(prompts, room)
                for n, rollout in enumerate(going):
                    rollout.take(sampled[n], None if logps is None else logps[n])
                self._all(_Rollout.answer, going)
                going = [rollout for rollout in going if rollout.is_going]
        finally:
            self._all(_Rollout.close, rollouts)
        for rollout in rollouts:
            if not rollout.ids:  # its environment failed before the first turn: one token without a loss
                rollout.ids.append(min(self.end_ids))
                rollout.ids.mask.append(0)
                rollout.ids.logps.append(0.0)
        return [rollout.ids for rollout in rollouts]

    def note_failure(self, what: str) -> None:
        """Count a failure, and say the first few different ones."""
        self.failures[what] += 1
        if self.failures[what] == 1 and len(self.failures) <= SAID:
            more = "; further ones are only counted" if len(self.failures) == SAID else ""
            log.say(f"warning: {what}{more}", "turns")

    def close(self) -> None:
        """End all processes."""
        self._threads.shutdown()
        self.host.close()

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self, work: Callable[[_Rollout], None], rollouts: Sequence[_Rollout]) -> None:
        going, seen = {self._threads.submit(work, rollout) for rollout in rollouts}, -1
        try:
            while going:
                done, going = wait(going, BEAT_S, FIRST_COMPLETED)
                if done or self.n_answers != seen:  # where nothing comes, the run is to be seen as silent
                    seen = self.n_answers
                    self.beat()
                for future in done:
                    future.result()
        finally:
            for future in going:
                future.cancel()


def prove_dialogue(cfg: RunConfig, prompts: Prompts) -> Dialogue:
    """Return the dialogue of the prompts' chat template; raise DataError where the template is refused for turns."""
    named = f"of {cfg.model.name} (data.template: {cfg.data.template})"
    has_environment = cfg.grpo.environment is not None
    return Dialogue.prove(prompts.renderer, tools=prompts.tools, has_environment=has_environment, named=named)


class _Rollout:
    """One completion under way. Its methods but `take` run in threads, each completion in one at a time."""

    def __init__(self, rollouts: Rollouts, question: Question) -> None:
        self.shared, self.question, self.ids = rollouts, question, RolloutIds(list(question.ids))
        self.record = self.ids.record
        self.environment: EnvironmentProcess | None = None
        self.tools: EnvironmentProcess | None = None
        self._turn: list[int] = []  # the ids of the model's last turn
        self._seed = (rollouts.seed << 32) + question.row

    @property
    def is_going(self) -> bool:
        return self.record.ended is None

    def begin(self) -> None:
        """Start the environment, and add what it says to the prompt."""
        if not self.shared.has_environment:
            return
        try:
            self.environment = self.shared.host.fork(self._seed)
            text = self.environment.ask(reset=self.question.columns)
            if text:
                self.ids.prompt_ids = self._prompt_with(text)
        except (Failed, DataError) as error:
            self._fail(f"reset {error.what if isinstance(error, DataError) else error}")

    def take(self, ids: list[int], logps: list[float] | None) -> None:
        """Append a sampled turn, cut at the completion's limit."""
        self._turn = ids = ids[: self.shared.max_tokens - len(self.ids)]
        self.ids.turn_logps += [] if logps is None else [(len(self.ids), logps)]
        self.ids.extend(ids)
        self.ids.mask += [1] * len(ids)
        self.ids.logps += [0.0] * len(ids) if logps is None else logps[: len(ids)]
        self.record.n_turns += 1

    def answer(self) -> None:
        """Have the turn answered by the tools or the environment, and append what they say, or end the completion."""
        dialogue, decode, turn = self.shared.dialogue, self.shared.dialogue.renderer.tokenizer.decode, self._turn
        is_cut = not turn or turn[-1] not in self.shared.end_ids
        text = decode(turn, skip_special_tokens=True)
        self.record.turns.append({"role": "assistant", "content": text})
        calls = [] if is_cut else dialogue.read_calls(decode(turn[:-1]))
        limit: Ended | None = (
            "tokens" if is_cut else ("turns" if self.record.n_turns >= self.shared.max_turns else None)
        )
        if calls:
            if limit:
                self.record.ended = limit
                return
            asked, answers = self._call(calls)
        elif self.environment is None:
            self.record.ended = "tokens" if is_cut else "answer"
            return
        else:
            asked, answers = [], self._step(text, limit)
        if self.is_going:
            self._append(asked, answers)

    def close(self) -> None:
        """Let the environment close, and end the processes."""
        for process in (self.environment, self.tools):
            if process is None:
                continue
            try:
                if process is self.environment and not process.is_over:
                    process.ask(CLOSE_S, close=True)
            except Failed as error:
                self.shared.note_failure(f"the environment's close {error}")
            process.end()

    def _prompt_with(self, text: str) -> list[int]:
        *before, last = chat_from_json({
            "messages": [*self.question.turns], "path": "", "line": 0, "record": 0, "learned_from": 0, "tools": "",
            "columns": "",
        }).messages  # fmt: skip
        turns = (*before, replace(last, content=f"{last.content}\n\n{text}" if last.content else text))
        ids = self.shared.dialogue.renderer.prompt_ids(turns, self.shared.dialogue.tools)
        if len(ids) > self.shared.max_prompt_tokens:
            raise Failed(f"made the prompt {len(ids):,} tokens long; it may have {self.shared.max_prompt_tokens:,}")
        return ids

    def _step(self, text: str, limit: Ended | None) -> list[Message]:
        assert self.environment is not None
        try:
            said, reward, is_done = self.environment.ask(step=text)
        except Failed as error:
            self._fail(f"step {error}")
            return []
        self.record.reward += reward or 0.0
        if is_done or limit:
            self.record.ended = "done" if is_done else limit
            if said and is_done:
                self.record.turns.append({"role": "user", "content": said})
            return []
        return [Message("user", said)]

    def _call(self, calls: Sequence[Call | Malformed]) -> tuple[list[Call], list[Message]]:
        """Run the calls of a turn. What fails is answered by an error that the model reads."""
        asked, answers = [], []
        for number, call in enumerate(calls):
            if isinstance(call, Call) and not call.name.isidentifier():  # some of these no template can write
                call = Malformed("is no tool: a name has letters, digits and _")
            named = Call("unknown", "{}", "") if isinstance(call, Malformed) else call
            named = replace(named, id=f"call{number:05}")
            self.record.n_calls += 1
            try:
                if isinstance(call, Malformed):
                    raise Failed(call.reason)
                said = self._ask_tool(call)
            except Failed as error:
                self.record.n_failures += 1
                self.shared.note_failure(f"a call of {named.name} failed: {error}")
                said = f"error: {named.name} {error}"
            asked.append(named)
            answers.append(Message("tool", said, name=named.name, call_id=named.id))
        if self.environment is not None and self.environment.is_over and self.is_going:
            self._fail("ended in a call of one of its tools")
        return asked, answers

    def _ask_tool(self, call: Call) -> str:
        host = self.shared.host
        if call.name in host.owned and self.environment is not None:
            process = self.environment
        else:
            if self.tools is None or self.tools.is_over:  # the first call, or the one before hung or died
                self.tools = host.fork(self._seed)
            process = self.tools
        try:
            return str(process.ask(call=call.name, arguments=json.loads(call.arguments)))
        finally:
            self.shared.n_answers += 1

    def _append(self, asked: Sequence[Call], answers: Sequence[Message]) -> None:
        try:
            end, ids = self.shared.dialogue.answer_ids(answers, asked)
        except DataError as error:
            if asked:  # a text of a tool that cannot be written
                self.record.n_failures += 1
                answers = [replace(answer, content="error: the result cannot be written here") for answer in answers]
                asked = [replace(call, arguments="{}") for call in asked]  # or of what the model wrote
                end, ids = self.shared.dialogue.answer_ids(answers, asked)
            else:
                self._fail(f"step returned a text that cannot be written: {error.what}")
                return
        if self._turn[-1] != end:
            self.record.ended = "end_token"
        elif len(self.ids) + len(ids) >= self.shared.max_tokens:
            self.record.ended = "tokens"
        else:
            self.ids.extend(ids)
            self.ids.mask += [0] * len(ids)
            self.ids.logps += [0.0] * len(ids)
            self.record.environment_tokens += len(ids)
            for answer in answers:
                name = {"name": answer.name} if answer.name else {}
                self.record.turns.append({"role": answer.role, **name, "content": answer.content})

    def _fail(self, what: str) -> None:
        self.record.ended, self.record.failure = "failure", f"the environment failed: {what}"
        self.shared.note_failure(f"the environment failed: {what}; nothing is learned from this completion")


def compute_turn_figures(records: Sequence[TurnRecord]) -> dict[str, float | None]:
    """Compute the figures of completions for a line of metrics: means, and the shares by the way they ended."""
    n, ends = len(records), Counter(record.ended for record in records)
    if not n:
        return {}
    return {
        "turns": sum(record.n_turns for record in records) / n,
        "tool_calls": sum(record.n_calls for record in records) / n,
        "tool_failures": sum(record.n_failures for record in records) / n,
        "environment_tokens": sum(record.environment_tokens for record in records) / n,
        **{f"ended/{end}_share": ends[end] / n for end in get_args(Ended)},
    }


def turn_columns(records: Sequence[TurnRecord]) -> dict[str, list[Any]]:
    """Return the columns that rewards get of completions of several turns, in addition to those of the rows."""
    if not records:
        return {}
    return {ENVIRONMENT_REWARD: [record.reward for record in records], "turns": [record.turns for record in records]}


def abstain_where_failed(rewards: BatchRewards, records: Sequence[TurnRecord]) -> BatchRewards:
    """Return the rewards without values where the environment failed: nothing is known of such a completion."""
    reasons = list(dict.fromkeys(record.failure for record in records if record.failure))
    if not reasons:
        return rewards
    by_name = {
        name: RewardValues(
            [None if record.failure else value for record, value in zip(records, column.values, strict=True)],
            [*column.reasons, *reasons],
        )
        for name, column in rewards.by_name.items()
    }
    return replace(rewards, by_name=by_name)
