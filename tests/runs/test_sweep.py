"""Sweeps with a stand-in for the run of a trial: values, states, halving, several processes, and what ends a sweep."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import HANG_S, wait_until

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError
from sftplay.heartbeat import Heartbeat, heartbeat_path
from sftplay.report.sweep import build_table, describe_savings, find_shares

pytest.importorskip("optuna", reason="needs the extra sweep")

from sftplay.runs import sweep
from sftplay.runs.sweep import Sweep
from sftplay.runs.sweep_space import read_space

STAND_IN = r"""
import json, os, re, signal, sys, time
received = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: received.append(number))
text = open(sys.argv[sys.argv.index("--config") + 1]).read()
def read(key):
    return re.search(rf"^ *{key}: ([^ \n]+)", text, re.M)[1].strip('"')
name, rate, steps = read("run_name"), float(read("learning_rate")), int(read("max_steps"))
folder = os.path.join(read("output_dir"), name)
os.makedirs(os.path.join(folder, "eval"), exist_ok=True)
def write(path, content):
    path = os.path.join(folder, path)
    with open(path + ".new", "w") as file:
        json.dump(content, file)
    os.replace(path + ".new", path)
home = os.environ["HOME_OF_TEST"]
with open(os.path.join(home, "starts.txt"), "a") as file:
    file.write(name + " " + os.environ.get("OMP_NUM_THREADS", "-") + "\n")
plan = json.load(open(os.path.join(home, "plan.json"))).get(name.rpartition("-")[2], {})
write("config.resolved.yaml", {})
write("manifest.json", {"steps": steps})
step = 0
try:
    step = json.load(open(os.path.join(folder, "status.json")))["step"]
except OSError:
    pass
while step < steps:
    if step == plan.get("at", 0) and "code" in plan:
        if plan.get("bad_step"):
            write("bad_step.json", {})
        error = {"code": plan.get("error", "run"), "what": plan.get("what", "it ended\nso")}
        print(json.dumps({"error": {**error, "where": "somewhere", "fix": "mend it"}}), flush=True)
        if plan["code"] < 0:
            os.kill(os.getpid(), -plan["code"])
        os._exit(plan["code"])
    step += 1
    # The best rate is 0.003; figures of early steps have the same order.
    loss = abs(rate - 0.003) * 100 + 1 / step
    if step in plan.get("measured", [step]):
        write(f"eval/step-{step}.json", {"step": step, "loss": plan.get("loss", loss)})
    time.sleep(plan.get("sleep", 0.01))
    if received:
        write("status.json", {"state": "stopped", "step": step})
        os._exit(128 + received[0])
write("status.json", {"state": "done", "step": step})
print(json.dumps({"run": folder, "state": "done"}))
"""

GRID = "train.learning_rate=0.001,0.002,0.003,0.004 train.weight_decay=0,0.1"


class Home:
    """A folder with a config, whose runs are stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root, self.config = root, root / "run.yaml"
        values = {
            "seed": 7, "output_dir": str(root / "outputs"), "model": {"name": "builtin:tiny"},
            "train": {"max_steps": 8, "eval_steps": 1, "batch_size": 4, "effective_batch_size": 8},
            "data": {"train_path": str(root / "rows.jsonl"), "processed_dir": str(root / "processed")},
        }  # fmt: skip
        self.config.write_text(json.dumps(values, indent=1))
        self.plan()

    def plan(self, **runs: dict[str, Any]) -> None:
        """What happens to the runs by the numbers of their trials: t001=..."""
        (self.root / "plan.json").write_text(json.dumps({name[1:]: plan for name, plan in runs.items()}))

    def arguments(self, **changes: Any) -> Namespace:
        usual = {"config": str(self.config), "overrides": [], "grid": "", "space": "", "parallel": 1, "nproc": None}
        return Namespace(**{**usual, "halving": None, **changes})

    def open(self, *, name: str = "s", **changes: Any) -> Sweep:
        args = self.arguments(**{"grid": "" if "space" in changes else GRID, **changes})
        base = load_config(args.config, args.overrides)
        return Sweep(args, base, read_space(args, base), name=name)

    def space(self, text: str) -> str:
        path = self.root / "space.yaml"
        path.write_text(text)
        return str(path)

    def starts(self) -> list[str]:
        path = self.root / "starts.txt"
        return [line.split()[0].rpartition("-")[2] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def start(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-S", "-E", str(tmp_path / "stand_in.py"), *argv], **options)

    monkeypatch.setattr(sweep, "TiedPopen", start)
    monkeypatch.setattr(sweep, "POLL_S", 0.005)
    monkeypatch.setenv("HOME_OF_TEST", str(tmp_path))
    return Home(tmp_path)


def read_refusals(home: Home, **changes: Any) -> list[str]:
    args = home.arguments(**changes)
    with pytest.raises(ConfigError) as found:
        read_space(args, load_config(args.config, args.overrides))
    return [f"{p.where}: {p.what} | {p.fix}" for p in getattr(found.value, "problems", [found.value])]


def best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return min((row for row in rows if row["state"] == "done"), key=lambda row: row["figure"])


# Values


def test_the_values_of_a_grid_are_those_that_overrides_would_set(home):
    grid = "train.learning_rate=auto,1e-5 tuning.lora.target_modules=auto,[q_proj, v_proj] data.system='a, b'"
    args = home.arguments(grid=grid)
    space = read_space(args, load_config(args.config))
    assert space.n_trials == 4
    configs = [
        space.configure(load_config(args.config), space.sample(n, [], seed=1), run_name=f"r{n}") for n in range(4)
    ]
    assert [(cfg.train.learning_rate, cfg.tuning.lora.target_modules) for cfg in configs] == [
        ("auto", "auto"), ("auto", ["q_proj", "v_proj"]), (1e-5, "auto"), (1e-5, ["q_proj", "v_proj"]),
    ]  # fmt: skip
    assert {cfg.data.system for cfg in configs} == {"a, b"}
    assert configs[0].origins["train.learning_rate"] == "GRID"


def test_an_apostrophe_or_a_bracket_within_a_word_swallows_no_comma_behind_it(home):
    read = {
        "data.system=it's,x seed=1,2": [("it's", "x"), (1, 2)],
        "data.system=a],b seed=1,2": [("a]", "b"), (1, 2)],
        "data.system='it''s, so',null": [("it's, so", None)],
    }
    for grid, values in read.items():
        space = read_space(home.arguments(grid=grid), load_config(home.config))
        assert [axis.choices for axis in space.axes] == values


def test_a_misspelt_key_or_a_wrong_value_is_refused_with_the_nearest_name_and_its_line(home):
    assert read_refusals(home, grid="train.learning_rat=1 tuning.lora.r=8,x") == [
        "GRID train.learning_rat: no key called 'learning_rat' in train | did you mean 'learning_rate'?",
        "GRID tuning.lora.r: 'x' is not a whole number of at least 1 | write a whole number of at least 1",
    ]
    path = home.space(
        "trials: 3\nvalues:\n  train.learning_rat: [1]\n  tuning.lora.r: {low: 8, high: 9.5}\n"
        "  tuning.mode: [lora, qlroa]\n"
    )
    assert read_refusals(home, space=path) == [
        f"{path}:3 train.learning_rat: no key called 'learning_rat' in train | did you mean 'learning_rate'?",
        f"{path}:4 tuning.lora.r: 9.5 is not a whole number of at least 1 | write a whole number of at least 1",
        f"{path}:5 tuning.mode: no mode called 'qlroa' | did you mean 'qlora'?",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trails: 3\nvalues: {seed: [1]}", ":1 trails: no key called 'trails' | did you mean 'trials'?"),
        ("trials: 3", " values: Field required"),
        ("trials: 3\nvalues:\n  seed: {low: 1, high: 1}", ":3 seed: low 1 is not below high 1"),
        ("trials: 3\nvalues:\n  seed: {low: 1, hihg: 2}", "did you mean 'high'?"),
        ("trials: 3\nvalues:\n  train.weight_decay: {low: 0, high: 1, log: true}", "log goes with a low above 0"),
        ("trials: 3\nvalues:\n  train.weight_decay: {low: 0, high: 1, step: 0.3}", "step 0.3 does not lead from low 0"),
        ("trials: 3\nvalues:\n  tuning.mode: {low: 1, high: 2}", ":3 tuning.mode: takes no numbers"),
        ("trials: 3\nvalues:\n  train: {learning_rate: [1]}", "keys with dots"),
        ("trials: 3\nvalues:\n  train.bf16: [true, false]", "is no key with a value"),
        ("values:\n  seed: [1]", " trials: required by sampler tpe, but not given"),
        ("sampler: grid\nvalues:\n  seed: {low: 1, high: 2}", ":3 seed: a grid has no ranges"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused_with_its_place(home, text, said):
    assert said in "\n".join(read_refusals(home, space=home.space(text)))


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("run_name=a,b", "cannot be swept: each trial's run has a name of its own"),
        ("seed=1,1", "has 1 twice"),
        ("seed=1 seed=2", "is given twice"),
        ("seed=1,", "has an empty value"),
        ("train.warmup_ratio=[1", "is not YAML"),
        (" ", "GRID: is empty"),
    ],
)
def test_a_grid_that_is_no_grid_is_refused(home, grid, said):
    assert said in "\n".join(read_refusals(home, grid=grid))


def test_a_swept_key_of_the_command_line_and_a_missing_space_are_refused(home):
    assert "set on the command line too" in read_refusals(home, grid="seed=1", overrides=["seed=2"])[0]
    assert "neither is given" in read_refusals(home)[0]
    assert "both are given" in read_refusals(home, grid="seed=1", space="x.yaml")[0]


RANGES = """\
sampler: {sampler}
trials: 24
values:
  train.learning_rate: {{low: 1e-5, high: 1e-3, log: true}}
  tuning.lora.r: {{low: 4, high: 64, log: true}}
  train.weight_decay: {{low: 0, high: 0.3, step: 0.1}}
  tuning.mode: [lora, full]
"""


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_sampled_point_depends_on_seed_number_and_history_alone_and_is_typed_by_the_config(home, sampler):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    args = home.arguments(space=home.space(RANGES.format(sampler=sampler)))
    base = load_config(args.config)
    space, history = read_space(args, base), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(24):
            params = space.sample(number, history, seed=3)
            assert params == space.sample(number, history, seed=3)
            distributions = {axis.key: axis.distribution() for axis in space.axes}
            value = abs(params["train.learning_rate"] - 3e-4)
            history.append(optuna.trial.create_trial(params=params, distributions=distributions, value=value))
    points = [trial.params for trial in history]
    assert len({json.dumps(point) for point in points}) == 24
    assert space.sample(0, [], seed=4) != points[0]
    for point in points:
        cfg = space.configure(base, point, run_name="x")
        assert 1e-5 <= cfg.train.learning_rate <= 1e-3
        assert float(f"{cfg.train.learning_rate:.4g}") == cfg.train.learning_rate
        assert isinstance(cfg.tuning.lora.r, int)
        assert 4 <= cfg.tuning.lora.r <= 64
        assert cfg.train.weight_decay in (0, 0.1, 0.2, 0.3)
    assert {cfg["tuning.mode"] for cfg in points} == {"lora", "full"}
    other = [optuna.trial.create_trial(params=t.params, distributions=distributions, value=-t.value) for t in history]
    assert (space.sample(20, other[:20], seed=3) == points[20]) == (sampler == "random")  # tpe learns


# Trials


def test_every_trial_is_a_run_with_its_own_config_and_the_best_has_one_to_train_again(home):
    work = home.open()
    assert work.run() == 0
    rows = work.rows()
    assert [row["state"] for row in rows] == ["done"] * 8
    assert [row["figure"] for row in rows] == [
        abs(row["params"]["train.learning_rate"] - 0.003) * 100 + 1 / 8 for row in rows
    ]
    assert json.loads((work.folder / "trials.jsonl").read_text().splitlines()[4]) == rows[4]
    assert home.starts() == [f"{n:03}" for n in range(8)]
    cfg = load_config(work.trials / "trial-005.yaml")
    assert (cfg.run_name, cfg.train.learning_rate, cfg.train.weight_decay) == ("s-trial-005", 0.003, 0.1)
    text = (work.folder / "best.yaml").read_text()
    assert "number 4: held-out loss 0.125" in text
    assert "learning_rate: 0.003  # GRID" in text
    assert f"max_steps: 8  # {home.config}:" in text
    best_cfg = load_config(work.folder / "best.yaml")
    by_hand = load_config(home.config, ["train.learning_rate=0.003", "train.weight_decay=0", "run_name=s-best"])
    assert best_cfg.model_dump() == by_hand.model_dump()
    assert home.open().run() == 0  # finished: nothing is started
    assert len(home.starts()) == 8


def test_what_config_and_memory_refuse_and_a_step_that_is_not_finite_are_trials_with_their_cause(home):
    home.plan(
        t001={"code": 3, "error": "machine", "what": "does not fit\nmore"}, t002={"code": 5, "bad_step": True, "at": 3}
    )
    work = home.open(grid="train.learning_rate=0.001,0.002,0.003,0.004 train.effective_batch_size=8,6")
    assert work.run() == 0
    rows = work.rows()
    assert [row["state"] for row in rows] == ["done", "refused", "failed", *["refused", "done"] * 2, "refused"]
    assert rows[1]["cause"].startswith("GRID train.effective_batch_size: ") or "does not divide" in rows[1]["cause"]
    assert rows[2]["cause"] == "it ended"
    assert home.starts() == ["000", "002", "004", "006"]
    home.plan(t000={"code": 3, "error": "machine", "what": "does not fit\nmore"})
    work = home.open(name="memory", grid="seed=1,2 train.learning_rate=0.1")
    assert work.run() == 0
    assert [(row["state"], row["cause"]) for row in work.rows()] == [
        ("refused", "somewhere: does not fit"),
        ("done", ""),
    ]


def test_a_figure_that_is_not_finite_is_no_result(home):
    home.plan(t001={"loss": float("nan")})
    work = home.open(grid="train.learning_rate=0.001,0.002")
    assert work.run() == 0
    assert [(row["state"], row["cause"]) for row in work.rows()] == [
        ("done", ""),
        ("failed", "held-out loss not finite"),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.early_stopping=9"], 3.0),  # it keeps the weights with the lowest loss, whatever trials compare by
        (["train.best_metric=loss"], 3.0),
        ([], 5.0),
    ],
)
def test_the_figure_is_that_of_the_weights_that_the_run_has_kept(home, words, expected):
    text = "metric: reward\nsampler: grid\nvalues: {train.learning_rate: [0.1]}"
    work = home.open(space=home.space(text), overrides=words)
    trial = sweep.ActiveTrial(0, load_config(home.config, words), work.run_folder(0), sweep.ExitStack())
    trial.folder.eval.mkdir(parents=True)
    for step, (loss, reward) in enumerate([(2.0, 9.0), (1.0, 3.0), (1.5, 4.0), (float("nan"), 5.0)], start=1):
        (trial.folder.eval / f"step-{step}.json").write_text(json.dumps({"loss": loss, "reward": reward}))
    assert work._final_figure(trial) == expected


def test_weights_that_were_never_measured_on_the_way_have_the_first_of_the_figures_after(home):
    work = home.open()
    object.__setattr__(work.space, "metrics", ("pass", "reward"))
    trial = sweep.ActiveTrial(0, work.base, work.run_folder(0), sweep.ExitStack())
    trial.folder.eval.mkdir(parents=True)
    (trial.folder.eval / "after.json").write_text('{"pass": 0.25, "reward": 2.0}')
    assert work._final_figure(trial) == 0.25


def test_a_loss_that_is_never_a_number_fails_with_early_stopping_too(home):
    home.plan(t000={"loss": float("nan")})
    work = home.open(grid="train.learning_rate=0.001", overrides=["train.early_stopping=3"])
    assert work.run() == 0
    assert [(row["state"], row["cause"]) for row in work.rows()] == [("failed", "held-out loss not finite")]


def test_evaluations_that_were_seen_are_not_read_again(home):
    folder = home.open().run_folder(0)
    folder.eval.mkdir(parents=True)
    for step in (0, 2, 10):
        (folder.eval / f"step-{step}.json").write_text('{"loss": 1}')
    (folder.eval / "step-2.jsonl").touch()
    assert sweep.read_evaluations(folder, ("loss",)) == [(2, 1.0), (10, 1.0)]
    assert sweep.read_evaluations(folder, ("loss",), after=2) == [(10, 1.0)]


def test_a_run_that_another_start_holds_is_no_refused_trial(home, monkeypatch):
    home.plan(t000={"code": 2, "error": "config", "what": "run is running"})
    held, start = sweep.ExitStack(), sweep.TiedPopen

    def hold_and_start(*args: Any, **options: Any) -> Any:
        work.run_folder(0).create()
        held.enter_context(sweep.locked(work.run_folder(0).path / ".lock"))
        return start(*args, **options)

    monkeypatch.setattr(sweep, "TiedPopen", hold_and_start)
    work = home.open(grid="train.learning_rate=0.1")
    with held, pytest.raises(RunError, match="still runs elsewhere"):
        work.run()
    assert work.rows()[0]["state"] == "stopped"
    home.plan()
    monkeypatch.setattr(sweep, "TiedPopen", start)
    assert work.run() == 0
    assert work.rows()[0]["state"] == "done"


@pytest.mark.parametrize(("code", "kind"), [(4, DataError), (1, SftplayError), (5, RunError)])
def test_bad_data_a_bug_and_a_full_disk_end_the_sweep_and_the_same_command_goes_on(home, code, kind):
    home.plan(t002={"code": code, "at": 2})
    with pytest.raises(kind) as found:
        home.open().run()
    assert found.value.exit_code == code
    assert found.value.where.startswith("trial 2 (")
    assert [row["state"] for row in home.open().rows()] == ["done", "done", "stopped"]
    home.plan()
    work = home.open()
    assert work.run() == 0
    assert [row["state"] for row in work.rows()] == ["done"] * 8
    assert home.starts().count("002") == 2


def test_a_run_that_dies_goes_on_and_one_that_always_dies_fails(home):
    home.plan(t001={"code": -9, "at": 2})
    work = home.open(grid="train.learning_rate=0.001,0.002,0.003")
    assert work.run() == 0
    rows = work.rows()
    assert [row["state"] for row in rows] == ["done", "failed", "done"]
    assert rows[1]["cause"] == "somewhere: it ended"
    assert home.starts() == ["000", *["001"] * sweep.DEATHS, "002"]


def test_a_sweep_whose_space_or_config_differs_is_refused_and_more_trials_are_not(home):
    home.open()
    with pytest.raises(ConfigError) as found:
        home.open(
            grid="train.learning_rate=0.001 train.weight_decay=0,0.1", overrides=["seed=8", "data.val_path=x.jsonl"]
        )
    texts = [f"{p.where}: {p.what}" for p in found.value.problems]
    folder = home.root / "outputs" / "sweeps" / "s"
    assert texts == [
        f"{folder} sweep: train.learning_rate: was [0.001, 0.002, 0.003, 0.004] and is [0.001] now",
        f"{folder} data.val_path: was null and is x.jsonl now",
        f"{folder} seed: was 7 and is 8 now",
    ]
    home.open(overrides=["logging.steps=5"])  # changes no figure
    with pytest.raises(ConfigError, match="was null and is 5 now"):
        home.open(overrides=["hrm.eval_limit=5"])
    with pytest.raises(ConfigError, match="is 5 now"):
        home.open(overrides=["eval.limit=5"])
    for trials in (2, 3):
        text = f"sampler: random\ntrials: {trials}\nvalues: {{seed: {{low: 1, high: 99}}}}"
        work = home.open(name="grows", space=home.space(text), overrides=["train.learning_rate=0.1"])
        assert work.run() == 0
        assert len(work.rows()) == trials
    with pytest.raises(ConfigError, match="has 3 trials already, and 2 are asked for"):
        home.open(name="grows", space=home.space(text.replace("3", "2")), overrides=["train.learning_rate=0.1"])


def test_runs_of_somebody_else_by_the_same_name_are_left_alone(home):
    work = home.open()
    work.run_folder(0).create()
    (work.run_folder(0).path / "config.resolved.yaml").touch()
    with pytest.raises(ConfigError, match="a run called 's-trial-000' exists") as found:
        work.run()
    assert "NAME=" in found.value.fix
    assert home.starts() == []


def test_a_torn_line_at_the_end_of_the_journal_is_removed(home):
    work = home.open(grid="train.learning_rate=0.001,0.002")
    with (work.folder / "journal.log").open("a") as journal:
        journal.write('{"op_code":4,"work')
    work = home.open(grid="train.learning_rate=0.001,0.002")
    assert work.run() == 0
    assert [row["state"] for row in work.rows()] == ["done", "done"]


def test_a_torn_line_is_removed_before_another_process_writes_the_next(home):
    work = home.open(grid="train.learning_rate=0.001,0.002")
    with (work.folder / "journal.log").open("a") as journal:
        journal.write('{"op_code":4,"work')
    assert work.run() == 0
    rows = home.open(grid="train.learning_rate=0.001,0.002").rows()
    assert [row["state"] for row in rows] == ["done", "done"]


def test_a_folder_that_cannot_be_made_and_a_journal_that_cannot_be_read_are_no_tracebacks(home):
    (home.root / "file").touch()
    with pytest.raises(MachineError, match="cannot be made"):
        home.open(overrides=[f"output_dir={home.root / 'file'}"])
    journal = home.open().folder / "journal.log"
    journal.write_bytes(b"odd\n" + journal.read_bytes())
    with pytest.raises(RunError, match="has a line that cannot be read"):
        home.open()


def test_a_line_that_another_process_is_writing_is_left_to_it(home):
    journal = home.open().folder / "journal.log"
    *_, line = journal.read_bytes().splitlines(keepends=True)
    second = threading.Thread(target=home.open)
    with sweep.locked(journal.with_name(".journal.lock")):
        with journal.open("ab") as file:
            file.write(line[:9])
        second.start()
        second.join(0.5)
        assert journal.read_bytes().endswith(line + line[:9])
        with journal.open("ab") as file:
            file.write(line[9:])
    second.join(HANG_S)
    assert not second.is_alive()
    for content in journal.read_text().splitlines():
        json.loads(content)


def test_the_progress_counts_the_steps_of_what_runs_by_its_heartbeat(home, monkeypatch):
    said = []
    monkeypatch.setattr(sweep.log, "progress", lambda done, total, *, text, **_: said.append((done, total, text)))
    home.plan(t000={"sleep": 0.1})
    work = home.open(grid="train.learning_rate=0.001,0.002")
    logs = work.run_folder(0).path / "logs"
    logs.mkdir(parents=True)
    Heartbeat(heartbeat_path(logs, 0)).enter("forward", step=7)  # it works on the seventh, of eight
    assert work.run() == 0
    assert (75, 200, "0 of 2 trials, trial 0 at step 6 of 8") in said


def test_a_run_that_is_stopped_from_outside_stops_the_sweep_with_the_same_code(home):
    home.plan(t001={"code": 143, "at": 3})
    work = home.open(grid="train.learning_rate=0.001,0.002,0.003")
    assert work.run() == 143
    assert [row["state"] for row in work.rows()] == ["done", "stopped"]
    home.plan()
    assert home.open(grid="train.learning_rate=0.001,0.002,0.003").run() == 0
    assert home.starts() == ["000", "001", "001", "002"]


def test_ctrl_c_stops_the_runs_with_a_checkpoint_and_the_sweep_goes_on_later(home):
    home.plan(t000={"sleep": 0.05}, t001={"sleep": 0.05})
    work = home.open(parallel=2)
    pid = os.getpid()
    threading.Thread(target=lambda: (wait_until(lambda: len(home.starts()) == 2), os.kill(pid, signal.SIGINT))).start()
    assert work.run() == 130
    assert [row["state"] for row in work.rows()] == ["stopped", "stopped"]
    for number in (0, 1):
        assert work.run_folder(number).read_json("status.json")["state"] == "stopped"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    home.plan()
    assert home.open(parallel=2).run() == 0
    assert sorted(home.starts()) == sorted([*(f"{n:03}" for n in range(8)), "000", "001"])


# Halving


def sweep_table(work: Sweep) -> list[tuple[Any, ...]]:
    return [
        tuple(row[key] for key in ("number", "state", "params", "figure", "cause", "compared")) for row in work.rows()
    ]


def test_halving_keeps_the_best_half_at_each_rung_in_whatever_order_they_come(home):
    tables = []
    for name, parallel, rates in (("one", 1, "0.001,0.0015,0.002,0.0027"), ("two", 3, "0.0027,0.002,0.0015,0.001")):
        work = home.open(name=name, grid=f"train.learning_rate={rates}", halving=2, parallel=parallel)
        assert work.run() == 0
        tables.append({row[2]["train.learning_rate"]: (*row[1:2], *row[3:]) for row in sweep_table(work)})
        rows = {row["params"]["train.learning_rate"]: row for row in work.rows()}
    assert tables[0] == tables[1]
    # Four trials with rungs at 1, 2 and 4 of 8 steps: two go on from the first, one from the second.
    assert {rate: list(row["compared"]) for rate, row in rows.items()} == {
        0.001: ["0.125"], 0.0015: ["0.125"], 0.002: ["0.125", "0.25"], 0.0027: ["0.125", "0.25", "0.5"],
    }  # fmt: skip
    assert {rate: row["state"] for rate, row in rows.items() if row["state"] == "done"} == {0.0027: "done"}
    assert rows[0.0015]["cause"] == "held-out loss 1.15 at 1/8 of the run: not among the best 2 of 4"
    assert rows[0.002]["cause"] == "held-out loss 0.6 at 1/4 of the run: not among the best 1 of 2"


def test_the_figures_at_the_end_of_a_run_are_compared_at_no_rung(home):
    # Measured at 1/8 and at the end: what follows the rung at 1/4 is the result, and the trial is not pruned by it.
    work = home.open(grid="train.learning_rate=0.001,0.0027", halving=2)
    home.plan(t000={"measured": [1, 8]}, t001={"measured": [1, 8]})
    assert work.run() == 0
    rows = {row["params"]["train.learning_rate"]: row for row in work.rows()}
    assert list(rows[0.0027]["compared"]) == ["0.125"]


def test_halving_by_three_compares_at_a_ninth_and_a_third(home):
    space = read_space(args := home.arguments(grid=GRID, halving=3), load_config(args.config))
    assert space.rungs == pytest.approx([1 / 9, 1 / 3])
    assert read_space(home.arguments(grid=GRID, halving=4), load_config(args.config)).rungs == [1 / 4]


def test_evaluations_that_come_too_late_for_the_first_comparison_are_refused(home):
    late = ["train.max_steps=100", "train.eval_steps=14"]
    said = "is 14, and halving compares trials first at step 13 of 100 | set it to 13 or less"
    refusals = read_refusals(home, grid="seed=1,2", halving=2, overrides=late)
    assert refusals == [f"command line train.eval_steps: {said}"]
    for words in (["train.max_steps=100", "train.eval_steps=13"], ["train.max_steps=4", "train.eval_steps=1"]):
        args = home.arguments(grid="seed=1,2", halving=2, overrides=words)
        assert read_space(args, load_config(args.config, words)).halving == 2


def test_trials_of_tpe_are_compared_in_cohorts_so_that_later_ones_learn(home):
    text = "sampler: tpe\ntrials: 12\nhalving: 2\nvalues: {train.learning_rate: {low: 0.001, high: 0.005}}"
    work = home.open(space=home.space(text), parallel=2)
    assert [work.space.cohort(n) for n in (0, 9, 10, 11)] == [range(10)] * 2 + [range(10, 12)] * 2
    assert work.run() == 0
    rows = work.rows()
    assert [row["state"] for row in rows].count("done") == 2
    assert home.starts().index("010") > max(n for n, name in enumerate(home.starts()) if int(name) < 10)


@pytest.mark.parametrize("halving", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_tpe_goes_on_after_a_stop_as_it_would_have(home, halving):
    text = "sampler: tpe\ntrials: 12\nvalues: {train.learning_rate: {low: 0.001, high: 0.005}}"
    tables = []
    for name, stops in (("whole", ()), ("stopped", ("t004", "t011"))):
        for number in stops:
            home.plan(**{number: {"code": 1}})
            with pytest.raises(SftplayError):
                home.open(name=name, space=home.space(text), halving=halving).run()
        home.plan()
        work = home.open(name=name, space=home.space(text), halving=halving)
        assert work.run() == 0
        tables.append(sweep_table(work))
    assert tables[0] == tables[1]


def test_a_figure_that_is_not_finite_is_pruned_and_leaves_no_json_that_others_cannot_read(home):
    home.plan(t001={"loss": float("inf")}, t002={"loss": float("nan")})
    work = home.open(grid="train.learning_rate=0.001,0.002,0.003,0.004", halving=2)
    assert work.run() == 0

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (work.folder / "trials.jsonl").read_text()
    rows = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [row["state"] for row in rows] == ["pruned", "pruned", "pruned", "done"]
    assert rows[1]["cause"] == "held-out loss not finite at 1/8 of the run: not among the best 2 of 4"
    assert (rows[1]["figure"], rows[1]["compared"]) == (None, {"0.125": None})


def test_a_refused_trial_does_not_hold_up_those_that_wait_at_a_rung(home):
    home.plan(t003={"code": 3})
    work = home.open(grid="train.learning_rate=0.001,0.002,0.003,0.004", halving=2)
    assert work.run() == 0
    assert [row["state"] for row in work.rows()] == ["pruned", "pruned", "done", "refused"]


# Several processes


def test_two_processes_train_each_trial_once_and_wait_for_each_other_at_rungs(home):
    works = [home.open(halving=2), home.open(halving=2)]
    codes: list[int] = []
    # Handlers of signals can be set in the main thread alone.
    for work in works:
        work._catching = lambda active: __import__("contextlib").nullcontext()  # type: ignore[method-assign]
    threads = [threading.Thread(target=lambda work=work: codes.append(work.run())) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert codes == [0, 0]
    rows = works[0].rows()
    assert rows == works[1].rows()
    assert sorted(row["state"] for row in rows) == ["done"] + ["pruned"] * 7
    assert len({row["number"] for row in rows}) == 8
    alone = home.open(name="alone", halving=2)
    assert alone.run() == 0
    assert sweep_table(alone) == sweep_table(works[0])


def test_each_of_two_runs_at_a_time_has_half_of_the_cores(home, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(sweep, "usable_cores", lambda: 9)
    monkeypatch.setattr(sweep, "probe", lambda: SimpleNamespace(gpus=()))
    assert home.open(grid="train.learning_rate=0.001,0.002", parallel=2).run() == 0
    assert {line.split()[1] for line in (home.root / "starts.txt").read_text().splitlines()} == {"4"}


def test_each_run_has_gpus_of_its_own_that_no_other_process_of_the_sweep_takes(home, monkeypatch):
    gpus = tuple(SimpleNamespace(uuid=f"GPU-{n}", machine_index=n, is_mig=False) for n in (0, 1, 4, 5))
    monkeypatch.setattr(sweep, "probe", lambda: SimpleNamespace(gpus=gpus))
    from contextlib import ExitStack

    work = home.open(parallel=2, nproc=1)
    with ExitStack() as held:
        assert [slot["CUDA_VISIBLE_DEVICES"] for slot in work._find_slots(held)] == ["0", "1"]
        with ExitStack() as others:
            with pytest.raises(MachineError, match="need 2 GPUs, 0 are free"):
                home.open(parallel=2, nproc=1)._find_slots(others)
    with ExitStack() as held:
        assert [slot["CUDA_VISIBLE_DEVICES"] for slot in home.open(parallel=2, nproc=2)._find_slots(held)] == [
            "0,1",
            "4,5",
        ]
    with pytest.raises(MachineError, match="need 6 GPUs, 4 are free"):
        home.open(parallel=2, nproc=3)._find_slots(ExitStack())


# The command, its table and its page


@pytest.mark.contract
def test_the_command_prints_one_document_and_writes_table_config_and_page(home, capsys):
    words = ["sweep", "--config", str(home.config), "--grid", GRID, "--name", "cli", "--halving", "2", "--json"]
    assert main(words) == 0
    answer = json.loads(capsys.readouterr().out)
    folder = home.root / "outputs" / "sweeps" / "cli"
    assert (answer["sweep"], answer["best_config"]) == (str(folder), str(folder / "best.yaml"))
    assert answer["best"] == best(answer["trials"])
    assert answer["trials"] == [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    page = Path(answer["report"]).read_text()
    assert "What mattered" in page
    assert "not among the best 4 of 8" in page
    assert "With 8 trials these shares are unsure" in page
    assert main(words[:-1]) == 0
    shown = capsys.readouterr().out
    assert shown.index("Trial") < shown.index("halving has saved") < shown.index("best.yaml")
    first = next(line for line in shown.splitlines() if line.startswith(f"{answer['best']['number']}  "))
    assert first.split()[1:3] == ["done", "0.125"]


@pytest.mark.contract
def test_a_sweep_without_any_figure_ends_with_5_and_one_without_optuna_with_3(home, capsys, monkeypatch):
    home.plan(t000={"code": 2, "error": "config", "what": "no such thing"})
    words = ["sweep", "--config", str(home.config), "--grid", "train.learning_rate=0.1"]
    assert main([*words, "--name", "none"]) == 5
    shown = capsys.readouterr()
    assert "none of 1 trial has a figure; the first: somewhere: no such thing" in shown.err
    assert "refused" in shown.out
    assert main([*words, "--name", "none", "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["error"]["what"].startswith("none of 1 trial has a figure")
    assert main([*words, "--name", "a/b"]) == 2
    assert main([*words, "train.resume=outputs/x/checkpoints/checkpoint-3"]) == 2
    assert main([*words, "data.split=0", "train.eval_steps=null"]) == 2
    assert main([*words, "--halving", "2", "train.eval_steps=null"]) == 2
    assert main([*words, "--gres", "gpu:2"]) == 2
    refusals = [line for line in capsys.readouterr().err.splitlines() if "fix:" not in line]
    assert refusals[-5:] == [
        "--name: 'a/b' cannot be the name of a sweep",
        "command line train.resume: each trial of a sweep starts anew",
        "command line data.split: holds out nothing, and trials compare by what is held out",
        f"{home.config} train.eval_steps: is not set, and halving compares trials from an eighth of their steps on",
        "command line: nodes, GPUs and options of jobs are given, and no trial is a job",
    ]
    monkeypatch.setattr("sftplay.commands.sweep.find_spec", lambda name: None)
    assert main(words) == 3
    assert "make install EXTRAS=sweep" in capsys.readouterr().err


@pytest.mark.contract
def test_a_stopped_sweep_names_the_best_of_what_has_finished(home, capsys, monkeypatch):
    words = ["sweep", "--config", str(home.config), "--grid", "train.learning_rate=0.1", "--name", "end", "--json"]
    assert main(words) == 0
    finished = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sweep.Sweep, "run", lambda self: 130)
    assert main(words) == 130
    assert json.loads(capsys.readouterr().out) == finished
    assert finished["best"]["number"] == 0


@pytest.mark.contract
def test_a_process_that_finds_all_trials_taken_names_no_best_that_is_not_there(home, capsys):
    words = ["sweep", "--config", str(home.config), "--grid", "train.learning_rate=0.1", "--name", "taken"]
    other = home.open(name="taken", grid="train.learning_rate=0.1")
    trial = other._claim()
    assert trial
    assert main([*words, "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["best"], answer["best_config"], answer["trials"][0]["state"]) == (None, None, "running")
    assert "best so far, other processes train on: none yet" in shown.err
    trial.held.close()


def test_the_best_config_says_by_which_command_it_is_trained_again(home):
    work = home.open(grid="train.learning_rate=0.1")
    assert work.run() == 0
    work.folder = Path(shutil.copytree(work.folder, home.root / "my outputs" / "s"))
    best = work.folder / "best.yaml"
    for nproc, more in ((None, []), (2, ["NPROC=2"])):
        work.args.nproc = nproc
        work.publish()
        again = re.search("^# Train it again: (.+)$", best.read_text(), re.MULTILINE)
        assert again
        assert shlex.split(again[1]) == ["make", "train", f"CONFIG={best}", *more]
    assert "\n# The best of 1 trial of the sweep s, number 0: " in best.read_text()


@pytest.mark.contract
def test_words_of_the_config_stand_in_the_page_as_text(home, capsys):
    home.plan(t001={"code": 2, "error": "config", "what": "<i>so</i>"})
    words = ["sweep", "--config", str(home.config), "--grid", "data.system='<b>&amp;',x"]
    assert main([*words, "train.learning_rate=0.1", "--name", "page", "--json"]) == 0
    page = Path(json.loads(capsys.readouterr().out)["report"]).read_text()
    assert "&lt;b&gt;&amp;amp;" in page
    assert "&lt;i&gt;so" in page
    assert "<b>&" not in page
    assert "<i>so" not in page


def test_a_sweep_imports_neither_torch_nor_what_imports_it():
    code = "import sys, sftplay.runs.sweep, sftplay.report.sweep, sftplay.runs.sweep_job; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "peft", "trl", "scipy"} & set(done.stdout.split())


def make_row(number: int, figure: float | None, **more: Any) -> dict[str, Any]:
    usual = {"state": "done", "cause": "", "run": None, "step": 8, "steps": 8, "compared": {}}
    return {"number": number, "figure": figure, "params": {}, **usual, **more}


def test_the_shares_of_the_variance_are_those_of_an_analysis_by_hand():
    # Two factors with two values, figures 1 3 / 5 9. Mean 4.5; a: means 2 and 7, between 2 * 2.5**2 * 2 = 25;
    # b: means 3 and 6, between 9; total 35. Epsilon squared: (between - (total - between) / 2) / total.
    figures = {("x", 1): 1.0, ("x", 2): 3.0, ("y", 1): 5.0, ("y", 2): 9.0}
    rows = [make_row(n, f, params={"b": b, "a": a}) for n, ((a, b), f) in enumerate(figures.items())]
    assert find_shares(rows) == [("a", pytest.approx((25 - 5) / 35), 2), ("b", pytest.approx(0.0), 2)]
    # Of a range: thirds of the sorted values.
    rows = [make_row(n, float(n // 2), params={"r": n / 7}) for n in range(6)]
    assert find_shares(rows) == [("r", pytest.approx(1.0), 3)]
    assert find_shares(rows[:2]) == []


def test_pruned_trials_count_by_the_first_comparison_and_stand_below_the_finished_ones():
    rows = [
        make_row(0, 5.0, state="pruned", step=1, compared={"0.125": 5.0}, params={"a": 1}),
        make_row(1, 2.0, compared={"0.125": 4.0, "0.25": 3.0}, params={"a": 2}),
        make_row(2, 3.0, state="pruned", step=2, compared={"0.125": 4.5, "0.25": 3.0}, params={"a": 2}),
        make_row(3, None, state="refused", step=None, steps=None, cause="too large", params={"a": 1}),
    ]
    table = build_table(rows, metric="loss", is_less_better=True)
    assert [row[:3] for row in table.rows] == [
        ["1", "done", "2"],
        ["2", "pruned", "3"],
        ["0", "pruned", "5"],
        ["3", "refused", "–"],
    ]
    assert describe_savings(rows) == "11 of 24 steps were trained: halving has saved 54%"
    assert describe_savings(rows[1:2]) == ""
    ((key, share, _),) = find_shares(rows)
    # First comparisons 5 | 4, 4.5: total 0.5, between 0.375, within 0.125 with one degree of freedom.
    assert (key, share) == ("a", pytest.approx((0.375 - 0.125) / 0.5))


@pytest.mark.parametrize(("metric", "is_less_better"), [("loss_chats", True), ("perplexity", True), ("acc_t1", False)])
def test_a_loss_of_a_part_is_best_where_it_is_lowest(home, metric, is_less_better):
    path = home.space(f"sampler: random\ntrials: 1\nmetric: {metric}\nvalues: {{seed: [1]}}")
    assert read_space(home.arguments(space=path), load_config(home.config)).is_less_better is is_less_better


def test_the_task_says_by_which_figure_trials_compare(home):
    args = home.arguments(grid="seed=1")
    base = load_config(args.config)
    assert (read_space(args, base).metrics, read_space(args, base).is_less_better) == (("loss",), True)
    for task, metrics in {
        "grpo": ("pass", "reward"),
        "score": ("acc_t2", "acc_t1"),
        "hrm": ("exact_accuracy",),
    }.items():
        cfg = base.model_copy(update={"task_mode": task})
        space = read_space(args, cfg)
        assert (space.metrics, space.is_less_better) == (metrics, False)


def test_a_full_disk_is_said_with_the_name_of_the_journal(tmp_path):
    journal = sweep._Journal(str(tmp_path / "journal.log"))
    journal._file_path = "/dev/full"
    with pytest.raises(OSError, match="No space left") as found:
        journal.append_logs([{"a": 1}])
    assert (found.value.errno, found.value.filename) == (errno.ENOSPC, "/dev/full")
