"""The program that `serve` starts: transformers' own server behind the gate, with checked requests and tidied answers.

Run as `python -m sftplay.export.chat_server NAME --host HOST --port PORT`. The model is in the hub's cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import MutableMapping
from typing import Any

from jinja2 import TemplateError

from sftplay.export.chat_request import ChatRequest, read_request
from sftplay.export.gate import App, AsgiMessage, Gate, Receive, RefusedRequest, Send, replay, send_json

ANSWER_TOKENS = 1024
"""Longest answer if the client names none, the default of transformers' server (5.17)."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a chat template for a dialogue that it does not support."""


class ChatApp:
    """Reads requests for one model before transformers' server does, and ends answers as OpenAI's service ends them."""

    def __init__(self, app: App, name: str, *, tokenizer: Any, context_tokens: int | None) -> None:
        self.app, self.name, self.tokenizer, self.context_tokens = app, name, tokenizer, context_tokens
        self.started = int(time.time())
        self._lock = threading.Lock()  # a tokenizer is not thread-safe

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path == "/v1/models":
            model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "sft-play"}
            await send_json({"object": "list", "data": [model]}, send)
        elif path == "/v1/chat/completions":
            try:
                request, body = await asyncio.to_thread(self.read, (await receive())["body"])
            except RefusedRequest as refusal:
                await refusal.answer(send)
            else:
                await self.app(scope, replay(body, receive), StopTextSend(send, request))
        else:
            await self.app(scope, receive, send)

    def read(self, body: bytes) -> tuple[ChatRequest, bytes]:
        """Return the request, and the body for transformers' server. Raise RefusedRequest where a parameter is wrong,
        or prompt and answer do not fit the model's context.
        """
        request = read_request(body)
        if request.model != self.name:
            raise RefusedRequest(400, f"model: this server has {self.name!r} only", param="model")
        n_prompt = self._count(request)
        answer = request.answer_tokens
        if self.context_tokens is not None:
            room = self.context_tokens - n_prompt
            if room < (answer or 1):
                wish = f" and an answer of {answer}" if answer else ""
                what = (
                    f"a prompt of {n_prompt} tokens{wish} is more than the {self.context_tokens} that the model reads"
                )
                raise RefusedRequest(400, what, param="messages" if room < 1 else "max_tokens")
            answer = answer or min(ANSWER_TOKENS, room)
        forwarded = request.forwarded() | {"max_tokens": answer or ANSWER_TOKENS}
        return request, json.dumps(forwarded).encode()

    def _count(self, request: ChatRequest) -> int:
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        for message in messages:  # as transformers' server passes it to the template
            content = message.setdefault("content", "")
            if isinstance(content, list):
                message["content"] = " ".join(part["text"] for part in content)
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        try:
            with self._lock:
                ids = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True, **request.template_values()
                )["input_ids"]
        except TEMPLATE_ERRORS as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            what = f"messages: the chat template refuses them ({first})"
            raise RefusedRequest(400, what, param="messages") from error
        return len(ids)


class StopTextSend:
    """A `send` that cuts an answer before its stop text, and ends a stream with `[DONE]`."""

    def __init__(self, send: Send, request: ChatRequest) -> None:
        self.send, self.stops, self.is_stream = send, request.stops, bool(request.stream)
        self.status = 200
        self.body = b""
        self.held = ""
        self.is_cut = False

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.is_stream or not self._changes:
                await self.send(message)
            return
        if not self._changes:
            await self.send(message)
            return
        is_last = not message.get("more_body", False)
        if self.is_stream:
            events = filter(None, message.get("body", b"").split(b"\n\n"))  # transformers' server sends them whole
            body = b"".join(map(self._event, events))
            await self.send({**message, "body": body + (b"data: [DONE]\n\n" if is_last else b"")})
            return
        self.body += message.get("body", b"")
        if is_last:
            answer = json.loads(self.body)
            for choice in answer["choices"]:
                choice["message"]["content"] = self._cut(choice["message"].get("content") or "", is_last=True)
                choice["finish_reason"] = "stop" if self.is_cut else choice.get("finish_reason")
            await send_json(answer, self.send)

    @property
    def _changes(self) -> bool:
        return self.status == 200 and (self.is_stream or bool(self.stops))

    def _event(self, event: bytes) -> bytes:
        """Return an event of a stream, with its text cut at a stop text; empty where no text is left."""
        try:
            part = json.loads(event.removeprefix(b"data: "))
            choice = part["choices"][0]
        except (ValueError, LookupError, TypeError):
            return event + b"\n\n"
        is_last = choice.get("finish_reason") is not None
        text = self._cut(choice["delta"].pop("content", None) or "", is_last=is_last)
        if text:
            choice["delta"]["content"] = text
        if is_last and self.is_cut:
            choice["finish_reason"] = "stop"
        return b"data: %s\n\n" % json.dumps(part).encode() if is_last or choice["delta"] else b""

    def _cut(self, text: str, *, is_last: bool) -> str:
        """Return the text that can be sent so far; an end that may begin a stop text is held back."""
        text = "" if self.is_cut else self.held + text
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.is_cut, self.held = True, ""
            return text[: min(found)]
        lengths = [length for stop in self.stops for length in range(1, len(stop)) if text.endswith(stop[:length])]
        keep = 0 if is_last else max(lengths, default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def main() -> None:
    """Serve the model until a signal comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    args = parser.parse_args()

    from transformers import AutoConfig, AutoTokenizer
    from transformers.cli.serve import Serve

    class Prepared(Serve):
        """transformers' server with its model, before it listens."""

        def start_server(self) -> None:
            """Leave it to `main`."""

    trust = {"trust_remote_code": args.trust_remote_code}
    prepared = Prepared(args.name, host=args.host, port=args.port, non_blocking=True, **trust)
    limit = getattr(AutoConfig.from_pretrained(args.name, **trust).get_text_config(), "max_position_embeddings", None)
    context_tokens = limit if isinstance(limit, int) and limit > 0 else None
    tokenizer = AutoTokenizer.from_pretrained(args.name, **trust)
    config = prepared.server.config
    config.app = Gate(ChatApp(config.app, args.name, tokenizer=tokenizer, context_tokens=context_tokens))
    prepared.server.run()


if __name__ == "__main__":
    main()
