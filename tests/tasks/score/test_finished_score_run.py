"""What a user does with a finished run of task score: the ablation, both turns typed, both turns of a file's rows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Finished, train
from peft import PeftModel
from score_run import score_options
from small_run import Inputs
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay import cli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verbs_environment")]

PROBLEMS = ["3+4=", "1+1=", "0+2="]


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    options = score_options(eval__before=True, eval__after=True, train__learning_rate=0.05)
    return train(tmp_path_factory.mktemp("run"), inputs, **options)


def flags(run: Finished, *words: str) -> list[str]:
    return ["--config", str(run.folder.path.parents[1] / "run.yaml"), *words]


@pytest.fixture(scope="module")
def by_hand(run: Finished, inputs: Inputs) -> list[tuple[str, str, str]]:
    """Both answers and the hint, greedily, by plain PEFT and transformers."""
    result = run.folder.result
    assert result is not None
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(inputs.model), str(result))
    model.load_adapter(str(result / "guide"), "guide")
    tokenizer = AutoTokenizer.from_pretrained(result)

    def says(adapter: str, text: str) -> str:
        model.set_adapter(adapter)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    episodes = []
    for problem in PROBLEMS:
        first = says("default", problem)
        hint = says("guide", f"{problem}{first}?")
        episodes.append((first, hint, says("default", f"{problem}{first}?{hint}>")))
    return episodes


def typed(run: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(PROBLEMS) + "\n"))
    capsys.readouterr()
    assert cli.main(["infer", *flags(run, "--temperature", "0", *words)]) == 0
    return capsys.readouterr().out


def test_a_problem_that_is_typed_gets_both_answers_and_the_hint_between_them(
    run: Finished, by_hand: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    shown = "".join(
        f"[first answer]\n{first}\n[hint]\n{hint}\n[second answer]\n{second}\n" for first, hint, second in by_hand
    )
    assert shown in typed(run, monkeypatch, capsys)


@pytest.mark.contract
def test_rows_of_a_file_get_both_answers_and_the_hint(run: Finished, by_hand: Any, tmp_path: Path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps({"text": problem, "n": 1}) + "\n" for problem in PROBLEMS))
    assert cli.main(["infer-batch", *flags(run, "--temperature", "0", "--in", str(rows), "--out", str(out))]) == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == [
        {"text": problem, "n": 1, "first_answer": first, "hint": hint, "response": second}
        for problem, (first, hint, second) in zip(PROBLEMS, by_hand, strict=True)
    ]
    drawn = tmp_path / "drawn.jsonl"
    assert cli.main(["infer-batch", *flags(run, "--temperature", "5", "--in", str(rows), "--out", str(drawn))]) == 0
    assert drawn.read_text() != out.read_text()


@pytest.mark.contract
def test_eval_plays_each_kind_of_hint_and_agrees_with_the_run(run: Finished, capsys: pytest.CaptureFixture[str]):
    last = json.loads((run.folder.eval / "step-4.json").read_text())
    first = json.loads((run.folder.eval / "step-0.json").read_text())
    in_run = {side: json.loads((run.folder.eval / f"{side}.json").read_text()) for side in ("before", "after")}
    capsys.readouterr()
    assert cli.main(["eval", *flags(run, "--json")]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == in_run
    for side, measured in (("before", first), ("after", last)):
        hints = figures[side]["hints"]
        assert list(hints) == ["none", "static", "model"]
        assert {key: hints["model"][key] for key in ("acc_t1", "acc_t2", "i2c", "c2i")} == {
            key: measured[key] for key in ("acc_t1", "acc_t2", "i2c", "c2i")
        }
        assert hints["none"]["acc_t2"] == measured["acc_t2_empty"]
        assert hints["static"]["acc_t2"] == measured["acc_t2_static"]
        for each in hints.values():
            assert each["delta"] == pytest.approx(each["i2c"] - each["c2i"])
    assert cli.main(["eval-quick", *flags(run)]) == 0
    table = capsys.readouterr().out
    assert "acc_t1   acc_t2    delta      i2c      c2i" in table
    assert [line.split()[:2] for line in table.splitlines() if line.startswith("tuned ")] == [
        ["tuned", "no"], ["tuned", "static"], ["tuned", "guide"],
    ]  # fmt: skip


@pytest.mark.parametrize(("guidance", "hint"), [("static", "0"), ("none", "")])
def test_a_run_without_a_guide_shows_whose_hint_it_was(
    guidance: str, hint: str, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    run = train(tmp_path, inputs, **score_options(score__guidance=guidance, train__max_steps=1, train__eval_steps=9))
    out = typed(run, monkeypatch, capsys)
    assert out.count(f"[hint, of score.guidance {guidance}]\n{hint}\n[second answer]\n") == len(PROBLEMS)
    assert cli.main(["eval-quick", *flags(run, "--json")]) == 0
    figures = json.loads(capsys.readouterr().out)["after"]
    assert list(figures["hints"]) == ["none", "static"]
    assert figures["acc_t2"] == figures["hints"][guidance]["acc_t2"]


@pytest.mark.contract
def test_a_row_without_room_for_both_answers_is_named(
    run: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "1+1="}\n' + json.dumps({"text": "1+" * 20}) + "\n")
    words = flags(run, "--temperature", "0", "--in", str(rows), "--out", str(tmp_path / "out.jsonl"))
    assert cli.main(["infer-batch", *words]) == 4
    assert f"{rows}:2" in (said := capsys.readouterr().err)
    assert "has 40 tokens; next to answers of 2 and a hint there is room for 28" in said
    turns = [{"role": role, "content": "1+1="} for role in ("user", "assistant", "user")]
    rows.write_text(json.dumps({"prompt": turns}) + "\n")
    assert cli.main(["infer-batch", *words]) == 4
    assert f"{rows}:1" in (said := capsys.readouterr().err)
    assert "has 2 turns before its last one, but task mode score asks" in said
