"""Keys that were renamed in the last release, for as long as users and run folders have their old names.

A config with an old name is refused with the new one. What an older run has written is read by the new one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED_KEYS = {
    "grpo.redraws": "grpo.dynamic_sampling_rounds",
    "grpo.skip_silent": "grpo.skip_zero_variance",
    "grpo.control": "grpo.placebo_reward",
    "grpo.gauge_steps": "grpo.logprob_check_steps",
    "score.hint_gain": "score.min_hint_gain",
    "data.leaks": "data.contamination",
    "cpt.exhausted": "cpt.on_source_end",
}
"""Old dotted key -> the new one, which is in the same section."""


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping by dotted keys with old names replaced by the new ones."""
    return {RENAMED_KEYS.get(key, key): value for key, value in values.items()}
