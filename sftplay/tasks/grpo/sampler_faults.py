"""Why a sampler gives other log-probabilities than the model that learns: each known fault is tried on a few rows.

A hypothesis predicts what the sampler would have said under it. The one under which the difference vanishes is the
cause. Nothing here changes weights or random numbers.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sftplay.errors import SftplayError
from sftplay.export.merge import find_base
from sftplay.launch.run_folder import RunFolder
from sftplay.train.eval_mode import eval_mode, random_numbers_kept
from sftplay.train.upstream import replaced_attributes

EXPLAINED = 0.5
"""A cause is named where it explains at least this share of the difference."""

DTYPE_EXPLAINED = 0.25
"""The same for another precision: two ways to compute in 16 bits have roundings of their own, which stay. On the GPU of
`sampler_check.BOUNDS` a model in bf16 explained 0.35 to 0.55 of its difference to fp32, and one in fp16 0.5 to 0.8."""

ROWS, TOKENS = 4, 48
"""Rows, and tokens of each, that are computed again for each hypothesis."""

UNITS = 64
"""Most parts of an adapter that are switched off one by one; a larger one is tried layer by layer."""

LAYER = re.compile(r"\.\d+\.")
"""The number of a layer within a module's name."""


@dataclass(frozen=True)
class Row:
    """A completion with what its sampler said of the last `len(sampled)` of these tokens."""

    number: int
    prompt: list[int]
    completion: list[int]
    sampled: list[float]
    """NaN for a token that the sampler said nothing about."""


@dataclass(frozen=True)
class Explanation:
    """What differs, in words that finish 'the cause: ', and one action."""

    name: str
    words: str
    fix: str
    explains: float = 1.0
    """Share of the difference that it explains."""


@dataclass(frozen=True)
class SamplerFacts:
    """What is known of a sampler; each None where nobody knows it."""

    name: str = "the model itself"
    dtype: str | None = None
    """What it computes in, such as bfloat16."""

    seen_prompt: Callable[[list[int]], list[int] | None] | None = None
    """Gives the ids that the sampler read in the last rollout batch where it was handed these."""

    score: Callable[[list[int], list[int]], list[float]] | None = None
    """Asks the sampler for the log-probabilities of a completion behind a prompt: at temperature 1, of all tokens, and
    past any cache."""


@dataclass
class Learner:
    """The model that learns, and what is at hand to try hypotheses on it."""

    model: Any
    temperature: float = 1.0
    facts: SamplerFacts = field(default_factory=SamplerFacts)
    is_sharded: bool = False
    """Weights lie on several ranks: only what one forward pass tells is tried, so that all ranks compute the same."""

    old_weights: Callable[[], Mapping[str, Tensor]] = dict
    """Gives the trained weights before the last update, by name."""

    old_heads: Callable[[], Iterator[tuple[str, Tensor]]] = lambda: iter(())
    """Gives other heads that the sampler may still hold, with words for each."""

    other_prompts: Callable[[Row], Mapping[str, list[int]]] = lambda row: {}
    """Gives other ids of a row's prompt, with words for each."""

    autocast: Callable[[], Any] = lambda: torch.autocast("cpu", enabled=False)

    @torch.no_grad()
    def logits(self, rows: Sequence[Row], *, model: Any = None, mode: Any = eval_mode) -> Tensor:
        """Return the logits of the rows' last tokens, one row below the other: float32 [tokens, vocabulary]."""
        model = model or self.model
        device = next(model.parameters()).device
        texts = [row.prompt + row.completion for row in rows]
        ids = torch.zeros(len(rows), max(map(len, texts)), dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for n, text in enumerate(texts):  # padding on the right changes no token before it
            ids[n, : len(text)], mask[n, : len(text)] = torch.tensor(text, device=device), 1
        places = [range(len(text) - len(row.sampled) - 1, len(text) - 1) for text, row in zip(texts, rows, strict=True)]
        kept = sorted({place for part in places for place in part})
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        keeps = "logits_to_keep" in inspect.signature(type(base).forward).parameters
        only = {"logits_to_keep": torch.tensor(kept, device=device)} if keeps else {}
        with mode(model), self.autocast():
            found = model(input_ids=ids, attention_mask=mask, use_cache=False, **only).logits
        columns = {place: n if keeps else place for n, place in enumerate(kept)}
        return torch.cat([found[n, [columns[place] for place in part]].float() for n, part in enumerate(places)])


class Diagnosis:
    """Tries hypotheses on a few rows."""

    def __init__(
        self, learner: Learner, rows: Sequence[Row], *, bound: float, dtype_bounds: Mapping[str, float]
    ) -> None:
        """`dtype_bounds` are the largest differences that another precision makes, by its name in torch."""
        self.learner, self.rows, self.bound, self.dtype_bounds = learner, list(rows), bound, dtype_bounds
        self.device = next(learner.model.parameters()).device
        self.tokens = [torch.tensor(row.completion[-len(row.sampled) :], device=self.device) for row in rows]
        self.sampled = torch.cat([torch.tensor(row.sampled, device=self.device) for row in rows])
        self.known = ~torch.isnan(self.sampled)

    @cached_property
    def logits(self) -> Tensor:
        """The learner's logits of all rows' tokens, one below the other."""
        return self.learner.logits(self.rows)

    def pick(self, logits: Tensor, *, temperature: float | None = None) -> Tensor:
        """Return the log-probabilities of the tokens."""
        scores = (logits / (temperature or self.learner.temperature)).log_softmax(-1)
        return scores.gather(1, torch.cat(self.tokens)[:, None])[:, 0]

    def measure(self, predicted: Tensor, said: Tensor | None = None) -> float:
        """Return the mean difference of a prediction to what the sampler said."""
        said = self.sampled if said is None else said
        known = self.known & ~torch.isnan(said)
        gap = float((predicted - said)[known].abs().double().mean())
        return gap if gap == gap else float("inf")

    def run(self) -> Explanation:
        """Return the cause, or one named `unknown`."""
        with random_numbers_kept():
            gap = self.measure(self.pick(self.logits))
            if gap <= self.bound:
                return Explanation(
                    "the learner's own pass", "the learner's log-probabilities of this step are not those of its own "
                    "weights without dropout; the sampler's are", "report it: this is a defect of the kit",
                )  # fmt: skip
            if known := self._read_facts():
                return known
            fresh = None if self.learner.is_sharded else self._ask_again()
            is_same_model = fresh is not None and self.measure(self.pick(self.logits, temperature=1.0), fresh) <= (
                max(self.bound, 0.02 * gap)
            )
            found = list[Hypothesis]()
            for finding in self._try_all(gap, is_same_model=is_same_model):
                found.append(finding)
                if finding.rest <= min(self.bound, 0.01 * gap):
                    break
            return self._choose(found, gap, fresh=fresh, is_same_model=is_same_model)

    def _try_all(self, gap: float, *, is_same_model: bool) -> Iterator[Hypothesis]:
        """Yield what each hypothesis leaves, the cheap ones first."""
        yield from try_settings(self)
        if self.learner.is_sharded:
            return
        yield from try_prompts(self)
        yield from try_old_prefix(self)
        if not is_same_model:
            yield from try_weights(self)
            yield from try_dtypes(self, gap)

    def _read_facts(self) -> Explanation | None:
        """Return what the sampler itself reports: other prompts."""
        for row in self.rows:
            seen = self.learner.facts.seen_prompt(row.prompt) if self.learner.facts.seen_prompt else None
            if seen is not None and list(seen) != row.prompt:
                place = next((n for n, (a, b) in enumerate(zip(seen, row.prompt)) if a != b), None)
                at = min(len(seen), len(row.prompt)) if place is None else place
                words = (
                    f"the sampler read another prompt (row {row.number}): from token {at} on {list(seen[at : at + 4])}"
                )
                return Explanation("template", f"{words} instead of {row.prompt[at : at + 4]}", TEMPLATE_FIX)
        return None

    def _ask_again(self) -> Tensor | None:
        """Return what the sampler says of the same tokens past its cache, at temperature 1."""
        score = self.learner.facts.score
        if score is None:
            return None
        try:
            said = [score(row.prompt, row.completion)[-len(row.sampled) :] for row in self.rows]
        except (OSError, KeyError, ValueError, TypeError):  # a server that does not answer such questions
            return None
        return torch.tensor([value for row in said for value in row], device=self.device)

    def _choose(self, found: list[Hypothesis], gap: float, *, fresh: Tensor | None, is_same_model: bool) -> Explanation:
        best = min(found, key=lambda one: one.rest, default=None)
        share = 0.0 if best is None else 1 - best.rest / gap
        if best is not None and (best.rest <= 2 * self.bound or share >= max(EXPLAINED, 0.9 if is_same_model else 0)):
            return best.as_cause(share, is_whole=best.rest <= max(2 * self.bound, 0.05 * gap))
        if fresh is not None and (noise := self._find_noise(fresh)) is not None:
            return noise
        # vLLM keeps whole blocks of keys and values: that all of the prompt is old explains no more than a part.
        if is_same_model and (share < EXPLAINED or (best is not None and best.name == "stale prefix cache")):
            words = "the sampler scores the same tokens as the learner once its prefix cache is passed by"
            return Explanation(
                "stale prefix cache", f"{words}: it sampled from keys and values of earlier weights", CACHE_FIX
            )
        if not self.learner.is_sharded and fresh is None and (cause := try_dropout(self, gap)):
            return cause
        if best is not None and share >= (EXPLAINED if best.name != "another dtype" else DTYPE_EXPLAINED):
            return best.as_cause(share, is_whole=best.name == "another dtype")
        tried = "settings, prompts" if self.learner.is_sharded else "settings, prompts, weights, precision, dropout"
        near = f"; nearest: {best.words} ({share:.0%} of it)" if best is not None and share > 0.1 else ""
        return Explanation("unknown", f"unknown: none of what was tried ({tried}) explains it{near}", UNKNOWN_FIX, 0.0)

    def _find_noise(self, fresh: Tensor) -> Explanation | None:
        again = self._ask_again()
        if again is None or float((again - fresh)[~torch.isnan(fresh)].abs().mean()) <= self.bound:
            return None
        words = "dropout: the sampler gives another log-probability each time it is asked for the same tokens"
        return Explanation("dropout", words, "put the sampler in evaluation mode")


TEMPLATE_FIX = "hand the sampler the run's own token ids, and let it add none"
CACHE_FIX = "empty the sampler's prefix cache after each update of its weights, or start it without one"
DTYPE_FIX = "train and sample in one precision"
UNKNOWN_FIX = "make parity holds the sampler's files against the run; grpo.generation=transformers samples without it"
WEIGHTS_FIX = "let the sampler load the weights again, and see in its log whether all of them arrived"


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis and the difference that it leaves."""

    name: str
    words: str
    fix: str
    rest: float

    def as_cause(self, share: float, *, is_whole: bool) -> Explanation:
        more = "" if is_whole else f"; it explains {share:.0%} of it, and something else differs too (unknown)"
        return Explanation(self.name, self.words + more, self.fix, share)


def try_settings(diagnosis: Diagnosis) -> Iterator[Hypothesis]:
    """Try temperature, top_p, top_k, min_p and repetition_penalty, each fitted to what the sampler said."""
    usual, logits = diagnosis.learner.temperature, diagnosis.logits
    rest, value = find_least(
        lambda t: diagnosis.measure(diagnosis.pick(logits, temperature=t)), 0.05 * usual, 20 * usual
    )
    words = f"temperature: the sampler's is {value:.3g}, and the run learns with {usual:.3g}"
    yield Hypothesis("temperature", words, f"let the sampler use grpo.temperature={usual:g}", rest)

    scores = (logits / usual).log_softmax(-1)
    base = diagnosis.pick(logits)
    ordered = scores.sort(-1, descending=True).values.exp()
    mass = ordered.cumsum(-1)
    kept = (base - diagnosis.sampled).exp()[diagnosis.known]
    for bound in {float(kept.min()) * (1 - 1e-5), *(n / 20 for n in range(6, 20)), 0.98, 0.99}:
        # The smallest number of tokens whose probabilities add up to it.
        count = (mass < bound).sum(-1, keepdim=True).clamp(max=mass.size(-1) - 1)
        left = diagnosis.measure(base - mass.gather(1, count)[:, 0].log())
        low = float((mass.gather(1, count) - ordered.gather(1, count))[diagnosis.known].max())
        nice = next((n for n in (round(low + 10.0**-d, d) for d in (1, 2, 3)) if low < n <= bound + 2e-5), bound)
        words = f"top_p: the sampler left out all but the likeliest {nice:.3g} of each distribution"
        yield Hypothesis("top_p", words, "set grpo.top_p=1", left)
    counts = [diagnosis.measure(base - mass[:, k].log()) for k in range(min(mass.size(1) - 1, 200))]
    if counts:
        best = min(range(len(counts)), key=counts.__getitem__)
        yield Hypothesis("top_k", f"top_k: the sampler chose among {best + 1} tokens", "set grpo.top_k=0", counts[best])
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5):
        likely = torch.where(ordered >= share * ordered[:, :1], ordered, 0.0).sum(-1)
        words = f"min_p: the sampler left out tokens below {share:g} of the likeliest"
        yield Hypothesis("min_p", words, "set grpo.min_p=null", diagnosis.measure(base - likely.log()))
    seen = torch.cat([_find_seen(row, logits) for row in diagnosis.rows])

    def penalised(penalty: float) -> float:
        changed = torch.where(logits > 0, logits / penalty, logits * penalty)
        return diagnosis.measure(diagnosis.pick(torch.where(seen, changed, logits)))

    rest, value = find_least(penalised, 0.5, 2.0)
    words = f"repetition_penalty: the sampler's is {value:.3g}"
    yield Hypothesis("repetition_penalty", words, "set grpo.repetition_penalty=1", rest)


def _find_seen(row: Row, like: Tensor) -> Tensor:
    """Return which tokens stand before each of a row's tokens: bool [tokens, vocabulary]."""
    first = len(row.completion) - len(row.sampled)
    seen = torch.zeros(len(row.sampled), like.size(1), dtype=torch.bool, device=like.device)
    seen[:, row.prompt + row.completion[:first]] = True
    for place, token in enumerate(row.completion[first:-1]):
        seen[place + 1 :, token] = True
    return seen


def find_least(function: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Return the least value of a function with one valley, and its place, looked for on a logarithmic scale."""
    places = [low * (high / low) ** (n / 24) for n in range(25)]
    values = [function(place) for place in places]
    best = min(range(25), key=values.__getitem__)
    a, b = places[max(0, best - 1)], places[min(24, best + 1)]
    for _ in range(40):  # thirds: 1.5^-40 of the range is left
        c, d = a + (b - a) / 3, b - (b - a) / 3
        a, b = (a, d) if function(c) <= function(d) else (c, b)
    return min((function((a + b) / 2), (a + b) / 2), (values[best], places[best]))


def try_prompts(diagnosis: Diagnosis) -> Iterator[Hypothesis]:
    """Try other ids of the prompts: a first token more or less, another template."""
    options = [diagnosis.learner.other_prompts(row) for row in diagnosis.rows]
    for words in options[0] if options else ():
        if all(words in option and option[words] for option in options):
            rows = [
                Row(row.number, option[words], row.completion, row.sampled)
                for row, option in zip(diagnosis.rows, options, strict=True)
            ]
            rest = diagnosis.measure(diagnosis.pick(diagnosis.learner.logits(rows)))
            yield Hypothesis("template", f"the sampler read another prompt: {words}", TEMPLATE_FIX, rest)


def try_weights(diagnosis: Diagnosis) -> Iterator[Hypothesis]:
    """Try heads and weights of before, and the adapter off, half loaded, or with another scale."""
    learner = diagnosis.learner
    for words, head in _list_heads(learner):
        with suppress(torch.OutOfMemoryError), head_replaced(learner.model, head):
            rest = diagnosis.measure(diagnosis.pick(learner.logits(diagnosis.rows)))
            yield Hypothesis("old head", f"the sampler's head (lm_head) is {words}", WEIGHTS_FIX, rest)
    if old := learner.old_weights():
        with weights_replaced(learner.model, old):
            rest = diagnosis.measure(diagnosis.pick(learner.logits(diagnosis.rows)))
        words = "all of the sampler's weights are those before the last update"
        yield Hypothesis("old weights", words, WEIGHTS_FIX, rest)
    yield from _try_adapter(diagnosis)


def _list_heads(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    head = learner.model.get_output_embeddings() if hasattr(learner.model, "get_output_embeddings") else None
    if head is None:
        return
    names = {id(weight): name for name, weight in learner.model.named_parameters()}
    old = learner.old_weights()
    copies = getattr(head, "modules_to_save", None)  # PEFT's wrapper around a head that trains in full
    name = names.get(id((copies["default"] if copies is not None and "default" in copies else head).weight), "")
    if name in old:
        yield "the one before the last update", old[name]
    yield from learner.old_heads()


@contextmanager
def head_replaced(model: Any, weight: Tensor) -> Iterator[None]:
    """Inside, the head multiplies with `weight`; an embedding that is tied to it does not change."""

    def multiply(module: Any, given: Any, _: Any) -> Tensor:
        hidden = given[0]
        return nn.functional.linear(hidden, weight.to(hidden.device, hidden.dtype), getattr(module, "bias", None))

    handle = model.get_output_embeddings().register_forward_hook(multiply)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def weights_replaced(model: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, parameters hold other values; afterwards they hold their own storage again, bit for bit."""
    parameters = {name: value for name, value in model.named_parameters() if name in weights}
    kept = {name: value.data for name, value in parameters.items()}
    try:
        for name, value in parameters.items():
            value.data = weights[name].to(value.device, value.dtype)
        yield
    finally:
        for name, value in parameters.items():
            value.data = kept[name]


@contextmanager
def scaled(layers: Sequence[Any], factor: float) -> Iterator[None]:
    """Inside, the pairs of these layers count `factor` times."""
    kept = [dict(layer.scaling) for layer in layers]
    try:
        for layer in layers:
            layer.scaling.update({name: value * factor for name, value in layer.scaling.items()})
        yield
    finally:
        for layer, values in zip(layers, kept, strict=True):
            layer.scaling.update(values)


def _try_adapter(diagnosis: Diagnosis) -> Iterator[Hypothesis]:
    modules = diagnosis.learner.model.named_modules()
    layers = {name: part for name, part in modules if getattr(part, "scaling", None) and hasattr(part, "lora_A")}
    if not layers:
        return

    def predict(off: Sequence[Any], factor: float = 0.0) -> Tensor:
        with scaled(off, factor):
            return diagnosis.pick(diagnosis.learner.logits(diagnosis.rows))

    for factor in (0.0, 0.5, 2.0):
        words = f"its scale is {factor:g} times the run's" if factor else "the sampler has none of it loaded"
        yield Hypothesis(
            "adapter", f"the adapter: {words}", WEIGHTS_FIX, diagnosis.measure(predict(list(layers.values()), factor))
        )
    units: dict[str, list[Any]] = {}
    for name, layer in layers.items():  # single layers, or blocks of the model where there are too many
        parts = name.split(".")
        number = next((n for n, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
        units.setdefault(name if len(layers) <= UNITS else ".".join(parts[: number + 1]), []).append(layer)
    off = _find_off(diagnosis, units, predict)
    missing = [name for name, is_off in zip(units, off, strict=True) if is_off]
    if 0 < len(missing) < len(units):
        rest = diagnosis.measure(predict([layer for name in missing for layer in units[name]]))
        short = missing[0].removeprefix("base_model.model.")
        words = f"the adapter is half loaded: {len(missing)} of its {len(units)} parts are missing, {short} for one"
        yield Hypothesis("half-loaded adapter", words, WEIGHTS_FIX, rest)


def _find_off(diagnosis: Diagnosis, units: dict[str, list[Any]], predict: Callable[..., Tensor]) -> list[bool]:
    """Return which parts of an adapter the sampler lacks. Effects of single parts are fitted; from there, or from a
    layer or a kind of module where that lacks explains more, parts are turned over one by one while that helps.
    """
    base = diagnosis.pick(diagnosis.logits)
    effects = torch.stack([predict(unit) - base for unit in units.values()], dim=1)[diagnosis.known].double()
    wanted = (diagnosis.sampled - base)[diagnosis.known].double()
    ridge = (1e-9 * effects.square().sum() + 1e-30) * torch.eye(len(units), device=effects.device, dtype=effects.dtype)
    fitted = torch.linalg.solve(effects.T @ effects + ridge, effects.T @ wanted) if wanted.numel() else []

    def measure(off: list[bool]) -> float:
        return diagnosis.measure(
            predict([layer for unit, is_off in zip(units.values(), off) if is_off for layer in unit])
        )

    off = [float(value) > 0.5 for value in fitted]
    least = measure(off)
    kinds = {part for name in units for part in (name.rpartition(".")[2], *LAYER.findall(name))}
    for kind in sorted(kinds) if least > diagnosis.bound else ():
        whole = [kind in (name.rpartition(".")[2], *LAYER.findall(name)) for name in units]
        if (rest := measure(whole)) < least:
            off, least = whole, rest
    for _ in range(2):
        before = least
        for n in range(len(units)):
            if least <= diagnosis.bound:
                break
            turned = [*off[:n], not off[n], *off[n + 1 :]]
            if (rest := measure(turned)) < least:
                off, least = turned, rest
        if least > 0.9 * before:
            break
    return off


def try_dtypes(diagnosis: Diagnosis, gap: float) -> Iterator[Hypothesis]:
    """Try a copy of the model in each 16-bit precision."""
    learner = diagnosis.learner
    if any(hasattr(weight, "quant_state") for weight in learner.model.parameters()):
        return
    native = next((weight.dtype for weight in learner.model.parameters() if weight.is_floating_point()), torch.float32)
    for name, largest in diagnosis.dtype_bounds.items():
        dtype = getattr(torch, name)
        if dtype == native or gap > largest:
            continue
        with suppress(torch.OutOfMemoryError):
            other = copy.deepcopy(learner.model).to(dtype)
            for module in other.modules():  # TRL's and accelerate's own forward still belong to the first model
                vars(module).pop("forward", None)
            plain = replaced_attributes(learner, autocast=lambda: torch.autocast(diagnosis.device.type, enabled=False))
            with plain:
                rest = diagnosis.measure(diagnosis.pick(learner.logits(diagnosis.rows, model=other)))
            words = (
                f"another dtype: the sampler computes in {name}, the learner in {str(native).removeprefix('torch.')}"
            )
            yield Hypothesis("another dtype", words, DTYPE_FIX, rest)


def try_old_prefix(diagnosis: Diagnosis) -> Iterator[Hypothesis]:
    """Try keys and values of the prompt by the weights before the last update, and all else by the present ones."""
    learner = diagnosis.learner
    if not (old := learner.old_weights()):
        return
    predicted = []
    with torch.no_grad(), eval_mode(learner.model), learner.autocast():
        for row in diagnosis.rows:
            ids = torch.tensor([row.prompt + row.completion], device=diagnosis.device)
            n = len(row.prompt) - 1  # the last token of the prompt is computed with the first of the answer
            if n < 1:
                return
            with weights_replaced(learner.model, old):
                cache = learner.model(input_ids=ids[:, :n], use_cache=True).past_key_values
            logits = learner.model(input_ids=ids[:, n:], past_key_values=cache, use_cache=True).logits[0].float()
            predicted.append(logits[-len(row.sampled) - 1 : -1])
    words = "stale prefix cache: the sampler kept the prompt's keys and values of the weights before the last update"
    rest = diagnosis.measure(diagnosis.pick(torch.cat(predicted)))
    yield Hypothesis("stale prefix cache", words, CACHE_FIX, rest)


def try_dropout(diagnosis: Diagnosis, gap: float) -> Explanation | None:
    """Return dropout as the cause where it makes as much noise in the learner as was found."""
    learner = diagnosis.learner

    @contextmanager
    def training(model: Any) -> Iterator[None]:
        was_training = model.training
        model.train()
        try:
            yield
        finally:
            model.train(was_training)

    base = diagnosis.pick(diagnosis.logits)
    passes = [learner.logits(diagnosis.rows, mode=training) for _ in range(4)]
    noise = sum(float((diagnosis.pick(logits) - base)[diagnosis.known].abs().mean()) for logits in passes) / 4
    if not gap / 2 <= noise <= 2 * gap:
        return None
    words = "dropout: the difference follows no setting or weight, and is as large as what dropout does to the learner"
    return Explanation("dropout", words, "put the sampler in evaluation mode")


MOST_PROMPTS = 1024
"""Prompts that are kept where a server reads others than it was sent: one is enough to name the fault."""


@torch.no_grad()
def find_old_weights(trainer: Any) -> dict[str, Tensor]:
    """Return the trained weights before the last update, out of AdamW's own state, so that no step keeps a copy.

    Empty before the first update, and with another optimizer than torch's AdamW. The update is taken back (torch 2.13,
    optim/adamw.py): w = (w' + rate m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)) / (1 - rate * decay).
    """
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    if optimizer is None or not type(optimizer).__name__.startswith("AdamW"):
        return {}
    names = {id(weight): name for name, weight in trainer.model.named_parameters()}
    rates, found = find_last_rates(trainer), dict[str, Tensor]()
    for number, group in enumerate(optimizer.param_groups):
        rate = rates[number] if number < len(rates) else float(group["lr"])
        for weight in group["params"]:
            state = optimizer.state.get(weight, {})
            if id(weight) not in names or not {"step", "exp_avg", "exp_avg_sq"} <= set(state):
                continue
            (first, second), count = group["betas"], float(state["step"])
            mean = state["exp_avg"].double() / (1 - first**count)
            scale = (state["exp_avg_sq"].double() / (1 - second**count)).sqrt() + group["eps"]
            before = (weight.double() + rate * mean / scale) / (1 - rate * group["weight_decay"])
            found[names[id(weight)]] = before.to(weight.dtype)
    return found


def find_last_rates(trainer: Any) -> list[float]:
    """Return the learning rate of the last update of each group; the schedule has gone on since."""
    schedule = trainer.lr_scheduler
    schedule = getattr(schedule, "scheduler", schedule)
    factors, last = getattr(schedule, "lr_lambdas", None), getattr(schedule, "last_epoch", 0) - 1
    if not factors or last < 0:
        return []
    return [float(rate) * float(factor(last)) for rate, factor in zip(schedule.base_lrs, factors, strict=True)]


def find_old_heads(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the head that the run started with, out of the base's files."""
    with suppress(SftplayError, OSError, SafetensorError, RuntimeError):
        folder = Path(find_base(trainer.cfg, RunFolder(trainer.run_folder))[0])
        tied = trainer.model.config.get_text_config().tie_word_embeddings
        ends = ("lm_head.weight", *(("embed_tokens.weight",) if tied else ()))
        for path in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                    if name.endswith(ends):
                        yield "the one that the run started with", file.get_tensor(name)
                        return


def list_other_prompts(trainer: Any, row: Row) -> dict[str, list[int]]:
    """Return other ids of a row's prompt by what makes them: a first token, the model's own template, none at all."""
    tokenizer = trainer.processing_class
    found = {"without its first token": row.prompt[1:], "without its last token": row.prompt[:-1]}
    for name, token in (("<bos>", tokenizer.bos_token_id), ("<eos>", tokenizer.eos_token_id)):
        if token is not None:
            found[f"with {name} ({token}) before it"] = [token, *row.prompt]
    rows = trainer.questions.row_numbers
    if row.number in rows:
        question = trainer.questions[rows.index(row.number)].question
        found["the question without a template"] = list(tokenizer(question, add_special_tokens=False)["input_ids"])
        found["the question as plain text"] = list(tokenizer(question)["input_ids"])
        messages = [{"role": "user", "content": question}]
        with suppress(ValueError, TypeError, KeyError):  # jinja's errors are ValueErrors of transformers
            for words, named in (("without the system prompt", {"add_generation_prompt": True}),
                                 ("without the start of the answer", {})):  # fmt: skip
                ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **named)
                found[f"by its chat template {words}"] = list(ids)
    return {words: ids for words, ids in found.items() if ids and ids != row.prompt}


def read_server_facts(client: Any) -> SamplerFacts:
    """Return what a vLLM server says of itself, through TRL's client of it (trl 1.16, generation/vllm_client.py)."""
    dtype: str | None = None
    with suppress(RuntimeError, KeyError, TypeError):  # a server without its development endpoints
        dtype = str(client.get_server_info()["model_config"]["dtype"]).removeprefix("torch.")

    def score(prompt: list[int], answer: list[int]) -> list[float]:
        # A request for the log-probabilities of its prompt reads no prefix cache, and a greedy one no random numbers.
        body = {"prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        reply = client.session.post(f"{client.base_url}/v1/completions", json={"model": client.model, **body})
        reply.raise_for_status()
        places = reply.json()["choices"][0]["prompt_logprobs"][-len(answer) :]
        return [float(place[str(token)]["logprob"]) for place, token in zip(places, answer, strict=True)]

    return SamplerFacts(f"vLLM at {client.base_url}", dtype, keep_other_prompts(client), score)


def keep_other_prompts(client: Any) -> Callable[[list[int]], list[int] | None]:
    """Return what gives the ids that the server says it has read where TRL's client was told to send these; None where
    they are the same.
    """
    generate, others = client.generate, dict[tuple[int, ...], list[int]]()

    def generate_and_keep(prompts: Sequence[list[int]], **named: Any) -> Any:
        answers = generate(prompts=prompts, **named)
        for sent, read in zip(prompts, answers["prompt_ids"], strict=True):
            if list(sent) != list(read) and len(others) < MOST_PROMPTS:
                others[tuple(sent)] = list(read)
        return answers

    client.generate = generate_and_keep
    return lambda ids: others.get(tuple(ids))
