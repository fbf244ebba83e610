"""Figures of held-out pairs: what counts as right, with which error, and what is said of answers that become rare."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from reference_runs import config_of, pairs_of, plain_sums, run_folder, small_model, state_at, trainer_of

from sftplay.evaluate.evaluate import figures_table
from sftplay.tasks.preference.measuring import (
    EvaluatePairs,
    describe_fall,
    describe_rows,
    measure,
    order_share,
    order_stderr,
    pick_prompts,
    share_right,
)
from sftplay.tasks.preference.reference import FILE, ComputeReferences, RowLogps

SUMS = torch.tensor([[-10.0, -12.0], [-9.0, -8.0], [-7.0, -7.0], [-20.0, -30.0]])
REFERENCE = torch.tensor([[-11.0, -11.0], [-9.5, -8.5], [-7.0, -8.0], [-15.0, -20.0]])
TOKENS = torch.tensor([[5, 6], [3, 4], [2, 7], [10, 10]])
LOGPS = RowLogps(SUMS, TOKENS)


def test_figures_of_pairs_are_those_of_a_hand_calculation(tmp_path: Path):
    figures = describe_rows(config_of(tmp_path), None, found=LOGPS, reference=REFERENCE)
    # h of the chosen minus h of the rejected answers: 1 - (-1) = 2, 0.5 - 0.5 = 0, 0 - 1 = -1, -5 - (-10) = 5
    margins = [0.2, 0.0, -0.1, 0.5]
    assert figures["n"] == 4
    assert figures["accuracy"] == pytest.approx(2.5 / 4)
    assert figures["stderr"] == pytest.approx(math.sqrt(0.625 * 0.375 / 4))
    assert figures["margin"] == pytest.approx(sum(margins) / 4)
    assert figures["loss"] == pytest.approx(sum(math.log1p(math.exp(-margin)) for margin in margins) / 4)
    assert figures["logp_accuracy"] == pytest.approx(2.5 / 4)  # right, wrong, a tie, right
    assert figures["logps/chosen"] == pytest.approx(-46 / 4)
    assert figures["rewards/rejected"] == pytest.approx(0.1 * (-1 + 0.5 + 1 - 10) / 4)
    assert figures["kl"] == pytest.approx((1 + 0.5 + 0 - 5 - 1 + 0.5 + 1 - 10) / 8)
    assert (figures["tokens/chosen"], figures["tokens/rejected"]) == (5, 6.75)


def test_a_model_that_is_its_own_reference_has_half_of_the_pairs_right_and_the_loss_ln_2(tmp_path: Path):
    figures = describe_rows(config_of(tmp_path), None, found=LOGPS, reference=SUMS)
    assert (figures["accuracy"], figures["margin"], figures["kl"]) == (0.5, 0, 0)
    assert figures["loss"] == pytest.approx(math.log(2), abs=1e-12)


def test_simpo_compares_means_of_tokens_and_has_no_distance_to_a_reference(tmp_path: Path):
    figures = describe_rows(config_of(tmp_path, task_mode="simpo"), None, found=LOGPS, reference=None)
    # -2 > -2, -3 < -2, -3.5 < -1, -2 > -3
    assert figures["accuracy"] == pytest.approx(1.5 / 4)
    assert figures["margin"] == pytest.approx(2 * (0 - 1 - 2.5 + 1) / 4)
    assert "kl" not in figures


def test_ties_count_half():
    assert share_right(torch.tensor([[1.0, 1.0], [2.0, 1.0], [0.0, 1.0], [3.0, 1.0]])) == 2.5 / 4


def test_order_share_counts_all_pairs_of_a_wanted_and_another_answer():
    generator = torch.Generator().manual_seed(0)
    wanted, others = (torch.randint(0, 6, (n,), generator=generator).double() for n in (7, 11))
    counted = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(wanted.tolist(), others.tolist())]
    assert order_share(wanted, others) == pytest.approx(sum(counted) / 77)


def test_the_error_of_an_order_share_is_the_published_one():
    # Hanley and McNeil 1982, table II: an area of 0.893 with 51 abnormal and 58 normal cases has the error 0.032.
    assert order_stderr(0.893, 51, 58) == pytest.approx(0.032, abs=1e-3)


def answers(places: list[int], desirable: list[bool]) -> Dataset:
    return Dataset.from_dict({"row": places, "desirable": desirable})


def test_answers_that_came_in_pairs_are_compared_within_them_and_others_with_all(tmp_path: Path):
    cfg = config_of(tmp_path, task_mode="kto")
    # rewards of the first answers: 0.1, 0.05, 0, -0.5
    paired = describe_rows(cfg, answers([7, 7, 9, 9], [True, False, False, True]), found=LOGPS, reference=REFERENCE)
    assert (paired["pairs"], paired["accuracy"]) == (2, 0.5)
    single = describe_rows(cfg, answers([1, 2, 3, 4], [True, True, False, False]), found=LOGPS, reference=REFERENCE)
    assert single["accuracy"] == 1.0
    assert "pairs" not in single
    assert single["margin"] == pytest.approx(0.075 + 0.25)
    # z0 = max(0, mean of -1, 0.5, 1, -10) = 0: the losses are s(-0.1), s(-0.05), s(0), s(-0.5)
    losses = [1 / (1 + math.exp(value)) for value in (0.1, 0.05, 0.0, 0.5)]
    assert single["reference_point"] == 0
    assert single["loss"] == pytest.approx(sum(losses) / 4)


def test_answers_of_one_kind_alone_have_no_accuracy(tmp_path: Path):
    cfg = config_of(tmp_path, task_mode="kto")
    figures = describe_rows(cfg, answers([1, 2, 3, 4], [True] * 4), found=LOGPS, reference=REFERENCE)
    assert "accuracy" not in figures
    assert "margin" not in figures
    assert figures["logps/chosen"] == -11.5


def test_prompts_that_are_equal_are_answered_once():
    rows = {"input_ids": [[1, 2, 3], [1, 2, 4], [5, 6], [7, 8], [9, 1]], "prompt_tokens": [2, 2, 1, 1, 1]}
    assert pick_prompts(rows, None) == [0, 2, 3, 4]
    assert pick_prompts(rows, 2) == [0, 3]


def test_the_table_has_both_sides_and_a_hole_where_a_figure_is_missing():
    lines = figures_table({"before": {"n": 4, "accuracy": 0.5}, "after": {"n": 4, "accuracy": 0.75, "kl": 1}}).split(
        "\n"
    )
    assert [line.split() for line in lines] == [
        ["base", "tuned"], ["n", "4", "4"], ["accuracy", "0.5000", "0.7500"], ["kl", "nan", "1"]
    ]  # fmt: skip


class Texts:
    """Stands in for the tokenizer, the renderer and the texts of rows."""

    pad_token_id, end_token_ids, bos_token_id = 0, (2,), None

    def __init__(self, pairs: Any) -> None:
        self.tokenizer, self.pairs = self, pairs
        pairs.renderer, pairs.records = self, lambda _side: [self._record(row) for row in pairs.held_out]

    def _record(self, row: Any) -> Any:
        ids = row["input_ids"][: row["prompt_tokens"]]
        return type("Record", (), {"prompt_ids": lambda _self, _renderer: ids})()

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [self.decode([token for token in row if token]) for row in rows]

    def __call__(self, text: str, **_: Any) -> Any:
        return {"input_ids": text.split()}


def measured(model: Any, pairs: Any, cfg: Any, path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    Texts(pairs)
    figures = measure(model, pairs, cfg=cfg, path=path)
    assert json.loads(path.read_text()) == figures
    return figures, [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]


def test_before_a_run_the_model_is_compared_with_itself_and_answers_stand_next_to_the_pair(tmp_path: Path):
    cfg = config_of(tmp_path, tuning__mode="full", eval__limit=3, eval__max_new_tokens=4)
    pairs, folder, model = pairs_of(), run_folder(tmp_path), small_model()
    figures, lines = measured(model, pairs, cfg, folder.eval / "before.json")
    assert (figures["n"], figures["accuracy"], figures["answers"]) == (5, 0.5, 3)
    assert figures["loss"] == pytest.approx(math.log(2), abs=1e-6)
    sums = plain_sums(model, pairs.held_out)
    assert figures["logps/chosen"] == pytest.approx(float(sums[:, 0].mean()), rel=1e-6)
    assert [line["row"] for line in lines] == [100, 101, 103]
    row = pairs.held_out[1]
    start, end = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
    assert lines[1]["reference"] == " ".join(map(str, row["input_ids"][start:end]))
    assert lines[1]["rejected"] == " ".join(map(str, row["input_ids"][end:]))
    assert lines[1]["prediction_tokens"] == len(lines[1]["prediction"].split()) <= 4
    assert lines[1]["margin"] == 0


def test_after_a_run_the_model_is_compared_with_what_the_run_folder_keeps(tmp_path: Path):
    small_model().save_pretrained(tmp_path / "model")
    cfg = config_of(tmp_path, tmp_path / "model", tuning__mode="full", eval__limit=2, eval__max_new_tokens=2)
    pairs, folder = pairs_of(), run_folder(tmp_path)
    callback = ComputeReferences(cfg, pairs, folder=folder)
    callback.attach(trainer_of(small_model()))
    callback.on_train_begin(None, state_at(0), None)
    trained = small_model(seed=1)
    figures, lines = measured(trained, pairs, cfg, folder.eval / "after.json")
    ratios = plain_sums(trained, pairs.held_out) - plain_sums(small_model(), pairs.held_out)
    margins = 0.1 * (ratios[:, 0] - ratios[:, 1])
    assert figures["margin"] == pytest.approx(float(margins.mean()), rel=1e-5)
    assert figures["accuracy"] == float((margins > 0).double().mean())
    assert figures["kl"] == pytest.approx(float(ratios.mean()), rel=1e-5)
    assert lines[0]["margin"] == pytest.approx(float(margins[0]), rel=1e-4)
    assert (folder.path / FILE).is_file()


def evaluated(tmp_path: Path, trained: Any, **values: Any) -> tuple[Any, Any, Any]:
    """A run's callback after an evaluation of `trained` at step 4."""
    small_model().save_pretrained(tmp_path / "model")
    cfg = config_of(tmp_path, tmp_path / "model", tuning__mode="full", eval__limit=2, **values)
    pairs, folder = pairs_of(kto=cfg.task_mode == "kto"), run_folder(tmp_path)
    trainer = trainer_of(small_model())
    trainer.processing_class = Texts(pairs)
    for callback in (ComputeReferences(cfg, pairs, folder=folder), EvaluatePairs(cfg, pairs, folder=folder.eval)):
        callback.attach(trainer)
        if isinstance(callback, ComputeReferences):
            callback.on_train_begin(None, state_at(0), None)
    trainer.model = trainer.model_wrapped = trained
    output = trainer.evaluation_loop(None, "Evaluation", metric_key_prefix="eval")
    callback.on_evaluate(None, state_at(4), None)
    return trainer, output, folder


@pytest.mark.parametrize("task", ["dpo", "ipo", "kto", "orpo", "simpo"])
def test_while_a_run_trains_its_held_out_rows_have_the_figures_of_the_measurements(tmp_path: Path, task: str):
    trained = small_model(seed=1)
    trainer, output, folder = evaluated(tmp_path, trained, task_mode=task)
    stored = json.loads((folder.eval / "step-4.json").read_text())
    assert stored["step"] == 4
    assert stored["n"] == output.num_samples == 5
    names = {"loss", "accuracy", "stderr", "margin", "logps/chosen", "rewards/chosen", "tokens/rejected"}
    assert {f"eval_{name}" for name in names} <= set(output.metrics) == set(trainer.held_out_figures)
    for name in names:
        assert output.metrics[f"eval_{name}"] == stored[name]
    assert len((folder.eval / "step-4.jsonl").read_text().splitlines()) == 2
    if task != "kto":
        sums = plain_sums(trained, pairs_of().held_out)
        assert stored["logps/chosen"] == pytest.approx(float(sums[:, 0].mean()), rel=1e-6)


def watch(capsys: pytest.CaptureFixture[str], tmp_path: Path, *lines: tuple[float, float], **values: Any) -> list[str]:
    """The warnings about lines of training with these log-ratios of chosen answers, and margins."""
    cfg, pairs = config_of(tmp_path, **values), pairs_of(n_held_out=0)
    callback = EvaluatePairs(cfg, pairs, folder=tmp_path)
    for step, (ratio, margin) in enumerate(lines, start=1):
        logs = {"rewards/chosen": 0.1 * ratio, "logps/chosen": -50 + ratio, "rewards/margins": margin}
        callback.on_log(None, state_at(step), None, logs=logs)
    return [line for line in capsys.readouterr().out.splitlines() if "warning" in line]


def test_chosen_answers_that_become_rare_while_margins_rise_are_warned_of_once(tmp_path: Path, capsys: Any):
    (line,) = watch(capsys, tmp_path, (0, 0), (-0.5, 0.2), (-3, 0.4), (-9, 0.8))
    assert "step 3: chosen training answers are 20.1 times less likely than under the reference (-3.0 nats)" in line
    assert "though margins rise: rejected ones fall faster" in line
    assert "preference.rpo_alpha: 1 adds their likelihood to the loss" in line


@pytest.mark.parametrize(
    "lines",
    [
        [(0, 0), (2, 0.4), (5, 0.8)],  # chosen answers become likelier
        [(0, 0), (-3, -0.1)],  # the run goes wrong altogether, which the loss says
        [(0, 0), (-0.9, 0.3)],  # hardly less likely
    ],
)
def test_nothing_is_warned_of_where_chosen_answers_stay_likely_or_margins_fall(lines: Any, tmp_path: Path, capsys: Any):
    assert watch(capsys, tmp_path, *lines) == []


def test_without_a_reference_the_first_line_is_what_chosen_answers_are_compared_with(tmp_path: Path, capsys: Any):
    (line,) = watch(capsys, tmp_path, (-40, 0.1), (-42, 0.3), task_mode="simpo")
    assert "7.39 times less likely than at first (-2.0 nats)" in line
    assert "a lower train.learning_rate" in line


def test_the_warning_names_what_helps_this_run(tmp_path: Path):
    cfg = config_of(tmp_path, preference__rpo_alpha=0.5)
    assert "a larger preference.rpo_alpha" in describe_fall(cfg, -2, where="held-out")
    assert "10^22 times less likely" in describe_fall(config_of(tmp_path), -50.0, where="held-out")
