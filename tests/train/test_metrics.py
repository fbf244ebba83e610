"""Every figure of a line of metrics compared with counts by hand, plain torch losses and the rows it names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, StopAfter, built, new_run, train_in
from plain_loss import mean_loss as plain_mean
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from sftplay.config.load import load_resolved
from sftplay.heartbeat import Heartbeat
from sftplay.train.exact_batch import StepCounts
from sftplay.train.metrics import (
    CostModel,
    MetricsWriter,
    RankShare,
    TrackPhases,
    describe_ranks,
    describe_speed,
    mean_loss,
)
from sftplay.train.micro_batches import Collator, MicroBatcher

GIB = 2**30
ROWS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 4},
    {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, -100, 8, 9], "row": 1},
    {"input_ids": [5, 6], "labels": [5, 6], "row": 9},
]
"""3 + 5 + 2 tokens; 2 + 2 + 1 of them are learned, because the first token of a row is never predicted."""

LLAMA_LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
"""Weights of the linears in a layer of the tiny Llama: queries and output, keys and values, the MLP."""


class Clock:
    """A clock that moves only when a test sets `now`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr("sftplay.heartbeat.time", fake)
    return fake


def writer_at(path: Path, trainer: Any, state: Any, costs: CostModel | None = None) -> MetricsWriter:
    """A writer after the begin of training."""
    writer = MetricsWriter(path, attempt=1, keep_row_ids=True, costs=costs or CostModel())
    writer.attach(trainer)
    writer.on_train_begin(None, state, TrainerControl())
    return writer


def line_of(writer: MetricsWriter, state: Any, loss: float = 9.0) -> tuple[dict[str, Any], dict[str, float]]:
    """The line of metrics that a log event writes, and the figures for trackers."""
    logs = {"loss": loss, "learning_rate": 0.1}
    writer.on_log(None, state, TrainerControl(), logs)
    return json.loads(writer.path.read_text().splitlines()[-1]), logs


def test_the_live_line_shows_the_rate_that_its_step_has_used(
    inputs: Inputs, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    trainer = built(tmp_path, inputs, data__split=None, train__lr_scheduler="linear", train__warmup_ratio=0).trainer
    trainer.create_optimizer_and_scheduler(4)
    state = TrainerState(global_step=0, max_steps=4, logging_steps=10)
    writer, shown = writer_at(tmp_path / "metrics.jsonl", trainer, state), list[str]()
    monkeypatch.setattr("sftplay.train.metrics.log.progress", lambda *_, text, **__: shown.append(text))
    writer._shown_at, trainer.last_loss = -10.0, torch.tensor(1.0)
    writer.on_step_begin(None, state, TrainerControl())
    used = trainer.lr_scheduler.get_last_lr()[0]
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    writer.on_step_end(None, state, TrainerControl())
    assert f"rate {used:.2e}" in shown[0]
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(0.75 * used)


def test_counts_rates_and_loss_of_known_rows_by_hand(inputs: Inputs, tmp_path: Path, clock: Clock):
    trainer = built(tmp_path, inputs, tuning__mode="full", data__split=None).trainer
    trainer.model.double()
    trainer.micro_batcher = MicroBatcher(2)
    costs = CostModel(lambda lengths, labels: sum(1000 * n for n in lengths) + 10 * labels, 20_100.0)
    state = TrainerState(global_step=0, max_steps=4, logging_steps=1)
    writer = writer_at(tmp_path / "metrics.jsonl", trainer, state, costs)
    windows, count = trainer.get_batch_samples(iter([Collator(0)(ROWS)]), 1, torch.device("cpu"))
    trainer.training_step(trainer.model, windows[0], count)
    clock.now += 2.0
    state.global_step = 1
    line, shown = line_of(writer, state)
    assert (line["label_tokens"], line["tokens_seen"], line["row_ids"]) == (5, 10, [[4, 1, 9]])
    # Micro-batches: the rows of 5 and 3 tokens at a width of 5, the row of 2 alone.
    rates = [line[key] for key in ("tokens_per_s", "padded_tokens_per_s", "samples_per_s", "step_s")]
    assert rates == [10 / 2, (2 * 5 + 2) / 2, 3 / 2, 2.0]
    assert line["padding_share"] == round(2 / 12, 4)
    # 10 tokens at 1000 and 5 labels at 10 operations, in 2 s, of 20 100 a second.
    assert line["model_tflops_per_s"] == pytest.approx(10_050 / 2 / 1e12, rel=1e-4)
    assert line["mfu"] == pytest.approx(0.25, rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float64)
    assert line["loss"] == pytest.approx(plain_mean(model, ROWS), rel=1e-6)
    assert line["ranks"] == [
        {"loss": line["loss"], "tokens_per_s": 5.0, "label_tokens": 5, "padding_share": line["padding_share"]}
    ]
    assert shown["loss"] == line["loss"]
    assert shown["rank0/loss"] == line["loss"]


def test_parts_of_a_step_follow_the_clock_and_add_up_to_the_whole_step(tmp_path: Path, clock: Clock):
    heartbeat = Heartbeat()
    window = SimpleNamespace(
        heartbeat=heartbeat,
        take_counts=lambda: StepCounts(tokens=3, padded_tokens=3, label_tokens=1),
        source_names=(),
        take_figures=lambda logs: {},
    )
    state, control, marks = TrainerState(global_step=6, max_steps=8), TrainerControl(), TrackPhases(heartbeat)
    clock.now += 50.0  # before training begins
    writer = writer_at(tmp_path / "metrics.jsonl", window, state)
    clock.now += 0.25
    marks.on_train_begin(None, state, control)
    for step in (7, 8):
        clock.now += 1.0  # data
        marks.on_step_begin(None, state, control)
        clock.now += 2.0
        heartbeat.enter("backward")
        clock.now += 4.0
        with heartbeat.within("communication"):
            clock.now += 0.5
        marks.on_pre_optimizer_step(None, state, control)
        clock.now += 8.0
        state.global_step = step
        control.should_evaluate = control.should_save = step == 7
        marks.on_step_end(None, state, control)
        if step == 7:
            clock.now += 16.0
            marks.on_evaluate(None, state, control)
            clock.now += 32.0
            marks.on_save(None, state, control)
    line, shown = line_of(writer, state)
    assert line["step_split"] == {
        "data_s": 1.0, "forward_backward_s": 6.0, "optimizer_s": 8.0, "communication_s": 0.5, "evaluation_s": 8.0,
        "save_s": 16.0, "other_s": 0.125,
    }  # fmt: skip
    assert sum(line["step_split"].values()) == line["step_s"] == (clock.now - 150.0) / 2
    assert shown["step_split/save_s"] == 16.0
    clock.now += 3.0
    state.global_step = 9
    later, _ = line_of(writer, state)
    assert later["step_split"]["data_s"] == later["step_s"] == 3.0


def share(**values: Any) -> RankShare:
    defaults = {"tokens": 0, "padded_tokens": 0, "label_tokens": 0, "samples": 0, "loss_sum": 0.0, "flops": None,
             "peak_flops": None, "seconds": {"forward": 2.0}}  # fmt: skip
    return RankShare(**(defaults | values))


def test_each_rank_has_its_own_loss_and_weighs_by_its_labels():
    shares = [
        share(tokens=40, padded_tokens=50, label_tokens=10, loss_sum=20.0, samples=4, flops=3e12, peak_flops=4e12),
        share(tokens=20, padded_tokens=20, label_tokens=30, loss_sum=30.0, samples=4, flops=1e12, peak_flops=4e12,
              seconds={"forward": 1.5, "communication": 0.5}),
    ]  # fmt: skip
    ranks = describe_ranks(shares)
    assert [rank["loss"] for rank in ranks] == [2.0, 1.0]
    assert [rank["padding_share"] for rank in ranks] == [0.2, 0.0]
    assert [rank["tokens_per_s"] for rank in ranks] == [20.0, 10.0]
    assert mean_loss(shares) == (10 * 2.0 + 30 * 1.0) / 40
    speed = describe_speed(shares, steps=2)
    assert speed["samples_per_s"] == 4.0
    assert speed["padding_share"] == round(1 - 60 / 70, 4)
    assert speed["model_tflops_per_s"] == 2.0
    assert speed["mfu"] == 0.25  # 2 of twice 4 TFLOP/s
    assert speed["step_split"]["communication_s"] == 0.0
    assert speed["communication_max_s"] == 0.25


def rows_of(finished: Finished) -> dict[int, dict[str, Any]]:
    return {row["row"]: row for row in finished.trainer.train_dataset}


def test_each_line_counts_exactly_the_rows_since_the_line_before_over_a_signal_and_a_resume(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Five steps with a line every three: stopped by a signal after the second, then resumed to the end."""
    cfg, folder = new_run(
        tmp_path, inputs, tuning__mode="full", train__max_steps=5, train__save_steps=100, logging__steps=3,
        train__batch_size=2, train__learning_rate=1e-12,
    )  # fmt: skip
    folder.write_json("plan.json", {"peak_bytes": 5 * GIB, "allocated_bytes": GIB})
    train_in(cfg, folder, StopAfter(2))
    capsys.readouterr()
    run = train_in(load_resolved(folder.resolved).with_values({"train.resume": "auto"}, "test"), folder)
    assert "memory: planned" in capsys.readouterr().out
    lines, rows = run.metrics, rows_of(run)
    assert lines[-1]["ranks_memory"][0]["predicted_peak_bytes"] == 5 * GIB
    assert [(line["step"], line["attempt"], len(line["row_ids"][0])) for line in lines] == [
        (2, 1, 16), (3, 2, 8), (5, 2, 16),
    ]  # fmt: skip
    model, tokens_seen = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float64), 0
    for line in lines:
        trained = [rows[n] for n in line["row_ids"][0]]
        # The mean over all label tokens, and not that of the steps, which have different numbers of them.
        assert line["loss"] == pytest.approx(plain_mean(model, trained), rel=1e-5)
        lengths = [len(row["input_ids"]) for row in trained]
        labels = sum(label != -100 for row in trained for label in row["labels"][1:])
        tokens_seen += sum(lengths)
        assert (line["label_tokens"], line["tokens_seen"]) == (labels, tokens_seen)
        wall_s = line["step_s"] * (len(lengths) // 8)
        # Written with one and with three digits behind the point, which are few where the machine was busy.
        assert line["tokens_per_s"] * wall_s == pytest.approx(sum(lengths), rel=0.01, abs=0.06 * wall_s)
        assert line["samples_per_s"] * wall_s == pytest.approx(len(lengths), rel=0.01, abs=0.0006 * wall_s)
        assert sum(line["step_split"].values()) == pytest.approx(line["step_s"], abs=1e-5)
        # Six operations a weight and token, the head's for labels only, twelve a pair of attention's 2 x 32 heads.
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        flops = 6 * 2 * LLAMA_LAYER * sum(lengths) + 6 * 32 * 400 * labels + 12 * 2 * 32 * pairs
        assert line["model_tflops_per_s"] * 1e12 * wall_s == pytest.approx(flops, rel=0.01)
        assert line["mfu"] is None  # the peak of a CPU is not known
