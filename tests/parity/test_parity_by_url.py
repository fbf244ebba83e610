"""`parity` with a server that runs already: what it does not tell is said, and a stale cache is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import pytest
from in_process import Finished
from test_parity import ask, run  # noqa: F401 - a fixture

from sftplay.parity.by_transformers import _answer, open_served
from sftplay.parity.engine import Question

TOKEN = "SFTPLAY_SERVE_TOKEN"


@contextmanager
def serving(folder: Path, *, before: Path | None = None, gives_ids: bool = True) -> Iterator[str]:
    """A server in OpenAI's form with the model in `folder`; what it has cached comes from the model in `before`."""
    opened = {path: open_served(path, trusts_code=False) for path in (folder, before) if path}
    lock = Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers["Authorization"] != "Bearer sesame":
                self.reply({"error": "who is there?"}, 401)
                return
            self.reply({"data": [{"id": "run", "root": str(folder)}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != "Bearer sesame":
                self.reply({"error": "who is there?"}, 401)
                return
            if "return_token_ids" in asked and not gives_ids:
                self.reply({"error": "no such parameter: return_token_ids"}, 400)
                return
            assert asked["temperature"] == 0
            model, tokenizer = opened[before if before and "cache_salt" not in asked else folder]
            question = Question(0, asked["messages"], "", [])
            with lock:
                answer = _answer(model, tokenizer, question, max_new_tokens=asked["max_tokens"], end_ids=())
            text = tokenizer.decode(answer.answer_ids, skip_special_tokens=True)
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
            if gives_ids:
                logprobs = {"content": [{"token": "", "logprob": value} for value in answer.logprobs]}
                choice |= {"token_ids": list(answer.answer_ids), "logprobs": logprobs}
            self.reply({"choices": [choice], **({"prompt_token_ids": list(answer.prompt_ids)} if gives_ids else {})})

        def reply(self, content: dict[str, Any], status: int = 200) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "sesame")


def test_a_server_with_ids_is_held_against_the_run(run: Finished):  # noqa: F811
    with serving(run.folder.path / "merged") as url:
        code, found = ask(run, "--engine", "vllm", "--url", url)
    assert (code, found["same_prompt_ids"], found["same_answer_ids"]) == (0, 6, 6)
    assert found["max_logprob_diff"] < 1e-4
    assert found["adapter_changes_answers"] is True


def test_of_a_server_that_gives_texts_alone_these_are_compared_and_that_is_said(run: Finished):  # noqa: F811
    with serving(run.folder.path / "merged", gives_ids=False) as url:
        code, found = ask(run, "--engine", "transformers", "--url", url)
    assert (code, found["same_prompt_ids"], found["same_answer_ids"]) == (0, None, 6)
    assert found["max_logprob_diff"] is None
    assert any("compared by texts alone" in note for note in found["notes"])
    assert found["adapter_changes_answers"] is True


@pytest.mark.parametrize(("gives_ids", "engine"), [(True, "vllm"), (False, "transformers")])
def test_without_an_engine_a_server_is_asked_for_all_that_it_gives(run: Finished, gives_ids: bool, engine: str):  # noqa: F811
    with serving(run.folder.path / "merged", gives_ids=gives_ids) as url:
        code, found = ask(run, "--url", url)
    assert (code, found["engine"], found["same_answer_ids"]) == (0, engine, 6)
    assert (found["max_logprob_diff"] is not None) == gives_ids


def test_a_server_that_wants_a_token_is_answered_with_how_it_is_given(run: Finished, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.delenv(TOKEN)
    with serving(run.folder.path / "merged") as url:
        code, found = ask(run, "--engine", "vllm", "--url", url)
    assert (code, found["error"]["fix"]) == (5, f"set {TOKEN} to the server's token")


def test_texts_of_the_base_are_refused(run: Finished):  # noqa: F811
    with serving(Path(run.cfg.model.name), gives_ids=False) as url:
        code, found = ask(run, "--engine", "transformers", "--url", url)
    assert code == 5
    assert "is the base's, as it was before training" in found["cause"]
    assert found["same_answer_ids"] < 6


def test_answers_that_come_from_an_older_model_out_of_the_cache_are_named(run: Finished):  # noqa: F811
    with serving(run.folder.path / "merged", before=Path(run.cfg.model.name)) as url:
        code, found = ask(run, "--engine", "vllm", "--url", url)
    assert code == 5
    assert found["cause"].startswith("stale prefix cache")
    assert "6 of 6 rows; with a cache salt it gives the run's answers" in found["cause"]


def test_a_model_that_the_server_does_not_have_is_refused_with_those_it_has(run: Finished):  # noqa: F811
    with serving(run.folder.path / "merged") as url:
        code, found = ask(run, "--engine", "vllm", "--url", url, "--name", "other")
    assert code == 2
    assert "name one of run" in found["error"]["fix"]


def test_a_gguf_file_on_a_server_is_refused(run: Finished):  # noqa: F811
    with serving(run.folder.path / "merged") as url:
        code, found = ask(run, "--url", url, "--against", "gguf")
    assert (code, found["error"]["where"]) == (2, "--against")
