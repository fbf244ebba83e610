"""Models of the toy with digits, each trained once."""

from __future__ import annotations

from pathlib import Path

import pytest
from score_run import score_inputs
from small_run import Inputs

from sftplay.model.toys import DigitsRecipe, make_digits


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
