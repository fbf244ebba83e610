"""Problems of MBPP and HumanEval as they are published: both forms, their splits, and what is refused."""

import json
from pathlib import Path

import datasets
import pytest

from sftplay.data.layouts import to_record
from sftplay.data.load_problems import load_problems, sample_subset
from sftplay.data.pipeline import load_examples
from sftplay.data.problem import format_question, published_test_id
from sftplay.data.prompts import read_prompt
from sftplay.data.records import Source, chat_from_json
from sftplay.data.row_outcomes import unused_columns
from sftplay.errors import DataError

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
MBPP, HUMAN_EVAL = DATA / "mbpp" / "sanitized-mbpp.json", DATA / "humaneval" / "HumanEval.jsonl"

WHOLE = {
    "task_id": 601,
    "text": "Double a number.",
    "code": "def helper(x):\n    return x\n\ndef double(x):\n    return 2 * helper(x)",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0", "assert math.isclose(double(0.5), 1)"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
SANITIZED = {
    "source_file": "a",
    "task_id": 11,
    "prompt": "Halve a number.",
    "code": "def half(x):\n    return x / 2",
    "test_imports": ["import math"],
    "test_list": ["assert set([half(2)]) == {1}"],
}
HUMAN = {
    "task_id": "HumanEval/0",
    "prompt": 'def one():\n    """One."""\n',
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}


def written(tmp_path, *rows):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_in_a_mixed_table_the_columns_of_the_other_forms_are_null_and_say_nothing(tmp_path):
    rows = (WHOLE, SANITIZED, HUMAN)
    columns = dict.fromkeys(name for row in rows for name in row)
    apart = load_problems(written(tmp_path, *rows))
    assert load_problems(written(tmp_path, *(columns | row for row in rows))) == apart


def test_all_three_published_forms_are_read_and_a_problem_that_stands_twice_counts_once(tmp_path):
    again = {**WHOLE, "task_id": 700, "text": "double  a NUMBER."}
    whole, sanitized, human = load_problems(written(tmp_path, WHOLE, SANITIZED, again, HUMAN))
    assert (whole.entry_point, whole.setup, len(whole.tests), whole.shown) == ("double", "import math", 3, 1)
    assert (sanitized.entry_point, sanitized.setup, sanitized.shown) == ("half", "import math", 0)
    assert human.reference == 'def one():\n    """One."""\n    return 1\n'
    assert human.tests == ("def check(candidate):\n    assert candidate() == 1\n\ncheck(one)",)

    question = format_question(whole)
    assert "Double a number." in question
    assert "assert double(2) == 4" in question
    assert "double(0)" not in question


@pytest.mark.parametrize(
    ("row", "tested"),
    [
        (WHOLE, ""),
        (SANITIZED, "11"),
        ({**SANITIZED, "task_id": "510"}, "510"),
        ({**SANITIZED, "task_id": 511}, ""),
        ({**SANITIZED, "task_id": "mine/11"}, ""),
        (HUMAN, "HumanEval/0"),
        ({**HUMAN, "task_id": "mine/0"}, ""),
        ({"task_id": 11, "prompt": "no problem", "completion": "a"}, ""),
    ],
)
def test_rows_that_must_not_be_learned_are_known_by_their_published_ids(row, tested):
    assert published_test_id(row) == tested


def test_a_problem_is_a_chat_whose_answer_is_the_reference_with_what_rewards_read(tmp_path):
    record = to_record(WHOLE, Source("rows.jsonl", 1))
    assert [message.role for message in record.messages] == ["user", "assistant"]
    assert "assert double(2) == 4" in record.messages[0].content
    assert record.answer == f"```python\n{WHOLE['code']}\n```"
    columns = json.loads(record.columns)
    assert (columns["tests"], columns["entry_point"], columns["shown"]) == (WHOLE["test_list"], "double", 1)
    assert (columns["setup"], columns["task_id"], columns["answer"]) == ("import math", "601", record.answer)
    assert chat_from_json(record.as_json()) == record
    assert read_prompt(HUMAN, Source("rows.jsonl", 1))[0][0].content.startswith("def one():")
    assert unused_columns({**WHOLE, "mine": 1}) == ("mine",)


def test_problems_that_models_are_tested_by_stop_a_run_that_would_learn_them(tmp_path, config, tokenizer):
    mixed = written(tmp_path, WHOLE, SANITIZED, HUMAN)
    with pytest.raises(DataError, match="2 rows cannot be trained on") as refusal:
        load_examples(config(mixed, max_seq_len=512, split=0.0), tokenizer)
    assert "problems.jsonl:2 is problem 11 of a published test split" in refusal.value.what
    assert "problem HumanEval/0" in refusal.value.what
    assert "data.contamination: drop" in refusal.value.fix
    left = load_examples(config(mixed, max_seq_len=512, split=0.0, contamination="drop"), tokenizer)
    assert (left.report["dropped"], len(left.train)) == ({"leak": 2}, 1)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "a", "answer": "b"}, "is no problem"),
        ({**WHOLE, "code": "def double(x:"}, "cannot be read as a problem"),
        ({**WHOLE, "test_list": ["assert other(1)"]}, "calls nothing that its solution defines"),
        ({**WHOLE, "test_list": []}, "calls nothing that its solution defines"),
        ({key: value for key, value in HUMAN.items() if key != "test"}, "KeyError 'test'"),
    ],
)
def test_a_row_that_is_no_problem_is_named(tmp_path, row, said):
    with pytest.raises(DataError, match=said) as caught:
        load_problems(written(tmp_path, WHOLE, row))
    assert caught.value.where.endswith("problems.jsonl:2")


def test_a_data_set_is_asked_for_by_name_and_its_local_file_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    splits = {"prompt": [], "test": [SANITIZED], "validation": [], "train": [{**SANITIZED, "task_id": 601}]}

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([{**row, "prompt": f"{split}: halve."} for row in splits[split]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [problem.task_id for problem in load_problems("mbpp-sanitized")] == ["11", "601"]
    assert asked == [("google-research-datasets/mbpp", "sanitized", split) for split in splits]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "sanitized-mbpp.json").write_text(json.dumps([{**SANITIZED, "task_id": 700}]))
    assert [problem.task_id for problem in load_problems("mbpp-sanitized")] == ["700"]
    assert len(asked) == 4


def test_without_file_and_connection_a_data_set_says_what_to_put_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_dataset(*_, **__):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="offline") as caught:
        load_problems("humaneval")
    assert caught.value.where == "humaneval (openai/openai_humaneval on the hub)"
    assert caught.value.fix == "put HumanEval.jsonl into data/, or name a file: DATA=path/HumanEval.jsonl"
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([SANITIZED]))
    with pytest.raises(DataError) as caught:
        load_problems("mbpp")
    assert caught.value.fix.endswith("sanitized-mbpp.json is there: DATA=mbpp-sanitized")
    with pytest.raises(DataError) as caught:
        load_problems("humanevl")
    assert caught.value.fix == "did you mean humaneval?"


def test_a_subset_is_drawn_by_its_seed_in_the_order_of_the_problems(tmp_path):
    problems = load_problems(written(tmp_path, *({**WHOLE, "task_id": n, "text": f"No. {n}"} for n in range(601, 641))))
    subset = sample_subset(problems, 10, seed=1)
    assert subset == sample_subset(problems, 10, seed=1) != sample_subset(problems, 10, seed=2)
    assert len(subset) == len({problem.task_id for problem in subset}) == 10
    assert [problem.task_id for problem in subset] == sorted(problem.task_id for problem in subset)
    assert subset != problems[:10]
    assert sample_subset(problems, None, seed=1) == sample_subset(problems, 99, seed=1) == problems
