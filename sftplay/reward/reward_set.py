"""The rewards of a config together: every one asked about a batch, side by side, and what none of them may do."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sftplay.config.rewards import CODE_TESTS, RewardConfig
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, RunError
from sftplay.reward.calls import RewardValues, RewardWorker
from sftplay.reward.code_rewards import CodeTests, limits_of
from sftplay.reward.completions import Completion
from sftplay.reward.table import judges_form
from sftplay.sandbox.pool import Sandbox, count_workers

MOST_UNKNOWN = 0.05
"""Share of the answers of WINDOW calls for which a reward may have no value."""

WINDOW = 20

MOST_REASONS = 3


@dataclass(frozen=True, slots=True)
class BatchRewards:
    """The values of all rewards for a batch of completions."""

    by_name: dict[str, RewardValues]
    """In the order of the config. A value None means that nothing is known."""

    verdicts: list[dict[str, Any] | None]
    """What became of each completion's program (`how`, `status`, `passed`, `total`, ...); None without code_tests."""

    content: frozenset[str] = field(default_factory=frozenset)
    """Names of the rewards for content: without their values nothing is known of an answer's worth."""

    @classmethod
    def concatenate(cls, parts: Sequence[BatchRewards]) -> BatchRewards:
        """Concatenate the parts of a batch, for example those of all ranks, in order."""
        by_name = {}
        for name in parts[0].by_name:
            values_by_part = [part.by_name[name] for part in parts]
            reasons = list(dict.fromkeys(reason for scores in values_by_part for reason in scores.reasons))
            by_name[name] = RewardValues([value for scores in values_by_part for value in scores.values], reasons)
        return cls(by_name, [verdict for part in parts for verdict in part.verdicts], parts[0].content)


class RewardSet:
    """Opens the rewards of a config once and asks them many times. Use it as a context manager.

    Programs run in the sandbox's boxes, and every other reward in a process of its own, side by side. All of them are
    new programs and no copies of this process, so it may use CUDA already.
    """

    def __init__(self, cfg: RunConfig, *, rank_processes: int | None = None) -> None:
        """`rank_processes`: how many processes of the run share this machine's cores; None: what the launcher says.

        Raises:
            ConfigError: a reward cannot be loaded.
            MachineError: a reward runs programs, and nothing on this machine can box them.
        """
        self.names = tuple(reward.name for reward in cfg.rewards)
        self.weights = tuple(reward.weight for reward in cfg.rewards)
        self._content = frozenset(reward.name for reward in cfg.rewards if not judges_form(reward))
        self.sandbox: Sandbox | None = None
        """The boxes of its programs; None where no reward runs any."""
        self._threads: ThreadPoolExecutor | None = None
        self._calls: dict[str, RewardWorker] = {}
        self._code: dict[str, CodeTests] = {}
        try:
            self._open(cfg, workers=count_workers(rank_processes))
        except BaseException:
            self.close()
            raise

    @property
    def executor(self) -> str:
        """What the boxes are made of, to be recorded with results; empty where no programs run."""
        return self.sandbox.executor if self.sandbox else ""

    def _open(self, cfg: RunConfig, *, workers: int) -> None:
        box = cfg.sandbox
        for reward in cfg.rewards:
            if reward.use == CODE_TESTS:
                with _named(cfg, "sandbox.packages"):
                    self.sandbox = self.sandbox or Sandbox(box.executor, workers=workers, packages=box.packages)
                self._code[reward.name] = _code_tests(reward, cfg=cfg, sandbox=self.sandbox)
            else:
                self._calls[reward.name] = RewardWorker(reward.use, reward.options, deadline_s=reward.deadline)
        # Linux ends a process with the thread that started it. The main thread starts them; these threads stay, too.
        self._threads = ThreadPoolExecutor(max(1, len(self._calls)), thread_name_prefix="reward")
        for call in self._calls.values():
            call.start()
        for number, reward in enumerate(cfg.rewards):
            if reward.name not in self._calls:
                continue
            with suppress(TimeoutError), _named(cfg, f"rewards.{number}.use"):  # the first batch asks again
                self._calls[reward.name].wait_ready()

    def call_of(self, name: str) -> RewardWorker | CodeTests:
        """One of the rewards, to be asked alone."""
        return self._code[name] if name in self._code else self._calls[name]

    def score(self, completions: Sequence[Completion], columns: Mapping[str, Sequence[Any]]) -> BatchRewards:
        """What every reward says of the completions; `columns` are those of their rows, aligned with them."""
        assert self._threads is not None
        futures = {name: self._threads.submit(call, completions, **columns) for name, call in self._calls.items()}
        judged = {name: call.judge(completions, columns) for name, call in self._code.items()}
        found = {name: scores for name, (scores, _) in judged.items()}
        found |= {name: future.result() for name, future in futures.items()}
        verdicts: Sequence[dict[str, Any] | None] = next(
            (each for _, each in judged.values()), [None] * len(completions)
        )
        return BatchRewards({name: found[name] for name in self.names}, list(verdicts), self._content)

    def close(self) -> None:
        """End all processes and boxes, also while a call is under way in another thread."""
        for call in self._calls.values():
            call.stop()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for call in self._calls.values():
            call.close()
        if self.sandbox is not None:
            self.sandbox.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _named(cfg: RunConfig, key: str) -> Iterator[None]:
    """Let a ConfigError name the key that it is about, with its place in the config."""
    try:
        yield
    except ConfigError as error:
        where = f"{cfg.origins.get(key, '')} {key}".strip()
        raise ConfigError(error.what, where=where, fix=error.fix, nearest=error.nearest) from error


def _code_tests(reward: RewardConfig, *, cfg: RunConfig, sandbox: Sandbox) -> CodeTests:
    return CodeTests(reward.options, sandbox=sandbox, limits=limits_of(cfg.sandbox), deadline_s=reward.deadline)


def aligned(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Rows as columns; None where a row does not have one.

    >>> aligned([{"answer": "4"}, {"answer": "5", "level": 2}], ["answer", "level"])
    {'answer': ['4', '5'], 'level': [None, 2]}
    """
    return {name: [row.get(name) for row in rows] for name in names}


def combined(scored: BatchRewards, weights: Sequence[float]) -> list[float | None]:
    """The weighted sum of the rewards that know a value, for each completion; None where nothing is known of it.

    That is where a reward for content has no value, since the rest would make it a wrong answer, and where no reward
    has one. `weights` are in the order of `scored.by_name`. A reward of weight 0 is measured only and counts for none
    of this.
    """
    learned = [(name, weight) for name, weight in zip(scored.by_name, weights, strict=True) if weight]
    sums: list[float | None] = []
    for place in range(len(scored.verdicts)):
        values = [(name, scored.by_name[name].values[place], weight) for name, weight in learned]
        known = [value * weight for _, value, weight in values if value is not None]
        is_known = known and not any(value is None and name in scored.content for name, value, _ in values)
        sums.append(sum(known) if is_known else None)
    return sums


class MissingRewardMonitor:
    """Counts the answers for which a reward has no value, and ends the run when they are too many."""

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=WINDOW)
        self._counts: deque[Counter[str]] = deque(maxlen=WINDOW)
        self._reasons: deque[dict[str, list[str]]] = deque(maxlen=WINDOW)

    def add(self, scored: BatchRewards) -> dict[str, int]:
        """Count a call: the name of each reward -> how many of its values are None.

        Raises:
            RunError: of the answers of the last WINDOW calls, or of as many to come, more than MOST_UNKNOWN have no
                value of a reward.
        """
        counts = {name: scores.values.count(None) for name, scores in scored.by_name.items()}
        self._sizes.append(len(scored.verdicts))
        self._counts.append(Counter(counts))
        self._reasons.append({name: scores.reasons for name, scores in scored.by_name.items()})
        n_answers, n_calls = sum(self._sizes), len(self._sizes)
        for name in counts:
            unknown = sum(each[name] for each in self._counts)
            if unknown > MOST_UNKNOWN * n_answers * WINDOW / n_calls:
                raise self._error(name, what=f"{unknown:,} of the {n_answers:,} answers of the last {n_calls} calls")
        return counts

    def _error(self, name: str, *, what: str) -> RunError:
        reasons = list(dict.fromkeys(reason for each in self._reasons for reason in each.get(name, [])))
        said = "; ".join(reasons[:MOST_REASONS])
        return RunError(f"{what} have no value of {name}: {said}", where=f"rewards.{name}", fix=_remedy(name, said))


def _remedy(name: str, said: str) -> str:
    if "sandbox failed" in said:
        return "`make sandbox ARGS=--self-test` says what is wrong with the boxes; then resume"
    if "took longer" in said or "did not start" in said:
        return f"raise rewards.{name}.deadline, or make the function faster; then resume"
    return "mend the function and try it with `make reward-check`; then resume"
