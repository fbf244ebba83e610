"""One result of the doctor: all is well, a warning, or something that stops training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "stop"]


@dataclass(frozen=True)
class CheckResult:
    """`stop` means that training would fail or be worthless. `fix` is one action; it is empty where all is well."""

    level: Level
    subject: str
    what: str
    fix: str = ""

    def as_text(self) -> str:
        """`warn  disk: 4.00 GiB free` and its remedy in a second line."""
        head = f"{self.level:<5} {self.subject}: {self.what}"
        return f"{head}\n        fix: {self.fix}" if self.fix else head
