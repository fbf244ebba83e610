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


def interrupt(run: Path) -> None:
    shutil.rmtree(run / "adapter")
    status = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps({**status, "state": "failed", "exit_code": 5}))


@pytest.mark.contract
def test_an_old_run_that_was_interrupted_goes_on_and_ends_as_it_would_have_ended(old_home, sftplay):
    run = old_home / "outputs" / "old"
    interrupt(run)
    done = sftplay(
        "resume", "--config", "run.yaml", "--run", "old", cwd=old_home, env={"PYTHONPATH": str(OLD.parents[2])}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    weights, recorded = (load_file(at / "adapter" / "adapter_model.safetensors") for at in (run, OLD / "run"))
    assert weights.keys() == recorded.keys()
    for name, value in weights.items():
        # Bit for bit on the machine that made it; another processor may round otherwise.
        assert float((value - recorded[name]).abs().max()) < 1e-5, name


OLD_NAMES = {"data.leaks": "drop", "cpt.exhausted": "stop", "grpo.redraws": 2, "grpo.skip_silent": False}
NEW_NAMES = (
    "data.contamination=drop",
    "cpt.on_source_end=stop",
    "grpo.dynamic_sampling_rounds=2",
    "grpo.skip_zero_variance=false",
)


@pytest.fixture
def home_with_old_names(old_home: Path) -> Path:
    """The old run, begun with keys that were renamed since: in its resolved config and in its checkpoint."""
    run = old_home / "outputs" / "old"
    resolved = (run / "config.resolved.yaml").read_text().replace("  leaks: error", "  leaks: drop  # run.yaml:5")
    sections = "cpt:\n  exhausted: stop  # run.yaml:8\ngrpo:\n  redraws: 2  # run.yaml:9\n  skip_silent: false\n"
    (run / "config.resolved.yaml").write_text(resolved + sections)
    marker = run / "checkpoints" / "checkpoint-2" / "COMPLETE.json"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({**content, "config": {**content["config"], **OLD_NAMES}}))
    return old_home


@pytest.mark.contract
def test_a_run_with_renamed_keys_is_measured_asked_reported_and_merged(home_with_old_names, sftplay):
    (home_with_old_names / "questions.jsonl").write_text('{"prompt": "why"}\n')
    for words in (
        ["eval", "--config", "run.yaml", "--run", "old", "--json"],
        ["eval", "--config", "outputs/old/config.resolved.yaml", "--run", "outputs/old", "--json"],
        ["infer-batch", "--config", "run.yaml", "--run", "old", "--in", "questions.jsonl", "--out", "answers.jsonl"],
        ["report", "--config", "run.yaml", "--run", "old"],
        ["merge", "--config", "run.yaml", "--run", "old"],
    ):
        done = sftplay(*words, cwd=home_with_old_names, env={"PYTHONPATH": str(OLD.parents[2])})
        assert done.returncode == 0, done.stdout + done.stderr
    report = (home_with_old_names / "outputs" / "old" / "report.html").read_text()
    assert "grpo.dynamic_sampling_rounds" in report
    assert "grpo.redraws" not in report


@pytest.mark.contract
def test_a_run_with_renamed_keys_goes_on_by_their_new_names_and_as_no_other_run(home_with_old_names, sftplay):
    run = home_with_old_names / "outputs" / "old"
    interrupt(run)
    words = ["resume", "--config", "run.yaml", "--run", "old"]
    there = {"cwd": home_with_old_names, "env": {"PYTHONPATH": str(OLD.parents[2])}}
    refused = sftplay(*words, **there)
    assert refused.returncode == 2
    for key, was, now in (
        ("data.contamination", "'drop'", "'error'"),
        ("cpt.on_source_end", "'stop'", "'repeat'"),
        ("grpo.dynamic_sampling_rounds", "2", "0"),
    ):
        assert f"{key} was {was} when the run began and is {now} now" in " ".join(refused.stderr.split())
    assert "skip_zero_variance" not in refused.stderr
    done = sftplay(*words, *NEW_NAMES, **there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run / "adapter").is_dir()
    assert "dynamic_sampling_rounds: 2  # command line" in (run / "config.resolved.yaml").read_text()
