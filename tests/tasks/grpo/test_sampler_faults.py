"""Each planted fault of a sampler is named in the step in which it begins, and a sampler without one is not accused."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import Finished, train
from lively import lively_model
from transformers import TemperatureLogitsWarper, TopPLogitsWarper, TrainerCallback

from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.grpo import task
from sftplay.tasks.grpo.sampler_check import (
    BOUNDS,
    DEPTHS,
    SAMPLER_LOGPS,
    Reading,
    SamplerCheck,
    choose_rows,
    find_bound,
)
from sftplay.tasks.grpo.sampler_faults import SamplerFacts, read_server_facts

TOKENS = 20


@dataclass
class Learned:
    """A small run with an adapter and a head that trains in full, and its weights before the last update."""

    run: Finished
    before: dict[str, torch.Tensor]

    @property
    def trainer(self) -> Any:
        return self.run.trainer

    def copied(self) -> Any:
        """A model like the one that learns, as another process would hold it."""
        trainer = self.trainer
        model = copy.deepcopy(trainer.model)
        for module in model.modules():
            vars(module).pop("forward", None)
        return model.eval()

    def stale(self, *names: str) -> Any:
        """The same with old weights where a name is part of theirs."""
        model = self.copied()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name in self.before and any(part in name for part in names):
                    weight.copy_(self.before[name])
        return model


class KeepWeights(TrainerCallback):
    """Keeps the trained weights of the beginning of the last step."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == state.max_steps - 1:
            self.weights = {n: w.detach().clone() for n, w in model.named_parameters() if w.requires_grad}


@pytest.fixture(scope="module")
def learned(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    home = tmp_path_factory.mktemp("learned")
    base = Path(shutil.copytree(tiny_llama, home / "base"))
    lively_model(base).save_pretrained(base)
    inputs = grpo_inputs(base, home / "rows")
    lora = {"r": 4, "modules_to_save": ["lm_head"], "dropout": 0.2}
    changes = {"tuning__mode": "lora", "tuning__lora": lora, "train__max_steps": 3, "train__learning_rate": 0.03}
    build, keep = task.build_trainer, KeepWeights()

    def build_and_watch(parts: Any) -> Any:
        trainer = build(parts)
        trainer.add_callback(keep)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "build_trainer", build_and_watch)
        run = train(home, inputs, **grpo_options(inputs, **changes))
    return Learned(run, keep.weights)


@torch.no_grad()
def sample(
    model: Any, prompts: list[list[int]], *, temperature: float = 1.0, top_p: float = 1.0, old: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token after the other with a cache; `old` fills the cache for the prompts but for their last token."""
    torch.manual_seed(5)
    tokens, logps = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        cache = (old or model)(input_ids=ids[:, :-1], use_cache=True).past_key_values
        last, row, said = ids[:, -1:], [], []
        for _ in range(TOKENS):
            logits = model(input_ids=last, past_key_values=cache, use_cache=True).logits[:, -1].float()
            scores = TemperatureLogitsWarper(temperature)(ids, logits)
            scores = TopPLogitsWarper(top_p)(ids, scores).log_softmax(-1)
            last = scores.exp().multinomial(1)
            row.append(int(last))
            said.append(float(scores[0, row[-1]]))
        tokens.append(row)
        logps.append(said)
    return torch.tensor(tokens), torch.tensor(logps)


def prompts_of(learned: Learned, count: int = 3) -> list[list[int]]:
    return [learned.trainer.questions[n].ids for n in range(count)]


def judge(
    learned: Learned,
    tmp_path: Path,
    sampled: tuple[torch.Tensor, torch.Tensor],
    *,
    facts: SamplerFacts | None = None,
    precision: str = "float32",
) -> tuple[SamplerCheck, list[dict[str, Any]]]:
    """What the check says of a rollout batch, with the events of the run."""
    trainer, (tokens, logps) = learned.trainer, sampled
    prompts = prompts_of(learned, len(tokens))
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ones = torch.ones_like(tokens)
    with torch.no_grad():
        before = trainer._get_per_token_logps_and_entropies(
            trainer.model, torch.cat([ids, tokens], 1), torch.cat([mask, ones], 1), tokens.size(1)
        )[0]
    batch = {
        "prompt_ids": ids, "prompt_mask": mask, "completion_ids": tokens, "completion_mask": ones,
        SAMPLER_LOGPS: logps, "old_per_token_logps": before, "row": torch.arange(len(tokens)),
    }  # fmt: skip
    check = SamplerCheck(1, precision, facts=facts)
    (tmp_path / "logs").mkdir(parents=True, exist_ok=True)
    shown, trainer.run_folder = trainer.run_folder, tmp_path
    state, weights = torch.get_rng_state(), {n: w.detach().clone() for n, w in trainer.model.state_dict().items()}
    try:
        check.judge(trainer, [batch])
    finally:
        trainer.run_folder = shown
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(weights[name], value) for name, value in trainer.model.state_dict().items())
    return check, RunFolder(tmp_path).read_events()


def half_loaded(learned: Learned, lost: Callable[[str], bool]) -> Any:
    model = learned.copied()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name and lost(name):
                weight.zero_()
    return model


def training(model: Any) -> Any:
    return model.train()


def with_first_token(learned: Learned) -> list[list[int]]:
    first = learned.trainer.processing_class.eos_token_id
    return [[first, *prompt] for prompt in prompts_of(learned)]


PLANTED: dict[str, tuple[str, Callable[[Learned], Any]]] = {
    "old head": ("old head", lambda it: sample(it.stale("lm_head"), prompts_of(it))),
    "stale prefix cache": (
        "stale prefix cache", lambda it: sample(it.copied(), prompts_of(it), old=it.stale("lora", "lm_head")),
    ),
    "temperature": ("temperature", lambda it: sample(it.copied(), prompts_of(it), temperature=0.7)),
    "top-p": ("top_p", lambda it: sample(it.copied(), prompts_of(it), top_p=0.8)),
    "dropout": ("dropout", lambda it: sample(training(it.copied()), prompts_of(it))),
    "template": ("template", lambda it: sample(it.copied(), with_first_token(it))),
    "half-loaded adapter, a layer": (
        "half-loaded adapter", lambda it: sample(half_loaded(it, lambda n: ".layers.1." in n), prompts_of(it)),
    ),
    "half-loaded adapter, a kind of module": (
        "half-loaded adapter", lambda it: sample(half_loaded(it, lambda n: "_proj" in n and "q_" in n), prompts_of(it)),
    ),
    "adapter not loaded": ("adapter", lambda it: sample(half_loaded(it, lambda n: True), prompts_of(it))),
    "bfloat16": ("another dtype", lambda it: sample(it.copied().bfloat16(), prompts_of(it))),
    "weights before the update": ("old weights", lambda it: sample(it.stale("lora", "lm_head"), prompts_of(it))),
}  # fmt: skip


VARIANTS = ("half-loaded adapter, a kind of module", "adapter not loaded", "weights before the update")
"""Faults like others here; `make test-slow` plants them."""


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in PLANTED]
)
def test_a_planted_fault_is_named_at_once(fault: str, learned: Learned, tmp_path: Path, capsys: Any):
    name, plant = PLANTED[fault]
    check, events = judge(learned, tmp_path, plant(learned))
    out = capsys.readouterr().out
    print(out)
    assert check.cause is not None
    assert check.cause.name == name
    assert out.count("warning: sampler and learner are not one model") == 1
    assert [event["cause"] for event in events] == [name]
    assert events[0]["gap"] > events[0]["bound"] == 1e-5


def test_a_layer_without_its_adapter_is_found_by_few_tokens(learned: Learned, tmp_path: Path):
    """Fewer than there are parts of the adapter, so that no fit of the parts is unique."""
    tokens, logps = sample(half_loaded(learned, lambda n: ".layers.1." in n), prompts_of(learned))
    check, _ = judge(learned, tmp_path, (tokens[:, :3], logps[:, :3]))
    assert check.cause is not None
    assert "7 of its 14 parts are missing, model.layers.1." in check.cause.words


def test_an_adapter_that_has_learned_nothing_yet_is_no_cause(learned: Learned, tmp_path: Path):
    sampled = sample(learned.copied(), prompts_of(learned), temperature=0.5)
    pairs = {name: weight for name, weight in learned.trainer.model.named_parameters() if "lora_B" in name}
    kept = {name: weight.detach().clone() for name, weight in pairs.items()}
    with torch.no_grad():
        try:
            for weight in pairs.values():
                weight.zero_()
            check, _ = judge(learned, tmp_path, sampled)
        finally:
            for name, weight in pairs.items():
                weight.copy_(kept[name])
    assert check.cause is not None
    assert "adapter" not in check.cause.name


def test_rows_of_many_tokens_are_tried_rather_than_short_ones():
    ones = torch.ones(2, 8, dtype=torch.long)
    mask = torch.tensor([[1] * 2 + [0] * 6, [1] * 8])
    batch = {
        "prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones, "completion_mask": mask,
        "old_per_token_logps": torch.zeros(2, 8), SAMPLER_LOGPS: torch.tensor([[0.2] * 8, [0.1] * 8]),
        "row": torch.arange(2),
    }  # fmt: skip
    assert [row.number for _, row in choose_rows([batch], 0)] == [1, 0]


def test_a_sampler_without_a_fault_is_not_accused(learned: Learned, tmp_path: Path, capsys: Any):
    check, events = judge(learned, tmp_path, sample(learned.copied(), prompts_of(learned)))
    assert "warning" not in capsys.readouterr().out
    assert (check.cause, events) == (None, [])
    assert check.reading is not None
    assert 0 < check.reading.gap < 5e-6


def scores_of(model: Any) -> Callable[[list[int], list[int]], list[float]]:
    """Asks a model for the log-probabilities of an answer, as a server is asked."""

    @torch.no_grad()
    def score(prompt: list[int], answer: list[int]) -> list[float]:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()

    return score


def test_a_sampler_that_can_be_asked_names_a_cache_of_any_age_and_its_dropout(learned: Learned, tmp_path: Path):
    ages_ago = learned.copied()
    with torch.no_grad():
        for name, weight in ages_ago.named_parameters():
            if "lora_B" in name:
                weight.mul_(-0.5)  # neither the last weights nor the first
    sampled = sample(learned.copied(), prompts_of(learned), old=ages_ago)
    check, _ = judge(learned, tmp_path / "blind", sampled)
    assert check.cause is not None
    assert check.cause.name != "stale prefix cache"
    asked, _ = judge(learned, tmp_path / "asked", sampled, facts=SamplerFacts(score=scores_of(learned.copied())))
    assert asked.cause is not None
    assert asked.cause.name == "stale prefix cache"
    noisy = training(learned.copied())
    facts = SamplerFacts(score=scores_of(noisy))
    check, _ = judge(learned, tmp_path / "noisy", sample(noisy, prompts_of(learned)), facts=facts)
    assert check.cause is not None
    assert (check.cause.name, "each time" in check.cause.words) == ("dropout", True)


def test_the_ids_that_a_sampler_has_read_tell_a_template_that_nobody_would_guess(learned: Learned, tmp_path: Path):
    handed = prompts_of(learned)
    read = [[7, 8, 9, *prompt[2:]] for prompt in handed]
    facts = SamplerFacts(seen_prompt=lambda ids: read[handed.index(ids)])
    check, events = judge(learned, tmp_path, sample(learned.copied(), read), facts=facts)
    assert check.cause is not None
    assert check.cause.name == "template"
    assert "from token 0 on [7, 8, 9" in events[0]["words"]


def test_of_two_faults_the_larger_is_named_or_that_it_is_unknown_is_said(learned: Learned, tmp_path: Path):
    hot = sample(half_loaded(learned, lambda n: ".layers.1." in n), prompts_of(learned), temperature=0.97)
    check, _ = judge(learned, tmp_path / "adapter", hot)
    assert check.cause is not None
    assert check.cause.name in ("half-loaded adapter", "unknown")
    assert "unknown" in check.cause.words
    other = learned.copied()
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() / 4)
    check, events = judge(learned, tmp_path / "noise", sample(other, prompts_of(learned)))
    assert check.cause is not None
    assert check.cause.name == "unknown"
    assert "none of what was tried" in events[0]["words"]


def test_the_bound_is_that_of_the_coarser_side_and_a_cause_is_said_once(learned: Learned, tmp_path: Path, capsys: Any):
    tokens, logps = sample(learned.copied(), prompts_of(learned))
    rounded = tokens, logps + 0.004 * torch.randn(logps.shape)
    check, _ = judge(learned, tmp_path / "both", rounded, facts=SamplerFacts(dtype="bfloat16"), precision="bfloat16")
    assert (check.reading and check.reading.is_within, check.cause) == (True, None)
    assert "warning" not in capsys.readouterr().out
    for _ in range(2):  # the second run is the first one resumed
        facts = SamplerFacts(dtype="bfloat16")
        check, events = judge(learned, tmp_path / "one", rounded, facts=facts, precision="float32")
        assert (check.reading and check.reading.is_within, check.cause and check.cause.name) == (True, "another dtype")
        assert len(events) == 1
    assert capsys.readouterr().out.count("the sampler computes in bfloat16, the learner in float32") == 1


def test_bounds_grow_with_depth_and_fewer_bits_and_a_far_token_is_judged_by_its_own():
    at = [[find_bound(name, "float32", depth=depth) for depth in (0, 15, 16, 300)] for name in BOUNDS]
    assert at[0] == [1e-5] * 4
    assert all(one == sorted(one) for one in at)
    assert [find_bound(one, "float16", depth=0) for one in ("float32", "bfloat16", "?")] == [3e-3, 2e-2, 2e-2]
    bounds = tuple(find_bound("float16", "float16", depth=begin) for begin in DEPTHS)
    near = Reading(0, (4.1e-3 * 100, 0.0, 0.0, 0.0), (100, 0, 0, 0), 0.1, bounds)
    far = Reading(0, (0.0, 0.0, 0.0, 4.1e-3 * 100), (0, 0, 0, 100), 0.1, bounds)
    assert (near.is_within, far.is_within) == (False, True)
    few = Reading(0, (0.1, 1e-4 * 100, 0.0, 0.0), (5, 100, 0, 0), 0.1, bounds)  # five tokens make no mean
    assert few.is_within
    assert not Reading(0, (float("nan"), 0.0, 0.0, 0.0), (100, 0, 0, 0), 0.1, bounds).is_within


def test_a_server_is_asked_greedily_for_log_probabilities_and_says_which_prompts_it_has_read():
    asked: list[dict[str, Any]] = []

    class Reply:
        def raise_for_status(self) -> None: ...

        def json(self) -> dict[str, Any]:
            places = [None, *({str(n): {"logprob": -n / 10}, "99": {"logprob": -9.0}} for n in (2, 3, 4))]
            return {"choices": [{"prompt_logprobs": places}]}

    def post(url: str, json: dict[str, Any]) -> Reply:
        asked.append({"url": url, **json})
        return Reply()

    def generate(prompts: list[list[int]]) -> dict[str, Any]:
        return {"prompt_ids": [ids if ids[0] else ids[1:] for ids in prompts]}

    client = SimpleNamespace(
        base_url="http://x:1", model="m", session=SimpleNamespace(post=post), generate=generate,
        get_server_info=lambda: {"model_config": {"dtype": "torch.float16"}},
    )  # fmt: skip
    facts = read_server_facts(client)
    assert facts.dtype == "float16"
    assert facts.score is not None
    assert facts.score([1, 2], [3, 4]) == [-0.3, -0.4]
    assert (asked[0]["url"], asked[0]["prompt"]) == ("http://x:1/v1/completions", [1, 2, 3, 4])
    assert (asked[0]["temperature"], asked[0]["max_tokens"], asked[0]["prompt_logprobs"]) == (0, 1, 0)
    assert facts.seen_prompt is not None
    client.generate(prompts=[[0, 7], [1, 7]])
    assert (facts.seen_prompt([0, 7]), facts.seen_prompt([1, 7])) == ([7], None)
