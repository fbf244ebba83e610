"""Sample two-turn episodes: an answer, a hint that may not state the answer, a second answer."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from textwrap import dedent
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor, LogitsProcessorList

from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Question
from sftplay.data.records import Message
from sftplay.data.render.render import Renderer
from sftplay.errors import RunError
from sftplay.generate.generate import Generator, SampleByRow, Sampling, derive_seed, left_padded, only
from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.reward.math_rewards import reference_answer
from sftplay.tasks.score.role_models import Role
from sftplay.tasks.score.section import PLACE, PromptsConfig

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?<![\w.,^\\])(?P<sign>(?<![\w)\]])-|\bminus |\bnegative )?(?<![\w.])"
    rf"(?P<top>{_DIGITS})(?:\s?/\s?(?P<bottom>\d+))?(?P<power>[eE][+-]?\d{{1,2}})?"
    r"(?:cm|mm|km|kg|ml|min|m|g|h|s)?(?![\w]|[.,]\d)",
    re.IGNORECASE,
)
_WORDS_TO_TWELVE = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
_TEEN_STEMS = ("thir", "four", "fif", "six", "seven", "eigh", "nine")
_TENS_STEMS = ("twen", "thir", "for", "fif", "six", "seven", "eigh", "nine")
_NUMBER_WORDS = {word: n for n, word in enumerate(_WORDS_TO_TWELVE)}
_NUMBER_WORDS |= {f"{stem}teen": n for n, stem in enumerate(_TEEN_STEMS, 13)}
_NUMBER_WORDS |= {f"{stem}ty": 10 * n for n, stem in enumerate(_TENS_STEMS, 2)}
_SCALE_WORDS = {"hundred": 100, "thousand": 1_000, "million": 1_000_000}
_NUMBER_WORD = rf"(?:{'|'.join([*_NUMBER_WORDS, *_SCALE_WORDS])})"
_SPELLED_NUMBER = re.compile(
    rf"\b(?:(?:minus|negative) )?{_NUMBER_WORD}(?:(?:[ -]| and ){_NUMBER_WORD})*\b(?!-)", re.IGNORECASE
)
_ROMAN_NUMERAL = re.compile(r"\b(?=[IVXLCDM]{2})(M{0,3})(CM|CD|D?C{0,3})(XC|XL|L?X{0,3})(IX|IV|V?I{0,3})\b")
_STEP_NAME = re.compile(
    r"\b(?:steps?|lines?|parts?|cases?|rows?|columns?|turns?|rules?|points?|items?|equations?|problems?|questions?|"
    r"terms?|examples?|number|no\.)\s*$",
    re.IGNORECASE,
)
_COUNTED_NOUN = re.compile(
    r"\s*(?:more |small |last |first )?(?:steps?|lines?|parts?|cases?|mistakes?|errors?|times|places?|digits?|"
    r"decimals?|terms?|numbers?|things?|ways?)\b",
    re.IGNORECASE,
)
_ANSWER_PHRASE = re.compile(
    r"(?:\b(?:answer|result|solution)\b[^.\n]{0,20}|####\s*|boxed\s*\{\s*|\bshould be )$", re.IGNORECASE
)
_RESULT_PHRASE = re.compile(r"(?:\b(?:is|be|get|gives?|equals?|to|makes?)|[=:])\s*$", re.IGNORECASE)


def states_answer(reference: str, hint: str, *, problem: str) -> bool:
    """Whether a hint states an answer that is a number or a short text; `problem` is what was asked.

    A number of the problem, or one that counts or names a step, is a leak only where the hint calls it the answer.
    """
    reference, hint = _strip_latex(reference), _strip_latex(hint)
    found, wanted = _NUMBER.match(reference.strip()), None
    # A number may have a unit; anything else, such as the code 007, is a text.
    if found is not None and not re.match(r"0\d", found["top"]):
        is_longer = re.search(r"[\d=+*^(]", reference.strip()[found.end() :])
        wanted = None if is_longer else _parse_fraction(found)
    if wanted is not None:
        asked = {value for _, _, value, _ in _find_numbers(_strip_latex(problem))}
        return _states_number(wanted, hint, asked=asked)
    if re.fullmatch(r"[\w ]+", reference):
        return re.search(rf"(?<![\w.]){re.escape(reference.strip())}(?!\w)", hint) is not None
    wanted_text, given = (re.sub(r"\\left|\\right|\\[()\[\]]", "", text) for text in (reference, hint))
    spaced = r"\s*".join(map(re.escape, re.sub(r"\s+", "", wanted_text)))
    return re.search(rf"(?<![\w.]){spaced}(?!\w|\.\d)", given) is not None


def _strip_latex(text: str) -> str:
    text = re.sub(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\[,;!: ])(?=\d)", ",", text)
    text = re.sub(r"\\(?:text|mathrm|mathbf|textbf)\s*\{([^{}]*)\}", r"\1", text)
    return text.replace("\u2212", "-").replace("**", "").replace("$", " ").replace("_", " ")


def _parse_fraction(found: re.Match[str]) -> Fraction | None:
    with suppress(ValueError, ZeroDivisionError):
        value = Fraction(found["top"].replace(",", "") + (found["power"] or "")) / Fraction(found["bottom"] or 1)
        return -value if found["sign"] else value
    return None


def _find_numbers(text: str) -> Iterator[tuple[int, int, Fraction, bool]]:
    """Yield start, end and value of each number in a text, and whether it is a common word ("one of the two")."""
    for found in _NUMBER.finditer(text):
        value = _parse_fraction(found)
        if value is not None:
            yield found.start(), found.end(), value, False
    for found in _SPELLED_NUMBER.finditer(text):
        value = _parse_words(found[0])
        yield found.start(), found.end(), value, 0 <= value <= 10
    for found in _ROMAN_NUMERAL.finditer(text):
        digits = [{"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}[letter] for letter in found[0]]
        value = Fraction(sum(-n if n < max(digits[at:]) else n for at, n in enumerate(digits)))
        yield found.start(), found.end(), value, False
    for found in re.finditer(r"(?<![\w.,])(?<!\d )\d(?: \d)+(?!\w| \d|[.,]\d)", text):
        yield found.start(), found.end(), Fraction(found[0].replace(" ", "")), False


def _parse_words(text: str) -> Fraction:
    whole = part = 0
    for word in re.findall(r"[a-z]+", text.lower()):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALE_WORDS:
            whole, part = whole + max(part, 1) * _SCALE_WORDS[word], 0
        else:
            part += _NUMBER_WORDS.get(word, 0)
    return Fraction(whole + part) * (-1 if text.lower().startswith(("minus", "negative")) else 1)


def _states_number(wanted: Fraction, hint: str, *, asked: set[Fraction]) -> bool:
    listed = re.sub(r"(?m)^(\s*)\d([.)])(?=\s+[A-Za-z])", r"\1-\2", hint)  # 1. First, 2. Then
    for start, end, value, is_common in _find_numbers(listed):
        before, after = listed[:start], listed[end:]
        is_calculation = "/" in listed[start:end] and wanted.denominator == 1  # 84/2 is a calculation to do
        if value != wanted or is_calculation or _STEP_NAME.search(before) or _COUNTED_NOUN.match(after):
            continue
        alone = not re.search(r"\w", before + after)
        called = bool(_ANSWER_PHRASE.search(before))
        if alone or called or (wanted not in asked and (not is_common or bool(_RESULT_PHRASE.search(before)))):
            return True
    return False


def states_program(name: str, hint: str, *, reference: str) -> bool:
    """Whether a hint contains the function `name`, or the body of `reference` under any name or none.

    A hint that consists of a function body alone is a program too, whatever the reference is.
    """
    written = rf"\bdef\s+{re.escape(name)}\s*\(.*:|\b{re.escape(name)}\s*(?::[^=\n]*)?=\s*lambda\b"
    if re.search(written, hint):
        return True
    wanted = [body for code in _find_snippets(reference) for body in _find_bodies(code, named=name)]
    statements = _parse(_unfence(hint))
    if any(isinstance(node, ast.Return) and _is_calculation(node.value) for node in statements):
        return True
    return bool(wanted) and any(
        body in wanted for code in _find_snippets(hint) for body in _find_bodies(code, named="")
    )


def _find_snippets(text: str) -> Iterator[str]:
    """Yield what may be code in a text: all of it, fenced blocks, inline code, single lines, text after `return`."""
    lines = text.splitlines()
    yield _unfence(text)
    yield from re.findall(r"```[\w+-]*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    yield from re.findall(r"`([^`\n]+)`", text)
    yield from (line for line in lines if line.strip())
    yield from re.findall(r"\b(?:return|lambda)\b[^\n`]*", text)
    yield "\n".join(line for line in lines if line.startswith((" ", "\t")))


def _unfence(text: str) -> str:
    found = re.fullmatch(r"\s*```[\w+-]*\n(.*?)(?:```)?\s*", text, re.DOTALL)
    return found[1] if found else text


def _parse(code: str) -> list[ast.stmt]:
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in texts
        return ast.parse(dedent(code).strip()).body
    return []


def _find_bodies(code: str, *, named: str) -> Iterator[str]:
    """Yield the bodies of the functions in some code (only of `named`, if given) and the statements outside functions.

    The texts are equal where the code is equal, whatever the names of the arguments.
    """
    statements = _parse(code)
    outside = [node for node in statements if not isinstance(node, ast.FunctionDef)]
    for node in ast.walk(ast.Module(statements, [])):
        if isinstance(node, ast.FunctionDef) and named in ("", node.name):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        elif isinstance(node, ast.Lambda) and not named:
            body = [ast.Return(node.body)]
        else:
            continue
        text = "".join(map(ast.dump, body))
        if named:  # as in statements outside a function
            yield text
        for number, argument in enumerate(node.args.args):
            text = text.replace(f"Name(id='{argument.arg}'", f"Name(id='#{number}'")
        yield text
    if not named and outside:
        yield "".join(map(ast.dump, outside))
        if len(outside) == 1 and isinstance(outside[0], ast.Expr) and _is_calculation(outside[0].value):
            yield ast.dump(ast.Return(outside[0].value))


def _is_calculation(value: ast.expr | None) -> bool:
    return value is not None and not isinstance(value, ast.Name | ast.Constant)


PLACEHOLDER_MARKS = {"problem": "\ue000", "attempt": "\ue001", "hint": "\ue002"}
"""Characters of Unicode's private use: no template writes them."""


@dataclass(frozen=True)
class Template:
    """A prompt as runs of token ids with placeholders between them."""

    parts: tuple[tuple[int, ...] | str, ...]

    def fill(self, ids: Mapping[str, Sequence[int]], *, max_tokens: int) -> list[int]:
        """Fill the placeholders with token ids; the prompt has at most `max_tokens` tokens.

        A longer prompt loses the middle of the attempt. Problem and hint are never truncated: raise RunError where
        they alone are too long.
        """
        spare = max_tokens - sum(len(ids[part] if isinstance(part, str) else part) for part in self.parts)
        if spare < 0 and "attempt" in self.parts:
            attempt = truncate_middle(ids["attempt"], max(0, len(ids["attempt"]) + spare))
            spare += len(ids["attempt"]) - len(attempt)
            ids = {**ids, "attempt": attempt}
        if spare < 0:
            what = f"problem and hint need {-spare} tokens more than the {max_tokens} that a prompt may have"
            fix = "raise model.max_seq_len, or lower score.max_new_tokens or score.max_hint_tokens"
            raise RunError(what, where="score", fix=fix)
        return [token for part in self.parts for token in (ids[part] if isinstance(part, str) else part)]


class Templates(NamedTuple):
    """The templates of an episode's three prompts."""

    solve: Template
    guide: Template
    revise: Template


def make_templates(prompts: PromptsConfig, renderer: Renderer, *, system: str | None) -> Templates:
    """Tokenize the three prompts, in the chat template where the renderer has one."""
    tokenizer, begin, names = renderer.tokenizer, [], {mark: name for name, mark in PLACEHOLDER_MARKS.items()}
    if renderer.template is None and tokenizer.bos_token_id is not None:
        # A tokenizer that adds a BOS token adds it here.
        begin = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    templates = []
    for text in (prompts.solve, prompts.guide, prompts.revise):
        marked = PLACE.sub(lambda found: PLACEHOLDER_MARKS[found[1]], text)
        if renderer.template is not None:
            messages = [Message("system", system)] if system else []
            marked = renderer.prompt_text([*messages, Message("user", marked)])
        parts: list[tuple[int, ...] | str] = [tuple(begin)] if begin else []
        for piece in filter(None, re.split(f"([{''.join(names)}])", marked)):
            ids = names.get(piece) or tuple(tokenizer(piece, add_special_tokens=False)["input_ids"])
            parts.append(ids)
        templates.append(Template(tuple(parts)))
    return Templates(*templates)


def tokenize_texts(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenize plain texts in one call; a control token that they spell stays text."""
    ids = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return [tokens if text else [] for text, tokens in zip(texts, ids, strict=True)]


def truncate_middle(ids: Sequence[int], length: int) -> list[int]:
    """Keep the first and the last ids, `length` in all.

    >>> truncate_middle([1, 2, 3, 4, 5], 3)
    [1, 2, 5]
    """
    if len(ids) <= length:
        return list(ids)
    tail = length // 2
    return [*ids[: length - tail], *ids[len(ids) - tail :]]


class Action(NamedTuple):
    """The tokens that a model generated after a prompt, with the end token; truncated where none came.

    `log_probs` are at the sampling temperature; they are empty for greedy generation.
    """

    prompt: list[int]
    ids: list[int]
    log_probs: list[float]
    is_truncated: bool

    @property
    def ids_without_end(self) -> list[int]:
        return self.ids if self.is_truncated else self.ids[:-1]


@dataclass(frozen=True)
class RecordedSampling(Sampling):
    """Sampling that records the log-probability of each sampled token."""

    log_probs: list[Tensor] = field(default_factory=list)
    """One tensor [rows, 1] for each position."""

    def processors(self, rows: Sequence[int]) -> LogitsProcessorList:
        if self.temperature == 0:
            return LogitsProcessorList()
        return LogitsProcessorList([_SampleAndRecord(self, SampleByRow(self.seed, rows))])


class _SampleAndRecord(LogitsProcessor):
    def __init__(self, sampling: RecordedSampling, sampler: SampleByRow) -> None:
        self._sampling, self._sampler = sampling, sampler

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self._sampling.temperature
        tokens = self._sampler.tokens(scores)
        self._sampling.log_probs.append(scores.log_softmax(-1).gather(-1, tokens))
        return only(tokens, scores)


def sample_actions(generator: Generator, prompts: Sequence[list[int]], *, rows: Sequence[int]) -> list[Action]:
    """Sample an action for each prompt as `generator.sampling` says; `rows` are the numbers of the episodes."""
    ids, mask = left_padded(prompts, generator.tokenizer.pad_token_id)
    out = generator.generate(ids, mask, rows=rows)[:, ids.shape[1] :].tolist()
    sampling = generator.sampling
    recorded = sampling.log_probs if isinstance(sampling, RecordedSampling) else []
    log_probs = torch.cat(recorded, 1).tolist() if recorded else [[] for _ in prompts]
    ends = set(generator.all_end_ids)
    actions = []
    for prompt, tokens, probabilities in zip(prompts, out, log_probs, strict=True):
        # Up to and including the first end token.
        kept = next((n for n, token in enumerate(tokens, 1) if token in ends), len(tokens))
        ids = tokens[:kept]
        actions.append(Action(prompt=prompt, ids=ids, log_probs=probabilities[:kept], is_truncated=ids[-1] not in ends))
    return actions


def count_padded_tokens(actions: Sequence[Action], *, rows: int) -> int:
    """Count the tokens of prompts and actions with padding, in micro-batches of `rows`."""
    parts = [actions[at : at + rows] for at in range(0, len(actions), rows)]
    return sum(len(part) * (max(len(a.prompt) for a in part) + max(len(a.ids) for a in part)) for part in parts)


def right_padded(rows: Sequence[Sequence[float]], pad: float, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pad rows on the right: values and mask (fp32), [rows, longest]."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=pad)
    return padded, (torch.arange(padded.shape[1]) < lengths[:, None]).float()


COPY_SHARE = 0.9
"""Share of wrong first answers repeated by turn 2 from which it counts as copying. Right ones should be repeated.

The same share of changed answers stated by the hint counts as following the hint.
"""


def compute_turn_figures(right_first: Sequence[bool], right_second: Sequence[bool]) -> dict[str, float | None]:
    """Compute accuracies of both turns and shares of changed answers, over all problems; None without problems.

    `i2c` (incorrect to correct) less `c2i` is `delta`, and `fix_rate` and `break_rate` are conditional on turn 1.
    """
    pairs, n = list(zip(right_first, right_second, strict=True)), len(right_first)
    if not n:
        return dict.fromkeys(("acc_t1", "acc_t2", "delta", "i2c", "c2i", "fix_rate", "break_rate"))
    n_first, n_second = sum(right_first), sum(right_second)
    fixed = sum(second and not first for first, second in pairs)
    broken = sum(first and not second for first, second in pairs)
    return {
        "acc_t1": n_first / n,
        "acc_t2": n_second / n,
        "delta": (n_second - n_first) / n,
        "i2c": fixed / n,
        "c2i": broken / n,
        "fix_rate": fixed / (n - n_first) if n > n_first else None,
        "break_rate": broken / n_first if n_first else None,
    }


def compute_edit_ratio(before: Sequence[int], after: Sequence[int]) -> float:
    """Compute the Levenshtein distance of two token sequences, divided by the length of the longer one.

    >>> compute_edit_ratio([1, 2, 3, 4], [1, 3, 4])
    0.25
    """
    longer = max(len(before), len(after))
    if not longer:
        return 0.0
    target, places = np.asarray(list(after)), np.arange(len(after) + 1)
    row = places.copy()
    for n, token in enumerate(before, 1):
        changed = np.minimum(row[1:] + 1, row[:-1] + (target != token).astype(int))
        # An insertion costs 1 more than the cell to the left.
        row = np.minimum.accumulate(np.concatenate([[n], changed]) - places) + places
    return float(row[-1]) / longer


def read_reference(question: Question) -> str:
    """Read the right answer of a problem as a hint could state it; empty without one."""
    answer = question.columns.get("answer")
    return "" if answer is None else reference_answer(str(answer))


def is_leaked(question: Question, hint: str) -> bool:
    """Whether a hint states the right answer in any form; for a program, the function that is asked for."""
    if name := question.columns.get("entry_point"):
        return states_program(str(name), hint, reference=str(question.columns.get("answer") or ""))
    reference = read_reference(question)
    if not reference or len(reference) > 100:  # a longer one is a whole solution, which no hint could state
        return False
    return states_answer(reference, hint, problem=question.question)


def hint_equals_answer(hint: str, answer: str) -> bool:
    """Whether a hint's answer (the whole text, the last number in a box, or the text after `####`) is `answer`.

    >>> hint_equals_answer("The answer is \\\\boxed{4}.", "4"), states_answer("Look at step 2.", "2")
    (True, False)
    """
    return bool(hint.strip()) and reference_answer(hint) == reference_answer(answer)


def diagnose(figures: dict[str, float | None]) -> str:
    """Describe the second turn in words, from the figures of an evaluation."""
    delta, i2c, c2i = (figures[key] or 0.0 for key in ("delta", "i2c", "c2i"))
    if (figures["repeats"] or 0.0) >= COPY_SHARE:
        return "turn 2 copies the first answer: no self-correction"
    if delta > 0 and i2c >= 5 * c2i and delta >= 0.05:
        if (figures["changes_to_hint"] or 0.0) >= COPY_SHARE:
            return "turn 2 follows the hint: it is the answer"
        return "turn 2 corrects the first answer"
    if (figures["acc_t1"] or 0.0) >= COPY_SHARE and delta < 0.05:
        return "the first answer is right already: little is left to correct"
    if delta <= 0:
        return "turn 2 is no better than turn 1: no self-correction"
    return "turn 2 changes answers, for the better and for the worse"


HintKind = Literal["own", "empty", "static", "right", "other"]
"""Where hints come from. own: as `score.guidance` says. right: a text with the right answer. other: given hints, which
were written for other problems."""


class Episode(NamedTuple):
    """A problem, two answers and a hint, which is None where the guide wrote none; `hint_ids` are its tokens in the
    second prompt."""

    question: Question
    first: Action
    hint: Action | None
    hint_ids: list[int]
    second: Action


ResampledAnswers = tuple[Action, Action]
"""A second sample of both answers of an episode: of turn 1 and of turn 2."""


class EpisodeSampler:
    """Samples episodes with the solver and the guide of a run."""

    def __init__(
        self,
        cfg: RunConfig,
        role_models: Any,
        *,
        renderer: Renderer,
        sampling: Callable[..., Sampling] = RecordedSampling,
    ) -> None:
        """`role_models.use_role(role)` activates a role and yields its model, as that of `RoleModels` does.

        `sampling` creates the token sampling from a temperature and a seed.
        """
        self._sampling = sampling
        self.cfg, self.role_models, self.tokenizer = cfg, role_models, renderer.tokenizer
        self.templates = make_templates(cfg.score.prompts, renderer, system=cfg.data.system)
        self._ends = renderer.end_token_ids
        self._batches: AdaptiveBatches | None = None
        self.beat: Callable[[], None] = lambda: None
        """Called before each batch: a heartbeat covers one batch."""

    def sample_episodes(
        self,
        questions: Sequence[Question],
        *,
        numbers: Sequence[int],
        seed: int,
        temperature: float,
        hints: HintKind = "own",
        firsts: Sequence[Action] | None = None,
        others: Sequence[list[int]] = (),
    ) -> list[Episode]:
        """Sample an episode for each question; the model must be in evaluation mode.

        `numbers` are the numbers of the episodes among all ranks; together with `seed` they decide every token.
        `firsts` are first answers that the same model has sampled already, for episodes with other hints.
        `others` are the hints of the kind `other`.
        """
        score, prompts, width = self.cfg.score, self.cfg.score.prompts, self.cfg.model.max_seq_len

        def write(template: Template, role: Role, *, turn: int) -> list[Action]:
            longest = score.max_hint_tokens if role == "guide" else score.max_new_tokens
            filled = [template.fill(ids, max_tokens=width - longest) for ids in known]
            return self._generate(filled, role, numbers=numbers, seed=derive_seed(seed, turn), temperature=temperature)

        texts = list({question.question for question in questions})
        problems = dict(zip(texts, tokenize_texts(self.tokenizer, texts), strict=True))
        known = [{"problem": problems[question.question]} for question in questions]
        firsts = write(self.templates.solve, "solver", turn=1) if firsts is None else firsts
        known = [{**ids, "attempt": first.ids_without_end} for ids, first in zip(known, firsts, strict=True)]
        written: Sequence[Action | None] = [None] * len(known)
        if hints == "right":
            right = [prompts.right_hint.replace("{answer}", read_reference(question)) for question in questions]
            given: Sequence[list[int]] = tokenize_texts(self.tokenizer, right)
        elif hints == "static" or (hints == "own" and score.guidance == "static"):
            given = tokenize_texts(self.tokenizer, [prompts.static_hint]) * len(questions)
        elif hints == "own" and score.guidance != "none":
            written = write(self.templates.guide, "guide", turn=2)
            given = [hint.ids_without_end for hint in written if hint is not None]
        else:
            given = others if hints == "other" else [[] for _ in known]
        known = [{**ids, "hint": hint} for ids, hint in zip(known, given, strict=True)]
        seconds = write(self.templates.revise, "solver", turn=3)
        columns = zip(questions, firsts, written, given, seconds, strict=True)
        return [Episode(*column) for column in columns]

    def resample_answers(
        self, episodes: Sequence[Episode], *, numbers: Sequence[int], seed: int, temperature: float
    ) -> list[ResampledAnswers]:
        """Sample both answers of the episodes again, independently of the first sample."""
        turns = ([episode.first.prompt for episode in episodes], [episode.second.prompt for episode in episodes])
        first, second = (
            self._generate(prompts, "solver", numbers=numbers, seed=derive_seed(seed, turn), temperature=temperature)
            for turn, prompts in enumerate(turns, 4)
        )
        return list(zip(first, second, strict=True))

    def _generate(
        self, prompts: Sequence[list[int]], role: Role, *, numbers: Sequence[int], seed: int, temperature: float
    ) -> list[Action]:
        score = self.cfg.score
        longest = score.max_hint_tokens if role == "guide" else score.max_new_tokens
        if self._batches is None:
            rows = int(score.generation_rows or len(prompts))
            fix = "lower score.generation_rows, then `make resume`" if rows > 1 else "lower model.max_seq_len"
            self._batches = AdaptiveBatches(rows, "generation", fix=fix if score.placement == "sharded" else "")

        def sample(part: slice) -> list[Action]:
            self.beat()
            sampling = self._sampling(temperature=temperature, seed=seed)
            generator = Generator(model, self.tokenizer, self._ends, longest, sampling)
            return sample_actions(generator, prompts[part], rows=numbers[part])

        with self.role_models.use_role(role) as model:
            return [action for part in self._batches.map(len(prompts), sample) for action in part]


def exchange_hints(by_number: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Give each episode the next different hint of another episode; return nothing where all hints are equal.

    >>> exchange_hints({0: [5], 1: [5], 2: [6]})
    {0: [6], 1: [6], 2: [5]}
    """
    numbers = sorted(by_number)
    doubled = [by_number[number] for number in numbers] * 2
    if all(hint == doubled[0] for hint in doubled):
        return {}
    return {
        number: next(hint for hint in doubled[at:] if hint != by_number[number]) for at, number in enumerate(numbers)
    }


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Decode an action or a hint to text."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))
