"""Run a sweep: each trial is a run of its own, started and watched from here, and the worst are stopped early.

The state is optuna's journal in the sweep's folder. Locks say which trials somebody works on, so that several processes
and machines share a sweep, and what a killed one has left is gone on with.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState, create_trial

from sftplay import log
from sftplay.atomic import is_locked, locked, read_object, write_text
from sftplay.config.keys import OTHER_ROWS, differences, flatten, values_that_decide_weights
from sftplay.config.resolved import dump_given, flow
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, ConfigErrors, DataError, MachineError, RunError, SftplayError
from sftplay.heartbeat import read_heartbeats
from sftplay.launch.processes import Death
from sftplay.launch.run_folder import RunFolder, name_taken
from sftplay.launch.slurm.request import JobRequest
from sftplay.machine.gpu import usable_cores
from sftplay.machine.probe import probe
from sftplay.report.figures import as_number, is_less_better
from sftplay.runs.sweep_job import TrialJob
from sftplay.runs.sweep_space import Space
from sftplay.signals import STOP_SIGNALS, Echoes, TiedPopen, catching
from sftplay.units import plural

JOURNAL, LOCK, TRIALS, BEST = "journal.log", ".lock", "trials.jsonl", "best.yaml"
NAME, RUNG = "sweep", "rung "  # of optuna's study; before the share of a run, in the attributes of its trials
POLL_S = 0.1
STARTS_ELSEWHERE_S = 60.0  # how long the lock of a trial's run may outlive the process that has started it
DEATHS = 5  # so many without a new checkpoint between them end a trial
MEASURING = ("eval.limit", "score.eval_", "hrm.eval_")  # beginnings of keys that decide figures and no weights
REFUSED = (ConfigError.exit_code, MachineError.exit_code)
STOPPED = tuple(128 + number for number in STOP_SIGNALS)


class _FileLock(JournalFileOpenLock):
    """Optuna's own locks outlive a killed process by half a minute; this one dies with it.

    It is taken before each new line, and then removes what a power cut or a full disk has left of the last one.
    """

    def __init__(self, journal: Path) -> None:
        self._journal, self._held = journal, ExitStack()

    def acquire(self) -> bool:
        self._held.enter_context(locked(self._journal.with_name(".journal.lock")))
        _cut_torn_line(self._journal)
        return True

    def release(self) -> None:
        self._held.close()


class _Journal(JournalFileBackend):
    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        try:
            super().append_logs(logs)
        except OSError as error:  # of a full disk: its error names no file
            raise OSError(error.errno, error.strerror, error.filename or self._file_path) from error


@dataclass
class ActiveTrial:
    """A trial that this process works on."""

    number: int
    cfg: RunConfig
    folder: RunFolder
    held: ExitStack
    """Its lock."""

    process: subprocess.Popen[Any] | TrialJob | None = None
    environment: dict[str, str] = field(default_factory=dict)
    seen: int = 0  # the step of the last evaluation that was noted
    verdict: str | None = ""
    """Empty while the trial goes on; None where it waits at a rung for others; else why it is pruned."""

    is_signalled: bool = False
    deaths: int = 0
    step: int = 0  # the last checkpoint's when a process has died


class Sweep:
    """A sweep in its folder, `output_dir/sweeps/NAME`. Raise ConfigErrors where another one has that name."""

    def __init__(
        self, args: Namespace, base: RunConfig, space: Space, *, name: str, request: JobRequest | None = None
    ) -> None:
        """With `request` each trial is a job of SLURM, else a process on this machine."""
        self.args, self.base, self.space, self.name, self.request = args, base, space, name, request
        self.folder = Path(base.output_dir) / "sweeps" / name
        self.trials = self.folder / "trials"
        self.received: list[int] = []
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            self.trials.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot be made ({error.strerror})"
            raise MachineError(what, where=str(self.trials), fix="choose another output_dir") from error
        with locked(self.folder / LOCK):
            journal = self.folder / JOURNAL
            direction = "minimize" if space.is_less_better else "maximize"
            try:
                self.storage = JournalStorage(_Journal(str(journal), lock_obj=_FileLock(journal)))
                self.study = optuna.create_study(
                    storage=self.storage, study_name=NAME, direction=direction, load_if_exists=True
                )
            except ValueError as error:  # of json among others
                what = f"has a line that cannot be read ({error})"
                raise RunError(what, where=str(journal), fix="choose another NAME=, or remove that line") from error
            self._compare_with_earlier_start()

    def _compare_with_earlier_start(self) -> None:
        """Record what this sweep is, or raise ConfigErrors with what differs from the record.

        Fewer trials than there are would leave some of them without rivals.
        """
        config = {key: value for key, value in flatten(self.base).items() if key.startswith(MEASURING)}
        config |= values_that_decide_weights(self.base)
        for axis in self.space.axes:
            config.pop(axis.key, None)
        space = self.space.identity()
        known: dict[str, dict[str, Any]] = self.study.user_attrs.get("sweep", {})
        if not known:
            self.study.set_user_attr("sweep", {"config": config, "space": space})
            return
        changed = [(f"sweep: {key}", known["space"].get(key), space.get(key)) for key in known["space"] | space]
        # Rows that are only measured on decide the figures.
        changed += [(key, known["config"].get(key), config.get(key)) for key in OTHER_ROWS]
        changed += [row for row in differences(known["config"], config) if row[0] not in OTHER_ROWS]
        fix = f"choose another NAME=, or give what {self.name} was started with"
        if problems := [
            ConfigError(f"was {flow(old)} and is {flow(new)} now", where=f"{self.folder} {key}", fix=fix)
            for key, old, new in changed
            if old != new
        ]:
            raise ConfigErrors(problems)
        if (n := len(self.study.get_trials(deepcopy=False))) > self.space.n_trials:
            what, fix = f"has {n} trials already, and {self.space.n_trials} are asked for", f"ask for {n} or more"
            raise ConfigError(what, where=f"{self.folder} trials", fix=fix)

    def run(self) -> int:
        """Work on the sweep until no trial is left to take; return 0, or the code of the stop signal that came.

        Raise what has ended a trial where it is not the trial's values that did: bad data, a full disk, a bug. The same
        command goes on with that trial.
        """
        active: list[ActiveTrial] = []
        with self._catching(active), ExitStack() as held:
            free = self._find_slots(held)
            try:
                while True:
                    while free and not self.received and (trial := self._claim()):
                        trial.environment = free.pop()
                        active.append(trial)
                        self._start(trial)
                    if not active and (self.received or not self._waits_for_others()):
                        break
                    self._show(active)
                    time.sleep(POLL_S)
                    for trial in [*active]:
                        if self._watch(trial):
                            active.remove(trial)
                            free.append(trial.environment)
            except BaseException:
                self._stop(active)
                raise
            finally:
                self.publish()
        return 128 + self.received[0] if self.received else 0

    @contextmanager
    def _catching(self, active: list[ActiveTrial]) -> Iterator[None]:
        """Note the first stop signal, which all runs get; at a second one kill them."""
        echoes = Echoes(of_make=True)

        def on_signal(number: int, _frame: Any) -> None:
            if echoes.is_echo(number):
                return
            self.received.append(number)
            for trial in active if len(self.received) > 1 else ():
                if trial.process:
                    trial.process.kill()  # its workers die with it

        with catching(on_signal):
            yield

    def _find_slots(self, held: ExitStack) -> list[dict[str, str]]:
        """The environment of each run at a time: GPUs of its own, or its share of the cores."""
        n, size = self.args.parallel, self.args.nproc or 1
        if self.request:
            return [{} for _ in range(n)]
        machine = probe()
        if not machine.gpus:
            threads = usable_cores() // (n * size)
            is_given = n == 1 or "OMP_NUM_THREADS" in os.environ
            return [{} if is_given else {"OMP_NUM_THREADS": str(max(1, threads))} for _ in range(n)]
        free = []
        for gpu in machine.gpus:
            with suppress(BlockingIOError):
                path = self.folder / f".gpu-{socket.gethostname()}-{gpu.uuid or gpu.machine_index}.lock"
                held.enter_context(locked(path, waits=False))
                free.append(gpu.uuid if gpu.is_mig else str(gpu.machine_index))
        if len(free) < n * size:
            what = f"{n} trial(s) at a time of {size} process(es) need {n * size} GPUs, {len(free)} are free"
            fix = "ask for fewer, or wait for this sweep's other process here"
            raise MachineError(what, where="--parallel", fix=fix)
        groups = [free[size * slot : size * (slot + 1)] for slot in range(n)]
        return [{"CUDA_VISIBLE_DEVICES": ",".join(group), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for group in groups]

    def _claim(self) -> ActiveTrial | None:
        """Take a trial that somebody has left, else a new one; None where there is none. Refused ones are passed by."""
        while True:
            with locked(self.folder / LOCK):
                trials = self.study.get_trials(deepcopy=False)
                left = [trial.number for trial in trials if trial.state == TrialState.RUNNING]
                ready = (n for n in left if self._decide(n) is not None)
                number, held = next(((n, held) for n in ready if (held := self._hold(n))), (len(trials), None))
                if held is None:
                    if number >= self.space.n_trials or min(left, default=number) < self.space.cohort(number).start:
                        return None
                    folder = self.run_folder(number)
                    if folder.resolved.exists():
                        taken = name_taken(folder, str(folder.path))
                        raise ConfigError(taken.what, where=taken.where, fix="choose another NAME=, or remove that run")
                    held, params = self._hold(number), self.space.sample(number, trials, seed=self.base.seed)
                    given = {axis.key: axis.distribution() for axis in self.space.axes}
                    new = create_trial(state=TrialState.RUNNING, params=params, distributions=given)
                    self.study.add_trial(new)
                params = self.study.get_trials(deepcopy=False)[number].params
            assert held is not None
            name = self.run_folder(number).name
            try:
                cfg = self.space.configure(self.base, params, run_name=name)
            except ConfigError as error:
                trial = ActiveTrial(number, self.base, self.run_folder(number), held)
                self._finish(trial, "refused", cause=str(error).split("\n", 1)[0], run=None)
                continue
            return ActiveTrial(number, cfg, self.run_folder(number), held, verdict=self._decide(number))

    def _waits_for_others(self) -> bool:
        """Whether trials run elsewhere whose figures decide which of those that wait here go on."""
        trials = self.study.get_trials(deepcopy=False) if self.space.halving else []
        return any(not trial.state.is_finished() for trial in trials)

    def _hold(self, number: int) -> ExitStack | None:
        """The lock of a trial; None where somebody has it."""
        held = ExitStack()
        try:
            held.enter_context(locked(self._lock(number), waits=False))
        except BlockingIOError:
            return None
        return held

    def _lock(self, number: int) -> Path:
        return self.trials / f".trial-{number:03}.lock"

    def run_folder(self, number: int) -> RunFolder:
        return RunFolder(Path(self.base.output_dir) / f"{self.name}-trial-{number:03}")

    def _start(self, trial: ActiveTrial) -> None:
        """Start the run of a trial, or let it go on from its last checkpoint."""
        deadline = time.monotonic() + STARTS_ELSEWHERE_S
        # What a killed process had started dies with it, a moment later.
        while trial.verdict == "" and not self.request and is_locked(trial.folder.path / ".lock"):
            if self.received:
                return
            if time.monotonic() > deadline:
                raise _runs_elsewhere(trial.folder)
            time.sleep(POLL_S)
        self._observe(trial)
        if trial.verdict != "":
            return
        values = self._describe(trial.number)
        log.say(f"trial {trial.number} (of {self.space.n_trials}): {values}", "sweep")
        base, config = self.trials / f"trial-{trial.number:03}", self.trials / f"trial-{trial.number:03}.yaml"
        head = f"Trial {trial.number} of the sweep {self.name}: {values}"
        write_text(config, _with_comment(dump_given(trial.cfg), head))
        trial.is_signalled = False
        if self.request:
            trial.process = TrialJob(config, trial.folder, self.request, answer=base.with_suffix(".json"))
            return
        argv = [sys.executable, "-m", "sftplay", "train", "--json", "--config", str(config), "train.resume=auto"]
        argv += ["--nproc", str(self.args.nproc)] if self.args.nproc else []
        environment = {**os.environ, **trial.environment}
        with base.with_suffix(".json").open("wb") as answer, base.with_suffix(".log").open("ab") as lines:
            trial.process = TiedPopen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=answer, stderr=lines, start_new_session=True
            )

    def _watch(self, trial: ActiveTrial) -> bool:
        """Note what is new of a trial, and stop it where that is due; return whether nothing is left to do."""
        has_ended = trial.process is None or trial.process.poll() is not None
        self._observe(trial)
        if has_ended:
            return self._settle(trial)
        if (trial.verdict != "" or self.received) and not trial.is_signalled and trial.process:
            trial.is_signalled = True
            trial.process.send_signal(self.received[0] if self.received else signal.SIGTERM)
        return False

    def _observe(self, trial: ActiveTrial) -> None:
        """Put new evaluations into the journal; decide at each rung whether the trial goes on."""
        steps = as_number(read_object(trial.folder.path / "manifest.json").get("steps"))
        for step, figure in read_evaluations(trial.folder, self.space.metrics, after=trial.seen):
            if trial.verdict != "" or not steps:
                return
            trial.seen = step
            self.storage.set_trial_intermediate_value(self._id(trial.number), step, figure)
            known = self.study.get_trials(deepcopy=False)[trial.number].user_attrs
            for rung in self.space.rungs:
                if rung <= step / steps < 1 and _key(rung) not in known:
                    self.storage.set_trial_user_attr(self._id(trial.number), _key(rung), figure)
            trial.verdict = self._decide(trial.number)

    def _decide(self, number: int) -> str | None:
        """Return whether a trial goes on: as `ActiveTrial.verdict`.

        Successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943): when the whole cohort has come to a rung,
        the best 1/n go on. optuna's pruner decides by the trials that happen to have come before: in an order from
        worst to best it stops none, and a killed trial would be compared with others than before.
        """
        trials, sign = self.study.get_trials(deepcopy=False), 1 if self.space.is_less_better else -1
        rivals = [*self.space.cohort(number)]
        for rung in self.space.rungs:
            key = _key(rung)
            if key not in trials[number].user_attrs:
                return ""
            if rivals[-1] >= len(trials):
                return None
            if any(not trials[n].state.is_finished() and key not in trials[n].user_attrs for n in rivals):
                return None
            figures = {n: trials[n].user_attrs[key] for n in rivals if key in trials[n].user_attrs}
            ranked = sorted((n for n in figures if math.isfinite(figures[n])), key=lambda n: (sign * figures[n], n))
            kept = ranked[: max(1, len(figures) // self.space.halving)]
            if number not in kept:
                shown = f"{self.space.describe(figures[number])} at 1/{round(1 / rung)} of the run"
                return f"{shown}: not among the best {len(kept)} of {len(figures)}"
            rivals = sorted(kept)
        return ""

    def _figures(self, number: int) -> list[float]:
        known = self.study.get_trials(deepcopy=False)[number].user_attrs
        return [known[_key(rung)] for rung in self.space.rungs if _key(rung) in known]

    def _settle(self, trial: ActiveTrial) -> bool:
        """Record how a trial has ended, or start it again where its process died; return whether it is settled."""
        code = trial.process.returncode if trial.process else None
        answer = read_object(self.trials / f"trial-{trial.number:03}.json")
        error = answer.get("error") or {}
        cause = ": ".join(str(error[key]).split("\n", 1)[0] for key in ("where", "what") if error.get(key))
        if trial.verdict:
            self._finish(trial, "pruned", figure=self._figures(trial.number)[-1], cause=trial.verdict)
        elif trial.verdict is None:
            trial.held.close()
            shown = self.space.describe(self._figures(trial.number)[-1])
            log.say(f"trial {trial.number} waits for the others: {shown}", "sweep")
        elif code == 0:
            self._finish(trial, "done", figure=self._final_figure(trial))
        elif code is None or self.received:
            trial.held.close()
        elif code in REFUSED and is_locked(trial.folder.path / ".lock"):  # by a start that was none of this sweep's
            raise _runs_elsewhere(trial.folder)
        elif code in REFUSED:
            self._finish(trial, "refused", cause=cause, run=answer.get("run"))
        elif code < 0 or error.get("code") == Death.code:
            step = int(trial.folder.read_json("status.json").get("step") or 0)
            trial.deaths = 1 if step > trial.step else trial.deaths + 1
            trial.step = step
            cause = cause or f"its process was killed by signal {-code}"
            if trial.deaths >= DEATHS:
                self._finish(trial, "failed", cause=cause)
                return True
            log.say(f"note: trial {trial.number}: {cause}; it goes on from its last checkpoint", "sweep")
            self._start(trial)
            return False
        elif code == RunError.exit_code and (trial.folder.path / "bad_step.json").exists():
            self._finish(trial, "failed", cause=str(error.get("what", "")).split("\n", 1)[0])
        elif code in STOPPED:
            trial.held.close()
            self.received.append(code - 128)
            log.say(f"trial {trial.number} was stopped from outside, so the sweep stops too", "sweep")
        else:
            kinds: dict[int, type[SftplayError]] = {kind.exit_code: kind for kind in (SftplayError, DataError)}
            where = f"trial {trial.number} ({self.trials / f'trial-{trial.number:03}.log'})"
            fix = f"{error.get('fix') or 'read that file'}; the same command goes on with this trial"
            raise kinds.get(code, RunError)(cause or f"ended with code {code}", where=where, fix=fix)
        return True

    def _final_figure(self, trial: ActiveTrial) -> float:
        """The figure of the weights that the run has kept."""
        train, found = trial.cfg.train, dict(read_evaluations(trial.folder, self.space.metrics))
        if not found and not self.space.halving:
            after = _find_figure(read_object(trial.folder.eval / "after.json"), self.space.metrics)
            found = {} if after is None else {0: after}
        if not found:
            what = f"the run has ended and never measured {' or '.join(self.space.metrics)}"
            fix = "set train.eval_steps, or without halving eval.after=true; then choose another NAME="
            raise RunError(what, where=str(trial.folder.eval), fix=fix)
        decides = train.best_metric or ("loss" if train.early_stopping else "")  # by what figure weights are kept
        known = dict(read_evaluations(trial.folder, (decides,)))
        choose = min if is_less_better(decides) else max
        steps = [step for step in known if step in found and not math.isnan(known[step])]
        return found[choose(steps, key=known.__getitem__, default=max(found))]

    def _finish(self, trial: ActiveTrial, state: str, **facts: Any) -> None:
        status = trial.folder.read_json("status.json")
        steps = as_number(read_object(trial.folder.path / "manifest.json").get("steps"))
        result = {"state": state, "figure": None, "cause": "", "run": str(trial.folder.path), **facts}
        result |= {"step": status.get("step"), "steps": int(steps) if steps else None}
        figure = result["figure"]
        if figure is not None and not math.isfinite(figure):  # JSON has no such number
            result |= {"figure": None, "cause": result["cause"] or self.space.describe(figure)}
            state = result["state"] = "failed" if state == "done" else state
        final = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(state, TrialState.FAIL)
        with locked(self.folder / LOCK):
            self.storage.set_trial_user_attr(self._id(trial.number), "result", result)
            self.study.tell(trial.number, figure if state == "done" else None, state=final)
        trial.held.close()
        log.say(f"trial {trial.number} {state}: {result['cause'] or self.space.describe(figure)}", "sweep")
        self.publish()

    def _stop(self, active: list[ActiveTrial]) -> None:
        """Let all runs end with a checkpoint."""
        for trial in active:
            if trial.process and trial.process.poll() is None:
                trial.process.send_signal(signal.SIGTERM)
        for trial in active:
            if trial.process:
                trial.process.wait()
            trial.held.close()

    def _id(self, number: int) -> int:
        return self.storage.get_trial_id_from_study_id_trial_number(self.storage.get_study_id_from_name(NAME), number)

    def _show(self, active: list[ActiveTrial]) -> None:
        trials = self.study.get_trials(deepcopy=False)
        n_done = sum(trial.state.is_finished() for trial in trials)
        share, running = float(n_done), {trial.number for trial in active}
        text = f"{n_done} of {self.space.n_trials} trials"
        for trial in trials:
            folder = self.run_folder(trial.number)
            steps = as_number(read_object(folder.path / "manifest.json").get("steps"))
            if steps and not trial.state.is_finished():
                step = as_number(folder.read_json("status.json").get("step")) or 0.0
                if trial.number in running:  # status.json is written with checkpoints
                    step = max([step, *(beat.step - 1 for beat in read_heartbeats(folder.path / "logs"))])
                share += min(1.0, step / steps)
                text += f", trial {trial.number} at step {step:.0f} of {steps:.0f}" if trial.number in running else ""
        log.progress(round(100 * share), 100 * self.space.n_trials, what="progress", text=text, tag="sweep")

    def _describe(self, number: int) -> str:
        return ", ".join(f"{key}={flow(value)}" for key, value in self._values(number).items())

    def _values(self, number: int) -> dict[str, Any]:
        params = self.study.get_trials(deepcopy=False)[number].params
        return {axis.key: axis.decode(params[axis.key]) for axis in self.space.axes}

    def rows(self) -> list[dict[str, Any]]:
        """Return the lines of trials.jsonl."""
        rows = []
        for trial in self.study.get_trials(deepcopy=False):
            state = "running" if is_locked(self._lock(trial.number)) else "stopped"
            if state == "stopped" and self._decide(trial.number) is None:
                state = "waiting"
            run = str(self.run_folder(trial.number).path)
            row = {"number": trial.number, "state": state, "params": self._values(trial.number), "figure": None}
            row |= {"run": run, "cause": "", "step": None, "steps": None, **trial.user_attrs.get("result", {})}
            compared = {key.removeprefix(RUNG): v for key, v in trial.user_attrs.items() if key.startswith(RUNG)}
            row["compared"] = {share: figure if math.isfinite(figure) else None for share, figure in compared.items()}
            rows.append(row)
        return rows

    def best(self, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the row of the best finished trial, of equal ones the first; None where none has finished."""
        sign = 1 if self.space.is_less_better else -1
        return min((row for row in rows if row["state"] == "done"), key=lambda row: sign * row["figure"], default=None)

    def publish(self) -> list[dict[str, Any]]:
        """Write trials.jsonl, and best.yaml where a trial has finished; return the rows."""
        with locked(self.folder / LOCK):
            rows = self.rows()
            write_text(self.folder / TRIALS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            if best := self.best(rows):
                params = self.study.get_trials(deepcopy=False)[best["number"]].params
                cfg = self.space.configure(self.base, params, run_name=f"{self.name}-best")
                path, shown = self.folder / BEST, self.space.describe(best["figure"])
                head = f"The best of {plural(len(rows), 'trial')} of the sweep {self.name}"
                head += f", number {best['number']}: {shown}."
                again = f"make train CONFIG={shlex.quote(str(path))}"
                again += f" NPROC={self.args.nproc}" if self.args.nproc else ""
                write_text(path, _with_comment(dump_given(cfg), f"{head}\n# Train it again: {again}"))
        return rows


def _runs_elsewhere(folder: RunFolder) -> RunError:
    return RunError("still runs elsewhere", where=str(folder.path), fix="wait for its end, or stop it")


def read_evaluations(folder: RunFolder, metrics: tuple[str, ...], *, after: int = 0) -> list[tuple[int, float]]:
    """Return step and figure of each evaluation in eval/ behind step `after`, in order; the first metric it has."""
    numbers = [path.stem.removeprefix("step-") for path in folder.eval.glob("step-*.json")]
    steps = sorted(int(number) for number in numbers if number.isdecimal() and int(number) > after)
    figures = {step: _find_figure(read_object(folder.eval / f"step-{step}.json"), metrics) for step in steps}
    return [(step, figure) for step, figure in figures.items() if figure is not None]


def _find_figure(figures: dict[str, Any], metrics: tuple[str, ...]) -> float | None:
    return next((value for key in metrics if (value := as_number(figures.get(key))) is not None), None)


def _key(rung: float) -> str:
    return f"{RUNG}{rung:.4g}"


def _with_comment(text: str, comment: str) -> str:
    head, _, rest = text.partition("\n")
    return f"{head}\n# {comment}\n{rest}"


def _cut_torn_line(path: Path) -> None:
    """Remove what a power cut or a full disk has left of the journal's last line."""
    with path.open("r+b") as journal:
        if size := journal.seek(0, os.SEEK_END):
            journal.seek(size - 1)
            if journal.read() != b"\n":
                journal.seek(0)
                journal.truncate(journal.read().rfind(b"\n") + 1)
