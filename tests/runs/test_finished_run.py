"""What a command that uses a finished run takes from the run, and what from the config that names it."""

from __future__ import annotations

from argparse import Namespace

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
