"""One question to the driver, and what counts as an answer."""

from __future__ import annotations

from typing import Any


def ask(nvml: Any, function: str, *args: Any, **kwargs: Any) -> Any:
    """What one NVML function returns; None where card, driver, permission or package has no answer."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*args, **kwargs)
    except nvml.NVMLError:
        return None


def as_text(answer: Any) -> str:
    """NVML's strings are bytes in packages before 11.515; an absent answer is empty."""
    if answer is None:
        return ""
    return answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)
