"""The options of each launcher as its own parser reads them; the user's options for it; the processes it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from processes import HANG_S, is_alive, wait_until
from torch.distributed.run import get_args_parser

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.errors import ConfigError, ConfigErrors
from sftplay.launch import processes as processes_of_a_launch
from sftplay.launch.accelerate_settings import strategy_environment
from sftplay.launch.command import Launch, Scale, build_launch
from sftplay.launch.follow import follow
from sftplay.launch.processes import end_launch
from sftplay.launch.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
DEMO = "configs/run_demo.yaml"
TWO = Scale(2, master_port=4711)

READ_AS_DEEPSPEED = "import json, sys; from deepspeed.launcher.runner import parse_args; " \
    "print('READ', json.dumps(vars(parse_args(sys.argv[1:]))))"  # fmt: skip

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed: its own parser is asked")


def launch(launcher: str, scale: Scale = TWO, *, strategy: str = "ddp", has_gpu: bool = False, **more: Any) -> Launch:
    env = strategy_environment(strategy, world_size=scale.world_size, has_gpu=has_gpu, precision="bf16", **more)
    return build_launch(
        Path("outputs/x"), scale, has_gpu=has_gpu, is_offline=True, strategy=env, launcher=launcher
    )  # fmt: skip


def read_as_accelerate(command: Launch, folder: Path) -> Namespace:
    """The command as accelerate reads it, with its config file."""
    assert command.argv[1:3] == ("-m", "accelerate.commands.launch")
    ((path, text),) = command.files.items()
    written = folder / "config.yaml"
    written.write_text(text)
    arguments = [str(written) if word == path else word for word in command.argv[3:]]
    return _validate_launch_command(launch_command_parser().parse_args(arguments))[0]


def read_as_deepspeed(command: Launch) -> dict[str, Any]:
    assert command.argv[1:3] == ("-m", "sftplay.launch.deepspeed_runner")
    argv = [sys.executable, "-c", READ_AS_DEEPSPEED, *command.argv[3:]]
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    output = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    read: dict[str, Any] = json.loads(output.rsplit("READ ", 1)[1])
    return read


@pytest.mark.parametrize("launcher", ["auto", "torchrun"])
def test_torchrun_is_told_processes_nodes_and_where_they_meet(launcher: str):
    command = launch(launcher, Scale(2, 3, 1, "10.0.0.7", 4711, ("--log-dir", "here")))
    assert command.argv[1:3] == ("-m", "torch.distributed.run")
    read = get_args_parser().parse_args(list(command.argv[3:]))
    assert (read.nproc_per_node, read.nnodes, read.node_rank) == ("2", "3", 1)
    assert (read.master_addr, read.master_port, read.log_dir) == ("10.0.0.7", 4711, "here")
    assert (read.module, read.training_script) == (True, "sftplay.tasks.worker")
    assert read.training_script_args == ["outputs/x"]


def test_accelerate_is_told_processes_nodes_and_where_they_meet(tmp_path: Path):
    command = launch("accelerate", Scale(2, 3, 1, "10.0.0.7", 4711, ("--log-dir", "here")))
    read = read_as_accelerate(command, tmp_path)
    assert (read.num_processes, read.num_machines, read.machine_rank) == (6, 3, 1)
    assert (read.main_process_ip, read.main_process_port, read.log_dir) == ("10.0.0.7", 4711, "here")
    assert (read.module, read.training_script) == (True, "sftplay.tasks.worker")
    assert read.training_script_args == ["outputs/x"]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("hsdp", {}),
        ("zero2", {"gradient_accumulation": 4}),
        ("zero3", {}),
    ],
)
@pytest.mark.parametrize("has_gpu", [False, True], ids=["cpu", "gpu"])
def test_workers_of_accelerate_find_the_environment_they_need(
    strategy: str, more: dict[str, Any], has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """accelerate passes its environment on and changes some of it."""
    command = launch("accelerate", Scale(4, master_port=4711), strategy=strategy, has_gpu=has_gpu, **more)
    for key, value in command.env.items():
        monkeypatch.setenv(key, value)
    read = read_as_accelerate(command, tmp_path)
    # Otherwise it would start another number of processes or overwrite the strategy with its own options.
    assert (read.multi_gpu, read.use_deepspeed, read.use_fsdp, read.cpu) == (True, False, False, False)
    found = prepare_multi_gpu_env(read)
    assert {key: found.get(key) for key in command.env} == command.env
    new = {key: value for key, value in found.items() if key not in os.environ}
    assert new == {
        "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False", "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        **({} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}),
    }  # fmt: skip


@needs_deepspeed
def test_deepspeed_is_told_processes_and_where_they_meet_and_no_list_of_hosts():
    scale = Scale(2, master_addr="10.0.0.7", master_port=4711, launcher_args=("--log_level", "error"))
    read = read_as_deepspeed(launch("deepspeed", scale, strategy="zero2"))
    assert (read["num_gpus"], read["master_addr"], read["master_port"]) == (2, "10.0.0.7", 4711)
    assert (read["module"], read["no_local_rank"], read["log_level"]) == (True, True, "error")
    assert (read["user_script"], read["user_args"]) == ("sftplay.tasks.worker", ["outputs/x"])
    assert not Path(read["hostfile"]).is_file()  # so it asks (launcher/runner.py, fetch_hostfile)


def test_deepspeed_starts_on_the_gpus_that_are_visible_not_on_the_first_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2,3")
    argv = launch("deepspeed", strategy="zero3", has_gpu=True).argv
    assert argv[argv.index("--include") + 1] == "localhost:6,2"
    assert "--num_gpus" not in argv
    assert "--include" not in launch("deepspeed", strategy="zero3").argv
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-21fb0c1d")
    with pytest.raises(ConfigError, match="by number, not GPU-8932f937"):
        launch("deepspeed", strategy="zero3", has_gpu=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_deepspeed_is_refused_for_a_strategy_that_is_not_its_own(strategy: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigErrors, match="zero1, zero2, zero3 only") as caught:
        load_config(DEMO, ["cluster.launcher=deepspeed", f"cluster.strategy={strategy}"])
    assert caught.value.where == "command line cluster.launcher"
    with pytest.raises(ConfigError, match="zero1, zero2 and zero3 only"):
        launch("deepspeed", Scale(4), strategy=strategy)


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_options_after_two_dashes_go_to_the_launcher_unchanged(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.chdir(ROOT)
    arguments = ["train", "--config", DEMO, "run_name=launched", "--nproc", "2", f"cluster.launcher={launcher}"]
    arguments.append("--dry-run")
    assert main([*arguments, "--", "--log-dir", "a b", "--json", "--", "seed=1"]) == 0
    typed = capsys.readouterr().out
    assert " --log-dir 'a b' --json -- seed=1 -" in typed
    assert main([*arguments, "--json", "--", "--log-dir", "a b"]) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[argv.index("--log-dir") + 1] == "a b"
    assert argv.index("--log-dir") < argv.index("sftplay.tasks.worker")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose launch has just begun."""
    run = RunFolder(tmp_path / "run")
    run.create()
    run.update_status(state="running", exit_code=None, pid=None, ranks=[], error=None, attempts=[])
    return run


def test_a_launchers_message_about_an_unknown_option_reaches_the_user(folder: RunFolder, capsys: Any):
    command = Launch((sys.executable, "-m", "torch.distributed.run", "--no-such-flag", "-m", "nothing"), {})
    assert follow(command, folder) == 2
    assert "error: unrecognized arguments: --no-such-flag\n  fix: change the options" in capsys.readouterr().err
    status = folder.read_json("status.json")
    assert (status["state"], status["error"]["code"]) == ("failed", "config")


CHAIN = """
import subprocess, sys, time
depth, session = int(sys.argv[1]), int(sys.argv[1]) % 2 == 0
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], str(depth - 1), sys.argv[2]], start_new_session=session)
time.sleep(1000)  # longer than the tests wait
"""


@pytest.fixture
def chain() -> Iterator[list[int]]:
    """Pids of a process and three generations of descendants. Two of them lead process groups."""
    first = subprocess.Popen([sys.executable, "-c", CHAIN, "3", CHAIN])
    top = psutil.Process(first.pid)
    wait_until(lambda: len(top.children(recursive=True)) == 3)
    pids = [first.pid, *(each.pid for each in top.children(recursive=True))]
    yield pids
    for pid in pids:
        if is_alive(pid):
            os.kill(pid, 9)
    first.wait()


def test_end_of_a_launch_reaches_all_below_it(chain: list[int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes_of_a_launch, "ENDING_S", HANG_S)
    assert end_launch(chain[0]) == []
    wait_until(lambda: not any(map(is_alive, chain)))
