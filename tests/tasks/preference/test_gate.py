"""The gate: it counts what was planted, says what alone decides the labels, and is silent about clean pairs."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pair_files import accounted, load_pairs, pair_config, random_pairs, write_pairs
from transformers import AutoTokenizer

from sftplay.errors import DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.preference.gate import Gate, PairFacts, exceeds, gate_table
from sftplay.tasks.preference.load_pairs import Pairs, load, load_measured, pairs_table


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


def test_bound_of_chance_is_above_the_exact_binomial_tail():
    for trials, right in ((10, 9), (20, 20), (50, 40), (200, 140), (1000, 640)):
        tail = sum(math.comb(trials, k) * 0.6**k * 0.4 ** (trials - k) for k in range(right, trials + 1))
        assert not exceeds(right, trials, chance=tail * 0.999)
    assert exceeds(180, 200)
    assert not exceeds(120, 200)
    assert not exceeds(0, 0)


def test_no_warning_on_clean_pairs_of_any_number(tokenizer: Any, tmp_path: Path):
    for seed, count in enumerate((2, 10, 40, 300)):
        report = load_pairs(tmp_path / str(seed), random_pairs(count, seed=seed), tokenizer).report
        assert report["warnings"] == []
        found = report["preference"]
        assert all(found[name] == 0 for name in ("equal", "swapped", "white_space_only", "contaminated", "duplicates"))
        assert found["deciding"] == []
        assert "margins" not in found


def test_no_warning_by_chance_in_a_thousand_sets_of_answers_without_meaning():
    random, warned = Random(0), 0
    words = [f"begins with 'w{n}'" for n in range(200)]
    for _ in range(1000):
        gate = Gate()
        for _ in range(30):
            facts = PairFacts(
                (random.randrange(50), random.randrange(50)), (random.getrandbits(12), random.getrandbits(12)),
                ((random.choice(words),), (random.choice(words),)), None, math.nan, False, False,
            )  # fmt: skip
            gate.add(facts)
        warned += bool(gate.deciding())
    assert warned <= 10  # at most one set in a hundred, by the bound


def test_length_that_decides_the_labels_is_said_with_its_share(tokenizer: Any, tmp_path: Path):
    report = load_pairs(tmp_path, random_pairs(100, seed=1, longer=0.91), tokenizer).report
    found = report["preference"]
    longer = found["longer_is_better_accuracy"]
    assert longer == found["share_chosen_longer"]
    assert 0.85 < longer < 0.95
    assert report["warnings"] == [
        f"length alone gets {longer:.2f} of the pairs right: the longer answer is the better one"
    ]
    assert report["warnings"][0] in pairs_table(report)


def test_shorter_answers_that_are_always_the_better_ones_are_said_too(tokenizer: Any, tmp_path: Path):
    (warning,) = load_pairs(tmp_path, random_pairs(100, seed=1, longer=0.0), tokenizer).report["warnings"]
    assert warning == "length alone gets 1.00 of the pairs right: the shorter answer is the better one"


def test_equal_length_counts_half(tokenizer: Any, tmp_path: Path):
    rows = [
        {"prompt": f"Why {n}?", "chosen": one, "rejected": two}
        for n, (one, two) in enumerate((("a", "b"), ("c c c", "d")))
    ]
    assert load_pairs(tmp_path, rows, tokenizer).report["preference"]["longer_is_better_accuracy"] == 0.75


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: f"Sure, here it is: {text}", "begins with 'sure,'"),
        (lambda text: f"{text}\n- one\n- two", "has a list"),
        (lambda text: f"{text} I hope this helps", "ends with 'hope this helps'"),
        (lambda text: text.rstrip("."), "ends as a sentence or a block does"),
        (lambda text: f"{text} \u00e9\u00e9", "has characters beyond ASCII"),
    ],
)
def test_feature_that_marks_the_chosen_side_is_named(tokenizer: Any, tmp_path: Path, change: Any, words: str):
    rows = random_pairs(80, seed=2)
    planted = [row | {"chosen": change(row["chosen"])} if n % 10 else row for n, row in enumerate(rows)]
    report = load_pairs(tmp_path / "a", planted, tokenizer).report
    assert any(words in warning and "of the pairs right" in warning for warning in report["warnings"])
    assert words in [one["feature"] for one in report["preference"]["deciding"]]
    both = [{**row, "chosen": change(row["chosen"]), "rejected": change(row["rejected"])} for row in rows]
    assert load_pairs(tmp_path / "b", both, tokenizer).report["warnings"] == []


def test_equal_pairs_are_dropped_and_pairs_that_differ_in_white_space_are_kept_and_said(tokenizer: Any, tmp_path: Path):
    rows = random_pairs(20, seed=3)
    equal = [{"prompt": f"Same {n}?", "chosen": "a b", "rejected": "a b"} for n in range(3)]
    spaced = [{"prompt": f"Space {n}?", "chosen": "a b", "rejected": "a  b"} for n in range(2)]
    report = load_pairs(tmp_path, [*rows, *equal, *spaced], tokenizer).report
    assert report["dropped"] == {"equal_sides": 3}
    assert accounted(report)
    assert report["kept"] == 22
    assert (report["preference"]["equal"], report["preference"]["white_space_only"]) == (3, 2)
    assert "pairs with sides that differ only in white space: 2" in report["warnings"]


@pytest.mark.parametrize(("duplicates", "kept"), [("keep", 24), ("drop", 20)])
def test_pair_that_is_there_both_ways_is_counted_and_the_later_one_dropped_on_demand(
    tokenizer: Any, tmp_path: Path, duplicates: str, kept: int
):
    rows = random_pairs(20, seed=4)
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"].upper()} for row in rows[:3]]
    report = load_pairs(tmp_path, [*rows, *swapped, rows[7]], tokenizer, duplicates=duplicates).report
    assert (report["preference"]["swapped"], report["preference"]["duplicates"]) == (3, 1)
    assert report["kept"] == kept
    assert accounted(report)
    assert "pairs that repeat an earlier one with the opposite verdict: 3" in report["warnings"]


def test_held_out_pair_in_training_ends_the_run_or_is_dropped_and_counted(tokenizer: Any, tmp_path: Path):
    rows, held_out = random_pairs(20, seed=5), random_pairs(5, seed=6)
    swapped = {**held_out[1], "chosen": held_out[1]["rejected"], "rejected": held_out[1]["chosen"]}
    half = held_out[2] | {"rejected": "Another answer."}  # the chosen answer is to be learned, and held out
    prompt = {"prompt": held_out[3]["prompt"], "chosen": "One.", "rejected": "Another."}
    train = [*rows, held_out[0], swapped, half, prompt]
    with pytest.raises(DataError, match="3 rows cannot be trained on") as refusal:
        load_pairs(tmp_path, train, tokenizer, val=held_out)
    assert "train.jsonl:21 is held out as well, at" in refusal.value.what
    for name in ("val", "test"):
        report = load_pairs(tmp_path / name, train, tokenizer, contamination="drop", **{name: held_out}).report
        found = report["preference"]
        assert (found["contaminated"], found["shared_prompts"]) == (3, 1)
        assert report["dropped"] == {"leak": 3}
        assert accounted(report)
        assert "pairs to train on with a prompt that is held out with other answers: 1" in report["warnings"]


@pytest.mark.parametrize("task", ["dpo", "kto", "reward_model"])
def test_pairs_that_were_trained_on_are_no_test_pairs(task: str, tokenizer: Any, tmp_path: Path):
    """Known by a prompt with one of its answers, whatever the other side says; what was held out was not trained on."""
    rows = random_pairs(30, seed=3)
    cfg = pair_config(tmp_path, rows[:20], task=task, val=rows[20:])
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_json("data_report.json", load(cfg, tokenizer).report)

    def measured(tested: list[dict[str, Any]]) -> Pairs:
        given = cfg.with_values({"data.test_path": str(write_pairs(tmp_path / "test.jsonl", tested))}, "test")
        return load_measured(given, tokenizer, folder=folder, template=None, split="test")

    fresh = random_pairs(2, seed=9)
    assert len(measured([*fresh, *rows[20:22]]).held_out) == (8 if task == "kto" else 4)
    again = {**rows[4], "rejected": "An answer nobody has seen."}
    with pytest.raises(DataError, match=r"2 of its rows were trained on\n.*train.jsonl:5.*test.jsonl:3") as refusal:
        measured([*fresh, again, rows[7]])
    assert "take them out of the test file" in refusal.value.fix


def test_scores_give_a_histogram_and_those_against_the_label_are_counted(tokenizer: Any, tmp_path: Path):
    rows = [row | {"score_chosen": n, "score_rejected": 2.5} for n, row in enumerate(random_pairs(10, seed=7))]
    report = load_pairs(tmp_path, [*rows, *random_pairs(3, seed=8)], tokenizer).report
    margins = report["preference"]["margins"]
    assert sum(margins["counts"]) == 10
    assert len(margins["edges"]) == len(margins["counts"]) + 1
    assert (margins["edges"][0], margins["edges"][-1]) == (-2.5, 6.5)
    assert report["preference"]["scores_against_label"] == 3
    assert "pairs with a chosen side that has the lower score: 3" in report["warnings"]
    assert any(line.startswith("margin") for line in gate_table(report["preference"]))


def test_answers_with_verdicts_are_judged_by_how_often_the_wanted_one_is_longer(tokenizer: Any, tmp_path: Path):
    pairs = random_pairs(300, seed=9, longer=1.0)
    rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": True} for row in pairs[:150]]
    rows += [{"prompt": row["prompt"], "completion": row["rejected"], "label": False} for row in pairs[150:]]
    report = load_pairs(tmp_path, rows, tokenizer, task="kto").report
    found = report["preference"]
    lengths = [
        [len(tokenizer(row["completion"])["input_ids"]) for row in rows if row["label"] is verdict]
        for verdict in (True, False)
    ]
    wins = [(one > other) + 0.5 * (one == other) for one in lengths[0] for other in lengths[1]]
    assert found["longer_is_better_accuracy"] == pytest.approx(sum(wins) / len(wins), abs=0.01)
    assert (found["desirable"], found["undesirable"]) == (150, 150)
    assert any(warning.startswith("length alone gets") and "answers right" in warning for warning in report["warnings"])


def test_sides_that_a_template_trims_to_the_same_tokens_are_equal_and_counted_as_white_space(
    tiny_llama: Path, tmp_path: Path
):
    trimming = AutoTokenizer.from_pretrained(tiny_llama)
    trimming.chat_template = trimming.chat_template.replace("m['content']", "(m['content'] | trim)")
    rows = [*random_pairs(5, seed=1), {"prompt": "Why?", "chosen": "a b", "rejected": "a b \n"}]
    report = load_pairs(tmp_path, rows, trimming).report
    assert report["dropped"] == {"equal_sides": 1}
    assert (report["preference"]["equal"], report["preference"]["white_space_only"]) == (1, 1)


def test_weights_that_balance_the_verdicts_are_advised(tokenizer: Any, tmp_path: Path):
    rows = [{"prompt": f"Why {n}?", "completion": f"Since {n}.", "label": n % 4 != 0} for n in range(40)]
    notes = load_pairs(tmp_path / "a", rows, tokenizer, task="kto").report["notes"]
    # 30 wanted and 10 unwanted answers
    assert notes[-1].endswith(
        "wanted answers weigh 3.00 times the others; 1 to 1.33 is advised: preference.undesirable_weight: 3"
    )
    swapped = [row | {"label": not row["label"]} for row in rows]
    notes = load_pairs(tmp_path / "b", swapped, tokenizer, task="kto").report["notes"]
    assert notes[-1].endswith("preference.desirable_weight: 3")
    assert load_pairs(tmp_path / "c", random_pairs(9, seed=1), tokenizer, task="kto").report["notes"] == []


def test_same_answer_with_both_verdicts_and_one_verdict_alone_are_said(tokenizer: Any, tmp_path: Path):
    rows = [{"prompt": f"Why {n}?", "completion": f"Since {n}.", "label": True} for n in range(5)]
    report = load_pairs(tmp_path / "a", [*rows, rows[0] | {"label": False}], tokenizer, task="kto").report
    assert "answers that repeat an earlier one with the opposite verdict: 1" in report["warnings"]
    report = load_pairs(tmp_path / "b", rows, tokenizer, task="kto").report
    assert "all 5 answers to train on have one verdict, so nothing is told apart" in report["warnings"]


def test_pairs_and_answers_in_one_file_are_weighed_and_said_together(tokenizer: Any, tmp_path: Path):
    single = {"prompt": "And?", "completion": "Since.", "label": True}
    report = load_pairs(tmp_path / "a", [*random_pairs(9, seed=1), single], tokenizer, task="kto").report
    assert not any("one verdict" in warning for warning in report["warnings"])
    assert report["notes"] == []  # 10 wanted and 9 unwanted answers
    assert "gate           9 pairs, 1 wanted and 0 unwanted answers" in pairs_table(report)


def test_verdicts_of_held_out_answers_do_not_balance_those_to_train_on(tokenizer: Any, tmp_path: Path):
    rows = [{"prompt": f"Why {n}?", "completion": f"Since {n}.", "label": n < 6} for n in range(9)]
    others = [row | {"prompt": f"And {row['prompt']}"} for row in rows]
    report = load_pairs(tmp_path / "a", rows[:6], tokenizer, task="kto", val=others).report
    assert "all 6 answers to train on have one verdict, so nothing is told apart" in report["warnings"]
    assert not any("weigh" in note for note in report["notes"])
    report = load_pairs(tmp_path / "b", rows, tokenizer, task="kto", val=others[:6]).report
    assert any("wanted answers weigh 2.00 times the others" in note for note in report["notes"])
