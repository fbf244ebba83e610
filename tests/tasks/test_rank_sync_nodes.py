"""Ranks of several nodes wait for one another before their first rendezvous, which has a limit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay.launch.run_folder import RunFolder
from sftplay.train.preflight import first_of_node, wait_for_nodes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Of a run on two nodes with two processes each; this is rank 2, the first one of the second node."""
    for name, value in {"WORLD_SIZE": 4, "RANK": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.update_status(state="running", exit_code=None)
    return folder


def test_the_first_rank_of_a_node_waits_for_the_other_nodes(folder: RunFolder):
    thread = threading.Thread(target=wait_for_nodes, args=(folder,))
    thread.start()
    thread.join(1)
    assert thread.is_alive()
    (folder.logs / ".ready-0").touch()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert (folder.logs / ".ready-2").exists()


def test_it_ends_with_the_code_of_a_rank_elsewhere_that_has_failed(folder: RunFolder):
    folder.update_status(state="failed", exit_code=4)
    with pytest.raises(SystemExit) as end:
        wait_for_nodes(folder)
    assert end.value.code == 4


def test_what_an_earlier_launch_has_left_is_not_taken_for_readiness(folder: RunFolder):
    (folder.logs / ".ready-2").touch()
    with first_of_node(folder):
        assert not (folder.logs / ".ready-2").exists()


def test_ranks_of_a_single_node_do_not_wait(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    wait_for_nodes(folder)
    assert not list(folder.logs.glob(".ready-*"))
