"""The user's screen: progress in place on a terminal, now and then a line elsewhere, never long silence."""

from __future__ import annotations

import pytest

from sftplay.launch.supervise import follow
from sftplay.launch.supervise.console import SIGN_OF_LIFE_S, Console


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved: clock[0] += seconds."""
    now = [100.0]
    monkeypatch.setattr(follow.time, "monotonic", lambda: now[0])
    return now


def console(*, is_tty):
    written = []
    return Console(written.append, is_tty=is_tty), written


def test_progress_replaces_itself_on_a_terminal_and_a_line_clears_it():
    screen, written = console(is_tty=True)
    screen.status("step 1")
    screen.status("step 2")
    screen.line("done")
    screen.line("more")
    assert "".join(written) == "\r\x1b[Kstep 1\r\x1b[Kstep 2\r\x1b[Kdone\nmore\n"


def test_nothing_but_lines_is_written_where_there_is_no_terminal(clock):
    screen, written = console(is_tty=False)
    for n in range(5):
        screen.status(f"step {n}")
    screen.line("saved")
    assert written == ["saved\n"]
    assert not any(c in "".join(written) for c in "\x1b\r")


def test_silence_is_broken_by_the_newest_progress_then_by_a_sign_of_life(clock):
    screen, written = console(is_tty=False)
    screen.status("step 1")
    screen.status("step 2")
    clock[0] += SIGN_OF_LIFE_S - 0.1
    screen.tick(clock[0])
    assert written == []
    clock[0] += 0.2
    screen.tick(clock[0])
    screen.tick(clock[0])
    assert written == ["step 2\n"]
    clock[0] += SIGN_OF_LIFE_S
    screen.tick(clock[0])
    assert written == ["step 2\n", "[train] working\n"]


def test_silence_on_a_terminal_is_broken_in_place(clock):
    screen, written = console(is_tty=True)
    clock[0] += SIGN_OF_LIFE_S
    screen.tick(clock[0])
    screen.line("there")
    assert "".join(written) == f"\r\x1b[K[train] working ({SIGN_OF_LIFE_S:.0f} s)\r\x1b[Kthere\n"


def test_a_sign_of_life_comes_within_the_promised_ten_seconds():
    assert SIGN_OF_LIFE_S + 0.5 < 10  # the follower calls tick twice a second
