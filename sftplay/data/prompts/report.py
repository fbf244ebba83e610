"""The data report of a run on prompts, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def prompts_table(report: Mapping[str, Any]) -> str:
    """The report for people."""
    lines = [
        f"data report      {report['read']:,} read = {report['kept']:,} kept"
        f" + {sum(report['dropped'].values()):,} dropped + {report['refused']:,} refused"
    ]
    for name, source in report["sources"].items():
        mean = source["tokens"] / max(1, source["examples"])
        lines.append(f"  {name:<14} {source['examples']:,} prompts of {mean:,.0f} tokens   {source['path']}")
    lines += [f"  dropped        {count:,}: {reason.replace('_', ' ')}" for reason, count in report["dropped"].items()]
    if report["refused"]:
        lines.append(f"  refused        reasons with file and line in {report['refused_rows']}")
    if repeated := report["duplicates"] + report["near_duplicates"]:
        fate = "left out" if "duplicate" in report["dropped"] else "kept"
        lines.append(f"  duplicates     {repeated:,} prompts repeat an earlier one; {fate}")
    lines.append(f"  columns        {', '.join(report['columns'])[:90]}")
    lines.append(f"  length         longest {report['longest_tokens']:,} tokens, limit {report['max_prompt_tokens']:,}")
    lines += [f"  warning        {warning}" for warning in report["warnings"]]
    lines += [f"  note           {note}" for note in report["notes"]]
    return "\n".join(lines)
