"""Environments that speak OpenEnv's protocol (openenv 0.10), over a session of its client for each completion.

    environment: openenv
    environment_options: {url: "http://127.0.0.1:8000", field: message, shows: echoed_message}

The row's column `reset`, an object, is what the server's reset is called with, such as `{"seed": 3}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from sftplay.errors import ConfigError

HIDDEN = ("done", "reward", "metadata")
"""What an observation says besides what the model should read."""


def make(*, url: str, field: str | None = None, shows: str | None = None, message_timeout: float = 60.0) -> OpenEnv:
    """Make an environment of the server at `url`.

    `field` is the field of an action that gets the model's text; None: the model writes actions as JSON. `shows` is the
    field of an observation that the model reads; None: all of it as JSON.

    Raises:
        ConfigError: openenv is not installed.
    """
    if find_spec("openenv") is None:
        raise ConfigError("openenv is not installed", where="grpo.environment", fix="make install EXTRAS=openenv")
    return OpenEnv(url, field=field, shows=shows, message_timeout_s=message_timeout)


class OpenEnv:
    """One session with the server. Rewards of steps are the server's."""

    def __init__(self, url: str, *, field: str | None, shows: str | None, message_timeout_s: float) -> None:
        self._url, self._field, self._shows, self._timeout_s = url, field, shows, message_timeout_s
        self._client: Any = None

    def reset(self, row: Mapping[str, Any]) -> str:
        """Open a session and return the first observation; the connection fails with what the client raises."""
        from openenv import GenericEnvClient

        # The client's loop runs in a thread: it begins here, behind the fork of the completion.
        self._client = GenericEnvClient(base_url=self._url, message_timeout_s=self._timeout_s).sync()
        self._client.connect()
        return self._read(self._client.reset(**(row.get("reset") or {})).observation)

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """Send an action. A text that is none is said so, and the server does not see it."""
        action: Any = {self._field: text}
        if self._field is None:
            try:
                action = json.loads(text)
            except ValueError:
                action = None
            if not isinstance(action, dict):
                return "error: write the action as one JSON object", None, False
        result = self._client.step(action)
        return self._read(result.observation), result.reward, bool(result.done)

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._client.close()

    def _read(self, observation: Mapping[str, Any]) -> str:
        if self._shows is not None:
            return str(observation.get(self._shows, ""))
        return json.dumps({key: value for key, value in observation.items() if key not in HIDDEN}, ensure_ascii=False)
