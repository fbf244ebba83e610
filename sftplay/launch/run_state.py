"""What the small files of a run hold, field by field, so that a broken one costs no more than what is broken in it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sftplay.config.schema.section import Positive


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Attempt(_Fields):
    from_step: int = 0
    to_step: int | None = None
    cause: str | None


class _Rank(_Fields):
    pid: int


class _Error(_Fields):
    code: str
    what: str
    batch_size: Positive | None = None


class _Status(_Fields):
    state: str | None = None
    step: int | None = None
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    last_checkpoint: str | None = None
    attempts: list[_Attempt] = []
    ranks: list[_Rank] | None = None
    error: _Error | None = None


class _Plan(_Fields):
    world_size: Positive = 1
    batch_size: Positive = 1
    peak_bytes: float | None = None
    allocated_bytes: float | None = None
    resized: bool = False
    shortages: list[dict[str, Any]] = []


SHAPES: dict[str, type[_Fields]] = {"status.json": _Status, "plan.json": _Plan}


class _Event(_Fields):
    event: str
    batch_size: Positive | None = None


def is_event(line: dict[str, Any]) -> bool:
    """True for a line of events.jsonl as the kit writes it."""
    try:
        event = _Event.model_validate(line)
    except ValidationError:
        return False
    return event.event != "out_of_memory" or event.batch_size is not None


def odd_fields(name: str, content: dict[str, Any]) -> list[str]:
    """The fields of the file `name` whose values are not of the kind that the kit writes."""
    if name not in SHAPES:
        return []
    try:
        SHAPES[name].model_validate(content)
    except ValidationError as error:
        return sorted({str(each["loc"][0]) for each in error.errors(include_url=False)})
    return []
