"""Episodes a second of task score beside a plain loop of transformers' generate, in one alternating run.

`make bench-score` runs it. Both use the same problems, model, adapters, prompts and batches: an answer, a hint, a
second answer. The plain loop is timed twice: as it is, and keeping the log-probabilities of its tokens, without
which nothing can be learned from an episode. Ours keeps them always.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from transformers import logging as transformers_logging

from benchmarks.overhead import cpu_name
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Question
from sftplay.data.render.render import Renderer
from sftplay.model.load import load_start, start_adapter
from sftplay.model.tokenizer import load_tokenizer
from sftplay.tasks.score.role_models import ADAPTER_NAMES, RoleModels
from sftplay.tasks.score.sample_episodes import EpisodeSampler, make_templates

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 32_000
"""Of the long shape: an end token is as good as never sampled from so many, so that all answers are equally long."""


@dataclass
class Stage:
    """The models and problems of both contestants."""

    cfg: RunConfig
    role_models: RoleModels
    renderer: Renderer
    questions: list[Question]


def main() -> int:
    options = parse_options()
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    print(
        f"{time.strftime('%Y-%m-%d')}, {cpu_name()}, {os.cpu_count()} cores, {options.threads} thread(s), "
        f"load {os.getloadavg()[0]:.1f}, " + ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    )
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        shapes: dict[str, Callable[[], Stage]] = {
            "toy: 128 episodes of 2 + 2 + 2 tokens": toy_stage,
            "long: 16 episodes of 64 + 32 + 64 tokens": lambda: long_stage(Path(name) / "model"),
        }
        for title, make in shapes.items():
            if title.partition(":")[0] == (options.only or title.partition(":")[0]):
                print(compare(make(), title=title, rounds=options.rounds))
    return 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["toy", "long"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def toy_stage() -> Stage:
    """The toy as it is shipped."""
    return build_stage([], [f"{n // 5 % 5}+{n % 5}=" for n in range(32)])


def long_stage(folder: Path) -> Stage:
    """The toy's letters in long problems, and a model of random weights: 11 M without its embedding."""
    tokenizer = load_tokenizer(toy_config([]).model)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=6, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    values = ["score.max_new_tokens=64", "score.max_hint_tokens=32", "model.max_seq_len=1024"]
    return build_stage([f"model.name={folder}", *values], [f"{n}+{n}=" * 20 for n in range(4)])


def toy_config(values: list[str]) -> RunConfig:
    fixed = ["train.precision=fp32", "model.attn=sdpa"]
    return load_config(ROOT / "configs" / "run_score_toy.yaml", [*fixed, *values])


def build_stage(values: list[str], problems: list[str]) -> Stage:
    """The problems, each as often as the config samples it, and a model with both adapters."""
    cfg = toy_config(values)
    tokenizer = load_tokenizer(cfg.model)
    renderer = Renderer.prove(tokenizer, tokenizer.chat_template, samples=[])
    model = start_adapter(load_start(cfg), cfg).eval()
    role_models = RoleModels(model, has_guide=True, guide_learns=True, has_value=False)
    each = cfg.score.episodes_per_problem
    questions = [Question(number, [], text, {}) for number, text in enumerate(problems) for _ in range(each)]
    return Stage(cfg, role_models, renderer, questions)


def compare(stage: Stage, *, title: str, rounds: int) -> str:
    """A table: medians of all rounds after a first one, which is not timed."""
    contestants: dict[str, Callable[[int], int]] = {
        "SFT-Play": lambda seed: sample_ours(stage, seed),
        "plain generate": lambda _: sample_plain(stage, keeps=False),
        "plain generate, keeps log-probabilities": lambda _: sample_plain(stage, keeps=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, list[float]] = {name: [] for name in contestants}
    with torch.no_grad():
        for seed in range(rounds + 1):
            for name, sample in contestants.items():
                set_seed(seed)
                began = time.perf_counter()
                count = sample(seed)
                if seed:
                    seconds[name].append(time.perf_counter() - began)
                    tokens[name].append(count)
    n, plain = len(stage.questions), median(seconds["plain generate"])
    lines = [f"\n{title}, median of {rounds} rounds", ""]
    lines += ["| path | episodes/s | tokens of an episode | beside plain |", "| --- | --- | --- | --- |"]
    for name, each in seconds.items():
        length = sum(tokens[name]) / rounds / n
        lines.append(f"| {name} | {n / median(each):.2f} | {length:.1f} | {plain / median(each):.2f}x |")
    return "\n".join(lines)


def sample_ours(stage: Stage, seed: int) -> int:
    """Tokens of the episodes."""
    episode_sampler = EpisodeSampler(stage.cfg, stage.role_models, renderer=stage.renderer)
    episodes = episode_sampler.sample_episodes(
        stage.questions, numbers=range(len(stage.questions)), seed=seed, temperature=1.0
    )
    return sum(len(action.ids) for each in episodes for action in (each.first, each.hint, each.second) if action)


def sample_plain(stage: Stage, *, keeps: bool) -> int:
    """Tokens of the episodes that the loop of a transformers user samples."""
    score, tokenizer, model = stage.cfg.score, stage.renderer.tokenizer, stage.role_models.model
    templates = make_templates(score.prompts, stage.renderer, system=stage.cfg.data.system)
    ends = stage.renderer.end_token_ids

    def generate(adapter: str, prompts: list[list[int]], longest: int) -> list[list[int]]:
        model.set_adapter(adapter)
        batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        out = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=True, temperature=1.0,
            top_p=1.0, top_k=0, max_new_tokens=longest, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id,
            output_logits=keeps, return_dict_in_generate=True,
        )  # fmt: skip
        sampled = out.sequences[:, batch["input_ids"].shape[1] :]
        if keeps:
            scores = torch.stack(out.logits, 1).float().log_softmax(-1)
            scores.gather(-1, sampled.unsqueeze(-1)).squeeze(-1).tolist()
        return [truncate_after_end(ids, ends) for ids in sampled.tolist()]

    def fill(template: Any, longest: int) -> list[list[int]]:
        return [template.fill(ids, max_tokens=stage.cfg.model.max_seq_len - longest) for ids in known]

    longest = score.max_new_tokens
    problems = tokenizer([question.question for question in stage.questions], add_special_tokens=False)["input_ids"]
    known = [{"problem": ids} for ids in problems]
    firsts = generate(ADAPTER_NAMES["solver"], fill(templates.solve, longest), longest)
    known = [{**ids, "attempt": strip_end(first, ends)} for ids, first in zip(known, firsts, strict=True)]
    hints = generate(ADAPTER_NAMES["guide"], fill(templates.guide, score.max_hint_tokens), score.max_hint_tokens)
    known = [{**ids, "hint": strip_end(hint, ends)} for ids, hint in zip(known, hints, strict=True)]
    seconds = generate(ADAPTER_NAMES["solver"], fill(templates.revise, longest), longest)
    return sum(map(len, [*firsts, *hints, *seconds]))


def truncate_after_end(ids: list[int], ends: Any) -> list[int]:
    """The tokens with their end token, without the padding behind it."""
    return ids[: next((n for n, token in enumerate(ids, 1) if token in ends), len(ids))]


def strip_end(ids: list[int], ends: Any) -> list[int]:
    return ids[:-1] if ids[-1] in ends else ids


if __name__ == "__main__":
    raise SystemExit(main())
