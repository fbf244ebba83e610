"""What the installed torch was built for, read from its files. An import of torch would take seconds."""

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
"""Longest wait for an import of torch. A cold disk is slow."""

_ARCHS = re.compile(rb"sm_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*\x00")

_QUESTION = """
import json, torch
cuda = torch.cuda
report = {"version": torch.__version__, "cuda": torch.version.cuda, "is_available": cuda.is_available()}
report["archs"] = cuda.get_arch_list()
report["devices"] = cuda.device_count()
if report["is_available"]:
    report["nccl"] = ".".join(map(str, cuda.nccl.version()))
    report["cudnn"] = torch.backends.cudnn.version()
    report["peers"] = [[i == j or cuda.can_device_access_peer(i, j) for j in range(cuda.device_count())]
                     for i in range(cuda.device_count())]
print("ANSWER" + json.dumps(report))
"""


@dataclass(frozen=True)
class TorchBuild:
    """One build of torch."""

    version: str
    cuda: str | None
    """The CUDA that it was built with; None for a build without CUDA."""
    hip: str | None = None
    archs: tuple[str, ...] = ()
    """The value of `torch.cuda.get_arch_list()`; empty when it was not searched for, or not found."""

    def runs_on(self, capability: tuple[int, int]) -> bool | None:
        """True when the build has code for this compute capability; None when `archs` is not known.

        Code runs on later minor versions of the same major one too. PTX (`compute_`) runs on every later card, code
        with a letter (`sm_90a`) on that card alone (CUDA C++ programming guide, binary and PTX compatibility).
        """
        if not self.archs:
            return None
        return any(_fits(arch, capability) for arch in self.archs)

    def newest_cuda(self) -> tuple[int, int] | None:
        """`cuda` as numbers."""
        match = re.match(r"(\d+)\.(\d+)", self.cuda or "")
        return (int(match[1]), int(match[2])) if match else None


def find_torch(*, with_archs: bool = False) -> TorchBuild | None:
    """The installed torch, or None. `with_archs` searches 30 MB of code, some hundredths of a second."""
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
    """The value of `torch.cuda.get_arch_list()`: one string, CUDA_ARCH_FLAGS of torch/csrc/cuda/Module.cpp."""
    try:
        with library.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = content.find(b"\x00sm_")
            while start >= 0:
                if match := _ARCHS.match(content, start + 1):
                    return tuple(match[0][:-1].decode().split())
                start = content.find(b"\x00sm_", start + 1)
    except (OSError, ValueError):
        return ()
    return ()


def ask_torch() -> dict[str, Any]:
    """What torch reports about this machine, from a process of its own. Only `error` when it cannot be imported."""
    argv = [sys.executable, "-c", _QUESTION]
    try:
        process = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {ANSWER_S:.0f} s"}
    if process.returncode == 0 and "ANSWER" in process.stdout:
        answer: dict[str, Any] = json.loads(process.stdout.rpartition("ANSWER")[2])
        return answer
    lines = process.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"it ended with code {process.returncode}"}


def _fits(arch: str, capability: tuple[int, int]) -> bool:
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
    if match is None:
        return False
    built = (int(match[2]), int(match[3]))
    if match[4]:
        return built == capability
    return built <= capability and (match[1] == "compute" or built[0] == capability[0])


def _assignments(tree: ast.Module) -> dict[str, Any]:
    values = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Constant):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Name):
            values[target.id] = node.value.value
    return values
