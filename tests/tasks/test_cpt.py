"""Runs on documents and chats: what is reported is what the model received, and a resumed run continues exactly."""

from __future__ import annotations

import json
import math
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import pytest
from in_process import Finished, Inputs, StopAfter, assert_same_course, new_run, train, train_in
from small_run import write_small_run
from transformers import AutoTokenizer

from sftplay.cli import main
from sftplay.data.mixture.mixture import Mixture, source_and_block
from sftplay.launch.checkpoints import read_marker
from sftplay.runs.finished_run import stored_template
from sftplay.train.exact_batch import ExactBatchMixin

WORDS = ["river", "stone", "lamp", "garden", "winter", "bread", "music", "copper"]
BLOCK = 64


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of a run on a mixture of 60 documents and 40 chats."""
    home, draw = tmp_path_factory.mktemp("mixture"), random.Random(1)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    documents = [{"text": words(60)} for _ in range(60)]
    chats = [{"prompt": words(3), "completion": words(3)} for _ in range(40)]
    return {
        "task_mode": "cpt_mixed",
        "data__train_path": None,
        "data__val_path": None,
        "data__processed_dir": str(home / "processed"),
        "datasets": [
            {"name": "domain", "path": write_rows(home / "documents.jsonl", documents), "type": "cpt", "weight": 0.8},
            {"name": "chat", "path": write_rows(home / "chats.jsonl", chats), "type": "chat", "weight": 0.2},
        ],
        "data__split": 0.1,
        "cpt__block_size": BLOCK,
        "train__eval_steps": 3,
        "train__save_steps": 3,
        "train__max_steps": 6,
        "train__batch_size": 4,
    }


@pytest.fixture(scope="module")
def received() -> list[list[dict[str, Any]]]:
    """Micro-batches that the model got in the run of `finished`."""
    return []


@pytest.fixture(scope="module")
def finished(
    inputs: Inputs, mixture: dict[str, Any], received: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> Finished:
    real = ExactBatchMixin._run_micro_batch

    def keep(self: Any, model: Any, micro_batch: Any, *, n_items: Any) -> Any:
        source, loss = real(self, model, micro_batch, n_items=n_items)
        received.append({**micro_batch, "loss_sum": float(loss.double() * n_items)})
        return source, loss

    with patch.object(ExactBatchMixin, "_run_micro_batch", keep):
        return train(tmp_path_factory.mktemp("finished"), inputs, **mixture)


def test_tokens_and_losses_that_are_reported_are_those_that_the_model_received(finished: Finished, received: list[Any]):
    counted: dict[str, Counter[str]] = {"domain": Counter(), "chat": Counter()}
    for batch in received:
        of_source = counted[("domain", "chat")[int(batch["source"])]]
        of_source["label_tokens"] += int((batch["labels"][:, 1:] != -100).sum())
        of_source["loss_sum"] += batch["loss_sum"]
    last, report = finished.metrics[-1], json.loads((finished.folder.path / "data_report.json").read_text())
    assert set(last["sources"]) == set(report["sources"]) == {"domain", "chat"}
    total = sum(each["label_tokens"] for each in counted.values())
    assert last["label_tokens_seen"] == total
    for name, found in last["sources"].items():
        assert found["label_tokens"] == counted[name]["label_tokens"]
        assert found["share"] == pytest.approx(counted[name]["label_tokens"] / total, abs=1e-6)
        assert found["loss"] == pytest.approx(counted[name]["loss_sum"] / counted[name]["label_tokens"], rel=1e-6)
    assert sum(found["tokens"] for found in last["sources"].values()) == last["tokens_seen"]
    assert last["sources"]["domain"]["share"] == pytest.approx(0.8, abs=0.05)
    row_ids = [row for line in finished.metrics for row in line["row_ids"][0]]
    planned = {name: entry["planned_rows"] for name, entry in report["sources"].items()}
    assert Counter(("domain", "chat")[source_and_block(row)[0]] for row in row_ids) == planned


def test_the_held_out_loss_of_each_source_is_measured_and_their_mean_is_that_of_all_tokens(finished: Finished):
    found = json.loads((finished.folder.eval / "step-6.json").read_text())
    sources = found["sources"]
    assert set(sources) == {"domain", "chat"}
    total = sum(each["label_tokens"] for each in sources.values())
    mean = sum(each["loss"] * each["label_tokens"] for each in sources.values()) / total
    assert found["loss"] == pytest.approx(mean, rel=1e-5)


def test_a_resumed_run_goes_on_with_the_next_block_and_reads_none_before_it(
    inputs: Inputs, mixture: dict[str, Any], finished: Finished, tmp_path: Path
):
    cfg, folder = new_run(tmp_path, inputs, **mixture)
    assert train_in(cfg, folder, StopAfter(3)).outcome.stop_signal == signal.SIGTERM
    marker = read_marker(folder.checkpoints / "checkpoint-3")
    assert {name: set(each) for name, each in marker["sources"].items()} == {
        name: {"tokens", "label_tokens", "loss_sum"} for name in ("domain", "chat")
    }
    read: list[int] = []
    real = Mixture.__getitem__

    def keep(self: Mixture, row: int) -> dict[str, Any]:
        read.append(row)
        return real(self, row)

    with patch.object(Mixture, "__getitem__", keep):
        resumed = train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    assert_same_course(resumed, finished)
    assert set(read) - {0} == set(range(24, 48))  # the first row is shown in samples/


def test_one_source_of_documents_trains_by_train_path_alone(
    inputs: Inputs, mixture: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {
        **mixture, "task_mode": "dapt", "datasets": [], "data__train_path": mixture["datasets"][0]["path"],
        "train__max_steps": None, "train__epochs": 1.0, "train__best_metric": "loss",
    }  # fmt: skip
    run = train(tmp_path, inputs, **changes)
    report = json.loads((run.folder.path / "data_report.json").read_text())
    counts = report["sources"]["documents"]
    # One epoch: each token is new in one block, and the last step is filled from the next epoch.
    assert run.metrics[-1]["label_tokens_seen"] >= counts["label_tokens"]
    assert run.outcome.step == math.ceil(counts["tokens"] / (BLOCK - 1) / 8)
    assert run.trainer.state.best_metric == pytest.approx(
        min(json.loads(path.read_text())["loss"] for path in run.folder.eval.glob("step-*.json"))
    )
    capsys.readouterr()
    assert stored_template(AutoTokenizer.from_pretrained(run.folder.result), run.folder)
    assert capsys.readouterr().out == ""  # documents are learned without a template, so it is the base's
    trained = changes["data__train_path"]
    assert main(["eval-test", "--run", str(run.folder.path), f"data.test_path={trained}"]) == 4
    said = capsys.readouterr().err
    assert "of its rows were trained on" in said
    assert "take them out of the test file" in said
    assert "contamination" not in said  # that key leaves rows out of a training


@pytest.mark.slow
def test_two_processes_train_on_a_mixture_as_one_does_also_when_resumed(
    inputs: Inputs, mixture: dict[str, Any], finished: Finished, sftplay: Callable[..., CompletedProcess[str]],
    tmp_path: Path,
):  # fmt: skip
    config = write_small_run(tmp_path, inputs, train__warmup_ratio=0.0, **mixture)
    folder = tmp_path / "outputs" / "run"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    done = sftplay("train", "--documents", "--config", config, "--nproc", 2)
    assert done.returncode == 0, done.stderr
    one, two = finished.metrics, lines()
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-5)
    assert [sorted(chain(*line["row_ids"])) for line in two] == [sorted(line["row_ids"][0]) for line in one]
    held_out = [
        json.loads((each / "eval" / "step-6.json").read_text())["sources"] for each in (finished.folder.path, folder)
    ]
    for name, found in one[-1]["sources"].items():
        assert two[-1]["sources"][name] == {**found, "loss": pytest.approx(found["loss"], abs=1e-5)}
        expected = {**held_out[0][name], "loss": pytest.approx(held_out[0][name]["loss"], abs=1e-5)}
        assert held_out[1][name] == expected
    shutil.rmtree(folder / "checkpoints" / "checkpoint-6")
    shutil.rmtree(folder / "adapter")
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "state": "stopped"}))
    done = sftplay("resume", "--config", config, "--nproc", 2)
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stdout
    for key in ("loss", "row_ids", "sources", "source_losses", "label_tokens_seen"):
        assert [line[key] for line in lines()] == [line[key] for line in two], key
