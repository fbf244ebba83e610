"""Answers of a real vLLM server: one that is started for the questions, or one that runs already."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from sftplay import log
from sftplay.atomic import read_object
from sftplay.errors import RunError
from sftplay.export.server import START_S, build_server, server_process
from sftplay.launch.command import Launch
from sftplay.launch.generation_server import answers
from sftplay.machine.ports import HOST, free_port
from sftplay.model.tokenizer import set_end_tokens
from sftplay.parity.client import Server, call
from sftplay.parity.engine import EngineReply, Question

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
