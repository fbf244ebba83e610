"""The command line as a user meets it: refusals, exit codes, JSON, overrides, pipes."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay import errors, log
from sftplay.cli import main

ROOT = Path(__file__).resolve().parents[1]
DEMO = "configs/run_demo.yaml"

RUN = """\
task_mode: sft
model:
  name: builtin:tiny
tuning:
  mode: lora
train:
  max_steps: 4
data:
  train_path: data/demo/train.jsonl
"""


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Run a verb on a config in which one text is replaced by another: (exit code, standard output, error output)."""
    monkeypatch.chdir(ROOT)

    def refuse(old, new, *words):
        path = tmp_path / "run.yaml"
        path.write_text(RUN.replace(old, new))
        code = main(["train", "--config", str(path), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err.replace(str(tmp_path) + "/", "")

    return refuse


TYPOS = {
    "key": ("  max_steps: 4", "  max_stpes: 4", "run.yaml:7 train.max_stpes", "max_steps"),
    "section": ("tuning:", "tunning:", "run.yaml:4 tunning", "tuning"),
    "choice": ("mode: lora", "mode: qlroa", "run.yaml:5 tuning.mode", "qlora"),
    "task": ("task_mode: sft", "task_mode: stf", "run.yaml:1 task_mode", "sft"),
}


@pytest.mark.contract
@pytest.mark.parametrize("kind", TYPOS)
def test_a_typo_ends_with_2_naming_place_and_nearest_name(kind, refused):
    old, new, where, nearest = TYPOS[kind]
    code, out, err = refused(old, new)
    assert (code, out) == (2, "")
    first, fix = err.splitlines()
    assert first.startswith(f"{where}: ")
    assert fix == f"  fix: did you mean {nearest!r}?"


@pytest.mark.contract
@pytest.mark.parametrize("kind", TYPOS)
def test_a_typo_as_json_is_one_document_with_the_promised_keys(kind, refused):
    old, new, where, nearest = TYPOS[kind]
    code, out, err = refused(old, new, "--json")
    error = json.loads(out)["error"]
    assert code == 2
    assert {"code", "where", "what", "fix", "nearest"} <= set(error)
    assert (error["code"], error["nearest"][0].rsplit(".", 1)[-1]) == ("config", nearest)
    assert error["where"].endswith(where)
    assert where in err  # what a person reads goes beside it, to standard error


@pytest.mark.contract
def test_all_problems_are_shown_at_once_in_the_order_of_the_file(refused):
    code, out, err = refused("max_steps: 4", "max_stpes: 4\n  epochs: many", "--json")
    assert code == 2
    assert [p["where"].rsplit(" ")[-1] for p in json.loads(out)["error"]["problems"]] == [
        "train.max_stpes",
        "train.epochs",
    ]
    assert err.index("max_stpes") < err.index("train.epochs")


def call(*words, **options):
    env = {**os.environ, **options.pop("env", {})}
    argv = [sys.executable, "-m", "sftplay", *map(str, words)]
    return subprocess.run(
        argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S, check=False, **options
    )


@pytest.mark.contract
def test_a_refusal_in_a_process_of_its_own_has_no_traceback(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("max_steps", "max_stpes"))
    done = call("train", "--config", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"{path}:7 train.max_stpes: no key called 'max_stpes' in train\n  fix: did you mean 'max_steps'?\n"
    )


@pytest.mark.contract
@pytest.mark.parametrize(
    ("words", "what", "nearest"),
    [
        (["trian", "--config", DEMO], "no verb called 'trian'", ["train"]),
        (["inferbatch"], "no verb called 'inferbatch'", ["infer-batch"]),
        (["train", "--config", DEMO, "--dryrun"], "train does not know '--dryrun'", ["--dry-run"]),
        (["train", "--config", DEMO, "--nprocs=2"], "train does not know '--nprocs=2'", ["--nproc"]),
        (["train", "--cofnig", DEMO], "train does not know '--cofnig'", ["--config"]),
        (["train", "--config", DEMO, "stray"], "train does not know 'stray'", []),
        (["train", "--config", DEMO, ""], "train does not know ''", []),
        (["train", "--config", DEMO, "=5"], "train does not know '=5'", []),
        (["gpu-info", "--nproc", "2"], "gpu-info does not know '--nproc'", []),
        (["train", "--config", DEMO, "--nnodes", "two"], "argument --nnodes: invalid int value: 'two'", []),
        (["infer-batch", "--config", DEMO], "the following arguments are required: --in, --out", []),
        (["train"], "train needs a config", []),
        (["train", "--config", ""], "train needs a config", []),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize("as_json", [False, True], ids=["plain", "json"])
def test_a_command_line_that_cannot_be_understood_ends_with_2(words, what, nearest, as_json, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main([*words, *(["--json"] if as_json else [])]) == 2
    captured = capsys.readouterr()
    assert what in captured.err
    if as_json:
        error = json.loads(captured.out)["error"]
        assert (error["code"], error["nearest"][:1]) == ("config", nearest)
    else:
        assert captured.out == ""
        assert "\n  fix: " in captured.err


@pytest.mark.contract
def test_a_config_that_is_missing_or_a_folder_is_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["train", "--config", "nowhere.yaml"]) == 2
    assert capsys.readouterr().err.startswith("nowhere.yaml: no such file")
    assert main(["train", "--config", "configs"]) == 2
    assert capsys.readouterr().err.startswith("configs: is a folder, not a YAML file")


@pytest.mark.contract
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["train.max_steps=5"], 5),
        (["--train.max_steps=5"], 5),
        (["--train.max_steps=5", "train.max_steps=7"], 7),
        (["train.max_steps=7", "--train.max_steps=5"], 5),
        (["train.max_steps=9", "--json", "--train.max_steps=5", "train.max_steps=7"], 7),
    ],
)
def test_of_two_overrides_of_one_key_the_later_counts_however_they_are_written(words, steps, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["validate", words[0], "--config", DEMO, *words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["train"]["max_steps"] == steps


KINDS = [errors.ConfigError, errors.MachineError, errors.DataError, errors.RunError]


@pytest.mark.parametrize(("kind", "code"), list(zip(KINDS, (2, 3, 4, 5), strict=True)))
def test_each_kind_of_error_has_the_exit_code_of_interfaces(kind, code, monkeypatch, capsys):
    def fail(args):
        raise kind("it broke", where="here", fix="mend it", nearest=["near"])

    monkeypatch.setattr("sftplay.commands.train.train", fail)
    assert main(["train", "--config", "x", "--json"]) == code
    captured = capsys.readouterr()
    name = kind.__name__.removesuffix("Error").lower()
    expected = {"code": name, "where": "here", "what": "it broke", "fix": "mend it", "nearest": ["near"]}
    assert json.loads(captured.out) == {"error": expected}
    assert captured.err == "here: it broke\n  fix: mend it\n"


def test_a_bug_ends_with_1_and_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr("sftplay.commands.train.train", lambda args: 1 / 0)
    assert main(["train", "--config", "x", "--json"]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["code"] == "bug"
    assert "Traceback" in captured.err
    assert "ZeroDivisionError" in captured.err


def test_under_json_standard_output_holds_the_document_and_nothing_else(monkeypatch, capsys):
    def verb(args):
        log.say("a line")
        log.show("a table")
        print(document)
        return 0

    document = json.dumps({"argv": [], "env": {}, "files": {}})
    monkeypatch.setattr("sftplay.commands.train.train", verb)
    assert main(["train", "--config", "x", "--json"]) == 0
    assert capsys.readouterr() == (f"{document}\n", "[train] a line\na table\n")
    assert main(["train", "--config", "x"]) == 0
    assert capsys.readouterr() == (f"[train] a line\na table\n{document}\n", "")


def test_an_interrupted_verb_ends_with_130(monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("sftplay.commands.train.train", interrupt)
    assert main(["train", "--config", "x"]) == 130


@pytest.mark.contract
def test_variables_of_another_launch_are_cleared_and_told_by_name(monkeypatch, capsys):
    strays = {
        "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2",
        "ACCELERATE_MIXED_PRECISION": "fp16", "TORCHELASTIC_RUN_ID": "secret", "PMI_SIZE": "8",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }  # fmt: skip
    for name, value in {**strays, "ACCELERATE_LOG_LEVEL": "info", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, value)
    assert main(["validate", "--config", DEMO]) == 0
    printed = capsys.readouterr().out
    assert (
        f"note: the environment's {', '.join(sorted(strays))} are not used: this command starts its own processes"
        in printed
    )
    assert "secret" not in printed
    assert not strays.keys() & os.environ.keys()
    assert os.environ["ACCELERATE_LOG_LEVEL"] == "info"
    assert os.environ["MASTER_ADDR"] == "here"


@pytest.mark.contract
def test_no_words_at_all_show_the_help():
    done = call()
    assert done.returncode == 0
    assert re.search(r"\n    infer-batch\s", done.stdout)


@pytest.mark.contract
def test_a_reader_that_leaves_early_is_no_error():
    argv = [sys.executable, "-m", "sftplay", "schema"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # as `head` does, at the latest moment before anything is written
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(HANG_S) == 0


@pytest.fixture
def dry_run(tmp_path, monkeypatch, capsys):
    """The JSON of a dry run of the demo's config with everything below tmp_path."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def run(*words):
        paths = [f"output_dir={tmp_path}/out", f"data.processed_dir={tmp_path}/processed"]
        code = main(["train", "--config", DEMO, "--dry-run", "--json", *paths, *words])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_dry_run_gives_command_and_environment_and_creates_nothing(dry_run, tmp_path):
    code, launch = dry_run()
    assert code == 0
    assert launch["argv"] == [sys.executable, "-m", "sftplay.tasks.worker", f"{tmp_path}/out/demo"]
    assert launch["env"]["HF_HUB_OFFLINE"] == "1"
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_text_can_be_pasted_into_a_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    target = tmp_path / "with space"
    assert main(["train", "--config", DEMO, "--dry-run", f"output_dir={target}"]) == 0
    text = capsys.readouterr().out
    program = f"{shlex.quote(sys.executable)} -m sftplay.tasks.worker"
    assert program in text
    echoed = subprocess.run(["sh", "-c", text.replace(program, "printf %s:$HF_HUB_OFFLINE")], capture_output=True)
    assert echoed.stdout.decode() == f"{target}/demo:"


@pytest.mark.contract
def test_a_dry_run_works_beside_a_run_of_its_name_and_says_that_a_start_would_be_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    run = tmp_path / "out" / "demo"
    run.mkdir(parents=True)
    (run / "config.resolved.yaml").touch()
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    words = ["--config", DEMO, f"output_dir={tmp_path}/out", f"data.processed_dir={tmp_path}/processed"]
    assert main(["train", "--dry-run", "--json", *words]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["argv"][-1] == str(run)
    assert "note: a run called 'demo' exists; a start would be refused" in printed.err
    assert main(["train", *words]) == 2
    assert "a run called 'demo' exists" in capsys.readouterr().err


@pytest.mark.contract
@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5"])
def test_a_number_of_processes_that_is_none_is_refused(dry_run, number):
    code, answer = dry_run(f"--nproc={number}")
    assert (code, answer["error"]["where"]) == (2, "--nproc")


def test_a_number_of_processes_in_raised_digits_is_no_bug(dry_run):
    assert dry_run("--nproc=²")[0] == 2


@pytest.mark.contract
def test_one_process_a_gpu_without_gpus_is_a_lack_of_the_machine(dry_run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, answer = dry_run("--nproc=gpu")
    assert code == 3
    assert "CUDA_VISIBLE_DEVICES hides every GPU" in answer["error"]["what"]


@pytest.mark.contract
def test_two_processes_go_through_torchrun_with_a_port_of_their_own(dry_run):
    def port_of(launch):
        return int(launch["argv"][launch["argv"].index("--master-port") + 1])

    code, first = dry_run("--nproc", "2")
    assert code == 0
    assert first["argv"][1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    with socket.socket() as started:  # the system may give a port twice, but not while somebody has it
        with suppress(OSError):  # somebody else has it by now
            started.bind(("127.0.0.1", port_of(first)))
            started.listen()
        second = dry_run("--nproc=2")[1]
    assert port_of(first) != port_of(second)


@pytest.mark.contract
def test_several_nodes_meet_where_they_are_told_to(dry_run):
    words = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.7", "--master-port=12345"]
    argv = dry_run("--nproc=1", *words)[1]["argv"]
    assert " ".join(argv[argv.index("--nnodes") : argv.index("-m", 4)]) == (
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.7 --master-port 12345"
    )


@pytest.mark.contract
def test_processes_that_do_not_divide_the_effective_batch_are_refused_with_both_neighbours(dry_run):
    code, answer = dry_run("--nproc=5", "train.effective_batch_size=32")
    assert (code, answer["error"]["code"]) == (2, "config")
    assert "to 30 or 35" in answer["error"]["fix"]


@pytest.mark.contract
def test_a_missing_data_file_is_named_with_the_place_that_names_it(dry_run):
    code, answer = dry_run("data.val_path=nowhere.jsonl")
    assert (code, answer["error"]["where"]) == (4, "command line data.val_path")
    assert answer["error"]["what"].startswith("nowhere.jsonl: ")


@pytest.mark.contract
def test_a_missing_model_folder_is_refused(dry_run):
    code, answer = dry_run("model.name=./nowhere")
    assert (code, answer["error"]["where"]) == (2, "command line model.name")


@pytest.mark.contract
def test_a_folder_that_is_no_model_is_refused(dry_run):
    code, answer = dry_run("model.name=configs")
    assert code == 2
    assert "config.json" in answer["error"]["what"]


@pytest.mark.contract
def test_an_output_folder_that_cannot_be_written_is_no_bug(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (tmp_path / "file").touch()
    for name in ("x", "null"):
        assert main(["train", "--config", DEMO, f"output_dir={tmp_path}/file", f"run_name={name}"]) == 3
        assert "cannot be written (Not a directory)\n  fix: choose another output_dir" in capsys.readouterr().err


def test_waiting_threads_leave_their_core_soon_unless_the_user_decides(monkeypatch):
    from sftplay.cli import SPIN_COUNT, limit_spinning

    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == SPIN_COUNT
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
