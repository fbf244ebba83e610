"""Environments and tools in processes of their own: what one of them does harms no other, and is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from processes import HANG_S, is_alive, wait_until

from sftplay.environments.processes import EnvironmentHost, EnvironmentSpec, Failed, describe_tools
from sftplay.errors import ConfigError, RunError

FILE = Path(__file__).parent / "misbehaving.py"
DEADLINE_S = 3.0


def make_spec(**changes: object) -> EnvironmentSpec:
    given = {"environment": f"{FILE}:make", "tools": [f"{FILE}:order", f"{FILE}:scale"], "deadline_s": DEADLINE_S}
    return EnvironmentSpec(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def host() -> Iterator[EnvironmentHost]:
    with EnvironmentHost(make_spec()) as opened:
        yield opened


def fails(host: EnvironmentHost, **request: object) -> str:
    """What a request to a new copy fails with. Only one that hangs has the deadline of the host."""
    process, hangs = host.fork(1), "hang" in str(request)
    process.ask(reset={})
    try:
        with pytest.raises(Failed) as failed:
            process.ask(DEADLINE_S if hangs else HANG_S, **request)
    finally:
        process.end()
    return str(failed.value)


STEPS = {
    "hang": "took longer than 3 s",
    "die": r"died (exit code 7)",
    "crash": "died (signal SIGSEGV)",
    "kill": "died (signal 40)",
    "raise": "raised LookupError: no such thing (misbehaving.py:",
    "exit": "raised SystemExit: 3",
    "bytes": "returned a bytes, not a text",
    "none": "returned a NoneType, not a text",
    "two": "step returned 2 values, not text, reward and done",
    "nan": "step returned nan for a reward, not a finite number",
    "word": "step returned 'much' for a reward",
    "maybe": "step returned 'no' for done, not True or False",
    "half": "returned something that is not valid Unicode",
    "big": "returned 200,000,000 characters, more than 1,048,576",
}


@pytest.mark.parametrize("order", STEPS)
def test_a_step_that_fails_is_named(host: EnvironmentHost, order: str):
    assert STEPS[order] in fails(host, step=order)


CALLS = {
    "hang": "took longer than 3 s",
    "die": "died (exit code 7)",
    "raise": "raised LookupError",
    "big": "returned 200,000,000 characters",
    "bytes": "returned a bytes, which is no text",
    "object": "returned a object, which is no text",
    "void": "returned None, which is no text",
}


@pytest.mark.parametrize("order", CALLS)
def test_a_call_that_fails_is_named(host: EnvironmentHost, order: str):
    assert CALLS[order] in fails(host, call="order", arguments={"text": order})


def test_wrong_calls_are_named_with_what_is_right(host: EnvironmentHost):
    assert fails(host, call="ordr", arguments={}) == "is no tool; there are order, scale, peek"
    assert fails(host, call="order", arguments={"txt": "a"}) == "has no argument 'txt'; it takes text"
    assert "missing 1 required positional argument" in fails(host, call="order", arguments={})
    # What stands behind a `*` is the config's: a model that knows the name cannot set it.
    assert (
        fails(host, call="scale", arguments={"number": 2, "factor": 5}) == "has no argument 'factor'; it takes number"
    )


def test_200_mb_of_print_are_lost_and_the_game_goes_on(host: EnvironmentHost, capfd: pytest.CaptureFixture[str]):
    process = host.fork(1)
    process.ask(reset={})
    assert process.ask(HANG_S, step="print") == ["turn 1", 0.5, False]
    assert process.ask(HANG_S, call="order", arguments={"text": "print"}) == "PRINT"
    process.end()
    assert len("".join(capfd.readouterr())) < 10_000


def test_a_copy_that_hangs_dies_with_its_children_and_others_go_on(host: EnvironmentHost):
    one, other = host.fork(1), host.fork(2)
    for process in (one, other):
        process.ask(reset={})
    with pytest.raises(Failed, match="took longer than"):
        one.ask(0.5, step="child")
    assert one.is_over
    with pytest.raises(Failed, match="has ended before"):
        one.ask(step="again")
    assert other.ask(step="x") == ["turn 1", 0.5, False]
    other.end()
    wait_until(lambda: one._pid not in [_group(path.name) for path in Path("/proc").glob("[0-9]*")])


def _group(pid: str) -> int:
    try:
        return os.getpgid(int(pid))
    except ProcessLookupError:
        return -1


@pytest.mark.parametrize("last", ["", "die", "hang"])
def test_a_child_in_a_session_of_its_own_ends_with_its_copy_and_with_no_other(host: EnvironmentHost, last: str):
    one, other = host.fork(1), host.fork(2)
    for process in (one, other):
        process.ask(reset={})
    children = [int(process.ask(step="daemon")[0]) for process in (one, other)]
    if last:
        with pytest.raises(Failed):
            one.ask(1.0 if last == "hang" else None, step=last)
    one.end()
    wait_until(lambda: not is_alive(children[0]))
    assert is_alive(children[1])
    other.end()
    wait_until(lambda: not is_alive(children[1]))


def test_secrets_of_the_trainer_do_not_reach_an_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setenv("MAX_TOKENS", "7")
    monkeypatch.setenv("DATABASE", "postgres://me:secret@host/games")
    monkeypatch.setenv("SFTPLAY_PASS_OPENAI_API_KEY", "given")
    with EnvironmentHost(make_spec()) as host:
        process = host.fork(1)
        process.ask(reset={})
        names = ("HF_TOKEN", "DATABASE", "HF_HOME", "MAX_TOKENS", "OPENAI_API_KEY")
        seen = [process.ask(step=f"variable {name}")[0] for name in names]
        process.end()
    assert seen == ["unset", "unset", "/models", "7", "given"]


def test_copies_share_nothing_and_begin_alike_by_their_seed(host: EnvironmentHost):
    answers = []
    for seed in (5, 5, 6):
        process = host.fork(seed)
        process.ask(reset={})
        answers.append((process.ask(call="order", arguments={"text": "remember"}), process.ask(step="number")[0]))
        assert process.ask(call="peek", arguments={}) == "1 turns"
        process.end()
    assert answers[0] == answers[1]
    assert [count for count, _ in answers] == ["1", "1", "1"]
    assert answers[2][1] != answers[0][1]


def test_numbers_of_numpy_depend_on_the_seed_of_the_run_and_on_the_row(host: EnvironmentHost):
    numbers = []
    for seed in (1 << 32, 2 << 32, (1 << 32) + 1, 1 << 32):  # as a run seeds its rows
        process = host.fork(seed)
        process.ask(reset={})
        numbers.append(process.ask(step="numpy")[0])
        process.end()
    assert numbers[0] == numbers[3]
    assert len(set(numbers)) == 3


def test_tools_of_one_file_share_its_variables():
    with EnvironmentHost(make_spec(tools=[f"{FILE}:order", f"{FILE}:count"])) as host:
        process = host.fork(1)
        for _ in range(2):
            process.ask(call="order", arguments={"text": "remember"})
        assert process.ask(call="count", arguments={}) == "2"
        process.end()


def test_values_that_json_has_are_texts(host: EnvironmentHost):
    process = host.fork(1)
    assert process.ask(call="order", arguments={"text": "value"}) == '{"found": [1, 2.5, true]}'
    assert process.ask(call="scale", arguments={"number": 4}) == "8"
    process.end()


def test_a_hundred_copies_take_no_second_each(host: EnvironmentHost):
    began = time.monotonic()
    copies = [host.fork(n) for n in range(100)]
    assert [copy.ask(reset={"first": "go"}) for copy in copies] == ["go"] * 100
    for copy in copies:
        copy.end()
    assert time.monotonic() - began < 100


TRAINER = """
from sftplay.environments.processes import EnvironmentHost, EnvironmentSpec

if __name__ == "__main__":
    spec = EnvironmentSpec(
        environment="{file}:make_with_server", environment_options={{"pid_file": "{server}"}}, deadline_s=600
    )
    with EnvironmentHost(spec) as host:
        copy = host.fork(1)
        copy.ask(reset={{}})
        print(copy._pid, flush=True)
        copy.ask(step="child")
"""


def test_what_an_environment_has_started_ends_with_a_trainer_that_is_killed(tmp_path: Path):
    script, server = tmp_path / "trainer.py", tmp_path / "server"
    script.write_text(TRAINER.format(file=FILE, server=server))
    root = str(Path(__file__).parents[2])
    trainer = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root}
    )  # fmt: skip
    with trainer:
        assert trainer.stdout is not None
        group = int(trainer.stdout.readline())
        try:
            wait_until(lambda: count_members(group) == 2)
            assert is_alive(int(server.read_text()))
            trainer.kill()
            wait_until(lambda: count_members(group) == 0 and not is_alive(int(server.read_text())), 60.0)
        finally:
            trainer.kill()
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def count_members(group: int) -> int:
    return sum(_group(path.name) == group for path in Path("/proc").glob("[0-9]*"))


@pytest.mark.parametrize("in_vain", ["fork", "call"])
def test_the_death_of_the_process_that_makes_copies_ends_the_run_and_is_no_answer(in_vain: str):
    with EnvironmentHost(make_spec()) as host:
        process = host.fork(1)
        below = [child.pid for child in psutil.Process(host._process.pid).children(recursive=True)]
        os.kill(host._process.pid, signal.SIGKILL)
        host._process.join()
        wait_until(lambda: not any(map(is_alive, below)))  # the copy dies with it, but not in the same instant
        with pytest.raises(RunError, match="the process that makes environments has died") as ended:
            host.fork(2) if in_vain == "fork" else process.ask(call="scale", arguments={"number": 1})
        assert ended.value.fix
        process.end()


WRONG = {
    "make_broken": ({"environment": f"{FILE}:make_broken"}, "cannot be made: raised RuntimeError: no board"),
    "make_nothing": ({"environment": f"{FILE}:make_nothing"}, "returned a str without reset and step"),
    "no file": ({"environment": "nowhere.py:make"}, "no file 'nowhere.py'"),
    "no name": ({"environment": f"{FILE}:mak"}, "has no function 'mak'"),
    "twice": ({"tools": [f"{FILE}:order", f"{FILE}:order"]}, "two tools are called order"),
    "options": ({"tool_options": {"ordr": {}}}, "options for ordr, which is no tool here"),
    "argument": ({"tool_options": {"scale": {"facto": 3}}}, "scale has no argument 'facto'"),
    "no row": ({"environment": f"{FILE}:make_deaf"}, "its reset does not take (row)"),
    "later": ({"tools": [f"{FILE}:later"]}, "later is no plain function"),
    "nameless": ({"tools": [f"{FILE}:nameless"]}, "nameless takes number without its name"),
    "unready": ({"tools": [f"{FILE}:unready"]}, "unready cannot be prepared: raised LookupError: no index"),
    "prepared": ({"tools": ["python"], "tool_options": {"python": {"memory": "much"}}}, "not a size: 'much'"),
    "make's option": ({"environment_options": {"limt": 3}}, "unexpected keyword argument 'limt'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_made_is_refused_before_anything(case: str):
    changes, what = WRONG[case]
    with pytest.raises(ConfigError) as refused:
        EnvironmentHost(make_spec(**changes))
    assert what in refused.value.what
    assert refused.value.fix
    assert str(refused.value.where).startswith("grpo.")


@pytest.mark.slow
def test_tools_are_described_by_transformers_without_what_the_config_gives():
    spec = make_spec(tools=[f"{FILE}:order", f"{FILE}:scale"])
    tools = {tool["function"]["name"]: tool["function"] for tool in json.loads(describe_tools(spec))}
    assert list(tools) == ["order", "scale", "peek"]
    assert tools["scale"]["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "What is scaled."}},
        "required": ["number"],
    }
    with pytest.raises(ConfigError, match="the tool untyped has no schema"):
        describe_tools(make_spec(tools=[f"{FILE}:untyped"]))
