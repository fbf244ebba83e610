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


@pytest.mark.contract
def test_on_modern_single_gpu_rows_the_promised_accuracy_holds(accuracy, rows):
    modern = accuracy.tables(accuracy.judge(rows))["modern"]
    assert modern["n"] >= 25
    assert modern["mean_abs"] <= 0.025
    assert modern["within_6"] >= 0.9
    assert modern["worst_under"] >= -0.10


@pytest.mark.contract
def test_on_modern_rows_of_several_gpus_it_holds_too(accuracy, rows):
    judged = accuracy.judge(rows)
    found = accuracy.tables(judged)["several_gpus"]
    assert found["n"] >= 11
    assert found["kept"]
    assert found["mean_abs"] <= 0.025
    assert abs(found["worst"]) <= 0.08
    for each in judged:
        if int(each.row["n_gpus"]) > 1 and "FSDP" in each.row["parallelism"]:
            assert each.counts or each.excluded == "a mixture of experts"
            assert accuracy.class_of(each) == "several_gpus"


def test_source_notes_order_and_measured_values_decide_nothing(accuracy, rows):
    numbered = [{**each, "params_b": str(n)} for n, each in enumerate(rows)]
    plain = {each.row["params_b"]: each.predicted_gib for each in accuracy.judge(numbered)}
    chance = random.Random(3)
    hidden = ("source", "notes", "peak_gb")
    columns = {name: chance.sample([each[name] for each in rows], len(rows)) for name in hidden}
    scrambled = [{**each, **{name: columns[name][n] for name in hidden}} for n, each in enumerate(numbered)]
    chance.shuffle(scrambled)
    assert {each.row["params_b"]: each.predicted_gib for each in accuracy.judge(scrambled)} == plain


def test_check_ends_with_5_where_a_promise_is_not_kept(accuracy, tmp_path, capsys):
    for peak, ending, verdict in (("10.9", 0, "kept"), ("99", 5, "NOT KEPT")):
        path = tmp_path / f"{peak}.csv"
        columns = row(harness="fms", model="Mistral-7B-v0.1", batch="4", n_gpus="2", parallelism="FSDP", peak_gb=peak)
        path.write_text(f"{','.join(columns)}\n{','.join(columns.values())}\n", encoding="utf-8")
        assert accuracy.main(["--csv", str(path), "--check"]) == ending
        assert accuracy.main(["--csv", str(path)]) == 0
        assert f"beyond 8%: {verdict}\n" in capsys.readouterr().out


def test_odd_rows_of_a_file_are_skipped_by_line_and_name(accuracy, tmp_path, capsys):
    sound = ",".join(row().values())
    short, words = sound[: len(sound) // 2], sound.replace(",1024,", ",long,")
    unknown = sound.replace(",LoRA,", ",lorra,")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([",".join(row()), short, sound, words, sound + ",x", unknown]), encoding="utf-8")
    assert accuracy.main(["--csv", str(path)]) == 0
    out = capsys.readouterr().out
    assert "line 2 skipped (somebody's script Llama-3.1-8B LoRA): batch is missing" in out
    assert "line 4 skipped (somebody's script Llama-3.1-8B LoRA): seq_len is 'long', not a whole number above 0" in out
    assert "line 5 skipped (somebody's script Llama-3.1-8B LoRA): has more values than columns" in out
    assert "not predicted: method lorra" in out
    assert accuracy.main(["--csv", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(each["line"], each["odd"]) for each in answer["rows"]] == [
        (2, True), (3, False), (4, True), (5, True), (6, False)
    ]  # fmt: skip
    assert (answer["summary"]["s"]["n"], answer["summary"]["s"]["excluded"]) == (1, 4)
