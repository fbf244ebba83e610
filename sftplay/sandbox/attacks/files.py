"""Attacks that reach for the files of the machine and for secrets in them.

Each `f` returns 'escaped' where it got there. The names in capitals are those of `Targets`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack

READS = """
def f():
    with open({path}) as handle:
        return 'escaped' if MARK in handle.read() else 'held'
"""

SCANS = """
def f():
    for name in {names}:
        try:
            content = open(name, 'rb').read()
        except OSError:
            continue
        if MARK.encode() in content:
            return 'escaped'
    return 'held'
"""

ATTACKS = (
    # files
    Attack("reads a private file", is_harmless=True, is_quick=True, code=READS.format(path="SECRET")),
    Attack("reads it through a symbolic link", is_harmless=True,
        code="import os\nos.symlink(SECRET, 'link')" + READS.format(path="'link'")),
    Attack("reads it through its own root in /proc", is_harmless=True,
        code=READS.format(path="'/proc/self/root' + SECRET")),
    Attack("reads it through the root of another process", is_harmless=True,
        code=READS.format(path="f'/proc/{VICTIM}/root{SECRET}'")),
    Attack("reads it by the path of the working folder", is_harmless=True,
        code=READS.format(path="'../' * 12 + SECRET")),
    Attack("writes into a folder of the user", is_harmless=True, is_quick=True, code="""
import os
def f():
    open(FOLDER + '/new', 'w').close()
    os.remove(FOLDER + '/new')
    return 'escaped'
"""),
    Attack("opens a file of the user for writing", is_harmless=True,
        code="def f():\n    open(TREASURE, 'a').close()\n    return 'escaped'"),
    Attack("writes through a symbolic link", is_harmless=True,
        code="import os\ndef f():\n    os.symlink(TREASURE, 'l')\n    open('l', 'a').close()\n    return 'escaped'"),
    Attack("removes the user's files", statuses=("wrong", "runtime"),
        code="import shutil\ndef f():\n    shutil.rmtree(FOLDER, ignore_errors=True)\n    return 'done'"),
    *(
        Attack(f"changes {what} of a file of the user", is_harmless="attribute" not in what, is_quick=True,
               code=f"import os\ndef f():\n    os.{call}\n    return 'escaped'")
        for what, call in (
            ("the mode", "chmod(TREASURE, 0o600)"), ("the owner", "chown(TREASURE, os.getuid(), os.getgid())"),
            ("the time", "utime(TREASURE, (1, 1))"), ("an attribute", "setxattr(TREASURE, 'user.mark', b'x')"),
        )
    ),
    Attack("changes the mode of a folder of the user", code="import os\ndef f():\n    os.chmod(FOLDER, 0o777)\n    "
            "return 'escaped'"),
    Attack("takes a file of the user in by a link",
        code="import os\ndef f():\n    os.link(SECRET, 'x')\n    return open('x').read() and 'escaped'"),
    Attack("moves a file into a folder of the user",
        code="import os\ndef f():\n    open('x', 'w').close()\n    os.rename('x', f'{FOLDER}/x')\n"
            "    return 'escaped'"),
    Attack("looks for any file that it can write", tests=("assert f().startswith('escaped')",),
        limits={"timeout_s": 20, "test_timeout_s": 20}, code="""
import os
def f():
    for root, folders, files in os.walk('/'):
        skipped = ('/proc', '/sys', '/dev', os.getcwd())
        folders[:] = [each for each in folders if root.count('/') < 3 and os.path.join(root, each) not in skipped]
        for name in files:
            path = os.path.join(root, name)
            if not os.path.islink(path) and os.access(path, os.W_OK):
                return 'escaped: ' + path
    return 'held'
"""),
    Attack("lists a folder of the user", is_harmless=True,
        code="import os\ndef f():\n    return 'escaped' if 'secret' in os.listdir(FOLDER) else 'held'"),
    Attack("lists the home folders",
        code="import os\ndef f():\n    return 'escaped' if any(os.listdir(p) for p in ('/root', '/home')) else 'held'"),
    Attack("reads the accounts of the machine", is_harmless=True,
        code="def f():\n    return 'escaped' if 'root' in open('/etc/passwd').read() else 'held'"),
    Attack("opens devices", tests=("assert f().startswith('escaped')",), code="""
def f():
    for name in ('mem', 'kmsg', 'sda', 'vda', 'kvm', 'nvidia0', 'fuse', 'net/tun', 'tty', 'ptmx'):
        try:
            open('/dev/' + name, 'rb').close()
            return 'escaped: ' + name
        except OSError:
            pass
    return 'held'
"""),
    Attack("makes a device", code="import os\ndef f():\n    os.mknod('d', 0o60600, os.makedev(8, 0))\n"
            "    return 'escaped'"),
    Attack("changes the interpreter's library",
        code="import os\ndef f():\n    open(os.__file__, 'a').close()\n    return 'escaped'"),
    Attack("leaves files for the next program", is_harmless=True, code="""
def f():
    made = []
    for folder in ('/tmp', '/var/tmp', '/dev/shm', '/', '/etc'):
        try:
            open(folder + '/' + LEFT, 'w').close()
            made.append(folder)
        except OSError:
            pass
    open(LEFT, 'w').close()
    return 'escaped' if made else 'held'
"""),
    Attack("finds the files of the program before", is_harmless=True, code="""
import os
def f():
    found = [p for p in ('/tmp', '/var/tmp', '/dev/shm', '/', '/etc', '.') if os.path.exists(p + '/' + LEFT)]
    for folder in found:
        os.remove(folder + '/' + LEFT)
    return 'escaped' if found else 'held'
"""),
    # secrets
    Attack("reads the environment of the first process", code=SCANS.format(names="['/proc/1/environ']")),
    Attack("reads the environment of another process", is_harmless=True, is_quick=True,
        code=SCANS.format(names="[f'/proc/{VICTIM}/environ']")),
    Attack("reads the environment of every process", is_harmless=True,
        code="import glob" + SCANS.format(names="glob.glob('/proc/*/environ')")),
    Attack("reads the command line of the parent", is_harmless=True,
        code="def f():\n    return 'escaped' if open(f'/proc/{PARENT}/cmdline').read() else 'held'"),
    Attack("lists the descriptors of the parent", is_harmless=True,
        code="import os\ndef f():\n    return 'escaped' if os.listdir(f'/proc/{PARENT}/fd') else 'held'"),
    Attack("opens the memory of the parent",
        code="def f():\n    open(f'/proc/{PARENT}/mem', 'rb').close()\n    return 'escaped'"),
    Attack("finds secrets in its own environment", is_quick=True, code="""
import os
KNOWN = {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE', 'PYTHONHASHSEED', 'PYTHONUTF8', 'OMP_NUM_THREADS', 'PWD',
         'LD_LIBRARY_PATH', 'SFTPLAY_BOX'}
def f():
    return 'escaped' if set(os.environ) - KNOWN else 'held'
"""),
    Attack("finds an open file of the parent", is_quick=True, code="""
import os, stat
def f():
    for fd in range(3, 300):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return 'escaped'
    return 'held'
"""),
    Attack("imports the packages of the kit", code="def f():\n    import yaml\n    return 'escaped'"),
    Attack("reads the kernel's log", code="""
import ctypes
def f():
    read_all, buffer = 3, ctypes.create_string_buffer(99)
    return 'escaped' if ctypes.CDLL(None).klogctl(read_all, buffer, 99) >= 0 else 'held'
"""),
)  # fmt: skip
