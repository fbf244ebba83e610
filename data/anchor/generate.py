"""Writes data/anchor/train.jsonl and held_out.jsonl: chats of the kinds that `builtin:tiny` has practised, all new.

They come from the writers of data/base/generate.py with other seeds. No chat occurs twice, in these files or in
practice.txt. One fixed seed each: the files are the same on every machine.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROWS = {"held_out": (200, 5150), "train": (2000, 5151)}
"""File -> number of rows, seed."""

HERE = Path(__file__).resolve().parent
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
Chat = tuple[tuple[str, str], ...]


def practice() -> ModuleType:
    """data/base/generate.py."""
    spec = importlib.util.spec_from_file_location("base_generate", HERE.parent / "base" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chats_in(passage: str) -> list[Chat]:
    """The dialogue of a passage as (role, content); nothing where it is plain text."""
    turns = tuple((role, content) for role, content in TURN.findall(passage))
    return [turns] if turns else []


def new_chats(writer: ModuleType, *, seed: int, seen: set[Chat]) -> Iterator[Chat]:
    """Chats that are not in `seen`, which grows."""
    while True:
        for passage in writer.passages(seed, 1000):
            for chat in chats_in(passage):
                if chat[:1] not in seen:
                    seen.add(chat[:1])
                    yield chat
        seed += 1000


def rows() -> dict[str, list[Chat]]:
    """The chats of each file."""
    writer = practice()
    seen = {chat[:1] for passage in writer.passages() for chat in chats_in(passage)}
    files = {}
    for file, (count, seed) in ROWS.items():
        chats = new_chats(writer, seed=seed, seen=seen)
        files[file] = [next(chats) for _ in range(count)]
    return files


if __name__ == "__main__":
    for file, chats in rows().items():
        lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in chat]}) + "\n" for chat in chats]
        path = HERE / f"{file}.jsonl"
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
        print(f"{path.name}: {path.stat().st_size} bytes")
