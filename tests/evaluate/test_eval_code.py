"""`eval-code` as a user types it: any model of a config, beside finished runs, and several processes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from in_process import Finished, Inputs, train
from small_run import WORDS

from sftplay import cli
from sftplay.data.load_problems import load_problems
from sftplay.data.problem import format_question
from sftplay.errors import MachineError, RunError
from sftplay.runs import code_eval as ranks
from sftplay.runs.code_eval import Questions
from sftplay.sandbox.choose import SAFE, find_problem

MBPP = Path(__file__).resolve().parents[3] / "shared" / "data" / "mbpp" / "sanitized-mbpp.json"
KNOWN = 100

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    """Seven problems; the solution of the last one fails."""
    rows = [
        {
            "task_id": n, "text": " ".join(Random(n).choices(WORDS, k=n)), "code": f"def f(x): return x + {n}",
            "test_list": [f"assert f(1) == {n + 1}", f"assert f(2) == {n + (3 if n == 17 else 2)}"],
        }
        for n in range(11, 18)
    ]  # fmt: skip
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """The figures that the verb prints."""
    capsys.readouterr()
    code = cli.main(["eval-code", "--json", *map(str, words)])
    said = capsys.readouterr()
    assert code == 0, said.err
    content: dict[str, Any] = json.loads(said.out)
    return content


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers_of(path: Path) -> list[tuple[str, str]]:
    return [(line["task_id"], line["answer"]) for line in lines_of(path)]


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("run"), inputs, train__learning_rate=0.05, train__max_steps=6)


@pytest.mark.contract
def test_a_run_and_its_adapter_named_by_a_config_answer_alike_and_not_like_their_base(
    run: Finished, problems: Path, write_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    home = run.folder.path.parents[1]
    shown = ("--data", problems, "--max-new-tokens", 6)
    result = asked(capsys, "--config", home / "run.yaml", *shown)
    assert (result["n"], list(result["left_out"]), result["k"], result["split"]) == (6, ["17"], [1], "test")
    assert (result["weights"], result["step"], result["run"]) == ("result", 6, str(run.folder.path))
    base = asked(capsys, "--config", home / "run.yaml", *shown, "--base")
    assert (base["weights"], base["step"]) == ("start", None)
    named = write_config("named.yaml", run_name=None, model__adapter=str(run.folder.path / "adapter"))
    adapter = asked(capsys, "--config", named, *shown)
    assert (adapter["run"], adapter["adapter"]) == (None, str(run.folder.path / "adapter"))
    plain = asked(capsys, "--config", write_config("plain.yaml", run_name=None), *shown)
    assert (plain["model"], plain["adapter"]) == (base["model"], None)
    of_run, outputs = run.folder.eval, tmp_path / "outputs"
    tuned, untuned = (answers_of(of_run / f"code-{number}.jsonl") for number in (1, 2))
    assert tuned != untuned
    assert answers_of(outputs / "named-untrained" / "eval" / "code-1.jsonl") == tuned
    assert answers_of(outputs / "plain-untrained" / "eval" / "code-1.jsonl") == untuned
    assert json.loads((of_run / "code-1.json").read_text()) == result  # nothing was written over


@pytest.mark.contract
def test_a_run_without_a_result_is_told_from_a_config_without_a_run(
    problems: Path, write_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = write_config()
    folder = tmp_path / "outputs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.resolved.yaml").write_text(config.read_text())
    assert cli.main(["eval-code", "--config", str(config), "--data", str(problems)]) == 2
    said = capsys.readouterr().err
    assert "this run has no result yet" in said
    assert "ARGS=--base" in said
    assert cli.main(["eval-code", "--config", str(config), "--data", str(problems), "--run", "other"]) == 2
    assert "no run 'other'" in capsys.readouterr().err


@pytest.mark.contract
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--k", "5"], "pass@5 cannot be estimated from 1 answers a problem"),
        (["--k", "1,11", "--n", "10", "--temperature", "0.8"], "pass@11 cannot be estimated from 10 answers"),
        (["--n", "0"], "not a number, 1 or more: '0'"),
        (["--n", "2"], "2 answers a problem would all be the likeliest one"),
        (["--top-p", "0.9"], "at temperature 0 nothing is drawn"),
        (["--nnodes", "2"], "eval-code starts processes of one node"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_opened(
    words: list[str], said: str, write_config: Any, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["eval-code", "--config", str(write_config()), "--data", "none.jsonl", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_shows_the_ranks_and_starts_nothing(write_config: Any, capsys: pytest.CaptureFixture[str]):
    config = write_config(cluster={"launcher": "accelerate"})
    assert cli.main(["eval-code", "--config", str(config), "--nproc", "2", "--dry-run", "--json"]) == 0
    argv = json.loads(capsys.readouterr().out)["argv"]
    assert argv[1:3] == ["-m", "accelerate.commands.launch"]
    assert argv[-2:] == ["sftplay.runs.code_eval", "FOLDER"]


def test_shares_cover_every_answer_once_and_keep_those_of_a_problem_together():
    questions = Questions(tuple("abcde"), samples=3, temperature=1.0, top_p=1.0, seed=0, max_new_tokens=1)
    shares = [questions.share(rank, 2) for rank in range(2)]
    assert sorted([*shares[0], *shares[1]]) == list(range(15))
    assert shares[1] == [3, 4, 5, 9, 10, 11]  # questions b and d


def test_what_a_rank_could_not_do_is_the_error_of_the_command(tmp_path: Path):
    refused = MachineError("there is no memory", where="rank 1", fix="take a smaller model")
    (tmp_path / "rank0.json").write_text(json.dumps({"answers": {"0": "a", "2": "c"}}))
    (tmp_path / "rank1.json").write_text(json.dumps({"error": refused.as_json()}))
    with pytest.raises(MachineError, match="there is no memory") as caught:
        ranks.gather(tmp_path, 2, last_lines=[])
    assert caught.value.fix == "take a smaller model"
    (tmp_path / "rank1.json").unlink()
    with pytest.raises(RunError, match="ended without its answers") as lost:
        ranks.gather(tmp_path, 2, last_lines=["Killed"])
    assert lost.value.where == "rank 1"
    (tmp_path / "rank1.json").write_text(json.dumps({"answers": {"1": "b"}}))
    assert ranks.gather(tmp_path, 2, last_lines=[]) == {0: "a", 1: "b", 2: "c"}


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "drawing"),
    [
        ("torchrun", ()),
        pytest.param("accelerate", ("--n", 2, "--temperature", 0.9), marks=pytest.mark.long),
    ],
)
def test_two_processes_give_the_answers_of_one(
    launcher: str, drawing: tuple[Any, ...], run: Finished, problems: Path, capsys: pytest.CaptureFixture[str]
):
    config = run.folder.path.parents[1] / "run.yaml"
    words = ("--config", config, "--data", problems, "--max-new-tokens", 6, "--limit", 5, *drawing)
    one = asked(capsys, *words)
    two = asked(capsys, *words, "--nproc", 2, f"cluster.launcher={launcher}")
    assert (one["processes"], two["processes"], two["n"]) == (1, 2, 5)
    newest = sorted(run.folder.eval.glob("code-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))[-2:]
    single, double = map(answers_of, newest)
    assert single == double
    assert len({answer for _, answer in single}) > 1
    assert {key: one[key] for key in ("pass@1", "statuses")} == {key: two[key] for key in ("pass@1", "statuses")}


@pytest.mark.slow
@pytest.mark.skipif(not MBPP.exists(), reason=f"needs {MBPP}")
def test_a_model_that_knows_exactly_100_answers_scores_exactly_that_on_mbpp(
    write_config: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    patient = ("sandbox.timeout=120", "sandbox.test_timeout=60")  # whatever else runs on this machine
    problems = load_problems(str(MBPP), "test")
    known = problems[5 : 5 + KNOWN]
    program = {format_question(each): f"Here:\n```python\n{each.reference}\n```" for each in known}

    def scripted(_: Any, questions: Questions) -> dict[int, str]:
        wrong = "```python\ndef nothing(): pass\n```"
        return {number: program.get(text, wrong) for number, text in enumerate(questions.texts)}

    monkeypatch.setattr(ranks, "answer_share", scripted)
    figures = asked(capsys, "--config", write_config(), "--data", MBPP, *patient)
    assert (figures["n"], figures["left_out"]) == (len(problems), {})
    assert figures["pass@1"] == KNOWN / len(problems)
    assert figures["statuses"]["ok"] == KNOWN
