"""A program that speaks the protocol of vLLM's server as TRL's client uses it (trl 1.16, generation/vllm_client.py).

It draws random tokens. Weights come over a plain socket, where a real server has NCCL. What it did goes to its
output.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import socket
from argparse import ArgumentParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "stand-in"}]},
    "/server_info": {
        "vllm_config": {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
    },
    "/get_world_size": {"world_size": 1},
}


class StandIn(ThreadingHTTPServer):
    daemon_threads = True
    weights: socket.socket
    rng = random.Random(7)
    vocabulary = 64
    is_ready = True

    def init_weight_transfer_engine(self, body: dict[str, Any]) -> dict[str, Any]:
        info = body["init_info"]
        assert (info["rank_offset"], info["world_size"]) == (1, 2)
        self.weights = socket.create_connection((info["master_address"], info["master_port"]), timeout=60)
        return {}

    def start_weight_update(self, _: dict[str, Any]) -> dict[str, Any]:
        return {}

    finish_weight_update = reset_prefix_cache = start_weight_update

    def update_weights(self, body: dict[str, Any]) -> dict[str, Any]:
        info, digest = body["update_info"], hashlib.sha256()
        for dtype, shape in zip(info["dtype_names"], info["shapes"], strict=True):
            left = WIDTHS[dtype] * math.prod(shape)
            while left:
                part = self.weights.recv(min(left, 2**20))
                assert part, "the trainer has gone"
                digest.update(part)
                left -= len(part)
        print("weights", len(info["names"]), digest.hexdigest(), flush=True)
        return {}

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        logprob, choices = -math.log(self.vocabulary), []
        for prompt in body["prompt"]:
            for _ in range(body["n"]):
                ids = [self.rng.randrange(3, self.vocabulary) for _ in range(body["max_tokens"])]
                tokens = [f"token_id:{number}" for number in ids]
                top = [{token: logprob} for token in tokens]
                logprobs = {"tokens": tokens, "token_logprobs": [logprob] * len(ids), "top_logprobs": top}
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        print("completions", len(choices), flush=True)
        return {"choices": choices}


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/health":
            self.answer({}, status=200 if self.server.is_ready else 503)
        else:
            self.answer(ANSWERS[path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        self.answer(getattr(self.server, self.path.rpartition("/")[2])(body))

    def answer(self, content: object, *, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        return


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, default=64)
    parser.add_argument("--never-ready", action="store_true")
    args = parser.parse_args()
    server = StandIn((args.host, args.port), Handler)
    server.vocabulary, server.is_ready = args.vocabulary, not args.never_ready
    print("listens", flush=True)
    server.serve_forever()
