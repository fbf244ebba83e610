"""A source's store: sealed whole, completed after a kill to the same bytes, and read only where a row is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sftplay.config.run import RunConfig
from sftplay.data import tokenize
from sftplay.data.mixture import store
from sftplay.data.mixture.load import SourceJob, list_source_jobs, prove_renderers
from sftplay.data.mixture.store import ENTRY, INDEX, Store, StoreWriter, find_group_ends
from tests.data.mix.sources_at_hand import chat, content

Mixed = Callable[..., RunConfig]
Write = Callable[..., Path]


def make_job(cfg: RunConfig, tokenizer: Any) -> SourceJob:
    """The job of the config's first source."""
    return list_source_jobs(cfg, tokenizer, renderers=prove_renderers(cfg, tokenizer, template=None))[0]


def test_a_group_ends_by_its_documents_or_with_the_one_that_reaches_its_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "GROUP_DOCUMENTS", 3)
    monkeypatch.setattr(store, "GROUP_TOKENS", 10)
    table = np.zeros(8, ENTRY)
    table["end"] = np.cumsum([1, 1, 1, 10, 4, 5, 2, 1])
    assert find_group_ends(table) == [3, 4, 7, 8]
    assert find_group_ends(table[:0]) == []


@pytest.mark.parametrize("n_batches", [0, 9, 19])
def test_a_pass_that_was_killed_goes_on_and_makes_the_same_store(
    tokenizer: Any, mixed: Mixed, write_rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_batches: int
):
    monkeypatch.setattr(store, "ROWS_BETWEEN_NOTES", 20)
    monkeypatch.setattr(tokenize, "BATCH_ROWS", 7)
    rows = (
        [chat(n % 90) for n in range(110)]
        + [{"prompt": "Which?", "completion": f"{n}"} for n in range(15)]
        + [{"x": 1}]
    )
    path = write_rows(rows, "chats.jsonl")
    held_out = write_rows([chat(n) for n in range(80, 130)], "held_out.jsonl")
    source = {"name": "chat", "path": path, "type": "chat", "val_path": str(held_out)}
    policies = {"on_bad_row": "skip", "contamination": "drop", "duplicates": "drop"}

    def make(place: str) -> Path:
        return make_job(mixed([source], processed_dir=str(tmp_path / place), **policies), tokenizer).ensure()

    whole = make("whole")
    counted, end_batch, begin, begun_at = [], StoreWriter.end_batch, StoreWriter.begin, []

    def killed(*given: Any) -> None:
        if len(counted) == n_batches:
            raise KeyboardInterrupt  # it leaves everything as it is, as a kill does
        end_batch(*given)
        counted.append(1)

    with monkeypatch.context() as patched:
        patched.setattr(StoreWriter, "end_batch", killed)
        with pytest.raises(KeyboardInterrupt):
            make("killed")
    monkeypatch.setattr(StoreWriter, "begin", lambda *given: begun_at.append(begin(*given)) or begun_at[0])
    assert content(make("killed")) == content(whole)
    assert 7 * (n_batches - 4) < begun_at[0] <= 7 * n_batches
    report = Store.open(whole).report()["sources"]["train"]
    assert report["dropped"]["leak"] > 0
    assert report["dropped"]["duplicate"] > 0
    assert report["prompts_with_several_answers"] == 1


def test_an_index_cut_off_in_its_middle_begins_a_new_store(tokenizer: Any, mixed: Mixed, domain: dict[str, Any]):
    job = make_job(mixed([domain], split=0), tokenizer)
    whole = content(job.ensure())
    unfinished = job.folder.with_name(f".{job.folder.name}.part")
    job.folder.rename(unfinished)
    (unfinished / INDEX).write_text('{"id_bytes": 2, "has')
    (unfinished / "train.tokens").write_bytes(b"junk")
    assert content(job.ensure()) == whole
