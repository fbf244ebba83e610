"""The promised accuracy over published measurements, and that nothing but method columns decides a prediction."""

from __future__ import annotations

import csv
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT.parent / "shared/data/memory/measured_memory.csv"


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    path = ROOT / "benchmarks/memory_accuracy.py"
    spec = importlib.util.spec_from_file_location("memory_accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memory_accuracy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    if not MEASURED.is_file():
        pytest.skip("needs the public measurements in ../shared/data/memory")
    with MEASURED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def row(**changes: str) -> dict[str, str]:
    plain = {
        "harness": "somebody's script", "source": "s", "model": "Llama-3.1-8B", "params_b": "8", "method": "LoRA",
        "lora_r": "16", "quant": "none bf16", "batch": "1", "seq_len": "1024", "grad_ckpt": "True",
        "optimizer": "AdamW", "attn": "sdpa", "parallelism": "single", "n_gpus": "1", "gpu": "A100-80GB",
        "peak_gb": "20", "notes": "",
    }  # fmt: skip
    return {**plain, **changes}


def test_on_modern_single_gpu_rows_the_promised_accuracy_holds(accuracy, rows):
    modern = accuracy.tables(accuracy.judge(rows))["modern"]
    assert modern["n"] >= 25
    assert modern["mean_abs"] <= 0.025
    assert modern["within_6"] >= 0.9
    assert modern["worst_under"] >= -0.10


def test_source_notes_order_and_measured_values_decide_nothing(accuracy, rows):
    numbered = [{**each, "params_b": str(n)} for n, each in enumerate(rows)]
    plain = {each.row["params_b"]: each.predicted_gib for each in accuracy.judge(numbered)}
    chance = random.Random(3)
    hidden = ("source", "notes", "peak_gb")
    columns = {name: chance.sample([each[name] for each in rows], len(rows)) for name in hidden}
    scrambled = [{**each, **{name: columns[name][n] for name in hidden}} for n, each in enumerate(numbered)]
    chance.shuffle(scrambled)
    assert {each.row["params_b"]: each.predicted_gib for each in accuracy.judge(scrambled)} == plain


def test_every_row_is_predicted_or_counted_with_the_reason(accuracy, rows):
    judged = accuracy.judge(rows)
    tables = accuracy.tables(judged)
    assert sum(each["n"] + each["excluded"] for each in tables["summary"].values()) == len(rows)
    assert all(each.excluded for each in judged if each.predicted_gib is None)
    for figures in tables["summary"].values():
        assert sum(figures["excluded_because"].values()) == figures["excluded"]


def test_the_answer_for_scripts_has_the_promised_shape(accuracy, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, row())
        writer.writeheader()
        writer.writerows([row(), row(model="Mixtral-8x7B-v0.1"), row(source="t", peak_gb="30")])
    assert accuracy.main(["--csv", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["rows"]) == 3
    assert set(answer["summary"]) == {"s", "t"}
    assert {"n", "excluded", "mean_abs", "p90_abs", "worst"} <= set(answer["summary"]["s"])
    assert (answer["summary"]["s"]["n"], answer["summary"]["s"]["excluded"]) == (1, 1)
    first, third = answer["rows"][0], answer["rows"][2]
    assert first["error"] == pytest.approx(first["predicted"] / 20 - 1)
    assert third["error"] == pytest.approx(first["predicted"] / 30 - 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "Mixtral-8x7B-v0.1"}, "a mixture of experts"),
        ({"model": "NobodysModel-1B"}, "not in the table"),
        ({"method": "OFT"}, "method OFT"),
        ({"method": "QLoRA", "quant": "gptq-int4"}, "quantisation gptq-int4"),
        ({"n_gpus": "2", "parallelism": "FSDP"}, "several GPUs"),
    ],
)
def test_what_is_not_modelled_is_excluded_with_the_reason(accuracy, changes, reason):
    (judged,) = accuracy.judge([row(**changes)])
    assert reason in judged.excluded
    assert not judged.counts


def test_where_columns_fit_two_code_paths_a_lone_row_is_the_stock_one_if_its_card_holds_that(accuracy):
    columns = {"harness": "fms", "model": "Mistral-7B-v0.1", "method": "QLoRA", "quant": "nf4", "batch": "4"}
    columns |= {"seq_len": "4096", "attn": "flash-attn2"}
    (alone,) = accuracy.judge([row(**columns)])
    assert alone.counts
    both = accuracy.judge([row(**columns), row(**columns, peak_gb="15")])
    assert [each.counts for each in both] == [False, False]
    (small,) = accuracy.judge([row(**columns, gpu="A10-16GB")])
    assert small.predicted_gib < alone.predicted_gib
