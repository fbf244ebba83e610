"""The figures and the table of the GPU benchmark, from the rows that `gpu_sizing` measures."""

from __future__ import annotations

from typing import Any

GIB = 2**30


def title(row: dict[str, Any]) -> str:
    """A config in few words."""
    return f"{row['model'].rsplit('/', 1)[-1]} {row['mode']} {row['tokens']}"


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and worst cases over all configs."""
    held = [row for row in rows if row.get("allocated_bytes")]
    speeds = [row["speed_of_best"] for row in rows if row.get("speed_of_best")]
    used = [share for row in held if (share := used_share(row)) is not None]
    return {
        "configs": len(rows),
        "died": sum(row["error"] is not None for row in rows),
        "out_of_memory": sum(bool(row.get("out_of_memory")) for row in rows),
        "estimate_mean_abs": mean([abs(off(row, "estimated_allocated_bytes")) for row in held]),
        "plan_mean_abs": mean([abs(off(row, "predicted_allocated_bytes")) for row in held]),
        "plan_worst": max((off(row, "predicted_allocated_bytes") for row in held), key=abs, default=None),
        "used_share_mean": mean(used),
        "speed_of_best_mean": mean(speeds),
        "speed_of_best_least": min(speeds, default=None),
    }


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def off(row: dict[str, Any], key: str) -> float:
    """A prediction's error as a share of what was measured."""
    return row[key] / row["allocated_bytes"] - 1


def used_share(row: dict[str, Any]) -> float | None:
    """Of the device's memory, what the process held; None without a device."""
    return row["process_bytes"] / row["total_bytes"] if row.get("process_bytes") else None


def as_line(row: dict[str, Any]) -> str:
    """A row in short, for the screen."""
    case = title(row)
    if row["error"]:
        return f"{case}: {row['error']}"
    if row["out_of_memory"]:
        return f"{case}: {row['rows']} rows OUT OF MEMORY"
    return (
        f"{case}: {row['rows']} rows, allocated {row['allocated_bytes'] / GIB:.3f} GiB, "
        f"plan {off(row, 'predicted_allocated_bytes'):+.1%}"
    )


def as_markdown(report: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The table for docs/benchmarks.md."""
    about, found = report["machine"], report["summary"]
    libraries = ", ".join(f"{name} {version}" for name, version in about["libraries"].items() if version)
    errors = f"{percent(found['estimate_mean_abs'])}, of the plan after its probe {percent(found['plan_mean_abs'])}"
    speed = f"{percent(found['speed_of_best_mean'])} (least {percent(found['speed_of_best_least'])})"
    lines = [
        f"{about['date']}, {about['device']}, driver {about['driver'] or '-'}, {libraries}; allocated: "
        f"{about['allocated_is']}. {found['configs']} configs in {report['seconds']} s: {found['out_of_memory']} out "
        f"of memory, {found['died']} died; mean error of the estimate {errors}; memory used "
        f"{percent(found['used_share_mean'])}; speed of the chosen batch over the best {speed}.",
        "",
        "| config | batch x accum | estimate GiB | plan GiB | allocated GiB | plan off | reserved GiB "
        "| process, planned GiB | process GiB | used | speed of best | best batch |",
        "| --- " * 12 + "|",
    ]
    return "\n".join([*lines, *(as_row(row) for row in rows)]) + "\n"


def as_row(row: dict[str, Any]) -> str:
    case = title(row)
    if "rows" not in row:
        return f"| {case} | {row['error']} |" + " - |" * 10
    cells = [str(case), f"{row['rows']} x {row['accum']}", *map(gib, (row["estimated_allocated_bytes"],))]
    cells += [gib(row["predicted_allocated_bytes"])]
    if "allocated_bytes" not in row:
        return f"| {' | '.join([*cells, row['error'] or 'out of memory'])} |" + " - |" * 7
    cells += [gib(row["allocated_bytes"]), f"{off(row, 'predicted_allocated_bytes'):+.1%}"]
    cells += [gib(row["reserved_bytes"]), gib(row["predicted_process_bytes"]), gib(row["process_bytes"])]
    cells += [
        percent(used_share(row)),
        percent(row.get("speed_of_best")),
        str(row.get("best_rows") or row["error"] or "-"),
    ]
    return f"| {' | '.join(cells)} |"


def gib(size: float | None) -> str:
    return "-" if size is None else f"{size / GIB:.3f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
