"""The program inside the box: it gives up rights, takes orders over one socket, runs the candidate's code and answers.

An order is a length and a marshalled tuple; it comes from the trusted side. An answer is a length and a JSON text with
the order's nonce: the trusted side reads it as data and believes nothing of it but that it is the candidate's answer.
Nothing here guards against the candidate's code, which shares the process. The box and the other side do.
"""

from __future__ import annotations

import builtins
import marshal
import os
import sys
from _json import encode_basestring_ascii as quoted
from resource import RLIM_INFINITY, getrlimit, setrlimit
from typing import Any

from sftplay.sandbox.inside.plain import NotPlain, decode, encode

PR_SET_KEEPCAPS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 8, 22, 2
LINUX_CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 2
"""Source: linux/prctl.h, linux/seccomp.h, linux/capability.h."""


def give_up_rights(hello: dict[str, Any]) -> None:
    """Become the user that the box is for, and take the limits on."""
    user, keeps_reading = hello["user"], hello["keeps_reading"]
    if user and keeps_reading:
        # It stays able to read what a file's mode keeps from others (capabilities(7)): an interpreter below a home
        # folder could not import anything otherwise. What may be read at all is said by landlock.
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    if user:
        become(user)
    if user and keeps_reading:
        set_capabilities(1 << CAP_DAC_READ_SEARCH)
    take_limits(hello)
    if hello["filter"]:
        install_filter(hello["filter"])


def take_limits(hello: dict[str, Any]) -> None:
    """Take the limits on that no process gets rid of, and go where the program may write."""
    for number, value in hello["limits"]:
        hard = getrlimit(number)[1]
        most = value if hard == RLIM_INFINITY else min(value, hard)
        setrlimit(number, (most, most))
    sys.setrecursionlimit(hello["recursion"])
    os.umask(0o077)
    os.chdir(hello["folder"])


def become(user: int) -> None:
    """Become a user without rights."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def set_capabilities(kept: int) -> None:
    """Give up all capabilities but those in the bit mask."""
    import ctypes

    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept)  # effective, permitted, inheritable; then the same of the higher ones
    if ctypes.CDLL(None).capset(header, sets):
        raise PermissionError("capset failed")


def install_filter(code: bytes) -> None:
    """Let the kernel refuse the system calls that the filter names, in this process and all that come of it."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))

    program = Program(len(code) // 8, code)
    if ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise PermissionError("the filter of system calls was refused")


class NeedsObjects(BaseException):
    """A test hands the candidate something that is not plain data. No test catches it."""


class Channel:
    """Orders in, answers out. The descriptor is the only thing in the process that leads out of the box."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing

    def receive(self) -> tuple[Any, ...]:
        """Read the next order. The process ends with the other side."""
        size = int.from_bytes(self._exactly(4), "little")
        return marshal.loads(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self.incoming, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, **fields: str) -> None:
        """Answer with fields that are JSON texts already."""
        text = ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()
        rest = memoryview(len(text).to_bytes(4, "little") + text)
        while rest:
            rest = rest[os.write(self.outgoing, rest) :]


def main(fd: int, hello: dict[str, Any]) -> None:
    """Give up rights, say that the box stands, and serve until the other side hangs up."""
    incoming = outgoing = fd
    if fd == 0:  # orders come by the standard input, answers go by the standard output
        incoming, outgoing = os.dup(0), os.dup(1)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(2, 1)
    give_up_rights(hello)
    channel = Channel(incoming, outgoing)
    channel.send(status='"ready"')
    serve(channel)


class Session:
    """What orders work on: the way out, and the names of the module `candidate`."""

    def __init__(self, channel: Channel, names: dict[str, Any]) -> None:
        self.channel, self.names = channel, names
        self.kept: dict[int, Any] = {}
        """Objects that the candidate gave and a test may hand back."""

    def keep(self, value: Any) -> int:
        """Number an object, which then stays as long as the process."""
        self.kept[id(value)] = value
        return id(value)


def serve(channel: Channel) -> None:
    """Answer orders for ever. Each names the candidate's module, `candidate`, and the nonce to answer with."""
    module = type(sys)("candidate")
    sys.modules["candidate"] = module
    session = Session(channel, vars(module))
    while True:
        order, nonce, parts = channel.receive()
        run: Any = ORDERS[order]
        fields = run(session, **parts)
        for stream in (sys.stdout, sys.stderr):  # what was printed arrives before the answer does
            try:
                stream.flush()
            except BaseException:  # noqa: BLE001  (it may be an object of the candidate's)
                continue
        channel.send(nonce=quoted(nonce), **fields)


def prepare(session: Session, *, setup: str) -> dict[str, str]:
    """Run the setup, before any code of the candidate: what fails here is not the candidate's fault."""
    try:
        exec(compile(setup, "setup.py", "exec"), session.names)
    except NameError as error:
        return described(error, "later")  # it needs names of the code
    except BaseException as error:  # noqa: BLE001  (foreign code)
        return described(error, "infra")
    return {"status": '"ok"'}


def load(session: Session, *, code: str, late_setup: str) -> dict[str, str]:
    """Run the candidate's code, and a setup that needs its names behind it."""
    try:
        program = compile(code, "candidate.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        return described(error, "syntax")  # MemoryError: brackets that are nested too deep for the parser
    try:
        exec(program, session.names)
        exec(compile(late_setup, "setup.py", "exec"), session.names)
    except BaseException as error:  # noqa: BLE001  (foreign code)
        return described(error)
    return {"status": '"ok"'}


def call(session: Session, *, name: str, args: list[Any], named: dict[str, Any], is_encoded: bool) -> dict[str, str]:
    """Call a function of the candidate with plain data; its value, or what it raised, and the arguments afterwards."""
    if is_encoded:
        args = [decode(arg, session.kept) for arg in args]
        named = {key: decode(value, session.kept) for key, value in named.items()}
    before = [encode(arg, session.keep) for arg in args] if is_encoded else []
    try:
        if name not in session.names:
            raise NameError(f"name {name!r} is not defined")
        value = encode(session.names[name](*args, **named), session.keep)
        after = [encode(arg, session.keep) for arg in args] if is_encoded else []
    except BaseException as error:  # noqa: BLE001  (foreign code)
        return described(error)
    changed = ",".join(text if text != old else "0" for text, old in zip(after, before, strict=True))
    flags = ",".join("true" if text != old else "false" for text, old in zip(after, before, strict=True))
    return {"status": '"ok"', "value": value, "args": f"[{changed}]", "changed": f"[{flags}]"}


def test(session: Session, *, source: str) -> dict[str, str]:
    """Run a test where its names are."""
    try:
        exec(compile(source, "test.py", "exec"), session.names)
    except AssertionError as error:
        return described(error, "wrong")
    except BaseException as error:  # noqa: BLE001  (foreign code)
        return described(error)
    return {"status": '"ok"'}


def bind(session: Session, *, functions: list[str], setup: str) -> dict[str, str]:
    """Make stand-ins for functions of a candidate in another box, then run the setup."""
    for name in functions:
        session.names[name] = stand_in(session.channel, name)
    try:
        exec(compile(setup, "setup.py", "exec"), session.names)
    except BaseException as error:  # noqa: BLE001  (foreign code)
        return described(error, "infra")
    return {"status": '"ok"'}


def stand_in(channel: Channel, name: str) -> Any:
    """Make a function that has the candidate's function of that name called in its box."""

    def ask(*args: Any, **named: Any) -> Any:
        channel.send(
            name=quoted(name), args=f"[{','.join(map(outgoing, args))}]",
            named="{" + ",".join(f"{quoted(key)}:{outgoing(value)}" for key, value in named.items()) + "}",
        )  # fmt: skip
        answer = channel.receive()[0]
        if answer["status"] != "ok":
            raise raised(answer)
        for arg, new, is_changed in zip(args, answer["args"], answer["changed"], strict=True):
            if not is_changed:
                continue
            content = decode(new)  # do to the argument here what the candidate did to its copy
            if isinstance(arg, (list, bytearray)):
                arg[:] = content
            elif isinstance(arg, (dict, set)):
                arg.clear()
                arg.update(content)
        return decode(answer["value"])

    ask.__name__ = name
    return ask


def outgoing(value: Any) -> str:
    """Return an argument's text. What the candidate gave goes back to it; an object of the test cannot go."""

    def refuse(value: Any) -> int:
        raise NeedsObjects("a test hands over an object")

    return encode(value, refuse)


def raised(answer: dict[str, Any]) -> BaseException:
    """Make the built-in exception nearest to what the candidate raised; none that ends a loop in silence."""
    ends_loops = (StopIteration, StopAsyncIteration)  # `all(map(f, cases))` is true where `f` raises one of them
    for name in answer.get("kinds", []):
        kind = getattr(builtins, str(name), None)
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loops):
            break
    else:
        kind = RuntimeError
    error: BaseException = kind.__new__(kind)  # a UnicodeDecodeError wants five arguments of its own
    error.args = (str(answer.get("text")),)
    return error


def described(error: BaseException, status: str = "") -> dict[str, str]:
    """Return a failure as fields: the status, the last line of the candidate that led to it, its classes."""
    if isinstance(error, NeedsObjects):
        status = "objects"
    kind = "memory" if isinstance(error, MemoryError) else "output" if isinstance(error, NotPlain) else "runtime"
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in ("candidate.py", "setup.py", "test.py"):
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = f"{type(error).__name__}: {error}"[:2_000] + (f" (line {line})" if line else "")
    except BaseException:  # noqa: BLE001  (its __str__ is foreign code)
        text = type(error).__name__
    kinds = ",".join(quoted(base.__name__) for base in type(error).__mro__)
    return {"status": quoted(status or kind), "text": quoted(text), "kinds": f"[{kinds}]"}


ORDERS = {"prepare": prepare, "load": load, "call": call, "test": test, "bind": bind}
