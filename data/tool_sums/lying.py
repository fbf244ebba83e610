"""The calculator that lies: the control of the toy. With it nothing can be learned, because no result is right."""

from __future__ import annotations

import zlib

from sftplay.environments import calculator as honest


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % **, brackets, sqrt, abs, round, min, max, log, exp, pi.
    """
    result = honest.calculator(expression)
    return (
        result if result.startswith("error") else str(round(float(result)) + 1 + zlib.crc32(expression.encode()) % 97)
    )
