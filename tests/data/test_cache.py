"""When prepared rows may be used again, and what is said where they cannot be kept."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.run import RunConfig
from sftplay.data.pipeline import load_examples
from sftplay.data.tokenize import Preparation, RowFiles
from sftplay.errors import ConfigError, DataError, RunError

Config = Callable[..., RunConfig]
Write = Callable[..., Path]


def row(n: int) -> dict[str, str]:
    return {"prompt": f"Which stone is number {n}?", "completion": "A quiet hill."}


def test_file_that_changes_while_it_is_read_is_not_taken_for_what_it_was(
    tokenizer: Any, config: Config, write_rows: Write, monkeypatch: pytest.MonkeyPatch
):
    path = write_rows([row(n) for n in range(60)])
    cfg = config(path, split=0.25)
    before, run = path.read_text(), Preparation.run

    def run_while_someone_writes(*given: Any, **named: Any) -> None:
        path.write_text(before.replace("quiet", "loud"))
        run(*given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Preparation, "run", run_while_someone_writes)
        with pytest.raises(DataError, match="has changed while it was read"):
            load_examples(cfg, tokenizer)
    path.write_text(before)
    assert "quiet" in tokenizer.decode(load_examples(cfg, tokenizer).train[0]["input_ids"])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_a_run_error_and_leaves_nothing(
    tokenizer: Any, config: Config, write_rows: Write, monkeypatch: pytest.MonkeyPatch, number: int
):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    cfg = config(write_rows([row(n) for n in range(60)]))
    monkeypatch.setattr(RowFiles, "write", fail)
    with pytest.raises(RunError, match="find no room") as refusal:
        load_examples(cfg, tokenizer)
    assert refusal.value.where == cfg.data.processed_dir
    assert "data.processed_dir" in refusal.value.fix
    assert [path.suffix for path in Path(cfg.data.processed_dir).iterdir()] == [".lock"]


def test_cache_that_cannot_be_written_is_a_config_error(
    tokenizer: Any, config: Config, write_rows: Write, tmp_path: Path
):
    (tmp_path / "taken").touch()
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(ConfigError, match="cannot be written"):
            load_examples(config(write_rows([row(n) for n in range(60)]), processed_dir=str(place)), tokenizer)
