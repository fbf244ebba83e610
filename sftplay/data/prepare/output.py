"""What a pass over the rows hands on: kept examples, held-out chats, refused rows, and the report at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from sftplay.data.prepare.arrow import RowWriter
from sftplay.data.prepare.batch import Example, RowOutcome
from sftplay.data.prepare.policies import SIDES, RowPolicies, Side
from sftplay.data.records import Source

CHATS, REFUSED, REPORT = "held_out_chats.jsonl", "refused_rows.jsonl", "report.json"


class Output(Protocol):
    """Takes what a pass keeps, batch by batch."""

    def begin(self, policies: RowPolicies) -> int:
        """How many rows an earlier pass has done; `policies` then know what they knew there."""

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        """Take the kept examples of a batch, each with what became of its row."""

    def write_chat(self, chat: str) -> None:
        """Take a held-out chat, as JSON."""

    def write_refused(self, place: Source, reason: str) -> None:
        """Take the place of a row that cannot be used, and why."""

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """All of a batch has been taken; these were its rows."""

    def finish(self, report: dict[str, Any]) -> None:
        """All rows are done."""


class RowFiles:
    """Files of a folder: the rows of each side and their places as Arrow streams, the rest as JSON."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, ExitStack()
        self._writers = {
            side: self._files.enter_context(RowWriter(folder / f"{side}.arrow", folder / f"{side}_places.arrow"))
            for side in SIDES
        }
        self._chats = self._files.enter_context((folder / CHATS).open("w", encoding="utf-8"))
        self._refused = self._files.enter_context((folder / REFUSED).open("w", encoding="utf-8"))

    def __enter__(self) -> RowFiles:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.close()

    def begin(self, _: RowPolicies) -> int:
        """As `Output.begin`: a pass that was broken off is done again from the start."""
        return 0

    def write(self, side: Side, kept: Sequence[tuple[RowOutcome, Example]]) -> None:
        """As `Output.write`."""
        outcomes = [outcome for outcome, _ in kept]
        rows, places = [outcome.row for outcome in outcomes], [outcome.source for outcome in outcomes]
        self._writers[side].write([example for _, example in kept], rows, places=places)

    def write_chat(self, chat: str) -> None:
        """As `Output.write_chat`."""
        self._chats.write(chat + "\n")

    def write_refused(self, place: Source, reason: str) -> None:
        """As `Output.write_refused`."""
        self._refused.write(refused_line(place, reason))

    def end_batch(self, outcomes: Sequence[RowOutcome], policies: RowPolicies) -> None:
        """As `Output.end_batch`: nobody reads the files before they are whole."""

    def finish(self, report: dict[str, Any]) -> None:
        """As `Output.finish`."""
        (self._folder / REPORT).write_text(json.dumps(report), encoding="utf-8")


def refused_line(place: Source, reason: str) -> str:
    """The line of a row that cannot be used, in REFUSED."""
    return json.dumps({"path": place.path, "line": place.line, "record": place.record, "reason": reason}) + "\n"
