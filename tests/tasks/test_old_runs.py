"""A run that an earlier state of the kit left behind is still read, used and continued."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

OLD = Path(__file__).with_name("old_run")

pytestmark = pytest.mark.slow


@pytest.fixture
def old_home(tmp_path: Path) -> Path:
    """A folder with the old run, its config, model and data, as its user left it."""
    home = tmp_path / "home"
    shutil.copytree(OLD, home, ignore=shutil.ignore_patterns("run"))
    shutil.copytree(OLD / "run", home / "outputs" / "old")
    (home / "outputs" / "old" / "logs").mkdir()
    return home


@pytest.mark.contract
def test_an_old_run_is_measured_asked_reported_and_merged(old_home, sftplay):
    (old_home / "questions.jsonl").write_text('{"prompt": "seven old boats"}\n{"prompt": "why"}\n')
    for words in (
        ["eval", "--config", "run.yaml", "--run", "old", "--json"],
        ["infer-batch", "--config", "run.yaml", "--run", "old", "--in", "questions.jsonl", "--out", "answers.jsonl"],
        ["report", "--config", "run.yaml", "--run", "old"],
        ["merge", "--config", "run.yaml", "--run", "old"],
        ["merge-test", "--config", "run.yaml", "--run", "old"],
    ):
        done = sftplay(*words, cwd=old_home, env={"PYTHONPATH": str(OLD.parents[2])})
        assert done.returncode == 0, done.stdout + done.stderr
    assert len((old_home / "answers.jsonl").read_text().splitlines()) == 2
    measured = json.loads((old_home / "outputs" / "old" / "eval" / "after.json").read_text())
    trained = json.loads((OLD / "run" / "eval" / "step-4.json").read_text())
    assert measured["loss"] == pytest.approx(trained["loss"], abs=1e-5)
    assert "outputs/old" in (old_home / "outputs" / "old" / "report.html").read_text()


@pytest.mark.contract
def test_an_old_run_that_was_interrupted_goes_on_and_ends_as_it_would_have_ended(old_home, sftplay):
    run = old_home / "outputs" / "old"
    shutil.rmtree(run / "adapter")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "failed", "exit_code": 5}))
    done = sftplay(
        "resume", "--config", "run.yaml", "--run", "old", cwd=old_home, env={"PYTHONPATH": str(OLD.parents[2])}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights, recorded = (load_file(at / "adapter" / "adapter_model.safetensors") for at in (run, OLD / "run"))
    assert weights.keys() == recorded.keys()
    for name, value in weights.items():
        # Bit for bit on the machine that made it; another processor may round otherwise.
        assert float((value - recorded[name]).abs().max()) < 1e-5, name
