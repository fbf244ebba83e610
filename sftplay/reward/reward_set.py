"""The rewards of a config together: all are asked about a batch side by side, and missing values are counted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from sftplay.config.rewards import CODE_TESTS
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, RunError
from sftplay.reward.calls import RewardValues, RewardWorker
from sftplay.reward.code_answer import Completion
from sftplay.reward.code_rewards import CodeTests, read_limits
from sftplay.reward.table import judges_form
from sftplay.sandbox.pool import Sandbox, count_workers

MOST_UNKNOWN = 0.05
"""Share of the answers of WINDOW calls for which a reward may have no value."""

WINDOW = 20


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
            columns = [part.by_name[name] for part in parts]
            reasons = list(dict.fromkeys(reason for column in columns for reason in column.reasons))
            by_name[name] = RewardValues([value for column in columns for value in column.values], reasons)
        return cls(by_name, [verdict for part in parts for verdict in part.verdicts], parts[0].content)


class RewardSet:
    """Opens the rewards of a config once and asks them many times. Use it as a context manager.

    Programs run in the sandbox's boxes, and every other reward in a process of its own, side by side. All of them are
    new programs and no copies of this process, so it may use CUDA already.
    """

    def __init__(self, cfg: RunConfig, *, rank_processes: int | None = None) -> None:
        """`rank_processes`: how many processes of the run share this machine's cores; None: what the launcher says.

        Raise ConfigError where a reward cannot be loaded, MachineError where nothing can box one that runs programs.
        """
        self.names = tuple(reward.name for reward in cfg.rewards)
        self.weights = tuple(reward.weight for reward in cfg.rewards)
        self.workers: dict[str, RewardWorker | CodeTests] = {}
        """The rewards by name, in the order of the config."""
        self.sandbox: Sandbox | None = None
        """The boxes of its programs; None where no reward runs any."""
        self._content = frozenset(reward.name for reward in cfg.rewards if not judges_form(reward))
        self._processes: dict[str, RewardWorker] = {}
        self._threads: ThreadPoolExecutor | None = None
        try:
            box = cfg.sandbox
            for reward in cfg.rewards:
                if reward.use == CODE_TESTS:
                    with _naming(cfg, "sandbox.packages"):
                        self.sandbox = self.sandbox or Sandbox(
                            box.executor, workers=count_workers(rank_processes), packages=box.packages
                        )
                    self.workers[reward.name] = CodeTests(
                        reward.options, sandbox=self.sandbox, limits=read_limits(box), deadline_s=reward.deadline
                    )
                else:
                    worker = RewardWorker(reward.use, reward.options, deadline_s=reward.deadline)
                    self.workers[reward.name] = self._processes[reward.name] = worker
            # Linux ends a process with the thread that started it. The main thread starts them; these stay, too.
            self._threads = ThreadPoolExecutor(max(1, len(self._processes)), thread_name_prefix="reward")
            for worker in self._processes.values():
                worker.start()
            for number, name in enumerate(self.names):
                if name in self._processes:
                    with suppress(TimeoutError), _naming(cfg, f"rewards.{number}.use"):  # the first batch asks again
                        self._processes[name].wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def executor(self) -> str:
        """What the boxes are made of, to be recorded with results; empty where no programs run."""
        return self.sandbox.executor if self.sandbox else ""

    def score(self, completions: Sequence[Completion], columns: Mapping[str, Sequence[Any]]) -> BatchRewards:
        """Ask every reward about the completions; `columns` are those of their rows, aligned with them."""
        assert self._threads is not None
        futures = {}
        for name, call in self._processes.items():
            with suppress(RuntimeError):  # closed by another thread: the ended worker is asked below, and says so
                futures[name] = self._threads.submit(call, completions, **columns)
        found = {name: call(completions, **columns) for name, call in self.workers.items() if name not in futures}
        verdicts: list[dict[str, Any] | None] = [None] * len(completions)
        verdicts = next((list(values.verdicts) for values in found.values() if values.verdicts), verdicts)
        found |= {name: future.result() for name, future in futures.items()}
        # Verdicts are kept once: other ranks get what is returned here.
        return BatchRewards({name: replace(found[name], verdicts=()) for name in self.names}, verdicts, self._content)

    def close(self) -> None:
        """End all processes and boxes, also while a call is under way in another thread."""
        for worker in self._processes.values():
            worker.stop()
        if self._threads is not None:
            self._threads.shutdown()
        for worker in self._processes.values():
            worker.close()
        if self.sandbox is not None:
            self.sandbox.close()

    def __enter__(self) -> RewardSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _naming(cfg: RunConfig, key: str) -> Iterator[None]:
    """Let a ConfigError name the key that it is about, with its place in the config."""
    try:
        yield
    except ConfigError as error:
        where = f"{cfg.origins.get(key, '')} {key}".strip()
        raise ConfigError(error.what, where=where, fix=error.fix, nearest=error.nearest) from error


def aligned(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return rows as columns; None where a row does not have one.

    >>> aligned([{"answer": "4"}, {"answer": "5", "level": 2}], ["answer", "level"])
    {'answer': ['4', '5'], 'level': [None, 2]}
    """
    return {name: [row.get(name) for row in rows] for name in names}


def combined(scored: BatchRewards, weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of each completion's known rewards; None where nothing is known of the completion.

    That is where a reward for content has no value, since the rest would make it a wrong answer, and where no reward
    has one. `weights` are in the order of `scored.by_name`. A reward of weight 0 is measured only and counts for none
    of this.
    """
    learned = [(name, weight) for name, weight in zip(scored.by_name, weights, strict=True) if weight]
    sums: list[float | None] = []
    for at in range(len(scored.verdicts)):
        values = [(name, scored.by_name[name].values[at], weight) for name, weight in learned]
        known = [value * weight for _, value, weight in values if value is not None]
        is_known = known and not any(value is None and name in scored.content for name, value, _ in values)
        sums.append(sum(known) if is_known else None)
    return sums


class MissingRewardMonitor:
    """Counts the answers for which a reward has no value, and ends the run when they are too many."""

    def __init__(self) -> None:
        self._calls: deque[dict[str, RewardValues]] = deque(maxlen=WINDOW)

    def add(self, scored: BatchRewards) -> dict[str, int]:
        """Count a call: the name of each reward -> how many of its values are None. Raise RunError where more than
        MOST_UNKNOWN of the answers of the last WINDOW calls, or of as many to come, have no value of a reward.
        """
        self._calls.append(scored.by_name)
        for name in scored.by_name:
            columns = [call[name] for call in self._calls]
            n_answers = sum(len(column.values) for column in columns)
            unknown = sum(column.values.count(None) for column in columns)
            if unknown <= MOST_UNKNOWN * n_answers * WINDOW / len(columns):
                continue
            reasons = "; ".join(list(dict.fromkeys(reason for column in columns for reason in column.reasons))[:3])
            if "sandbox failed" in reasons:
                fix = "`make sandbox ARGS=--self-test` says what is wrong with the boxes; then resume"
            elif "took longer" in reasons or "did not start" in reasons:
                fix = f"raise rewards.{name}.deadline, or make the function faster; then resume"
            else:
                fix = "mend the function and try it with `make reward-check`; then resume"
            what = f"{unknown:,} of the {n_answers:,} answers of the last {len(columns)} calls have no value of {name}"
            raise RunError(f"{what}: {reasons}", where=f"rewards.{name}", fix=fix)
        return {name: column.values.count(None) for name, column in scored.by_name.items()}
