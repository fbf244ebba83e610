"""A run served by the real vLLM, merged and as an adapter on its base: the trained answers, behind the kit's gate."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, train
from peft import AutoPeftModelForCausalLM
from processes import HANG_S, is_alive, wait_until
from small_run import WORDS
from transformers import AutoTokenizer

from sftplay.export.gate import ENDPOINTS, TOKEN
from sftplay.export.server import BASE, FORKED_MODULE, server_module
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import HOST, free_port
from sftplay.machine.probe import probe
from sftplay.places import find_vllm_python

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny-run"
TOKENS, BOUND = 16, 1e-4
CONTENTS = [f"why {WORDS[number % 17]} {WORDS[number * 5 % 18]} {number}" for number in range(20)]
PROMPTS = [[{"role": "user", "content": content}] for content in CONTENTS]
LACKING = [] if find_vllm_python() else [".venv-vllm (make install-vllm)"]
LACKING += [] if find_spec("openai") else ["openai (make install EXTRAS=serve)"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}")]

SERVE = """
import sys
from pathlib import Path
from sftplay.config.load import load_config
from sftplay.export.serve import serve
from sftplay.launch.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
sys.exit(serve(load_config(folder.resolved), folder, server="vllm", port=int(sys.argv[2]), weights=sys.argv[3]))
"""


@dataclass(frozen=True)
class Greedy:
    """One greedy answer."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Server:
    """A server as the verb starts it."""

    weights: str
    process: subprocess.Popen[bytes]
    port: int
    output: Path
    log_file: Path

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Status and body of one request, as no client of ours would send it."""
        known = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}
        with closing(HTTPConnection(HOST, self.port, timeout=120)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), known | headers)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A LoRA run on the built-in model; that of other tests has heads too small for vLLM on a CPU."""
    home = tmp_path_factory.mktemp("serve place")
    base = Path(shutil.copytree(ROOT / "data/base/tiny", home / "base"))
    done = train(home, Inputs(base, inputs.train, inputs.held_out), train__max_steps=8)
    folder = RunFolder(done.folder.path.rename(done.folder.path.with_name(NAME)))
    return Finished(done.cfg, folder, done.outcome, done.trainer)


@pytest.fixture(scope="module")
def trained(run: Finished) -> list[Greedy]:
    """What plain PEFT and transformers answer, where the adapter changes most answers."""
    adapter = run.folder.path / "adapter"
    tokenizer, model = AutoTokenizer.from_pretrained(adapter), AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    found = [answer_plainly(model, tokenizer, prompt) for prompt in PROMPTS]
    with model.disable_adapter():
        bases = [answer_plainly(model, tokenizer, prompt) for prompt in PROMPTS]
    assert sum(base.ids != own.ids for base, own in zip(bases, found, strict=True)) > 15
    assert sum(len(answer.ids) for answer in found) > 200
    return found


def answer_plainly(model: Any, tokenizer: Any, prompt: list[dict[str, str]]) -> Greedy:
    encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        out = model.generate(
            **encoded, do_sample=False, max_new_tokens=TOKENS, eos_token_id=2, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
    prompt_ids = encoded["input_ids"][0].tolist()
    ids = out.sequences[0, len(prompt_ids) :].tolist()
    scores = [logits[0].log_softmax(-1)[token].item() for logits, token in zip(out.logits, ids, strict=True)]
    return Greedy(prompt_ids, ids, scores)


# That vLLM answers with an adapter as PEFT does is held by parity's test of a running server, too.
@pytest.fixture(scope="module", params=["merged", pytest.param("adapter", marks=pytest.mark.long)])
def server(run: Finished, request: pytest.FixtureRequest) -> Iterator[Server]:
    """One start for all tests of merged weights, one for those of an adapter. The user's variables open nothing."""
    port, output, log_file = free_port(0), run.folder.path / "said.txt", run.folder.logs / "serve.log"
    env = {TOKEN: "sesame", "VLLM_API_KEY": "other", "VLLM_SERVER_DEV_MODE": "1", "HF_HOME": "/nowhere"}
    with output.open("w") as handle:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(run.folder.path), str(port), request.param], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, env={**os.environ, **env},
        )  # fmt: skip
    wait_until(lambda: "answers" in output.read_text() or process.poll() is not None)
    assert process.poll() is None, output.read_text()
    yield Server(request.param, process, port, output, log_file)
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    import openai

    return openai.OpenAI(base_url=f"http://{HOST}:{server.port}/v1", api_key="sesame", max_retries=0)


def ask(client: Any, prompt: list[dict[str, str]], *, model: str = NAME, **more: Any) -> Any:
    return client.chat.completions.create(model=model, messages=prompt, max_tokens=TOKENS, **more)


def test_answers_and_probabilities_are_those_of_the_trained_model(client: Any, trained: list[Greedy], server: Server):
    differences, equal_to_base = [], 0
    for prompt, expected in zip(PROMPTS, trained, strict=True):
        reply = ask(client, prompt, temperature=0, logprobs=True, extra_body={"return_token_ids": True})
        choice = reply.choices[0]
        assert reply.prompt_token_ids == expected.prompt_ids
        assert choice.token_ids == expected.ids
        found = [token.logprob for token in choice.logprobs.content]
        differences += [abs(a - b) for a, b in zip(found, expected.logprobs, strict=True)]
        if server.weights == "adapter":
            base = ask(client, prompt, model=NAME + BASE, temperature=0)
            equal_to_base += base.choices[0].message.content == choice.message.content
    assert max(differences) < BOUND
    assert equal_to_base < 5


def test_only_the_runs_model_is_listed_and_it_samples_as_the_run_does(client: Any):
    assert [model.id for model in client.models.list().data] == [NAME]
    texts = [ask(client, PROMPTS[0], seed=seed).choices[0].message.content for seed in (1, 2, 3, 1)]
    assert len(set(texts)) == 3
    assert texts[0] == texts[3]


def test_a_stream_gives_the_whole_answer(client: Any):
    whole = ask(client, PROMPTS[0], temperature=0).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in ask(client, PROMPTS[0], temperature=0, stream=True)]
    assert "".join(parts) == whole
    assert len([part for part in parts if part]) > 3


def test_everything_else_that_vllm_opens_is_refused(server: Server):
    routes = re.findall(r"Route: (\S+), (?:Methods: ([A-Z, ]+)|Endpoint)", server.log_file.read_text())
    asked = [(path, method) for path, methods in routes for method in (methods or "GET").split(", ")]
    assert {"/v1/completions", "/docs", "/metrics", "/tokenize"} <= {path for path, _ in asked}
    assert "/sleep" not in {path for path, _ in asked}  # of VLLM_SERVER_DEV_MODE
    for path, method in asked:
        if ENDPOINTS.get(path) == method:
            continue
        status, text = server.request(method, path.replace("{response_id}", "x"), {} if method == "POST" else None)
        assert status in (404, 405), (path, method)
        assert method == "HEAD" or "there are /health" in text or f"{path} takes" in text


def test_only_clients_of_this_machine_with_the_token_get_answers(server: Server):
    asked = {"model": NAME, "messages": PROMPTS[0], "temperature": 0, "max_tokens": 2}

    def status(body: dict[str, Any] = asked, **headers: str) -> int:
        return server.request("POST", "/v1/chat/completions", body, **headers)[0]

    assert status() == 200
    assert status(Authorization="Bearer other") == 401
    assert status(Host="attacker.example") == 403
    assert status(Origin="https://attacker.example") == 403
    assert status(**{"Content-Type": "text/plain"}) == 415
    picture = [{"type": "image_url", "image_url": {"url": f"file://{ROOT}/docs/x.png"}}]
    wrong: list[dict[str, Any]] = [
        {"model": "gpt"}, {"max_tokens": -1}, {"max_tokens": 10**6}, {"messages": None}, {"temperature": -1},
        {"chat_template": "{{ 1 }}"}, {"messages": [{"role": "user", "content": picture}]},
    ]  # fmt: skip
    assert {status({**asked, **change}) for change in wrong} <= {400, 404}


def test_server_listens_here_alone_and_nothing_of_it_outlives_the_verb(server: Server):
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    ports = {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == server.port}
    assert ports == {"0100007F"}  # 127.0.0.1, as proc(5) writes it
    family = descendants(server.process.pid)
    assert len(family) > 1
    # An engine that is no fork of the server has Python's tracker of resources beside it.
    has_tracker = any(b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family)
    assert has_tracker == (server_module(has_gpu=bool(probe().gpus)) != FORKED_MODULE)
    stop = signal.SIGTERM if server.weights == "merged" else signal.SIGKILL
    server.process.send_signal(stop)
    assert server.process.wait(HANG_S) == (128 + stop if stop == signal.SIGTERM else -stop)
    wait_until(lambda: not any(is_alive(pid) for pid in family))
    assert "Traceback" not in server.output.read_text()


def test_an_engine_that_is_a_fork_ends_with_its_server_where_nothing_else_ends_it():
    code = (
        "import time; from sftplay.export import forked_vllm; "
        "engine = forked_vllm.EngineContext().Process(target=time.sleep, args=(600,)); "
        "engine.start(); print(engine.pid, flush=True); time.sleep(600)"
    )
    argv = [str(find_vllm_python()), "-c", code]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        assert is_alive(engine)
        server.kill()
    wait_until(lambda: not is_alive(engine))


def descendants(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}.union(*(descendants(int(child)) for child in children))
