"""The same config gives the same run on one process and on two, through the real launcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest


@pytest.mark.slow
def test_two_processes_train_and_measure_as_one_does(
    write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path,
    held_out_rows: Path,
):  # fmt: skip
    odd = tmp_path / "odd.jsonl"
    odd.write_text("\n".join(held_out_rows.read_text().splitlines()[:11]) + "\n")
    seen: list[Any] = []
    for processes in (1, 2):
        config = write_config(
            run_name=f"run-{processes}", train__batch_size=4, train__eval_steps=2, train__save_steps=2,
            data__val_path=str(odd), eval__before=True, eval__after=True,
        )  # fmt: skip
        done = sftplay("train", "--config", config, "--nproc", processes)
        assert done.returncode == 0, done.stderr
        folder = tmp_path / "outputs" / f"run-{processes}"
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        state = json.loads((folder / "checkpoints" / "checkpoint-4" / "trainer_state.json").read_text())
        held_out = [entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry]
        ranks = json.loads((folder / "status.json").read_text())["ranks"]
        seen.append((lines, held_out, json.loads((folder / "eval" / "after.json").read_text()), ranks))
    (one, held_out_1, after_1, _), (two, held_out_2, after_2, ranks) = seen
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-5)
    assert [line["grad_norm"] for line in two] == pytest.approx([line["grad_norm"] for line in one], rel=1e-3)
    assert [sorted(chain(*line["row_ids"])) for line in two] == [sorted(line["row_ids"][0]) for line in one]
    assert [line["label_tokens"] for line in two] == [line["label_tokens"] for line in one]
    assert len(held_out_1) == 2
    assert held_out_2 == pytest.approx(held_out_1, abs=1e-5)
    assert held_out_1[-1] == pytest.approx(after_1["loss"], abs=1e-4)
    assert after_2["loss"] == pytest.approx(after_1["loss"], abs=1e-4)
    assert {rank["model_class"] for rank in ranks} == {"DistributedDataParallel"}
