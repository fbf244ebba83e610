"""The chat endpoint of `make serve`: requests checked, answered by transformers."""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import MutableMapping
from typing import Annotated, Any, Literal, Self

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError, model_validator

from sftplay.export.gate import App, AsgiMessage, Gate, Receive, RefusedRequest, Send, replay, send_json

LEAST_TEMPERATURE = 0.001
"""Scores are divided by it in half precision; a smaller one gives infinities."""

ANSWER_TOKENS = 1024
"""Longest answer if the client names none, the default of transformers' server (5.17)."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""Errors of a chat template for a dialogue that it does not support."""

FOLLOWED_ANYWAY: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "logit_bias": ({},), "frequency_penalty": (0,),
    "presence_penalty": (0,), "response_format": ({"type": "text"},), "store": (False,), "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"), "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
}  # fmt: skip
"""Parameter -> values that ask for what the server does anyway; others are refused. The usage ends every stream."""


class Strict(BaseModel):
    """A model that refuses unknown keys and values of another type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class TextPart(Strict):
    """A part of a message. Pictures and sound are refused: they would be fetched from any address a client names."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: Json[dict[str, Any]]


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message. Empty fields that a server adds to its answers are allowed when the client sends them back."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        unknown = [key for key, value in (self.model_extra or {}).items() if value and key != "reasoning_content"]
        if unknown:
            raise ValueError(f"{unknown[0]} is not supported")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only an assistant calls tools")
        return self


class ToolFunction(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # the server holds no answer to a schema


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class ChatRequest(Strict):
    """The body of a request, without the parameters of FOLLOWED_ANYWAY."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE, le=2)] | Annotated[float, Field(ge=0, le=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    chat_template_kwargs: dict[Literal["enable_thinking"], bool] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


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
                asked = await asyncio.to_thread(self.read, (await receive())["body"])
            except RefusedRequest as refusal:
                await refusal.answer(send)
            else:
                cut = StopTextSend(send, asked.get("stop", []), is_stream=bool(asked.get("stream")))
                await self.app(scope, replay(json.dumps(asked).encode(), receive), cut)
        else:
            await self.app(scope, receive, send)

    def read(self, body: bytes) -> dict[str, Any]:
        """Return the request for transformers' server, without keys that it ignores. Raise RefusedRequest with 400
        where a parameter is wrong, which is named, or prompt and answer do not fit the model's context.
        """
        try:
            raw = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedRequest(400, f"the body is no JSON: {error}") from None
        if not isinstance(raw, dict):
            raise RefusedRequest(400, "the body is no JSON object")
        given = {key: value for key, value in raw.items() if value is not None}
        for key in FOLLOWED_ANYWAY.keys() & given:
            if given.pop(key) not in FOLLOWED_ANYWAY[key]:
                values = " or ".join(map(repr, FOLLOWED_ANYWAY[key]))
                raise RefusedRequest(400, f"{key}: this server follows {values} only", param=key)
        try:
            request = ChatRequest.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            param = ".".join(map(str, first["loc"])) or None
            what = "not a parameter of this server" if first["type"] == "extra_forbidden" else first["msg"]
            raise RefusedRequest(400, f"{param}: {what}" if param else what, param=param) from None
        if request.model != self.name:
            raise RefusedRequest(400, f"model: this server has {self.name!r} only", param="model")
        answer = request.max_tokens or request.max_completion_tokens
        if answer != (request.max_completion_tokens or answer):
            raise RefusedRequest(400, "max_tokens and max_completion_tokens differ")
        keys = ["model", "temperature", "top_p", "seed", "stream", "chat_template_kwargs"]
        keys += ["tools"] if request.tools and request.tool_choice != "none" else []
        asked = {key: given[key] for key in keys if given.get(key) not in (None, {})}
        asked["messages"] = [{k: v for k, v in turn.items() if v is not None} for turn in given["messages"]]
        if request.stop:
            asked["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
        tools = {"tools": asked["tools"]} if "tools" in asked else {}
        shown = tools | dict(asked.get("chat_template_kwargs", {}))
        return asked | {"max_tokens": self._find_room(request, answer, values=shown)}

    def _find_room(self, request: ChatRequest, answer: int | None, *, values: dict[str, Any]) -> int:
        """Return the longest answer in tokens, which is `answer` if it was asked for; `values` are the template's."""
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        for message in messages:  # as transformers' server passes it to the template
            content = message.setdefault("content", "")
            if isinstance(content, list):
                message["content"] = " ".join(part["text"] for part in content)
        try:
            with self._lock:
                ids = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True, **values
                )["input_ids"]
        except TEMPLATE_ERRORS as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            what = f"messages: the chat template refuses them ({first})"
            raise RefusedRequest(400, what, param="messages") from error
        if self.context_tokens is None:
            return answer or ANSWER_TOKENS
        room = self.context_tokens - len(ids)
        if room < (answer or 1):
            wish = f" and an answer of {answer}" if answer else ""
            what = f"a prompt of {len(ids)} tokens{wish} is more than the {self.context_tokens} that the model reads"
            raise RefusedRequest(400, what, param="messages" if room < 1 else "max_tokens")
        return answer or min(ANSWER_TOKENS, room)


class StopTextSend:
    """A `send` that cuts an answer before its stop text, and ends a stream with `[DONE]`."""

    def __init__(self, send: Send, stops: list[str], *, is_stream: bool) -> None:
        self.send, self.stops, self.is_stream = send, stops, is_stream
        self.changes = False
        self.body, self.held, self.is_cut = b"", "", False

    async def __call__(self, message: AsgiMessage) -> None:
        is_start = message["type"] == "http.response.start"
        if is_start:
            self.changes = message["status"] == 200 and (self.is_stream or bool(self.stops))
        if not self.changes or (is_start and self.is_stream):
            await self.send(message)
            return
        self.body += message.get("body", b"")
        is_last = not is_start and not message.get("more_body", False)
        if self.is_stream:
            events = filter(None, self.body.split(b"\n\n"))  # transformers' server sends them whole
            body, self.body = b"".join(map(self._event, events)), b""
            await self.send({**message, "body": body + (b"data: [DONE]\n\n" if is_last else b"")})
        elif is_last:
            answer = json.loads(self.body)
            for choice in answer["choices"]:
                choice["message"]["content"] = self._cut(choice["message"].get("content") or "", is_last=True)
                choice["finish_reason"] = "stop" if self.is_cut else choice.get("finish_reason")
            await send_json(answer, self.send)

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
        end = len(text) - (0 if is_last else max(lengths, default=0))
        self.held = text[end:]
        return text[:end]


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
