"""One running box as its user sees it: orders go in, answers come out as data, and everything is bounded.

It knows neither what the box is made of, nor what a test is."""

from __future__ import annotations

import json
import marshal
import os
import secrets
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from sftplay.sandbox.boxes.job import Limits, Status

START_S = 60.0
"""For a box to stand. It takes milliseconds; a machine that is busy may stall for half a minute."""


class Lost(Exception):
    """The box gave no proper answer and must not be asked again."""

    def __init__(self, status: Status, text: str = "") -> None:
        super().__init__(text or status)
        self.status: Status = status


class Pipes(NamedTuple):
    """Descriptors of ours that lead to a process in a box."""

    answers: int
    """To read answers from; a socket where `orders` is None, which orders go to as well."""
    orders: int | None
    output: int
    """What the program prints."""


def is_ready(fd: int, event: int, *, within_s: float) -> bool:
    """Wait until a descriptor has an event of poll(2), or is closed at its other end.

    select(2) takes no descriptor above 1,023.
    """
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(within_s * 1000))


class Box:
    """A process in a box, and the pipes to it."""

    def __init__(
        self, pipes: Pipes, *, limits: Limits, kill: Callable[[], None], is_cut: Callable[[], bool] = lambda: False
    ) -> None:
        """`kill` ends all that runs in the box. `is_cut`: somebody else has ended the box around the program."""
        self.printed = b""
        self._pipes, self._limits, self._kill, self._is_cut = pipes, limits, kill, is_cut
        self._answers, self._output = pipes.answers, pipes.output
        self._orders = pipes.answers if pipes.orders is None else pipes.orders
        self._n_printed = 0
        self._incoming = b""
        os.set_blocking(self._orders, False)
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)
        self._poll.register(self._output, select.POLLIN)

    def start(self, first_message: bytes) -> None:
        """Send what the box waits for, and wait until it stands. Raise Lost with `infra` and what it said where it does
        not: no program has run.
        """
        try:
            self._send(first_message, time.monotonic() + START_S)
            answer = self._read_answer(time.monotonic() + START_S)
        except Lost as error:
            raise Lost("infra", f"the box did not start: {self.shown() or error}") from error
        if answer != {"status": "ready"}:
            raise Lost("infra", f"the box said {str(answer)[:200]}")

    def ask(self, order: str, *, within_s: float, **parts: Any) -> dict[str, Any]:
        """Give an order and return its answer. Raise Lost where there was none in time, none at all, too large a one,
        or something that is no answer to it.
        """
        until = time.monotonic() + within_s
        nonce = secrets.token_hex(16)
        self.send((order, nonce, parts), until)
        return self.read(nonce, until)

    def send(self, message: tuple[Any, ...], until: float) -> None:
        """Send an order without waiting for the answer."""
        content = marshal.dumps(message)
        self._send(len(content).to_bytes(4, "little") + content, until)

    def _send(self, content: bytes, until: float) -> None:
        rest = memoryview(content)
        while rest:
            try:
                rest = rest[os.write(self._orders, rest) :]
            except BlockingIOError:
                wait_ms = (until - time.monotonic()) * 1000
                if wait_ms <= 0 or not is_ready(self._orders, select.POLLOUT, within_s=wait_ms / 1000):
                    raise Lost("timeout") from None
            except OSError as error:
                raise self._ended("the process had ended", until) from error

    def read(self, nonce: str, until: float) -> dict[str, Any]:
        """Read the answer to the order with this nonce, or a question that the box asks first: it has no status."""
        answer = self._read_answer(until)
        if not isinstance(answer, dict) or (answer.pop("nonce", "") != nonce and "status" in answer):
            raise Lost("tampered", "the answer is to no order of ours")
        return answer

    def _read_answer(self, until: float) -> Any:
        size = None
        while size is None or len(self._incoming) < size + 4:
            if size is None and len(self._incoming) >= 4:
                size = int.from_bytes(self._incoming[:4], "little")
                if size > self._limits.answer_bytes:
                    if self._incoming[4:5] in (b"", b"{") and size < 1 << 30:
                        raise Lost("output", f"an answer of {size:,} bytes")
                    raise Lost("tampered", "the answer has no proper length")
                continue
            self._receive(until)
        text, self._incoming = self._incoming[4 : size + 4], self._incoming[size + 4 :]
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Lost("tampered", "the answer is no JSON") from error

    def _receive(self, until: float) -> None:
        """Wait for bytes of either kind. What is printed counts first: a flood of it is no timeout."""
        wait_ms = (until - time.monotonic()) * 1000
        ready = dict(self._poll.poll(wait_ms)) if wait_ms > 0 else {}
        if not ready:
            raise Lost("timeout")
        if self._output in ready:
            self._take_output()
        if self._answers in ready:
            try:
                part = os.read(self._answers, 1 << 16)
            except OSError:
                part = b""
            if not part:
                # What is in the pipe at this moment; others may hold its end open.
                while is_ready(self._output, select.POLLIN, within_s=0) and self._take_output():
                    pass
                raise self._ended("the process ended without an answer", until)
            self._incoming += part

    def _ended(self, text: str, until: float) -> Lost:
        # Behind its time it may have met the processor's limit, before this process could look.
        if self._is_cut():
            return Lost("infra", "something else on the machine ended the box")
        return Lost("timeout") if time.monotonic() >= until else Lost("killed", text)

    def _take_output(self) -> bool:
        part = os.read(self._output, 1 << 16)
        if not part:
            with suppress(KeyError):  # its end was seen before
                self._poll.unregister(self._output)
            return False
        self._n_printed += len(part)
        self.printed = (self.printed + part)[-2_000:]
        if self._n_printed > self._limits.output_bytes:
            raise Lost("output", f"more than {self._limits.output_bytes:,} bytes printed")
        return True

    def shown(self) -> str:
        """Return the end of what the program printed."""
        return self.printed.decode("utf-8", "replace").strip()

    def close(self) -> None:
        """End all processes of the box, at once."""
        self._kill()
        for fd in self._pipes:
            if fd is not None:
                os.close(fd)
