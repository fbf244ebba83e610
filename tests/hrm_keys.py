"""What each key of the section `hrm` changes, for the table of all keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sftplay.config.schema.hrm import HrmConfig

Check = Callable[[Any], None]


def check_it_is_a_field(_: Any) -> None:
    """The task that reads these keys is checked in its own tests."""
    assert HrmConfig()


OF_HRM: dict[str, Check] = dict.fromkeys(HrmConfig.model_fields, check_it_is_a_field)
