"""What README and docs/ name is there: targets of make, files of the repository, keys of the config."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftplay import cli
from sftplay.config.keys import all_keys
from sftplay.make_arguments import refuse_unused

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDED = ("evidence.md", "benchmarks.md")
"""Outputs of their day: a file or a key in them may have another name by now."""

FOREIGN = ("guides.md", "networks.md", "papers.md")
"""They name keys and files of others."""

OTHERS = ("train.bf16", "train.fp16", "datasets.map")
"""Accepted spellings of another key, and a function of a library."""

MADE = ("data/processed/", "outputs/")
"""Folders that a run makes."""

CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
FILE = re.compile(r"[\w./-]+\.(?:py|ya?ml|sh|md|sbatch|lock|toml|jsonl?|css|html)")


def targets() -> set[str]:
    lines = (ROOT / "Makefile").read_text().splitlines()
    return {found[1] for line in lines if (found := re.match(r"([a-z][\w-]*):", line))}


def code_of(page: Path) -> Iterator[str]:
    """What stands in backticks and in blocks of code."""
    text = page.read_text(encoding="utf-8")
    for n, part in enumerate(text.split("```")):
        if n % 2:
            yield from part.splitlines()
        else:
            yield from CODE.findall(part)
            yield from (line.strip() for line in part.splitlines() if line.startswith("    "))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_target_that_is_named_is_there(page: Path):
    named = {found[1] for code in code_of(page) if (found := re.match(r"(?:\$ )?make ([a-z][\w-]*)", code))}
    assert named - targets() == set()


@pytest.mark.contract
@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_every_command_of_the_first_pages_is_understood_by_make_and_by_its_verb(page: Path, tmp_path: Path):
    """A program in Python's place keeps what make hands over; the command line then parses it, and loads no config."""
    recorder, kept = tmp_path / "python", tmp_path / "kept"
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\0" "$@" > "{kept}"\n')
    recorder.chmod(0o755)
    lines = [line.strip().removeprefix("$ ") for line in page.read_text(encoding="utf-8").splitlines()]
    lines = [
        line for line in lines if line.startswith("make ") and (" #" in line or "CONFIG=" in line or "RUN_A=" in line)
    ]
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        names, goals = [word.partition("=")[0] for word in words[1:]], words[:1]
        refuse_unused(names, goals, ROOT / "Makefile")
        done = subprocess.run(
            ["make", "-s", "READY=", "VLLM_READY=", f"PY={recorder}", *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        *called, in_args = kept.read_bytes().decode().split("\0")[:-1]
        if called[:2] == ["-m", "sftplay"]:
            args = cli.parse([*called[2:], *shlex.split(in_args.removeprefix(cli.MAKE_ARGS))], is_make=True)
            assert {key.partition("=")[0] for key in args.overrides} <= set(all_keys())
            assert "JSON" not in names or args.json


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path):
    linked = [link for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in linked if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RECORDED + FOREIGN], ids=lambda p: p.name)
def test_every_file_of_the_repository_that_is_named_is_there(page: Path):
    missing = set()
    for code in code_of(page):
        for name in FILE.findall(code):
            top = name.split("/")[0]
            if "/" not in name or (top not in FOLDERS and not (ROOT / "sftplay" / top).is_dir()):
                continue
            if not name.startswith(MADE) and not any(
                (home / name).exists() for home in (ROOT, ROOT / "sftplay", page.parent)
            ):
                missing.add(name)
    assert missing == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RECORDED + FOREIGN], ids=lambda p: p.name)
def test_every_key_that_is_named_is_one_of_the_config(page: Path):
    keys = set(all_keys())
    sections = {key.split(".")[0] for key in keys if "." in key}
    groups = {key.rsplit(".", depth)[0] for key in keys for depth in range(1, 1 + key.count("."))}
    missing = set()
    for code in code_of(page):
        for found in re.finditer(r"(?<![\w./-])([a-z_]+(?:\.[a-z_0-9]+)+)(?=[:=]| |$)", code):
            name = found[1]
            first, *rest = name.split(".")
            entry = ".".join([first, *rest[1:]])  # datasets.chat.weight: the key of the entry called chat
            is_file = rest[-1] in ("py", "safetensors", "csv")
            if first in sections and not is_file and not {name, entry} & (keys | groups | {*OTHERS}):
                missing.add(name)
    assert missing == set()
