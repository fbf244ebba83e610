"""Two runs side by side: what was set differently, what came out, and whether that may be compared."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from in_process import Finished, Inputs, train

from sftplay import cli
from sftplay.launch.run_folder import RunFolder
from sftplay.report.compare import compare_runs, comparison_table

SETTINGS = {"train__max_steps": 4, "eval__after": True, "eval__max_new_tokens": 2}


@pytest.fixture(scope="module")
def slow_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished(train(tmp_path_factory.mktemp("a"), inputs, train__learning_rate=0.001, **SETTINGS))


@pytest.fixture(scope="module")
def fast_run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The same run with another rate and rank, on the same rows."""
    changes = {"train__learning_rate": 0.05, "tuning__lora__r": 8}
    return finished(train(tmp_path_factory.mktemp("b"), inputs, **SETTINGS, **changes))


def finished(run: Finished) -> Finished:
    run.folder.update_status(state="done", step=run.outcome.step, train_seconds=run.outcome.train_seconds)
    run.folder.close_attempt("done")
    (run.folder.path / "launch.txt").write_text("python -m sftplay.tasks.worker run\n")
    return run


@pytest.fixture
def copies(slow_run: Finished, fast_run: Finished, tmp_path: Path) -> list[RunFolder]:
    """Both runs, to spoil."""
    for name, run in (("a", slow_run), ("b", fast_run)):
        shutil.copytree(run.folder.path, tmp_path / name)
    return [RunFolder(tmp_path / name) for name in "ab"]


def row(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (match,) = (row for row in rows if name in (row.get("name"), row.get("key")))
    return match


def figures(run: Finished, tag: str = "after") -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run.folder.eval / f"{tag}.json").read_text())
    return content


def test_config_values_that_differ_are_listed_with_both_values_and_no_others(slow_run: Finished, fast_run: Finished):
    config = {r["key"]: (r["a"], r["b"]) for r in compare_runs(slow_run.folder, fast_run.folder)["config"]}
    # The two live in folders of their own, so their caches do too.
    config.pop("data.processed_dir")
    assert config == {"train.learning_rate": (0.001, 0.05), "tuning.lora.r": (4, 8)}


def test_figures_stand_side_by_side_with_their_difference(slow_run: Finished, fast_run: Finished):
    comparison = compare_runs(slow_run.folder, fast_run.folder)
    a, b = figures(slow_run)["loss"], figures(fast_run)["loss"]
    assert row(comparison["figures"], "after loss") == {"name": "after loss", "a": a, "b": b, "difference": b - a}
    assert {r["name"] for r in comparison["figures"]} == {f"after {key}" for key in figures(slow_run)}
    training = comparison["training"]
    assert row(training, "last training_loss")["a"] == slow_run.losses[-1]
    assert row(training, "step")["b"] == 4
    assert row(training, "median tokens_per_s")["b"] == median(line["tokens_per_s"] for line in fast_run.metrics)
    assert row(training, "train_seconds")["a"] == slow_run.outcome.train_seconds


def test_the_same_rows_are_known_to_be_the_same(slow_run: Finished, fast_run: Finished):
    comparison = compare_runs(slow_run.folder, fast_run.folder)
    assert comparison["same_held_out"] is True
    assert comparison["warnings"] == []
    assert row(comparison["data"], "order_sha256")["a"] == row(comparison["data"], "order_sha256")["b"]
    assert comparison["versions"] == []


def change_fingerprint(folder: RunFolder, *, more_tokens: int = 0) -> None:
    report = folder.read_json("data_report.json")
    report["sources"]["held_out"]["trainable_tokens"] += more_tokens
    folder.write_json("data_report.json", {**report, "fingerprint": "another"})


def keep_answers(folder: RunFolder, n: int) -> None:
    lines = (folder.eval / "after.jsonl").read_text().splitlines()
    (folder.eval / "after.jsonl").write_text("".join(f"{line}\n" for line in lines[:n]))


@pytest.mark.parametrize(
    ("more_tokens", "answers", "same", "warning"),
    [
        (0, 4, True, ""),  # other options, the same rows and tokens
        (5, 4, True, "loss and perplexity do not compare, answers do"),
        (0, 3, False, "the held-out rows differ"),
        (0, 0, None, "it is not known whether both were measured on the same"),
    ],
)
def test_without_equal_fingerprints_answers_and_tokens_decide_whether_rows_are_the_same(
    copies: list[RunFolder], more_tokens: int, answers: int, same: bool | None, warning: str
):
    change_fingerprint(copies[1], more_tokens=more_tokens)
    keep_answers(copies[1], answers)
    comparison = compare_runs(*copies)
    assert comparison["same_held_out"] is same
    assert len(comparison["warnings"]) == bool(warning)
    assert warning in "".join(comparison["warnings"])


def test_rows_of_another_file_that_one_run_was_measured_on_later_are_not_the_same(
    copies: list[RunFolder], slow_run: Finished, tmp_path: Path
):
    held_out = slow_run.folder.read_json("data_report.json")["sources"]["held_out"]["path"]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f"{line}\n" for line in Path(held_out).read_text().splitlines()[5:9]))
    words = ["eval", "--config", str(copies[1].resolved), "--run", str(copies[1].path), f"data.val_path={other}"]
    assert cli.main([*words, "eval.limit=4"]) == 0
    comparison = compare_runs(*copies)
    assert comparison["same_held_out"] is False
    assert comparison["warnings"][0].startswith("the held-out rows differ: figures of one run do not compare")


def test_another_machine_another_version_and_a_run_that_is_not_done_are_said(copies: list[RunFolder]):
    manifest = copies[1].read_json("manifest.json")
    manifest["machine"]["gpus"] = [{"name": "NVIDIA H100"}]
    manifest["machine"]["libraries"]["torch"] = "1.0"
    copies[1].write_json("manifest.json", manifest)
    copies[1].update_status(state="stopped", attempts=[{"cause": "SIGTERM"}, {"cause": None}])
    comparison = compare_runs(*copies)
    assert row(comparison["versions"], "torch")["b"] == "1.0"
    assert row(comparison["versions"], "machine")["b"] == "NVIDIA H100"
    text = " | ".join(comparison["warnings"])
    assert "run b is stopped: its figures are not final" in text
    assert "run b was resumed" in text
    assert "the machines differ: speed, seconds and memory do not compare" in text


def test_a_figure_that_is_not_finite_or_missing_has_no_difference_and_stays_json(copies: list[RunFolder]):
    copies[0].write_json("eval/after.json", {"n": 4, "loss": math.nan, "chrf": 0.5})
    comparison = compare_runs(*copies)
    assert row(comparison["figures"], "after loss")["difference"] is None
    assert row(comparison["figures"], "after chrf") == {"name": "after chrf", "a": 0.5, "b": None, "difference": None}
    json.dumps(comparison, allow_nan=False)


def test_the_table_shows_rounded_figures_and_what_differs(slow_run: Finished, fast_run: Finished):
    lines = comparison_table(compare_runs(slow_run.folder, fast_run.folder)).splitlines()
    a, b = figures(slow_run)["loss"], figures(fast_run)["loss"]
    (held_out,) = (line.split() for line in lines if line.startswith("  after loss"))
    assert held_out[2:] == [f"{a:.4g}", f"{b:.4g}", f"{'+' if b > a else '−'}{abs(b - a):.4g}"]
    (rate,) = (line.split() for line in lines if "train.learning_rate" in line)
    assert rate == ["train.learning_rate", "0.001", "0.05"]
    assert "versions: no difference" in lines
    assert max(map(len, lines)) <= 200


def test_values_of_the_config_are_written_as_in_the_config(copies: list[RunFolder]):
    values = {"eval.after": ("true", "null"), "eval.some": ('""', "no"), "eval.names": ('[a, "true"]', "[null, 1.5]")}
    for side, folder in enumerate(copies):
        folder.resolved.write_text("eval:\n" + "".join(f"  {key[5:]}: {pair[side]}\n" for key, pair in values.items()))
    lines = comparison_table(compare_runs(*copies)).splitlines()
    for key, pair in values.items():
        (line,) = (line for line in lines if line.startswith(f"  {key} "))
        assert line.split() == [key, *" ".join(pair).split()]
