"""How many tokens the rows of a data file have, and which limit follows from that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sftplay.config.schema.run import RunConfig
from sftplay.data.records import Chat, Record
from sftplay.errors import DataError, MachineError
from sftplay.model.libraries import unneeded_for_rows
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.startup import leave_out

BYTES_A_TOKEN = 3
"""UTF-8 bytes of a token: English text has 4 to 5 in a large vocabulary, code about 3, Chinese about 3."""

TURN_TOKENS = 8
"""What a chat template writes around a turn: names, marks, line ends."""

STEP_TOKENS = 64
USUAL_SHARE = 0.99
SHORTEST = 64


@dataclass(frozen=True)
class Measured:
    """Tokens of each row, ascending, before anything is cut."""

    tokens: Sequence[int]
    is_estimate: bool
    """Told from bytes, because the tokenizer cannot be opened here."""

    reason: str = ""
    """Why it is an estimate."""

    def at(self, share: float) -> int:
        """The length that this share of the rows does not exceed."""
        return self.tokens[min(len(self.tokens) - 1, math.ceil(share * len(self.tokens)) - 1)]

    def cut(self, limit: int) -> int:
        """How many rows are longer than `limit`."""
        return sum(n > limit for n in self.tokens)

    def within(self, limit: int) -> RowLengths:
        """The lengths of the rows when they are cut at `limit`."""
        kept = [min(n, limit) for n in self.tokens]
        return RowLengths(longest=kept[-1], mean=sum(kept) / len(kept), count=len(kept))


def estimate(records: Sequence[Record], reason: str = "") -> Measured:
    """The rows' lengths by their bytes."""
    return Measured(sorted(map(_estimated, records)), is_estimate=True, reason=reason)


def measure(cfg: RunConfig, records: Sequence[Record]) -> Measured:
    """The rows' lengths by the model's own tokenizer and chat template, or by their bytes where it cannot be opened."""
    leave_out(unneeded_for_rows(cfg.model))
    from sftplay.data.encode.render import Renderer
    from sftplay.data.template.templates import resolve_template
    from sftplay.model.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(cfg.model)
    except MachineError as error:
        return estimate(records, error.what)
    has_chats = any(isinstance(record, Chat) for record in records)
    try:
        template = resolve_template(cfg.data.template, tokenizer) if has_chats or tokenizer.chat_template else None
        rendered = Renderer.prove(tokenizer, template, samples=records[:32]).render(records)
    except DataError as error:  # training says so with its remedy
        return estimate(records, error.what)
    lengths = sorted(len(example.input_ids) for example in rendered if not example.problem)
    return Measured(lengths, is_estimate=False) if lengths else estimate(records, rendered[0].problem)


def limit_for(tokens: int) -> int:
    """The next round number of tokens."""
    return max(SHORTEST, math.ceil(tokens / STEP_TOKENS) * STEP_TOKENS)


def _estimated(record: Record) -> int:
    if isinstance(record, Chat):
        texts = [message.content + "".join(call.arguments for call in message.calls) for message in record.messages]
        return _of_bytes("".join([*texts, record.tools])) + TURN_TOKENS * len(texts)
    return _of_bytes(record.text)


def _of_bytes(text: str) -> int:
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_A_TOKEN)
