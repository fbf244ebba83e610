"""The policies across rows: bad rows, duplicates, leaks; and the counts of their outcomes.

It sees outcomes, never tokens. What it remembers of each record takes about 250 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sftplay.config.data import DataConfig
from sftplay.data.layouts.turns import FIX_ROW
from sftplay.data.records import Source
from sftplay.data.tokenize.batch import CUT_AWAY, Example, RowOutcome
from sftplay.data.tokenize.report import RowCounts
from sftplay.errors import DataError

Side = Literal["train", "held_out"]
SIDES: tuple[Side, Side] = ("train", "held_out")
NAMED_ROWS = 5
ROOM = "raise model.max_seq_len (cpt.block_size, where that is set)"
FIX_LONG = f"{ROOM}; or cut such rows with data.too_long: truncate, or leave them out with drop"
FIX_CUT = f"{ROOM}, or leave such rows out with data.too_long: drop"
FIX_LEAK = "take the row out of one of the two files, or leave it out of training with data.contamination: drop"
FIX_TESTED = "leave them out of training with data.contamination: drop; what models are tested by must not be learned"


class RowPolicies:
    """Decide for each outcome what is kept, and count it once."""

    def __init__(
        self, data: DataConfig, max_tokens: int | None, *, limit: str = "max_seq_len", fix_long: str = FIX_LONG
    ) -> None:
        """`limit` names `max_tokens` where a row is too long; `fix_long` is what to do about that."""
        self._data, self._max_tokens, self._limit, self._fix_long = data, max_tokens, limit, fix_long
        self.counts: dict[Side, RowCounts] = {side: RowCounts() for side in SIDES}
        self.n_bad = 0
        self._bad: list[str] = []
        self._remedies: dict[str, None] = {}  # in the order in which their causes came up
        self._exact: dict[Side, set[int]] = {side: set() for side in SIDES}
        self._normal: dict[Side, set[int]] = {side: set() for side in SIDES}
        self.answers: dict[int, int] = {}  # prompt -> the first content with it; of training rows
        self._several: set[int] = set()
        self._guarded: dict[int, str] = {}  # content of held-out and test rows -> where it stands

    def resume(self, counts: Mapping[Side, RowCounts], *, seen: Mapping[Side, NDArray[np.uint64]], chats: Any) -> None:
        """Know what an earlier pass knew: its counts, and of each record that it judged the keys, uint64 [records, 3].

        `chats` are the keys of the training chats among them. Held-out rows must be guarded again.
        """
        self.counts = dict(counts)
        for side, keys in seen.items():
            self._exact[side] = set(keys[:, 0].tolist())
            self._normal[side] = set(keys[:, 1].tolist())
        prompts, normals = chats[:, 2].tolist(), chats[:, 1].tolist()
        self.answers = dict(zip(reversed(prompts), reversed(normals), strict=True))
        pairs = zip(prompts, normals, strict=True)
        self._several = {prompt for prompt, normal in pairs if self.answers[prompt] != normal}

    def guard(self, normal_key: int, source: Source) -> None:
        """Remember a row that must not be trained on."""
        self._guarded.setdefault(normal_key, str(source))

    def keep(self, outcome: RowOutcome, side: Side) -> Sequence[Example]:
        """Return the kept examples of a record; none when the record was refused or dropped, which is counted."""
        counts = self.counts[side]
        if outcome.refused:
            counts.refused += 1
            self._note_bad(f"{outcome.source} {outcome.refused}", self._data.on_bad_row, fix=outcome.fix or FIX_ROW)
            return []
        is_seen = self._count_content(outcome, side, counts=counts)
        reason = self._reason_to_leave(outcome, side, is_seen=is_seen)
        if reason:
            counts.dropped[reason] += 1
            counts.dropped_tokens[reason] += sum(outcome.lengths)
            counts.learnable_tokens += outcome.learnable * (reason == CUT_AWAY)
            return []
        counts.add_record(outcome)
        return outcome.examples

    def check(self) -> None:
        """Raise the DataError that names the first five bad rows, if there were any."""
        if not self.n_bad:
            return
        n_more = self.n_bad - len(self._bad)
        shown = "\n  ".join(self._bad) + (f"\n  and {n_more:,} more" if n_more else "")
        raise DataError(
            f"{self.n_bad:,} {'row' if self.n_bad == 1 else 'rows'} cannot be trained on\n  {shown}",
            where="data",
            fix="; ".join(self._remedies),
        )

    def _count_content(self, outcome: RowOutcome, side: Side, *, counts: RowCounts) -> bool:
        """Count the content. True when an earlier record of this side has the same content, at least in normal form."""
        exact, normal, prompt = outcome.keys
        is_exact = exact in self._exact[side]
        is_seen = is_exact or normal in self._normal[side]
        self._exact[side].add(exact)
        self._normal[side].add(normal)
        counts.duplicates += is_exact
        counts.near_duplicates += is_seen and not is_exact
        if side == "held_out":
            self.guard(normal, outcome.source)
        elif outcome.is_chat and self.answers.setdefault(prompt, normal) != normal:
            self._several.add(prompt)
            counts.prompts_with_several_answers = len(self._several)
        for length in outcome.lengths:
            counts.add_length(length)
        for column in outcome.unused:
            # Every row may have other keys.
            is_named = column in counts.unused_columns or len(counts.unused_columns) < 100
            counts.unused_columns[column if is_named else "(others)"] += 1
        counts.with_special_tokens += outcome.n_escaped > 0
        if self._data.system is not None and outcome.is_chat:
            counts.with_system += outcome.system == self._data.system
        return is_seen

    def _reason_to_leave(self, outcome: RowOutcome, side: Side, *, is_seen: bool) -> str:
        """Return why the record is dropped, or nothing. Where the config says error, also note the record as bad."""
        twin = self._guarded.get(outcome.keys[1], "")
        if side == "train" and (outcome.tested or twin):
            what, fix = f"{outcome.source} is held out as well, at {twin}", FIX_LEAK
            if outcome.tested:
                what, fix = f"{outcome.source} is problem {outcome.tested} of a published test split", FIX_TESTED
            self._note_bad(what, self._data.contamination, fix=fix)
            return "leak"
        if is_seen and self._data.duplicates == "drop":
            return "duplicate"
        if outcome.dropped == "too_long":
            what = f"has {max(outcome.lengths):,} tokens; {self._limit} is {self._max_tokens:,}"
            self._note_bad(f"{outcome.source} {what}", self._data.too_long, fix=self._fix_long)
        elif not outcome.examples:
            is_cut = outcome.dropped == CUT_AWAY
            after = f" in its first {self._max_tokens:,} of {max(outcome.lengths):,} tokens" if is_cut else ""
            what = f"{outcome.source} has nothing to learn{after}"
            self._note_bad(what, self._data.on_bad_row, fix=FIX_CUT if is_cut else FIX_ROW)
        return "" if outcome.examples else outcome.dropped

    def _note_bad(self, line: str, setting: str, *, fix: str) -> None:
        """Name and count a bad row, if the setting about such rows is error."""
        if setting == "error":
            self.n_bad += 1
            if len(self._remedies) < NAMED_ROWS:
                self._remedies[fix] = None
            if len(self._bad) < NAMED_ROWS:
                self._bad.append(line)
