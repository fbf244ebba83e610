"""Parse and check chat requests of OpenAI's API; what the server would not do is refused.

Reference: https://platform.openai.com/docs/api-reference/chat/create.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sftplay.export.gate import RefusedRequest

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


def read_request(body: bytes) -> ChatRequest:
    """Return the request in a body.

    Raises:
        RefusedRequest: with 400 and the name of the first wrong parameter.
    """
    try:
        return ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        what = "not a parameter of this server" if first["type"] == "extra_forbidden" else first["msg"]
        raise RefusedRequest(400, f"{param}: {what}" if param else what, param=param) from None
