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
from sftplay.sandbox.pool import SAFE, find_problem

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
    told = (plain["model"], plain["adapter"], plain["weights"], plain["step"])
    assert told == (base["model"], None, "start", None)
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
    assert "is measured with --base\n" in said
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
