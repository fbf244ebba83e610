"""One rank of two computes numbers that are not finite: all stop before the step is taken, and its rows are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from out_of_memory import hooked
from processes import HANG_S
from safetensors.torch import load_file

pytestmark = pytest.mark.contract


@pytest.mark.slow
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_no_rank_takes_the_step_and_its_rows_are_written_down(
    what: str, write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    keys = {"train__max_steps": 4, "train__save_steps": 2, "train__batch_size": 2}
    whole = write_config("whole.yaml", run_name="whole", **{**keys, "train__save_total_limit": 9})
    assert sftplay("train", "--config", whole, "--nproc", 2, **hooked(tmp_path, [])).returncode == 0
    config = write_config(**keys)
    options = hooked(tmp_path, [(1, 3, 2, f"bad {what}")])
    done = sftplay("train", "--config", config, "--nproc", 2, **options, timeout=HANG_S)
    assert done.returncode == 5, done.stdout + done.stderr
    assert f"the {what} of step 3 is not finite" + (" on rank 1" if what == "loss" else "") in done.stdout
    run, undisturbed = tmp_path / "outputs" / "run", tmp_path / "outputs" / "whole"
    planned = [json.loads(line)["row_ids"] for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    bad = json.loads((run / "bad_step.json").read_text())
    assert bad["step"] == 3
    assert [each["row_ids"] for each in bad["ranks"]] == planned[2]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    checkpoints = sorted(path.parent.name for path in (run / "checkpoints").glob("*/COMPLETE.json"))
    assert checkpoints == ["checkpoint-2"]
    name = "checkpoints/checkpoint-2/adapter_model.safetensors"
    ours, theirs = load_file(run / name), load_file(undisturbed / name)
    assert all((ours[key] == theirs[key]).all() for key in theirs)
    assert json.loads((run / "status.json").read_text())["exit_code"] == 5
