"""Keys that bound or watch a run: what cannot be meant is refused, what has no effect is said."""

from __future__ import annotations

import pytest

from sftplay.config.rules.general import notes

REFUSED = {
    "train: {time_limit: tomorrow}": ("train.time_limit", "not a time: 'tomorrow'", "write 3h30m"),
    "train: {time_limit: 0h}": ("train.time_limit", "not a time: '0h'", "write 3h30m"),
    "train: {max_steps: 20, profile: {start: 21, steps: 1}}": (
        "train.profile.start",
        "21 lies behind train.max_steps 20",
        "start at step 20 or before",
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_limit_or_profile_that_cannot_be_meant_is_refused(refusals, text):
    problems = refusals(f"{text}\n")
    assert len(problems) == 1
    key, what, fix = REFUSED[text]
    assert key in problems[0].where
    assert what in problems[0].what
    assert fix in problems[0].fix


@pytest.mark.parametrize(
    "text",
    [
        "train: {time_limit: 1-12:00:00}",
        "train: {time_limit: 3h30m}",
        "train: {max_steps: 20, profile: {start: 20, steps: 5}}",
        "train: {max_steps: 20, profile: {start: 21}}",
        "train: {profile: {start: 1000, steps: 1}}",
    ],
)
def test_what_can_be_meant_is_taken(load, text):
    load(f"{text}\n")


def test_profile_keys_without_steps_are_said_to_have_no_effect(load):
    found = notes(load("train: {max_steps: 20, profile: {start: 5, memory: false}}\n"))
    assert [line.split(" ", 1)[1] for line in found] == [
        "train.profile.start has no effect: train.profile.steps 0 profiles nothing",
        "train.profile.memory has no effect: train.profile.steps 0 profiles nothing",
    ]
    assert notes(load("train: {max_steps: 20, profile: {start: 5, memory: false, steps: 1}}\n")) == []
