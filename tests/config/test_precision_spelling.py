"""`train.bf16` and `train.fp16` beside `train.precision`."""

import pytest

ACCEPTED = {
    "{bf16: true}": "bf16",
    "{fp16: true}": "fp16",
    "{bf16: true, fp16: false}": "bf16",
    "{bf16: false, fp16: false}": "fp32",
    "{bf16: true, precision: null}": "bf16",
    "{bf16: false, fp16: false, precision: fp32}": "fp32",
    "{bf16: false, precision: fp16}": "fp16",
}
REFUSED = {
    "{bf16: true, fp16: true}": "both are true",
    "{bf16: true, precision: fp16}": "says bf16, but train.precision says fp16",
    "{bf16: false, precision: bf16}": "says not bf16, but train.precision says bf16",
    "{bf16: false}": "false says what not to use, and nothing says what to use",
    "{bf16: auto}": "'auto' is not true or false",
}


@pytest.mark.parametrize("train", ACCEPTED)
def test_the_switches_stand_for_a_precision(load, train):
    assert load(f"train: {train}\n").train.precision == ACCEPTED[train]


@pytest.mark.parametrize("train", REFUSED)
def test_switches_that_contradict_or_decide_nothing_are_refused(refusals, train):
    (problem,) = refusals(f"seed: 1\ntrain: {train}\n")
    assert problem.what == REFUSED[train]
    assert problem.where.startswith("run.yaml:2 train.")
    assert problem.fix


def test_the_origin_of_the_precision_is_the_line_of_the_switch(load):
    cfg = load("train:\n  fp16: false\n  bf16: true\n")
    assert cfg.origins["train.precision"] == "run.yaml:3"
    assert "train.bf16" not in cfg.origins


LAYERED = [
    ("{precision: fp32}", "{bf16: true}", (), "bf16"),
    ("{bf16: true}", "{precision: fp32}", (), "fp32"),
    ("{bf16: true}", "{fp16: false}", (), "bf16"),
    ("{}", "{bf16: true}", ("train.bf16=false", "train.fp16=false"), "fp32"),
    ("{precision: bf16}", "{}", ("train.precision=auto",), "auto"),
]


@pytest.mark.parametrize(("base", "file", "overrides", "precision"), LAYERED)
def test_a_higher_layer_decides_over_a_lower_one_in_either_spelling(load, write, base, file, overrides, precision):
    write(f"train: {base}\n", "base.yaml")
    assert load(f"include: base.yaml\ntrain: {file}\n", *overrides).train.precision == precision


def test_a_lone_false_that_meets_its_own_precision_from_below_is_refused(refusals, write):
    write("train: {bf16: true}\n", "base.yaml")
    (problem,) = refusals("include: base.yaml\n", "train.bf16=false")
    assert problem.where == "command line train.bf16"
    assert problem.fix == "write train.precision: fp32 or fp16"
