"""What the installed torch was built for, read from its files: importing it would take seconds."""

from __future__ import annotations

import ast
import json
import mmap
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
"""Longest wait for an import of torch: cold disks are slow."""

_ARCHS = re.compile(rb"sm_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*\x00")

_QUESTION = """
import json, torch
cuda = torch.cuda
told = {"version": torch.__version__, "cuda": torch.version.cuda, "is_available": cuda.is_available()}
told["archs"] = cuda.get_arch_list()
told["devices"] = cuda.device_count()
if told["is_available"]:
    told["nccl"] = ".".join(map(str, cuda.nccl.version()))
    told["cudnn"] = torch.backends.cudnn.version()
    told["peers"] = [[i == j or cuda.can_device_access_peer(i, j) for j in range(cuda.device_count())]
                     for i in range(cuda.device_count())]
print("ANSWER" + json.dumps(told))
"""


@dataclass(frozen=True)
class TorchBuild:
    """One build of torch."""

    version: str
    cuda: str | None
    """CUDA it was built with, None for a build without."""
    hip: str | None = None
    archs: tuple[str, ...] = ()
    """What `torch.cuda.get_arch_list()` says; empty when it was not looked for, or not found."""

    def runs_on(self, capability: tuple[int, int]) -> bool | None:
        """True when code for this compute capability is in it; None when its list is not known.

        Code of one major version runs on every later minor one, PTX (`compute_`) on every later card, code with a
        letter (`sm_90a`) on that card alone (CUDA C++ programming guide, binary and PTX compatibility).
        """
        if not self.archs:
            return None
        return any(_fits(arch, capability) for arch in self.archs)

    def newest_cuda(self) -> tuple[int, int] | None:
        """`cuda` as numbers."""
        found = re.match(r"(\d+)\.(\d+)", self.cuda or "")
        return (int(found[1]), int(found[2])) if found else None


def find_torch(*, with_archs: bool = False) -> TorchBuild | None:
    """The installed torch, None when there is none. `with_archs` searches 30 MB of it, some hundredths of a second."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        facts = _assignments(ast.parse((folder / "version.py").read_text(encoding="utf-8")))
    except (OSError, SyntaxError):
        facts = {}
    cuda, hip = facts.get("cuda"), facts.get("hip")
    archs = find_archs(folder / "lib" / "libtorch_python.so") if with_archs and cuda else ()
    return TorchBuild(str(facts.get("__version__", "unknown")), cuda, hip, archs)


def find_archs(library: Path) -> tuple[str, ...]:
    """The list behind `torch.cuda.get_arch_list()`: one string, CUDA_ARCH_FLAGS of torch/csrc/cuda/Module.cpp."""
    try:
        with library.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(b"\x00sm_")
            while at >= 0:
                if found := _ARCHS.match(content, at + 1):
                    return tuple(found[0][:-1].decode().split())
                at = content.find(b"\x00sm_", at + 1)
    except (OSError, ValueError):
        return ()
    return ()


def ask_torch() -> dict[str, Any]:
    """What torch itself says of this machine, from a process of its own; `error` alone when it cannot be imported."""
    argv = [sys.executable, "-c", _QUESTION]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ANSWER_S:.0f} s"}
    if done.returncode == 0 and "ANSWER" in done.stdout:
        answer: dict[str, Any] = json.loads(done.stdout.rsplit("ANSWER", 1)[1])
        return answer
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"it ended with code {done.returncode}"}


def _fits(arch: str, capability: tuple[int, int]) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
    if found is None:
        return False
    built = (int(found[2]), int(found[3]))
    if found[4]:
        return built == capability
    return built <= capability and (found[1] == "compute" or built[0] == capability[0])


def _assignments(tree: ast.Module) -> dict[str, Any]:
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name):
            found[target.id] = node.value.value
    return found
