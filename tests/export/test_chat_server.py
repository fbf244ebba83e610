"""The door of the server: who may ask, what may be asked, how an answer ends. The model behind it is a stand-in."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sftplay.errors import ConfigError
from sftplay.export import gate
from sftplay.export.chat_server import ChatApp
from sftplay.export.gate import BODY_BYTES, TOKEN, Gate
from sftplay.export.server import check_token

NAME = "tiny-run"
CHAT = "/v1/chat/completions"
LOCAL = {"host": "127.0.0.1:8000", "content-type": "application/json"}
QUESTION = [{"role": "user", "content": "why old boats"}]
CONTEXT = 100


class Behind:
    """Replaces transformers' server: keeps its requests, and gives the answers that a test sets."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.answer: list[bytes] = [b"{}"]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.asked.append((scope["path"], json.loads(body) if body else None))
        kind = b"text/event-stream" if len(self.answer) > 1 else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for part in self.answer:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


Ask = Callable[..., tuple[int, Any]]


@pytest.fixture
def behind() -> Behind:
    return Behind()


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def ask(behind: Behind, tokenizer: Any) -> Ask:
    """Sends one request through the gate; the status, and the body (JSON, or text where it is none)."""

    def send_request(
        body: Any = None, *, path: str = CHAT, method: str = "POST", headers: Any = LOCAL, chunks: int = 1
    ) -> tuple[int, Any]:
        door = Gate(ChatApp(behind, NAME, tokenizer=tokenizer, context_tokens=CONTEXT))
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        pairs = list(headers.items()) if isinstance(headers, dict) else headers
        scope = {"type": "http", "path": path, "method": method,
                 "headers": [(key.encode(), value.encode()) for key, value in pairs]}  # fmt: skip
        size = max(1, -(-len(raw) // chunks))
        parts = [raw[at : at + size] for at in range(0, len(raw), size)] or [b""]
        incoming = [
            {"type": "http.request", "body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return incoming.pop(0) if incoming else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(door(scope, receive, send))
        starts = [message for message in sent if message["type"] == "http.response.start"]
        assert len(starts) == 1
        text = b"".join(message.get("body", b"") for message in sent).decode()
        try:
            return starts[0]["status"], json.loads(text)
        except ValueError:
            return starts[0]["status"], text

    return send_request


def asking(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": QUESTION, "max_tokens": 8, **changes}


HOSTS = {
    "127.0.0.1": 200,
    "127.0.0.1:8000": 200,
    "LocalHost:1": 200,
    "attacker.example": 403,
    "attacker.example:8000": 403,
    "127.0.0.1.attacker.example": 403,
    "localhost.attacker.example:8000": 403,
    "attacker.example:8000@127.0.0.1": 403,
    "127.0.0.1:8000:8000": 403,
    "0.0.0.0:8000": 403,
    "192.168.0.2": 403,
    "": 403,
}


@pytest.mark.parametrize("host", HOSTS)
def test_only_this_machines_own_names_are_answered(host: str, ask: Ask, behind: Behind):
    assert ask(path="/health", method="GET", headers={"host": host})[0] == HOSTS[host]
    assert len(behind.asked) == (HOSTS[host] == 200)


def test_no_host_and_two_hosts_are_refused(ask: Ask):
    assert ask(path="/health", method="GET", headers={})[0] == 403
    assert ask(path="/health", method="GET", headers=[("host", "localhost"), ("host", "evil")])[0] == 403


@pytest.mark.parametrize(
    "origin", ["https://attacker.example", "null", "file://", "http://127.0.0.1.evil:8000", "evil"]
)
def test_a_page_of_another_origin_is_refused(origin: str, ask: Ask, behind: Behind):
    assert ask(asking(), headers={**LOCAL, "origin": origin})[0] == 403
    assert behind.asked == []
    assert ask(asking(), headers={**LOCAL, "origin": "http://localhost:3000"})[0] == 200


OTHER_PATHS = [
    "/load_model", "/reset", "/v1/completions", "/v1/responses", "/v1/audio/transcriptions", "/v1/systemone", "/docs",
    "/openapi.json", "/redoc", "/", "/v1/models/", "/v1/chat/completions/", "//load_model", "/v1/load_lora_adapter",
    "/metrics", "/tokenize", "/v1/chat/../../load_model",
]  # fmt: skip


@pytest.mark.parametrize("path", OTHER_PATHS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_but_chat_models_and_health_is_there(path: str, method: str, ask: Ask, behind: Behind):
    assert ask({"model": "/etc"}, path=path, method=method)[0] == 404
    assert behind.asked == []


def test_a_web_socket_is_closed_and_the_servers_own_start_is_let_through(behind: Behind):
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"body": b""}

    asyncio.run(Gate(behind)({"type": "websocket", "path": CHAT, "headers": []}, receive, send))
    assert (sent, behind.asked) == ([{"type": "websocket.close", "code": 1008}], [])
    asyncio.run(Gate(behind)({"type": "lifespan", "path": ""}, receive, send))
    assert behind.asked == [("", None)]


def test_each_endpoint_has_one_method_and_a_body_is_json(ask: Ask, behind: Behind):
    assert ask(path=CHAT, method="GET")[0] == 405
    assert ask(path="/v1/models", method="POST")[0] == 405
    assert ask(path="/health", method="OPTIONS")[0] == 405
    # A page may send text/plain to any address without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""):
        assert ask(asking(), headers={**LOCAL, "content-type": kind})[0] == 415
    assert ask(asking(), headers={"host": "localhost"})[0] == 415
    assert behind.asked == []
    assert ask(asking(), headers={**LOCAL, "content-type": "application/json; charset=utf-8"})[0] == 200


def test_a_token_is_asked_for_where_one_is_set(ask: Ask, behind: Behind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TOKEN, "s3cret")
    for given in (
        {},
        {"authorization": "Bearer none"},
        {"authorization": "s3cret"},
        {"authorization": "Bearer s3cret "},
    ):
        assert ask(asking(), headers={**LOCAL, **given})[0] == 401
        assert ask(path="/v1/models", method="GET", headers={**LOCAL, **given})[0] == 401
    assert behind.asked == []
    assert ask(asking(), headers={**LOCAL, "authorization": "Bearer s3cret"})[0] == 200
    assert ask(path="/health", method="GET")[0] == 200


@pytest.mark.parametrize("token", ["", "two words", "ends\n", "ünï"])
def test_a_token_that_no_client_could_send_is_refused_before_anything_is_loaded(
    token: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(TOKEN, token)
    with pytest.raises(ConfigError) as caught:
        check_token()
    assert caught.value.where == TOKEN
    assert not token or token not in str(caught.value)


def test_no_token_and_a_usual_one_are_accepted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN, raising=False)
    check_token()
    monkeypatch.setenv(TOKEN, "sk-aB3_~/+=")
    check_token()


def test_a_body_beyond_the_limit_is_refused_by_its_header_and_while_it_comes(
    ask: Ask, behind: Behind, monkeypatch: pytest.MonkeyPatch
):
    assert ask(asking(), headers={**LOCAL, "content-length": str(BODY_BYTES + 1)})[0] == 413
    monkeypatch.setattr(gate, "BODY_BYTES", 1000)
    long = asking(messages=[{"role": "user", "content": "x" * 2000}])
    assert ask(long, chunks=5)[0] == 413
    assert ask(long, headers={**LOCAL, "content-length": "7"})[0] == 413
    assert behind.asked == []
    assert ask(asking(), chunks=5)[0] == 200


def test_the_one_model_is_listed_with_a_date_in_whole_seconds(ask: Ask):
    status, listed = ask(path="/v1/models", method="GET")
    assert (status, [model["id"] for model in listed["data"]]) == (200, [NAME])
    assert type(listed["data"][0]["created"]) is int


TEXT = {"type": "text", "text": "hi"}
PICTURE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
OPEN_CALL = {"function": {"name": "f", "arguments": "{"}}
WRONG: dict[str, dict[str, Any]] = {
    "model": {"model": "gpt-4"},
    "model, a path": {"model": "/etc"},
    "model, a number": {"model": 5},
    "messages, none": {"messages": []},
    "messages, a text": {"messages": "hi"},
    "messages, null": {"messages": None},
    "messages.0": {"messages": ["hi"]},
    "messages.0.role": {"messages": [{"role": "god", "content": "x"}]},
    "messages.0.role, missing": {"messages": [{"content": "x"}]},
    "messages.0.content": {"messages": [{"role": "user", "content": 5}]},
    "messages.0, no content": {"messages": [{"role": "user"}]},
    "messages.0.content, a picture": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "messages.0, a tool for a user": {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
    "messages.0.tool_calls.0.function.arguments": {"messages": [{"role": "assistant", "tool_calls": [OPEN_CALL]}]},
    "messages.0, audio": {"messages": [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]},
    "max_tokens, below 1": {"max_tokens": -1},
    "max_tokens, 0": {"max_tokens": 0},
    "max_tokens, a text": {"max_tokens": "8"},
    "max_tokens, true": {"max_tokens": True},
    "max_tokens, a fraction": {"max_tokens": 1.5},
    "max_tokens, beyond the context": {"max_tokens": CONTEXT},
    "max_completion_tokens": {"max_completion_tokens": 0},
    "max_tokens and another": {"max_completion_tokens": 9},
    "temperature, below 0": {"temperature": -0.1},
    "temperature, above 2": {"temperature": 2.1},
    "temperature, too small": {"temperature": 1e-30},
    "temperature, NaN": {"temperature": float("nan")},
    "temperature, infinite": {"temperature": float("inf")},
    "temperature, a text": {"temperature": "hot"},
    "temperature, true": {"temperature": True},
    "top_p, 0": {"top_p": 0},
    "top_p, above 1": {"top_p": 1.01},
    "seed, a text": {"seed": "x"},
    "seed, too large": {"seed": 2**64},
    "stop, empty": {"stop": ""},
    "stop, a list with an empty one": {"stop": ["a", ""]},
    "stop, a number": {"stop": 5},
    "stop, many": {"stop": ["a"] * 17},
    "stream, a text": {"stream": "yes"},
    "n": {"n": 2},
    "n, 0": {"n": 0},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"top_logprobs": 3},
    "logit_bias": {"logit_bias": {"5": 1}},
    "response_format": {"response_format": {"type": "json_object"}},
    "response_format, a schema": {"response_format": {"type": "json_schema", "json_schema": {}}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": -1},
    "tools, a text": {"tools": "all"},
    "tools, another type": {"tools": [{"type": "web_search"}]},
    "tools, held to a schema": {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
    "tool_choice": {"tool_choice": "required"},
    "functions": {"functions": []},
    "generation_config": {"generation_config": "{}"},
    "chat_template": {"chat_template": "{{ 1 }}"},
    "chat_template_kwargs": {"chat_template_kwargs": {"tokenize": False}},
    "reasoning_effort": {"reasoning_effort": "high"},
    "unknown": {"foo": 1},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_parameter_is_the_clients_error_and_is_named(wrong: str, ask: Ask, behind: Behind):
    status, answer = ask(asking(**WRONG[wrong]))
    assert (status, behind.asked) == (400, [])
    error = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or error["message"]).split(".")[0] in next(iter(WRONG[wrong])) or "max_tokens" in error[
        "message"
    ]


def test_the_message_is_of_the_form_that_was_given(ask: Ask):
    assert ask(asking(**WRONG["stop, many"]))[1]["error"]["message"].startswith("stop: List should have at most 16")
    picture = ask(asking(**WRONG["messages.0.content, a picture"]))[1]["error"]
    assert picture["message"] == "messages.0.content.0.type: Input should be 'text'"


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"model": NaN}',
    b'{"model": "\\ud800"}',
]


@pytest.mark.parametrize("body", BROKEN, ids=lambda body: repr(body[:16]))
def test_a_body_that_is_no_request_is_the_clients_error(body: bytes, ask: Ask, behind: Behind):
    assert ask(body)[0] == 400
    assert behind.asked == []


@pytest.mark.parametrize("key", ["model", "messages"])
def test_what_is_missing_is_named(key: str, ask: Ask):
    body = asking()
    del body[key]
    status, answer = ask(body)
    assert (status, answer["error"]["param"]) == (400, key)


def test_a_prompt_beyond_the_context_is_refused_and_what_has_room_is_asked_for(ask: Ask, behind: Behind):
    status, answer = ask(asking(messages=[{"role": "user", "content": "old boats " * 100}]))
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert f"more than the {CONTEXT} that the model reads" in answer["error"]["message"]
    body = asking()
    del body["max_tokens"]
    assert ask(body)[0] == 200
    (asked,) = [sent for _, sent in behind.asked]
    assert 0 < asked["max_tokens"] < CONTEXT


def test_a_dialogue_that_the_template_refuses_is_the_clients_error(ask: Ask, behind: Behind, monkeypatch: Any):
    def refuse(*_: Any, **__: Any) -> None:
        from jinja2 import TemplateError

        raise TemplateError("roles must alternate\nin this template")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.apply_chat_template", refuse)
    status, answer = ask(asking())
    assert (status, behind.asked) == (400, [])
    assert "roles must alternate" in answer["error"]["message"]


def test_what_changes_nothing_is_accepted_and_only_what_counts_is_passed_on(ask: Ask, behind: Behind):
    harmless = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "response_format": {"type": "text"}, "frequency_penalty": 0,
        "presence_penalty": 0.0, "logit_bias": {}, "user": "ann", "metadata": {"a": "b"}, "store": False, "stop": None,
        "service_tier": "auto", "parallel_tool_calls": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    del (body := asking(temperature=0, top_p=1, seed=3))["max_tokens"]
    parts = [{"role": "user", "content": [TEXT, TEXT], "name": None, "refusal": None, "annotations": []}]
    assert ask({**body, **harmless, "max_completion_tokens": 5, "messages": parts})[0] == 200
    ((path, asked),) = behind.asked
    assert path == CHAT
    assert asked.pop("messages") == [{"role": "user", "content": [TEXT, TEXT], "annotations": []}]
    assert asked == {"model": NAME, "temperature": 0, "top_p": 1, "seed": 3, "max_tokens": 5}


def test_tools_reach_the_template_and_the_server(ask: Ask, behind: Behind):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    dialogue = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert ask(asking(tools=[tool], messages=dialogue, chat_template_kwargs={"enable_thinking": False}))[0] == 200
    assert ask(asking(tools=[tool], tool_choice="none"))[0] == 200
    first, second = [sent for _, sent in behind.asked]
    assert first["tools"] == [tool]
    assert first["messages"][1]["tool_calls"] == [CALL]
    assert first["chat_template_kwargs"] == {"enable_thinking": False}
    assert "tools" not in second


def event(text: str | None = None, finish: str | None = None, **delta: Any) -> bytes:
    delta = delta if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"choices": [choice], "model": f"{NAME}@main"}).encode()


def read_stream(text: str) -> tuple[str, list[str]]:
    """The text of a stream, and the other things that its events say."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert {event["model"] for event in events} == {NAME}  # as it was asked for, without a revision
    choices = [event["choices"][0] for event in events]
    return "".join(choice["delta"].get("content", "") for choice in choices), [
        *(choice["delta"]["role"] for choice in choices if "role" in choice["delta"]),
        *(choice["finish_reason"] for choice in choices if choice["finish_reason"]),
    ]


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        (["a", "b", "c"], None, "abc"),
        (["a", "b", "c"], "b", "a"),
        (["xENxE", "N", "D", " more"], ["END"], "xENx"),
        (["xEN"], ["END"], "xEN"),
        (["ab", "abc"], ["abc", "zz"], "ab"),
        (["one STOP", " two"], ["two", "STOP"], "one "),
        (["STOP"], "STOP", ""),
    ],
)
def test_a_stream_ends_with_done_and_before_the_text_at_which_it_was_to_stop(
    pieces: list[str], stop: Any, shown: str, ask: Ask, behind: Behind
):
    # Several events may come at once.
    behind.answer = [
        event(role="assistant"),
        b"".join(map(event, pieces[:2])),
        *map(event, pieces[2:]),
        event(finish="stop"),
    ]
    status, text = ask(asking(stream=True, stop=stop))
    assert (status, read_stream(text)) == (200, (shown, ["assistant", "stop"]))


def test_a_whole_answer_ends_before_the_text_at_which_it_was_to_stop(ask: Ask, behind: Behind):
    whole = {
        "choices": [{"message": {"role": "assistant", "content": "one\nEND two"}, "finish_reason": "length"}],
        "usage": {"total_tokens": 5},
        "model": f"{NAME}@main",
    }
    raw = json.dumps(whole).encode()
    behind.answer = [raw[:20] + raw[20:]]
    assert ask(asking())[1] == whole | {"model": NAME}
    (cut,) = ask(asking(stop=["END", "\n"]))[1]["choices"]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("one", "stop")
    assert behind.asked[-1][1]["stop"] == ["END", "\n"]


def test_every_parameter_of_the_request_is_tried_here():
    from sftplay.export.chat_server import ChatRequest

    source = Path(__file__).read_text()
    assert [name for name in ChatRequest.model_fields if not re.search(rf"\b{name}\b", source)] == []
