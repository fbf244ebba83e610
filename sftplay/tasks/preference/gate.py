"""What the pairs teach besides quality: equal and swapped pairs, and single features that alone decide the labels."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from sftplay.tasks.preference.pairs import Pair

_LIST = re.compile(r"^\s*(?:[-*\u2022]|\d+[.)])\s", re.M)
_END = re.compile(r"[.!?\u2026\u3002\uff01\uff1f\"')\]`}>]\s*\Z")

TRAITS: Mapping[str, Callable[[str], bool]] = {
    "has a list": lambda text: _LIST.search(text) is not None,
    "has a block of code": lambda text: "```" in text,
    "has bold words or headings": lambda text: "**" in text or text.startswith("#") or "\n#" in text,
    "has a digit": lambda text: any(map(str.isdigit, text)),
    "has a question mark": lambda text: "?" in text,
    "has an exclamation mark": lambda text: "!" in text,
    "has several lines": lambda text: "\n" in text.strip(),
    "begins with a capital letter": lambda text: text.lstrip()[:1].isupper(),
    "begins with white space": lambda text: text[:1].isspace(),
    "ends with white space": lambda text: text[-1:].isspace(),
    "ends as a sentence or a block does": lambda text: _END.search(text) is not None,
    "has characters beyond ASCII": lambda text: not text.isascii(),
}
"""Features of a text that is or is not so; a side has them whatever it says."""

LENGTH = "has more tokens"
LEVEL, CHANCE = 0.6, 0.01
"""A feature is warned of if it gets more than LEVEL of the labels right. On data where no feature does, no warning
appears in 1 - CHANCE of all sets."""

MOST_PHRASES, MOST_WARNINGS = 50_000, 4


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What the gate reads of a pair, or of one answer; a side is the place in each tuple."""

    n_tokens: tuple[int, ...]
    traits: tuple[int, ...]  # bits, in the order of TRAITS
    phrases: tuple[tuple[str, ...], ...]  # the words that a side begins and ends with
    desirable: bool | None
    margin: float
    has_scores: bool
    is_white_space_only: bool


def read_facts(pair: Pair, n_tokens: Sequence[int]) -> PairFacts:
    """Read what the gate counts; `n_tokens` are those of each side without its prompt."""
    texts = pair.texts[1:] or pair.answers
    found = [[finds(text) for finds in TRAITS.values()] for text in texts]
    return PairFacts(
        tuple(n_tokens),
        tuple(sum(is_so << place for place, is_so in enumerate(side)) for side in found),
        tuple(_phrases(text) for text in texts),
        pair.desirable,
        pair.margin,
        pair.has_scores,
        len(set(texts)) == 2 and "".join(texts[0].split()) == "".join(texts[1].split()),
    )


def _phrases(text: str) -> tuple[str, ...]:
    """Return the first word, the first three words and the last three words of a text."""
    head, tail = text[:200].casefold().split()[:3], text[-200:].casefold().split()[-3:]
    found = {f"begins with {' '.join(head[:n])!r}": None for n in (1, 3) if len(head) >= n}
    return (*found, f"ends with {' '.join(tail)!r}") if len(tail) == 3 else tuple(found)


def exceeds(right: float, trials: float, *, level: float = LEVEL, chance: float = CHANCE) -> bool:
    """Return True if `right` of `trials` labels is more than a share `level` would get, with probability `chance`.

    Chernoff's bound of the binomial tail: P(X >= k) <= exp(-n KL(k / n || p)) for k / n > p.
    """
    if trials <= 0 or right / trials <= level:
        return False
    share = min(right / trials, 1.0)
    distance = share * math.log(share / level)
    if share < 1:
        distance += (1 - share) * math.log((1 - share) / (1 - level))
    return trials * distance > -math.log(chance)


@dataclass
class Gate:
    """Counts over all pairs that are kept, or all answers with a verdict, and over those left out."""

    equal: int = 0  # both sides are the same
    swapped: int = 0  # the same two sides, or the same answer, are there with the opposite verdict
    contaminated: int = 0  # training pairs with an answer to a prompt that is held out with the same answer
    shared_prompts: int = 0  # other training pairs with a prompt that is held out
    white_space_only: int = 0
    joined: int = 0
    pairs: int = 0
    answers: list[int] = field(default_factory=lambda: [0, 0])  # with a verdict: not desirable, desirable
    trained: list[int] = field(default_factory=lambda: [0, 0])  # of the answers to train on alone, also those of pairs
    _longer: list[int] = field(default_factory=lambda: [0, 0])  # pairs with a longer rejected, a longer chosen side
    _lengths: tuple[array[int], array[int]] = field(default_factory=lambda: (array("q"), array("q")))
    _has: tuple[Counter[str], Counter[str]] = field(default_factory=lambda: (Counter(), Counter()))
    """For each feature the pairs in which the rejected, or the chosen side alone has it. Of answers: those with it."""

    _margins: array[float] = field(default_factory=lambda: array("d"))
    _against: int = 0
    _passed_over: int = 0  # phrases that were new when there were MOST_PHRASES

    def add(self, facts: PairFacts, *, is_trained: bool = True) -> None:
        """Count a pair, or an answer, that is kept."""
        for verdict in (False, True) if facts.desirable is None else (facts.desirable,):
            self.trained[verdict] += is_trained
        sides = [(*_names(bits), *phrases) for bits, phrases in zip(facts.traits, facts.phrases, strict=True)]
        if facts.desirable is None:
            self.pairs += 1
            chosen, rejected = facts.n_tokens
            if chosen != rejected:
                self._longer[chosen > rejected] += 1
            only = [set(sides[1]) - set(sides[0]), set(sides[0]) - set(sides[1])]
            if not math.isnan(facts.margin):
                self._margins.append(facts.margin)
                self._against += facts.has_scores and facts.margin < 0
        else:
            self.answers[facts.desirable] += 1
            self._lengths[facts.desirable].append(facts.n_tokens[0])
            only = [set(), set()]
            only[facts.desirable] = set(sides[0])
        for place, names in enumerate(only):
            for name in names:
                if name in self._has[0] or name in self._has[1] or len(self._has[0]) + len(self._has[1]) < MOST_PHRASES:
                    self._has[place][name] += 1
                else:
                    self._passed_over += 1

    @property
    def features(self) -> dict[str, tuple[float, float, float]]:
        """Feature -> share of the labels that it gets right, ties counting half; and right ones of the trials by which
        chance is judged: the pairs that it tells apart, or the rarer verdict's answers."""
        few, found = min(self.answers), dict[str, tuple[float, float, float]]()
        if self.pairs:
            found[LENGTH] = (_share(self._longer, self.pairs), self._longer[1], sum(self._longer))
        elif few:
            found[LENGTH] = (area := _area(*self._lengths), area * few, few)
        for name in dict.fromkeys(chain(*self._has)):
            less, more = self._has[0][name], self._has[1][name]
            if self.pairs:
                found[name] = (_share((less, more), self.pairs), more, less + more)
            elif few:
                share = 0.5 + 0.5 * (more / self.answers[1] - less / self.answers[0])
                found[name] = (share, share * few, few)
        return found

    def deciding(self) -> list[tuple[str, float]]:
        """Return the features that alone get more than LEVEL of the labels right beyond chance, the best ones first.

        A share below one half says that sides without the feature are the chosen ones.
        """
        features = self.features
        n_trials = 2 * (len(features) + self._passed_over)
        chosen = [
            (name, share)
            for name, (share, right, trials) in features.items()
            if max(share, 1 - share) > LEVEL
            and exceeds(max(right, trials - right), trials, chance=CHANCE / n_trials)
            and (share > 0.5) == (2 * right > trials)
        ]
        return sorted(chosen, key=lambda item: -abs(item[1] - 0.5))

    def as_json(self, duplicates: int) -> dict[str, Any]:
        """Return the figures under the names of `data_report.json`."""
        found = {name: share for name, (share, _, _) in self.features.items() if name == LENGTH or name in TRAITS}
        trained = {"undesirable": self.trained[0], "desirable": self.trained[1]}
        figures: dict[str, Any] = {
            "pairs": self.pairs,
            **({"desirable": self.answers[1], "undesirable": self.answers[0]} if any(self.answers) else {}),
            "trained": trained,
            "equal": self.equal,
            "white_space_only": self.white_space_only,
            "swapped": self.swapped,
            "duplicates": duplicates,
            "contaminated": self.contaminated,
            "shared_prompts": self.shared_prompts,
            "longer_is_better_accuracy": found.pop(LENGTH, None),
            "share_chosen_longer": self._longer[1] / self.pairs if self.pairs else None,
            "prompts_unlike_generation": self.joined,
            "features": {name: round(share, 4) for name, share in found.items()},
            "deciding": [{"feature": name, "accuracy": round(share, 4)} for name, share in self.deciding()[:20]],
        }
        if len(self._margins):
            counts, edges = np.histogram(np.frombuffer(self._margins), bins=10)
            figures["margins"] = {"edges": edges.tolist(), "counts": counts.tolist()}
            figures["scores_against_label"] = self._against
        return figures

    def warnings(self) -> Iterator[str]:
        """Yield what a person should know before training, one sentence each."""
        kind = "pairs" if self.pairs else "answers"
        deciding = self.deciding()
        for name, share in deciding[:MOST_WARNINGS]:
            yield _describe(name, share, kind=kind)
        if len(deciding) > MOST_WARNINGS:
            n_more = len(deciding) - MOST_WARNINGS
            yield f"{n_more:,} more features decide labels alone; the data report lists them under preference.deciding"
        sentences = {
            f"{kind} that repeat an earlier one with the opposite verdict": self.swapped,
            "pairs with sides that differ only in white space": self.white_space_only,
            "pairs with a chosen side that has the lower score": self._against,
            f"{kind} to train on with a prompt that is held out with other answers": self.shared_prompts,
            f"{kind} with a prompt that generation would end in other tokens, because the tokenizer joins it with the"
            " answer; end it before the white space": self.joined,
        }
        yield from (f"{sentence}: {count:,}" for sentence, count in sentences.items() if count)
        if any(self.trained) and not min(self.trained):
            yield f"all {sum(self.trained):,} answers to train on have one verdict, so nothing is told apart"


def _describe(name: str, share: float, *, kind: str) -> str:
    right = max(share, 1 - share)
    if name == LENGTH:
        side = "longer" if share > 0.5 else "shorter"
        return f"length alone gets {right:.2f} of the {kind} right: the {side} answer is the better one"
    side = "one that" if share > 0.5 else "other than one that"
    return f"one feature alone gets {right:.2f} of the {kind} right: the better answer is the {side} {name}"


def _names(bits: int) -> list[str]:
    return [name for place, name in enumerate(TRAITS) if bits >> place & 1]


def _share(counts: Sequence[int], pairs: int) -> float:
    """Return the share of the pairs in which the chosen side has more, ties counting half."""
    less, more = counts
    return (more + 0.5 * (pairs - less - more)) / pairs


def _area(low: array[int], high: array[int]) -> float:
    """Return how often one of `high` is above one of `low`, ties counting half: the area under the ROC curve."""
    below, above = np.sort(np.asarray(low)), np.asarray(high)
    wins = np.searchsorted(below, above, "left").sum() + np.searchsorted(below, above, "right").sum()
    return float(wins) / (2 * len(below) * len(above))


def gate_table(figures: Mapping[str, Any]) -> list[str]:
    """Format the figures for people, a line each."""
    length, longer = figures["longer_is_better_accuracy"], figures["share_chosen_longer"]
    judged = f"{figures['pairs']:,} pairs"
    if "desirable" in figures:
        judged = f"{judged}, " if figures["pairs"] else ""
        judged += f"{figures['desirable']:,} wanted and {figures['undesirable']:,} unwanted answers"
    lines = [
        f"gate           {judged}; {figures['equal']:,} with equal sides, {figures['swapped']:,} also the other way,"
        f" {figures['white_space_only']:,} that differ only in white space,"
        f" {figures['contaminated']:,} held out as well"
    ]
    if length is not None:
        share = "" if longer is None else f"; the chosen side is longer in {longer:.0%}"
        lines.append(f"length bias    'longer is better' gets {length:.2f} right{share}")
    if margins := figures.get("margins"):
        edges, most = margins["edges"], max(margins["counts"])
        for low, high, count in zip(edges, edges[1:], margins["counts"], strict=False):
            if count:
                lines.append(
                    f"margin {low:>7.3g} .. {high:<7.3g} {'#' * max(1, round(20 * count / most)):<20} {count:,}"
                )
    return lines
