"""What a command that uses a finished run takes from the run, and what from the config that names it."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.runs.finished_run import open_run


def test_rows_to_measure_on_come_from_the_config_and_what_shaped_the_weights_from_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "run_name: mine\nmodel: {name: a}\ndata: {train_path: b, val_path: VAL}\ntrain: {learning_rate: RATE}\n"
    run = tmp_path / "outputs" / "mine"
    (run / "adapter").mkdir(parents=True)
    for val, rate in (("before.jsonl", "1e-3"), ("now.jsonl", "1e-5")):
        (tmp_path / "run.yaml").write_text(text.replace("VAL", val).replace("RATE", rate))
        if rate == "1e-3":
            (run / "config.resolved.yaml").write_text(dump_resolved(load_config("run.yaml")))
    overrides = ["eval.limit=7", "data.test_path=test.jsonl"]
    cfg, folder = open_run(Namespace(config="run.yaml", overrides=overrides, run=None, verb="eval"))
    assert folder.path.name == "mine"
    assert (cfg.data.val_path, cfg.data.test_path, cfg.eval.limit) == ("now.jsonl", "test.jsonl", 7)
    assert cfg.train.learning_rate == 1e-3


@pytest.mark.parametrize("verb", ["export", "merge", "eval-quick", "eval-code", "infer-batch --in=a --out=b", "resume"])
def test_the_name_of_a_run_suffices_for_every_verb_that_opens_one(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("run_name: mine\nmodel: {name: a}\ndata: {train_path: b}\n")
    run = tmp_path / "outputs" / "mine"
    run.mkdir(parents=True)
    (run / "config.resolved.yaml").write_text(dump_resolved(load_config("run.yaml")))
    done = json.dumps({"state": "done" if verb == "resume" else "stopped"})
    (run / "status.json").write_text(done)
    assert main([*verb.split(), "--run=mine"]) == (0 if verb == "resume" else 2)
    said = "".join(capsys.readouterr())
    assert "is finished: nothing to do" in said if verb == "resume" else "mine: this run has no result yet" in said
    assert main([*verb.split(), "--run=his"]) == 2
    assert "outputs: no run 'his'\n  fix: name one of mine" in capsys.readouterr().err
    assert main([*verb.split(), "--make-args="]) == 2
    assert "or the run: RUN=NAME" in capsys.readouterr().err
