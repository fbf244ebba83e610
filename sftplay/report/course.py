"""The course of a run as charts, and the memory it held beside the memory that was planned.

A chart without meaning is left out: communication of a single process, figures that are 0 all the time.
"""

from __future__ import annotations

from typing import NamedTuple

from sftplay.report.charts import Chart, Curve
from sftplay.report.episodes import is_of_turns
from sftplay.report.figures import capitalized, name_of
from sftplay.report.history import Point, as_bytes, as_number
from sftplay.report.learned import learns_from_rewards
from sftplay.report.run_files import RunFiles, mapping

MEMORY = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_rss_bytes")
SEEN = ("label_tokens", "tokens_seen", "label_tokens_seen")
TIMES = ("tokens_per_s", "padded_tokens_per_s", "samples_per_s", "step_s", "communication_max_s")
MAIN = ("loss", "learning_rate", "grad_norm", *TIMES, *SEEN, *MEMORY)
"""Figures with a chart of their own, or with none on purpose."""

REWARDS = ("reward", "true_reward", "held_out_reward", "held_out_pass")
"""Figures that `learned` draws, beside one for each reward."""

AMONG_PROCESSES = ("exposed_communication_share", "communication_max_s")
"""Figures that say nothing of a single process."""

MOST_OTHERS = 8


def is_drawn_elsewhere(name: str) -> bool:
    """Whether `learned` or `episodes` draws this figure of metrics.jsonl."""
    return name in REWARDS or name.startswith("reward/") or is_of_turns(name)


class Memory(NamedTuple):
    """What the plan allows a process, with its margin, and the most that the main process held, in bytes."""

    what: str
    planned: float
    held: float


def memory_of(run: RunFiles) -> Memory | None:
    """Planned and held memory in the same terms: of torch's allocator on a GPU, of the whole process on a CPU."""
    planned, parts = as_number(run.plan.get("peak_bytes")), mapping(run.plan.get("components"))
    on_gpu, on_cpu = run.history.largest("peak_bytes"), run.history.largest("peak_rss_bytes")
    beside = as_number(parts.get("runtime")) or 0.0
    held = as_bytes(on_gpu or on_cpu)
    planned = as_bytes(planned - beside if planned is not None and on_gpu else planned)
    if not planned or not held:
        return None
    return Memory("torch's allocator" if on_gpu else "the process", planned, held)


def resumed_steps(run: RunFiles) -> list[float]:
    """The steps after which the run was resumed."""
    steps = [step for a in run.attempts[1:] if (step := as_number(a.get("from_step"))) is not None and step >= 0]
    return [step for step in steps if step <= run.step][:50]


def charts_of(run: RunFiles) -> list[Chart]:
    """Loss, learning rate, gradient norm, speed and memory over the steps, then whatever else was logged."""
    history, resumed = run.history, resumed_steps(run)

    def noisy(key: str, name: str, *, colour: str = "a") -> Curve:
        return Curve(key, name, history.curve(key), colour, trend=history.trend(key))

    def plain(key: str, name: str, *, colour: str = "b") -> Curve:
        return Curve(key, name, history.curve(key), colour)

    silent = AMONG_PROCESSES if run.plan.get("world_size", 1) == 1 else ()
    others = [name for name in history.values if name not in (*MAIN, *silent) and not is_drawn_elsewhere(name)]
    others = others[:MOST_OTHERS]
    held_out = Curve("held_out_loss", "held-out", held_out_points(run), "b", dots=True)
    is_padded = history.values.get("padded_tokens_per_s") != history.values.get("tokens_per_s")
    padded = [plain("padded_tokens_per_s", "padding included")] if is_padded else []
    waiting = [] if silent else [plain("communication_max_s", "between processes")]
    memory = [plain(key, name_of(key), colour=colour) for key, colour in zip(MEMORY, "cdab", strict=True)]
    loss = ("Loss", "loss", [noisy("loss", "training"), held_out])
    update = ("Loss of the update, near 0 by construction", "update_loss", [noisy("loss", "training")])
    from_rewards = learns_from_rewards(run)
    all_curves: list[tuple[str, str, list[Curve]]] = [
        *([] if from_rewards else [loss]),
        ("Learning rate", "learning_rate", [plain("learning_rate", "rate", colour="c")]),
        ("Gradient norm", "grad_norm", [noisy("grad_norm", "norm", colour="d")]),
        ("Speed", "tokens",
         [noisy("tokens_per_s", "all processes"), *padded]),
        ("Time of a step", "step_s", [noisy("step_s", "in all"), *waiting]),
        ("Memory of the main process", "_bytes", [*memory, *_plan_line(run)]),
        *((capitalized(name_of(key)), key, [noisy(key, name_of(key), colour="c")]) for key in others),
        *([update] if from_rewards else []),
    ]  # fmt: skip
    return [
        Chart(
            title=title, unit=unit, curves=[curve for curve in curves if curve.points], last_step=run.step,
            resumed=resumed, is_wide=unit == "loss", may_be_log=unit in ("loss", "grad_norm"),
        )
        for title, unit, curves in all_curves
        if any(value for curve in curves for _, value in curve.points)
    ]  # fmt: skip


def _plan_line(run: RunFiles) -> list[Curve]:
    """The planned memory as a level line over the steps that were logged."""
    memory = memory_of(run)
    steps = [step for key in MEMORY for step, _ in run.history.curve(key)]
    if memory is None or not steps:
        return []
    ends = sorted({min(steps), max(steps)})
    return [Curve("planned_bytes", "planned at most", [(step, memory.planned) for step in ends], "d", dashed=True)]


def held_out_points(run: RunFiles) -> list[Point]:
    """Held-out losses over the steps, that of the untrained model at step 0 included."""
    points = dict(run.held_out)
    if "perplexity" in run.evals:
        return sorted(points.items())  # before and after a sliding window has measured, other than while training
    before = as_number(run.evals.get("before", {}).get("loss"))
    if before is not None:
        points.setdefault(0.0, before)
    after = as_number(run.evals.get("after", {}).get("loss"))
    # With the best weights kept, the result is not that of the last step.
    keeps_best = run.value("train.best_metric") or run.value("train.early_stopping")
    if after is not None and run.state == "done" and not keeps_best:
        points.setdefault(float(run.step), after)
    return sorted(points.items())
