"""The page and the comparison of runs on a mixture, from files as such a run leaves them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sftplay.atomic import write_text
from sftplay.evaluate.comparison import with_side
from sftplay.launch.run_folder import RunFolder
from sftplay.report.chart import draw
from sftplay.report.compare import compare_runs, comparison_table
from sftplay.report.mixture import build_blocks, plan
from sftplay.report.remarks import find_remarks
from sftplay.report.report import write_report
from sftplay.report.run_files import RunFiles

CONFIG = """run_name: run
task_mode: cpt_mixed
tuning: {mode: full}
datasets:
  - {name: domain, path: domain.jsonl, type: cpt, weight: 9}
  - {name: chat, path: chat.jsonl, type: chat, weight: 1}
  - {name: web, path: web.jsonl, type: cpt, weight: 0}
"""


def side(loss: float, chat: float, *, words: int = 400, documents: int = 3) -> dict[str, Any]:
    text = {"loss": loss, "perplexity": 2**loss, "bits_per_byte": loss / 2, "tokens": 9000, "documents": documents}
    texts = {"domain": {**text, "bytes": 30_000}}
    anchors = {"chat": {"n": 8, "rows": 40, "loss": chat, "perplexity": 2.0, "exact_match": 0.5}}
    return {"window": 64, "stride": 32, "vocabulary": words, "texts": texts, "anchors": anchors}


def write_run(
    path: Path, *, after: dict[str, Any], before: dict[str, Any] | None = None, share: float = 0.9
) -> RunFolder:
    """A finished run of three lines of metrics."""
    before = before or side(3.0, 1.0)
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "loss": 3.0 - step / 100,
            "sources": {
                "domain": {"tokens": 95 * step, "label_tokens": 90 * step, "share": share, "loss": 2.5},
                "chat": {"tokens": 20 * step, "label_tokens": 10 * step, "share": 1 - share, "loss": None},
                "web": {"tokens": 0, "label_tokens": 0, "share": 0.0, "loss": None},
            },
            "source_losses": {"domain": 2.9 - step / 100, "chat": 1.0 + step / 100, "web": None},
        }
        for step in (10, 20, 30)
    ]
    write_text(path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_text(path / "config.resolved.yaml", CONFIG)
    folder = RunFolder(path)
    folder.write_json("status.json", {"state": "done", "step": 30, "attempts": []})
    table = with_side(with_side({}, "before", **before), "after", **after)
    for name, content in {"perplexity": table, "step-30": {"loss": 2.0, "sources": {"domain": {"loss": 2.25}}}}.items():
        write_text(folder.eval / f"{name}.json", json.dumps(content))
    for name, measured in (("before", before), ("after", after)):
        write_text(folder.eval / f"{name}.json", json.dumps(dict(measured["texts"]["domain"])))
        write_text(folder.eval / f"anchor-chat-{name}.json", json.dumps(dict(measured["anchors"]["chat"])))
        row = {"row": 0, "prompt": "How many boats?", "reference": "seven", "prediction": name, "correct": False}
        write_text(folder.eval / f"anchor-chat-{name}.jsonl", json.dumps(row) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return write_run(tmp_path / "run", after=side(2.0, 1.3))


def text_of(folder: RunFolder) -> str:
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", write_report(folder).read_text(encoding="utf-8"), flags=re.S)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", page)).split())


def test_the_page_shows_what_was_asked_of_each_source_and_what_was_achieved(folder: RunFolder):
    (_, shares), *_ = build_blocks(RunFiles(folder))
    shown = {row[0]: [cell.replace("\u00a0", " ") for cell in row[1:]] for row in shares.rows}
    assert shown["domain"] == ["cpt", "90.0 %", "90.0 %", "2,850", "2,700", "2.5"]
    assert shown["chat"] == ["chat", "10.0 %", "10.0 %", "600", "300", "–"]
    assert shown["web"][:3] == ["cpt", "0.0 %", "0.0 %"]
    assert "Continued pretraining on a mixture" in text_of(folder)


def test_each_source_has_curves_of_its_losses_and_its_share(folder: RunFolder):
    training, held_out, share = draw(RunFiles(folder), plan(RunFiles(folder)))
    assert {curve.name: [(step, round(loss, 9)) for step, loss in curve.points] for curve in training.curves} == {
        "domain": [(10.0, 2.8), (20.0, 2.7), (30.0, 2.6)],
        "chat": [(10.0, 1.1), (20.0, 1.2), (30.0, 1.3)],
    }
    assert [(curve.name, list(curve.points)) for curve in held_out.curves] == [("domain", [(30.0, 2.25)])]
    assert [curve.name for curve in share.curves] == ["domain", "chat", "web"]
    assert "Share of each source" in text_of(folder)


def test_the_page_shows_perplexity_before_and_after_and_what_was_forgotten(folder: RunFolder):
    text = text_of(folder).replace("\u00a0", " ")
    assert "domain 3 9,000 8 4 −4 better 1.5 1 −0.5 better" in text
    assert "chat 8 1 1.3 +0.3 worse 50.0 % 50.0 % ±0.0 points +30.0 %" in text
    assert "The loss on chat rose by 30.0 % over 40 held-out row(s): much of it was forgotten." in text
    assert "a window of 64 tokens slides by 32" in text
    assert "Answers to chat" in text
    assert "How many boats?" in text


def sentences(folder: RunFolder) -> str:
    return "\n".join(f"{severity}: {text}" for severity, text in find_remarks(RunFiles(folder)))


def test_forgetting_is_a_warning_from_five_percent_on(tmp_path: Path, folder: RunFolder):
    assert "warn: Training has cost chat skills: the loss on chat rose by 30.0 %" in sentences(folder)
    assert "chat skills" not in sentences(write_run(tmp_path / "kept", after=side(2.0, 1.04)))


def test_perplexity_of_an_extended_tokenizer_is_marked_and_not_judged(tmp_path: Path):
    folder = write_run(tmp_path / "run", after=side(3.5, 1.0, words=450))
    assert "so perplexity does not compare: bits per byte does" in text_of(folder)
    assert "not comparable" in text_of(folder)
    assert "note: The tokenizer is another one after training" in sentences(folder)
    assert "held-out loss got worse" not in sentences(folder).lower()


@pytest.mark.parametrize(
    "content", ["[]", '{"sources": 3, "anchor": {"chat": [1]}}', '{"window": {}, "sources": {"a": 1}}']
)
def test_whatever_the_table_of_perplexity_holds_there_is_a_page(folder: RunFolder, content: str):
    write_text(folder.eval / "perplexity.json", content)
    line = {"step": 40, "sources": {"<b>x": {"share": "a lot", "loss": []}, "y": 3}, "source_losses": 7}
    write_text(folder.metrics, json.dumps(line) + "\n")
    assert "<b>x" not in write_report(folder).read_text(encoding="utf-8")
    assert comparison_table(compare_runs(folder, folder))


def test_two_runs_are_compared_source_by_source(tmp_path: Path, folder: RunFolder):
    other = write_run(tmp_path / "other", after=side(2.5, 1.0), share=0.8)
    found = compare_runs(folder, other)
    figures = {row["name"]: (row["a"], row["b"]) for row in found["figures"]}
    assert figures["domain: after perplexity"] == (4.0, 2**2.5)
    assert figures["chat: after loss"] == (1.3, 1.0)
    assert figures["chat: forgetting_percent"] == (pytest.approx(30.0), 0.0)
    training = {row["name"]: (row["a"], row["b"]) for row in found["training"]}
    assert training["domain: label_tokens_share"] == (0.9, 0.8)
    assert training["domain: last training_loss"] == (2.6, 2.6)
    assert found["same_held_out"] is True
    assert "domain: after bits per byte" in comparison_table(found)


def test_runs_on_other_held_out_documents_or_with_another_window_are_warned_of(tmp_path: Path, folder: RunFolder):
    other = write_run(tmp_path / "other", after=side(2.0, 1.3, documents=4))
    assert compare_runs(folder, other)["same_held_out"] is False
    content = json.loads((folder.eval / "perplexity.json").read_text())
    write_text(folder.eval / "perplexity.json", json.dumps({**content, "stride": 16}))
    assert any("the windows differ" in text for text in compare_runs(folder, other)["warnings"])
