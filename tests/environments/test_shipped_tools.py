"""The calculator, the Python interpreter, the game of twenty questions, and the adapters for others' environments."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as some
from processes import HANG_S, wait_until

from sftplay.environments.calculator import calculator
from sftplay.environments.openenv import make as make_openenv
from sftplay.environments.processes import EnvironmentHost, EnvironmentSpec, Failed
from sftplay.environments.python import python
from sftplay.environments.twenty_questions import make
from sftplay.environments.verifiers import make as make_verifiers
from sftplay.errors import ConfigError, DataError
from sftplay.sandbox.boxes.executors import OWNER
from sftplay.sandbox.pool import SAFE, find_problem

needs_box = pytest.mark.skipif(
    all(find_problem(name) for name in SAFE), reason="needs bubblewrap or landlock to box a program"
)


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("57*83", "4731"), ("7/2", "3.5"), ("0.1 + 0.2", "0.3"), ("1/3", "0.333333333333"), ("2^10", "1024"),
        ("(1+2) × 3 =", "9"), ("-7 % 3", "2"), ("7 // 2", "3"), ("sqrt(9/4)", "1.5"), ("sqrt(2)", "1.41421356237"),
        ("round(2.567, 2)", "2.57"), ("max(1, 2.5, abs(-3))", "3"), ("10**30 + 1", f"1{'0' * 29}1"), ("2**-2", "0.25"),
        ("1/0", "error: division by zero"), ("9**9**9", "error: the number is too large"),
        ("1e999", "error: the number is too large"), ("sqrt(-1)", "error: a root of a negative number"),
        ("2 +", "error: this is no arithmetic expression"), ("(" * 299, "error: this is no arithmetic expression"),
        ("x + 1", "error: cannot compute 'x'"), ("'a' * 9", "error: cannot compute \"'a'\""),
        ("().__class__", "error: cannot compute '().__class__'"),
        ("12345678901234.5", "12345678901234.5"), ("10**15 / 3", "333333333333333.3"),
        ("log(100, 10)", "error: log does not take 2 numbers"), ("max(1)", "error: max does not take 1 number"),
        ("1 " * 300, "error: the expression has more than 300 characters"),
    ],
)  # fmt: skip
def test_the_calculator_is_exact_and_says_what_it_cannot_compute(expression: str, result: str):
    assert calculator(expression) == result


@given(some.text(alphabet="0123456789.+-*/%()eE^ ,sqrtmax", max_size=300))
def test_no_expression_makes_the_calculator_raise_or_think_for_long(expression: str):
    began = time.process_time()
    assert len(calculator(expression)) < 1_000
    assert time.process_time() - began < 1.0


@given(some.integers(-(10**6), 10**6), some.sampled_from("+-*"), some.integers(-(10**6), 10**6))
def test_the_calculator_agrees_with_python_on_whole_numbers(left: int, operator: str, right: int):
    assert calculator(f"{left} {operator} {right}") == str(eval(f"{left} {operator} {right}"))


@needs_box
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import math\nmath.factorial(5)", "120"), ("print(1)\n'a'", "1\n'a'"), ("x = 1", "(nothing was printed)"),
        ("print(1)\n1/0", "1\nZeroDivisionError: division by zero (line 2)"),
        ("def", "SyntaxError: invalid syntax (line 1)"),
        ("import os; os._exit(0)", "error: its process ended"), ("import sys; sys.exit(3)", "(nothing was printed)"),
        ("print('x' * 10**7)", "error: it printed more than 65,536 bytes"),
    ],
)  # fmt: skip
def test_the_interpreter_says_what_a_program_prints_and_how_it_fails(program: str, said: str):
    assert python(program, timeout=HANG_S) == said


@needs_box
def test_a_program_that_does_not_end_is_ended_and_what_it_printed_is_kept():
    assert python("print(1, flush=True)\nwhile True: pass", timeout=2.0) == "1\nerror: it ran longer than 2 s"
    assert "more than 20,000 characters" in python("1" * 20_001)


@needs_box
def test_a_completion_calls_the_shipped_tools_in_a_process_of_its_own():
    spec = EnvironmentSpec(
        environment="twenty_questions", environment_options={"questions": 5}, tools=["calculator", "python"],
        tool_options={"python": {"timeout": HANG_S}}, deadline_s=HANG_S,
    )  # fmt: skip
    with EnvironmentHost(spec) as host:
        process = host.fork(0)
        assert process.ask(call="calculator", arguments={"expression": "6*7"}) == "42"
        assert process.ask(call="python", arguments={"code": "print(sum(range(10)))"}) == "45"
        assert process.ask(reset={"secret": "cat"}) is None
        assert process.ask(step="Is it a cat?") == ["Yes, it is cat! That was question 1.", 1.0, True]
        process.end()


@pytest.mark.skipif(bool(find_problem("bwrap")), reason="needs bubblewrap, whose boxes end with who opened them")
def test_a_call_that_is_ended_at_the_deadline_leaves_no_box():
    options = {"python": {"timeout": HANG_S, "executor": "bwrap"}}
    with EnvironmentHost(EnvironmentSpec(tools=["python"], tool_options=options, deadline_s=HANG_S)) as host:
        process = host.fork(0)
        (opener,) = [child.pid for child in psutil.Process(host._process.pid).children()]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(process.ask, 4.0, call="python", arguments={"code": "while True: pass"})
            wait_until(lambda: boxes_of(opener) or asked.done())
            assert not asked.done()
            with pytest.raises(Failed, match="took longer than 4 s"):
                asked.result()
        wait_until(lambda: not boxes_of(opener))


def boxes_of(opener: int) -> list[str]:
    """Processes in boxes that this process opened."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{OWNER}={opener}".encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_questions_are_answered_from_the_table_and_the_thing_that_is_named_ends_the_game():
    game = make()
    assert game.reset({"secret": "tiger"}) is None
    for question, answer in (
        ("Is it an animal?", "Yes."), ("It purrs. Is it a DOG?", "No."), ("Can it fly?", "No."),
        ("Is it not alive?", "No."),
        ("Is it bigger than a person?", "Yes."), ("<think>a tiger?</think>Does it have fur?", "Yes."),
    ):  # fmt: skip
        assert game.step(question) == (answer, None, False)
    assert game.step("Is it red or green?")[0].startswith("I do not understand")
    assert game.step("") == (game.step("hm")[0], None, False)
    said, reward, is_done = game.step("Is it a tiger?")
    assert (said, reward, is_done) == ("Yes, it is tiger! That was question 10.", 1.0, True)


def test_things_of_a_table_of_your_own_may_have_several_words_and_capitals(tmp_path: Path):
    table = tmp_path / "table.json"
    things = {"Polar bear": ["white"], "T-shirt": [], "bear": []}
    table.write_text(json.dumps({"properties": {"white": ["White"]}, "things": things}))
    game = make(table=str(table))
    for secret in things:
        game.reset({"secret": secret})
        assert game.step("Is it white?")[0] == ("Yes." if secret == "Polar bear" else "No.")
        others = [name for name in things if name != secret]
        assert [game.step(f"Is it a {name}?")[0] for name in others] == ["No.", "No."]
        assert game.step(f"My guess is the {secret}.")[1:] == (1.0, True)


@pytest.mark.parametrize("questions", [0, "ten", 2.5, True])
def test_a_number_of_questions_that_is_none_is_refused(questions: Any):
    with pytest.raises(ConfigError) as refused:
        make(questions=questions)
    assert refused.value.where == "grpo.environment_options.questions"


def test_a_game_ends_with_nothing_after_its_last_question_and_the_next_one_begins_anew(tmp_path: Path):
    game = make(questions=2)
    for _ in range(2):
        game.reset({"secret": "cat"})
        assert game.step("Is it alive?") == ("Yes.", None, False)
        assert game.step("Is it a dog?") == ("That was question 2. It is cat.", 0.0, True)
    with pytest.raises(DataError, match="'cot' is no thing of the table"):
        game.reset({"secret": "cot"})
    (tmp_path / "table.json").write_text('{"properties": {}, "things": {"cat": ["alive"]}}')
    with pytest.raises(ConfigError, match="no property is called 'alive'"):
        make(table=str(tmp_path / "table.json"))


class Client:
    """What the adapter uses of openenv 0.10's GenericEnvClient behind `.sync()`; recorded from its echo environment."""

    def __init__(self, base_url: str, message_timeout_s: float) -> None:
        self.asked: list[Any] = [base_url, message_timeout_s]

    def sync(self) -> Client:
        return self

    def connect(self) -> Client:
        return self

    def reset(self, **options: Any) -> SimpleNamespace:
        self.asked.append(options)
        return SimpleNamespace(observation={"echoed_message": "say moon"}, reward=0.0, done=False)

    def step(self, action: dict[str, Any]) -> SimpleNamespace:
        self.asked.append(action)
        is_right = action["message"] == "moon"
        return SimpleNamespace(
            observation={"echoed_message": action["message"], "metadata": {}}, reward=float(is_right), done=is_right
        )

    def close(self) -> None:
        self.asked.append("closed")


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("openenv")
    module.__spec__ = SimpleNamespace(name="openenv")  # type: ignore[assignment]
    module.GenericEnvClient = Client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "openenv", module)


@pytest.mark.usefixtures("openenv")
def test_an_openenv_server_gets_the_texts_of_the_model_as_actions():
    environment = make_openenv(url="http://127.0.0.1:8000", field="message", shows="echoed_message")
    assert environment.reset({"reset": {"word": "moon"}}) == "say moon"
    assert environment.step("sun") == ("sun", 0.0, False)
    assert environment.step("moon") == ("moon", 1.0, True)
    environment.close()
    client = environment._client
    assert client.asked == [
        "http://127.0.0.1:8000",
        60.0,
        {"word": "moon"},
        {"message": "sun"},
        {"message": "moon"},
        "closed",
    ]


@pytest.mark.usefixtures("openenv")
def test_actions_of_several_fields_are_json_and_what_is_none_does_not_reach_the_server():
    environment = make_openenv(url="http://127.0.0.1:8000")
    assert environment.reset({}) == '{"echoed_message": "say moon"}'
    for text in ("moon", "[1]"):
        assert environment.step(text) == ("error: write the action as one JSON object", None, False)
    assert environment.step('{"message": "moon"}') == ('{"echoed_message": "moon"}', 1.0, True)


def test_an_adapter_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openenv", None)
    with pytest.raises(ConfigError, match="openenv is not installed"):
        make_openenv(url="http://127.0.0.1:8000")


GAME = """
import verifiers.v1 as vf

__all__ = ["HigherLower", "HigherLowerEnv"]

class Data(vf.TaskData):
    number: int

class Guess(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def few_turns(self, trace: vf.Trace) -> float:
        return 1.0 / trace.num_turns

class HigherLower(vf.Taskset[Guess, vf.TasksetConfig]):
    def load(self):
        for number in (3, 7):
            data = Data(prompt="Guess from 1 to 9.", system_prompt="Be brief.", number=number)
            yield Guess(data, self.config.task)

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class HigherLowerEnv(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as played:
            segment = await played.turn()
            while segment.last_reply != str(task.data.number):
                segment = await played.turn("higher" if int(segment.last_reply) < task.data.number else "lower")
        played.trace.record_reward("won", 1.0, 2.0)
"""


def test_a_multi_turn_environment_of_verifiers_goes_on_with_the_turns_of_a_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("verifiers.v1", reason="needs verifiers: pip install 'verifiers>=0.4,<0.5'")
    (tmp_path / "higher_lower.py").write_text(GAME)
    monkeypatch.syspath_prepend(tmp_path)
    environment = make_verifiers(taskset={"id": "higher_lower"}, seat="player")
    assert environment.reset({"task": 1}) == "Be brief.\n\nGuess from 1 to 9."
    assert environment.step("5") == ("higher", None, False)
    assert environment.step("8") == ("lower", None, False)
    said, reward, is_done = environment.step("7")
    assert (said, is_done) == (None, True)
    environment.close()
    assert reward == pytest.approx(2.0 + 1 / 3)  # 1.0 x its weight 2, and one over three turns


class Record(SimpleNamespace):
    """Any of the plain classes of verifiers 0.4 that the adapter fills: it keeps what it is made of."""

    reward = 0.5


def test_a_task_of_one_turn_is_scored_by_its_own_rewards():
    """The shapes are those of verifiers 0.4: Task.score writes into the trace, the environment runs its agents."""

    async def nothing(*_: Any) -> None: ...

    async def score(trace: Any) -> None:
        trace.reward = float(trace.nodes[-1].message.content == "8")

    async def run(task: Any, agents: Any) -> None:
        await agents.agent.run(task)

    def message(content: str) -> Record:
        return Record(content=content)

    data = Record(prompt="7 + 1?", system_prompt=None)
    task = Record(data=data, setup=nothing, finalize=nothing, score=score)
    vf: Any = Record(
        TraceTask=Record, AgentInfo=Record, AgentConfig=Record, MessageNode=Record, Segment=Record,
        UserMessage=message, AssistantMessage=message,
        Trace=lambda **more: Record(nodes=[], **more), Episode=lambda **more: Record(traces=[], **more),
    )  # fmt: skip
    from sftplay.environments.verifiers import Verifiers

    environment = Verifiers(
        Record(taskset=Record(skip=lambda n: [task][n:]), run=run, finalize=nothing), "agent", vf=vf
    )
    assert environment.reset({"task": 0}) == "7 + 1?"
    assert environment.step("8") == (None, 1.0, True)
    environment.close()
    assert environment.reset({"task": 0}) == "7 + 1?"
    assert environment.step("9") == (None, 0.0, True)
    environment.close()
