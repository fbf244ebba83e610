"""A checkpoint that the Trainer could not go on from is named and passed over, whatever its marker says."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, StopAfter, new_run, train, train_in
from safetensors.torch import load_file

from sftplay.errors import ConfigError
from sftplay.launch.checkpoints import MARKER, mark_complete, newest_complete
from sftplay.launch.run_folder import RunFolder
from sftplay.train.checkpointing import find_unreadable

OPTIONS = {"train__max_steps": 6, "train__save_steps": 2, "train__save_total_limit": 9, "tuning__lora__dropout": 0.1}


@pytest.fixture(scope="module")
def stopped(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that was stopped at step 5, with checkpoints at 2, 4 and 5."""
    cfg, folder = new_run(tmp_path_factory.mktemp("stopped"), inputs, **OPTIONS)
    return train_in(cfg, folder, StopAfter(5))


@pytest.fixture
def copy(stopped: Finished, tmp_path: Path) -> RunFolder:
    """A copy of that run, to break."""
    return RunFolder(Path(shutil.copytree(stopped.folder.path, tmp_path / "outputs" / "run")))


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Put a file in a checkpoint, and have its marker vouch for it."""
    (checkpoint / name).write_bytes(content)
    facts = json.loads((checkpoint / MARKER).read_text())
    mark_complete(checkpoint, {key: value for key, value in facts.items() if key not in ("files", "step")})


class Command:
    """A pickle that runs a command when it is opened: it leaves a file beside the checkpoints."""

    def __init__(self, checkpoint: Path) -> None:
        self.mark = checkpoint.parent / "was-here"

    def __reduce__(self) -> Any:
        return os.system, (f"touch {shlex.quote(str(self.mark))}",)


def saved(content: Any, path: Path) -> bytes:
    torch.save(content, path)
    return path.read_bytes()


def state(**changes: Any) -> Callable[[Path], bytes]:
    """A trainer_state.json with other fields; None leaves a field out."""

    def forged(checkpoint: Path) -> bytes:
        fields = json.loads((checkpoint / "trainer_state.json").read_text()) | changes
        return json.dumps(fields).encode()

    return forged


PICKLE = "holds more than numbers: opening it would run posix.system"
STRANGE = "is not what the Trainer writes"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("optimizer.pt", lambda c: saved({"state": Command(c)}, c / "x"), PICKLE),
        ("rng_state.pth", lambda c: saved(Command(c), c / "x"), PICKLE),
        ("scaler.pt", lambda c: saved(Command(c), c / "x"), PICKLE),
        ("optimizer.pt", lambda c: pickle.dumps(Command(c)), "cannot be read"),
        ("optimizer.pt", lambda c: (c / "optimizer.pt").read_bytes()[:900], "cannot be read"),
        ("optimizer.pt", lambda c: saved([1, 2], c / "x"), STRANGE),
        ("rng_state.pth", lambda c: saved({"python": 1}, c / "x"), STRANGE),
        (
            "adapter_model.safetensors",
            lambda c: (c / "adapter_model.safetensors").read_bytes()[:500],
            "holds no tensors",
        ),
        ("trainer_state.json", lambda _: b"{", STRANGE),
        ("trainer_state.json", state(global_step=3), "is not of step 5"),
        ("trainer_state.json", state(log_history={"a": 1}), STRANGE),
        ("trainer_state.json", state(stateful_callbacks={}), STRANGE),
        ("rng_state.pth", lambda c: saved({"python": 1, "numpy": 2, "cpu": 3}, c / "x"), STRANGE),
    ],
)
def test_file_that_the_trainer_cannot_go_on_from_is_named_and_the_checkpoint_before_is_taken(
    name: str, content: Callable[[Path], bytes], said: str, copy: RunFolder
):
    newest = copy.checkpoints / "checkpoint-5"
    made = content(newest)
    (newest / "x").unlink(missing_ok=True)
    forge(newest, name, made)
    found, (line,) = newest_complete(copy.checkpoints, find_unreadable)
    assert found == copy.checkpoints / "checkpoint-4"
    assert line.startswith(f"skipping checkpoint-5: {name} {said}")
    assert "weights_only" not in line
    assert not Command(newest).mark.exists()


def test_run_goes_on_from_what_is_whole_and_ends_as_if_nothing_had_been_broken(
    copy: RunFolder, stopped: Finished, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    forge(copy.checkpoints / "checkpoint-5", "optimizer.pt", saved({"state": Command(tmp_path)}, tmp_path / "x"))
    (copy.checkpoints / "checkpoint-4" / MARKER).write_text('{"step": 4, "files": [1]}')
    (copy.checkpoints / "checkpoint-²").mkdir()
    (copy.path / "status.json").write_text("[]")
    (copy.path / "plan.json").write_text("{")
    copy.metrics.write_bytes(copy.metrics.read_bytes().replace(b'"loss"', b'"lo\xffs', 1))
    wish = {"train.resume": "auto", "train.save_total_limit": 1}
    resumed = train_in(stopped.cfg.with_values(wish, "test"), copy)
    said = capsys.readouterr().out
    assert f"skipping checkpoint-5: optimizer.pt {PICKLE}" in said
    assert "skipping checkpoint-4: COMPLETE.json has an odd 'files'" in said
    assert "skipping 'checkpoint-²': its name ends with no number of steps" in said
    assert "metrics.jsonl: line 1 cannot be read: skipped" in said
    assert "checkpoint-4 is not continued: moved to" in said
    assert f"continuing from {copy.checkpoints / 'checkpoint-2'}" in said
    assert {"checkpoint-4", "checkpoint-5"} <= {path.name for path in (copy.checkpoints / "incomplete").iterdir()}
    assert [path.name for path in copy.checkpoints.glob("checkpoint-[0-9]")] == ["checkpoint-6"]
    assert [line["step"] for line in resumed.metrics] == [2, 3, 4, 5, 6]
    whole = train(tmp_path / "whole", inputs, **OPTIONS)
    ends = [load_file(run.folder.path / "adapter" / "adapter_model.safetensors") for run in (whole, resumed)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_checkpoint_that_was_asked_for_by_its_path_is_refused_with_the_file_and_without_torchs_advice(
    copy: RunFolder, stopped: Finished, tmp_path: Path
):
    asked = copy.checkpoints / "checkpoint-5"
    forge(asked, "rng_state.pth", saved(Command(tmp_path), tmp_path / "x"))
    cfg = stopped.cfg.with_values({"train.resume": str(asked)}, "test")
    with pytest.raises(ConfigError, match=rf"cannot be resumed: rng_state.pth {PICKLE}") as caught:
        train_in(cfg, copy)
    assert "weights_only" not in str(caught.value)
    assert "train.resume=auto" in caught.value.fix
