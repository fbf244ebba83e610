"""Which engines a run was held against, when, and with which figures."""

from __future__ import annotations

from collections.abc import Iterator

from sftplay.export.parity_table import HEAD, parity_rows
from sftplay.model.start_point import digest_result
from sftplay.report.figures import capitalized
from sftplay.report.page import Block, Remark, Table
from sftplay.report.run_files import RunFiles


def build_blocks(run: RunFiles) -> list[Block]:
    """Return the table of parity.json."""
    rows = parity_rows(run.parity, digest_result(run.folder.result))
    note = "The trained model in plain transformers and fp32 is what engines are held against; docs/parity.md says how."
    return [("table", Table(head=list(map(capitalized, HEAD)), rows=rows, stacks=True)), ("note", note)]


def find_remarks(run: RunFiles) -> Iterator[Remark]:
    """Yield the engines that do not answer as the trained model does."""
    for row in parity_rows(run.parity, digest_result(run.folder.result)):
        if row[-1].startswith("differs"):
            yield "stop", f"{row[0]} does not answer as the trained model ({row[1]}): {row[-1].partition(': ')[2]}"
