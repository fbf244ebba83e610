"""How episodes are sampled: prompts from ids, samples that do not depend on other rows, and figures."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import Question
from sftplay.data.render.render import Renderer
from sftplay.errors import RunError
from sftplay.generate.generate import AHEAD, Generator, SampleByRow, derive_seed
from sftplay.model.builtin import ID
from sftplay.model.out_of_memory import OutOfMemory
from sftplay.tasks import TASKS
from sftplay.tasks.score.evaluation import EpisodeResult, describe
from sftplay.tasks.score.sample_episodes import (
    EpisodeSampler,
    RecordedSampling,
    Template,
    compute_edit_ratio,
    compute_turn_figures,
    diagnose,
    exchange_hints,
    hint_equals_answer,
    is_leaked,
    make_templates,
    sample_actions,
    truncate_middle,
)
from sftplay.tasks.score.section import PromptsConfig
from sftplay.tasks.score.update import find_learning_rates


def ids(text: str) -> list[int]:
    return [ID[character] for character in text]


def test_a_prompt_holds_the_sampled_ids_as_they_are(digits: Path):
    renderer = Renderer.prove(AutoTokenizer.from_pretrained(digits), None, samples=[])
    prompts = PromptsConfig(solve="{problem}", guide="{problem}{attempt}?", revise="{problem}{attempt}?{hint}>")
    templates = make_templates(prompts, renderer, system=None)
    known = {"problem": ids("1+3="), "attempt": ids("2"), "hint": ids("4")}
    assert templates.revise.fill(known, max_tokens=30) == ids("1+3=2?4>")
    assert templates.guide.fill(known, max_tokens=30) == ids("1+3=2?")
    # Ids that no text has: a retokenised text could not bring them back.
    assert templates.guide.fill({**known, "attempt": [0, 0]}, max_tokens=30) == [*ids("1+3="), 0, 0, *ids("?")]


def test_a_memory_shortage_in_sampling_with_sharded_models_names_the_rows_and_what_to_lower(digits: Path):
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model = AutoModelForCausalLM.from_pretrained(digits)
    model.register_forward_pre_hook(run_out)
    role_models: Any = SimpleNamespace(use_role=lambda _: nullcontext(model))
    tree = {"task_mode": "score", "model": {"name": "m"}, "score": {"placement": "sharded", "generation_rows": 2}}
    renderer = Renderer.prove(AutoTokenizer.from_pretrained(digits), None, samples=[])
    episode_sampler = EpisodeSampler(RunConfig.model_validate(tree), role_models, renderer=renderer)
    with pytest.raises(OutOfMemory, match=r"out of memory in generation: 2 rows at a time.*2\.00 GiB") as caught:
        episode_sampler._generate([ids("1+3=")] * 3, "solver", numbers=range(3), seed=1, temperature=1.0)
    assert caught.value.fix == "lower score.generation_rows, then `make resume`"
    assert caught.value.batch_size is None  # smaller micro-batches of learning would change nothing


def test_the_middle_of_the_attempt_is_cut_and_problem_and_hint_survive():
    template = Template(("problem", (90,), "attempt", (91,), "hint"))
    known = {"problem": [1, 2], "attempt": [3, 4, 5, 6, 7], "hint": [8]}
    assert template.fill(known, max_tokens=8) == [1, 2, 90, 3, 4, 7, 91, 8][:8]
    assert template.fill(known, max_tokens=5) == [1, 2, 90, 91, 8]
    with pytest.raises(RunError, match="1 tokens more than the 4"):
        template.fill(known, max_tokens=4)
    assert truncate_middle(range(6), 4) == [0, 1, 4, 5]


def test_a_sample_depends_on_its_number_alone_and_its_probability_is_the_models(digits: Path):
    model = AutoModelForCausalLM.from_pretrained(digits).eval()
    tokenizer = AutoTokenizer.from_pretrained(digits)
    prompts = [ids("1+3="), ids("0+1=2?"), ids("4+4=1?3>")]

    def sample(numbers, temperature=0.7):
        sampling = RecordedSampling(temperature=temperature, seed=5)
        generator = Generator(model, tokenizer, [ID["<end>"]], 4, sampling)
        return sample_actions(generator, [prompts[number] for number in numbers], rows=numbers)

    together, alone = sample([0, 1, 2]), [sample([number])[0] for number in range(3)]
    assert [action.ids for action in together] == [action.ids for action in alone]
    for action in together:
        whole = torch.tensor([action.prompt + action.ids])
        scores = (model(whole).logits[0, len(action.prompt) - 1 : -1] / 0.7).log_softmax(-1)
        expected = scores.gather(-1, torch.tensor(action.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(action.log_probs), expected, atol=1e-4, rtol=1e-4)
        assert action.is_truncated == (action.ids[-1] != ID["<end>"])
        assert action.ids_without_end == (action.ids if action.is_truncated else action.ids[:-1])
    assert [action.log_probs for action in sample([0, 1, 2], temperature=0.0)] == [[], [], []]


def test_conditional_rates_are_over_the_answers_they_are_about():
    figures = compute_turn_figures([False, False, False, True], [True, False, False, False])
    assert figures["fix_rate"] == pytest.approx(1 / 3)
    assert figures["break_rate"] == 1
    assert compute_turn_figures([True], [True])["fix_rate"] is None


def test_the_edit_ratio_is_levenshteins_distance_over_the_longer_length():
    assert compute_edit_ratio("kitten", "sitting") == pytest.approx(3 / 7)
    assert compute_edit_ratio([], [1, 2]) == 1
    assert compute_edit_ratio([], []) == 0
    assert compute_edit_ratio([1, 2, 3], [1, 2, 3]) == 0


@pytest.mark.parametrize(("mode", "solver", "guide"), [("full", 1e-5, 1e-6), ("lora", 5e-5, 1e-5)])
def test_rates_without_a_word_are_those_of_the_specification(mode, solver, guide):
    assert TASKS["score"].rates[mode] == solver
    cfg = RunConfig(task_mode="score", model={"name": "builtin:tiny"}, tuning={"mode": mode})
    rates = find_learning_rates(cfg, peak=TASKS["score"].rates[mode])
    assert rates == pytest.approx({"solver": solver, "guide": guide, "value": 1e-4, "critic": 1e-4})
    said = cfg.with_values({"score.solver_learning_rate": 3e-4, "score.guide_learning_rate": 7e-4}, "test")
    assert (find_learning_rates(said, peak=1.0)["solver"], find_learning_rates(said, peak=1.0)["guide"]) == (3e-4, 7e-4)


def test_a_whole_solution_is_no_leak():
    assert not is_leaked(Question(0, [], "", {"answer": "x" * 200}), "x" * 200)
    assert not is_leaked(Question(0, [], "", {}), "anything")


def test_copying_is_told_from_correcting():
    # Toy A of the specification at the end of stage 1, and toy B.
    copies = SimpleNamespace(**compute_turn_figures([True] * 585 + [False] * 415, [True] * 577 + [False] * 423))
    assert diagnose({**vars(copies), "repeats": 0.98}) == "turn 2 copies the first answer: no self-correction"
    corrects = compute_turn_figures(
        [True] * 300 + [False] * 700, [True] * 292 + [False] * 8 + [True] * 673 + [False] * 27
    )
    assert diagnose({**corrects, "repeats": 0.03, "changes_to_hint": None}) == "turn 2 corrects the first answer"
    # The same course where 98 of 100 changed answers are the hint, as in the shipped toy, or where no hint is one.
    follows = diagnose({**corrects, "repeats": 0.03, "changes_to_hint": 0.98})
    assert follows == "turn 2 follows the hint: it is the answer"
    assert diagnose({**corrects, "repeats": 0.03, "changes_to_hint": 0.0}) == "turn 2 corrects the first answer"
    # Stage 2 of both: turn 1 is right itself, so nearly all second answers are the same, and few wrong ones are left.
    solved = compute_turn_figures([True] * 998 + [False] * 2, [True] * 992 + [False] * 8)
    for repeats in (None, 0.5):
        said = diagnose({**solved, "repeats": repeats})
        assert said == "the first answer is right already: little is left to correct"


def test_a_second_answer_follows_the_hint_where_the_hint_states_it():
    result = EpisodeResult(
        first=0.0, second=1.0, is_known=True, form_first=False, form_second=False, is_parsed=False, leak=True,
        n_cut=0, hint_tokens=1, edit_ratio=1.0, is_identical=False, follows_hint=True,
    )  # fmt: skip
    given = [result, replace(result, follows_hint=False), replace(result, follows_hint=False, is_identical=True)]
    said = describe([*given, replace(result, follows_hint=None)])  # three hints, and one episode without
    assert (said["follows_hint"], said["changes_to_hint"]) == (pytest.approx(1 / 3), 0.5)
    assert describe([replace(result, follows_hint=None)])["changes_to_hint"] is None
    assert hint_equals_answer("4", "4")
    assert hint_equals_answer("The answer is \\boxed{4}.", "So \\boxed{4}")
    assert not hint_equals_answer("Look at step 2.", "2")
    assert not hint_equals_answer("", "")


def test_an_exchanged_hint_was_written_for_another_problem_and_differs():
    assert exchange_hints({0: [5], 1: [5], 2: [6], 3: []}) == {0: [6], 1: [6], 2: [], 3: [5]}
    assert exchange_hints({0: [5], 1: [5]}) == {}


def test_random_numbers_generated_ahead_are_those_of_one_call_a_token():
    ahead, by_token = (torch.Generator().manual_seed(5) for _ in range(2))
    numbers = torch.rand(AHEAD, generator=ahead, dtype=torch.float64)
    single = [torch.rand(1, generator=by_token, dtype=torch.float64) for _ in range(AHEAD)]
    assert torch.equal(numbers, torch.cat(single))
    rows = [3, 0]
    sampler, scores = SampleByRow(7, rows), torch.zeros(2, 1_000)
    sources = [torch.Generator().manual_seed(derive_seed(7, row)) for row in rows]
    for _ in range(4 * AHEAD + 2):  # numbers are generated ahead three times
        places = [int(torch.rand(1, generator=source, dtype=torch.float64).item() * 1_000) for source in sources]
        tokens = sampler(torch.zeros(2, 1), scores).argmax(-1).tolist()
        assert max(abs(token - place) for token, place in zip(tokens, places, strict=True)) <= 1
