"""Small JSON files that may be broken: what is whole in them, and what is wrong with the rest. Nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is none."""
    content, _ = examine_object(path)
    return content


def examine_object(path: Path) -> tuple[dict[str, Any], str]:
    """The file's object, and why it has none; both are empty where there is no file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, f"cannot be read ({error.strerror})"
    except (ValueError, RecursionError):
        return {}, "is no JSON"
    return (content, "") if isinstance(content, dict) else ({}, "holds no JSON object")


def read_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a file with one on each line, and the numbers of the lines that hold none.

    Empty lines do not count, nor does a last line that was cut off: a process was killed while it wrote.
    """
    objects, broken = [], []
    *lines, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, raw in enumerate([*lines, last], start=1):
        try:
            content = json.loads(raw.decode("utf-8", "replace")) if raw.strip() else {}
        except (ValueError, RecursionError):
            content = None
        if isinstance(content, dict):
            objects += [content] if content else []
        elif number <= len(lines):
            broken.append(number)
    return objects, broken
