"""A run that was stopped and resumed ends with the bytes of one that was not."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from in_process import Inputs, StopAfter, assert_same_course, new_run, stop_and_resume, train, train_in
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback

from sftplay.errors import ConfigError, DataError, RunError
from sftplay.train.checkpointing import starting_weights, weights_changes
from sftplay.train.guards import StopOnBadStep, StopOnSignal, report_full_disk
from sftplay.train.train_run import TrainRun


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("full", {"train__neftune_alpha": 5}),
        ("lora", {"tuning__lora__dropout": 0.2}),
        ("qlora", {"tuning__lora__dropout": 0.2, "train__gradient_checkpointing": True}),
    ],
)
def test_resumed_run_ends_bit_for_bit_where_an_undisturbed_one_ends(
    mode: str, options: dict[str, Any], inputs: Inputs, tmp_path: Path
):
    options |= {"tuning__mode": mode, "train__max_steps": 8, "train__batch_size": 4, "train__eval_steps": 2}
    whole = train(tmp_path / "whole", inputs, **options)
    resumed = stop_and_resume(tmp_path / "stopped", inputs, 3, **options)
    assert_same_course(whole, resumed)
    attempts = resumed.folder.read_json("status.json")["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, 3]
    assert [line["attempt"] for line in resumed.metrics] == [1] * 3 + [2] * 5
    rows = {row["row"]: row for row in resumed.trainer.train_dataset}
    trained = [rows[number] for line in resumed.metrics for number in line["row_ids"][0]]
    tokens = sum(len(row["input_ids"]) for row in trained)
    labels = sum(label != -100 for row in trained for label in row["labels"][1:])
    last, status = resumed.metrics[-1], resumed.folder.read_json("status.json")
    marked = json.loads((resumed.folder.checkpoints / "checkpoint-8" / "COMPLETE.json").read_text())["counters"]
    for counts in (last, status, marked):
        assert (counts["tokens_seen"], counts["label_tokens_seen"]) == (tokens, labels)


@pytest.mark.parametrize("task", ["sft", "reward_model"])
def test_the_experts_of_a_mixture_go_on_from_a_checkpoint_where_all_weights_train(
    task: str, inputs: Inputs, tiny_llama: Path, tmp_path: Path
):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
             "vocab_size": 400, "pad_token_id": 0, "eos_token_id": 2}  # fmt: skip
    source = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes)).save_pretrained(source)
    for file in (*tiny_llama.glob("tokenizer*"), *tiny_llama.glob("chat_template*")):
        shutil.copy(file, source)
    options = {"task_mode": task, "tuning__mode": "full", "train__max_steps": 4, "train__learning_rate": 0.01}
    if task == "reward_model":
        pairs = [{"prompt": str(n), "chosen": "good" * (n % 5 + 1), "rejected": "bad" * (n % 3 + 1)} for n in range(60)]
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        inputs = Inputs(source, tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl")
        options |= {"data__val_path": None, "data__split": 0.1}
    inputs = Inputs(source, inputs.train, inputs.held_out)
    whole = train(tmp_path / "whole", inputs, **options)
    assert_same_course(whole, stop_and_resume(tmp_path / "stopped", inputs, 2, **options))


def test_resume_from_a_path_starts_there_and_sets_later_checkpoints_aside(inputs: Inputs, tmp_path: Path):
    refused, nowhere = new_run(tmp_path / "nowhere", inputs, train__resume=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be resumed: no such folder"):
        train_in(refused, nowhere)
    options = {"train__max_steps": 6, "train__save_steps": 2, "train__save_total_limit": 5}
    whole = train(tmp_path / "whole", inputs, **options)
    cfg, folder = new_run(tmp_path / "stopped", inputs, **options)
    train_in(cfg, folder, StopAfter(5))
    kept = tmp_path / "kept by hand"
    shutil.copytree(folder.checkpoints / "checkpoint-2", kept)
    resumed = train_in(cfg.with_values({"train.resume": str(kept)}, "test"), folder)
    assert folder.read_json("status.json")["attempts"][-1]["from_step"] == 2
    assert (folder.checkpoints / "incomplete" / "checkpoint-5").is_dir()
    assert_same_course(whole, resumed)


def test_curves_of_a_resumed_run_hold_each_step_once_with_speed_and_padding(inputs: Inputs, tmp_path: Path):
    options = {"train__max_steps": 6, "train__save_steps": 2, "logging__backend": "tensorboard"}
    cfg, folder = new_run(tmp_path, inputs, **options)
    train_in(cfg, folder, StopAfter(5))
    (folder.checkpoints / "checkpoint-5" / "COMPLETE.json").unlink()  # as if it had been killed while saving
    train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    board = EventAccumulator(str(folder.path / "tb"))
    board.Reload()
    for tag in ("train/loss", "train/tokens_per_s", "train/padding_share", "train/label_tokens"):
        assert [event.step for event in board.Scalars(tag)] == list(range(1, 7)), tag


def test_what_has_changed_since_a_checkpoint_is_named_and_nothing_is_trained(inputs: Inputs, tmp_path: Path):
    rows = Path(shutil.copy(inputs.train, tmp_path / "rows.jsonl"))
    model = Path(shutil.copytree(inputs.model, tmp_path / "model"))
    options = {"train__save_steps": 2, "data__train_path": str(rows), "data__split": 0, "data__val_path": None}
    cfg, folder = new_run(tmp_path, Inputs(model, rows, inputs.held_out), **options)
    train_in(cfg, folder, StopAfter(2))
    cfg, trained = cfg.with_values({"train.resume": "auto"}, "test"), folder.metrics.read_bytes()

    with pytest.raises(ConfigError, match="seed was 42 and is 7 now"):
        train_in(cfg.with_values({"seed": 7}, "test"), folder)
    with pytest.raises(ConfigError, match=r"train\.batch_size was \d+ and is 1 now"):
        train_in(cfg.with_values({"train.batch_size": 1}, "test"), folder)

    whole = rows.read_text()
    rows.write_text(whole.replace("river", "rover", 1))
    with pytest.raises(
        DataError,
        match=r"rows\.jsonl has changed \(content [0-9a-f]{12} then, [0-9a-f]{12} now\); training rows: finger",
    ):
        train_in(cfg, folder)
    rows.write_text(whole.rsplit("\n", 2)[0] + "\n")
    with pytest.raises(DataError, match=r"training rows: fingerprint .*, 70 then, 69 now"):
        train_in(cfg, folder)
    rows.write_text(whole)

    template = model / "chat_template.jinja"
    text = template.read_text()
    template.write_text(text.replace("'\\n'", "'\\n\\n'"))
    with pytest.raises(DataError, match=r"the chat template has changed .*; training rows: fingerprint"):
        train_in(cfg, folder)
    template.write_text(text)

    weights = model / "model.safetensors"
    whole_weights = weights.read_bytes()
    weights.write_bytes(whole_weights[:-4] + b"\x00\x00\x00\x3f")  # 0.5 in place of the last number
    with pytest.raises(ConfigError, match=r"starts from has changed .*model\.safetensors has changed \(content"):
        train_in(cfg, folder)
    weights.write_bytes(whole_weights)
    os.utime(weights)  # copied or touched: the same numbers
    now = {"weights": starting_weights(cfg)}
    assert len(weights_changes(now, {"weights": dict.fromkeys(now["weights"], "other")})) == len(now["weights"])
    # The cache of models was moved.
    assert (
        weights_changes({"weights": {f"/elsewhere{path}": digest for path, digest in now["weights"].items()}}, now)
        == []
    )
    assert folder.metrics.read_bytes() == trained
    rows.write_text(whole + "\n\n")  # other bytes, the same rows
    assert train_in(cfg, folder).outcome.step == 4


def test_patience_of_early_stopping_is_not_renewed_by_a_resume(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {"train__max_steps": 8, "train__eval_steps": 1, "train__save_steps": 1, "train__early_stopping": 3}
    cfg, folder = new_run(tmp_path, inputs, **options)
    with held_out_losses([5.0, 4.0, 4.5, 4.6], monkeypatch):
        train_in(cfg, folder, StopAfter(3))  # its last evaluation was the first without progress
    with held_out_losses([4.6, 4.7, 4.8, 4.9, 5.0], monkeypatch):
        run = train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    assert run.outcome.step == 5


def test_checkpoint_behind_a_skipped_step_does_not_count(inputs: Inputs, tmp_path: Path):
    class Skip(StopOnSignal):
        """As if fp16 had skipped step 2: its numbers were not finite."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            bad_step.skipped_in_a_row = int(state.global_step == 2)
            return super().on_step_end(args, state, control)

    cfg, folder = new_run(tmp_path, inputs, train__save_steps=1, train__save_total_limit=9)
    with pytest.MonkeyPatch.context() as patch:
        bad_step = StopOnBadStep(tmp_path / "bad_step.json")
        patch.setattr("sftplay.train.train_run.StopOnBadStep", lambda _: bad_step)
        train_in(cfg, folder, Skip())
    complete = [path.parent.name for path in folder.checkpoints.glob("*/COMPLETE.json")]
    assert sorted(complete) == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]


class Forget(TrainerCallback):
    """Makes the held-out loss what a list says, evaluation by evaluation."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        metrics["eval_loss"] = self.values.pop(0)


@contextmanager
def held_out_losses(values: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real: Callable[..., Any] = TrainRun.train

    def train_with_them(self: TrainRun, trainer: Any) -> Any:
        # First in the list: the Trainer's own bookkeeping looks at the same dict afterwards.
        trainer.callback_handler.callbacks.insert(0, Forget(values))
        return real(self, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(TrainRun, "train", train_with_them)
        yield


def test_best_checkpoint_that_was_removed_while_the_run_trained_is_not_replaced_by_the_last_in_silence(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Remove(StopOnSignal):
        """Somebody makes room at step 4."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            if state.global_step == 4:
                shutil.rmtree(folder.checkpoints / "checkpoint-1")
            return super().on_step_end(args, state, control)

    options = {"train__max_steps": 5, "train__eval_steps": 1, "train__save_steps": 1, "train__save_total_limit": 9}
    cfg, folder = new_run(tmp_path, inputs, train__best_metric="loss", **options)
    with (
        held_out_losses([4.0, 5.0, 5.0, 5.0, 5.0], monkeypatch),
        pytest.raises(RunError, match=r"lowest held-out loss is missing: .*checkpoint-1") as caught,
    ):
        train_in(cfg, folder, Remove())
    assert caught.value.fix.endswith(str(folder.checkpoints / "checkpoint-5"))
    assert folder.result is None


@pytest.mark.parametrize("save_steps", [1, 3])
def test_best_metric_keeps_the_weights_of_the_lowest_held_out_loss_also_between_two_checkpoints(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_steps: int
):
    options = {"tuning__mode": "qlora", "train__max_steps": 5, "train__eval_steps": 1, "train__save_steps": save_steps}
    with held_out_losses([5.0, 4.0, 4.5, 4.6, 4.7], monkeypatch):
        run = train(tmp_path, inputs, train__best_metric="loss", train__save_total_limit=1, **options)
    kept = run.folder.checkpoints / "checkpoint-2"
    assert sorted(p.name for p in run.folder.checkpoints.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-5"]
    (path,) = kept.glob("*model.safetensors")
    best, (result,) = load_file(path), run.folder.result.glob("*model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in load_file(result).items())
    last = train(tmp_path / "last", inputs, **options)
    assert any(not torch.equal(*pair) for pair in zip(run.weights.values(), last.weights.values(), strict=True))


@contextmanager
def no_file_above(size_bytes: int) -> Iterator[None]:
    """Every write beyond this size fails with an error of the kernel, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("writer", ["torch", "safetensors", "python"])
def test_full_disk_is_a_run_error_with_a_remedy_whoever_writes(writer: str, tmp_path: Path):
    from safetensors.torch import save_file

    tensor = torch.zeros(1 << 18)
    write = {
        "torch": lambda path: torch.save(tensor, path),
        "safetensors": lambda path: save_file({"x": tensor}, path),
        "python": lambda path: path.write_bytes(bytes(1 << 20)),
    }[writer]
    with no_file_above(4096), pytest.raises(RunError, match="writing failed") as caught, report_full_disk(tmp_path):
        write(tmp_path / "file")
    assert "make room" in caught.value.fix


@pytest.mark.contract
@pytest.mark.fresh_start
@pytest.mark.parametrize("mode", ["lora"])
def test_command_trains_and_reports_what_it_did(
    mode: str, write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    config = write_config(tuning__mode=mode, logging__backend="tensorboard")
    done = sftplay("train", "--config", config)
    assert done.returncode == 0, done.stderr
    status = json.loads((tmp_path / "outputs" / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 4)
    (attempt,) = status["attempts"]
    assert (attempt["from_step"], attempt["to_step"], attempt["cause"], attempt["gpus"]) == (0, 4, "done", 0)
    assert attempt["started"] == status["started"]
    assert attempt["seconds"] >= status["train_seconds"]  # loading counts too
    assert (tmp_path / "outputs" / "latest").resolve() == (tmp_path / "outputs" / "run").resolve()
    assert (tmp_path / "outputs" / "run" / "launch.txt").is_file()
    again = sftplay("train", "--config", config)
    assert again.returncode == 2
    assert "a run called 'run' exists" in again.stderr


def test_a_resume_where_the_first_sizes_do_not_fit_takes_others_with_the_same_effective_batch(
    inputs: Inputs, tmp_path: Path
):
    """Another machine: the plan says so in plan.json, and the checkpoint's marker may then name other sizes."""
    options = {"train__save_steps": 2, "train__batch_size": 4, "train__effective_batch_size": 4}
    cfg, folder = new_run(tmp_path, inputs, **options)
    train_in(cfg, folder, StopAfter(2))
    smaller = cfg.with_values({"train.resume": "auto", "train.batch_size": 1, "train.grad_accum": 4}, "test")
    with pytest.raises(ConfigError, match=r"train\.batch_size was 4 and is 1 now"):
        train_in(smaller, folder)
    folder.write_json("plan.json", {**folder.read_json("plan.json"), "batch_size": 1, "grad_accum": 4, "resized": True})
    train_in(smaller, folder)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert len(lines) > 2
