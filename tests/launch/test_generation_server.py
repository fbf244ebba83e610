"""The generation server beside the trainer: its command, what is asked of SLURM for it, and that both end together.

A stand-in speaks vLLM's protocol. A program that starts its command at once stands in for srun.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from processes import HANG_S, is_alive, wait_until
from slurm_life import Life
from trl.scripts.vllm_serve import ScriptArguments, build_command

from sftplay.cli import main
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.launch.generation_server import client_environment, find_worker_python, starts_server
from sftplay.launch.run_folder import RunFolder
from sftplay.runs import generation_server, submit
from sftplay.tasks.grpo.vllm_server import server_command
from sftplay.tasks.grpo.vllm_weights import vllm_chosen, within_length

STAND_IN = Path(__file__).with_name("stand_in_server.py")
COMMAND = shlex.join([sys.executable, str(STAND_IN), "--port", "{port}"])


def grpo(**vllm: Any) -> dict[str, Any]:
    """Changes to the small run."""
    return {
        "task_mode": "grpo",
        "rewards": [{"name": "all", "use": "regex", "options": {"pattern": ".*"}}],
        "grpo__num_generations": 4,
        "grpo__max_completion_length": 12,
        "grpo__generation": "vllm_server",
        **{f"grpo__vllm__{key}": value for key, value in vllm.items()},
    }


def config(**vllm: Any) -> RunConfig:
    grpo = {"generation": "vllm_server", "max_completion_length": 24, "vllm": vllm}
    model = {"name": "org/m", "max_seq_len": 64}
    return RunConfig.model_validate({"task_mode": "grpo", "model": model, "grpo": grpo})


def options(words: list[str]) -> dict[str, str]:
    """The options behind the module of a command that has a value for each but `switches`."""
    rest = [word for word in words if word not in ("--enforce-eager", "--enable-lora")]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_default_command_has_what_trl_asks_of_a_server():
    arguments = ScriptArguments(model="org/m", host="0.0.0.0", port=7, tensor_parallel_size=2, max_model_len=64)
    ours = options(server_command(config(tensor_parallel=2), host="0.0.0.0", port=7, has_gpu=True)[4:])
    assert ours.pop("--model") == "org/m"
    theirs = options(build_command(arguments)[5:])
    assert ours == {key: value for key, value in theirs.items() if key in ours}
    imposed = ["--weight-transfer-config", "--logprobs-mode", "--max-logprobs", "--host", "--port", "--max-model-len"]
    assert {*imposed, "--tensor-parallel-size"} == ours.keys()


def test_without_a_gpu_the_server_takes_the_kits_own_engine_and_the_trainers_dtype():
    with_gpu = options(server_command(config(), host="h", port=7, has_gpu=True)[4:])
    without = options(server_command(config(), host="h", port=7, has_gpu=False)[4:])
    assert without == with_gpu | {"--weight-transfer-config": '{"backend": "gloo"}', "--dtype": "float32"}


@pytest.mark.parametrize(("rank", "room"), [(4, "8"), (32, "32"), (33, "64")])
def test_a_server_of_adapters_has_room_for_the_trained_rank_and_no_way_for_weights(rank: int, room: str):
    cfg = config(sync="adapter").with_values({"tuning.lora.r": rank}, "test")
    found = options(server_command(cfg, host="h", port=7, has_gpu=False)[4:])
    assert (found["--max-lora-rank"], found["--max-loras"]) == (room, "1")
    assert "--weight-transfer-config" not in found


def test_workers_run_by_the_python_that_has_vllm_only_where_it_samples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sftplay.launch.generation_server.find_python", lambda: Path("/has/vllm"))
    assert find_worker_python(config()) == "/has/vllm"
    assert find_worker_python(config().with_values({"grpo.generation": "transformers"}, "test")) == sys.executable
    assert find_worker_python(config().with_values({"task_mode": "sft"}, "test")) == sys.executable


def test_a_named_server_that_does_not_answer_is_no_bug_of_the_run():
    args = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    with pytest.raises(MachineError, match="cannot be reached") as caught, vllm_chosen(config(), None, args):
        raise ConnectionError("the server cannot be reached")
    assert caught.value.where == "grpo.vllm.url"


class Refusing:
    """Refuses, as vLLM's server does, what may become too long for it (vllm 0.31, renderers/params)."""

    length = 20

    def generate(self, prompts: list[list[int]], *, max_tokens: int, n: int) -> dict[str, Any]:
        assert n == 1
        assert max(map(len, prompts)) + max_tokens <= self.length, "This model's maximum context length is 20 tokens."
        completions = [[len(prompt)] * max_tokens for prompt in prompts]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}


def test_a_server_is_asked_for_no_more_than_it_has_room_for_behind_dialogues_of_different_lengths():
    prompts = [[1] * 4, [2] * 15, [3] * 4, [4] * 10]
    with pytest.raises(AssertionError, match="maximum context length"):
        Refusing().generate(prompts, max_tokens=12, n=1)
    found = within_length(Refusing, 20)().generate(prompts, max_tokens=12, n=1)
    assert found["prompt_ids"] == prompts
    assert found["completion_ids"] == [[4] * 12, [15] * 5, [4] * 12, [10] * 10]
    assert found["logprobs"] is None


def test_only_completions_of_several_turns_have_such_a_client(monkeypatch: pytest.MonkeyPatch):
    replaced = list[dict[str, Any]]()

    def replace(**names: Any) -> Any:
        replaced.append(names)
        return nullcontext()

    monkeypatch.setattr("sftplay.tasks.grpo.vllm_weights.vllm_replaced", replace)
    args = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    for tools in ([], ["calculator"]):
        with vllm_chosen(config().with_values({"grpo.tools": tools}, "test"), None, args):
            pass
    assert replaced[0] == {}
    (made,) = replaced[1].values()
    assert made.generate is not made.__base__.generate


def test_a_server_on_this_machine_gets_the_gpus_behind_those_that_train(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation_server, "find_gpus", lambda: ((object(),) * 4, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert generation_server.server_gpus(config(tensor_parallel=2), 2) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert generation_server.server_gpus(config(), 1) == {"CUDA_VISIBLE_DEVICES": "5"}
    with pytest.raises(MachineError, match="3 of 4 GPUs train, and the server needs 2"):
        generation_server.server_gpus(config(tensor_parallel=2), 3)
    monkeypatch.setattr(generation_server, "find_gpus", lambda: ((), "none"))
    assert generation_server.server_gpus(config(), 1) == {}


class Starting:
    """Stands in for a `ServerProcess` that is not ready yet, when this signal comes."""

    number = int(signal.SIGINT)

    def __init__(self, *_: object, **__: object) -> None:
        self.was_ended = False
        Starting.last = self

    def look(self) -> tuple[int | None, str]:
        signal.raise_signal(self.number)
        return None, ""

    def end(self) -> None:
        self.was_ended = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_stopped_while_its_server_starts_says_so(
    number: int, write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    monkeypatch.setattr("sftplay.tasks.grpo.plan.find_python", lambda: Path(sys.executable))  # as if vLLM were there
    monkeypatch.setattr(generation_server, "ServerProcess", Starting)
    monkeypatch.setattr(Starting, "number", int(number))
    assert main(["train", "--config", str(write_config(**grpo()))]) == 128 + number
    status = RunFolder(tmp_path / "outputs" / "run").read_json("status.json")
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 128 + number, number.name)
    assert f"stopped by {number.name} before the workers had started" in capsys.readouterr().out
    assert Starting.last.was_ended


def test_a_run_that_cannot_go_on_for_want_of_gpus_has_failed(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = str(write_config(**grpo()))
    monkeypatch.setattr("sftplay.tasks.grpo.plan.find_python", lambda: Path(sys.executable))  # as if vLLM were there
    monkeypatch.setattr(generation_server, "ServerProcess", Starting)
    assert main(["train", "--config", config]) == 130

    def refuse(*_: object) -> None:
        raise MachineError("too few GPUs are left for the server")

    monkeypatch.setattr(generation_server, "server_gpus", refuse)
    assert main(["resume", "--config", config]) == 3
    status = RunFolder(tmp_path / "outputs" / "run").read_json("status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 3)
    assert status["error"]["what"] == "too few GPUs are left for the server"


def test_server_is_started_only_where_the_config_names_none():
    assert starts_server(config())
    assert not starts_server(config(url="http://other:8000"))
    assert not starts_server(config().with_values({"grpo.generation": "transformers"}, "test"))


def test_trainers_ask_the_server_past_a_proxy():
    environment = client_environment("http://n2:77", {"NO_PROXY": "localhost"})
    assert environment == {"SFTPLAY_SERVER_URL": "http://n2:77", "no_proxy": "localhost,n2", "NO_PROXY": "localhost,n2"}


def test_job_file_asks_for_a_node_of_its_own(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = str(write_config(**grpo(tensor_parallel=2)))
    monkeypatch.setattr(submit, "find_python", lambda: None)
    assert main(["submit", "--config", path, "--dry-run"]) == 3
    assert "vLLM is not installed" in capsys.readouterr().err
    monkeypatch.setattr(submit, "find_python", lambda: Path("python"))
    words = ["--gres=gpu:volta:4", "--time=30", "--nproc=1", "--server-sbatch=--mem=64G --partition=big"]
    assert main(["submit", "--config", path, "--dry-run", *words]) == 0
    text = capsys.readouterr().out
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    server = directives[directives.index("hetjob") + 1 :]
    assert server == [
        "--nodes=1", "--ntasks-per-node=1", "--time=30", "--gpus-per-node=2", "--mem=64G", "--partition=big",
    ]  # fmt: skip
    assert re.search(r"^command=\(.* --nproc 1 --server\)$", text, re.M)
    assert main(["submit", "--config", path, "--dry-run", "grpo.vllm.url=http://a:1", "--nproc=1"]) == 0
    assert "hetjob" not in capsys.readouterr().out
    assert main(["submit", "--config", path, "--server-sbatch=--mem=1", "grpo.vllm.url=http://a:1"]) == 2
    assert "the job starts no generation server" in capsys.readouterr().err


SRUN = 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"'


@pytest.fixture
def served(life: Life, slurm: Callable[..., Path], write_config: Callable[..., Path]) -> Callable[..., Life]:
    """The life of job 12, with a server by this command."""

    def prepare(command: str = COMMAND, timeout: int = int(HANG_S)) -> Life:
        slurm(srun=SRUN, scontrol="exit 0")
        path = write_config(**grpo(command=command, timeout=timeout))
        (life.run / "slurm.yaml").write_text(path.read_text())
        return life

    return prepare


def servers(life: Life) -> list[int]:
    """The stand-ins of this test that live."""
    port = re.findall(r"--port (\d+)", life.job.server_log.read_text()) if life.job.server_log.exists() else []
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(STAND_IN) in words and set(port) & set(words) and is_alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


def log_of(life: Life) -> str:
    return life.job.output.read_text()


def test_server_ends_with_a_trainer_that_fails(served: Callable[..., Life]):
    life = served()
    assert life.end("--server", code=7) == 7, log_of(life)
    assert re.search(r"ready at http://\S+:\d+", life.job.server_log.read_text())
    assert not servers(life)
    assert not life.job.server.exists()
    summary = (life.job.path / "job_summary.txt").read_text()
    assert "the last lines of generation_server.log:" in summary


def test_trainer_ends_with_a_server_that_dies(served: Callable[..., Life]):
    life = served()
    process = life.start("--server", waits=True)
    wait_until((life.run / "ready").exists)
    (server,) = servers(life)
    os.kill(server, signal.SIGKILL)
    assert process.wait(HANG_S) == 5
    assert "the generation server has ended with 5 while the run trained" in log_of(life)
    assert "has ended with -9" in life.job.server_log.read_text()
    assert life.job.lives()[0]["exit_code"] == 5


def test_stop_of_the_job_that_takes_the_server_first_is_still_a_stop(served: Callable[..., Life]):
    life = served()
    process = life.start("--server", waits=True, deaf=True)
    wait_until((life.run / "ready").exists)
    process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "stops with a checkpoint" in log_of(life))
    (server,) = servers(life)
    holder = psutil.Process(server).ppid()
    os.kill(server, signal.SIGKILL)  # the trainer fails, because it has no server any more
    wait_until(lambda: not is_alive(holder))
    (life.run / "fail").touch()
    assert process.wait(HANG_S) == 138


def test_server_that_is_never_ready_ends_the_job_and_nothing_is_trained(served: Callable[..., Life]):
    life = served(f"{COMMAND} --never-ready", timeout=1)
    assert life.end("--server", code=0) == 3
    assert "has not answered for 1 s" in life.job.server_log.read_text()
    assert "has ended with 3 before it was ready" in log_of(life)
    assert "trainer" not in life.job.log.read_text()
    assert not servers(life)


def test_notice_while_the_server_starts_queues_the_job_again(served: Callable[..., Life]):
    life = served(f"{COMMAND} --never-ready")
    process = life.start("--server", code=0)
    wait_until(lambda: bool(servers(life)))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(HANG_S) == 138
    assert not servers(life)
