"""Two real ranks over gloo. Each has its own figures in metrics.jsonl and on TensorBoard, and they add up."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import START, prepare_two_ranks, run_script
from plain_loss import label_losses
from small_run import Inputs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from sftplay.config.load import load_resolved
from sftplay.data.pipeline import load_examples
from sftplay.machine.ports import free_port
from sftplay.model.tokenizer import load_tokenizer

STEPS = 2

FORK_RANKS = (
    START
    + """
import sys
import sftplay.tasks.sft.task
children = [start(*sys.argv[1:3], rank) for rank in range(2)]
sys.exit(max((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), key=abs))
"""
)


@dataclass(frozen=True)
class TwoRanks:
    """The files of a run of two ranks."""

    lines: list[dict[str, Any]]
    board: EventAccumulator
    rows: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def two_ranks(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    home = tmp_path_factory.mktemp("ranks")
    folder = prepare_two_ranks(
        home, inputs, logging__backend="tensorboard", tuning__mode="full",
        train__max_steps=STEPS, train__learning_rate=1e-12, train__batch_size=2, train__grad_accum=2, data__split=0,
        data__val_path=None,
    )  # fmt: skip
    folder.write_json("plan.json", {"peak_bytes": 3 * 2**30, "world_size": 2})
    run_script(FORK_RANKS, folder.path, free_port(0))
    board = EventAccumulator(str(folder.path / "tb"), size_guidance={"scalars": 0})
    board.Reload()
    cfg = load_resolved(folder.resolved)
    rows = load_examples(cfg, load_tokenizer(cfg.model)).train
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return TwoRanks(lines, board, {row["row"]: row for row in rows})


def test_each_rank_has_the_loss_of_its_own_rows_and_the_line_weighs_it_by_its_label_tokens(
    two_ranks: TwoRanks, tiny_llama: Path
):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    assert [line["step"] for line in two_ranks.lines] == list(range(1, STEPS + 1))
    for line in two_ranks.lines:
        assert [len(ids) for ids in line["row_ids"]] == [4, 4]
        for rank, ids in zip(line["ranks"], line["row_ids"], strict=True):
            losses = torch.cat([label_losses(model, two_ranks.rows[n]) for n in ids]).detach()
            assert rank["label_tokens"] == len(losses)
            assert rank["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
            assert 0 < rank["padding_share"] < 1
            assert rank["tokens_per_s"] > 0
        one, other = (rank["loss"] for rank in line["ranks"])
        assert abs(one - other) > 1e-3
        weighted = sum(rank["loss"] * rank["label_tokens"] for rank in line["ranks"]) / line["label_tokens"]
        assert line["loss"] == pytest.approx(weighted, rel=1e-9)
        assert [rank["predicted_peak_bytes"] for rank in line["ranks_memory"]] == [3 * 2**30] * 2


def test_the_boards_curves_are_those_of_both_ranks(two_ranks: TwoRanks):
    tags = set(two_ranks.board.Tags()["scalars"])
    for rank in (0, 1):
        for name in ("loss", "tokens_per_s", "label_tokens", "padding_share"):
            shown = [(event.step, event.value) for event in two_ranks.board.Scalars(f"train/rank{rank}/{name}")]
            written = [(line["step"], line["ranks"][rank][name]) for line in two_ranks.lines]
            assert [step for step, _ in shown] == [step for step, _ in written]
            assert [value for _, value in shown] == pytest.approx([value for _, value in written], rel=1e-6)
        assert f"train/rank{rank}/predicted_peak_bytes" in tags
    assert {f"train/{name}" for name in ("loss", "padded_tokens_per_s", "samples_per_s", "model_tflops_per_s")} <= tags
    assert "train/step_split/forward_backward_s" in tags
