"""A reward model, trained on pairs: its loss and steps against plain torch, its result in plain transformers."""

from __future__ import annotations

import json

import pytest
import torch
from in_process import assert_same_course, built, stop_and_resume, train
from pairs import RUN, pair_inputs
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer


@pytest.fixture(scope="module")
def pairs(tiny_llama, tmp_path_factory):
    return pair_inputs(tiny_llama, tmp_path_factory.mktemp("pairs"), margin=0.5)


def test_a_run_trains(pairs, tmp_path):
    run = train(tmp_path, pairs, **RUN, eval__before=True, eval__after=True, train__eval_steps=2)
    for line in run.metrics: print(line)
    for p in sorted(run.folder.eval.glob("*.json")): print(p, p.read_text())
    print((run.folder.eval/"after.jsonl").read_text()[:500])
    assert 0
