"""Cards by the names that users and drivers write."""

from __future__ import annotations

import pytest

from sftplay.errors import ConfigError
from sftplay.plan.devices import CARDS, find_card, parse_fleet


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("4090", "RTX-4090"),
        ("a100", "A100-80GB"),
    ],
)
def test_a_card_is_found_by_every_usual_spelling(written, meant):
    card = find_card(written)
    assert card is not None
    assert card.name == meant


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_is_found_by_its_own_name(card):
    assert find_card(card.name) is card
    assert find_card(f"NVIDIA {card.name.replace('-', ' ')}") is card


@pytest.mark.parametrize(
    ("words", "count", "name"),
    [("2xH200", 2, "H200"), ("H200", 1, "H200"), ("8 x A100-40GB", 8, "A100-40GB"), ("4*T4", 4, "T4")],
)
def test_a_fleet_is_a_number_and_a_card(words, count, name):
    found, card = parse_fleet(words, "GPUS")
    assert (found, card.name) == (count, name)


@pytest.mark.parametrize("words", ["2xH2000", "H201", "0xH200", "A1000000", "", "x"])
def test_an_unknown_card_is_refused_with_a_way_out(words):
    with pytest.raises(ConfigError) as error:
        parse_fleet(words, "GPUS")
    assert "VRAM=" in str(error.value)
    assert words != "2xH2000" or "did you mean H200" in str(error.value)
