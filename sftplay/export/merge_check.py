"""Compare a merged model with the adapter it was made from: weights, scores and greedy texts.

The reference is PEFT with the adapter on the unquantised base, all in fp32. The rounding of the merged weights explains
a small difference; a larger one is an error. It repairs nothing.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.mixture.load import load_mixture
from sftplay.data.pipeline import load_examples
from sftplay.data.records import IGNORE_INDEX, Message
from sftplay.data.render.render import Renderer
from sftplay.errors import ConfigError, DataError, RunError
from sftplay.export.merge import find_adapter, load_unquantised, move_to_gpu
from sftplay.generate.generate import Generator
from sftplay.launch.run_folder import RunFolder
from sftplay.model.hub import first_line
from sftplay.model.load import load_result
from sftplay.model.merging import attach_for_merging
from sftplay.model.tokenizer import end_token_ids, load_tokenizer
from sftplay.units import plural

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 256, 32
"""Of a long prompt its end is asked."""

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to five.",
    "Translate 'good morning' into German.",
)
"""Asked when a run has no held-out rows."""

UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding: half a unit in the last place."""

ROUNDINGS = {torch.float32: 2.0**10, torch.bfloat16: 32.0, torch.float16: 32.0}
"""Largest distance of two scores, in such errors of the largest score. 16-bit weights are each rounded once, and these
errors mostly cancel (up to 9 were seen on `builtin:tiny`). In fp32 the order of adding changes the sums."""

WEIGHT_NOISE = 1e-5
"""Relative to a tensor's largest value. Two machines may add the products of an update in another order."""


@dataclass
class Outputs:
    """The outputs of a model for the prompts: greedy answers (token ids), and its scores along some answers."""

    answers: list[list[int]] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
    """fp32 [answer tokens + 1, vocabulary] each."""


def test_merge(cfg: RunConfig, folder: RunFolder, *, merged: Path) -> dict[str, Any]:
    """Compare the models, and return the figures: `max_abs_logit_diff`, `texts_equal`, `n` and others.

    Two texts also count as equal when, at the first difference, the reference scores both tokens the same within the
    tolerance (`parted_at_ties`). For a qlora run, `quantised` is the distance of the 4-bit base with the adapter from
    the merged model, for information only.

    Raises:
        ConfigError: there is no adapter, or nothing at `merged`.
        MachineError: the base cannot be read.
        RunError: the merged model disagrees, with the figures and the tensors that differ.
    """
    adapter = find_adapter(cfg, folder)
    if not merged.is_dir():
        raise ConfigError("no merged model here", where=str(merged), fix="make merge")
    tokenizer = load_tokenizer(cfg.model, str(adapter))
    prompts, origin = choose_prompts(cfg, folder, tokenizer=tokenizer)
    log.say(f"comparing on {plural(len(prompts), f'{origin} prompt')}, in fp32", "merge")
    reference = attach_for_merging(load_unquantised(cfg, folder, dtype=torch.float32), adapter)
    expected = _compute_outputs(Generator(reference, tokenizer, end_token_ids(tokenizer), ANSWER_TOKENS), prompts)
    whole = _open_merged(cfg, merged)
    by_peft = merge_by_peft(reference)
    problems = _find_altered(by_peft, whole)
    del reference, by_peft
    gc.collect()
    dtype = whole.dtype
    actual = _compute_outputs(Generator(whole.float(), tokenizer, [], ANSWER_TOKENS), prompts, given=expected.answers)
    scale = max(float(scores.abs().max()) for scores in expected.scores)
    tolerance = ROUNDINGS[dtype] * UNITS[dtype] * scale
    verdicts = [compare_answers(expected, actual, n=n, tolerance=tolerance) for n in range(len(expected.answers))]
    pairs = zip(expected.scores, actual.scores, strict=True)
    figures = {
        "max_abs_logit_diff": max(float((a - b).abs().max()) for a, b in pairs),
        "tolerance": tolerance,
        "dtype": str(dtype).removeprefix("torch."),
        "texts_equal": "different" not in verdicts,
        "parted_at_ties": verdicts.count("tie"),
        "n": len(verdicts),
        "prompts": origin,
        "altered": problems,
    }
    if AutoTokenizer.from_pretrained(merged).chat_template != tokenizer.chat_template:
        problems.append("the chat template is not the one of the run")
    if cfg.tuning.mode == "qlora":
        figures["quantised"] = _measure_quantisation(cfg, folder, prompts=prompts, expected=expected, merged=actual)
    _check_figures(figures, problems, merged=merged)
    return figures


def _evenly_spaced(count: int) -> list[int]:
    """Return PROMPTS evenly spaced numbers below `count`, or all of them."""
    return sorted({n * count // PROMPTS for n in range(PROMPTS)}) if count else []


def choose_prompts(cfg: RunConfig, folder: RunFolder, *, tokenizer: Any) -> tuple[list[list[int]], str]:
    """Return token ids of held-out prompts, or of the built-in questions, and which of the two they are."""
    template = tokenizer.chat_template
    held_out: Any = None
    try:
        if cfg.task.learns_from_rewards:
            from sftplay.data.load_prompts import load_prompts

            asked = load_prompts(cfg, tokenizer, renderer_template=template, tools="").held_out
            if prompts := [list(asked[n].ids)[-PROMPT_TOKENS:] for n in _evenly_spaced(len(asked))]:
                return prompts, "held-out"
        elif cfg.learns_documents:  # some blocks of each source
            sources = load_mixture(cfg, tokenizer, renderer_template=template).held_out.values()
            held_out = [blocks[n] for blocks in sources for n in _evenly_spaced(len(blocks))]
        else:
            checked = folder.read_json("data_report.json").get("files")
            held_out = load_examples(cfg, tokenizer, renderer_template=template, checked=checked).held_out
    except DataError as error:
        log.say(f"note: the run's rows cannot be read any more ({error.what})", "merge")
    if held_out:
        prompts = []
        for row in (held_out[n] for n in _evenly_spaced(len(held_out))):
            ids = list(row["input_ids"])
            first = next((at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX), len(ids))
            # Plain text is learned as a whole: half of it.
            prompts.append(ids[: first if first > 1 else max(1, len(ids) // 2)][-PROMPT_TOKENS:])
        return prompts, "held-out"
    if not template:
        return [list(tokenizer(question)["input_ids"]) for question in QUESTIONS], "built-in"
    renderer = Renderer.prove(tokenizer, template, samples=[])
    return [renderer.prompt_ids([Message("user", question)]) for question in QUESTIONS], "built-in"


@torch.no_grad()
def _compute_outputs(
    generator: Generator, prompts: Sequence[list[int]], *, given: Sequence[list[int]] | None = None
) -> Outputs:
    """Return the model's answers, and its scores for them, or for the `given` answers."""
    model, outputs = generator.model, Outputs()
    move_to_gpu(model)
    device = next(model.parameters()).device
    for n, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        answer = generator.generate(ids, torch.ones_like(ids))[0, len(prompt) :].tolist()
        outputs.answers.append(answer)
        sequence = torch.tensor([prompt + (given[n] if given else answer)], device=device)
        outputs.scores.append(model(input_ids=sequence).logits[0, len(prompt) - 1 :].float().cpu())
        log.progress(n + 1, len(prompts), what="answered", tag="merge")
    model.to("cpu")
    return outputs


def _open_merged(cfg: RunConfig, merged: Path) -> Any:
    try:
        whole, loading = AutoModelForCausalLM.from_pretrained(
            merged, dtype="auto", output_loading_info=True, trust_remote_code=cfg.model.trust_remote_code
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = f"cannot be opened ({first_line(error)})"
        raise RunError(what, where=str(merged), fix="remove it, and merge again") from error
    if missing := sorted(loading["missing_keys"]):
        raise RunError(f"lacks {len(missing)} weights, {missing[0]} for one", where=str(merged), fix="merge again")
    return whole.eval()


def merge_by_peft(model: Any) -> nn.Module:
    """Return PEFT's own merge of base and adapter."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(tied|tie_word_embeddings).*")
        whole: nn.Module = model.merge_and_unload()
    return whole


def is_rounded_once(value: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether `value` is `expected` (fp32) up to one rounding to its own dtype; a NaN never is."""
    limit = UNITS.get(value.dtype, 0.0) * expected.abs() + WEIGHT_NOISE * expected.abs().max()
    return bool(((value.float() - expected).abs() <= limit).all())


def _find_altered(expected: nn.Module, whole: nn.Module) -> list[str]:
    """Return the names of tensors that differ from PEFT's own fp32 merge by more than one rounding of each value."""
    altered = []
    left = dict(expected.named_parameters(remove_duplicate=False))
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        value = left.pop(name, torch.empty(0)).detach()
        if value.shape != parameter.shape or not is_rounded_once(parameter.detach(), value):
            altered.append(name)
    return altered + sorted(left)


def compare_answers(expected: Outputs, actual: Outputs, *, n: int, tolerance: float) -> str:
    """Return `same`, `tie` (the reference scores both tokens the same at the first difference) or `different`."""
    wanted, answer = expected.answers[n], actual.answers[n]
    place = next((k for k, (a, b) in enumerate(zip(wanted, answer)) if a != b), None)
    if place is None:
        return "same" if len(wanted) == len(answer) else "different"
    scores = expected.scores[n][place]
    return "tie" if float(scores[wanted[place]] - scores[answer[place]]) <= 2 * tolerance else "different"


def _measure_quantisation(
    cfg: RunConfig, folder: RunFolder, *, prompts: Sequence[list[int]], expected: Outputs, merged: Outputs
) -> dict[str, float]:
    """Return the distance of the merged model from the trained one (the adapter on the 4-bit base)."""
    four_bit = load_result(cfg, folder.path)
    device = next(four_bit.parameters()).device
    gaps, same = [], []
    for prompt, answer, scores in zip(prompts, expected.answers, merged.scores, strict=True):
        with torch.no_grad():
            out = four_bit(input_ids=torch.tensor([prompt + answer], device=device))
        trained = out.logits[0, len(prompt) - 1 :].float().cpu()
        gaps.append((trained - scores).abs().flatten())
        same.append(trained.argmax(-1) == scores.argmax(-1))
    gap, share = torch.cat(gaps), float(torch.cat(same).float().mean())
    largest, mean = float(gap.max()), float(gap.mean())
    log.say(
        f"for information: the scores of the trained model (the adapter on the 4-bit base) differ by up to "
        f"{largest:.3g} (mean {mean:.3g}); its likeliest next token is the same at {share:.0%} "
        "of the places. The rounding of the base to 4 bits causes this; it is no error of merging",
        "merge",
    )
    return {"max_abs_logit_diff": largest, "mean_abs_logit_diff": mean, "same_next_token_share": share}


def _check_figures(figures: dict[str, Any], problems: list[str], *, merged: Path) -> None:
    diff, tolerance, n = figures["max_abs_logit_diff"], figures["tolerance"], figures["n"]
    faults = [f"altered: {', '.join(problems[:5])}"] if problems else []
    if not diff <= tolerance:
        faults.append(f"scores differ by {diff:.3g}; {figures['dtype']} explains {tolerance:.3g}")
    if not figures["texts_equal"]:
        faults.append("greedy texts differ")
    if faults:
        what = f"the merged model differs from the adapter on its base ({'; '.join(faults)}; n {n})"
        raise RunError(what, where=str(merged), fix="remove it, and merge again")
    ties = f", {figures['parted_at_ties']} of them up to a tie" if figures["parted_at_ties"] else ""
    within = f"scores within {diff:.3g} (tolerance {tolerance:.3g} for {figures['dtype']})"
    log.say(f"agree: {within}, {n} greedy texts equal{ties}", "merge")
