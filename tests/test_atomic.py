"""Files and folders are there whole or not at all, and one process at a time holds a lock."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from sftplay.atomic import is_locked, locked, whole_file, whole_folder, write_bytes, write_text


def write_half(place, path, **options):
    with place(path, **options) as scratch:
        half = scratch / "half" if place is whole_folder else scratch
        half.write_text("half")
        raise KeyboardInterrupt


def fail_inside(place, path, **options):
    with pytest.raises(KeyboardInterrupt):
        write_half(place, path, **options)


def test_a_file_has_its_old_content_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "new" / "figures.json"
    fail_inside(whole_file, path)
    assert list(path.parent.iterdir()) == []
    write_text(path, "grün\n")
    fail_inside(whole_file, path)
    assert path.read_text(encoding="utf-8") == "grün\n"
    write_bytes(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_appears_complete_and_nothing_of_a_failed_one_is_left(tmp_path):
    path = tmp_path / "runs" / "adapter"
    (tmp_path / "runs" / ".adapter.part" / "killed").mkdir(parents=True)
    fail_inside(whole_folder, path)
    assert list(path.parent.iterdir()) == []
    with whole_folder(path) as scratch:
        assert list(scratch.iterdir()) == []
        (scratch / "weights").write_text("1")
        assert not path.exists()
    assert [each.name for each in path.parent.iterdir()] == ["adapter"]


def test_a_folder_is_replaced_only_where_that_is_asked_for(tmp_path):
    path = tmp_path / "adapter"
    for number in "12":
        with whole_folder(path, replaces=True) as scratch:
            (scratch / number).write_text(number)
    fail_inside(whole_folder, path, replaces=True)
    with pytest.raises(OSError), whole_folder(path) as scratch:
        (scratch / "3").write_text("3")
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")] == ["adapter", "adapter/2"]


def hold(path: Path, told) -> None:
    with locked(path):
        told.send("held")
        signal.pause()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_is_released_when_its_process_is_killed(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / ".lock"
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("fork").Process(target=hold, args=(path, theirs))
    holder.start()
    assert ours.recv() == "held"
    with pytest.raises(BlockingIOError), locked(path, waits=False):
        pass
    assert is_locked(path) is (kind == "file")
    holder.kill()
    holder.join()
    with locked(path, waits=False):
        pass
    assert not is_locked(path)


def test_a_lock_that_was_moved_away_before_it_was_taken_is_taken_where_it_belongs(tmp_path, monkeypatch):
    path, take = tmp_path / "run" / ".lock", fcntl.flock
    path.parent.mkdir()

    def take_late(handle, how):  # as one who has waited for the run that was moved
        if not (tmp_path / "kept").exists():
            path.parent.rename(tmp_path / "kept")
        take(handle, how)

    monkeypatch.setattr(fcntl, "flock", take_late)
    with locked(path, waits=False):
        monkeypatch.undo()
        assert is_locked(path)


def test_a_pipe_or_a_device_is_written_to_and_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        write_text(pipe, "for whoever listens")
        assert os.read(reader, 100) == b"for whoever listens"
        assert pipe.is_fifo()
        assert list(tmp_path.iterdir()) == [pipe]
    finally:
        os.close(reader)
