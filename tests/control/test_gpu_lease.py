"""The calls for ten minutes on a bare GPU machine, whose text is no part of the kit: each part they name is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sftplay.cli import parse
from sftplay.commands.look.gpu_check import select
from sftplay.control.gpu_check.checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
LEASE = ROOT.parent / "shared" / "gpu" / "lease.md"

pytestmark = pytest.mark.skipif(not LEASE.exists(), reason="needs ../shared/gpu/lease.md")


def commands(program: str) -> list[list[str]]:
    """The words behind each mention of the program, up to the end of its shell command."""
    found = re.findall(rf"python3 {re.escape(program)}([^;`\n]*)", LEASE.read_text(encoding="utf-8"))
    return [shlex.split(words.replace("$OUT", "out").replace("$w", "ours")) for words in found if "--" in words]


def test_each_call_of_the_table_names_rows_that_are_there():
    calls = commands("-m sftplay")
    assert len(calls) == 2
    for words in calls:
        args = parse(words)
        assert args.verb == "gpu-check"
        assert select(list(CHECKS), args.only)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["benchmarks/gpu_speed.py", "benchmarks/gpu_sizing.py"])
def test_each_benchmark_takes_the_flags_of_the_calls(script: str):
    calls = commands(script)
    assert calls
    shown = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    for words in calls:
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[\w-]+", shown.stdout))
        assert "--case" not in words or words[words.index("--case") + 1] in shown.stdout


def test_the_rows_that_are_left_for_later_are_there():
    words = re.search(r"`--only ([^`]+)`", LEASE.read_text(encoding="utf-8"))
    assert words
    assert select(list(CHECKS), words[1])
