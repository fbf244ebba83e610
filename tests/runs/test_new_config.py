"""`init`: a config from a data file. What is found is taken, what is guessed is said, and nothing is overwritten."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.forecast import RowLengths
from sftplay.runs.new_config import MODELS, TOY, Measured, choose_model, draft_config, survey_rows

ROOT = Path(__file__).resolve().parents[2]
SHARED_DATA = ROOT.parent / "shared" / "data"
BASE = load_config(ROOT / "configs/run_lora.yaml")
GIB = 1 << 30

FOUND = {
    "alpaca/alpaca_2000.json": ("alpaca", {}),
    "glaive-toolcall/sharegpt_toolcall_200.json": ("sharegpt", {}),
    "gpteacher-code/codegen_500.jsonl": ("alpaca", {}),
    "gsm8k/train_1000.jsonl": ("question_answer", {}),
    "humaneval/HumanEval.jsonl": ("humaneval", {}),
    "mbpp/sanitized-mbpp.json": ("mbpp", {}),
    "sgd-dialogues/messages_150.jsonl": ("messages", {}),
    "sudoku/puzzles.jsonl": ("question_answer", {"question": "puzzle", "answer": "solution"}),
}


def survey(path: Path, **data: object):
    return survey_rows(BASE.with_values({"data.train_path": str(path), **data}, "test"))


def machine(*, gpu_gib: int = 0, ram_gib: int = 32, cores: int = 2) -> Machine:
    card = Gpu(0, "NVIDIA H100", gpu_gib * GIB, gpu_gib * GIB, (9, 0))
    return Machine(
        gpus=(card,) if gpu_gib else (), gpu_reason="", ram_bytes=ram_gib * GIB, cores=cores, python="3",
        system="Linux", libraries={},
    )  # fmt: skip


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="needs the shared data sets")
def test_layout_and_columns_of_real_data_sets_are_found(name):
    found = survey(SHARED_DATA / name)
    assert (found.layouts[0], dict(found.columns), found.refused[:1]) == (*FOUND[name], ())
    assert found.n_rows == len(found.records)


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "dpo"),
        ({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}, "dpo"),
        ({"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"prompt": "a", "completion": "b"}, "sft"),
        ({"prompt": "a", "completion": "b", "label": 2}, "sft"),
        ({"prompt": "a", "completion": "b", "label": "spam"}, "sft"),
    ],
)  # fmt: skip
def test_rows_of_pairs_and_of_verdicts_get_their_task(row, task, tmp_path, capsys):
    path, out = write_rows(tmp_path / "rows.jsonl", [row] * 40), tmp_path / "run.yaml"
    assert main(["init", str(path), str(out), f"model.name={TOY}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert load_config(out).task_mode == task
    assert document["rows"] == 40
    assert ("task_mode" in document["values"]) == (task != "sft")
    assert main(["validate", "--config", str(out)]) == 0


@pytest.mark.contract
def test_columns_that_no_name_tells_apart_are_asked_for(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"links": "a", "rechts": "b"}] * 3)
    assert main(["init", str(path), str(tmp_path / "run.yaml")]) == 4
    assert "data.columns.question=links data.columns.answer=rechts" in capsys.readouterr().err
    write_rows(path, [{"Frage": "a", "Antwort": "b"}] * 3)  # a file usually has the question first
    assert main(["init", str(path), str(tmp_path / "run.yaml")]) == 4
    assert "data.columns.question=Frage data.columns.answer=Antwort" in capsys.readouterr().err
    write_rows(path, [{"answer_id": "x7", "model_id": "m", "choices": [1]}] * 3)  # as MT-bench's reference answers
    assert main(["init", str(path), str(tmp_path / "run.yaml")]) == 4
    assert "data.columns.question=ASKED data.columns.answer=ANSWERED" in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.contract
@pytest.mark.parametrize("names", [("What they asked", "Our agent's reply"), ("1", "2"), ("null", "{x}")])
def test_the_columns_that_are_asked_for_can_be_typed_as_they_are_printed(names, tmp_path, capsys):
    path, out = write_rows(tmp_path / "rows.jsonl", [dict.fromkeys(names, "a")] * 5), tmp_path / "run.yaml"
    assert main(["init", str(path), str(out)]) == 4
    printed = shlex.split(capsys.readouterr().err.partition("which is which: ")[2])
    assert main(["init", str(path), str(out), f"model.name={TOY}", *printed]) == 0
    assert load_config(out).data.columns == dict(zip(("question", "answer"), names, strict=True))


@pytest.mark.contract
def test_rows_that_are_no_pairs_get_the_advice_of_their_task(tmp_path, capsys):
    """`data.format` and `data.columns.question` were named, which rows of pairs do not know."""
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}] * 5)
    assert main(["init", str(path), str(tmp_path / "run.yaml"), f"model.name={TOY}", "task_mode=dpo"]) == 4
    shown = capsys.readouterr().err
    assert "has no 'chosen' side" in shown
    assert "fix: name the sides chosen and rejected" in shown
    assert "data.format" not in shown


@pytest.mark.contract
def test_a_data_file_that_is_not_there_is_answered_with_the_setting_that_names_it(tmp_path, capsys):
    assert main(["init", f"--data={tmp_path / 'no.jsonl'}", f"--out={tmp_path / 'run.yaml'}"]) == 4
    assert "fix: correct --data=" in capsys.readouterr().err


@pytest.mark.contract
def test_rows_of_a_known_layout_are_answered_with_what_is_wrong_in_them(tmp_path, capsys):
    """Numbers as answers were answered with the advice to name a layout and columns, which changed nothing."""
    path, out = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": 2}] * 5), tmp_path / "run.yaml"
    out.write_text(f"model: {{name: '{TOY}'}}\ndata: {{train_path: {path}}}\n")
    for words in (["init", str(path), str(tmp_path / "new.yaml")], ["validate", "--config", str(out)]):
        assert main(words) == 4
        shown = capsys.readouterr().err
        assert "answer is a number, not a text" in shown
        assert "fix: mend what each line names" in shown


@pytest.mark.contract
def test_documents_without_a_text_are_answered_with_the_column_that_names_it(tmp_path, capsys):
    path, config = write_rows(tmp_path / "rows.jsonl", [{"body": "a long page"}] * 5), tmp_path / "run.yaml"
    source = f"{{name: pages, type: cpt, path: {path}, weight: 1}}"
    config.write_text(f"model: {{name: '{TOY}'}}\ntask_mode: cpt_mixed\ndatasets: [{source}]\n")
    assert main(["validate", "--config", str(config)]) == 4
    assert "fix: name the column of the text, data.columns: {text: NAME}" in capsys.readouterr().err


@pytest.mark.contract
@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("question,answer\nWie heißt die größte Stadt?,Köln\n".encode("cp1252"), "set data.encoding: cp1252"),
        (b"question,answer\na\nb,c,d\n", "has 1 columns"),
    ],
)
def test_rows_that_are_damaged_are_answered_with_their_own_remedy_and_not_with_layouts(content, said, tmp_path, capsys):
    path, out = tmp_path / "rows.csv", tmp_path / "run.yaml"
    path.write_bytes(content)
    out.write_text(f"model: {{name: '{TOY}'}}\ndata: {{train_path: {path}}}\n")
    for words in (["init", str(path), str(tmp_path / "new.yaml")], ["validate", "--config", str(out)]):
        assert main(words) == 4
        shown = capsys.readouterr().err
        assert said in shown
        assert "fix: mend what each line names" in shown
        assert "data.columns" not in shown


@pytest.mark.contract
def test_a_config_of_pairs_has_no_epochs_next_to_the_steps_that_were_asked_for(tmp_path, capsys):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}", "chosen": "b", "rejected": "c"} for n in range(40)])
    out = tmp_path / "run.yaml"
    assert main(["init", str(path), str(out), f"model.name={TOY}", "train.max_steps=3"]) == 0
    assert "epochs" not in out.read_text()
    assert load_config(out).train.max_steps == 3


@pytest.mark.contract
def test_a_file_that_is_there_is_not_touched_and_nothing_is_looked_at(tmp_path, capsys):
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    assert main(["init", "no such file.jsonl", f"OUT={out}"]) == 2
    assert (out.read_text(), "exists already" in capsys.readouterr().err) == ("mine", True)


@pytest.mark.contract
@pytest.mark.parametrize("words", [[], ["no such file.jsonl"], ["rows.jsonl", "run.txt"], ["a", "train.max_stps=3"]])
def test_what_cannot_be_used_is_refused_without_a_trace_on_the_disk(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) in (2, 4)
    assert "fix:" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.contract
def test_an_error_names_no_file_that_the_user_has_not_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    assert main(["init", ".", "../run.yaml"]) == 2
    assert capsys.readouterr().err.startswith("init data.train_path: 'outputs' lies in the folder of rows")


@pytest.mark.contract
def test_a_model_that_is_almost_known_is_asked_about_before_anything_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    out = tmp_path / "run.yaml"
    assert main(["init", str(ROOT / "data/demo/train.jsonl"), str(out), "model.name=Qwen/Qwen2.5-0.5B-Instrct"]) == 2
    assert "did you mean Qwen/Qwen2.5-0.5B-Instruct" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.contract
def test_no_row_is_given_more_tokens_than_the_model_has_places(tmp_path, tiny_llama, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": "what?", "answer": "stone " * n} for n in (5, 900, 900, 900)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert main(["init", str(path), f"model.name={tiny_llama}"]) == 0
    places = json.loads((tiny_llama / "config.json").read_text())["max_position_embeddings"]
    assert load_config("run.yaml").model.max_seq_len == places == 512


@pytest.mark.contract
def test_one_row_is_not_counted_as_several(tmp_path, tiny_llama, capsys):
    path, out = (
        write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "stone " * 900}]),
        tmp_path / "run.yaml",
    )
    assert main(["init", str(path), str(out), f"model.name={tiny_llama}"]) == 0
    assert "the longest of 1 row has" in out.read_text()
    assert "; 1 row is longer than the limit and loses its end" in out.read_text()


@pytest.mark.contract
def test_the_config_that_is_written_is_valid_and_says_what_was_found(tmp_path, tiny_llama, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} what? " + "stone " * (n % 7), "code": "light " * (1 + n % 5)} for n in range(60)]
    path = write_rows(tmp_path / "my rows: #1.jsonl", [*rows, {"prompt": "x"}])
    words = [str(path), f"model.name={tiny_llama}", "train.max_steps=20", "data.processed_dir=p"]
    assert main(["init", *words]) == 0
    assert main(["validate", "--config", "run.yaml"]) == 0
    cfg = load_config("run.yaml")
    assert cfg.data.columns == {"question": "prompt", "answer": "code"}
    assert (cfg.data.train_path, cfg.model.name, cfg.train.max_steps) == (str(path), str(tiny_llama), 20)
    assert (cfg.data.on_bad_row, cfg.train.effective_batch_size) == ("skip", 8)
    capsys.readouterr()
    assert main(["process", "--config", "run.yaml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert cfg.model.max_seq_len - 64 < report["longest_tokens"] <= cfg.model.max_seq_len
    assert (report["cut"], report["refused"]) == (0, 1)
    text = Path("run.yaml").read_text()
    assert f"has {report['longest_tokens']} tokens" in text
    assert "guessed from the names" in text
    assert "1 row cannot be read" in text


@pytest.mark.contract
def test_without_the_tokenizer_lengths_are_told_from_bytes_and_said_to_be_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    rows = write_rows(tmp_path / "rows.jsonl", [{"question": "a" * 300, "answer": "b" * 30}] * 5)
    assert main(["init", str(rows), str(tmp_path / "run.yaml"), "model.name=org/unknown", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # 300 and 30 bytes at 3 a token, and 8 tokens around each of two turns
    assert (found["max_seq_len"], found["rows"]) == (128, 5)
    assert "estimated by bytes" in (tmp_path / "run.yaml").read_text()


@pytest.mark.contract
def test_a_folder_of_one_file_a_side_is_not_trained_on_as_a_whole(tmp_path, tiny_llama, capsys):
    """`make init DATA=gsm8k` took the test rows for training rows, and no figure on them meant anything."""
    folder = tmp_path / "set"
    folder.mkdir()
    for name, count in (("train_60.jsonl", 60), ("test.jsonl", 9), ("valid-1.jsonl", 8)):
        write_rows(folder / name, [{"question": f"{name} {n}", "answer": "b"} for n in range(count)])
    words = ["init", str(folder), str(tmp_path / "run.yaml"), f"model.name={tiny_llama}", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    data = load_config(tmp_path / "run.yaml").data
    paths = [str(folder / name) for name in ("train_60.jsonl", "valid-1.jsonl", "test.jsonl")]
    assert [data.train_path, data.val_path, data.test_path] == paths
    assert found["rows"] == 60
    assert found["values"]["data.test_path"] == {"value": paths[2], "why": f"by its name in {folder}"}
    (tmp_path / "run.yaml").unlink()
    write_rows(folder / "more.jsonl", [{"question": "a", "answer": "b"}])
    assert main(words) == 4
    assert "holds test.jsonl, which is not for training by its name" in capsys.readouterr().err
    (folder / "test.jsonl").rename(folder / "tests.jsonl")
    (folder / "valid-1.jsonl").rename(folder / "valley.jsonl")
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 60 + 9 + 8 + 1


@pytest.mark.contract
def test_lists_tables_and_sections_that_are_typed_stand_in_the_file(tmp_path, tiny_llama, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", [{"q": "a", "answer": "b"}] * 5)
    typed = [
        "rewards=[{name: right, use: math, weight: 0.5}]", "data.columns={question: q, answer: answer}",
        "tuning.lora={r: 4, target_modules: [q_proj]}",
    ]  # fmt: skip
    assert main(["init", "rows.jsonl", "run.yaml", f"model.name={tiny_llama}", *typed]) == 0
    written, asked = load_config("run.yaml"), load_config("run.yaml", typed)
    assert written.model_dump() == asked.model_dump()
    assert [reward.weight for reward in written.rewards] == [0.5]
    assert (written.data.columns["question"], written.tuning.lora.r) == ("q", 4)


@pytest.mark.contract
@pytest.mark.parametrize("words", [["--data=rows=1.jsonl", "--out=run.yaml"], ["rows=1.jsonl"]])
def test_a_key_without_a_dot_is_a_key_and_a_file_with_a_sign_is_a_file(
    words, tmp_path, tiny_llama, monkeypatch, capsys
):
    """`make init DATA=a.jsonl OUT=b.yaml ARGS=output_dir=c` took `output_dir=c` for the data, and then forgot it."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows=1.jsonl", [{"question": "a", "answer": "b"}] * 5)
    assert main(["init", *words, f"model.name={tiny_llama}", "output_dir=there", "seed=7"]) == 0
    cfg = load_config("run.yaml")
    assert (cfg.data.train_path, cfg.output_dir, cfg.seed) == ("rows=1.jsonl", "there", 7)


def test_the_model_is_the_largest_that_the_plan_fits_into_the_machine():
    lengths = RowLengths(longest=512, mean=200.0, count=2000)
    cfg = BASE.with_values({"model.max_seq_len": 512}, "test")
    names = [choose_model(cfg, each, lengths=lengths) for each in (
        machine(gpu_gib=80), machine(gpu_gib=8), machine(ram_gib=32), machine(ram_gib=1))]  # fmt: skip
    assert (names[0].name, names[0].mode) == (MODELS[0], "lora")
    sizes = [[*MODELS, TOY].index(choice.name) for choice in names]
    assert sizes == sorted(sizes)
    assert 0 < sizes[1] < sizes[2] < sizes[3]
    assert names[3].name == TOY


def test_lengths_of_rows_are_known_as_they_are_and_as_they_are_cut():
    measured = Measured([2, 4, 6, 12], is_estimate=False)
    assert (measured.at(0.5), measured.at(0.51), measured.at(1.0), measured.cut(5)) == (4, 6, 12, 2)
    assert measured.within(6) == RowLengths(longest=6, mean=4.5, count=4)


def test_the_time_is_that_of_all_rows_and_not_of_those_that_are_looked_at(tmp_path, monkeypatch):
    """A file of 50,000 rows got the model and the hours of its first 5,000."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    drafts = []
    for count in (5_000, 20_000):
        path = write_rows(
            tmp_path / f"{count}.jsonl", [{"question": f"{n}?", "answer": "b " * 20} for n in range(count)]
        )
        drafts.append(draft_config(str(path), [], machine=machine(ram_gib=16), out="run.yaml"))
    few, many = drafts
    assert (few.n_rows, many.n_rows) == (5_000, 20_000)
    assert "from the first 5,000 rows of" in many.text
    assert "rows a step, of 20,000 rows found" in many.text
    assert [*MODELS, TOY].index(few.model) < [*MODELS, TOY].index(many.model)
