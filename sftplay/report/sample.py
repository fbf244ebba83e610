"""One training row as tokens, each marked as learned or not: samples/masked.json, which the report shows.

The file holds `{"row": int, "source": "path:line", "tokens": [[text, learned], ...]}`; the texts of all tokens together
are the row's text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sftplay.data.records import IGNORE_INDEX
from sftplay.launch.run_folder import RunFolder

FILE = "samples/masked.json"
HALF = "\ufffd"
"""What a decoder writes for bytes that are not a whole character yet."""


def masked_sample(tokenizer: Any, example: dict[str, Any], *, source: str = "") -> dict[str, Any]:
    """Return the content of samples/masked.json for an example with `input_ids`, `labels` and maybe `row`.

    Where several tokens spell one character, the last one has its text and the others are empty.
    """
    texts = _split_text(tokenizer, [int(token) for token in example["input_ids"]])
    learned = [int(label) != IGNORE_INDEX for label in example["labels"]]
    tokens = [[text, flag] for text, flag in zip(texts, learned, strict=True)]
    return {"row": int(example.get("row", 0)), "source": source, "tokens": tokens}


def write_masked_sample(folder: RunFolder, tokenizer: Any, *, example: dict[str, Any], source: str = "") -> None:
    folder.write_json(FILE, masked_sample(tokenizer, example, source=source))


def _split_text(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text each token adds to those before it; joined they are the decoded row, special tokens included."""

    def decode(begin: int, end: int) -> str:
        return str(
            tokenizer.decode(list(ids[begin:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    texts: list[str] = []
    # Tokens from `anchor` on are decoded together, because some decoders drop a space at the very beginning; the text
    # of those before `end_of_done` is known.
    anchor = end_of_done = 0
    known = ""
    for end in range(1, len(ids) + 1):
        whole = decode(anchor, end)
        text = whole[len(known) :] if whole.startswith(known) else decode(end_of_done, end)
        # A character has at most 4 bytes in UTF-8, so also at most 4 tokens.
        if text.endswith(HALF) and end < len(ids) and end - end_of_done < 4:
            texts.append("")
            continue
        texts.append(text)
        anchor, end_of_done = end_of_done, end
        known = decode(anchor, end_of_done)
    return texts
