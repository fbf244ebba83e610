"""A finished run is measured, talked to and given a file, by the commands a user types."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, train
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

from sftplay import cli
from sftplay.commands import evaluate
from sftplay.generate.generate import Generator

pytestmark = pytest.mark.usefixtures("verbs_environment")

Command = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    home = tmp_path_factory.mktemp("use")
    test_rows = home / "test.jsonl"
    test_rows.write_text("\n".join(inputs.held_out.read_text().splitlines()[:5]) + "\n")
    return train(
        home, inputs, train__learning_rate=0.05, train__max_steps=8, eval__after=True, eval__max_new_tokens=6,
        data__test_path=str(test_rows),
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(run: Finished) -> Path:
    return run.folder.path.parents[1] / "run.yaml"


@pytest.fixture(scope="module")
def plain(run: Finished) -> Callable[[list[dict[str, str]]], str]:
    """The answer of plain PEFT and transformers to a chat, greedy, alone in its batch."""
    adapter = run.folder.path / "adapter"
    model = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(adapter)

    def answer(messages: list[dict[str, str]]) -> str:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        with torch.no_grad():
            out = model.generate(
                input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False, max_new_tokens=6,
            )  # fmt: skip
        text: str = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
        return text

    return answer


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.mark.contract
def test_infer_batch_answers_every_row_in_order_and_keeps_its_fields(
    run: Finished, config: Path, plain: Any, sftplay: Command, tmp_path: Path
):
    rows: list[dict[str, Any]] = [
        {"id": 7, "prompt": "why old boats carry salt over quiet hills and green stone"},
        {"messages": user("seven"), "note": "kept"},
        {"prompt": "light"},
        {"messages": [{"role": "system", "content": "asks"}, *user("the river"), *assistant("why"), *user("walks")]},
        {"prompt": "ünïcödé \u2028 line"},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "new folder" / "out.jsonl"
    source.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    done = sftplay("infer-batch", "--config", config, "--in", source, "--out", target)
    assert done.returncode == 0, done.stderr
    answered = [json.loads(line) for line in target.read_text().split("\n") if line]
    assert [{k: v for k, v in row.items() if k != "response"} for row in answered] == rows
    chats = [row.get("messages") or user(row["prompt"]) for row in rows]
    assert [row["response"] for row in answered] == [plain(chat) for chat in chats]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": ', "is not JSON"),
        ('["a list"]', "is a list, not an object"),
        ('{"frage": "x"}', "has no question; its keys are 'frage'"),
        ('{"prompt": 3}', "prompt is a number, not a text"),
        ('{"messages": []}', "does not end with a turn that can be answered"),
        ('{"messages": [{"role": "user"}]}', "messages[0]"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "message 2 is from"),
        ('{"messages": [{"role": "assistant", "content": "hi"}]}', "message 1 is from"),
    ],
)
def test_row_that_cannot_be_answered_is_refused_with_file_and_line(
    line: str, said: str, run: Finished, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "in.jsonl"
    source.write_text(f'{{"prompt": "fine"}}\n\n{line}\n')
    code = cli.main(["infer-batch", "--config", str(config), "--in", str(source), "--out", str(tmp_path / "o.jsonl")])
    error = capsys.readouterr().err
    assert code == 4
    assert f"{source}:3" in error
    assert said in error
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.contract
def test_missing_input_file_is_refused(run: Finished, config: Path, tmp_path: Path):
    assert cli.main(["infer-batch", "--config", str(config), "--in", str(tmp_path / "no.jsonl"), "--out", "x"]) == 4


@pytest.mark.contract
def test_infer_answers_line_by_line_and_remembers_the_conversation(
    run: Finished, config: Path, plain: Any, sftplay: Command
):
    done = sftplay("infer", "--config", config, input="the river\nwhy\n\nnever read\n")
    assert done.returncode == 0, done.stderr
    first = plain(user("the river"))
    second = plain([*user("the river"), {"role": "assistant", "content": first}, *user("why")])
    said = [line for line in done.stdout.split("\n") if not line.startswith("[")]
    assert "\n".join(said) == f"{first}\n{second}\n"


@pytest.fixture
def styled(run: Finished) -> Iterator[list[dict[str, str]]]:
    """The run as if it had been trained with a system prompt; the message it puts first."""
    before = run.folder.resolved.read_text()
    assert "  system: null\n" in before
    run.folder.resolved.write_text(before.replace("  system: null\n", "  system: old boats\n"))
    yield [{"role": "system", "content": "old boats"}]
    run.folder.resolved.write_text(before)


@pytest.fixture
def asked(run: Finished, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that models are given from here on, as token ids, the longest of a batch first."""
    prompts: list[list[int]] = []
    real = Generator.generate

    def generate(self: Generator, ids: torch.Tensor, mask: torch.Tensor, *rest: Any, **named: Any) -> Any:
        prompts.extend(row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True))
        return real(self, ids, mask, *rest, **named)

    monkeypatch.setattr(Generator, "generate", generate)
    return prompts


def prompt_of(run: Finished, chat: list[dict[str, str]]) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(run.folder.path / "adapter")
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    return ids


def test_the_system_prompt_of_the_run_goes_before_rows_that_have_none(
    styled: list[dict[str, str]], asked: list[list[int]], run: Finished, config: Path, tmp_path: Path
):
    own = [{"role": "system", "content": "seven"}, *user("light and stone")]
    rows = [{"prompt": "light"}, {"messages": user("light river")}, {"messages": own}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # What the config says now is not what the run was trained with.
    arguments = ["--config", str(config), "--in", str(source), "--out", str(target), "data.system=another"]
    assert cli.main(["infer-batch", *arguments]) == 0
    chats = [[*styled, *user("light")], [*styled, *user("light river")], own]
    assert asked == sorted((prompt_of(run, chat) for chat in chats), key=len, reverse=True)
    answered = [json.loads(line) for line in target.read_text().splitlines()]
    assert [{key: row[key] for key in row if key != "response"} for row in answered] == rows


def test_an_edited_template_is_reported_with_both_hashes(run: Finished, capsys: pytest.CaptureFixture[str]):
    file = run.folder.path / "adapter" / "chat_template.jinja"
    before = file.read_text()
    trained = json.loads((run.folder.path / "manifest.json").read_text())["template_sha256"]
    assert trained == hashlib.sha256(before.encode()).hexdigest()

    def said() -> str:
        evaluate.stored_template(AutoTokenizer.from_pretrained(run.folder.path / "adapter"), run.folder)
        return capsys.readouterr().out

    assert said() == ""
    try:
        file.write_text(before + "edited")
        result = said()
    finally:
        file.write_text(before)
    assert "is not the one this run was trained with" in result
    assert trained in result
    assert hashlib.sha256((before + "edited").encode()).hexdigest() in result


def read(run: Finished, name: str) -> dict[str, Any]:
    return json.loads((run.folder.eval / f"{name}.json").read_text())


@pytest.mark.contract
def test_eval_gives_the_figures_that_the_run_measured(run: Finished, config: Path, sftplay: Command):
    after = read(run, "after")
    done = sftplay("eval", "--config", config, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == {"before": read(run, "before"), "after": read(run, "after")}
    assert result["after"] == {**after, "loss": pytest.approx(after["loss"], rel=1e-6), "perplexity": pytest.approx(
        after["perplexity"], rel=1e-5)}  # fmt: skip
    assert result["before"]["loss"] > result["after"]["loss"] + 0.05
    assert result["after"]["perplexity"] == pytest.approx(math.exp(result["after"]["loss"]))
    rows = [json.loads(line) for line in (run.folder.eval / "after.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(run.folder.path / "adapter")
    too_long = sum(len(tokenizer.encode(row["reference"], add_special_tokens=False)) > 6 for row in rows)
    assert 0 < too_long < len(rows)
    what = f"note: {too_long} of {len(rows)} references have more tokens than eval.max_new_tokens (6): answers as long"
    assert done.stderr.count(what) == 2


@pytest.mark.contract
@pytest.mark.parametrize("arguments", [["eval", "--split", "test"], ["eval-test"]], ids=" ".join)
def test_eval_of_test_rows_that_are_not_named_is_refused(
    run: Finished, config: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    assert cli.main([*arguments, "--config", str(config), "data.test_path=null"]) == 2
    assert "there is no test set" in capsys.readouterr().err


def test_a_config_that_names_no_test_rows_leaves_those_of_the_run(run: Finished, config: Path, tmp_path: Path):
    lines = [line for line in config.read_text().splitlines() if "test_path" not in line]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(lines))
    assert cli.main(["eval-test", "--config", str(path), "--run", str(run.folder.path), "eval.limit=1"]) == 0


def test_rows_that_were_trained_on_are_no_test_rows(
    run: Finished, config: Path, inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "test.jsonl"
    path.write_text("".join(line + "\n" for line in inputs.train.read_text().splitlines()[2:4]))
    words = ["eval-test", "--config", str(config), f"data.test_path={path}", "eval.limit=1"]
    assert cli.main(words) == 4
    said = capsys.readouterr().err
    assert said.startswith(f"{path}: 2 of its rows were trained on")
    assert f"{inputs.train}:3 is held out as well, at {path}:1" in said
    path.write_text('{"prompt": "a stone nobody has seen", "completion": "light"}\n')
    assert cli.main(words) == 0
    assert cli.main(["eval-test", "--config", str(config), f"data.test_path={inputs.train}", "eval.limit=1"]) == 4
    assert "of its rows were trained on" in capsys.readouterr().err  # a file that the run knows, but to train on


def test_a_run_that_held_nothing_out_is_asked_for_rows_and_not_for_a_split_of_those_it_trained_on(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    train(tmp_path, inputs, data__val_path=None, data__split=0, train__max_steps=1)
    assert cli.main(["eval", "--config", str(tmp_path / "run.yaml"), "data.split=0.5"]) == 4
    said = capsys.readouterr().err
    assert "data.val_path: no held-out rows to measure on\n  fix: name rows that were not trained on" in said


def test_a_run_whose_rows_are_gone_is_measured_on_test_rows_as_the_refusal_says(
    inputs: Inputs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = Path(shutil.copy(inputs.train, tmp_path / "rows.jsonl"))
    train(tmp_path, inputs, data__train_path=str(rows), train__max_steps=1)
    rows.unlink()
    words = ["--config", str(tmp_path / "run.yaml"), "eval.limit=1"]
    assert cli.main(["eval", *words, f"data.train_path={inputs.train}"]) == 4  # a run keeps its own rows
    said = capsys.readouterr().err
    assert f"{rows}: there is no such file\n  fix: put it back" in said
    assert "make eval-test ARGS=data.test_path=FILE" in said
    assert cli.main(["eval-test", *words, f"data.test_path={inputs.held_out}"]) == 0


@pytest.fixture
def measure(run: Finished, config: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs an eval verb: what it tells as JSON."""

    def measure(verb: str, *arguments: str) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main([verb, "--config", str(config), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return measure


def test_eval_test_measures_both_models_on_the_test_rows(run: Finished, measure: Any, inputs: Inputs):
    n_held_out = read(run, "after")["n"]
    assert measure("eval", "data.val_path=null")["after"]["n"] == n_held_out  # and no share of what was trained on
    result = measure("eval-test")
    assert result == {"before": read(run, "test-before"), "after": read(run, "test-after")}
    rows = [json.loads(line) for line in (run.folder.eval / "test-after.jsonl").read_text().splitlines()]
    held_out = [json.loads(line)["messages"] for line in inputs.held_out.read_text().splitlines()]
    assert [row["reference"] for row in rows] == [turns[1]["content"] for turns in held_out[:4]]  # eval.limit: 4
    fewer = measure("eval", "--split", "test", "eval.limit=3")
    assert fewer["before"]["n"] == fewer["after"]["n"] == 3


def test_eval_full_answers_every_row_and_counts_by_every_metric(run: Finished, measure: Any):
    result = measure("eval-full")
    assert result == {"before": read(run, "full-before"), "after": read(run, "full-after")}
    assert result["before"]["n"] == result["after"]["n"] == 12
    assert {"loss", "perplexity", "exact_match", "rouge_l", "chrf"} < set(result["after"])
    assert result["after"]["loss"] < result["before"]["loss"]
    chosen = measure("eval-full", "eval.limit=3", "eval.metrics=[chrf]")  # the command line goes first
    assert chosen["after"]["n"] == 3
    assert set(chosen["after"]) == {"n", "loss", "perplexity", "chrf"}


@pytest.mark.contract
def test_run_without_a_result_is_refused(run: Finished, config: Path, tmp_path: Path):
    hidden = run.folder.path / "adapter"
    hidden.rename(run.folder.path / "away")
    try:
        assert cli.main(["eval", "--config", str(config)]) == 2
    finally:
        (run.folder.path / "away").rename(hidden)
