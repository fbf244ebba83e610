"""Figures for people: their names and units, their changes, and how sure a share is."""

from __future__ import annotations

import math

from sftplay.units import format_bytes, format_seconds

SHARES = (
    "exact_match", "rouge_l", "chrf", "accuracy", "exact_accuracy", "blank_accuracy", "mfu", "pass", "held_out_pass",
    "hidden_pass", "clipped_ratio", "acc_t1", "acc_t2", "acc_t2_empty", "acc_t2_static", "acc_t2_other_hint",
    "follows_hint", "changes_to_hint", "acc_t1_greedy", "acc_t2_greedy", "i2c", "c2i", "fix_rate", "break_rate",
    "rewards/accuracies", "logp_accuracy", "clip_share_t1", "clip_share_t2", "clip_share_guide",
)  # fmt: skip

FEW_PROMPTS = 30
"""Shares of fewer are rough."""

NAMES = {
    "n": "prompts answered",
    "exact_accuracy": "puzzles solved",
    "pass": "pass@1",
    "acc_t1": "first answers right",
    "acc_t2": "second answers right",
    "acc_t2_empty": "second answers right, no hint",
    "acc_t2_static": "second answers right, static hint",
    "acc_t2_other_hint": "second answers right, another problem's hint",
    "follows_hint": "second answers that are the hint",
    "changes_to_hint": "changed answers that are the hint",
    "acc_t1_greedy": "first answers right, likeliest tokens",
    "acc_t2_greedy": "second answers right, likeliest tokens",
    "delta": "gain of the second turn",
    "i2c": "wrong became right",
    "c2i": "right became wrong",
    "fix_rate": "of the wrong ones corrected",
    "break_rate": "of the right ones broken",
    "frac_identical": "second answers that repeat the first",
    "edit_ratio": "share of tokens changed",
    "hint_leak": "hints that state the answer",
    "hint_tokens": "tokens of a hint",
    "truncated": "answers that were cut off",
    "parse_failures": "answers of the wrong form",
    "zero_variance_share": "groups with equal rewards",
    "clipped_ratio": "completions that were cut off",
    "completion_tokens": "tokens of a completion",
    "turns": "turns of the model",
    "tool_calls": "calls of tools",
    "tool_failures": "calls that failed",
    "environment_tokens": "tokens of tools and environment",
    "ended/done_share": "ended: the environment was done",
    "ended/answer_share": "ended: with an answer",
    "ended/turns_share": "ended: at the most turns",
    "ended/tokens_share": "ended: at the most tokens",
    "ended/end_token_share": "ended: with another end token",
    "ended/failure_share": "ended: the environment failed",
    "margin": "margin of the rewards",
    "logp_accuracy": "chosen answer is likelier",
    "rewards/accuracies": "pairs right",
    "rewards/margins": "margin of the rewards",
    **{
        f"{figure}/{side}": f"{name}, {side}"
        for figure, name in (("rewards", "reward"), ("logps", "log-probability"), ("tokens", "tokens"))
        for side in ("chosen", "rejected")
    },
    "answer_tokens": "tokens of an own answer",
    "held_out_loss": "held-out loss",
    "rouge_l": "ROUGE-L",
    "chrf": "chrF",
    "tokens_per_s": "tokens per second",
    "padded_tokens_per_s": "tokens per second, padding included",
    "step_s": "time of a step",
    "communication_max_s": "time between processes",
    "grad_norm": "gradient norm",
    "model_tflops_per_s": "TFLOP/s of the model",
    "mfu": "share of the peak (MFU)",
    "peak_rss_bytes": "peak memory",
    "peak_bytes": "peak memory",
    "allocated_bytes": "allocated memory",
    "reserved_bytes": "reserved memory",
} | {
    f"{figure}_{part}": name
    for figure in ("kl", "entropy", "ratio", "clip_share")
    for part, name in (("t1", "turn 1"), ("t2", "turn 2"), ("guide", "guide"))
}
PERCENT = "\u00a0%"
"""Kept together with its figure."""


def find_name(key: str) -> str:
    """Return what a figure is called, in words."""
    return NAMES.get(key, key.replace("_", " "))


def capitalized(text: str) -> str:
    """Return the text with a capital in front, unless it begins with the name of a key."""
    first = text.partition(" ")[0].rstrip(".:,")
    return text if "." in first or "_" in first else text[:1].upper() + text[1:]


def as_number(value: object) -> float | None:
    """Return the value as a float, None when it is no number; an integer too large for one is infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def as_size(value: object) -> float | None:
    """Return the value as a size that a machine can have; None where it is no number, negative or an exbibyte."""
    number = as_number(value)
    return number if number is not None and 0 <= number < 2**60 else None


def is_share(key: str) -> bool:
    """Return whether a figure is between 0 and 1 and people read it in percent."""
    return key in SHARES or key.endswith("_share") or key.startswith("pass@")


def format_figure(key: str, value: object) -> str:
    """Return the value of the figure `key` with its unit, else with four figures; a dash for none."""
    number = as_number(value)
    if number is None:
        return "–"
    if not math.isfinite(number):
        return "not finite"
    if is_share(key) and -1 <= number <= 1:
        return f"{math.floor(1000 * number + 0.5) / 10:.1f}{PERCENT}"
    if key.endswith("_bytes"):
        return format_bytes(number)
    if key.endswith("_seconds"):
        return format_seconds(number)
    size = abs(number)
    if number == int(number) and size < 1e9:
        return f"{int(number):,}"
    if size >= 1e9 or size < 1e-3:
        return f"{number:.3g}"
    return f"{number:,.0f}" if size >= 1000 else f"{number:.4g}"


def format_course(key: str, first: object, *, last: object) -> str:
    """Return where a figure began and where it ended."""
    return f"{format_figure(key, first)} → {format_figure(key, last)}"


LESS_IS_BETTER = ("loss", "held_out_loss", "perplexity", "bits_per_byte", "c2i", "break_rate", "zero", "clipped")
UNJUDGED = ("mfu", "acc_t2_other_hint", "follows_hint", "changes_to_hint", *SHARES[-3:])


def is_less_better(key: str) -> bool:
    """Return whether the best of these figures is the lowest: a loss, also that of a part such as `loss_chats`."""
    return any(key == name or key.startswith(f"{name}_") for name in LESS_IS_BETTER)


def change(key: str, before: object, *, after: object) -> str:
    """Return the difference, signed and in the figure's unit; empty where one of the two is no finite number."""
    old, new = as_number(before), as_number(after)
    if old is None or new is None or not math.isfinite(old) or not math.isfinite(new):
        return ""
    difference = new - old
    sign = "+" if difference > 0 else "−" if difference < 0 else "±"
    text = format_figure(key, abs(difference))
    return f"{sign}{text.removesuffix(PERCENT)} points" if text.endswith(PERCENT) else f"{sign}{text}"


def is_better(key: str, before: object, *, after: object) -> bool | None:
    """Return whether the figure went the right way; None where that is not known or nothing moved."""
    old, new = as_number(before), as_number(after)
    is_less = is_less_better(key)
    is_more = (key in SHARES and key not in UNJUDGED) or key.startswith("pass@")
    if old is None or new is None or old == new or not (is_less or is_more):
        return None
    return (new < old) == is_less


def compare(key: str, before: object, *, after: object) -> list[str]:
    """Return the figure before and after, and its change with a verdict."""
    verdict = {True: " better", False: " worse", None: ""}[is_better(key, before, after=after)]
    return [format_figure(key, before), format_figure(key, after), change(key, before, after=after) + verdict]


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share among `count` (Wilson, JASA 1927)."""
    z = 1.959964
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    below = 1 + z * z / count
    return (middle - half) / below, (middle + half) / below
