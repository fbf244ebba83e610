"""`parity` of a run that still trains holds its newest complete checkpoint against the engine, and says which it is."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import Inputs, new_run, train_in
from processes import HANG_S
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from sftplay import cli
from sftplay.atomic import locked
from sftplay.errors import ConfigError
from sftplay.launch.checkpoints import MARKER
from sftplay.parity.causes import explain_seal
from sftplay.parity.running import checkpoint_as_run
from sftplay.tasks.grpo import task
from sftplay.train.eval_mode import random_numbers_kept

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers|missing adapter keys)")


class AskMeanwhile(TrainerCallback):
    """Calls `parity` in the middle of the run: before its first checkpoint, and after its second."""

    def __init__(self, run: Path) -> None:
        self.run, self.answers, self.changed = run, list[tuple[int, Any]](), False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step not in (1, 5):
            return
        before = {name: value.clone() for name, value in model.state_dict().items()}
        out = io.StringIO()
        threads = torch.get_num_threads()
        with random_numbers_kept(), redirect_stdout(out), redirect_stderr(io.StringIO()):
            words = ["parity", "--run", str(self.run), "--max-new-tokens", "6", "--n", "2", "--json"]
            self.answers.append((cli.main(words), json.loads(out.getvalue().strip().splitlines()[-1])))
        torch.set_num_threads(threads)
        self.changed |= any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_the_newest_checkpoint_is_asked_while_the_run_goes_on(
    mode: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    inputs: Inputs = grpo_inputs(tiny_llama, tmp_path / "rows")
    steps = {"train__max_steps": 6, "train__save_steps": 2, "grpo__max_completion_length": 4}
    cfg, folder = new_run(tmp_path, inputs, **grpo_options(inputs, tuning__mode=mode, **steps))
    asked, build = AskMeanwhile(folder.path), task.build_trainer

    def build_and_ask(parts: Any) -> Any:
        trainer = build(parts)
        trainer.add_callback(asked)
        return trainer

    monkeypatch.setattr(task, "build_trainer", build_and_ask)
    run = train_in(cfg, folder)
    (early, refusal), (code, result) = asked.answers
    assert (early, refusal["error"]["code"]) == (2, "config")
    assert "neither a result nor a complete checkpoint" in refusal["error"]["what"]
    assert (code, result["verdict"], result["step"]) == (0, "ok", 4)
    assert result["served"] == str(folder.checkpoints / "checkpoint-4")
    assert "step 4" in result["notes"][0]
    documents.check(result, "verbs/parity")
    kept = folder.read_json("parity.json")
    assert (kept["step"], kept["results"]["transformers-" + kept["against"]]["step"]) == (4, 4)
    assert not list(folder.path.glob(".parity-*"))
    assert not asked.changed
    assert (run.outcome.step, run.folder.result is not None) == (6, True)
    name = "adapter_model.safetensors" if mode == "lora" else "model.safetensors"
    saved, last = load_file(folder.checkpoints / "checkpoint-4" / name), load_file(run.folder.result / name)  # type: ignore[operator]
    assert any(not torch.equal(saved[key], last[key]) for key in saved)


def test_what_a_killed_one_has_left_is_removed_and_what_another_holds_stays(inputs: Inputs, tmp_path: Path):
    cfg, folder = new_run(tmp_path, inputs)
    left, held = folder.path / ".parity-left", folder.path / ".parity-held"
    for place in (left, held):
        (place / "model").mkdir(parents=True)
        (place / "model" / "model.safetensors").write_bytes(b"weights")
    with locked(held, waits=False), pytest.raises(ConfigError), checkpoint_as_run(cfg, folder):
        pass
    assert [path.name for path in folder.path.glob(".parity-*")] == [held.name]


@pytest.mark.parametrize(("state", "causes"), [("running", 0), ("done", 1)])
def test_a_run_that_saves_meanwhile_is_not_said_to_have_a_changed_result(
    state: str, causes: int, inputs: Inputs, tmp_path: Path
):
    cfg, folder = new_run(tmp_path, inputs)
    for n, place in enumerate(("adapter", "checkpoints/checkpoint-40")):
        (folder.path / place).mkdir(parents=True)
        save_file({"w": torch.full((2,), float(n))}, folder.path / place / "adapter_model.safetensors")
    (folder.checkpoints / "checkpoint-40" / MARKER).touch()
    folder.update_status(state=state, step=40)
    assert len(explain_seal(folder, cfg)) == causes


AGAIN = """
import sys
from pathlib import Path
from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.checkpoints import MARKER
from sftplay.parity.causes import explain_seal
from sftplay.parity.running import checkpoint_as_run

cfg, folder = load_config(sys.argv[1]), RunFolder(Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for _ in range(400):
    try:
        with checkpoint_as_run(cfg, folder):
            pass
    except ConfigError:  # there is no checkpoint
        pass
"""


def test_two_processes_that_ask_in_the_same_instant_take_nothing_from_each_other(inputs: Inputs, tmp_path: Path):
    _, folder = new_run(tmp_path, inputs)
    words = [sys.executable, "-c", AGAIN, str(folder.resolved), str(folder.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(words, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=HANG_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert not list(folder.path.glob(".parity-*"))
