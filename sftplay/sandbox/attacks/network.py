"""Attacks that reach for the network.

Each `f` returns 'escaped' where it got there. The names in capitals are those of `Targets`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack

CONNECTS = """
import socket
def f():
    with socket.socket({kind}) as wire:
        wire.settimeout(0.5)
        wire.{verb}
    return 'escaped'
"""

ATTACKS = (
    Attack("connects by TCP", is_harmless=True, is_quick=True,
        code=CONNECTS.format(kind="", verb="connect(('127.0.0.1', PORT))")),
    Attack("sends by UDP", is_harmless=True, is_quick=True,
        code=CONNECTS.format(kind="socket.AF_INET, socket.SOCK_DGRAM", verb="sendto(b'x', ('127.0.0.1', UDP_PORT))")),
    Attack("connects to a unix socket", is_harmless=True, is_quick=True,
        code=CONNECTS.format(kind="socket.AF_UNIX", verb="connect(UNIX)")),
    Attack("connects to an abstract unix socket", is_harmless=True, is_quick=True,
        code=CONNECTS.format(kind="socket.AF_UNIX", verb="connect('\\0' + ABSTRACT)")),
    Attack("listens on a port", is_harmless=True,
        code=CONNECTS.format(kind="", verb="bind(('0.0.0.0', 0)); wire.listen()")),
    Attack("asks the kernel for the routes", is_harmless=True,
        code=CONNECTS.format(kind="socket.AF_NETLINK, socket.SOCK_RAW, 0", verb="bind((0, 0))")),
    Attack("sends raw packets",
        code=CONNECTS.format(kind="socket.AF_INET, socket.SOCK_RAW, 1", verb="sendto(b'x', ('127.0.0.1', 0))")),
    Attack("asks for the address of a name",
        code="import socket\ndef f():\n    return 'escaped' if socket.gethostbyname('example.com') else 'held'"),
    Attack("fetches a page",
        code="import urllib.request\ndef f():\n    urllib.request.urlopen('http://127.0.0.1:%d' % PORT, timeout=1)\n"
            "    return 'escaped'"),
)  # fmt: skip
