"""Two models on devices of their own, and models all of whose weights train, beside two adapters on one base."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from in_process import Finished, StopAfter, assert_same_course, new_run, stop_and_resume, train, train_in
from score_run import score_options
from small_run import Inputs
from transformers import AutoModelForCausalLM
from untimed_metrics import untimed

pytestmark = pytest.mark.slow

SMALL = {"train__max_steps": 2, "score__stage1_steps": 1, "score__stage2_steps": 1, "train__eval_steps": 2}
FULL = {"tuning__mode": "full", "train__gradient_checkpointing": True, **SMALL}


def assert_same(one: Finished, other: Finished) -> None:
    for mine, its in zip(untimed(one.metrics), untimed(other.metrics), strict=True):
        assert mine.keys() == its.keys()
        for key, value in mine.items():
            assert value == (pytest.approx(its[key], abs=1e-6) if isinstance(value, float) else its[key]), key
    assert one.weights.keys() == other.weights.keys()
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], atol=1e-6, rtol=0, msg=name)


def test_two_models_with_an_adapter_each_learn_what_two_adapters_on_one_base_learn(warm_inputs: Inputs, tmp_path: Path):
    options = score_options(**SMALL, train__gradient_checkpointing=True, score__advantage="critic")
    shared, roles = (
        train(tmp_path / name, warm_inputs, **options, score__placement=name) for name in ("shared", "roles")
    )  # fmt: skip
    assert not shared.trainer.role_models.is_separate
    models = roles.trainer.role_models.models
    assert models["solver"] is not models["guide"]
    assert (
        roles.trainer.role_models.find_checkpoint_weights().keys()
        == shared.trainer.role_models.find_checkpoint_weights().keys()
    )
    assert_same(shared, roles)


def test_a_run_goes_on_in_another_placement(warm_inputs: Inputs, tmp_path: Path):
    options = score_options(**SMALL, train__gradient_checkpointing=True)
    whole = train(tmp_path / "whole", warm_inputs, **options)
    cfg, folder = new_run(tmp_path, warm_inputs, **options)
    assert train_in(cfg, folder, StopAfter(1)).outcome.stop_signal == signal.SIGTERM
    changed = cfg.with_values({"train.resume": "auto", "score.placement": "roles"}, "test")
    resumed = train_in(changed, folder)
    assert resumed.trainer.role_models.is_separate
    assert_same(whole, resumed)


@pytest.fixture(scope="module")
def whole(warm_inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("full"), warm_inputs, **score_options(**FULL, eval__after=True))


def test_all_weights_of_both_models_train_and_the_reference_stays_what_they_began_as(
    whole: Finished, warm_inputs: Inputs
):
    began = AutoModelForCausalLM.from_pretrained(warm_inputs.model).state_dict()
    role_models = whole.trainer.role_models
    for name, tensor in role_models._reference.state_dict().items():
        assert torch.equal(tensor, began[name]), name
    result = whole.folder.result
    assert result is not None
    for path, role in ((result, "solver"), (result / "guide", "guide")):
        saved = AutoModelForCausalLM.from_pretrained(path).state_dict()
        trained = role_models.models[role].state_dict()
        assert saved.keys() == began.keys()
        assert all(torch.equal(tensor, trained[name]) for name, tensor in saved.items())
        assert any(not torch.equal(tensor, began[name]) for name, tensor in saved.items())
    learners = whole.folder.read_json("manifest.json")["model"]
    assert learners["trainable_parameters"] == 2 * role_models.models["solver"].num_parameters()
    assert whole.metrics[0]["kl_t1"] == pytest.approx(0, abs=1e-6)
    assert whole.metrics[-1]["kl_t1"] > 0
    assert (whole.folder.eval / "after.json").is_file()


def test_two_whole_models_resume_bit_for_bit(whole: Finished, warm_inputs: Inputs, tmp_path: Path):
    assert_same_course(stop_and_resume(tmp_path, warm_inputs, 1, **score_options(**FULL)), whole)
