"""Greedy answers of servers in OpenAI's form, with log-probabilities; and of a real vLLM server, started or running."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from sftplay import log
from sftplay.atomic import read_object
from sftplay.errors import ConfigError, MachineError, RunError
from sftplay.export.gate import TOKEN
from sftplay.export.server import START_S, build_server, server_process
from sftplay.launch.command import Launch
from sftplay.launch.generation_server import answers
from sftplay.machine.ports import HOST, free_port
from sftplay.model.tokenizer import set_end_tokens
from sftplay.parity.engine import Answer, EngineReply, Question

AT_ONCE, ANSWER_S = 8, 600.0
"""Requests side by side, and the longest wait for one answer."""


@dataclass(frozen=True)
class Server:
    """A server that answers below `url`, which ends with /v1, and the name of a model there."""

    url: str
    model: str

    def ask(
        self, questions: Sequence[Question], *, max_new_tokens: int, gives_ids: bool = True, salt: bool = False
    ) -> list[Answer]:
        """Return the greedy answers in order. `gives_ids` asks vLLM for ids and log-probabilities; `salt` keeps it
        from using what it has in its prefix cache.

        Raises:
            MachineError: nothing answers there.
            RunError: the server refuses a question.
        """

        def ask_one(question: Question) -> Answer:
            body: dict[str, Any] = {"model": self.model, "max_tokens": max_new_tokens, "temperature": 0}
            if gives_ids:
                # What a model's own generation config may set otherwise.
                body |= {"top_p": 1, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}
                body |= {"return_token_ids": True, "ignore_eos": False}
                body |= {"cache_salt": secrets.token_hex(8)} if salt else {}
            if question.messages is None:
                body |= {"prompt": question.text, **({"logprobs": 0} if gives_ids else {})}
                return _read_completion(self._post("completions", body))
            body |= {"messages": list(question.messages), **({"logprobs": True} if gives_ids else {})}
            body |= {"tools": list(question.tools), "tool_choice": "none"} if question.tools else {}
            return _read_chat(self._post("chat/completions", body))

        with ThreadPoolExecutor(AT_ONCE if gives_ids else 1) as pool:
            return list(pool.map(ask_one, questions))

    def gives_ids(self, question: Question) -> bool:
        """True where an answer to `question` has token ids, as vLLM's have."""
        try:
            return bool(self.ask([question], max_new_tokens=1)[0].answer_ids)
        except RunError:  # a parameter that it does not know
            return False

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return call(f"{self.url}/{path}", body)


def find_server(url: str, name: str, *, likely: str) -> tuple[Server, dict[str, Any]]:
    """Return the server below `url` and what it says of its model: the one called `name`, or else `likely`, or the
    only one. Raise ConfigError where it is none of these, MachineError where nothing answers.
    """
    url = url.rstrip("/") if url.rstrip("/").endswith("/v1") else f"{url.rstrip('/')}/v1"
    models = {str(model.get("id")): model for model in call(f"{url}/models").get("data", [])}
    chosen = name or (likely if likely in models else next(iter(models), "") if len(models) == 1 else "")
    if chosen not in models:
        fix = f"name one of {', '.join(models) or 'none'}: NAME="
        raise ConfigError(f"has no model {chosen or likely!r}", where=url, fix=fix)
    return Server(url, chosen), models[chosen]


def call(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON that `url` answers, to a POST of `body` if there is one; with the token of SFTPLAY_SERVE_TOKEN.

    Raises:
        MachineError: nothing answers.
        RunError: the answer is an error, or no JSON object.
    """
    token = os.environ.get(TOKEN)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    if not url.startswith(("http://", "https://")):
        raise ConfigError("is no address", where=url, fix="write it as http://127.0.0.1:8000/v1")
    # An environment's proxy must not see a question for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=ANSWER_S) as response:
            content = json.loads(response.read())
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode("utf-8", "replace")
        fix = f"set {TOKEN} to the server's token" if error.code == 401 else "read the server's log"
        raise RunError(f"answers {error.code}: {text}", where=url, fix=fix) from error
    except (OSError, ValueError) as error:
        what = f"does not answer ({getattr(error, 'reason', error)})"
        raise MachineError(what, where=url, fix="start it (make serve), or leave URL= out") from error
    if not isinstance(content, dict):
        raise RunError("answers no JSON object", where=url, fix="read the server's log")
    return content


def _read_chat(content: dict[str, Any]) -> Answer:
    choice = content["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("content") or []
    text = choice["message"].get("content") or ""
    return _to_answer(content, choice, [entry["logprob"] for entry in logprobs], text)


def _read_completion(content: dict[str, Any]) -> Answer:
    choice = content["choices"][0]
    return _to_answer(content, choice, (choice.get("logprobs") or {}).get("token_logprobs") or [], choice["text"])


def _to_answer(content: dict[str, Any], choice: dict[str, Any], logprobs: Sequence[float], text: str) -> Answer:
    prompt = choice.get("prompt_token_ids") or content.get("prompt_token_ids") or []
    ids = choice.get("token_ids") or []
    # A server counts an end token that it does not show.
    return Answer(prompt, ids, list(logprobs)[: len(ids)], None if ids else text)


NAME = "parity"


def answer_all(
    folder: Path, questions: Sequence[Question], *, max_new_tokens: int, log_file: Path, adapter: Path | None = None,
    tokenizer: Any = None, trusts_code: bool = False, has_gpu: bool = False,
) -> EngineReply:  # fmt: skip
    """Return greedy answers of vLLM with the model in `folder`, or with `adapter` next to it.

    With an adapter, `tokenizer` says where answers end: a base need not know the end of a turn.

    Raises:
        MachineError: there is no environment with vLLM.
        RunError: the server ends before it answers.
    """
    longest = max(len(question.prompt_ids) for question in questions) + max_new_tokens + 16
    config = read_object(folder / "config.json")
    context = (config.get("text_config") or config).get("max_position_embeddings")
    longest = min(longest, context or longest)  # vLLM refuses to read more than the model
    with tempfile.TemporaryDirectory(prefix="sftplay-parity-") as scratch:
        generation = None
        if adapter is not None:
            generation = Path(scratch)
            has_config = (folder / "generation_config.json").is_file()
            config = GenerationConfig.from_pretrained(folder) if has_config else GenerationConfig()
            set_end_tokens(config, tokenizer)
            config.save_pretrained(generation)
        port = free_port(0)
        has_tokenizer = adapter is not None and (adapter / "tokenizer_config.json").is_file()
        launch = build_server(
            "vllm", folder.resolve(), name=NAME, port=port, trusts_code=trusts_code,
            adapter=adapter and adapter.resolve(), tokenizer=adapter.resolve() if adapter and has_tokenizer else None,
            generation=generation, max_model_len=longest, has_gpu=has_gpu, is_gated=False,
        )  # fmt: skip
        with started(launch, port, cwd=Path(scratch), log_file=log_file):
            url = f"http://{HOST}:{port}"
            version = call(f"{url}/version").get("version", "of unknown release")
            found = Server(f"{url}/v1", NAME).ask(questions, max_new_tokens=max_new_tokens)
    dtype = launch.argv[launch.argv.index("--dtype") + 1] if "--dtype" in launch.argv else None
    return EngineReply(f"vLLM {version}", found, dtype=None if dtype == "auto" else dtype)


@contextmanager
def started(launch: Launch, port: int, *, cwd: Path, log_file: Path, tag: str = "parity") -> Iterator[None]:
    """Run a server until the block ends; its lines go to `log_file`. Raise RunError where it ends by itself before."""
    log.say(f"starting vLLM, which takes a minute; its own lines go to {log_file}", tag)
    with server_process(launch, cwd=cwd, log_file=log_file) as process:
        try:
            deadline = time.monotonic() + START_S
            while not answers(port, within_s=1.0):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunError("vLLM does not start", fix="read its log")
                time.sleep(0.2)
            yield
        except RunError as error:
            lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
            first = next((line for line in lines if re.search(r"\w+(Error|Exception): ", line)), "")
            what = f"{error.what.partition(': {')[0]} ({re.sub(r'^.*?] ', '', first)[:300] or 'it names no error'})"
            raise RunError(what, where=str(log_file), fix=error.fix) from error
        finally:
            process.terminate()
