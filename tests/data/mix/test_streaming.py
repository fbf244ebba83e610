"""A store is read while it is filled: equal rows, an equal folder, the writer's error, and no loss after a kill."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from processes import HANG_S

from sftplay.config.run import RunConfig
from sftplay.data import tokenize
from sftplay.data.mixture import load, tokenize_process
from sftplay.data.mixture import store as store_writer
from sftplay.data.mixture import store as streamed_store
from sftplay.data.mixture.load import load_mixture
from sftplay.data.mixture.sources import SourceJob, list_source_jobs, prove_renderers
from sftplay.data.mixture.store import INDEX, Index, Store, StoreWriter, StreamedStore, get_failure_path
from sftplay.errors import DataError, RunError
from tests.data.mix.sources_at_hand import chat, content, document, read_rows, same

Mixed = Callable[..., RunConfig]
Write = Callable[..., Path]
STREAMED = {"streaming": True}


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 20 documents, and batches of 7 rows."""
    monkeypatch.setattr(store_writer, "GROUP_DOCUMENTS", 20)
    monkeypatch.setattr(tokenize, "BATCH_ROWS", 7)


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Tokenizing processes are threads of this process, so that what a test changes holds for them too."""
    threads: list[threading.Thread] = []

    def start(job: SourceJob) -> None:
        get_failure_path(job.folder).unlink(missing_ok=True)
        path = job.folder.with_name(f"{job.folder.name}.job")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(job))
        threads.append(threading.Thread(target=tokenize_process.fill, args=(path,)))
        threads[-1].start()

    monkeypatch.setattr(tokenize_process, "NICENESS", 0)
    monkeypatch.setattr(load, "start_tokenize_process", start)
    yield threads
    for thread in threads:
        thread.join(timeout=HANG_S)


def jobs(cfg: RunConfig, tokenizer: Any) -> list[SourceJob]:
    return list_source_jobs(cfg, tokenizer, renderers=prove_renderers(cfg, tokenizer, template=None))


@pytest.mark.usefixtures("small_groups")
def test_streamed_rows_and_stores_are_those_of_memory_bit_for_bit(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any], write_rows: Write, tmp_path: Path,
    in_thread: list[threading.Thread],
):  # fmt: skip
    held_out = write_rows([document(n, 9) for n in range(500, 520)], "held_out.jsonl")
    asked = write_rows([chat(n) for n in range(500, 510)], "asked.jsonl")
    sources = [{**domain, "val_path": str(held_out)}, {**chats, "weight": 0.3, "val_path": str(asked)}]

    def cfg(place: str, **cpt: Any) -> RunConfig:
        folder = str(tmp_path / place)
        return mixed(sources, split=0, train={"max_steps": 60}, cpt=cpt, processed_dir=folder, duplicates="drop")

    streamed = load_mixture(cfg("streamed", **STREAMED), tokenizer)
    in_memory = load_mixture(cfg("memory"), tokenizer)
    assert streamed.steps_per_epoch is None
    assert streamed.fingerprint == in_memory.fingerprint
    assert same(read_rows(streamed), read_rows(in_memory))
    ours, expected = (rows.held_out["domain"] for rows in (streamed, in_memory))
    assert same([ours[n] for n in range(len(ours))], [expected[n] for n in range(len(expected))])
    for thread in in_thread:
        thread.join()
    assert streamed.held_out_chats("chat") == in_memory.held_out_chats("chat")
    assert len(in_memory.sources[0].store.sides["train"].group_ends) == 6
    for one, two in zip(jobs(cfg("streamed"), tokenizer), jobs(cfg("memory"), tokenizer), strict=True):
        assert content(one.folder) == content(two.folder)
    assert streamed.report_now()["tokens"] == in_memory.report["tokens"]


@pytest.mark.usefixtures("small_groups", "in_thread")
def test_a_reader_gets_rows_of_the_groups_that_are_there_while_the_rest_is_not_tokenised(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    may_go_on, end_batch, n_batches = threading.Event(), StoreWriter.end_batch, []

    def held_up(*given: Any) -> None:
        end_batch(*given)
        n_batches.append(1)
        if len(n_batches) == 5:  # 35 rows: one group
            assert may_go_on.wait(HANG_S)

    monkeypatch.setattr(StoreWriter, "end_batch", held_up)
    rows = load_mixture(mixed([domain], split=0, train={"max_steps": 400}, cpt=STREAMED), tokenizer)
    first = read_rows(rows, 3)
    store = rows.sources[0].store
    assert not store.index.is_whole
    assert len(store.sides["train"].table) == 20
    threading.Timer(0.2, may_go_on.set).start()
    assert len(read_rows(rows)) == 1600  # several epochs
    assert store.index.is_whole
    assert same(first, read_rows(rows, 3))


@pytest.mark.usefixtures("small_groups", "in_thread")
def test_a_bad_row_ends_the_stream_with_the_error_that_names_it(tokenizer: Any, mixed: Mixed, domain: dict[str, Any]):
    path = Path(domain["path"])
    path.write_text(path.read_text() + '{"text": 7}\n')
    with pytest.raises(DataError, match=rf"1 row cannot be trained on\n  {path}:121 ") as failure:
        read_rows(load_mixture(mixed([domain], split=0, train={"max_steps": 400}, cpt=STREAMED), tokenizer))
    assert "data.on_bad_row: skip" in failure.value.fix


def begin_store(job: SourceJob) -> None:
    """Leave a store as a tokenizing process leaves it that is killed at its beginning."""
    unfinished = job.folder.with_name(f".{job.folder.name}.part")
    unfinished.mkdir(parents=True)
    with StoreWriter(unfinished, Index(2, False)) as files:
        files.begin(None)


def test_a_store_whose_filler_was_killed_is_an_error_and_no_endless_wait(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streamed_store, "ABANDONED_S", 0.2)
    (job,) = jobs(mixed([domain], split=0), tokenizer)
    begin_store(job)
    killed = SimpleNamespace(poll=lambda: -signal.SIGKILL)
    store = StreamedStore(job.folder, path="domain.jsonl", process=killed)
    with pytest.raises(RunError, match="has ended before it was done") as failure:
        store.sides["train"].has_group(0)
    assert failure.value.where == "domain.jsonl"


def test_a_filler_that_is_slow_to_start_is_waited_for_where_an_earlier_one_has_left_a_store(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streamed_store, "ABANDONED_S", -1.0)
    (job,) = jobs(mixed([domain], split=0), tokenizer)
    begin_store(job)
    store = StreamedStore(job.folder, path="domain.jsonl", process=SimpleNamespace(poll=lambda: None))
    fills = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: job.ensure(is_streamed=True))
    monkeypatch.setattr(streamed_store, "time", fills)  # it begins after the reader has looked once
    assert store.sides["train"].has_group(0)
    assert store.index.is_whole


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("n_batches", [0, 1, 5, 9, 14, 19])
def test_a_pass_that_was_killed_goes_on_and_makes_the_same_store(
    tokenizer: Any, mixed: Mixed, write_rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_batches: int
):
    rows = (
        [chat(n % 90) for n in range(110)]
        + [{"prompt": "Which?", "completion": f"{n}"} for n in range(15)]
        + [{"x": 1}]
    )
    path = write_rows(rows, "chats.jsonl")
    held_out = write_rows([chat(n) for n in range(80, 130)], "held_out.jsonl")
    source = {"name": "chat", "path": path, "type": "chat", "val_path": str(held_out)}

    def job(place: str) -> SourceJob:
        folder = str(tmp_path / place)
        return jobs(
            mixed([source], processed_dir=folder, on_bad_row="skip", contamination="drop", duplicates="drop"), tokenizer
        )[0]

    whole = job("whole").ensure()
    counted, end_batch = [], StoreWriter.end_batch

    def killed(*given: Any) -> None:
        if len(counted) == n_batches:
            raise KeyboardInterrupt  # it leaves everything as it is, as a kill does
        end_batch(*given)
        counted.append(1)

    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "end_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            job("killed").ensure()
    first_row = []
    begin = StoreWriter.begin
    monkeypatch.setattr(StoreWriter, "begin", lambda *given: first_row.append(begin(*given)) or first_row[0])
    assert content(job("killed").ensure()) == content(whole)
    assert first_row[0] <= 7 * n_batches
    assert first_row[0] > 7 * (n_batches - 4)
    report = Store.open(whole).report()["sources"]["train"]
    assert report["dropped"]["leak"] > 0
    assert report["dropped"]["duplicate"] > 0
    assert report["prompts_with_several_answers"] == 1


def test_an_index_cut_off_in_its_middle_begins_a_new_store(tokenizer: Any, mixed: Mixed, domain: dict[str, Any]):
    (job,) = jobs(mixed([domain], split=0), tokenizer)
    whole = content(job.ensure())
    unfinished = job.folder.with_name(f".{job.folder.name}.part")
    job.folder.rename(unfinished)
    (unfinished / INDEX).write_text('{"id_bytes": 2, "has')
    (unfinished / "train.tokens").write_bytes(b"junk")
    assert content(job.ensure()) == whole


def test_opening_a_row_in_the_middle_reads_that_row_and_no_other_token(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    cfg = mixed([domain, chats], split=0, train={"epochs": 3})
    expected = load_mixture(cfg, tokenizer)
    rows = load_mixture(cfg, tokenizer)
    taken = []

    class Counted:
        """Tokens that count how many of them are taken."""

        def __init__(self, tokens: Any) -> None:
            self._tokens = tokens

        def __getitem__(self, places: Any) -> Any:
            taken.append(len(places))
            return self._tokens[places]

    for source in rows.sources:
        source.store.sides["train"].tokens = Counted(source.store.sides["train"].tokens)
    middle = len(rows.train) // 2
    assert same([rows.train[middle]], [expected.train[middle]])
    assert sum(taken) <= cfg.row_tokens


@pytest.mark.slow
def test_a_killed_tokenize_process_is_reported_and_the_next_run_goes_on_where_it_stood(
    tokenizer: Any, mixed: Mixed, write_rows: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    path = write_rows([document(n, n % 8) for n in range(50_000)], "many.jsonl")
    source = {"name": "many", "path": path, "type": "cpt"}
    cfg = mixed([source], split=0, train={"max_steps": 4500, "effective_batch_size": 1}, cpt=STREAMED)
    started, start_tokenize_process = [], tokenize_process.start_tokenize_process

    def kept(job: SourceJob) -> Any:
        started.append(start_tokenize_process(job))
        return started[-1]

    monkeypatch.setattr(load, "start_tokenize_process", kept)
    rows = load_mixture(cfg, tokenizer)
    first = read_rows(rows, 50)  # of the first group
    (job,) = jobs(cfg, tokenizer)
    os.kill(started[0].pid, signal.SIGKILL)
    started[0].wait()
    assert not job.folder.exists()
    with pytest.raises(RunError, match="has ended before it was done"):
        read_rows(rows)
    n_done = Index.read(job.folder.with_name(f".{job.folder.name}.part")).resume["rows"]
    assert n_done >= 16_384
    again = load_mixture(cfg, tokenizer)
    assert same(read_rows(again, 50), first)
    all_rows = read_rows(again)
    started[1].wait()
    while not again.sources[0].store.index.is_whole:
        again.sources[0].store.sides["train"].has_group(10**6)
    in_memory = mixed(
        [source], split=0, train={"max_steps": 4500, "effective_batch_size": 1}, processed_dir=str(tmp_path / "other")
    )
    assert same(all_rows, read_rows(load_mixture(in_memory, tokenizer)))
    (other,) = jobs(in_memory, tokenizer)
    assert content(other.folder) == content(job.folder)
