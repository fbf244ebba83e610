"""Names of other kits are answered with the name to use here."""

from pathlib import Path

import pytest
import yaml

from sftplay.config import other_kits
from sftplay.config.keys import all_keys, all_sections
from sftplay.config.other_kits import find_key, read_foreign_keys

OTHER_KITS = read_foreign_keys().names


def test_every_answer_begins_with_a_key_that_exists():
    assert {find_key(action) for action in OTHER_KITS.values()} <= set(all_keys())
    assert len(OTHER_KITS) >= 160


def test_no_name_has_two_answers():
    text = Path(other_kits.__file__).with_suffix(".yaml").read_text()
    names = yaml.safe_load(text)["names"].values()
    assert len(OTHER_KITS) == len(" ".join(names).split())


def test_no_name_of_another_kit_is_a_name_of_ours():
    ours = {key.rsplit(".", 1)[-1] for key in [*all_keys(), *all_sections()]}
    assert not ours & set(OTHER_KITS)


@pytest.mark.parametrize("name", OTHER_KITS)
def test_a_name_of_another_kit_is_answered_at_the_top_and_in_a_section(refusals, name):
    top, inner = refusals(f"{name}: 1\ntrain: {{{name}: 1}}\n")
    assert top.where == f"run.yaml:1 {name}"
    assert inner.where == f"run.yaml:2 train.{name}"
    assert top.fix == inner.fix == f"write {OTHER_KITS[name]}"
    assert top.nearest == inner.nearest == [find_key(OTHER_KITS[name])]


def test_dashes_and_capitals_do_not_hide_a_name_of_another_kit(refusals):
    (problem,) = refusals("Micro-Batch-Size: 4\n")
    assert problem.fix == "write train.batch_size"
