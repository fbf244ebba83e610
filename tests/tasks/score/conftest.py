"""Models of the toy with digits, each trained once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from score_run import score_inputs
from small_run import Inputs
from transformers import AutoModelForCausalLM

from sftplay.model.builtin import DigitsRecipe, make_digits
from sftplay.tasks.score.role_models import RoleModels


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that is hardly trained."""
    folder = tmp_path_factory.mktemp("digits") / "model"
    make_digits(folder, DigitsRecipe(steps=3), say=print)
    return folder


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return score_inputs(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def warm_inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """A model after 60 steps, which makes actions of different lengths."""
    return score_inputs(tmp_path_factory.mktemp("digits"), steps=60)


@pytest.fixture(scope="session")
def two_adapters(digits: Path) -> Callable[[], RoleModels]:
    """Make solver and guide on one base, as after some steps: both halves of a pair are there."""

    def make() -> RoleModels:
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_pretrained(digits)
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        role_models = RoleModels(model, has_guide=True, guide_learns=True, has_value=True)
        for role in ("solver", "guide"):
            for parameter in role_models.trainable[role]:
                parameter.data.normal_(0, 0.05)
        return role_models

    return make
