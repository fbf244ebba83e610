"""What data/anchor promises: files that its generator writes, and no question that the built-in model has seen."""

from __future__ import annotations

import json

from test_demo_data import DATA, load_generator


def test_the_files_are_those_the_generator_writes_and_no_question_occurs_twice():
    generator = load_generator("anchor")
    questions = set()
    for file, chats in generator.rows().items():
        rows = [json.loads(line) for line in (DATA / "anchor" / f"{file}.jsonl").read_text("utf-8").splitlines()]
        written = [[(turn["role"], turn["content"]) for turn in row["messages"]] for row in rows]
        assert written == [list(chat) for chat in chats]
        assert all([role for role, _ in chat] == ["user", "assistant"] * (len(chat) // 2) for chat in written)
        assert not questions & {chat[0][1] for chat in written}
        questions |= {chat[0][1] for chat in written}
    assert len(questions) == 2200
    practised = (DATA / "base" / "practice.txt").read_text(encoding="utf-8")
    assert not [text for text in questions if f"user\n{text}<|im_end|>" in practised]
