"""The rewards of a config: each in a process of its own, asked side by side; missing values are counted.

A deadline ends even a busy loop in foreign code. A process starts with the set, stays for the next calls, and is
replaced when it had to be ended.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sftplay.errors import ConfigError, RunError, SftplayError, without_secrets
from sftplay.reward.table import ENVIRONMENT_REWARD, SHIPPED, RewardValues, is_user_function, judges_form, load_function
from sftplay.signals import STOP_SIGNALS, adopt_orphans, die_with_parent

if TYPE_CHECKING:  # the process of a reward starts faster without
    from sftplay.config.run import RunConfig
    from sftplay.reward.code_rewards import CodeTests, Completion
    from sftplay.sandbox.pool import Sandbox

START_S = 120.0
"""How long a process may import what its reward needs; a busy cluster's disk is slow."""

OPEN_S = 1800.0
"""How long it may take to read a model."""

LONGEST_REASON = 500

PASSED = "SFTPLAY_PASS_"
"""A variable of the environment that begins so reaches foreign code under the rest of its name, whatever it holds."""

_SECRET = re.compile(r"TOKEN(?![A-Z])|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|AUTH(?!OR)|KEY(?![A-Z])", re.IGNORECASE)
"""Names of variables that foreign code does not get, as little as those that hold what no log shows."""


class RewardWorker:
    """A reward with its options, ready to be called. Close it to end its process."""

    def __init__(self, use: str, options: Mapping[str, Any], *, deadline_s: float) -> None:
        """`use` is a name of `SHIPPED`, or a user's function. A shipped reward has `deadline_s` for each completion, a
        user's function for each batch."""
        self.use, self.options, self.deadline_s = use, dict(options), deadline_s
        self._is_opened = use in SHIPPED and SHIPPED[use].is_opened
        self._takes_batch = is_user_function(use) or self._is_opened
        self._process: Any = None
        self._pipe: Connection | None = None
        self._at_exit: Finalize | None = None
        self._is_ready = self._is_over = False

    def __call__(self, completions: Sequence[Any], /, **columns: Any) -> RewardValues:
        """Score the completions; `columns` are aligned with them."""
        if self._takes_batch:
            return self._whole(completions, columns)
        scores, shipped = RewardValues([]), SHIPPED[self.use]
        known = (*self.options, ENVIRONMENT_REWARD)  # the environment itself says why it gave none
        needed = [name for name in shipped.columns if shipped.judges == "content" and name not in known]
        for at in range(len(completions)):
            row = {name: value[at : at + 1] for name, value in columns.items()}
            lacks = next((name for name in needed if row.get(name) == [None]), "")
            one = (
                RewardValues([None], [f"a row has no {lacks}"]) if lacks else self._whole(completions[at : at + 1], row)
            )
            scores.values.extend(one.values)
            scores.reasons.extend(reason for reason in one.reasons if reason not in scores.reasons)
        return scores

    def start(self) -> None:
        """Start its process, if none runs, without waiting for it."""
        if self._pipe is not None:
            return
        ours, child_end = multiprocessing.Pipe()
        self._process, self._at_exit = start_process(self, _serve, child_end, self.use, options=self.options)
        child_end.close()
        self._pipe, self._is_ready = ours, False

    def stop(self) -> None:
        """End its process from another thread than the one that may wait for it; no other process follows."""
        self._is_over = True
        if self._process is not None:
            kill_group(self._process)

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None and self._at_exit is not None:
            kill_group(self._process)
            self._at_exit.cancel()
            self._process.join()
            self._process.close()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = self._at_exit = None

    def wait_ready(self) -> Connection:
        """Return the pipe to a process that is ready. Raise SftplayError where the reward cannot be loaded (a name is
        wrong, or a library is missing), TimeoutError where it did not start in time.
        """
        self.start()
        assert self._pipe is not None
        if self._is_ready:
            return self._pipe
        problem: Exception | None
        try:
            start_s = OPEN_S if self._is_opened else START_S
            has_started = self._pipe.poll(start_s)
            problem = self._pipe.recv() if has_started else TimeoutError(f"did not start within {start_s:g} s")
        except (EOFError, OSError):
            what = f"{self.use!r} cannot be loaded: its process ended"
            fix = "import it by hand: something in it ends the process"
            problem = ConfigError(what, where="rewards", fix=fix)
        if problem is not None:
            self.close()
            raise problem
        self._is_ready = True
        return self._pipe

    def _whole(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> RewardValues:
        """Score all of them in one call: each gets a number, or none of them does."""
        n = len(completions)
        if self._is_over:
            return RewardValues([None] * n, ["it was ended"])
        try:
            pipe = self.wait_ready()
            pipe.send({**columns, "completions": list(completions)})
            deadline_s = self.deadline_s * (n if self._is_opened else 1)
            if not pipe.poll(deadline_s):
                self.close()
                return RewardValues([None] * n, [f"took longer than {deadline_s:g} s"])
            values: RewardValues = pipe.recv()
        except TimeoutError as error:
            return RewardValues([None] * n, [str(error)])
        except (EOFError, OSError):
            self.close()
            return RewardValues([None] * n, ["its process died"])
        return values


def start_process(owner: object, target: Callable[..., None], *given: Any, **named: Any) -> tuple[Any, Finalize]:
    """Start `target` with these arguments and `parent`, this process's id; return the process, and what ends it with
    this interpreter unless `owner` cancels it. The target calls `settle_process` first.

    It is a new interpreter: nothing of this one is forked, so CUDA may be in use here. Signals that stop a run do not
    end it: the run wants the values of the step that it is in.
    """
    named["parent"] = os.getpid()
    process = multiprocessing.get_context("spawn").Process(target=target, args=given, kwargs=named, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # it inherits that until it can ignore them
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # At its exit this interpreter sends SIGTERM and waits for what it has started; the process ignores SIGTERM.
    return process, Finalize(owner, kill_group, args=(process,), exitpriority=0)


PARENT_DIED = signal.SIGUSR2


def settle_process(parent: int) -> None:
    """Go on in a child that is made for foreign code: it ignores the signals that stop a run, and ends with `parent`,
    as does all that it starts.

    This process stays between the two and ends them, because Linux ends a child with its parent, but no grandchild.
    """
    for number in STOP_SIGNALS:  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.setpgid(0, 0)
    os.dup2(2, 1)  # what foreign code prints is no output of the command
    between, awaited = os.getpid(), {signal.SIGCHLD, PARENT_DIED}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    die_with_parent(parent, number=PARENT_DIED)
    adopt_orphans()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)
        die_with_parent(between)
        adopt_orphans()  # so that `kill_group` finds them
        return
    is_over = False
    while not is_over:
        is_over = signal.sigwait(awaited) == PARENT_DIED
        while not is_over and (ended := os.waitpid(-1, os.WNOHANG)[0]):
            is_over = ended == child
    end_children()
    os._exit(0)


def end_children(known: Set[int] = frozenset()) -> None:
    """End the children of this process, but for the `known` ones, and what they leave to it with their death."""
    import psutil

    while found := [child.pid for child in psutil.Process().children() if child.pid not in known]:
        for pid in found:
            known = known | {pid}  # one that may not be ended is tried once
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


_forgotten = set[str]()  # names of the secrets that this process got and does not show


def find_secrets() -> list[str]:
    """Return the names of the variables that foreign code does not get."""

    def is_secret(name: str, value: str) -> bool:
        holds_one = without_secrets(value) != value and not name.lower().endswith("_proxy")
        return (holds_one or _SECRET.search(name) is not None) and f"{PASSED}{name}" not in os.environ

    return sorted(name for name, value in os.environ.items() if not name.startswith(PASSED) and is_secret(name, value))


def forget_secrets() -> None:
    """Remove the secrets from this process's environment, but for those that are passed on purpose."""
    for name in find_secrets():
        _forgotten.add(name)
        del os.environ[name]
    for name in [name for name in os.environ if name.startswith(PASSED)]:
        os.environ[name.removeprefix(PASSED)] = os.environ.pop(name)


def kill_group(process: Any) -> None:
    """End a process and all that it has started: its group, and what is below it in others."""
    import psutil

    with suppress(ValueError):  # another thread has closed it, which it does when it has ended
        with suppress(OSError, psutil.Error):  # it is reaped already: its number may be another's now
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            started = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGKILL)
            for child in started:
                with suppress(psutil.Error):
                    child.kill()
        process.kill()


def describe_error(error: BaseException) -> str:
    """Describe what foreign code raised, with the line of its file; lines of the kit's own code say nothing."""
    said = f"raised {type(error).__name__}: {error}"[:LONGEST_REASON]
    if missed := [name for name in sorted(_forgotten) if name in said]:
        said += f" (secrets are not passed on: export {PASSED}{missed[0]} for this function)"
    frames, package = traceback.extract_tb(error.__traceback__), str(Path(__file__).parents[1])
    foreign = [frame for frame in frames if not frame.filename.startswith(package)]
    lines = [frame.lineno for frame in foreign if frame.filename == foreign[0].filename]
    return f"{said} ({Path(foreign[0].filename).name}:{lines[-1]})" if foreign else said


def check_values(answer: Any, n: int) -> RewardValues:
    """Read a reward's answer: finite numbers pass as plain floats, everything else is None with its reason.

    >>> check_values([1, None, float("nan")], 3).reasons
    ['returned None', 'returned nan, which is no finite number']
    """
    as_list = getattr(answer, "tolist", None)  # of a tensor or an array
    values = as_list() if as_list else answer
    if not isinstance(values, list | tuple) or len(values) != n:
        said = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        return RewardValues([None] * n, [f"returned {said} for {n} completions"])
    checked = RewardValues([])
    for value in values:
        try:
            found = float(value) if isinstance(value, Number) or hasattr(value, "item") else repr(value)
        except Exception as error:  # noqa: BLE001 - an object of foreign code
            found = f"{type(value).__name__} ({type(error).__name__})"
        number = found if isinstance(found, float) and isfinite(found) else None
        checked.values.append(number)
        reason = "returned None" if value is None else f"returned {found}, which is no finite number"[:LONGEST_REASON]
        if number is None and reason not in checked.reasons:
            checked.reasons.append(reason)
    return checked


def _serve(pipe: Connection, use: str, *, options: dict[str, Any], parent: int) -> None:
    settle_process(parent)
    pid = os.getpid()
    with suppress(EOFError, OSError):  # the parent has left
        try:
            if not (use in SHIPPED and SHIPPED[use].is_opened):  # a model may come from the hub
                forget_secrets()
            function: Any = load_function(use) if is_user_function(use) else SHIPPED[use].load()
            if use in SHIPPED and SHIPPED[use].is_opened:
                function, options = function(**options), {}
        except SftplayError as error:
            pipe.send(error)
            return
        pipe.send(None)
        while True:
            answer = _answer(function, {**pipe.recv(), **options})  # no column replaces an option
            if os.getpid() != pid:
                os._exit(0)  # the function forked: two processes would answer
            pipe.send(answer)


def _answer(function: Callable[..., Any], given: dict[str, Any]) -> RewardValues:
    n = len(given["completions"])
    try:
        answer = function(**given)
    except SftplayError as error:
        return RewardValues([None] * n, [str(error)[:LONGEST_REASON]])
    except BaseException as error:  # noqa: BLE001 - a border to foreign code, which may raise SystemExit
        return RewardValues([None] * n, [describe_error(error)])
    return answer if isinstance(answer, RewardValues) else check_values(answer, n)


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

    def __init__(self, cfg: RunConfig) -> None:
        """Raise ConfigError where a reward cannot be loaded, MachineError where nothing can box one that runs
        programs.
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
        from sftplay.config.data import CODE_TESTS, MODEL

        try:
            for reward in cfg.rewards:
                if reward.use == CODE_TESTS:
                    from sftplay.reward.code_rewards import CodeTests, read_limits
                    from sftplay.sandbox.pool import Sandbox, count_workers

                    box = cfg.sandbox
                    with _naming(cfg, "sandbox.packages"):
                        self.sandbox = self.sandbox or Sandbox(
                            box.executor, workers=count_workers(), packages=box.packages
                        )
                    self.workers[reward.name] = CodeTests(
                        reward.options, sandbox=self.sandbox, limits=read_limits(box), deadline_s=reward.deadline
                    )
                else:
                    options = dict(reward.options)
                    if reward.use == MODEL:
                        options |= {"path": reward.path, "data": cfg.data, "output_dir": cfg.output_dir}
                    worker = RewardWorker(reward.use, options, deadline_s=reward.deadline)
                    self.workers[reward.name] = self._processes[reward.name] = worker
            # Linux ends a process with the thread that started it. The main thread starts them; these stay, too.
            self._threads = ThreadPoolExecutor(max(1, len(self._processes)), thread_name_prefix="reward")
            for worker in self._processes.values():
                worker.start()
            for number, name in enumerate(self.names):
                if name in self._processes:
                    key = f"rewards.{number}.{'path' if cfg.rewards[number].use == MODEL else 'use'}"
                    with suppress(TimeoutError), _naming(cfg, key):  # the first batch asks again
                        self._processes[name].wait_ready()
        except BaseException:
            self.close()
            raise

    @property
    def executor(self) -> str:
        """What the boxes are made of, to be recorded with results; empty where no programs run."""
        return self.sandbox.executor if self.sandbox else ""

    def score(
        self,
        completions: Sequence[Completion],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
    ) -> BatchRewards:
        """Ask every reward about the completions; `columns` are those of their rows, aligned with them.

        `completion_ids`: their tokens, which the shipped rewards for length count; without them words are counted.
        """
        assert self._threads is not None
        futures = {}
        tokens = {} if completion_ids is None else {"completion_ids": completion_ids}
        for name, call in self._processes.items():
            counted = tokens if call.use in SHIPPED and SHIPPED[call.use].counts_tokens else {}
            with suppress(RuntimeError):  # closed by another thread: the ended worker is asked below, and says so
                futures[name] = self._threads.submit(call, completions, **columns, **counted)
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
        where = cfg.describe_origin(key, unset="")
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

    def add(self, scored: BatchRewards) -> None:
        """Count a call. Raise RunError where more than MOST_UNKNOWN of the answers of the last WINDOW calls,
        or of as many to come, have no value of a reward.
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
            elif "the environment" in reasons:
                fix = "mend the environment, or raise grpo.step_deadline where it took longer; then resume"
            elif "took longer" in reasons or "did not start" in reasons:
                fix = f"raise rewards.{name}.deadline, or make the function faster; then resume"
            else:
                fix = "mend the function and try it with `make reward-check`; then resume"
            what = f"{unknown:,} of the {n_answers:,} answers of the last {len(columns)} calls have no value of {name}"
            raise RunError(f"{what}: {reasons}", where=f"rewards.{name}", fix=fix)
