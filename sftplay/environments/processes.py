"""Environments and tools in processes of their own: each completion has a copy that can hang or die alone.

A host process makes the environment and imports the tools once. For each completion it forks a copy of itself, so
heavy loading is shared, every completion begins alike, and nothing leaks from one to another.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import psutil

from sftplay.config.data import ENVIRONMENT
from sftplay.environments import SHIPPED_ENVIRONMENTS, SHIPPED_TOOLS
from sftplay.errors import ConfigError, DataError, MachineError, RunError, SftplayError
from sftplay.reward.reward_set import (
    START_S,
    describe_error,
    end_children,
    forget_secrets,
    kill_group,
    settle_process,
    start_process,
)
from sftplay.reward.table import RewardValues, load_function
from sftplay.signals import adopt_orphans, die_with_parent

if TYPE_CHECKING:
    from sftplay.config.run import RunConfig

MOST_CHARACTERS = 1 << 20
"""Most characters of one answer of an environment or a tool; more would fit no model."""

MOST_BYTES = 16 * MOST_CHARACTERS  # of one message between processes: JSON may write a character in 12 bytes

CLOSE_S = 5.0
"""How long the environments of a rollout batch may take to close."""


class Failed(Exception):
    """An environment or a tool did not do what it should; the message says what it did."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSpec:
    """What a host process makes and imports."""

    environment: str | None = None
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[str] = ()
    tool_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    deadline_s: float = 10.0
    """Seconds for each reset, step and call."""

    @classmethod
    def from_config(cls, cfg: RunConfig) -> EnvironmentSpec | None:
        """Return what the config asks for; None where completions are single turns."""
        grpo = cfg.grpo
        if not (cfg.task.learns_from_rewards and cfg.task.turns == 1 and (grpo.environment or grpo.tools)):
            return None
        return cls(
            environment=grpo.environment, environment_options=grpo.environment_options, tools=grpo.tools,
            tool_options=grpo.tool_options, deadline_s=grpo.step_deadline,
        )  # fmt: skip


class EnvironmentHost:
    """The process that makes the environment and forks a copy for each completion; a context manager."""

    def __init__(self, spec: EnvironmentSpec, *, describes: bool = False) -> None:
        """With `describes` it also writes the schemas of the tools, which takes transformers.

        Raises:
            ConfigError: the environment cannot be made, or a tool cannot be imported or described.
        """
        self.spec = spec
        self.tools = ""
        """The tools in OpenAI's form, as JSON text; empty where there are none, or they were not described."""

        self.owned: frozenset[str] = frozenset()
        """Names of the tools that belong to the environment object."""

        # A completion takes a file of this process; the usual limit is 1024.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        self._lock = threading.Lock()
        self._control, child_end = socket.socketpair()
        self._process, self._at_exit = start_process(self, _host, child_end, spec, describes=describes)
        child_end.close()
        try:
            loaded = _receive(self._control, START_S)
        except (OSError, EOFError, ValueError) as error:
            self.close()
            late = isinstance(error, TimeoutError)
            what = f"did not start within {START_S:g} s" if late else "its process ended while it was being made"
            fix = "make one by hand: something in its import or in make does not come back"
            raise ConfigError(what, where=f"grpo.{'environment' if spec.environment else 'tools'}", fix=fix) from None
        if "error" in loaded:
            self.close()
            kind = loaded["error"].pop("kind")
            raise (MachineError if kind == "MachineError" else ConfigError)(**loaded["error"])
        self.tools, self.owned = loaded["tools"], frozenset(loaded["owned"])

    def fork(self, seed: int) -> EnvironmentProcess:
        """Fork a copy; `seed` is that of its `random`.

        Raises:
            Failed: there is no room for another process or file.
            RunError: the host has died. Nothing would be known of any completion any more.
        """
        with self._lock:
            try:
                self._control.settimeout(START_S)
                self._control.sendall(json.dumps({"fork": seed}).encode() + b"\n")
                data, found, _, _ = socket.recv_fds(self._control, 200, 1)
            except OSError:
                data, found = b"", []
        if not data:
            raise self.death()
        if not found:
            raise Failed(f"could not start: {data.decode(errors='replace')}")
        return EnvironmentProcess(self, int(data), socket.socket(fileno=found[0]))

    def end(self, pid: int, *, is_alone: bool) -> int | None:
        """End a copy with the processes that it started; return its exit status as of `os.waitpid`, where known.
        `is_alone`: it is known to have none, which spares a look at all processes of the machine."""
        with self._lock, suppress(OSError, EOFError, ValueError):
            self._control.sendall(json.dumps({"end": pid, "is_alone": is_alone}).encode() + b"\n")
            return int(_receive(self._control, START_S)["status"])
        return None

    def death(self) -> RunError:
        """Return what is said of a host that has died."""
        fix = "look for what kills it: memory that ran out, or code of an environment or a tool; then `make resume`"
        where = f"grpo.{'environment' if self.spec.environment else 'tools'}"
        return RunError("the process that makes environments has died", where=where, fix=fix)

    def close(self) -> None:
        """End the host; its copies end with it."""
        self._at_exit.cancel()
        with suppress(OSError):  # it has died
            self._control.shutdown(socket.SHUT_RDWR)
        self._process.join(CLOSE_S)  # it ends its copies with what they have started
        kill_group(self._process)
        self._process.join()
        self._process.close()
        self._control.close()

    def __enter__(self) -> EnvironmentHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EnvironmentProcess:
    """A copy of the environment and the tools for one completion."""

    def __init__(self, host: EnvironmentHost, pid: int, pipe: socket.socket) -> None:
        self._host, self._pid, self._pipe, self.is_over = host, pid, pipe, False
        self._is_alone = True  # it has started no process that still lives

    def ask(self, deadline_s: float | None = None, **request: Any) -> Any:
        """Send a request (`reset=row`, `step=text`, `call=name, arguments={}`, `close=True`) and return its answer.

        Raises:
            Failed: it failed, took too long or died; in the last two cases the process is ended.
            RunError: as `fork`.
        """
        if self.is_over:
            raise Failed("has ended before")
        limit_s = deadline_s or self._host.spec.deadline_s
        self._is_alone = False  # nothing is known until it has answered
        try:
            self._pipe.settimeout(limit_s)
            self._pipe.sendall(json.dumps(request).encode() + b"\n")
            answer = _receive(self._pipe, limit_s)
        except TimeoutError:
            self.end()
            raise Failed(f"took longer than {limit_s:g} s") from None
        except (OSError, EOFError, ValueError):
            status = self.end()
            if status is None:  # nobody is left who waits for it
                raise self._host.death() from None
            raise Failed(f"died ({describe_status(status)})") from None
        self._is_alone = answer.get("is_alone") is True
        if "answer" not in answer:
            raise Failed(str(answer.get("failure", "gave no answer")))
        return answer["answer"]

    def end(self) -> int | None:
        """End the process, if it has not been; return its exit status, where known."""
        if self.is_over:
            return None
        self.is_over = True
        self._pipe.close()
        return self._host.end(self._pid, is_alone=self._is_alone)


class SingleTurns:
    """The environment as a reward for answers in one turn: so it is tried on right answers and on junk."""

    use = ENVIRONMENT
    options: Mapping[str, Any] = {}

    def __init__(self, host: EnvironmentHost, *, seed: int) -> None:
        self._host, self._seed = host, seed
        self.goes_on = False
        """Whether it was not done after an answer: then one turn says little of it."""

    def __call__(self, completions: Sequence[Any], /, **columns: Any) -> RewardValues:
        """Return what the environment gives each completion; None, with the reason, where it failed."""
        found = RewardValues([])
        for n, completion in enumerate(completions):
            process = self._host.fork(self._seed)
            try:
                process.ask(reset={name: values[n] for name, values in columns.items()})
                _, reward, is_done = process.ask(step=str(completion))
                self.goes_on |= not is_done
                found.values.append(reward or 0.0)
            except Failed as error:
                found.values.append(None)
                found.reasons[:] = dict.fromkeys([*found.reasons, f"the environment {error}"])
            finally:
                process.end()
        return found


@contextmanager
def open_single_turns(cfg: RunConfig) -> Iterator[dict[str, SingleTurns]]:
    """Yield the rewards of the config that its environment gives, by name, ready to be tried.

    Raises:
        ConfigError, MachineError: the environment or a tool cannot be opened.
    """
    spec = EnvironmentSpec.from_config(cfg)
    if spec is None:
        yield {}
        return
    with EnvironmentHost(spec) as host:
        tried = SingleTurns(host, seed=cfg.seed)
        yield {reward.name: tried for reward in cfg.rewards if reward.use == ENVIRONMENT}


def describe_status(status: int) -> str:
    """Describe an exit status of `os.waitpid`.

    >>> describe_status(9), describe_status(40), describe_status(256)
    ('signal SIGKILL', 'signal 40', 'exit code 1')
    """
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"signal {next((known.name for known in signal.Signals if known == number), number)}"
    return f"exit code {os.WEXITSTATUS(status)}"


def describe_tools(spec: EnvironmentSpec | None) -> str:
    """Return the tools of the config and of its environment in OpenAI's form, as JSON text; empty for none.

    Raises:
        ConfigError: as `EnvironmentHost`.
    """
    if spec is None:
        return ""
    with EnvironmentHost(spec, describes=True) as host:
        return host.tools


def _receive(pipe: socket.socket, limit_s: float | None) -> dict[str, Any]:
    """Read a line of JSON within the time. Raise TimeoutError, EOFError, or ValueError for what is no such line.

    Nothing that comes from foreign code is unpickled.
    """
    until, line = time.monotonic() + (limit_s or 0.0), bytearray()
    while line[-1:] != b"\n":
        left = None if limit_s is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        pipe.settimeout(left)
        part = pipe.recv(1 << 16)
        if not part:
            raise EOFError
        line += part
        if len(line) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES:,} bytes")
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("is no object")
    return found


def _host(control: socket.socket, spec: EnvironmentSpec, *, parent: int, describes: bool) -> None:
    settle_process(parent)
    forget_secrets()
    # Copies share the cores, and a fork keeps no threads.
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with suppress(EOFError, OSError):  # the parent has left
        try:
            environment, tools, owned = _make(spec)
            described = tools if describes else {}
            schemas = [_describe(name, tool, spec.tool_options.get(name, {})) for name, tool in described.items()]
            text = json.dumps(schemas, ensure_ascii=False) if schemas else ""
            loaded: dict[str, Any] = {"tools": text, "owned": sorted(owned)}
        except SftplayError as error:
            said = {"what": error.what, "where": error.where, "fix": error.fix}
            loaded = {"error": {"kind": type(error).__name__, **said}}
        control.sendall(json.dumps(loaded).encode() + b"\n")
        if "error" not in loaded:
            _fork_copies(control, environment, tools, spec)


def _fork_copies(
    control: socket.socket, environment: Any, tools: Mapping[str, Callable[..., Any]], spec: EnvironmentSpec
) -> None:
    """Do what the parent asks for until it has left; the copies end with this process."""
    copies, kept = set[int](), {child.pid for child in psutil.Process().children()}  # which `make` has started
    while True:
        order = _receive(control, None)
        if "end" in order:
            copies.discard(order["end"])
            status = _end(order["end"])
            if not order["is_alone"]:
                end_children(kept | copies)
            control.sendall(json.dumps({"status": status}).encode() + b"\n")
            continue
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            host = os.getpid()
            ours, child_end = socket.socketpair()
            pid = os.fork()
        except OSError as error:  # no process or no file is left
            control.sendall(str(error).encode()[:200])
            continue
        if pid == 0:
            control.close()
            ours.close()
            _serve(child_end, environment, tools, host=host, seed=order["fork"], options=spec.tool_options)
        copies.add(pid)
        child_end.close()
        socket.send_fds(control, [str(pid).encode()], [ours.fileno()])
        ours.close()


def _end(pid: int) -> int:
    """End a copy and its group. Until it is waited for here, its number is nobody else's."""
    for kill in (os.killpg, os.kill):  # the first fails where it has not made its group yet
        with suppress(OSError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _make(spec: EnvironmentSpec) -> tuple[Any, dict[str, Callable[..., Any]], set[str]]:
    """Return the environment, the tools by name, and the names of those that belong to the environment."""
    environment, key = None, "grpo.environment"
    if spec.environment is not None:
        make = load_function(SHIPPED_ENVIRONMENTS.get(spec.environment, spec.environment), where=key)
        try:
            environment = make(**spec.environment_options)
        except SftplayError:
            raise
        except BaseException as error:  # noqa: BLE001 - a border to foreign code, which may raise SystemExit
            what = f"{spec.environment} cannot be made: {describe_error(error)}"
            raise ConfigError(what, where=key, fix="mend it, or grpo.environment_options") from None
        _check_methods(environment, spec.environment, where=key)
    tools = dict[str, Callable[..., Any]]()
    for name in spec.tools:
        where = "grpo.tools"
        tool = load_function(SHIPPED_TOOLS.get(name, name), where=where)
        _add_tool(tools, tool, where=where)
    owned = dict[str, Callable[..., Any]]()
    for tool in getattr(environment, "tools", None) or ():
        _add_tool(owned, tool, where=key)
    if both := sorted(tools.keys() & owned.keys()):
        raise ConfigError(f"both the environment and grpo.tools have {both[0]}", where="grpo.tools", fix="remove one")
    if unknown := sorted(spec.tool_options.keys() - tools.keys()):
        fix = f"there are {', '.join(tools)}" if tools else "name the tool in grpo.tools"
        raise ConfigError(f"options for {unknown[0]}, which is no tool here", where="grpo.tool_options", fix=fix)
    for name, tool in tools.items():
        options, known = spec.tool_options.get(name, {}), inspect.signature(tool).parameters
        if strange := sorted(options.keys() - known.keys()):
            fix = f"it takes {', '.join(known) or 'none'}"
            raise ConfigError(f"{name} has no argument {strange[0]!r}", where=f"grpo.tool_options.{name}", fix=fix)
        if prepare := getattr(tool, "prepare", None):  # what all completions share, and what is refused before any
            _prepare(prepare, name, options)
    return environment, {**tools, **owned}, set(owned)


def _check_methods(environment: Any, name: str, *, where: str) -> None:
    """Raise ConfigError where an environment cannot be played: it lacks a method, or one takes something else."""
    fix = "return an object with reset(row) and step(text)"
    methods = {"reset": "row", "step": "text"}
    if lacks := [method for method in methods if not callable(getattr(environment, method, None))]:
        what = f"{name} returned a {type(environment).__name__} without {' and '.join(lacks)}"
        raise ConfigError(what, where=where, fix=fix)
    for method, given in methods.items():
        try:
            inspect.signature(getattr(environment, method)).bind(given)
        except TypeError as error:
            what = f"{name} returned a {type(environment).__name__}; its {method} does not take ({given}): {error}"
            raise ConfigError(what, where=where, fix=fix) from None
        except ValueError:  # a compiled method tells nothing of its arguments
            continue


def _prepare(prepare: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    where = f"grpo.tool_options.{name}"
    try:
        prepare(**options)
    except (ConfigError, DataError) as error:
        what = f"{error.where}: {error.what}"
        raise ConfigError(what, where=where, fix=error.fix) from None
    except SftplayError:
        raise
    except BaseException as error:  # noqa: BLE001 - a border to foreign code, which may raise SystemExit
        what = f"{name} cannot be prepared: {describe_error(error)}"
        raise ConfigError(what, where=where, fix=f"mend {name}.prepare, or its options") from None


def _add_tool(tools: dict[str, Callable[..., Any]], tool: Any, *, where: str) -> None:
    name = getattr(tool, "__name__", "")
    if not callable(tool) or not name.isidentifier():
        raise ConfigError(f"{tool!r:.80} is no function", where=where, fix="name typed functions")
    if any(check(tool) for check in (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isclass)):
        what = f"{name} is no plain function: a call of it returns no text"
        raise ConfigError(what, where=where, fix="write `def`, and return a text")
    parameters = inspect.signature(tool).parameters.values()
    if unnamed := [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.VAR_POSITIONAL)]:
        what = f"{name} takes {unnamed[0]} without its name, and models give arguments by name"
        raise ConfigError(what, where=where, fix="write it without `/` and `*`")
    if name in tools:
        raise ConfigError(f"two tools are called {name}", where=where, fix="rename one: the model knows them by name")
    tools[name] = tool


def shown_parameters(tool: Callable[..., Any], options: Mapping[str, Any]) -> list[inspect.Parameter]:
    """Return the arguments that the model sees: neither those of the config, nor those behind a `*`."""
    parameters = inspect.signature(tool).parameters.values()
    return [
        parameter
        for parameter in parameters
        if parameter.kind is not parameter.KEYWORD_ONLY and parameter.name not in options
    ]


def _describe(name: str, tool: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's form, with the arguments that the model sees."""
    from transformers.utils.chat_template_utils import get_json_schema

    shown = shown_parameters(tool, options)
    try:
        seen: Any = partial(tool)  # with another signature, which both the helper and typing read
        hints = get_type_hints(tool)
        seen.__name__, seen.__doc__, seen.__signature__ = name, inspect.getdoc(tool), inspect.Signature(shown)
        seen.__annotations__ = {parameter.name: hints[parameter.name] for parameter in shown if parameter.name in hints}
        schema: dict[str, Any] = get_json_schema(seen)
    except Exception as error:  # a border to foreign code, and to its types
        what = f"the tool {name} has no schema: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        fix = "give each argument a type, and a line under `Args:` in the docstring, as in docs/environments.md"
        raise ConfigError(what, where="grpo.tools", fix=fix) from error
    schema["function"].pop("return", None)
    return schema


def _serve(
    pipe: socket.socket, environment: Any, tools: Mapping[str, Callable[..., Any]], *, host: int, seed: int,
    options: Mapping[str, Mapping[str, Any]],
) -> NoReturn:  # fmt: skip
    """Answer the requests of one completion, and end with this process."""
    try:
        pid = os.getpid()
        os.setpgid(0, 0)
        die_with_parent(host)
        adopt_orphans()  # they stay below this copy as long as it lives
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        nowhere = os.open(os.devnull, os.O_RDWR)  # what is printed is lost: 200 MB would fill the log
        for number in range(3):
            os.dup2(nowhere, number)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(random.Random(seed).getrandbits(32))
        while True:
            request = _receive(pipe, None)
            answer = {**_answer(request, environment, tools, options), "is_alone": _is_alone()}
            if os.getpid() != pid:
                os._exit(0)  # the foreign code forked: two processes would answer
            pipe.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _is_alone() -> bool:
    """Return whether this process has no child, dead ones that nobody has waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _answer(
    request: Mapping[str, Any], environment: Any, tools: Mapping[str, Callable[..., Any]],
    options: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    try:
        if "reset" in request:
            text = environment.reset(request["reset"])
            return {"answer": None if text is None else expect_text(text)}
        if "step" in request:
            return {"answer": read_step(environment.step(request["step"]))}
        if "close" in request:
            getattr(environment, "close", lambda: None)()
            return {"answer": None}
        name, arguments = request["call"], request["arguments"]
        if name not in tools:
            raise Failed(f"is no tool; there are {', '.join(tools) or 'none'}")
        given = options.get(name, {})
        known = [parameter.name for parameter in shown_parameters(tools[name], given)]
        if strange := sorted(arguments.keys() - set(known)):
            raise Failed(f"has no argument {strange[0]!r}; it takes {', '.join(known) or 'none'}")
        found = tools[name](**arguments, **given)
        if found is None or not isinstance(found, str | bool | int | float | list | tuple | dict):
            raise Failed(f"returned {'None' if found is None else f'a {type(found).__name__}'}, which is no text")
        return {"answer": expect_text(found if isinstance(found, str) else json.dumps(found, ensure_ascii=False))}
    except Failed as error:
        return {"failure": str(error)}
    except BaseException as error:  # noqa: BLE001 - a border to foreign code, which may raise SystemExit
        return {"failure": describe_error(error)}


def read_step(answer: Any) -> tuple[str | None, float | None, bool]:
    """Read what `step` returned. Raise Failed where it is not a text or None, a finite number or None, and a bool.

    >>> read_step(("Higher.", None, False))
    ('Higher.', None, False)
    """
    if not isinstance(answer, tuple | list) or len(answer) != 3:
        said = f"{len(answer)} values" if isinstance(answer, tuple | list) else f"a {type(answer).__name__}"
        raise Failed(f"step returned {said}, not text, reward and done")
    text, reward, is_done = (value.item() if hasattr(value, "item") else value for value in answer)
    if not isinstance(is_done, bool):
        raise Failed(f"step returned {is_done!r:.40} for done, not True or False")
    number = reward if reward is None or isinstance(reward, int | float) else None
    if number is not reward or (number is not None and not isfinite(number)):
        raise Failed(f"step returned {reward!r:.40} for a reward, not a finite number")
    spoken = None if is_done and not isinstance(text, str) else expect_text(text)
    return spoken, None if number is None else float(number), is_done


def expect_text(value: Any) -> str:
    """Return a text that a model can be given; raise Failed for everything else."""
    if not isinstance(value, str):
        raise Failed(f"returned a {type(value).__name__}, not a text")
    if len(value) > MOST_CHARACTERS:
        raise Failed(f"returned {len(value):,} characters, more than {MOST_CHARACTERS:,}")
    try:
        value.encode()
    except UnicodeError:
        raise Failed("returned something that is not valid Unicode") from None
    return value
