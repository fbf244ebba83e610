"""A run served on this machine answers the real OpenAI client, through the trained template, and stops on a signal."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from huggingface_hub import scan_cache_dir
from huggingface_hub.utils import validate_repo_id
from in_process import Finished, Inputs, train
from lively import lively_model
from peft import AutoPeftModelForCausalLM
from processes import HANG_S, is_alive, wait_until
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export import serve as serve_module
from sftplay.export import server as serving
from sftplay.export.gate import TOKEN
from sftplay.export.serve import make_hub_cache, served_name, server_config, whole_model
from sftplay.export.server import build_server, choose_port, choose_server, run_server
from sftplay.launch.command import Launch
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import HOST, free_port

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny-run"
QUESTION = [{"role": "user", "content": "why old boats"}]
CHAT = [
    {"role": "system", "content": "asks"},
    *QUESTION,
    {"role": "assistant", "content": "salt"},
    {"role": "user", "content": "and then"},
]
LACKING = [name for name in serving.NEEDS if find_spec(name) is None]
needs_server = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}: make install EXTRAS=serve")

SERVE = """
import sys
from pathlib import Path
from sftplay.config.load import load_config
from sftplay.export.serve import serve
from sftplay.launch.command import Launch
from sftplay.launch.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
sys.exit(serve(load_config(folder.resolved), folder, server="transformers", port=int(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A LoRA run on a base with long answers that depend on every token of the prompt."""
    home = tmp_path_factory.mktemp("serve place")
    base = Path(shutil.copytree(inputs.model, home / "base"))
    lively_model(base).save_pretrained(base)
    done = train(home, Inputs(base, inputs.train, inputs.held_out), train__max_steps=2)
    folder = RunFolder(done.folder.path.rename(done.folder.path.with_name(NAME)))
    return Finished(done.cfg, folder, done.outcome, done.trainer)


@pytest.fixture(scope="module")
def started(run: Finished) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    """A server as the verb starts it, its port, and what it said."""
    port, output = free_port(0), run.folder.path / "said.txt"
    with output.open("w") as handle:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(run.folder.path), str(port)], cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=handle, stderr=handle,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": "/nowhere", TOKEN: "sesame"},
        )  # fmt: skip
    wait_until(lambda: "answers" in output.read_text() or process.poll() is not None)
    assert process.poll() is None, output.read_text()
    yield process, port, output
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def client(started: Any) -> Any:
    import openai

    return openai.OpenAI(base_url=f"http://{HOST}:{started[1]}/v1", api_key="sesame", max_retries=0)


def plain_answer(run: Finished, messages: list[dict[str, str]], tokens: int) -> str:
    """The greedy answer of plain PEFT and transformers."""
    adapter = run.folder.path / "adapter"
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        out = AutoPeftModelForCausalLM.from_pretrained(adapter).eval().generate(
            **prompt, do_sample=False, max_new_tokens=tokens, eos_token_id=2, pad_token_id=0
        )  # fmt: skip
    text: str = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


@needs_server
@pytest.mark.slow
def test_greedy_answer_to_the_openai_client_is_the_one_of_plain_peft(run: Finished, client: Any):
    expected = plain_answer(run, CHAT, 12)
    assert len(set(expected)) > 5
    asked = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.content == expected
    parts = [part.choices[0].delta.content or "" for part in client.chat.completions.create(**asked, stream=True)]
    # These weights may end inside a character of several bytes, which a stream holds back until it is whole.
    assert "".join(parts) == expected.rstrip("\ufffd")
    assert len([part for part in parts if part]) > 3


def answer_to(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
    """Status and body of one request, as no client of ours would send it."""
    known = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
    with closing(HTTPConnection(HOST, port, timeout=120)) as connection:
        connection.request(method, path, content, known | headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


@needs_server
@pytest.mark.slow
def test_real_server_lets_in_a_client_of_chat_only(started: Any, run: Finished):
    port = started[1]
    asked = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 6}
    assert answer_to(port, "/load_model", {"model": str(run.folder.path)})[0] == 404
    assert answer_to(port, "/openapi.json")[0] == 404
    assert answer_to(port, "/v1/models", Host="attacker.example")[0] == 403
    assert answer_to(port, "/v1/models", Authorization="Bearer open")[0] == 401
    for wrong in (
        {"model": "gpt"},
        {"max_tokens": -1},
        {"temperature": float("nan")},
        {"n": 2},
        {"messages": None},
        {"max_tokens": 10**6},
    ):
        assert answer_to(port, "/v1/chat/completions", {**asked, **wrong})[0] == 400
    listed = json.loads(answer_to(port, "/v1/models")[1])["data"]
    assert [(model["id"], type(model["created"])) for model in listed] == [(NAME, int)]
    status, stream = answer_to(port, "/v1/chat/completions", {**asked, "stream": True})
    assert (status, stream.endswith("data: [DONE]\n\n")) == (200, True)
    assert "Traceback" not in (run.folder.logs / "serve.log").read_text()


def listening_on(port: int) -> set[str]:
    """The addresses at which something listens on `port`."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


@needs_server
@pytest.mark.slow
def test_server_listens_on_this_machine_only_and_stops_at_a_signal(started: Any, run: Finished, client: Any):
    process, port, output = started
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert listening_on(port) == {"0100007F"}  # 127.0.0.1, as proc(5) writes it
    assert "merging the adapter into" in output.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 128 + signal.SIGTERM
    assert children
    assert not any(is_alive(pid) for pid in children)
    assert choose_port(port) == port
    assert "Traceback" not in output.read_text() + (run.folder.logs / "serve.log").read_text()


FAKE = """
import signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: print("stopping", flush=True))
print("pid", __import__("os").getpid(), flush=True)
if "broken" in sys.argv:
    sys.exit("no room for the model")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
"""Replaces a server where only its start and stop matter."""


def live(tmp_path: Path, signals: list[int], *words: str) -> int:
    """`run_server` with the stand-in, sent `signals` once it has said that it answers: each when the one before has
    reached the server."""
    port, log_file = free_port(0), tmp_path / "logs" / "serve.log"
    launch = Launch((sys.executable, "-c", FAKE, str(port), *words), {})
    output: list[str] = []

    def send() -> None:
        wait_until(lambda: not signals or any("answers, model 'x'" in line for line in output))
        for sent, number in enumerate(signals):
            wait_until(lambda sent=sent: log_file.read_text().count("stopping") == sent)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    with patch.object(serving.log, "say", lambda text, tag: output.append(text)):
        sender.start()
        try:
            return run_server(launch, "x", port=port, cwd=tmp_path, log_file=log_file)
        finally:
            sender.join()


def fake_pid(tmp_path: Path) -> int:
    return int((tmp_path / "logs" / "serve.log").read_text().split()[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_and_gives_its_code(number: int, tmp_path: Path):
    before = signal.getsignal(number)
    assert live(tmp_path, [number]) == 128 + number
    assert not is_alive(fake_pid(tmp_path))
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(("stop_s", "signals"), [(600.0, [signal.SIGTERM, signal.SIGINT]), (0.5, [signal.SIGTERM])])
def test_a_server_that_does_not_stop_is_ended_by_a_second_signal_or_after_a_while(
    stop_s: float, signals: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "STOP_S", stop_s)
    began = time.monotonic()
    assert live(tmp_path, signals, "deaf") == 128 + signal.SIGTERM
    assert time.monotonic() - began < 600.0
    assert not is_alive(fake_pid(tmp_path))


def test_a_server_that_ends_by_itself_is_an_error_with_its_last_words(tmp_path: Path):
    with pytest.raises(RunError, match="no room for the model") as caught:
        live(tmp_path, [], "broken")
    assert "ended with code 1" in caught.value.what


def test_the_error_of_a_server_that_ends_by_itself_begins_with_the_cause(tmp_path: Path):
    # vLLM: the engine's error stands far above what the outermost process says at its end.
    code = "import sys; print('ValueError: heads of 8'); [print('line', n) for n in range(40)]; sys.exit(1)"
    launch = Launch((sys.executable, "-c", code), {})
    with pytest.raises(RunError) as caught:
        run_server(launch, "x", port=free_port(0), cwd=tmp_path, log_file=tmp_path / "serve.log")
    shown = caught.value.what.splitlines()
    assert (shown[1].strip(), shown[-1].strip(), len(shown)) == ("ValueError: heads of 8", "line 39", 17)


KILLED = """
import sys
from pathlib import Path
from sftplay.export.server import run_server
from sftplay.launch.command import Launch
from sftplay.parity.by_vllm import started
engine = "import os, subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); os.wait()"
folder, launch = Path(sys.argv[1]), Launch((sys.executable, "-c", engine), {})
if sys.argv[2] == "serve":
    run_server(launch, "x", port=1, cwd=folder, log_file=folder / "serve.log")
else:
    with started(launch, 1, cwd=folder, log_file=folder / "serve.log"):
        pass
"""


@pytest.mark.parametrize("verb", ["serve", "parity"])
def test_what_a_server_has_started_ends_with_a_verb_that_is_killed(verb: str, tmp_path: Path):
    log_file = tmp_path / "serve.log"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), verb], cwd=ROOT)
    wait_until(lambda: log_file.exists() and log_file.read_text().strip())
    engine = int(log_file.read_text())
    assert is_alive(engine)
    process.kill()
    process.wait()
    wait_until(lambda: not is_alive(engine), 60.0)


def test_a_second_server_of_a_run_leaves_the_log_of_the_first_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, said = RunFolder(tmp_path), list[str]()
    launch = Launch((sys.executable, "-c", "print('first')"), {})
    taken = folder.logs / "serve.log"
    monkeypatch.setattr(serving.log, "say", lambda text, tag: said.append(text))
    for name, value in {
        "whole_model": tmp_path, "server_config": None, "make_hub_cache": None,
        "run_server": lambda launch, name, *, log_file, **_: said.append(log_file.name),
        "build_server": launch,
    }.items():  # fmt: skip
        replacement = value if callable(value) else lambda *_, value=value, **__: value
        monkeypatch.setattr(f"sftplay.export.serve.{name}", replacement)
    cfg = SimpleNamespace(model=SimpleNamespace(trust_remote_code=False))
    with serving.server_process(launch, cwd=tmp_path, log_file=taken):
        wait_until(lambda: taken.read_text() == "first\n")
        serve_module.serve(cfg, folder, server="transformers", port=0)
    assert said[-1].startswith("serve-")
    assert said[-1] in said[-2]
    serve_module.serve(cfg, folder, server="transformers", port=0)
    assert said[-1] == "serve.log"


def having(*installed: str) -> Any:
    return lambda name: name if name in installed else None


@pytest.mark.parametrize(
    ("choice", "installed", "python", "server"),
    [
        ("auto", ("fastapi", "uvicorn", "openai"), None, "transformers"),
        ("auto", (), "vllm/bin/python", "vllm"),
        ("vllm", (), "vllm/bin/python", "vllm"),
        ("transformers", ("fastapi", "uvicorn", "openai"), "vllm/bin/python", "transformers"),
    ],
)
def test_auto_takes_vllm_where_it_is_installed(
    choice: Any, installed: Any, python: Any, server: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "find_spec", having(*installed))
    monkeypatch.setattr(serving, "find_python", lambda: python)
    assert choose_server(choice)[0] == server


@pytest.fixture
def vllm_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with vLLM, in which nothing runs."""
    monkeypatch.setattr(serving, "find_python", lambda: tmp_path / "python")
    return tmp_path / "python"


@pytest.mark.parametrize("server", ["transformers", "vllm"])
def test_command_binds_to_this_machine_and_runs_a_models_code_only_if_told(
    server: Any, tmp_path: Path, vllm_python: Path
):
    launch = build_server(server, tmp_path, name="x", port=8123, trusts_code=False)
    words = " ".join(launch.argv)
    assert f"--host {HOST} --port 8123" in words
    assert "trust" not in words
    assert "--trust-remote-code" in build_server(server, tmp_path, name="x", port=8123, trusts_code=True).argv
    assert ("--middleware sftplay.export.gate.Gate" in words) == (server == "vllm")
    assert (launch.argv[0] == str(vllm_python)) == (server == "vllm")
    assert launch.env["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert launch.env["HF_HUB_OFFLINE"] == "1"
    assert str(tmp_path) in (launch.env["HF_HUB_CACHE"] if server == "transformers" else words)


def adapter_with(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "adapter").mkdir(exist_ok=True)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"r": 16, "bias": "none", **config}))
    return tmp_path / "adapter"


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (4, 8), (16, 16), (48, 64), (512, 512)])
def test_an_adapter_gets_the_next_rank_that_vllm_takes_and_the_runs_name(
    rank: int, taken: int, tmp_path: Path, vllm_python: Path
):
    adapter = adapter_with(tmp_path, r=rank)
    argv = build_server("vllm", tmp_path, name="x", port=1, trusts_code=False, adapter=adapter, tokenizer=adapter).argv
    assert argv[argv.index("--max-lora-rank") + 1] == str(taken)
    assert f"x={adapter}" in argv
    assert argv[argv.index("--served-model-name") + 1] == "x-base"
    assert argv[argv.index("--tokenizer") + 1] == str(adapter)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules that were trained in full"),
        ({"trainable_token_indices": {"embed_tokens": [768]}}, "rows of new tokens"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"rank_pattern": {"q_proj": 2}}, "several ranks"),
        ({"r": 600}, "its rank is 600"),
    ],
)
def test_an_adapter_that_vllm_would_serve_wrongly_is_refused_with_the_remedy(
    config: dict[str, Any], why: str, tmp_path: Path, vllm_python: Path
):
    with pytest.raises(ConfigError, match=why) as caught:
        build_server("vllm", tmp_path, name="x", port=1, trusts_code=False, adapter=adapter_with(tmp_path, **config))
    assert "merged" in caught.value.fix


@pytest.mark.parametrize(
    ("served_class", "prefix"),
    [
        ("LlamaForCausalLM", "base_model.model.model.layers"),
        ("Qwen3_5ForConditionalGeneration", "base_model.model.model.language_model.layers"),  # not the one that trained
        ("MixtralForCausalLM", ""),
    ],
)
def test_an_adapter_is_served_under_names_that_vllm_mounts_or_not_at_all(
    served_class: str, prefix: str, run: Finished, tmp_path: Path, vllm_python: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [served_class]}))
    monkeypatch.setattr(serve_module, "base_folder", lambda *_: tmp_path)
    seen: list[dict[str, Any]] = []

    def look(launch: Launch, name: str, **_: Any) -> int:
        folder = Path(launch.argv[launch.argv.index("--lora-modules") + 1].removeprefix(f"{name}="))
        assert launch.argv[launch.argv.index("--tokenizer") + 1] == str((run.folder.path / "adapter").absolute())
        seen.append(load_file(folder / "adapter_model.safetensors"))
        return 0

    monkeypatch.setattr(serve_module, "run_server", look)
    serve = partial(serve_module.serve, run.cfg, run.folder, server="vllm", port=0, weights="adapter")
    if not prefix:  # its layers have no MLP outside the experts
        with pytest.raises(ConfigError, match=r"vLLM mounts \d+ of \d+ modules") as caught:
            serve()
        assert caught.value.fix.startswith("leave --weights out")
        assert not seen
        return
    assert serve() == 0
    trained = load_file(run.folder.path / "adapter" / "adapter_model.safetensors")
    expected = {key.replace("base_model.model.model.layers", prefix): tensor for key, tensor in trained.items()}
    assert seen[0].keys() == expected.keys()
    assert all(torch.equal(seen[0][key], tensor) for key, tensor in expected.items())


def test_heads_that_vllm_does_not_compute_with_on_a_cpu_are_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "find_python", lambda: tmp_path / "python")
    config = {"hidden_size": 32, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MachineError, match="this model's are 8 wide"):
        build_server("vllm", tmp_path, name="x", port=1, trusts_code=False)
    build_server("vllm", tmp_path, name="x", port=1, trusts_code=False, has_gpu=True)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config | {"head_dim": 64}}))
    build_server("vllm", tmp_path, name="x", port=1, trusts_code=False)


@pytest.mark.parametrize(
    ("stored", "has_gpu", "has_bf16", "taken"),
    [
        ("bfloat16", True, False, "bfloat16"),
        ("bfloat16", False, True, "bfloat16"),
        ("bfloat16", False, False, "float32"),
        ("float32", True, True, "float32"),  # vLLM's auto would round it
        (None, True, True, "auto"),
    ],
)
def test_weights_keep_their_dtype_where_the_machine_computes_it(
    stored: str | None, has_gpu: bool, has_bf16: bool, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "cpu_has_bf16", lambda: has_bf16)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"dtype": stored}}))
    assert serving.find_dtype(tmp_path, has_gpu=has_gpu) == taken


@pytest.mark.parametrize(
    ("folder", "name"),
    [("my run@2", "my-run-2"), ("a--b..c", "a-b-c"), ("-x-", "x"), ("@", "run"), ("r.git", "r")],
)
def test_served_name_is_one_the_hub_would_take(folder: str, name: str, tmp_path: Path):
    actual = served_name(RunFolder(tmp_path / folder))
    assert actual == name
    validate_repo_id(actual)


def test_links_show_one_model_that_samples_and_ends_where_training_ended(run: Finished, tmp_path: Path):
    model = whole_model(run.cfg, run.folder)
    config = server_config(run.cfg, model)
    snapshot = make_hub_cache(tmp_path / "hub", model, config=config, name="x")
    assert [repo.repo_id for repo in scan_cache_dir(tmp_path / "hub").repos] == ["x"]
    assert not scan_cache_dir(tmp_path / "hub").warnings
    actual = GenerationConfig.from_pretrained(snapshot)
    assert (actual.do_sample, actual.temperature, actual.top_k, actual.eos_token_id) == (True, 1.0, 0, 2)
    # The model's own file stays as it was: plain transformers answers greedily.
    assert not GenerationConfig.from_pretrained(model).do_sample
    assert AutoTokenizer.from_pretrained(snapshot).chat_template == run.trainer.processing_class.chat_template


def test_merged_model_is_made_once_and_one_of_another_adapter_is_refused(run: Finished):
    merged = whole_model(run.cfg, run.folder)
    assert merged == run.folder.path / "merged"
    made = (merged / "model.safetensors").stat().st_mtime_ns
    assert (whole_model(run.cfg, run.folder) / "model.safetensors").stat().st_mtime_ns == made
    record = merged / "merge.json"
    kept = record.read_text()
    record.write_text(json.dumps({"adapter_sha256": "0"}))
    try:
        with pytest.raises(ConfigError, match="not merged from this run's adapter"):
            whole_model(run.cfg, run.folder)
    finally:
        record.write_text(kept)


@pytest.mark.parametrize(
    ("cores", "has_gpu", "variables", "module"),
    [
        (2, False, {}, serving.FORKED_MODULE),
        (9, False, {}, serving.MODULE),
        (2, True, {}, serving.MODULE),
        (2, False, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, serving.MODULE),
        (2, False, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, serving.MODULE),
    ],
)
def test_only_on_a_cpu_of_few_cores_is_the_engine_a_fork_and_the_users_settings_stay(
    cores: int, has_gpu: bool, variables: dict[str, str], module: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serving, "usable_cores", lambda: cores)
    for name in ("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert serving.server_module(has_gpu=has_gpu) == module
