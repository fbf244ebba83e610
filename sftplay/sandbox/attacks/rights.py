"""Attacks that reach for other processes, for rights, and for parts of the kernel.

Each `f` returns 'escaped' where it got there. The names in capitals are those of `Targets`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack

CALLS = """
import ctypes
def f():
    libc = ctypes.CDLL(None, use_errno=True)
    return 'escaped' if libc.{call} >= 0 else 'held'
"""

ATTACKS = (
    # processes
    Attack("signals another process", is_harmless=True, is_quick=True,
        code="import os\ndef f():\n    os.kill(VICTIM, 0)\n    return 'escaped'"),
    Attack("kills another process", statuses=("wrong", "runtime", "killed"),
        code="import os\ndef f():\n    os.kill(VICTIM, 9)\n    return 'done'"),
    Attack("kills all processes", statuses=("wrong", "runtime", "killed"), code="""
import os
def f():
    try:
        os.kill(VICTIM, 0)  # not in a box: enough is seen
        return 'escaped'
    except OSError:
        os.kill(-1, 9)
"""),
    Attack("kills its group and its parent", statuses=("wrong", "runtime", "killed"),
        code="import os\ndef f():\n    if os.getppid() != PARENT:\n        os.kill(os.getppid(), 9)\n"
            "        os.killpg(0, 9)\n    return 'done'"),
    Attack("slows another process down", is_harmless=True,
        code="import os\ndef f():\n    os.setpriority(os.PRIO_PROCESS, VICTIM, 5)\n    return 'escaped'"),
    Attack("moves another process to one core", is_harmless=True,
        code="import os\ndef f():\n    os.sched_setaffinity(VICTIM, os.sched_getaffinity(0))\n    return 'escaped'"),
    Attack("limits another process", is_harmless=True,
        code="import resource\ndef f():\n    resource.prlimit(VICTIM, resource.RLIMIT_CORE, (0, 0))\n"
            "    return 'escaped'"),
    Attack("traces another process", code=CALLS.format(call="ptrace(16, VICTIM, 0, 0)")),
    Attack("reads the memory of another process", code="""
import ctypes
def f():
    libc, buffer = ctypes.CDLL(None), ctypes.create_string_buffer(8)
    vector = (ctypes.c_ulong * 2)(ctypes.addressof(buffer), 8)
    return 'escaped' if libc.process_vm_readv(PARENT, vector, 1, vector, 1, 0) > 0 else 'held'
"""),
    Attack("starts a shell", is_harmless=True,
        code="import subprocess\ndef f():\n    subprocess.run(['/bin/sh', '-c', 'exit 0'], check=True)\n"
            "    return 'escaped'"),
    # rights
    Attack("becomes root", code="import os\ndef f():\n    os.setuid(0)\n    return 'escaped'"),
    Attack("raises its own limits", code="""
import resource
def f():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return 'escaped'
"""),
    Attack("makes a user namespace", is_quick=True, code=CALLS.format(call="unshare(0x10000000)")),
    Attack("makes a user namespace by clone", is_quick=True, code="""
import ctypes, os, platform
def f():
    libc = ctypes.CDLL(None)
    pid = libc.syscall(56 if platform.machine() == 'x86_64' else 220, 0x10000000 | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return 'escaped' if pid > 0 else 'held'
"""),
    Attack("takes the machine's places for asynchronous reads", is_quick=True, code="""
import ctypes, platform
def f():
    libc, is_x86 = ctypes.CDLL(None), platform.machine() == 'x86_64'
    reads = libc.syscall(206 if is_x86 else 0, 60_000, ctypes.byref(ctypes.c_ulong()))
    watches = libc.inotify_init()
    return 'held' if reads and watches < 0 else 'escaped'
"""),
    Attack("locks a file of the machine", code="""
import fcntl, os
def f():
    handle = open(os.__file__)
    for lock, kind in ((fcntl.flock, fcntl.LOCK_SH), (lambda *a: fcntl.fcntl(a[0], fcntl.F_SETLEASE, a[1]), 0)):
        try:
            lock(handle, kind)
            return 'escaped'
        except PermissionError:
            pass
    return 'held'
"""),
    Attack("has a signal sent for a pipe", code="""
import fcntl, os, signal, time
def f():
    reading, writing = os.pipe()
    fcntl.fcntl(reading, fcntl.F_SETOWN, VICTIM)
    fcntl.fcntl(reading, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(reading, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writing, b'x')
    time.sleep(0.05)
    return 'tried'
"""),
    Attack("calls the kernel with bad pointers", statuses=("wrong", "killed"), code="""
import ctypes
def f():
    call = ctypes.CDLL(None).syscall
    for number in (*range(76, 95), 132, 133, 137, *range(257, 270), 280, 316, 332, 437, 439, 452, 457, 458, 467):
        for bad in (0, 1, 0xdead, -1, 1 << 62):
            call(*map(ctypes.c_long, (number, -100, bad, bad, bad)))
            call(*map(ctypes.c_long, (number, bad, bad, bad, bad)))
    return 'tried'
"""),
    Attack("mounts a file system", code=CALLS.format(call="mount(b't', b'/tmp', b'tmpfs', 0, 0)")),
    Attack("takes the read-only mark off", code=CALLS.format(call="mount(0, b'/', 0, 32, 0)")),
    Attack("changes its root", code="import os\ndef f():\n    os.chroot('.')\n    return 'escaped'"),
    Attack("asks for the kernel's io ring", code=CALLS.format(
                call="syscall(425, 1, ctypes.create_string_buffer(120))",
                )),
    Attack("counts the processor's events", code=CALLS.format(
                call="syscall(298, ctypes.create_string_buffer(b'\\0\\0\\0\\0' + b'p', 112), 0, -1, -1, 0)",
                )),
    Attack("makes shared memory", code=CALLS.format(call="shmget(0, 4096, 0o1600)")),
    Attack("makes memory that is a file", is_quick=True, code=CALLS.format(call="memfd_create(b'x', 0)")),
    Attack("joins the namespaces of the first process", code="""
import ctypes, os
def f():
    libc, fd = ctypes.CDLL(None), os.open('/proc/1/ns/mnt', os.O_RDONLY)
    return 'escaped' if libc.setns(fd, 0) == 0 else 'held'
"""),
)  # fmt: skip
