"""Completions of several turns by a model that is scripted: streams, masks, limits, and environments that fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from in_process import sized, written_config
from templates import TOOLS, make_renderer, make_tokenizer, whole_ids

from sftplay.data.load_prompts import Question
from sftplay.environments.dialogue import Dialogue
from sftplay.environments.processes import EnvironmentHost, EnvironmentSpec
from sftplay.environments.rollouts import (
    RolloutIds,
    Rollouts,
    abstain_where_failed,
    compute_turn_figures,
    turn_columns,
)
from sftplay.errors import DataError
from sftplay.heartbeat import Heartbeat
from sftplay.model.tokenizer import load_tokenizer
from sftplay.reward.reward_set import BatchRewards
from sftplay.reward.table import RewardValues
from sftplay.tasks.grpo.sampler_check import SampledRow
from sftplay.tasks.grpo.task import load_rows
from sftplay.tasks.grpo.turns import Tokens, as_rollouts, count_sampled, read_records, roll_out

FILE = Path(__file__).parent / "misbehaving.py"
TOKENIZER = make_tokenizer("chatml")
END = TOKENIZER.eos_token_id
ASKED = {"role": "user", "content": "Play."}


def question(row: int = 0, **columns: Any) -> Question:
    return Question(row, whole_ids("chatml", [ASKED], tools=False), "Play.", columns, [ASKED])


def encode(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


class Script:
    """A sampler that writes the given texts, one for each turn of each row, and remembers what it was asked."""

    def __init__(self, *rows: Sequence[str], ends: bool = True) -> None:
        self.rows, self.ends, self.asked, self.most = [list(row) for row in rows], ends, [], []  # type: ignore[var-annotated]

    def __call__(self, prompts: list[list[int]], most: int) -> tuple[list[list[int]], list[list[float]]]:
        self.asked.append(prompts)
        self.most.append(most)
        texts = [row.pop(0) for row in self.rows if row][: len(prompts)]
        ids = [[*encode(text), *([END] if self.ends else [])] for text in texts]
        ids += [[END]] * (len(prompts) - len(ids))
        return ids, [[-0.5] * len(turn) for turn in ids]


@pytest.fixture(scope="module")
def rollouts() -> Iterator[Callable[..., Any]]:
    """A function that opens rollouts with one host process for the whole module."""
    tools = [f"{FILE}:order", f"{FILE}:scale"]
    spec = EnvironmentSpec(environment=f"{FILE}:make", tools=tools, deadline_s=5.0)
    bare = EnvironmentSpec(tools=tools, deadline_s=5.0)
    dialogue = Dialogue.prove(make_renderer("chatml"), tools="", has_environment=True, named="chatml")
    dialogue.calls = dialogue._find_calls("chatml")  # calls are read, and no prompt shows tools: short ids
    with EnvironmentHost(spec) as host:

        @contextmanager
        def open_rollouts(
            *, has_environment: bool = True, max_turns: int = 5, max_tokens: int = 400
        ) -> Iterator[Rollouts]:
            opened = Rollouts.__new__(Rollouts)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sftplay.environments.rollouts.EnvironmentHost", lambda _: host)
                opened.__init__(  # type: ignore[misc]
                    spec if has_environment else bare, dialogue, max_turns=max_turns, max_tokens=max_tokens,
                    max_prompt_tokens=200, end_ids=[END], seed=1,
                )  # fmt: skip
            yield opened
            opened._threads.shutdown()

        yield open_rollouts


def call(text: str, name: str = "order") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "{text}"}}}}\n</tool_call>'


def test_the_stream_is_the_whole_dialogue_and_the_mask_is_what_the_model_wrote(rollouts: Any):
    script = Script(["first", call("go on"), "second"])
    with rollouts() as opened:
        (ids,) = opened.run([question(first="Begin.")], script)
    turns = [
        {"role": "user", "content": "Play.\n\nBegin."},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "turn 1"},
        {"role": "assistant", "content": call("go on")},
        {"role": "tool", "content": "GO ON"},
    ]
    assert ids.prompt_ids == whole_ids("chatml", turns[:1], tools=False)
    assert ids.prompt_ids + ids == [*whole_ids("chatml", turns, tools=False), *encode("second"), END]
    written = [token for token, flag in zip(ids, ids.mask, strict=True) if flag]
    assert written == [*encode("first"), END, *encode(call("go on")), END, *encode("second"), END]
    assert [logp == 0.0 for logp in ids.logps] == [not flag for flag in ids.mask]
    assert (ids.record.ended, ids.record.reward, ids.record.n_turns, ids.record.n_calls) == ("done", 1.0, 3, 1)
    assert ids.record.environment_tokens == ids.mask.count(0)
    assert ids.record.answer == "second"
    # What is sampled from is the stream itself.
    assert [prompts[0] for prompts in script.asked] == [whole_ids("chatml", turns[:n], tools=False) for n in (1, 3, 5)]


def test_one_environment_that_hangs_dies_or_raises_ends_only_its_own_completion(rollouts: Any, capsys: Any):
    orders = ["hang", "die", "raise", "bytes", "big", "x", "z"]
    script = Script()
    script.rows = [[text] for text in orders] + [["last"], ["last"]]
    with rollouts() as opened:
        found = opened.run([question(n) for n in range(7)], script)
    assert [ids.record.ended for ids in found] == ["failure"] * 5 + ["done"] * 2
    reasons = ["took longer than 5 s", "died (exit code 7)", "raised LookupError", "a bytes", "200,000,000"]
    assert all(reason in ids.record.failure for reason, ids in zip(reasons, found, strict=False))
    assert [ids.record.reward for ids in found[5:]] == [1.0, 1.0]
    said = capsys.readouterr()
    assert all(reason in said.out + said.err for reason in reasons)
    rewards = BatchRewards({"any": RewardValues([1.0] * 7)}, [None] * 7)
    kept = abstain_where_failed(rewards, [ids.record for ids in found]).by_name["any"]
    assert kept.values == [None] * 5 + [1.0, 1.0]
    assert len(kept.reasons) == 5


def test_a_reset_that_fails_gives_one_token_without_a_loss(rollouts: Any):
    script = Script(["x", "y"])
    with rollouts() as opened:
        bad, good, long = opened.run([question(broken="no"), question(1), question(2, first="long " * 60)], script)
    assert (list(bad), bad.mask, bad.record.ended) == ([END], [0], "failure")
    assert "reset raised ValueError: no" in bad.record.failure
    assert good.record.ended == "done"
    assert (list(long), long.record.failure[:40]) == ([END], "the environment failed: reset made the p")
    assert [len(prompts) for prompts in script.asked] == [1, 1]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (call("hang"), "error: order took longer than 5 s"),
        (call("die"), "error: order died (exit code 7)"),
        (call("void"), "error: order returned None, which is no text"),
        (call("big"), "error: order returned 200,000,000 characters, more than 1,048,576"),
        (call("x", "nothing"), "error: nothing is no tool; there are order, scale, peek"),
        ("<tool_call>\nnonsense\n</tool_call>", "error: unknown this is no call: Expecting value"),
        (f"{call('hang')}\n{call('after')}", "error: order took longer than 5 s"),
    ],
)
def test_a_call_that_fails_is_answered_and_the_game_goes_on(rollouts: Any, text: str, answer: str):
    with rollouts() as opened:
        (ids,) = opened.run([question()], Script(["x", text, "y"]))
    tools = [turn for turn in ids.record.turns if turn["role"] == "tool"]
    assert tools[0]["content"].startswith(answer)
    assert ids.record.n_failures == 1
    assert (ids.record.ended, ids.record.reward) == ("done", 1.0)  # the environment has lost nothing
    if "after" in text:
        assert [turn["content"] for turn in tools[1:]] == ["AFTER"]


def test_a_turn_with_many_calls_that_hang_is_not_silent(rollouts: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sftplay.environments.rollouts.BEAT_S", 0.2)
    beats = list[float]()
    with rollouts() as opened:
        opened.beat = lambda: beats.append(time.monotonic())
        script = Script(["x", "\n".join([call("hang")] * 3), "y"])
        began = time.monotonic()
        (ids,) = opened.run([question()], script)
        pauses = [after - before for before, after in pairwise([began, *beats])]
    assert ids.record.n_failures == 3
    assert sum(pauses) > 15  # three deadlines of 5 s
    assert max(pauses) < 9


@pytest.mark.parametrize("name", [r"\ud83d", r"order\u0000", "<|im_end|>", "a b"])
def test_a_call_whose_name_no_template_can_write_is_answered_as_one_that_is_unknown(rollouts: Any, name: str):
    script = Script([call("x", name), "x", "y"])
    with rollouts() as opened:
        (ids,) = opened.run([question()], script)
    tool = next(turn for turn in ids.record.turns if turn["role"] == "tool")
    assert tool["content"] == "error: unknown is no tool: a name has letters, digits and _"
    assert (ids.record.n_failures, ids.record.ended) == (1, "done")


def test_tools_without_an_environment_end_with_the_first_turn_that_calls_none(rollouts: Any):
    with rollouts(has_environment=False) as opened:
        (ids,) = opened.run([question()], Script([call("remember"), call("remember"), "27"]))
    assert [turn["content"] for turn in ids.record.turns if turn["role"] == "tool"] == ["1", "2"]
    assert (ids.record.ended, ids.record.answer) == ("answer", "27")


def test_the_limit_of_turns_ends_a_completion_and_its_last_reward_counts(rollouts: Any):
    with rollouts(max_turns=1) as opened:
        one, other = opened.run([question(), question(1)], Script(["x"], [call("y")]))
    assert (one.record.ended, one.record.reward, one.mask.count(0)) == ("turns", 0.5, 0)
    assert (other.record.ended, other.record.n_calls) == ("turns", 0)


def test_the_budget_of_tokens_counts_all_turns_and_nothing_is_cut_in_the_middle_of_an_answer(rollouts: Any):
    answered = Dialogue(make_renderer("chatml"), tools="").answer_ids
    first = len(encode("x")) + 1
    from sftplay.data.records import Message

    between = len(answered([Message("user", "turn 1")])[1])
    for max_tokens, ended, length in (
        (first + between, "tokens", first),  # no token would be left for an answer: it is not appended
        (first + between + 1, "done", first + between + 1),
        (first + between + 3, "done", first + between + 3),
    ):
        script = Script(["x", "yyyyyy"])
        with rollouts(max_tokens=max_tokens) as opened:
            (ids,) = opened.run([question()], script)
        assert len(ids) == len(ids.mask) == len(ids.logps) == length
        # The last turn is cut at the budget; its environment was asked all the same, and was done.
        assert ids.record.ended == ended
        assert script.most == [max_tokens, max_tokens - first - between][: len(script.most)]


def test_a_turn_that_is_cut_off_is_stepped_once_and_ends_the_completion(rollouts: Any):
    with rollouts(max_tokens=4) as opened:
        (ids,) = opened.run([question()], Script(["too long to fit"], ends=False))
    assert (ids.record.ended, ids.record.reward, list(ids)) == ("tokens", 0.5, encode("too long to fit")[:4])


def test_ranks_in_lockstep_sample_equally_often(rollouts: Any):
    script, wanted = Script(["x", "y"]), iter([3, 3, 2, 0])
    with rollouts() as opened:
        (ids,) = opened.run([question()], script, count_going=lambda n: next(wanted))
    assert [len(prompts) for prompts in script.asked] == [3, 3, 2]
    assert ids.record.ended == "done"


def test_figures_and_columns_of_completions(rollouts: Any):
    with rollouts() as opened:
        found = opened.run([question(), question(1)], Script(["x"], [call("void")], ["y"], ["z"], ["w"]))
    records = [ids.record for ids in found]
    figures = compute_turn_figures(records)
    assert (figures["turns"], figures["tool_calls"], figures["tool_failures"]) == (2.5, 0.5, 0.5)
    assert figures["ended/done_share"] == 1.0
    assert math.isclose(sum(value for name, value in figures.items() if name.startswith("ended/") and value), 1.0)
    assert turn_columns(records)["environment_reward"] == [1.0, 1.0]
    assert isinstance(found[0], RolloutIds)
    assert len(TOOLS) == 2


@pytest.fixture
def trainer_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that makes what `roll_out` needs of a trainer, on one rank that holds all weights."""
    monkeypatch.setattr("sftplay.tasks.grpo.turns.has_sharded_weights", lambda _: False)
    return lambda opened, **known: SimpleNamespace(rollouts=opened, heartbeat=Heartbeat(), **known)


@pytest.mark.parametrize("uses_vllm", [True, False])
def test_each_turn_is_sampled_within_what_is_left_by_vllm_and_by_transformers(
    rollouts: Any, trainer_of: Any, uses_vllm: bool
):
    engine, config = SimpleNamespace(max_completion_length=60), SimpleNamespace(max_new_tokens=60)
    seen, script = [], Script(["x", "y"])

    def sample(prompts: Any, images: Any, fields: Any, generations: int) -> Any:
        seen.append((engine.max_completion_length, config.max_new_tokens, generations))
        return script(prompts, 0)

    with rollouts(max_tokens=60) as opened:
        trainer = trainer_of(opened, use_vllm=uses_vllm, vllm_generation=engine, generation_config=config)
        found, logps = roll_out(trainer, [question()], sample)
    left = 60 - found[0].mask.index(0) - found[0].mask.count(0)
    assert seen == [(60, 60, 1), (left, 60, 1) if uses_vllm else (60, left, 1)]
    assert (engine.max_completion_length, config.max_new_tokens) == (60, 60)
    given = as_rollouts([Tokens(question())], found, logps)
    assert (given["env_mask"], given["logprobs"]) == ([found[0].mask], [found[0].logps])
    assert (count_sampled(found[0]), count_sampled([1, 2])) == (4, 2)
    assert read_records(found) == [found[0].record]


def test_ranks_that_a_server_answers_together_have_the_room_of_the_rank_with_most(
    rollouts: Any, trainer_of: Any, monkeypatch: pytest.MonkeyPatch
):
    engine, seen = SimpleNamespace(max_completion_length=60), list[int]()
    ranks = iter([[1, 1], [9, 60], [1, 1], [1, 40], [0, 0]])
    monkeypatch.setattr("sftplay.tasks.grpo.turns.gather_objects", lambda item, heartbeat: next(ranks))

    def sample(prompts: Any, images: Any, fields: Any, generations: int) -> Any:
        seen.append(engine.max_completion_length)
        return script(prompts, 0)

    script = Script(["x", "y"])
    with rollouts(max_tokens=60) as opened:
        roll_out(trainer_of(opened, use_vllm=True, vllm_generation=engine), [question()], sample)
    assert seen == [60, 40]


def test_the_samplers_likeliest_tokens_of_all_turns_are_joined_and_cut_at_the_limit(rollouts: Any, trainer_of: Any):
    said = list[torch.Tensor]()

    def play(most: int) -> tuple[RolloutIds, SampledRow]:
        script = Script(["first", "second"])

        def sample(prompts: Any, *_: Any) -> Any:
            ids, logps = script(prompts, 0)
            rows = [SampledRow(row) for row in logps]
            for row in rows:
                row.top = torch.randint(9, (len(row), 3)), torch.rand(len(row), 3)
                said.append(torch.stack([each.float() for each in row.top]))
            return ids, rows

        config = SimpleNamespace(max_new_tokens=most)
        with rollouts(max_tokens=most, max_turns=2) as opened:
            trainer = trainer_of(opened, use_vllm=False, generation_config=config)
            (ids,), (row,) = roll_out(trainer, [question()], sample)
        return ids, row

    whole = len(play(400)[0])
    said.clear()
    ids, row = play(whole - 2)
    written = torch.tensor(ids.mask).bool()
    assert (ids.record.n_turns, len(ids)) == (2, whole - 2)
    assert list(row) == ids.logps
    assert row.top is not None
    tokens, logps = row.top
    assert torch.equal(torch.stack([tokens.float(), logps])[:, written], torch.cat(said, 1)[:, :-2])
    assert not written.all()
    assert (logps[~written] == -torch.inf).all()


FORGETS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""It leaves out what the model thought in earlier turns."""


def test_a_template_that_is_unfit_for_turns_is_refused_with_the_rows_before_a_model_is_opened(
    builtin_tiny: Path, tmp_path: Path
):
    template = tmp_path / "forgets.jinja"
    template.write_text(FORGETS)
    changes = {"grpo__environment": "twenty_questions", "model__max_seq_len": 256, "data__template": str(template)}
    inputs = grpo_inputs(builtin_tiny, tmp_path)
    cfg = sized(written_config(tmp_path, inputs, **grpo_options(inputs, **changes)))
    with pytest.raises(DataError, match="is refused for turns"):
        load_rows(cfg, load_tokenizer(cfg.model))
