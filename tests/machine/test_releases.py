"""Names that other libraries have changed are found as the installed releases have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError
from transformers import TrainingArguments

from sftplay.machine.releases import hub_client
from sftplay.model.recomputation import as_named_here, recomputation, recomputation_arguments


@pytest.mark.parametrize("recomputes", [True, False])
def test_recomputation_is_switched_by_arguments_that_nothing_warns_of(recomputes: bool, tmp_path: Path):
    taken = TrainingArguments(str(tmp_path), **recomputation_arguments(recomputes=recomputes))
    assert getattr(taken, recomputation()) is recomputes


def test_an_argument_by_its_old_name_is_not_passed_over(tmp_path: Path):
    given = as_named_here({"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "adam_beta1": 0.8})
    taken = TrainingArguments(str(tmp_path), **{**recomputation_arguments(recomputes=True), **given})
    assert getattr(taken, f"{recomputation()}_kwargs") == {"every_n_layers": 2}
    assert taken.adam_beta1 == 0.8


def test_the_hubs_errors_are_those_of_its_client():
    assert issubclass(HfHubHTTPError, hub_client().HTTPError)
    assert issubclass(hub_client().ConnectError, hub_client().TransportError)
