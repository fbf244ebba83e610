"""The section `numbers` of the config, which the toy task alone reads."""

from __future__ import annotations

from sftplay.config.section import Positive, Section


class NumbersConfig(Section):
    """How rows of numbers are divided."""

    held_out_every: Positive = 10
    """One row out of so many is held out."""


SECTION = NumbersConfig
