"""The rewards that the kit ships, in one table: what each is called in a config, and what it judges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Judges = Literal["content", "form"]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A reward of the kit."""

    module: str
    function: str
    judges: Judges
    """content: only a right answer scores. form: any answer of the right shape does."""

    columns: tuple[str, ...] = ()
    """Columns of the rows that it reads."""

    needs: tuple[str, ...] = ()
    """Options that must be given."""

    is_penalty: bool = False
    """0 is its best value."""


SHIPPED = {
    "format": Shipped("form_rewards", "has_form", "form"),
    "syntax": Shipped("form_rewards", "is_code", "form", ("entry_point",)),
    "length": Shipped("form_rewards", "has_length", "form", needs=("most",)),
    "overlong": Shipped("form_rewards", "not_overlong", "form", needs=("most", "soft"), is_penalty=True),
    "repetition": Shipped("form_rewards", "not_repetitive", "form", is_penalty=True),
    "exact_match": Shipped("text_rewards", "exact_match", "content", ("answer",)),
    "regex": Shipped("text_rewards", "matches", "form", needs=("pattern",)),
    "json_schema": Shipped("text_rewards", "fits_schema", "form", needs=("schema",)),
    "math": Shipped("math_rewards", "solves", "content", ("answer",)),
    "code_tests": Shipped("code_rewards", "passes_tests", "content", ("tests",)),
    "executes": Shipped("code_rewards", "executes", "form"),
}
"""Name in a config -> reward."""
