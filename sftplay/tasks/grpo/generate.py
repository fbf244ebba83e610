"""Sampling by the model itself: a prompt is computed once for all its rows, and rows that have ended leave the batch.

It takes the place of the loop over tokens inside `generate` of transformers, and samples the same tokens at the same
seed: as many random numbers are passed over as the rows that have left would have used.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sftplay import log
from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.tasks.grpo.sampler_check import SampledRow
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.upstream import find_attention, read_padding, tuned_for_decoding

EACH_ROW_ALONE = (
    EpsilonLogitsWarper, EtaLogitsWarper, InfNanRemoveLogitsProcessor, LogitNormalization, MinPLogitsWarper,
    SuppressTokensLogitsProcessor, TemperatureLogitsWarper, TopHLogitsWarper, TopKLogitsWarper, TopPLogitsWarper,
    TypicalLogitsWarper,
)  # fmt: skip
"""Logits processors that look at the scores of a row and at nothing else."""

GROWTH = 32
"""Columns by which the cache of all rows grows at least; and by an eighth. Each time it is copied."""

REFILL_SHARE = 4
"""Rows enter when this part of the batch is free. Each position among the rows costs a pass over random numbers."""

SKIPPED = 2**20
"""Random numbers that are passed over at a time, for 8 MiB."""

EXACT, ROUNDED = 1e-4, 0.1
"""Differences of log-probabilities in the proof, absolute and relative: in fp32, and where anything has 16 bits."""


class CannotShare(Exception):
    """Why a model or a setting keeps the loop of transformers; for the user."""


class Decided(Exception):
    """Ends the call of `generate` in which everything that a sampler needs has turned out to be there."""


class PromptSampler:
    """Samples in the place of the loop of transformers. Models and settings that it is not proven for are refused."""

    def __init__(
        self, batches: AdaptiveBatches, *, rows_per_prompt: int = 1, beat: Callable[[], None] = lambda: None
    ) -> None:
        """`batches` bounds the rows at a time. Prompts are computed for so many rows as have `rows_per_prompt` each:
        an evaluation needs no more memory than the training. `beat` is called now and then.
        """
        self.usable: bool | None = None  # not decided yet
        self.batches, self.beat, self.rows_per_prompt = batches, beat, rows_per_prompt
        self.records = False
        """Whether to keep log-probabilities of the sampled tokens."""

        self.top = 0
        """How many of the likeliest tokens at each place are kept as well."""

        self._logps: list[SampledRow] | None = None

    def is_usable(self, model: Any, generate: Callable[[], Any]) -> bool:
        """Return whether this object may sample. The first time `generate` is called, which calls `model.generate`; it
        ends before anything is sampled, and the user is told of a refusal.
        """
        if self.usable is None:
            try:
                if "generate" in vars(model):
                    raise CannotShare("its generate has been replaced")
                with self.within(model):
                    generate()
            except Decided:
                self.usable = True
            except CannotShare as why:
                self.usable = False
                log.say(f"note: completions are sampled by transformers, each with a prompt of its own: {why}")
        return bool(self.usable)

    def take_logps(self, lengths: Iterable[int]) -> list[SampledRow] | None:
        """Return the log-probabilities of the last call, of so many tokens of each row; None where none were kept."""
        if self._logps is None:
            return None
        return [row.cut(length) for row, length in zip(self._logps, lengths, strict=True)]

    @contextmanager
    def within(self, model: Any) -> Iterator[None]:
        """Inside, `model.generate` samples by this object.

        Raises:
            CannotShare, Decided: by `generate`, before anything is sampled.
        """
        model.generate = partial(model.generate, custom_generate=self.decode)
        try:
            yield
        finally:
            del model.generate

    def decode(
        self, model: Any, input_ids: Tensor, *, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        **model_kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Return the prompts, int64 [rows, tokens], with completions: `custom_generate` of transformers."""
        refuse(model, logits_processor, stopping_criteria, generation_config, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        rows = SampledRows(
            model, input_ids, torch.ones_like(input_ids) if mask is None else mask, processors=logits_processor,
            criteria=stopping_criteria, samples=generation_config.do_sample, pad=read_padding(generation_config),
            records=self.records, top=self.top,
        )  # fmt: skip
        rows.beat = self.beat
        with tuned_for_decoding(model):
            if self.usable is None:
                prove(model, input_ids, rows.mask)
                prove_draws(
                    min(len(input_ids), PROOF_DRAWS), model.config.get_text_config().vocab_size, input_ids.device
                )
                raise Decided
            self.batches.retry(len(input_ids), lambda size: rows.run(size, prompts=-(-size // self.rows_per_prompt)))
        self._logps = rows.list_logps() if self.records else None
        return rows.finish()


def refuse(model: Any, processors: Any, criteria: Any, config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise CannotShare where rows cannot be sampled apart from their batch, or caches cannot be cut by rows."""
    found = model_kwargs.get("past_key_values")
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    if others := sorted(name for name, value in model_kwargs.items() if name not in known and value is not None):
        raise CannotShare(f"its inputs have {', '.join(others)}")
    if missing := sorted(known - set(inspect.signature(model.forward).parameters)):
        raise CannotShare(f"its forward pass takes no {missing[0]}")
    if found is None or type(found) is not DynamicCache or found.offloading:
        raise CannotShare("it has no plain cache of keys and values")
    if others := sorted({type(layer).__name__ for layer in found.layers if type(layer) is not DynamicLayer}):
        raise CannotShare(f"its cache has layers of another kind ({others[0]})")
    text = model.config.get_text_config()
    if (kind := (getattr(text, "rope_parameters", None) or {}).get("rope_type")) in ("dynamic", "longrope"):
        raise CannotShare(f"its positions depend on the longest row ({kind})")
    if model.device.type not in ("cpu", "cuda"):
        raise CannotShare(f"random numbers of {model.device.type} are not known")
    options = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False, "prefill_chunk_size": None}
    for name, plain in options.items():
        if getattr(config, name, None) not in (plain, None):
            raise CannotShare(f"{name} is set")
    known_parts = (*EACH_ROW_ALONE, RepetitionPenaltyLogitsProcessor, EosTokenCriteria, MaxLengthCriteria)
    for part in (*processors, *criteria):
        if not isinstance(part, known_parts):
            raise CannotShare(f"{type(part).__name__} sees the whole batch")


class Extent:
    """The part of the buffers of keys and values that is in use: the first `rows`, the columns `start` to `end`."""

    rows = start = end = columns = 0


class RowLayer(DynamicLayer):
    """Keys and values of rows that come and go, in a buffer. The newest tokens of all rows are in one column."""

    def __init__(self, extent: Extent) -> None:
        super().__init__()
        self.extent = extent
        self.keys: Any = None
        self.values: Any = None
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.extent.end - self.extent.start

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the newest tokens, and return keys and values of all, [rows, heads, columns, numbers]."""
        extent, end = self.extent, self.extent.end + key_states.shape[-2]
        self.keys[: extent.rows, :, extent.end : end] = key_states
        self.values[: extent.rows, :, extent.end : end] = value_states
        return (
            self.keys[: extent.rows, :, extent.start : end],
            self.values[: extent.rows, :, extent.start : end],
        )

    def reserve(self, like: DynamicLayer, *, rows: int, end: int, columns: int) -> None:
        """Move the rows into buffers for so many rows and columns, where their newest tokens are left of `end`."""
        self.keys = self._moved(self.keys, like.keys, rows=rows, end=end, columns=columns)
        self.values = self._moved(self.values, like.values, rows=rows, end=end, columns=columns)

    def _moved(self, old: Tensor | None, like: Tensor, *, rows: int, end: int, columns: int) -> Tensor:
        # Zeros: what is masked is multiplied by 0, and must not be NaN.
        extent, new = self.extent, like.new_zeros(rows, like.shape[1], columns, like.shape[3])
        if old is not None and extent.rows:
            width = extent.end - extent.start
            new[: extent.rows, :, end - width : end] = old[: extent.rows, :, extent.start : extent.end]
        return new


class RowCache(Cache):
    """The layers of a model, and what lies where in them."""

    def __init__(self, layers: int) -> None:
        self.extent = Extent()
        super().__init__(layers=[RowLayer(self.extent) for _ in range(layers)])

    def reserve(self, like: Any, *, rows: int, width: int, tokens: int) -> None:
        """Make room for `rows` in all, the longest with `width` tokens now, and for at most so many more `tokens`."""
        columns = width + min(tokens, max(GROWTH, width // 8))
        extent = self.extent
        used = extent.end - extent.start
        for layer, example in zip(self.layers, like.layers, strict=True):
            layer.reserve(example, rows=rows, end=width, columns=columns)
        extent.start, extent.end, extent.columns = width - used, width, columns

    def put(self, prompts: Any, of_rows: Tensor) -> None:
        """Add rows: `of_rows` says which of the computed prompts each has, int64 [rows]."""
        extent, first = self.extent, self.extent.rows
        for layer, prompt in zip(self.layers, prompts.layers, strict=True):
            columns = slice(extent.end - prompt.keys.shape[2], extent.end)
            layer.keys[first : first + len(of_rows), :, columns] = prompt.keys[of_rows]
            layer.values[first : first + len(of_rows), :, columns] = prompt.values[of_rows]
        extent.rows += len(of_rows)

    def keep(self, holes: list[int], movers: list[int], *, rows: int) -> None:
        """Keep the first `rows`, after those in the places `movers` have filled the `holes`."""
        extent = self.extent
        for layer in self.layers if holes else ():
            for kept in (layer.keys, layer.values):
                kept[holes, :, extent.start : extent.end] = kept[movers, :, extent.start : extent.end]
        extent.rows = rows


class SampledRows:
    """The rows of a call: their prompts, their completions so far, and which are in the batch."""

    def __init__(
        self, model: Any, input_ids: Tensor, mask: Tensor, *, processors: Sequence[Any], criteria: Sequence[Any],
        samples: bool, pad: Tensor | None, records: bool, top: int = 0,
    ) -> None:  # fmt: skip
        """`input_ids` and `mask`, int64 [rows, tokens], are padded on the left."""
        self.model, self.input_ids, self.mask = model, input_ids, mask
        self.most = min(criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria))
        self.most -= input_ids.shape[1]
        ends = [criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
        self._ends = {token for tokens in ends for token in tokens.tolist()}
        self._processors = list(processors)
        rows, device = len(input_ids), input_ids.device
        fill = 0 if pad is None else pad.to(device)
        self.completions = torch.zeros(rows, self.most, dtype=torch.long, device=device) + fill
        self.logps = torch.zeros(rows if records else 0, self.most, device=device)
        self._top_logps = torch.zeros(rows if records else 0, self.most, top, device=device)
        self._top_ids = torch.zeros_like(self._top_logps, dtype=torch.long)
        self.lengths: dict[int, int] = {}
        """Tokens of the completions that have ended, by row."""

        self._samples = samples
        self.noise: Noise | None = None
        self._live: list[int] = []
        self._entered: dict[int, int] = {}
        self._chosen = self._read_steps = 0
        self._kept = RowCache(0)
        self.beat: Callable[[], None] = lambda: None
        self._prompt_tokens = mask.sum(1).tolist()
        both = torch.cat([input_ids, mask], 1).cpu().numpy()
        numbers: dict[bytes, int] = {}
        self._prompt_of = [numbers.setdefault(row.tobytes(), len(numbers)) for row in both]
        self._masks_each_query = find_attention(model) == "sdpa"

    @property
    def longest(self) -> int:
        return max(self.lengths.values())

    def finish(self) -> Tensor:
        """Return prompts and completions, and leave the random numbers as the loop of transformers does."""
        if self.noise is not None:
            self.noise.leave_after(self.longest)
        return torch.cat([self.input_ids, self.completions[:, : self.longest]], 1)

    def list_logps(self) -> list[SampledRow]:
        """Return the log-probabilities of the tokens of each row; values after its end mean nothing."""
        rows = [SampledRow(row) for row in self.logps[:, : self.longest].tolist()]
        if self._top_ids.shape[2]:
            for row, ids, logps in zip(rows, self._top_ids.cpu(), self._top_logps.cpu(), strict=True):
                row.top = ids[: self.longest], logps[: self.longest]
        return rows

    def run(self, size: int, *, prompts: int) -> None:
        """Sample all rows that have not ended, `size` at a time; `prompts` are computed at a time."""
        try:
            self._run(size, prompts=prompts)
        finally:
            self._kept = RowCache(0)  # its memory is free for another attempt

    def _run(self, size: int, *, prompts: int) -> None:
        # The rows of a prompt enter together.
        waiting = sorted(
            (row for row in range(len(self.input_ids)) if row not in self.lengths), key=self._prompt_of.__getitem__
        )
        waiting.reverse()
        self._live, self._entered, self._chosen, self._read_steps = [], {}, 0, 0
        self._kept, logits = RowCache(0), None
        while waiting or self._live:
            free = size - len(self._live)
            if waiting and free >= min(len(waiting), max(1, size // REFILL_SHARE) if self._live else 1):
                entering = [waiting.pop() for _ in range(min(free, len(waiting)))]
                logits = self._enter(logits, entering, prompts)
            assert logits is not None
            tokens = self._leave(self._choose(logits))
            logits = self._read(tokens) if self._live else None
            self._read_steps += 1

    def _count_chosen(self, row: int) -> int:
        return self._chosen - self._entered[row]

    def _count_read(self, row: int) -> int:
        """Count the tokens of a row in the cache."""
        return int(self._prompt_tokens[row]) + self._read_steps - self._entered[row]

    def _enter(self, logits: Tensor | None, entering: list[int], prompts: int) -> Tensor:
        """Compute the prompts of the rows that enter, and return the scores of all rows."""
        by_prompt: dict[int, list[int]] = {}
        for row in entering:
            by_prompt.setdefault(self._prompt_of[row], []).append(row)
        groups, live = list(by_prompt.values()), self._live
        total = len(live) + len(entering)
        width = max([*(self._count_read(row) for row in live), *(self._prompt_tokens[row] for row in entering)])
        found = [] if logits is None else [logits]
        for first in range(0, len(groups), prompts):
            self.beat()
            part = groups[first : first + prompts]
            computed, scores = self._compute_prompts([rows[0] for rows in part])
            if not first:
                if not self._kept.layers:
                    self._kept = RowCache(len(computed.layers))
                self._kept.reserve(computed, rows=total, width=width, tokens=self.most - 1)
            of_rows = [number for number, rows in enumerate(part) for _ in rows]
            places = torch.tensor(of_rows, device=scores.device)
            self._kept.put(computed, places)
            found.append(scores[places])
            live += [row for rows in part for row in rows]
            self._entered |= {row: self._chosen for rows in part for row in rows}
            del computed
        self._place()
        return found[0] if len(found) == 1 else torch.cat(found)

    def _compute_prompts(self, rows: list[int]) -> tuple[Any, Tensor]:
        """Return keys and values of the prompts of these rows, and the scores of their first tokens in fp32."""
        width = max(self._prompt_tokens[row] for row in rows)
        ids, mask = self.input_ids[rows, -width:], self.mask[rows, -width:]
        positions = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
        computed = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return computed, self._forward(ids, None if bool((mask == 1).all()) else mask, positions, computed)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, kept: Any) -> Tensor:
        scores = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=kept, use_cache=True,
            logits_to_keep=1, return_dict=True,
        ).logits[:, -1]  # fmt: skip
        return scores.to(dtype=torch.float32, device=self.input_ids.device)

    def _place(self) -> None:
        """Find the columns of the rows, after some have come, gone or moved."""
        extent, device, live = self._kept.extent, self.input_ids.device, self._live
        tokens = [self._count_read(row) for row in live]
        extent.start = extent.end - max(tokens)
        self._positions = torch.tensor(tokens, device=device)[:, None]
        self._rows = torch.tensor(live, device=device)
        self._steps = torch.tensor([self._count_chosen(row) for row in live], device=device)
        self._is_seen: Tensor | None = None
        if min(tokens) < max(tokens):
            self._is_seen = torch.arange(extent.columns, device=device) >= extent.end - self._positions
            if not self._masks_each_query:
                self._is_seen = self._is_seen.long()

    def _choose(self, logits: Tensor) -> Tensor:
        """Choose the next token of each row, int64 [rows], as `_sample` of transformers does."""
        scores = self._process(logits)
        if self._samples:
            chances = scores.softmax(-1)
            if self.noise is None:
                self.noise = Noise(len(self.input_ids), like=chances)
            steps = [self._count_chosen(row) for row in self._live]
            # The most of chance / noise is a draw by chance (Gumbel-max): how torch.multinomial draws one.
            chances = chances.div_(self.noise.draw(self._live, steps))
            tokens = chances.argmax(-1)
            if bool(chances.gather(1, tokens[:, None]).isnan().any()):
                torch.multinomial(scores.softmax(-1), 1)  # whose error says what is wrong
        else:
            tokens = scores.argmax(-1)
        return self._record(tokens, scores)

    def _record(self, tokens: Tensor, scores: Tensor) -> Tensor:
        self.completions[self._rows, self._steps] = tokens
        if len(self.logps):
            logps = scores.log_softmax(-1)
            self.logps[self._rows, self._steps] = logps.gather(1, tokens[:, None])[:, 0]
            if top := self._top_ids.shape[2]:
                likeliest = logps.topk(top)
                self._top_logps[self._rows, self._steps] = likeliest.values
                self._top_ids[self._rows, self._steps] = likeliest.indices
        self._steps += 1
        self._chosen += 1
        return tokens

    def _process(self, scores: Tensor) -> Tensor:
        for process in self._processors:
            ids = None
            if isinstance(process, RepetitionPenaltyLogitsProcessor):
                ids, padding = self._align_past()
                process = copy.copy(process)
                process.prompt_ignore_length = padding
            scores = process(ids, scores)
        return scores

    def _align_past(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of the rows so far, the newest in the last column, and how many others stand before."""
        most = int(self._steps.max())
        later = most - self._steps
        ids = torch.cat([self.input_ids, self.completions], 1)[self._rows]
        columns = torch.arange(self.input_ids.shape[1] + most, device=ids.device) - later[:, None]
        padding = (self.mask[self._rows] != 0).int().argmax(1) + later
        return ids.gather(1, columns.clamp(min=0)), padding

    def _has_ended(self, row: int, token: int) -> bool:
        return token in self._ends or self._count_chosen(row) >= self.most

    def _leave(self, tokens: Tensor) -> Tensor:
        """Take the rows that have ended out of the batch, and return the newest tokens of the others."""
        live = self._live
        has_ended = [self._has_ended(row, token) for row, token in zip(live, tokens.tolist(), strict=True)]
        if not any(has_ended):
            return tokens
        self.lengths |= {row: self._count_chosen(row) for row, ends in zip(live, has_ended, strict=True) if ends}
        count = len(live) - sum(has_ended)
        # The last rows move into the places of those that leave: nothing else is copied.
        holes = [place for place in range(count) if has_ended[place]]
        movers = [place for place in range(count, len(live)) if not has_ended[place]]
        places = list(range(count))
        for hole, mover in zip(holes, movers, strict=True):
            live[hole], places[hole] = live[mover], mover
        del live[count:]
        self._kept.keep(holes, movers, rows=count)
        if live:
            self._place()
        return tokens[places]

    def _read(self, tokens: Tensor) -> Tensor:
        """Return the scores after the newest tokens, int64 [rows], in fp32."""
        kept, extent = self._kept, self._kept.extent
        if extent.end == extent.columns:
            self.beat()
            most = max(self.most - self._count_chosen(row) for row in self._live)
            kept.reserve(kept, rows=len(self._live), width=extent.end - extent.start, tokens=most)
            self._place()
        mask = None
        if self._is_seen is not None:
            mask = self._is_seen[:, extent.start : extent.end + 1]
            mask = mask[:, None, None] if self._masks_each_query else mask
        logits = self._forward(tokens[:, None], mask, self._positions, kept)
        extent.end += 1
        self._positions = self._positions + 1
        return logits


class Noise:
    """The random numbers that `torch.multinomial` would draw for all rows at each step, for the rows that need them."""

    def __init__(self, rows: int, *, like: Tensor) -> None:
        """`like`, fp32 [any, words], is like the chances of the rows."""
        self._rows, self._words, self._device = rows, like.shape[1], like.device
        self._is_serial = like.device.type == "cpu" and draws_one_by_one()
        self._source = torch.Generator(like.device)
        state = torch.cuda.get_rng_state(like.device) if like.device.type == "cuda" else torch.get_rng_state()
        self._states = [state]  # before each step

    def draw(self, rows: Sequence[int], steps: Sequence[int]) -> Tensor:
        """Return the numbers of rows at their steps, fp32 [rows, words]."""
        several, numbers = sorted(set(steps)), torch.empty(0)
        if self._is_serial or len(several) > 1:
            numbers = torch.empty(len(rows), self._words, device=self._device)
        for step in several:
            places = [place for place, other in enumerate(steps) if other == step]
            self._source.set_state(self._states[step])
            is_new = step + 1 == len(self._states)
            if self._is_serial:
                self._draw_apart(numbers, {rows[place]: place for place in places}, passes_rest=is_new)
            else:
                found = torch.empty(self._rows, self._words, device=self._device).exponential_(generator=self._source)
                wanted = [rows[place] for place in places]
                if wanted != list(range(self._rows)):  # else a copy would take as much memory again
                    found = found[wanted]
                if len(several) == 1:
                    numbers = found
                else:
                    numbers[places] = found
            if is_new:
                self._states.append(self._source.get_state())
        return numbers

    def leave_after(self, steps: int) -> None:
        """Let torch go on where it would be after so many draws."""
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._states[steps], self._device)
        else:
            torch.set_rng_state(self._states[steps])

    def _draw_apart(self, numbers: Tensor, place_of: dict[int, int], *, passes_rest: bool) -> None:
        at = 0
        for row in sorted(place_of):
            if row < at:
                continue
            pass_over((row - at) * self._words, self._source)
            at, place = row + 1, place_of[row]
            while place_of.get(at) == place + at - row:  # neighbours with neighbouring places
                at += 1
            numbers[place : place + at - row].exponential_(generator=self._source)
        if passes_rest:
            pass_over((self._rows - at) * self._words, self._source)


def pass_over(count: int, source: torch.Generator) -> None:
    """Use up so many random numbers of 64 bits, as the same number of exponential ones would."""
    for first in range(0, count, SKIPPED):
        torch.empty(min(SKIPPED, count - first), dtype=torch.float64).uniform_(generator=source)


@cache
def draws_one_by_one() -> bool:
    """Return whether torch draws exponential numbers on this CPU one after another, each from 64 random bits; torch's
    kernel for Intel's CPUs draws a tensor at once.
    """
    whole, apart = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    numbers = torch.empty(3, 2048).exponential_(generator=whole)
    first = torch.empty(1, 2048).exponential_(generator=apart)
    pass_over(2048, apart)
    last = torch.empty(1, 2048).exponential_(generator=apart)
    return torch.equal(torch.cat([first, last]), numbers[::2])


PROOF_DRAWS = 16
PROOF_TOKENS, PROOF_LENGTHS = (9, 5), (1, 4, 3, 2, 4)
"""Rows whose draws are compared; most tokens of the two prompts, and those of their completions."""


class GivenRows(SampledRows):
    """Rows whose completions are given; what is left is their log-probabilities."""

    def __init__(self, model: Any, input_ids: Tensor, mask: Tensor, *, given: Sequence[Sequence[int]]) -> None:
        most = MaxLengthCriteria(input_ids.shape[1] + max(map(len, given)))
        super().__init__(model, input_ids, mask, processors=(), criteria=[most], samples=False, pad=None, records=True)
        self._given = given

    def _choose(self, logits: Tensor) -> Tensor:
        tokens = [self._given[row][self._count_chosen(row)] for row in self._live]
        return self._record(torch.tensor(tokens, device=logits.device), logits)

    def _has_ended(self, row: int, token: int) -> bool:
        return self._count_chosen(row) == len(self._given[row])


def prove(model: Any, input_ids: Tensor, mask: Tensor) -> None:
    """Raise CannotShare unless a few rows that share prompts, come and go have the log-probabilities of a forward pass.

    `input_ids` and `mask`, int64 [rows, tokens], are padded on the left; the first and the last give the tokens.
    """
    device = input_ids.device
    one, other = (
        input_ids[row][mask[row].bool()][-most:].tolist() for row, most in zip((0, -1), PROOF_TOKENS, strict=True)
    )
    asked = [one, one, one, other, other]
    given = [(ids[::-1] * 4)[:length] for ids, length in zip(asked, PROOF_LENGTHS, strict=True)]
    width = max(map(len, asked))
    ids = torch.tensor([[0] * (width - len(tokens)) + tokens for tokens in asked], device=device)
    seen = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in asked], device=device)
    rows = GivenRows(model, ids, seen, given=given)
    rows.run(3, prompts=1)
    found = torch.cat([rows.logps[row, : len(tokens)] for row, tokens in enumerate(given)])
    wanted = []
    for before, after in zip(asked, given, strict=True):
        whole = torch.tensor([before + after], device=device)
        logps = model(input_ids=whole, use_cache=False).logits[0].float().log_softmax(-1)
        wanted.append(logps[len(before) - 1 : -1].gather(1, whole[0, len(before) :, None])[:, 0].to(device))
    is_half = model.dtype.itemsize < 4 or torch.is_autocast_enabled(device.type)
    rounds = is_half or (device.type == "cuda" and torch.get_float32_matmul_precision() != "highest")
    bound = ROUNDED if rounds else EXACT
    if not torch.allclose(found, torch.cat(wanted), rtol=bound, atol=bound):
        gap = float((found - torch.cat(wanted)).abs().max())
        raise CannotShare(f"log-probabilities differ by {gap:.2g} from those of a forward pass")


def prove_draws(rows: int, words: int, device: torch.device) -> None:
    """Raise CannotShare unless the tokens that are drawn for so many rows are those of `torch.multinomial`."""
    chances = torch.linspace(1, 2, rows * words, device=device).reshape(rows, words)
    with random_numbers_kept():
        noise = Noise(rows, like=chances)
        wanted = torch.multinomial(chances, 1)[:, 0]
        found = (chances / noise.draw(range(rows), [0] * rows)).argmax(-1)
        some = [*range(1, rows, 3)][::-1] or [0]
        again = (chances[some] / noise.draw(some, [0] * len(some))).argmax(-1)
    if not torch.equal(found, wanted) or not torch.equal(again, wanted[some]):
        raise CannotShare(f"torch draws otherwise on {device.type}")
