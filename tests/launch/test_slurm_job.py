"""A run as a SLURM job without a cluster: the job file, what is refused before it is queued, and the job's process.

Where SLURM is asked, programs of these names on PATH stand in for it. The trainer is a stand-in as well.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import HANG_S, wait_until
from slurm_life import Life

from sftplay import signals
from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.slurm import job
from sftplay.launch.slurm.job import (
    Allocation,
    JobFolder,
    add_job,
    newest_job,
    others_command,
    trainer_command,
    write_summary,
)
from sftplay.launch.slurm.request import JobRequest, gpus_in, in_our_names, job_file, limit_seconds
from sftplay.make_arguments import split_args
from sftplay.signals import Echoes


def lines_of(request: JobRequest, folder: str = "/runs/a run") -> list[str]:
    text = job_file(request, Path(folder), chdir=Path("/home/me"), python="/kit/python")
    return text.splitlines()


def test_job_file_says_what_was_asked_for_and_calls_python():
    request = JobRequest(nodes=2, gres="gpu:volta:2", time="12:00:00", partition="xeon", sbatch=("--mem=64G", "-A lab"))
    lines = lines_of(request)
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name='a run'", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:volta:2", "--time=12:00:00",
        "--partition=xeon", "--signal=B:USR1@300", "--requeue", "--open-mode=append",
        "--output='/runs/a run'/slurm-%j.out", "--chdir=/home/me", "--mem=64G", "-A lab",
    ]  # fmt: skip
    assert "command=(/kit/python -m sftplay.launch.slurm.job '/runs/a run' --nproc 2)" in lines
    assert "set -euo pipefail" in lines
    assert not [line for line in lines if "eval" in line or line.startswith("make")]
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "WANDB_MODE"):
        assert [line for line in lines if line.startswith(f"export {variable}=")]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "offline", "MASTER_PORT": "17654"}),
        ({"HF_HUB_OFFLINE": "0"}, {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}),
        ({"MASTER_PORT": "4000", "NCCL_DEBUG": "INFO"}, {"MASTER_PORT": "4000", "NCCL_DEBUG": "INFO"}),
    ],
)
def test_a_shell_runs_the_job_file_and_what_the_user_has_set_stays(
    tmp_path: Path, setting: dict[str, str], expected: dict[str, str]
):
    python = tmp_path / "a python"
    python.write_text('#!/bin/sh\necho "$#" "$3"\nenv\n')
    python.chmod(0o755)
    modules = tmp_path / "modules.sh"
    modules.write_text("export LOADED=yes\n")
    request = JobRequest(setup=modules)
    (tmp_path / "job").write_text(job_file(request, tmp_path / "it's $HOME", chdir=tmp_path, python=str(python)))
    done = subprocess.run(
        ["bash", str(tmp_path / "job")], env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": "37654", **setting},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, *environment = done.stdout.splitlines()
    assert first == f"5 {tmp_path}/it's $HOME"
    assert {f"{key}={value}" for key, value in {**expected, "LOADED": "yes"}.items()} <= set(environment)


def test_gpus_and_time_are_read_as_sbatch_reads_them():
    """sbatch(1): --gres is `name[[:type]:count]`, with commas; a bare number in --time is minutes."""
    texts = ["gpu:volta:2", "gpu:2", "gpu", "gpu:a100", "craynetwork:4", "gpu:1,gpu:b:2"]
    assert [gpus_in(text) for text in texts] == [2, 2, 1, 1, 0, 3]
    times = ["30", "12:00:00", "1-12", "1:30", "2-00:00:10"]
    assert [limit_seconds(text) for text in times] == [1800, 43200, 129600, 90, 172810]
    with pytest.raises(ConfigError, match="is no time limit"):
        limit_seconds("3h")


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (JobRequest(gres="gpu:2", gpus_per_node=2), "asked for twice"),
        (JobRequest(sbatch=("--array=1-4",)), "--array is set by the kit"),
        (JobRequest(sbatch=("-o", "x")), "-o is set by the kit"),
        (JobRequest(sbatch=("lab",)), "'lab' is no option"),
        (JobRequest(sbatch=("--comment=x\n#SBATCH --array=1",)), "is no option"),
        (JobRequest(setup=Path("/nowhere")), "no such file"),
        (JobRequest(time="soon"), "is no time limit"),
    ],
)
def test_request_that_cannot_be_meant_is_refused(request_: JobRequest, what: str):
    with pytest.raises(ConfigError, match=what):
        request_.check()


def test_names_of_other_kits_become_ours_and_together_decide_the_effective_batch():
    typed = ["--training_args.max_steps=50", "seed=3", "--evaluation.eval_interval_steps=10"]
    assert in_our_names(typed, world_size=2) == (["train.max_steps=50", "seed=3", "train.eval_steps=10"], [])
    sizes = ["training_args.per_device_train_batch_size=1", "training_args.gradient_accumulation_steps=4"]
    ours, notes = in_our_names(sizes, world_size=2)
    assert ours == ["train.batch_size=1", "train.grad_accum=4", "train.effective_batch_size=8"]  # 1 x 4 x 2
    assert notes == ["train.effective_batch_size is 8: 1 rows x 4 micro-batches x 2 processes"]
    assert in_our_names([*sizes, "train.effective_batch_size=16"], world_size=2)[0][2:] == [
        "train.effective_batch_size=16"
    ]
    with pytest.raises(ConfigError, match=r"no 'training_args.max_step'") as caught:
        in_our_names(["--training_args.max_step=5"], world_size=1)
    assert caught.value.fix == "did you mean training_args.max_steps?"


def submit(config: Path, *words: str) -> int:
    return main(["submit", "--config", str(config), *words])


def test_submitted_run_has_its_job_and_shows_it(
    write_config: Callable[..., Path], slurm: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    calls = slurm(
        sbatch="env > $(dirname $0)/environment; echo '17;cluster'",
        squeue="printf '17+1|RUNNING|None|||\\n17+0|PENDING|Resources||1:00|\\n'",
    )
    config = write_config()
    os.environ.update(MAKELEVEL="1", TYPED_ARGS="x")  # as make sets them
    assert submit(config, "--nodes=2", "--json", "--make-args=train.max_steps=3") == 0
    answer = json.loads(capsys.readouterr().out)
    run = Path(answer["run"])
    assert answer == {"job_id": 17, "run": str(run), "job_file": f"{run}/slurm.sbatch"}
    assert calls.read_text() == f"sbatch --parsable {run}/slurm.sbatch\n"
    assert not {"MAKELEVEL", "TYPED_ARGS"} & {
        line.partition("=")[0] for line in (calls.parent / "programs" / "environment").read_text().splitlines()
    }
    assert load_config(run / "slurm.yaml").train.max_steps == 3
    assert main(["status", "--config", str(config), "--run", "run", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["job_id"], facts["state"], facts["reason"]) == (17, "PENDING", "Resources")
    assert main(["logs", "--config", str(config), "--run", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == []
    assert main(["logs", "--config", str(config), "--run", "run", "--json", "--watch"]) == 2
    assert "--watch and --json do not go together" in json.loads(capsys.readouterr().out)["error"]["what"]
    # A second job of the same name would write into the same files.
    assert submit(config) == 2
    assert "the run 'run' has the job 17, which is PENDING" in capsys.readouterr().err
    slurm(squeue="")
    assert main(["cancel", "--config", str(config), "--run", "run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cancelled"] is False


def test_run_that_has_begun_goes_on_in_a_new_job_where_that_is_asked_for(
    write_config: Callable[..., Path], slurm: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    slurm(sbatch="echo 18", squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    config, folder = write_config(), RunFolder(tmp_path / "outputs" / "run")
    folder.create()
    folder.resolved.write_text("")
    folder.update_status(state="stopped", step=3)
    (folder.path / "slurm.jsonl").write_text('{"job_id": 17}\n')
    assert submit(config) == 2
    assert "a run called 'run' exists" in capsys.readouterr().err
    assert submit(config, "train.resume=auto") == 0
    assert newest_job(folder.path) == JobFolder(folder.path, 18)
    assert main(["status", "--config", str(config), "--run", "run"]) == 0
    assert "run: job 18 has left the queue, run stopped at step 3" in capsys.readouterr().out


def test_runs_with_and_without_a_job_are_listed_by_one_call_of_squeue(
    slurm: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answers = "17+1|RUNNING|None|n2|5:00|\\n17+0|RUNNING|None|n1|3:10:00|\\n18|PENDING|Resources|||\\n"
    calls = slurm(squeue=f"printf '{answers}'")
    monkeypatch.chdir(tmp_path)
    for name, number in (("elsewhere", 17), ("waits", 18), ("ended", 19), ("local", None)):
        folder = RunFolder(tmp_path / "outputs" / name)
        folder.create()
        if number:
            (folder.path / "slurm.jsonl").write_text(f'{{"job_id": {number}}}\n')
        if number != 18:
            # A lock that a process of another node holds may not be seen here.
            folder.update_status(state="running", step=3)
    assert main(["status", "--json"]) == 0
    runs = {run["run"]: run for run in json.loads(capsys.readouterr().out)}
    assert {name: (run["state"], run["now"]) for name, run in runs.items()} == {
        "elsewhere": ("RUNNING", "running"), "waits": ("PENDING", "queued"),
        "ended": ("", "died"), "local": ("", "died"),
    }  # fmt: skip
    assert (runs["elsewhere"]["nodes"], runs["elsewhere"]["left"], runs["local"]["job_id"]) == ("n1", "3:10:00", None)
    assert len(calls.read_text().splitlines()) == 1
    assert main(["status"]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert rows["elsewhere"].endswith("17 RUNNING, 3:10:00 left")
    assert rows["waits"].endswith("18 PENDING")


def test_jobs_that_squeue_refuses_in_a_list_are_asked_for_one_by_one(slurm: Callable[..., Path]):
    unknown = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    slurm(squeue=f'case "$3" in --jobs=17) printf "17|RUNNING||||\\n";; *) {unknown};; esac')
    assert {number: facts["state"] for number, facts in job.ask_states([17, 18]).items()} == {17: "RUNNING", 18: ""}


def test_without_slurm_the_runs_are_listed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    folder = RunFolder(tmp_path / "outputs" / "copied")
    folder.create()
    folder.update_status(state="done", step=4)
    (folder.path / "slurm.jsonl").write_text('{"job_id": 17}\n')
    assert main(["status"]) == 0
    row, note = capsys.readouterr().out.splitlines()[1:]
    assert row.split()[:3] == ["copied", "done", "4"]
    assert note.strip() == "SLURM does not say how the job stands: squeue is not on this machine"


def test_a_job_that_sbatch_has_started_trains_here_under_its_own_name(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    path, begun = write_config(run_name=None), []
    monkeypatch.setattr("sftplay.runs.submit.run_job", lambda folder, **words: begun.append((folder, words)) or 7)
    for name, value in (("SLURM_JOB_ID", "17"), ("SLURM_JOB_NUM_NODES", "1"), ("SLURM_GPUS_ON_NODE", "2")):
        monkeypatch.setenv(name, value)
    assert submit(path, "--here") == 7
    ((folder, words),) = begun
    assert (folder.name, words["nproc"]) == ("run-job17", 2)
    assert load_config(folder / job.CONFIG).run_name == "run-job17"
    assert json.loads((folder / "slurm.jsonl").read_text())["job_id"] == 17


BEFORE_THE_QUEUE = [
    (["train.lerning_rate=1"], 2, "no key called 'lerning_rate'"),
    (["--training_args.max_step=1"], 2, "did you mean training_args.max_steps"),
    (["train.max_steps=many"], 2, "train.max_steps"),
    (["--nodes=3"], 2, "effective batch 8 cannot be split exactly over 3 process(es)"),
    (["--nodes=2", "cluster.max_restarts=1"], 2, "cannot restart by itself"),
    (["data.train_path=nowhere.jsonl"], 4, "nowhere.jsonl"),
    (["model.name=some-org/some-model"], 3, "runs without a network"),
    (["--time=soon"], 2, "is no time limit"),
    (["--sbatch=--array=1-3"], 2, "set by the kit"),
]


@pytest.mark.parametrize(("words", "code", "what"), BEFORE_THE_QUEUE)
def test_what_is_wrong_is_told_before_the_job_is_queued(
    write_config: Callable[..., Path],
    slurm: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    what: str,
):
    calls = slurm(sbatch="echo 17")
    assert submit(write_config(), *words) == code
    assert what in capsys.readouterr().err
    assert calls.read_text() == ""


def test_refusal_of_sbatch_is_told_in_its_own_words_and_leaves_nothing(
    write_config: Callable[..., Path], slurm: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    said = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    slurm(sbatch=f"echo '{said}' >&2; exit 1")
    assert submit(write_config(), "--gres=gpu:a100:1") == 3
    assert said in capsys.readouterr().err
    assert not (tmp_path / "outputs" / "run").exists()


def test_job_ends_with_the_trainers_code_and_leaves_its_summary(life: Life, slurm: Callable[..., Path]):
    calls = slurm()
    assert life.end(code=7) == 7
    assert life.job.log.read_text().splitlines()[1] == "trainer --nproc 2"
    summary = (life.job.path / "job_summary.txt").read_text()
    facts = dict(line.split(":", 1) for line in summary.splitlines() if ":" in line)
    assert (facts["job id"].strip(), facts["exit code"].strip(), facts["steps"].strip()) == ("12", "7", "4")
    assert facts["lives"].strip() == "1: steps (exit code) 0-4 (7)"
    assert {"nodes", "GPUs", "versions", "start", "end", "steps/h"} <= facts.keys()
    assert "the last lines of training_output.log" in summary
    shown = (life.job.path / "env.txt").read_text()
    assert "_secret" not in shown
    assert "HF_ENDPOINT=https://...@mirror" in shown
    assert calls.read_text() == ""
    assert newest_job(life.run).job == 12  # known to `make status` though `sbatch` has queued it


def test_a_summary_that_cannot_be_written_changes_neither_the_run_nor_its_code(life: Life, slurm: Callable[..., Path]):
    calls = slurm(scontrol="exit 0")
    for name in ("job_summary.txt", "env.txt"):
        (life.job.path / name).mkdir(parents=True)
    assert life.end(code=138) == 138
    assert "trainer" in life.job.log.read_text()
    assert "job_summary.txt" in life.job.output.read_text()
    assert "scontrol requeue 12" in calls.read_text()


def test_logs_and_cancel_name_the_runs_with_a_job_or_how_to_queue_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["logs"]) == 2
    assert "fix: queue one first: make submit CONFIG=..." in capsys.readouterr().err
    run = tmp_path / "outputs" / "night"
    run.mkdir(parents=True)
    add_job(run, 17)
    assert main(["cancel"]) == 2
    assert "fix: name one with --run=: night" in capsys.readouterr().err
    RunFolder(tmp_path / "outputs" / "mine").update_status(state="done")
    assert main(["logs", "--run", "mine"]) == 2
    assert "fix: look at it with make status RUN=mine\n" in capsys.readouterr().err


def test_the_advice_of_logs_and_cancel_names_a_run_of_another_output_folder_as_status_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    run, config = RunFolder(tmp_path / "my outs" / "mine"), tmp_path / "run.yaml"
    run.create()
    run.update_status(state="done")
    config.write_text("output_dir: my outs\nmodel: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n")
    for verb, name in (("logs", "mine"), ("cancel", str(run.path))):
        assert main([verb, "--config", str(config), "--run", name]) == 2
        make, status, setting = shlex.split(capsys.readouterr().err.partition("look at it with ")[2])
        assert (make, status) == ("make", "status")
        assert main(["status", setting.replace("RUN=", "--run=")]) == 0
        assert "done" in capsys.readouterr().out


def test_summary_of_a_run_that_has_failed_has_all_that_is_known_of_it(tmp_path: Path):
    run, job = RunFolder(tmp_path / "run"), JobFolder(tmp_path / "run", 12)
    run.create()
    job.path.mkdir()
    job.log.write_text("out of ideas\n")
    job.add_life(start="10:00", end="10:30", seconds=1800, from_step=0, to_step=90, exit_code=5, signals=[])
    run.update_status(
        state="failed", step=90, last_checkpoint="checkpoint-80", error={"what": "no signal", "code": "run"}
    )
    lines = [{"step": 89, "reward": 0.25, "loss": 0.5, "peak_bytes": 3 * 2**30}, {"step": 90, "loss": 0.125}]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (9, 80):
        (run.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
        (run.checkpoints / f"checkpoint-{step}" / "COMPLETE.json").write_text("{}")
    run.eval.mkdir(exist_ok=True)
    (run.eval / "step-80.json").write_text('{"reward": 0.5, "pass": 0.75}')
    write_summary(job, processes=2, exit_code=5)
    summary = job.path.joinpath("job_summary.txt").read_text()
    facts = {name: value.strip() for name, _, value in (line.partition(":") for line in summary.splitlines())}
    expected = {
        "job id": "12", "processes": "2 on each node", "start": "10:00", "end": "10:30", "steps": "90",
        "steps/h": "180.0", "last loss": "0.125", "last reward": "0.25",
        "last pass@1": "0.750 (pass in eval/step-80.json)", "peak memory": "3.00 GiB", "error": "no signal",
        "checkpoints": "checkpoint-9, checkpoint-80", "last checkpoint": "checkpoint-80", "exit code": "5",
    }  # fmt: skip
    assert {name: facts.get(name) for name in expected} == expected
    assert {"nodes", "GPUs", "versions"} <= facts.keys()
    assert summary.endswith("the last lines of training_output.log:\nout of ideas\n")


def test_notice_of_the_end_stops_the_trainer_and_queues_the_job_again(life: Life, slurm: Callable[..., Path]):
    calls = slurm(scontrol="exit 0")
    process = life.start(waits=True)
    wait_until((life.run / "ready").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(HANG_S) == 138
    assert calls.read_text() == "scontrol requeue 12\n"
    assert not life.job.note
    assert life.end(restarts=1, code=0) == 0
    assert life.job.log.read_text().splitlines()[-1] == "trainer --nproc 2 train.resume=auto"
    assert [(one["exit_code"], one["signals"]) for one in life.job.lives()] == [(138, ["SIGUSR1"]), (0, [])]


def test_cancelled_job_is_not_queued_again_but_one_without_time_or_place_is(life: Life, slurm: Callable[..., Path]):
    for state, preempted, asked in (
        ("CANCELLED", "None", 1),
        ("RUNNING", "2026-11-22T10:00", 2),
        ("TIMEOUT", "None", 2),
    ):
        calls = slurm(scontrol=f"echo JobId=12 JobState={state} PreemptTime={preempted} Command=x")
        calls.write_text("")
        process = life.start(waits=True)
        wait_until((life.run / "ready").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 143
        assert len(calls.read_text().splitlines()) == asked
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 12"


def test_where_the_job_cannot_be_queued_again_a_note_says_how_to_go_on(
    life: Life, monkeypatch: pytest.MonkeyPatch, slurm: Callable[..., Path]
):
    (slurm().parent / "programs" / "scontrol").unlink()
    assert life.end(code=138) == 138
    assert "scontrol is not on this machine" in life.job.note
    assert "run_name=run train.resume=auto" in life.job.note
    assert life.job.note.splitlines()[0] in life.job.output.read_text()
    assert "scontrol is not" in (life.job.path / "job_summary.txt").read_text()


def test_job_that_makes_no_step_in_three_lives_is_not_queued_again(life: Life, slurm: Callable[..., Path]):
    calls = slurm(scontrol="exit 0")
    for restarts in range(3):
        assert life.end(restarts=restarts, code=138, **{"from": 4, "to": 4}) == 138
    assert calls.read_text().splitlines() == ["scontrol requeue 12"] * 2
    assert "no step was made in 3 attempts" in life.job.note


def test_a_job_that_cannot_go_on_names_its_run_as_make_takes_it_also_with_a_space_in_its_name(
    life: Life, slurm: Callable[..., Path]
):
    slurm(scontrol="exit 1")
    life.run = life.run.rename(life.run.with_name("my run"))
    life.job = JobFolder(life.run, 12)
    assert life.end(code=138, **{"from": 4, "to": 8}) == 138
    (settings,) = [word for word in shlex.split(life.job.note.splitlines()[-1]) if word.startswith("ARGS=")]
    assert split_args(settings.removeprefix("ARGS=")) == ["run_name=my run", "train.resume=auto"]


def test_the_first_node_trains_in_the_job_itself_and_srun_starts_the_others(tmp_path: Path):
    environment = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "8"}
    allocation = Allocation.of({**environment, "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    options = ["--max-restarts", "1"]
    words = "--config /run/slurm.yaml --nproc 2 --nnodes 3 --master-addr head --master-port 4000 -- --max-restarts 1"
    own = trainer_command(Path("/run"), allocation, nproc=2, launcher_args=options)
    assert own == [sys.executable, "-m", "sftplay", "train", "--node-rank", "0", *words.split()]
    argv = others_command(own, allocation)
    shell = argv.index("bash")
    assert argv[:shell] == [
        "srun", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0", "--relative=1", "--nodes=2", "--ntasks=2",
        "--ntasks-per-node=1", "--cpus-per-task=8",
    ]  # fmt: skip
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    argv[argv.index(sys.executable)] = str(tmp_path / "python")
    started = subprocess.run(
        argv[shell:], env={**os.environ, "SLURM_NODEID": "1"}, capture_output=True, text=True, check=True
    )
    assert started.stdout.split() == f"-m sftplay train --node-rank 2 {words}".split()
    assert not others_command(own, Allocation.of({"SLURM_JOB_ID": "5"}))


def test_stop_that_slurm_sends_to_every_process_counts_once(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    outside = Echoes()
    assert [outside.is_echo(), outside.is_echo()] == [False, False]
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    inside = Echoes()
    assert [inside.is_echo() for _ in "abc"] == [False, True, True]
    now[0] += 11
    assert not inside.is_echo()


def test_sigterm_that_make_sends_on_to_its_recipe_counts_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("MAKELEVEL", "1")
    worker, recipe = Echoes(), Echoes(of_make=True)
    assert [worker.is_echo(signal.SIGTERM) for _ in "ab"] == [False, False]
    assert [recipe.is_echo(signal.SIGTERM) for _ in "abc"] == [False, True, False]
    interrupted = Echoes(of_make=True)
    assert [interrupted.is_echo(number) for number in (signal.SIGINT, signal.SIGTERM)] == [False, False]


def test_the_nodes_of_a_job_get_a_token_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given = []

    class Done:
        def wait(self, *_: float) -> int:
            return 0

        send_signal = terminate = kill = wait

    monkeypatch.setattr(job, "popen_tied", lambda argv, *, output, env: given.append(env) or Done())
    folder = JobFolder(tmp_path, 7)
    folder.path.mkdir()
    for _ in range(2):
        job._train(folder, ["own"], others=["srun"], forwarder=job.new_forwarder(), wait=Done.wait)
    tokens = [env["SFTPLAY_RUN_TOKEN"] for env in given]
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    assert len(tokens[0]) == 32


def test_a_machine_with_slurms_programs_and_no_cluster_is_not_asked_for_other_resources(
    write_config: Callable[..., Path], slurm: Callable[..., Path], capsys: pytest.CaptureFixture[str]
):
    slurm(sbatch="echo 'sbatch: fatal: Could not establish a configuration source' >&2; exit 1")
    assert submit(write_config()) == 3
    assert "fix: use a machine of a SLURM cluster" in capsys.readouterr().err
