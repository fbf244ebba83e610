"""A conversation: what is remembered, what is forgotten, what commands do, and how it ends."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, train
from lively import lively_model
from transformers import AutoTokenizer

from sftplay import cli
from sftplay.commands import infer
from sftplay.data.render.render import Renderer
from sftplay.generate.chat import HELP, Conversation, run_command
from sftplay.generate.generate import Generator, TextStreamer

pytestmark = pytest.mark.usefixtures("verbs_environment")

END = 2
"""Id of <|im_end|> in the tiny tokenizer."""


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    """A model that reads 120 tokens, with answers that depend on every token of the prompt."""
    made = lively_model(tiny_llama)
    made.config.max_position_embeddings = 120
    return made


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer.prove(tokenizer, tokenizer.chat_template, samples=[])


@pytest.fixture
def conversation(model: Any, tokenizer: Any, renderer: Renderer) -> Conversation:
    return Conversation(Generator(model, tokenizer, [END], 8), renderer)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> list[str]:
    """The prompts the model gets from here on, as text."""
    prompts: list[str] = []
    real = Generator.generate

    def generate(self: Generator, ids: torch.Tensor, *rest: Any, **named: Any) -> Any:
        prompts.append(tokenizer.decode(ids[0]))
        return real(self, ids, *rest, **named)

    monkeypatch.setattr(Generator, "generate", generate)
    return prompts


def say(conversation: Conversation, text: str) -> tuple[str, list[str]]:
    """The answer, and what was noted."""
    notes: list[str] = []
    return "".join(conversation.ask(text, Event(), notify=notes.append)), notes


def rendered(tokenizer: Any, turns: list[tuple[str, str]]) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    text: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text


def test_longest_answer_and_temperature_are_set_and_shown(conversation: Conversation, tokenizer: Any):
    greedy, _ = say(conversation, "why")
    assert run_command(conversation, "/max 3") == run_command(conversation, "/max") == "answers of at most 3 tokens"
    assert run_command(conversation, "/reset")
    short, _ = say(conversation, "why")
    assert greedy.startswith(short)
    assert len(tokenizer(short)["input_ids"]) <= 3 < len(tokenizer(greedy)["input_ids"])
    assert run_command(conversation, "/temperature") == "temperature 0: the likeliest words"
    assert run_command(conversation, "/temperature 5") == run_command(conversation, "/temperature") == "temperature 5"
    assert run_command(conversation, "/max 8")
    answers = set()
    for _ in range(6):
        assert run_command(conversation, "/reset")
        answers.add(say(conversation, "why")[0])
    assert len(answers) == 6
    assert run_command(conversation, "/temperature 0")
    assert run_command(conversation, "/reset")
    assert say(conversation, "why")[0] == greedy


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/rest", "did you mean /reset?"),
        ("/xyz abc", "/help lists what there is"),
        ("/max many", "not a number of tokens: 'many'"),
        ("/temperature -1", "not a temperature: '-1'"),
        ("/reset now", "takes nothing"),
        ("/help", HELP),
    ],
)
def test_a_command_that_cannot_be_done_is_answered_and_changes_nothing(
    conversation: Conversation, line: str, message: str
):
    generator = conversation.generator
    say(conversation, "why")
    turns = list(conversation.turns)
    assert message in str(run_command(conversation, line))
    assert (conversation.generator, conversation.turns) == (generator, turns)


def test_the_oldest_turns_are_forgotten_with_a_message_when_they_no_longer_fit(
    conversation: Conversation, asked: list[str], tokenizer: Any
):
    conversation.system = "asks"
    remembered: list[tuple[str, str]] = []
    forgotten = 0
    for n in range(8):
        text = f"{n} why seven old boats"
        answer, notes = say(conversation, text)
        remembered.append(("user", text))
        # By hand: as many of the last turns as leave 8 of 120 tokens for the answer.
        while len(tokenizer(rendered(tokenizer, [("system", "asks"), *remembered]))["input_ids"]) > 112:
            del remembered[:2]
            forgotten += 2
            assert notes
        assert asked[-1] == rendered(tokenizer, [("system", "asks"), *remembered])
        remembered.append(("assistant", answer))
        assert [(turn.role, turn.content) for turn in conversation.turns] == remembered
    assert forgotten >= 4


class Interrupting(io.StringIO):
    """A screen at which somebody presses Ctrl-C `times` times as soon as there is something to see."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def write(self, text: str) -> int:
        written = super().write(text)
        for _ in range(self.times):
            os.kill(os.getpid(), signal.SIGINT)
        self.times = 0
        return written


def test_ctrl_c_ends_the_answer_and_what_came_of_it_is_remembered(
    conversation: Conversation, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
):
    handler = signal.getsignal(signal.SIGINT)
    conversation.generator = Generator(conversation.generator.model, tokenizer, [], 90)
    whole, _ = say(conversation, "why")
    conversation.turns.clear()
    shown = Interrupting(1)
    monkeypatch.setattr("sys.stdout", shown)
    infer._answer(conversation, "why")
    answer = shown.getvalue().removesuffix("\n")
    assert whole.startswith(answer)
    assert 0 < len(answer) < len(whole)
    assert [turn.content for turn in conversation.turns] == ["why", answer]
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr("sys.stdout", Interrupting(2))  # a second one ends the program
    with pytest.raises(KeyboardInterrupt):
        infer._answer(conversation, "why")


@pytest.mark.parametrize("text", ["why ünïcödé 🜁 boats", "  two  spaces \n\n new line"])
def test_pieces_of_an_answer_hold_whole_characters_and_make_up_its_text(tokenizer: Any, text: str):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) > 5
    streamer = TextStreamer(tokenizer, Event())
    streamer.put(torch.tensor([[7, 8]]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    parts = list(iter(streamer.queue.get, None))
    assert "".join(parts) == text
    assert len(parts) > 1
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return train(tmp_path_factory.mktemp("talk"), inputs, train__max_steps=1, train__learning_rate=0.05)


def typed(run: Finished, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return cli.main(["infer", "--config", str(run.folder.path.parents[1] / "run.yaml"), *arguments])


def test_commands_and_turns_come_through_a_pipe_and_the_end_of_input_ends(
    run: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], asked: list[str], tokenizer: Any
):
    text = "/temperature\n/nonsense\nthe river\n /etc\n/system green\nwhy"
    assert typed(run, monkeypatch, text, "--temperature", "0.5", "--top-p", "0.9") == 0
    shown = capsys.readouterr().out
    assert "[infer] temperature 0.5, top-p 0.9\n" in shown
    assert "[infer] no command '/nonsense'" in shown
    assert [prompt.count("<|im_start|>user") for prompt in asked] == [1, 2, 3]
    assert "user\n/etc<|im_end|>" in asked[1]
    assert asked[2].startswith("<|im_start|>system\ngreen<|im_end|>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "not a temperature, 0 or more: '-1'"),
        (["--top-p", "0"], "not a share above 0 and up to 1: '0'"),
        (["--max-new-tokens", "0"], "not a number of tokens: '0'"),
    ],
)
def test_an_impossible_setting_is_refused(
    run: Finished,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    assert typed(run, monkeypatch, "", *arguments) == 2
    assert message in capsys.readouterr().err
