"""Several processes tokenise side by side: the same result as one, nothing heavy in them, none left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import is_alive, wait_until

from sftplay.config.run import RunConfig
from sftplay.data import tokenize
from sftplay.data.layouts import LayoutOptions
from sftplay.data.pipeline import load_examples
from sftplay.data.records import Source
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import CHATML
from sftplay.data.row_outcomes import RowOptions
from sftplay.errors import MachineError

Config = Callable[..., RunConfig]
Write = Callable[..., Path]


def rows(count: int) -> list[Any]:
    made: list[Any] = [
        {"prompt": f"Why is boat {n} green?", "completion": "salt " * (n % 40 + 1)} for n in range(count)
    ]
    made[7], made[400] = {"x": 1}, "not an object"
    made[500:502] = [made[3], made[3]]
    return made


def test_several_processes_write_what_one_writes(
    tokenizer: Any, config: Config, write_rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write_rows(rows(1500))
    alone = load_examples(config(path, on_bad_row="skip", split=0.2), tokenizer)
    monkeypatch.setattr(tokenize, "WORTH_WORKERS_BYTES", 0)
    monkeypatch.setattr(tokenize, "usable_cores", lambda: 2)
    cfg = config(path, on_bad_row="skip", split=0.2, processed_dir=str(tmp_path / "again"))
    together = load_examples(cfg, tokenizer)
    assert together.report | {"refused_rows": "", "sources": ""} == alone.report | {"refused_rows": "", "sources": ""}
    for side in ("train", "held_out"):
        first = Path(alone.report["refused_rows"]).with_name(f"{side}.arrow").read_bytes()
        assert Path(together.report["refused_rows"]).with_name(f"{side}.arrow").read_bytes() == first
    assert together.held_out_chats == alone.held_out_chats


@contextmanager
def processed(tokenizer: Any, n_batches: int) -> Iterator[Generator[Any]]:
    """The outcomes of equal batches, from two processes; when they are closed, none is left."""
    raw = b'{"prompt": "Why?", "completion": "So."}'
    batches = (([(n, Source("a.jsonl", n + 1), raw)], 0.0) for n in range(n_batches))
    renderer, options = Renderer.prove(tokenizer, CHATML, samples=[]), RowOptions(LayoutOptions(), 64, "truncate")
    with closing(tokenize.process_all(batches, renderer, options=options, processes=2)) as coming:
        yield coming
    assert not children()


def children() -> list[psutil.Process]:
    """The started processes that have their command line: one has it only after its program has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(process.cmdline()):
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def no_child_of_another_test() -> None:
    assert not children(), "a test before this one left a process"


def test_started_processes_hold_neither_torch_nor_transformers_and_end_with_the_work(tokenizer: Any):
    with processed(tokenizer, 50) as coming:
        next(coming)
        wait_until(lambda: len(children()) == 2)
        for process in children():

            def mapped(process: psutil.Process = process) -> str:
                return " ".join(region.path for region in process.memory_maps())

            wait_until(lambda mapped=mapped: "tokenizers" in mapped())
            assert not re.search("torch|transformers", mapped())
        assert len(list(coming)) == 49


def test_killed_process_is_said_and_the_others_end(tokenizer: Any):
    with processed(tokenizer, 100_000) as coming:
        next(coming)
        os.kill(children()[0].pid, signal.SIGKILL)
        with pytest.raises(MachineError, match="a process that tokenises was killed"):
            list(coming)


PARENT = """
import time
from sftplay.data.pool import work_through

if __name__ == "__main__":
    for _ in work_through(range(9), abs, processes=2, killed=None):
        print("ready", flush=True)
        time.sleep(60)
"""


def test_processes_of_a_killed_parent_end(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        try:
            assert parent.stdout.readline() == "ready\n"
            started = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
            assert len(started) >= 2
        finally:
            parent.kill()
    wait_until(lambda: not any(is_alive(pid) for pid in started))


def test_interrupt_while_processes_start_is_the_parents_alone(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    started, submit = [], ProcessPoolExecutor.submit

    def submit_and_interrupt(pool: Any, *given: Any) -> Any:
        """As a terminal's Ctrl-C, which reaches processes that have not started yet."""
        future = submit(pool, *given)
        for pid in list(pool._processes):
            if pid not in started:
                started.append(pid)
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGUSR1)
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit_and_interrupt)
    with processed(tokenizer, 20) as coming:
        assert len(list(coming)) == 20
    assert len(started) >= 2
    assert "KeyboardInterrupt" not in capfd.readouterr().err
