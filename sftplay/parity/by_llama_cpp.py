"""Ask llama.cpp, by the package xllamacpp: tokens of texts, greedy answers, scores of all tokens at a position.

llama.cpp runs in a process of its own, with a deadline: an abort of its native code ends that process alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from sftplay.errors import MachineError, RunError
from sftplay.parity.engine import Answer, EngineReply, Question

DEADLINE_S, DEADLINE_S_PER_GIB = 600.0, 1200.0
SERVER_S = 600.0
"""For one request to the server in the child."""

LARGE_BYTES = 2**30
"""From here on all cores compute. Below, threads that wait for each other on busy cores take 20 times as long."""

Logprobs = dict[int, float]
"""Token -> natural logarithm of its probability."""


def answer_all(file: Path, questions: Sequence[Question], *, max_new_tokens: int) -> EngineReply:
    """Return llama.cpp's greedy answers with the GGUF file.

    A dialogue is rendered by llama.cpp, with the template in the file, and its tokens are those of llama.cpp. Raise
    MachineError where xllamacpp is missing, RunError where the file is not opened or the process dies.
    """
    asked = [
        {"messages": list(question.messages), "tools": list(getattr(question, "tools", ()))}
        if question.messages else question.text
        for question in questions
    ]  # fmt: skip
    done = ask_llama_cpp(file, {"prompts": asked, "answer_tokens": max_new_tokens})
    answers = [
        Answer(prompt_ids=ids, answer_ids=[token for token, _ in steps], logprobs=[chance for _, chance in steps])
        for ids, steps in zip(done["prompts"], done["answers"], strict=True)
    ]
    return EngineReply(version=done["version"], answers=answers, template=done["template"])


def tokenize_all(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """Return llama.cpp's ids of the texts, special tokens in them included, without one before or behind them."""
    return ask_llama_cpp(file, {"texts": list(texts)})["texts"]


def score_positions(file: Path, sequences: Sequence[tuple[Sequence[int], int]], *, top: int) -> list[list[Logprobs]]:
    """Return for each sequence the scores of the likeliest `top` tokens at each position from the given one on."""
    job = {"sequences": [[list(ids), begin] for ids, begin in sequences], "top": top}
    found = ask_llama_cpp(file, job)["scores"]
    return [[{int(token): chance for token, chance in step} for step in steps] for steps in found]


def ask_llama_cpp(file: Path, job: Mapping[str, Any], *, deadline_s: float | None = None) -> dict[str, Any]:
    """Return the child's document for a job with `texts`, `prompts`, `answer_tokens`, `sequences` and `top`."""
    if find_spec("xllamacpp") is None:
        what = "llama.cpp is not installed"
        raise MachineError(what, where="the package xllamacpp", fix="make install EXTRAS=gguf")
    if deadline_s is None:
        deadline_s = DEADLINE_S + DEADLINE_S_PER_GIB * file.stat().st_size / 2**30
    with tempfile.TemporaryDirectory() as place:
        asked, replied, output_file = (Path(place) / name for name in ("job.json", "reply.json", "output"))
        asked.write_text(json.dumps({"file": str(file), **job}), encoding="utf-8")
        argv = [sys.executable, "-m", "sftplay.parity.by_llama_cpp", str(asked), str(replied)]
        with output_file.open("wb") as output:
            try:
                code = subprocess.run(argv, stdout=output, stderr=output, timeout=deadline_s, check=False).returncode
            except subprocess.TimeoutExpired:
                what = f"llama.cpp has not answered in {deadline_s:g} s"
                raise RunError(what, where=str(file), fix="try a machine with idle cores") from None
        if code != 0 or not replied.is_file():
            lines = [line for line in output_file.read_text(errors="replace").splitlines() if line.strip()]
            errors = (line for line in lines if "error" in line.lower() or "failed" in line.lower())
            said = next(errors, lines[-1] if lines else "")
            what = f"llama.cpp ended with {code}: {said}"
            raise RunError(what, where=str(file), fix="see whether the file is whole; report the message")
        return json.loads(replied.read_text(encoding="utf-8"))


class _Server:
    """llama.cpp's server in this process, asked over HTTP as any client does."""

    def __init__(self, file: str, *, context: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = file
        params.n_ctx, params.n_parallel = context, 1
        params.warmup, params.fit_params, params.cache_ram_mib = False, False, 0
        # llama.cpp keeps keys and values in fp16 otherwise: 6e-3 in a log-probability of the builtin model.
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        is_large = Path(file).stat().st_size >= LARGE_BYTES
        threads = max(1, len(os.sched_getaffinity(0)) // 2) if is_large else 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)
        self._plain = self.tokenize("a")[-1]

    def post(self, path: str, content: Mapping[str, Any]) -> Any:
        body = json.dumps(content).encode()
        request = Request(self._server.listening_address + path, body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=SERVER_S) as answer:
            return json.load(answer)

    def template(self) -> str | None:
        with urlopen(self._server.listening_address + "/props", timeout=SERVER_S) as answer:
            return json.load(answer).get("chat_template")

    def tokenize(self, text: str, *, whole: bool = False) -> list[int]:
        """Return the ids of a text; of a `whole` one those that the tokenizer puts around it too."""
        content = {"content": text, "add_special": whole, "parse_special": True}
        return self.post("/tokenize", content)["tokens"]

    def read_prompt(self, prompt: str | dict[str, Any]) -> list[int]:
        """Return the ids of a plain prompt, or of a dialogue as llama.cpp renders it."""
        if isinstance(prompt, str):
            return self.tokenize(prompt, whole=True)
        asked = {key: value for key, value in prompt.items() if value}
        return self.tokenize(self.post("/apply-template", asked)["prompt"], whole=True)

    def answer(self, ids: Sequence[int], *, tokens: int) -> list[tuple[int, float]]:
        """Return the tokens of the greedy answer with their log-probabilities."""
        settings = {"temperature": 0.0, "samplers": ["top_k"], "top_k": 1, "n_predict": tokens, "return_tokens": True}
        found = self.post("/completion", {"prompt": list(ids), "cache_prompt": True, **settings})["tokens"]
        return [self.score([*ids, *found[:at]], top=1)[0] for at in range(len(found))]

    def score(self, ids: Sequence[int], *, top: int) -> list[tuple[int, float]]:
        """Return the likeliest `top` tokens behind these with their log-probabilities.

        The server gives none with a token that ends inside a character. So another one is chosen, which has no effect
        on them: they are of the model's own scores.
        """
        settings = {"n_predict": 1, "n_probs": top, "logit_bias": [[self._plain, 1e6]], "temperature": 0.0}
        reply = self.post("/completion", {"prompt": list(ids), "cache_prompt": True, **settings})
        step = reply["completion_probabilities"][0]
        # An impossible token has the lowest number that there is.
        return [(one["id"], one["logprob"]) for one in step["top_logprobs"] if one["logprob"] > -1e30]


def run_child(asked: Path, replied: Path) -> None:
    """Answer the job in `asked`: what the child does."""
    import xllamacpp

    job = json.loads(asked.read_text(encoding="utf-8"))
    sequences, more = job.get("sequences", []), job.get("answer_tokens", 0)
    longest = max(
        [len(json.dumps(prompt)) for prompt in job.get("prompts", [])] + [len(ids) for ids, _ in sequences] + [512]
    )
    server = _Server(job["file"], context=longest + more + 64)
    texts = [server.tokenize(text) for text in job.get("texts", [])]
    prompts = [server.read_prompt(prompt) for prompt in job.get("prompts", [])]
    answers = [server.answer(ids, tokens=more) if more else [] for ids in prompts]
    scores = [
        [server.score(ids[:end], top=job["top"]) for end in range(begin, len(ids) + 1)] for ids, begin in sequences
    ]
    version = f"xllamacpp {xllamacpp.__version__}"
    reply: dict[str, Any] = {"version": version, "template": server.template(), "texts": texts, "prompts": prompts}
    reply |= {"answers": answers, "scores": scores}
    replied.write_text(json.dumps(reply), encoding="utf-8")


if __name__ == "__main__":
    run_child(Path(sys.argv[1]), Path(sys.argv[2]))
