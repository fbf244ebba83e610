"""The base of every section of the config, and the types of its numbers and paths. It knows no section and no key."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Auto = Literal["auto"]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
WITH_HOME = AfterValidator(os.path.expanduser)
UserPath = Annotated[str, WITH_HOME]
"""A path, or a name in place of one. `~` becomes the user's home folder, as in a shell."""


class Section(BaseModel):
    """Part of the config: it is frozen, refuses keys that are not listed, and converts no value silently."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )
