"""report.html: a run on one page, from whatever lies in its folder."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import Finished, Inputs, StopAfter, train, train_in
from processes import HANG_S

from sftplay.launch.run_folder import RunFolder
from sftplay.report.chart import Chart, Curve, linear_axis, value_axis
from sftplay.report.evaluation import evaluation_blocks
from sftplay.report.figures import format_figure, interval
from sftplay.report.history import read_history, thin
from sftplay.report.page import ENVIRONMENT
from sftplay.report.remarks import find_remarks
from sftplay.report.report import write_report
from sftplay.report.run_files import RunFiles
from sftplay.report.sample import FILE, masked_sample, write_masked_sample

CURVES = {
    "loss", "held_out_loss", "learning_rate", "grad_norm", "tokens_per_s", "padded_tokens_per_s", "step_s",
    "model_tflops_per_s", "peak_rss_bytes", "padding_share",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run that was stopped at step 5 of 8, resumed, and measured before and after."""
    first = train(
        tmp_path_factory.mktemp("report"), inputs, stop=StopAfter(5), train__max_steps=8, train__save_steps=2,
        train__eval_steps=2, eval__before=True, eval__after=True,
    )  # fmt: skip
    first.folder.update_status(state="stopped", exit_code=143, signal="SIGTERM")
    first.folder.close_attempt("SIGTERM")
    done = train_in(first.cfg.with_values({"train.resume": "auto"}, "resume"), first.folder)
    done.folder.update_status(state="done", exit_code=0, signal=None, step=8, train_seconds=1.5)
    done.folder.close_attempt("done")
    example = done.trainer.train_dataset[0]
    write_masked_sample(done.folder, done.trainer.processing_class, example=example, source="train.jsonl:1")
    (done.folder.path / "launch.txt").write_text("A=1 python -m sftplay.tasks.worker outputs/run\n")
    return done


@pytest.fixture
def folder(run: Finished, tmp_path: Path) -> RunFolder:
    """A copy of the run to spoil."""
    copy = tmp_path / "run"
    shutil.copytree(run.folder.path, copy, ignore=shutil.ignore_patterns("*.safetensors", "*.pt", "*.pth", "tb"))
    return RunFolder(copy)


class Reader(HTMLParser):
    """The text of a page as one reads it, how often each element stands in it, and the attributes of all."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str | None]] = []
        self._silent = 0
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += attrs
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._silent:
            self.words.append(data)


def page_of(folder: RunFolder) -> Reader:
    return Reader(write_report(folder).read_text(encoding="utf-8"))


def sentences(folder: RunFolder) -> str:
    return "\n".join(f"{severity}: {text}" for severity, text in find_remarks(RunFiles(folder)))


# The page of a finished run


def test_the_page_tells_the_figures_before_and_after(run: Finished):
    page = page_of(run.folder)
    before, after = (json.loads((run.folder.eval / f"{name}.json").read_text()) for name in ("before", "after"))
    assert f"{before['loss']:.4g} → {after['loss']:.4g}" in page.text.replace("\u00a0", " ")
    assert f"{after['perplexity']:.4g}" in page.text
    assert "done at step 8 of 8" in page.text
    assert "LoRA, rank 4" in page.text
    model = run.folder.read_json("manifest.json")["model"]
    assert 0 < model["trainable_parameters"] < model["parameters"]
    assert all(f"{model[key]:,}" in page.text for key in ("parameters", "trainable_parameters"))


def test_every_answer_shown_stands_beside_its_reference_with_its_verdict(run: Finished):
    page = page_of(run.folder)
    rows = [json.loads(line) for line in (run.folder.eval / "after.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert " ".join(row["reference"].split()) in page.text
        assert " ".join(row["prediction"].split()) in page.text
    n_correct = sum(row["correct"] for row in rows)
    assert page.text.count("After ✓ correct") == n_correct
    assert page.text.count("After ✗ wrong") == len(rows) - n_correct


def test_the_cost_of_all_attempts_is_shown_where_a_price_was_set(folder: RunFolder):
    assert "Cost" not in page_of(folder).text
    one, two = folder.read_json("status.json")["attempts"]
    priced = [{**one, "seconds": 3600.0, "price_per_hour": 3.0}, {**two, "seconds": 1800.0, "price_per_hour": 2.0}]
    folder.update_status(attempts=[{**attempt, "gpus": 2} for attempt in priced])
    # 1 h x 2 x 3 + half an hour x 2 x 2
    assert "Cost 8.00 of 1 h 30 min, loading included" in page_of(folder).text


def test_gpus_of_several_kinds_are_all_named(folder: RunFolder):
    machine = {"gpus": [{"name": name} for name in ("H100", "H100", "A100")]}
    folder.write_json("manifest.json", {**folder.read_json("manifest.json"), "machine": machine})
    assert "Hardware 2 × H100, 1 × A100" in page_of(folder).text


def test_config_values_that_were_set_are_shown_with_where(run: Finished):
    page = page_of(run.folder)
    home = run.folder.path.parents[1]
    lines = (home / "run.yaml").read_text().splitlines()
    rank = next(number for number, line in enumerate(lines, 1) if '"r":' in line)
    assert f"tuning.lora.r 4 {home / 'run.yaml'}:{rank}" in page.text
    assert "train.precision fp32 auto" in page.text
    assert "train.weight_decay 0.0" in page.text.partition("values at their default")[2]


def test_a_hash_sign_inside_a_value_is_no_origin(folder: RunFolder):
    folder.resolved.write_text('run_name: "a  # b"  # run.yaml:3\noutput_dir: "c  # d"\n')
    settings = RunFiles(folder).settings
    assert (settings["run_name"].value, settings["run_name"].origin) == ("a  # b", "run.yaml:3")
    assert (settings["output_dir"].value, settings["output_dir"].origin) == ("c  # d", "")


def test_every_chart_names_its_axes_and_marks_where_the_run_was_resumed(run: Finished):
    page = write_report(run.folder).read_text(encoding="utf-8")
    n_charts = page.count('<figure class="chart')
    titles = re.findall(r'<div class="unit" aria-hidden="true">([^<]+)</div>', page)
    assert titles[0] == "nats a token"
    assert len(titles) == n_charts == page.count('<div class="unit steps" aria-hidden="true">step</div>') == 8
    assert page.count('class="resume" x1="625"') == n_charts  # step 5 of an axis of 8, in thousandths
    assert "Attempt 1 ran from step 0 to 5: SIGTERM." in page


# Runs in any state, files in any state


@pytest.mark.parametrize("name", ["config.resolved.yaml", "plan.json", "manifest.json", "status.json",
                                  "data_report.json", "metrics.jsonl", "launch.txt"])  # fmt: skip
def test_a_file_that_is_missing_is_named(folder: RunFolder, name: str):
    (folder.path / name).unlink()
    text = sentences(folder)
    assert f"{name} is not there" in text or f"{name} cannot be read (no such file)" in text
    assert name in page_of(folder).text


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1, 2]", b"[" * 5_000])
@pytest.mark.parametrize(
    "name", ["config.resolved.yaml", "plan.json", "manifest.json", "status.json", "data_report.json", "eval/after.json"]
)
def test_a_file_that_is_broken_is_named(folder: RunFolder, name: str, content: bytes):
    (folder.path / name).write_bytes(content)
    assert f"{name} cannot be read" in sentences(folder) or f"{name} holds no object" in sentences(folder)
    assert page_of(folder).tags["h1"] == 1


def test_lines_of_metrics_that_cannot_be_read_are_counted_and_the_others_drawn(folder: RunFolder):
    lines = folder.metrics.read_bytes().splitlines()
    folder.metrics.write_bytes(b"\n".join([*lines[:3], b'{"step": 3, "lo', b"[]", *lines[3:], b'{"step": 9, "l']))
    assert "2 lines of metrics.jsonl cannot be read" in sentences(folder)  # the last one is still being written
    assert len(read_history(folder.metrics).curve("loss")) == len(lines)


def test_a_failed_run_says_why_and_what_to_do_and_cuts_neither_off(folder: RunFolder):
    rows = "".join(f"\n  rows.jsonl:{n} " + "has no text " * 80 for n in range(5))
    error = {"code": "data", "what": f"5 rows cannot be trained on{rows}", "where": "data", "fix": "name the columns"}
    folder.update_status(state="failed", exit_code=4, step=5, error=error)
    text = page_of(folder).text
    assert "The run failed at step 8. data: 5 rows cannot" in text  # metrics reach further than status.json
    assert "rows.jsonl:4 has no text" in text
    assert "Remedy: name the columns." in text


def test_a_run_whose_process_is_gone_has_died_and_one_that_is_held_is_running(folder: RunFolder):
    folder.update_status(state="running", exit_code=None)
    assert "ended at step 8 without a message" in sentences(folder)
    with folder.locked():
        assert "The run is still going" in sentences(folder)
    with folder.locked():  # looking has taken nothing
        pass


def test_values_that_are_not_finite_are_reported_and_leave_a_gap(folder: RunFolder):
    lines = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate([2.0, 1.0, math.nan, 3.0], 1)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "stop: Training loss was not finite, first at step 3." in sentences(folder)
    page = write_report(folder).read_text()
    path = page.partition('data-series="loss" d="')[2].partition('"')[0]
    assert (path.count("M"), path.count("L")) == (2, 1)
    assert 'class="bad"' in page


def test_figures_that_got_worse_and_a_held_out_loss_that_rose_are_warned_of(folder: RunFolder):
    folder.write_json("eval/before.json", {"n": 4, "loss": 2.0, "exact_match": 0.5})
    folder.write_json("eval/after.json", {"n": 4, "loss": 1.0, "exact_match": 0.25})
    folder.write_json("eval/step-6.json", {"loss": 0.5})
    folder.write_json("eval/step-8.json", {"loss": 0.9})
    text = sentences(folder).replace("\u00a0", " ")
    assert "warn: Exact match got worse by training: 50.0 % → 25.0 %." in text
    assert "loss got worse" not in text
    assert "warn: Held-out loss was lowest at step 6 (0.5), then rose to 0.9" in text


def test_rows_that_were_lost_and_checkpoints_that_do_not_count_are_warned_of(folder: RunFolder):
    lost = {"refused": 3, "dropped": {"too_long": 2}, "cut": 1, "notes": ["the template drops thinking"]}
    folder.write_json("data_report.json", {**folder.read_json("data_report.json"), **lost})
    (folder.checkpoints / "checkpoint-7").mkdir()
    (folder.checkpoints / "incomplete" / "checkpoint-6").mkdir(parents=True)
    folder.logs.mkdir(exist_ok=True)
    (folder.logs / "rank0.log").write_text("[resume] skipping checkpoint-6: model.bin is missing\n[train] x\n")
    text = sentences(folder)
    for part in (
        "warn: The template drops thinking.",
        "warn: 3 rows were refused",
        "warn: 2 rows were dropped: too long.",
        "warn: 1 rows were longer",
        "warn: checkpoint-7 is not marked complete",
        "note: checkpoint-6 was not continued",
        "note: Skipping checkpoint-6: model.bin is missing.",
        "warn: 8 steps in all are few",
    ):
        assert part in text


def course(folder: RunFolder, steps: int = 30, **curves: Callable[[int], float]) -> None:
    """A metrics.jsonl whose figures follow these curves."""
    lines = [{"step": n, **{key: curve(n) for key, curve in curves.items()}} for n in range(1, steps + 1)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({"tokens_per_s": lambda n: 1000.0 if n < 21 else 400.0}, "Throughput collapsed: 1,000 → 400 tokens a second"),
        ({"tokens_per_s": lambda n: 100.0 if n == 1 else 1000.0 - 10 * n}, ""),  # a slow first line
        ({"loss": lambda n: 3.0 - 0.0001 * n + 0.01 * (-1) ** n}, "The training loss hardly moved: "),
        ({"loss": lambda n: 3.0 - 0.01 * n}, ""),
        ({"loss": lambda n: 5.0 if n == 30 else 3.0 - 0.05 * n}, ""),  # one noisy line at an end
        ({"loss": lambda n: 3.0 + 0.05 * n}, "The training loss did not fall"),
    ],
)
def test_what_a_curve_shows_is_said_and_noise_is_not(folder: RunFolder, figures: dict[str, Any], found: str):
    course(folder, **({"loss": lambda n: 3.0 / n} | figures))
    text = sentences(folder)
    assert f"warn: {found}" in text
    assert sum(word in text for word in ("Throughput", "hardly moved", "did not fall")) == bool(found)


@pytest.mark.parametrize(("key", "held"), [("peak_rss_bytes", 1200.0), ("peak_bytes", 1100.0)])
def test_memory_above_the_plan_is_said_and_shown_beside_it(folder: RunFolder, key: str, held: float):
    # On a GPU the process beside the allocator is no part of either figure: 1200 MiB planned are 1000 of the allocator.
    folder.write_json("plan.json", {"peak_bytes": 1200 * 2**20, "components": {"runtime": 200 * 2**20}})
    limit = 1200 if key == "peak_rss_bytes" else 1000
    for factor, is_above in ((1.0, held > limit), (1.2, True), (0.5, False)):
        course(folder, **{key: lambda n, factor=factor: factor * held * 2**20})
        assert ("Peak memory was above the plan" in sentences(folder)) == is_above
        page = page_of(folder)
        assert "Memory, planned and held" in page.text
        assert f"{factor * held / limit:.0%}" in page.text
        assert f"of {format_figure('peak_bytes', limit * 2**20)} planned" in page.text
        assert ("data-series", "planned_bytes") in page.attributes


def test_evaluations_of_several_kinds_of_rows_are_one_table_with_shares_as_bars(folder: RunFolder):
    for prefix, share in (("", 0.25), ("test-", 0.5)):
        folder.write_json(f"eval/{prefix}before.json", {"n": 40, "loss": 4.0, "rouge_l": share})
        folder.write_json(f"eval/{prefix}after.json", {"n": 40, "loss": 2.0, "rouge_l": 2 * share})
    (_, table), (_, bars), *_ = evaluation_blocks(RunFiles(folder))
    cells = [[cell.replace("\u00a0", " ") for cell in row] for row in table.rows]
    assert cells == [
        ["Held-out rows", "Prompts answered", "40", "40", ""],
        ["Held-out rows", "Loss", "4", "2", "−2 better"],
        ["Held-out rows", "ROUGE-L", "25.0 %", "50.0 %", "+25.0 points better"],
        ["Test rows", "Prompts answered", "40", "40", ""],
        ["Test rows", "Loss", "4", "2", "−2 better"],
        ["Test rows", "ROUGE-L", "50.0 %", "100.0 %", "+50.0 points better"],
    ]
    assert [row[:2] for row in bars.rows][:2] == [
        ["Held-out rows: ROUGE-L, before", "25.0%"], ["Held-out rows: ROUGE-L, after", "50.0%"],
    ]  # fmt: skip


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**300, 10**310) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FILES = ("plan.json", "manifest.json", "status.json", "data_report.json", "eval/after.json", "eval/before.json", FILE)


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield (*above, key)
        yield from places(value, (*above, key))


@given(data=st.data())
def test_whatever_a_file_holds_there_is_a_page(run: Finished, folder: RunFolder, data: st.DataObject):
    for name in FILES:
        tree = run.folder.read_json(name)
        for _ in range(data.draw(st.integers(0, 2))):
            *path, last = data.draw(st.sampled_from(sorted(places(tree), key=str)))
            branch = tree
            for part in path:
                branch = branch[part]
            branch[last] = data.draw(JSON)
            if isinstance(branch, dict):
                branch[data.draw(st.text(max_size=5))] = data.draw(JSON)
        (folder.path / name).write_text(json.dumps(tree))
    lines = data.draw(st.lists(st.dictionaries(st.sampled_from(["step", "loss", "grad_norm", "x"]), JSON), max_size=4))
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.eval / "after.jsonl").write_text("".join(json.dumps(data.draw(JSON)) + "\n" for _ in range(2)))
    assert page_of(folder).tags["h1"] == 1


# Nothing of a run is markup


EVIL = '</script><script>window.hacked=1</script><img src="http://evil.example/x.png" onerror="window.hacked=1">&amp;'


ODD = "\t\ud800\u202e\u2066\u2028\x07\x7f\x9f"


@pytest.fixture
def evil(folder: RunFolder) -> RunFolder:
    """A run in which every text tries to be markup."""
    rows = [{"row": 0, "prompt": EVIL, "reference": EVIL, "prediction": EVIL + ODD, "correct": False}]
    (folder.eval / "after.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder.eval / "before.jsonl").write_text("")
    folder.write_json("eval/after.json", {"n": 1, "loss": 1.0, EVIL: 1.0})
    folder.write_json("plan.json", {"decisions": [{"key": EVIL, "value": EVIL, "reason": EVIL}], "notes": [EVIL]})
    report = {"notes": [EVIL], "sources": {EVIL: {"path": EVIL}}, "dropped": {EVIL: 3}, "length_histogram": {EVIL: 1}}
    folder.write_json("data_report.json", report)
    folder.write_json("manifest.json", {"kit": EVIL, "machine": {"gpus": [{"name": EVIL}], "libraries": {EVIL: EVIL}}})
    folder.write_json(FILE, {"row": 0, "source": EVIL, "tokens": [[EVIL, True], [EVIL, False]]})
    folder.write_json("status.json", {"state": EVIL, "attempts": [{"cause": EVIL}, {"cause": EVIL}]})
    folder.resolved.write_text(f"model: {{name: {json.dumps(EVIL)}}}\ntuning: {{mode: {json.dumps(EVIL)}}}\n")
    folder.metrics.write_text(json.dumps({"step": 1, "loss": 1.0, EVIL: 2.0}) + "\n")
    (folder.path / "launch.txt").write_text(EVIL)
    target = folder.path.with_name("<img src=x onerror=alert(1)>")
    folder.path.rename(target)
    return RunFolder(target)


def test_texts_of_a_run_are_shown_and_never_markup(evil: RunFolder):
    page = page_of(evil)
    assert EVIL in page.text
    assert "\\ud800\\u202e\\u2066\\u2028\\x07\\x7f\\x9f" in page.text
    assert page.tags["img"] == 0
    assert page.tags["script"] == page.tags["figure"] + 1
    names = {name for name, _ in page.attributes}
    assert not [name for name in names if name.startswith("on") or name == "src"]
    anchors = {f"#{value}" for name, value in page.attributes if name == "id"}
    assert {value for name, value in page.attributes if name == "href"} <= anchors


# Curves


def draw(unit: str, points: list[tuple[float, float]]) -> str:
    chart = Chart(title="Loss", unit=unit, curves=[Curve("k", "name", points)], last_step=10)
    return ENVIRONMENT.get_template("chart.html").render(chart=chart, is_wide=False)


def test_a_curve_lies_where_its_values_are():
    # An axis of 0 to 10 in steps of 5 over 300, steps of 0 to 10 over 1000, the origin at the lower left.
    page = draw("tokens", [(0, 0.0), (5, 10.0), (10, 5.0)])
    assert 'data-series="k" d="M0 300L500 0L1000 150"' in page
    assert "name: 0 at step 0 → 5 at step 10; highest 10 at 5" in page


def test_a_curve_over_powers_of_ten_has_its_middle_at_the_geometric_mean():
    page = draw("loss", [(0, 100.0), (5, 1.0), (10, 0.01)])
    assert 'd="M0 0L500 150L1000 300"' in page
    assert "(logarithmic)" in page


@given(st.floats(-1e90, 1e90), st.floats(-1e90, 1e90))
def test_an_axis_covers_its_values_with_few_round_ticks(one: float, other: float):
    low, high = sorted((one, other))
    for axis in (linear_axis(low, high, wanted=4), value_axis([low, high], "loss")):
        slack = 1e-6 * (axis.ticks[-1] - axis.ticks[0])
        assert axis.ticks[0] - slack <= low <= high <= axis.ticks[-1] + slack
        assert 2 <= len(axis.ticks) <= 8
        assert 0 <= axis.place(low) <= axis.place(high) <= 1


@given(st.lists(st.floats(), min_size=1, max_size=400), st.integers(1, 20))
def test_thinning_keeps_the_ends_and_the_extremes_and_invents_nothing(values: list[float], buckets: int):
    points = [(float(step), value) for step, value in enumerate(values)]
    kept = thin(points, buckets)
    steps = [step for step, _ in kept]
    assert steps == sorted(set(steps))
    assert len(kept) <= 5 * buckets
    finite = [value for value in values if math.isfinite(value)]
    left = [value for _, value in kept if math.isfinite(value)]
    if finite:
        assert (min(left), max(left), left[0], left[-1]) == (min(finite), max(finite), finite[0], finite[-1])
    assert len(left) < len(kept) or len(finite) == len(values)
    assert {step: str(value) for step, value in kept}.items() <= {step: str(v) for step, v in points}.items()


def test_a_page_of_many_lines_stays_small_and_keeps_a_single_spike(folder: RunFolder):
    rng, n_lines = random.Random(0), 20_000
    spike = n_lines // 3
    with folder.metrics.open("w") as handle:
        for step in range(1, n_lines + 1):
            loss = 77.5 if step == spike else 1 + rng.random()
            handle.write(f'{{"step": {step}, "loss": {loss}, "learning_rate": 1e-4, "tokens_per_s": {9 + step % 7}}}\n')
    path = write_report(folder)
    assert path.stat().st_size < 2e6
    assert f"highest 77.5 at {spike:,}" in path.read_text()


# Figures


def test_intervals_are_those_of_the_published_table():
    # Newcombe, Statistics in Medicine 1998, table I, method 3 (score): 81/263, 15/148, 0/20, 1/29.
    published = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605)}
    published |= {(0, 20): (0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (hits, count), limits in published.items():
        assert interval(hits / count, count) == pytest.approx(limits, abs=5e-5)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("exact_match", 0.9625, "96.3\u00a0%"),
        ("loss", 0.0084271, "0.008427"),
        ("perplexity", 40.902, "40.9"),
        ("peak_bytes", 3 * 2**29, "1.50 GiB"),
        ("tokens_per_s", 12385.85, "12,386"),
        ("learning_rate", 2e-5, "2e-05"),
        ("n", 240, "240"),
        ("loss", math.inf, "not finite"),
        ("loss", None, "–"),
    ],
)
def test_figures_are_rounded_for_people(key: str, value: float, text: str):
    assert format_figure(key, value) == text


# The masked sample


def test_the_tokens_of_a_sample_are_the_row_and_its_learned_part(run: Finished):
    tokenizer = run.trainer.processing_class
    ids = tokenizer("the river \N{GRINNING FACE} naïve  two\nlines<|im_end|>")["input_ids"]
    labels = [-100, *ids[1:]]
    sample = masked_sample(tokenizer, {"input_ids": ids, "labels": labels, "row": 7}, source="a.jsonl:8")
    assert (sample["row"], sample["source"]) == (7, "a.jsonl:8")
    assert len(sample["tokens"]) == len(ids)
    assert "".join(text for text, _ in sample["tokens"]) == tokenizer.decode(ids)
    assert "".join(text for text, learned in sample["tokens"] if learned) == tokenizer.decode(ids[1:])
    assert [text for text, _ in sample["tokens"]].count("\N{GRINNING FACE}") == 1  # of four tokens, one for each byte


# In a browser


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in BROWSERS if (path := shutil.which(name))), "")

AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in enumerate(ends, 3):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Becomes the browser, with the two pipes where it looks for them."""


class Browser:
    """A headless Chromium, spoken to over two pipes in the DevTools protocol (chromedevtools.github.io)."""

    def __init__(self, home: Path) -> None:
        its_input, to_it = os.pipe()
        from_it, its_output = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        with contextlib.ExitStack() as stack:
            for end in (its_input, its_output):
                stack.callback(os.close, end)
            self.process = subprocess.Popen(
                [sys.executable, "-c", AS_3_AND_4, str(its_input), str(its_output), CHROMIUM, *flags.split(),
                 "--remote-debugging-pipe", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
                 f"--user-data-dir={home}", "about:blank"],
                pass_fds=(its_input, its_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        self._in, self._out = to_it, os.fdopen(from_it, "rb")
        self._kill = threading.Timer(300, self.process.kill)  # a browser that hangs ends the read below
        self._kill.daemon = True
        self._kill.start()
        self.session, self.events, self._count, self._rest = "", [], 0, b""
        (page,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._out.read1(2**16)
            assert more, "the browser has gone"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> None:
        """Load a file and wait for it."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.events = []
        self.call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self.methods():
            self.events.append(self._read())

    def methods(self) -> list[str]:
        return [event.get("method", "") for event in self.events]

    def js(self, expression: str) -> Any:
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def look(self, width: int, height: int, *, scheme: str = "light", media: str = "screen") -> None:
        """Take the size of a screen, a colour scheme and a medium."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def complaints(self) -> list[dict[str, Any]]:
        """Everything in the console, and every exception."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [event for event in self.events if event.get("method") in kinds]

    def requests(self) -> list[str]:
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def close(self) -> None:
        self._kill.cancel()
        with contextlib.suppress(OSError, AssertionError):
            self.session = ""
            self.call("Browser.close")
        self.process.wait(timeout=HANG_S)
        os.close(self._in)
        self._out.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM:
        pytest.skip("needs a Chromium or Chrome on the path (apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        opened = Browser(Path(home))
        yield opened
        opened.close()


TOO_PALE = """
(() => {
  const part = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4 }
  const light = rgb => 0.2126 * part(rgb[0]) + 0.7152 * part(rgb[1]) + 0.0722 * part(rgb[2])
  const colour = text => text.match(/[\\d.]+/g).map(Number)
  const ground = e => { for (; e; e = e.parentElement) { const c = colour(getComputedStyle(e).backgroundColor)
    if (c.length < 4 || c[3] > 0) return c } return [255, 255, 255] }
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), pale = []
  let n = 0
  for (let node; node = walk.nextNode();) {
    const e = node.parentElement
    if (!node.data.trim() || e.closest('script,style,svg') || !e.getClientRects().length) continue
    n += 1
    const [a, b] = [light(colour(getComputedStyle(e).color)), light(ground(e))]
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    if (ratio < 4.5) pale.push([ratio.toFixed(2), node.data.slice(0, 40)])
  }
  return [n, pale]
})()
"""
"""Texts below the contrast of WCAG 2.2, 1.4.3 (its formulas for luminance and ratio), and how many were looked at."""


BROKEN_WORDS = """
[...document.querySelectorAll('td code, th code')].filter(e => e.checkVisibility() && !/\\s/.test(e.textContent)
  && e.textContent.length < 40 && e.getClientRects().length > 1).map(e => e.textContent)
"""
"""Words in tables that take more than one line although they would fit into one."""


def test_a_browser_draws_every_curve_without_a_complaint_or_a_request(run: Finished, browser: Browser):
    page = write_report(run.folder)
    browser.open(page)
    size = "p => [p.dataset.series, p.getBoundingClientRect().width, p.getTotalLength()]"
    curves = browser.js(f"[...document.querySelectorAll('path[data-series]')].map({size})")
    assert {name for name, _, _ in curves} == CURVES
    assert all(width > 100 and length > 100 for _, width, length in curves)
    assert browser.js("[...document.querySelectorAll('svg')].every(s => s.querySelector('title').textContent)")
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


def test_pointing_at_a_curve_tells_the_value_there(run: Finished, browser: Browser):
    browser.look(1280, 900)
    browser.open(write_report(run.folder))
    browser.js("document.querySelector('.chart').scrollIntoView()")
    browser.js("box = document.querySelector('.area').getBoundingClientRect()")
    left, top, width = browser.js("[box.left, box.top, box.width]")
    for step in (3, 6):
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width * step / 8, y=top + 20)
        text = browser.js("document.querySelector('.legend span').textContent")
        assert float(text.removesuffix(f" at step {step}")) == pytest.approx(run.losses[step - 1], rel=1e-4)
        tip = browser.js("document.querySelector('.tip').innerText").splitlines()
        assert tip[0] == f"step {step}"
        assert float(tip[1].removeprefix("training ")) == pytest.approx(run.losses[step - 1], rel=1e-4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_the_page_fits_its_screen_and_every_text_can_be_read(run: Finished, browser: Browser, width: int, scheme: str):
    browser.look(width, 844, scheme=scheme)
    browser.open(write_report(run.folder))
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.js(BROKEN_WORDS) == []
    n_texts, too_pale = browser.js(TOO_PALE)
    assert n_texts > 200
    assert too_pale == []
    is_white = browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert is_white == (scheme == "light")


def test_on_paper_nothing_is_hidden_behind_a_click_and_all_is_dark_on_white(run: Finished, browser: Browser):
    browser.look(700, 1000, scheme="dark", media="print")
    browser.open(write_report(run.folder))
    shown_defaults = "document.querySelector('details td').checkVisibility()"
    assert browser.js(shown_defaults)
    assert browser.js(TOO_PALE)[1] == []
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    pdf = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert pdf.startswith(b"%PDF")
    browser.look(700, 1000)
    assert not browser.js(shown_defaults)


def test_without_scripts_the_page_tells_the_same(run: Finished, browser: Browser):
    browser.look(1280, 900)
    page = write_report(run.folder)
    browser.open(page)
    text = browser.js("document.body.innerText")
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(page)
        browser.call("DOM.enable")
        assert browser.js("document.body.innerText") == text
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_hostile_texts_do_nothing_in_a_browser(evil: RunFolder, browser: Browser):
    page = write_report(evil)
    browser.look(390, 844)
    browser.open(page)
    assert browser.js("typeof window.hacked") == "undefined"
    assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    assert browser.requests() == [page.as_uri()]
    assert browser.complaints() == []
