"""Combinations that are refused, and settings reported because they have no effect."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.config.data import DataConfig
from sftplay.config.load import check_rules, load_config, notes
from sftplay.config.run import ModelConfig, RunConfig, TrainConfig
from sftplay.errors import ConfigErrors

REFUSED = {
    "train: {batch_size: 5}": ("train.batch_size", "5 does not divide train.effective_batch_size 32", "write 4 or 8"),
    "train: {batch_size: 3, grad_accum: 4}": (
        "train.batch_size",
        "3 * grad_accum 4 = 12 does not divide train.effective_batch_size 32",
        "write train.effective_batch_size: 24 or 36",
    ),
    "train: {save_steps: 30, eval_steps: 20, best_metric: loss}": (
        "train.save_steps",
        "30 is no multiple of train.eval_steps 20, which train.best_metric needs",
        "write 20 or 40",
    ),
    "train: {lr_scheduler: warmup_stable_decay, warmup_ratio: 0.5, decay_ratio: 0.75}": (
        "train.decay_ratio",
        "0.75 and train.warmup_ratio 0.5 are more than all steps",
        "write train.decay_ratio: 0.5, or less",
    ),
    "train: {lr_scheduler: linear, min_lr_ratio: 0.1}": (
        "train.min_lr_ratio",
        "0.1 is given, but train.lr_scheduler linear has no lowest rate",
        "cosine or warmup_stable_decay",
    ),
    "train: {min_lr_ratio: 0.1, extra: {lr_scheduler_kwargs: {num_cycles: 1}}}": (
        "train.extra.lr_scheduler_kwargs",
        "the kit sets it from train.decay_ratio and train.min_lr_ratio",
        "these two keys",
    ),
    "train: {learning_rate: 0.1, lr_scaling: linear}": (
        "train.lr_scaling",
        "linear needs the effective batch that train.learning_rate was found with",
        "give train.lr_batch_size",
    ),
    "train: {learning_rate: 0.1, lr_batch_size: 8}": (
        "train.lr_batch_size",
        "8 is given, but train.lr_scaling none scales nothing",
        "write train.lr_scaling: linear or sqrt",
    ),
    "train: {lr_scaling: sqrt, lr_batch_size: 8}": (
        "train.lr_scaling",
        "train.learning_rate is auto",
        "give train.learning_rate",
    ),
    "tuning: {backend: unsloth, new_tokens: {path: a.txt}}": (
        "tuning.new_tokens.path",
        "the rows of new tokens would not train, with tuning.backend unsloth",
        "tuning.new_tokens.path: null, or tuning.backend: bnb",
    ),
    "logging: {backend: []}": ("logging.backend", "the list is empty", "write logging.backend: none"),
    "logging: {backend: [wandb, wandb]}": ("logging.backend", "wandb is listed twice", "list it once"),
    "eval: {metrics: [chrf, chrf]}": ("eval.metrics", "chrf is listed twice", "list it once"),
    "tuning: {lora: {target_modules: []}}": ("tuning.lora.target_modules", "no adapter would train", "auto"),
    "tuning: {lora: {target_modules: [a, b], modules_to_save: [b]}}": (
        "tuning.lora.target_modules",
        "b is also in tuning.lora.modules_to_save",
        "one of the two",
    ),
    "run_name: a/b": ("run_name", "'a/b' is a path, not a name of a folder", "output_dir"),
    "run_name: .set-aside": ("run_name", "'.set-aside' keeps starts", "choose another name"),
    "run_name: sweeps": ("run_name", "'sweeps' keeps sweeps", "choose another name"),
    "run_name: ''": ("run_name", "is empty", "leave the key out"),
    'run_name: "a\\nb"': ("run_name", "is no folder's name", "plain name"),
    "run_name: None": ("run_name", "'None' is a word in YAML, not nothing", "write null"),
    "train: {time_limit: tomorrow}": ("train.time_limit", "not a time: 'tomorrow'", "write 3h30m"),
    "train: {max_steps: 20, profile: {start: 21, steps: 1}}": (
        "train.profile.start",
        "21 lies behind train.max_steps 20",
        "start at step 20 or before",
    ),
    "train: {resume: nevr}": ("train.resume", "'nevr' is neither never nor auto", "did you mean 'never'?"),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_combination_that_cannot_be_meant_is_refused_with_a_way_out(refusals, text):
    key, what, fix = REFUSED[text]
    (problem,) = refusals(text + "\n")
    assert problem.where == f"run.yaml:1 {key}"
    assert what in problem.what
    assert fix in problem.fix


ACCEPTED = [
    "train: {batch_size: 8, grad_accum: 4}",
    "train: {batch_size: 4, grad_accum: 4}",
    "train: {save_steps: 40, eval_steps: 20, best_metric: loss, early_stopping: 3}",
    "tuning: {mode: full, new_tokens: {path: a.txt}}\ncluster: {strategy: zero3}",
    "tuning: {mode: qlora, lora: {dora: true}}",
    "train: {resume: ./never2, extra: {adam_beta2: 0.95, label_smoothing_factor: 0.1}}",
    "logging: {backend: [wandb, mlflow]}",
    "train: {time_limit: 3h30m}",
    "train: {max_steps: 20, profile: {start: 20, steps: 5}}",
]


@pytest.mark.parametrize("text", ACCEPTED)
def test_a_combination_that_works_is_accepted(load, text):
    assert check_rules(load(text + "\n")) == []


@pytest.mark.contract
def test_held_out_rows_given_twice_are_refused(write, refusals):
    text = "model: {name: a}\ndata:\n  train_path: b\n  val_path: c\n  split: 0.1\n"
    problem = _only(text, write)
    assert problem.where == "run.yaml:5 data.split"
    assert problem.fix == "remove one of the two"


@pytest.mark.contract
@pytest.mark.parametrize(
    "wants",
    ["train: {best_metric: loss}", "train: {early_stopping: 3}", "eval: {after: true}", "train: {eval_steps: 5}"],
)
def test_a_setting_that_needs_held_out_rows_is_refused_where_there_are_none(write, wants):
    problem = _only(f"model: {{name: a}}\ndata: {{train_path: b, split: 0}}\n{wants}\n", write)
    assert problem.where.startswith("run.yaml:3 ")
    assert problem.what == "needs held-out rows, but data.split is 0 and there is no data.val_path"
    assert load_config(write(f"model: {{name: a}}\ndata: {{train_path: b}}\n{wants}\n"))


@given(st.integers(1, 400), st.integers(1, 400))
def test_the_batch_sizes_named_in_a_refusal_are_the_nearest_divisors(batch, effective):
    train = TrainConfig(batch_size=batch, effective_batch_size=effective)
    errors = check_rules(RunConfig(model=ModelConfig(name="a"), data=DataConfig(train_path="b"), train=train))
    assert bool(errors) == (effective % batch != 0)
    if errors:
        named = [int(word) for word in errors[0].fix.split() if word.isdigit()]
        divisors = [size for size in range(1, effective + 1) if effective % size == 0]
        assert set(named) <= set(divisors)
        assert not [size for size in divisors if min(named) < size < batch or batch < size < max(named)]


BESIDE_NEW_TOKENS = {
    "model: {name: a, adapter: b}": (
        "tuning.new_tokens.path",
        "an adapter that is continued has no rows for new tokens",
        "write model.merge_adapter: true",
    ),
    "cluster: {strategy: fsdp}": (
        "cluster.strategy",
        "train where each process has the whole matrix, which fsdp splits",
        "ddp or zero2, or tuning.mode: full",
    ),
    "train: {loss_head: liger}": (
        "train.loss_head",
        "liger was not tried with rows of new tokens",
        "write train.loss_head: chunked",
    ),
}


@pytest.mark.contract
@pytest.mark.parametrize("text", BESIDE_NEW_TOKENS)
def test_what_leaves_the_rows_of_new_tokens_untrained_is_refused(text, write):
    key, what, fix = BESIDE_NEW_TOKENS[text]
    model = "" if text.startswith("model") else "model: {name: a}\n"
    problem = _only(f"{text}\n{model}data: {{train_path: b}}\ntuning: {{new_tokens: {{path: a.txt}}}}\n", write)
    assert key in problem.where
    assert what in problem.what
    assert fix in problem.fix


def test_a_setting_that_was_merely_included_is_not_noted_but_one_on_the_command_line_is(write, load):
    write("train: {epochs: 3}\ntuning: {lora: {r: 8}}\n", "base.yaml")
    text = "include: base.yaml\ntrain: {max_steps: 4}\ntuning: {mode: full}\n"
    assert notes(load(text)) == []
    assert len(notes(load(text, "train.epochs=2"))) == 1


def _only(text, write):
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(text))
    (problem,) = caught.value.problems
    return problem


NOTED = {
    "tuning: {mode: full, lora: {r: 8, alpha: 16}}": ["tuning.lora.r", "tuning.lora.alpha"],
    "tuning: {mode: full, backend: bnb}": ["tuning.backend"],
    "tuning: {quant_type: fp4, double_quant: false}": ["tuning.quant_type", "tuning.double_quant"],
    "tuning: {mode: qlora, backend: bnb, quant_type: fp4, double_quant: false}": [],
    "train: {epochs: 3, max_steps: 4}": ["train.epochs"],
    "train: {warmup_ratio: 0.1, lr_scheduler: constant}": ["train.warmup_ratio"],
    "train: {decay_ratio: 0.1}": ["train.decay_ratio"],
    "train: {decay_ratio: 0.1, lr_scheduler: warmup_stable_decay}": [],
    "train: {profile: {start: 5, memory: false}}": ["train.profile.start", "train.profile.memory"],
    "train: {profile: {start: 5, memory: false, steps: 1}}": [],
}


@pytest.mark.parametrize("text", NOTED)
def test_a_setting_without_effect_is_noted_with_its_place_and_the_reason(load, text):
    said = [line.partition(" has no effect: ") for line in notes(load(f"{text}\n"))]
    assert [place for place, _, _ in said] == [f"run.yaml:1 {key}" for key in NOTED[text]]
    assert all(reason for _, _, reason in said)
