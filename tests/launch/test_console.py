"""The user's screen: progress in place on a terminal, now and then a line elsewhere, never long silence."""

from __future__ import annotations

import os
import sys

import pytest

from sftplay import log as terminal
from sftplay.log import SIGN_OF_LIFE_S, Console, Progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved: clock[0] += seconds."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def console(*, is_tty):
    written = []
    return Console(written.append, is_tty=is_tty), written


def test_progress_replaces_itself_on_a_terminal_and_a_line_clears_it(clock):
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
    assert written == ["step 2\n", f"step 2 ({2 * SIGN_OF_LIFE_S:.0f} s)\n"]


def test_a_live_line_has_bar_figures_and_clock_and_stays_below_what_is_printed(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    screen, written = console(is_tty=True)
    for done in (10, 11, 12):
        screen.progress(Progress(tag="train", what="step", done=done, total=100, text="loss 1.2346  rate 2.00e-04"))
        clock[0] += 3
    screen.tick(clock[0])
    drawn = written[-1].removeprefix("\r\x1b[K")
    assert drawn.startswith("[train] step 12/100 ")
    assert "█" in drawn
    # Two steps in six seconds, nine seconds since the first: 88 steps take 6 min 36 s at 4.5 s a step
    assert drawn.endswith("loss 1.2346  rate 2.00e-04  00:09<06:36")
    assert len(drawn) < 110
    screen.line("saved")
    assert written[-2] == "\r\x1b[Ksaved\n"
    assert written[-1].startswith("\r\x1b[K[train] step 12/100 ")


def test_on_eighty_columns_the_live_line_has_loss_rate_and_the_time_left_instead_of_a_bar(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    screen, written = console(is_tty=True)
    for done in (1200, 1201, 1202):
        text = "loss 1.2346  rate 2.00e-04  12.3K tokens/s"
        screen.progress(Progress(tag="train", what="step", done=done, total=4000, text=text))
        clock[0] += 3600
    screen.tick(clock[0])
    drawn = written[-1].removeprefix("\r\x1b[K")
    # Two steps in two hours, three since the first: 2,798 steps take 4,197 h at 1.5 h a step.
    assert drawn.startswith("[train] step 1202/4000  3:00:00<4197:00:00  loss 1.2346  rate 2.00e-04  12.3K")
    assert len(drawn) <= 79


def test_progress_in_a_pipe_says_what_is_left_when_nothing_else_was_said(clock):
    screen, written = console(is_tty=False)
    for done in (0, 50):
        screen.progress(Progress(tag="data", what="rows", done=done, total=200, text="5 rows/s"))
        clock[0] += SIGN_OF_LIFE_S + 1
    assert written == []
    screen.tick(clock[0])
    assert written == ["[data] rows 50/200  5 rows/s  00:30 left\n"]


@pytest.mark.parametrize("text", ["[train] note: few steps", "[train] warning: too few", "note: x"])
def test_what_should_not_be_overlooked_is_in_colour_where_there_are_colours(text):
    for has_colours, shown in ((True, f"\x1b[33m{text}\x1b[0m\n"), (False, f"{text}\n")):
        written = []
        Console(written.append, is_tty=True, has_colours=has_colours).line(text)
        assert written == [shown]


def test_a_reader_that_leaves_does_not_end_what_is_being_done(monkeypatch):
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        for n in range(3):
            terminal.say(f"line {n}")
            terminal.progress(n, 3, what="rows", tag="data")
