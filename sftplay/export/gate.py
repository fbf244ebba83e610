"""An ASGI middleware that passes to a model's server only what a chat client on this machine needs.

It knows nothing of models. vLLM finds it by its name; `chat_server` puts it before transformers' own server.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
"""The names of the ASGI specification, 3.0."""

TOKEN = "SFTPLAY_SERVE_TOKEN"
"""The environment variable with the token that clients must send; without it no token is needed."""

SERVED = "SFTPLAY_SERVED_NAME"
"""The environment variable with the only model that is listed. vLLM's own list begins with an adapter's base."""

HOSTS = ("127.0.0.1", "localhost")
"""Names under which a client on this machine asks. A page of another name that resolves to here is refused."""

ENDPOINTS = {"/health": "GET", "/v1/models": "GET", "/v1/chat/completions": "POST"}

BODY_BYTES = 8 * 2**20
"""Longest request: a million tokens are about half of it."""


class RefusedRequest(Exception):
    """A request that is answered with an HTTP status of 4xx and a message in the shape of OpenAI's errors."""

    def __init__(self, status: int, what: str, *, param: str | None = None) -> None:
        super().__init__(what)
        self.status, self.what, self.param = status, what, param

    async def answer(self, send: Send) -> None:
        error = {"message": self.what, "type": "invalid_request_error", "param": self.param, "code": None}
        await send_json({"error": error}, send, status=self.status)


class Gate:
    """Checks host, origin, token, endpoint and length of each request before `app` gets it."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.token = os.environ.get(TOKEN, "")
        self.name, self.started = os.environ.get(SERVED, ""), int(time.time())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        try:
            self._check(scope, headers)
            body = await _read_body(receive, headers)
        except RefusedRequest as refusal:
            await refusal.answer(send)
        else:
            if self.name and scope["path"] == "/v1/models":
                await send_models(self.name, self.started, send)
            else:
                await self.app(scope, replay(body, receive), send)

    def _check(self, scope: Mapping[str, Any], headers: Mapping[str, list[str]]) -> None:
        path, hosts = scope["path"], headers.get("host", [])
        if len(hosts) != 1 or not _is_local_host(hosts[0]):
            raise RefusedRequest(403, f"this server answers to {' and '.join(HOSTS)} only")
        for origin in headers.get("origin", []):
            if not _is_local_host(origin.partition("://")[2]):
                raise RefusedRequest(403, "this server does not answer pages of other origins")
        if path not in ENDPOINTS:
            raise RefusedRequest(404, f"there are {', '.join(ENDPOINTS)}")
        if scope["method"] != ENDPOINTS[path]:
            raise RefusedRequest(405, f"{path} takes {ENDPOINTS[path]}")
        if self.token and path != "/health":
            given = " ".join(headers.get("authorization", []))
            if not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                raise RefusedRequest(401, f"send the token in {TOKEN} as the API key")
        kinds = [kind.partition(";")[0].strip().lower() for kind in headers.get("content-type", [])]
        if scope["method"] == "POST" and kinds != ["application/json"]:
            raise RefusedRequest(415, "the body must be application/json")


def _is_local_host(text: str) -> bool:
    return re.sub(r":\d{1,5}$", "", text).lower() in HOSTS


def replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body first, and then the further messages."""
    messages: list[AsgiMessage] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> AsgiMessage:
        return messages.pop() if messages else await receive()

    return next_message


async def send_json(content: Any, send: Send, *, status: int = 200) -> None:
    """Answer with one JSON document."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def send_models(name: str, created: int, send: Send) -> None:
    """Answer with the list of one model."""
    model = {"id": name, "object": "model", "created": created, "owned_by": "sft-play"}
    await send_json({"object": "list", "data": [model]}, send)


async def _read_body(receive: Receive, headers: Mapping[str, list[str]]) -> bytes:
    too_long = RefusedRequest(413, f"the body is longer than {BODY_BYTES} bytes")
    if any(text.isdecimal() and int(text) > BODY_BYTES for text in headers.get("content-length", [])):
        raise too_long
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RefusedRequest(400, "the body ended early")
        body += message.get("body", b"")
        if len(body) > BODY_BYTES:
            raise too_long
        if not message.get("more_body", False):
            return bytes(body)
