"""The chat endpoint of `make serve`: requests checked, answered by transformers."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import threading
import time
from collections.abc import MutableMapping
from typing import Annotated, Any, Literal, Self

from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sftplay.export.gate import App, AsgiMessage, Gate, Receive, RefusedRequest, Send, replay, send_json, send_models

LEAST_TEMPERATURE = 0.001
"""Scores are divided by it in half precision; a smaller one gives infinities."""


class Strict(BaseModel):
    """A model that refuses unknown keys and values of another type."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ContentPart(Strict):
    """A part of a message. Pictures and sound are refused: they would be fetched from any address a client names."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_json(cls, text: str) -> str:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ValueError("must be a JSON object as text")
        return text


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message. Empty fields that a server adds to its answers are allowed when the client sends them back."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
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
    strict: Literal[False] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class TemplateSettings(Strict):
    enable_thinking: bool | None = None


class StreamOptions(Strict):
    include_usage: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[int, Field(ge=1, le=1)]
Tokens = Annotated[int, Field(ge=1)]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]


class ChatRequest(Strict):
    """The body of a request. Where only one value is allowed, it is the one that the server follows anyway."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """The usage comes with the last part of every stream."""

    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: TemplateSettings | None = None
    n: One | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    response_format: TextFormat | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, value: float | None) -> float | None:
        if value and value < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, or from {LEAST_TEMPERATURE} to 2")
        return value

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens differ")
        return self

    @property
    def stops(self) -> list[str]:
        """The texts at which an answer ends."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def answer_tokens(self) -> int | None:
        """Longest answer that was asked for."""
        return self.max_tokens or self.max_completion_tokens

    def template_values(self) -> dict[str, Any]:
        """Return the values for the chat template, in addition to the messages."""
        settings = self.chat_template_kwargs.model_dump(exclude_none=True) if self.chat_template_kwargs else {}
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or []]
        return settings | ({"tools": tools} if tools and self.tool_choice != "none" else {})

    def forwarded(self) -> dict[str, Any]:
        """Return the body for transformers' server, without keys that it ignores and without the answer's length."""
        values = self.template_values()
        body = self.model_dump(
            include={"model", "messages", "temperature", "top_p", "seed", "stream"}, exclude_none=True
        )
        body |= {"stop": self.stops} if self.stops else {}
        body |= {"tools": values.pop("tools")} if "tools" in values else {}
        return body | ({"chat_template_kwargs": values} if values else {})


FORM = re.compile(r"str|constrained-str|list\[.*\]")
"""What pydantic calls the forms of a value, among the names of keys that lead to a problem."""


def read_request(body: bytes) -> ChatRequest:
    """Return the request in a body. Raise RefusedRequest with 400 and the name of a wrong parameter."""
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        # Of the forms that a value may have, that is meant in which it is not wrong as a whole.
        found = error.errors(include_url=False, include_input=False)
        first = min(found, key=lambda problem: problem["type"] in ("string_type", "list_type"))
        param = ".".join(part for part in map(str, first["loc"]) if not FORM.fullmatch(part)) or None
        what = "not a parameter of this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise RefusedRequest(400, f"{param}: {what}" if param else what, param=param) from None


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
            await send_models(self.name, self.started, send)
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
        n_prompt = len(ids)
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


class StopTextSend:
    """A `send` that cuts an answer before its stop text, ends a stream with `[DONE]`, and names the model as asked."""

    def __init__(self, send: Send, request: ChatRequest) -> None:
        self.send, self.stops, self.is_stream = send, request.stops, bool(request.stream)
        self.named = {"model": request.model}  # transformers' server adds @main (5.17, `process_model_name`)
        self.status = 200
        self.body = b""
        self.held = ""
        self.is_cut = False

    async def __call__(self, message: AsgiMessage) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.is_stream or self.status != 200:
                await self.send(message)
            return
        if self.status != 200:
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
            answer = json.loads(self.body) | self.named
            for choice in answer["choices"] if self.stops else ():
                choice["message"]["content"] = self._cut(choice["message"].get("content") or "", is_last=True)
                choice["finish_reason"] = "stop" if self.is_cut else choice.get("finish_reason")
            await send_json(answer, self.send)

    def _event(self, event: bytes) -> bytes:
        """Return an event of a stream, with its text cut at a stop text; empty where no text is left."""
        try:
            part = json.loads(event.removeprefix(b"data: ")) | self.named
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
