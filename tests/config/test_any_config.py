"""Configs and overrides drawn at random: an exit code that means something, and a message that names the key."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import ends_soon

from sftplay.cli import main
from sftplay.config.keys import all_keys, all_sections, node_at
from sftplay.config.manual import list_choices
from sftplay.config.resolved import flow

CPU_S = 30
"""No config takes the processor so long: only one that never ends does. They take a tenth of a second."""

PROMISED = (0, 2, 3, 4)

ODD = [
    None, True, 0, -1, 1, 7, 10**30, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), "", " ", "auto", "none",
    "a\0b", "\ud800", "x" * 5000, "é", "../..", "~/x", "/dev/null", "builtin:tiny", "builtin:tyni", "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8b-Bsae", "https://me:s3cret@hub.example/x", "3h", "2e-4", "yes", "rows.jsonl", [], {}, [1], ["a"],
    {"a": 1}, {"name": "x"}, [[]], [None], "{}", "*", "&a", "!!python/object:os.system",
]  # fmt: skip
SLIPS = st.sampled_from(["", "", "", "", "x", "s", "_", ".x", "."])


def values_of(key: str) -> st.SearchStrategy[Any]:
    words = list_choices(node_at(key)) if key in all_keys() else []
    return st.sampled_from([*words, *words, *ODD]) if words else st.sampled_from(ODD)


KEYS = st.sampled_from([*all_keys(), *filter(None, all_sections()), "train.extra.adam_beta1", "include", "score.beta"])
SETTINGS = st.tuples(KEYS, SLIPS, st.randoms(use_true_random=False)).flatmap(
    lambda drawn: st.tuples(st.just(slipped(drawn[0], drawn[1], drawn[2])), values_of(drawn[0]))
)


def slipped(key: str, slip: str, random: Any) -> str:
    """The key as it is, or with letters where none belong."""
    at = random.randint(0, len(key)) if slip in ("x", "s", "_") else len(key)
    return key[:at] + slip + key[at:]


def yaml_of(settings: list[tuple[str, Any]]) -> str:
    tree: dict[str, Any] = {"model": {"name": "builtin:tiny"}, "data": {"train_path": "rows.jsonl"}}
    for key, value in settings:
        branch = tree
        *sections, last = key.split(".")
        for section in sections:
            inner = branch.setdefault(section, {})
            branch = inner if isinstance(inner, dict) else branch.setdefault(f"{section}_", {})
        branch[last] = copy.deepcopy(value)  # a later key may write into it
    return "\n".join(f"{flow(key)}: {flow(value)}" for key, value in tree.items())


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit code of a verb and the places and texts of its problems."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "run.yaml").write_text(yaml_of([]))

    def run(verb: str, text: str, overrides: list[str]) -> tuple[int, list[str]]:
        if text:
            (tmp_path / "run.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        with ends_soon(CPU_S):
            code = main([verb, "--config", "run.yaml", "--json", *overrides])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        given = "".join([text, *overrides])
        if given.count("s3cret") == given.count("://me:s3cret@"):  # else it is no part of an address
            assert "s3cret" not in said.err
        error = json.loads(said.out).get("error")
        return code, [f"{one['where']}: {one['what']}" for one in error.get("problems", [error])] if error else []

    return run


def names_a_key(message: str, settings: list[tuple[str, Any]]) -> bool:
    """The message names a key that was written, or one that the schema has."""
    parts = [key.strip(".") for key, _ in settings] + [key for key, _ in settings]
    known = [*all_keys(), *all_sections(), "include"]
    return any(part and part in message for part in [*parts, *(part.split(".")[0] for part in parts), *known])


@given(settings=st.lists(SETTINGS, min_size=1, max_size=6), verb=st.sampled_from(["validate", "validate", "plan"]))
def test_any_config_is_accepted_or_refused_by_its_keys(answer, settings, verb):
    code, problems = answer(verb, yaml_of(settings), [])
    assert code in PROMISED
    assert all(names_a_key(problem, settings) for problem in problems), problems


@given(settings=st.lists(SETTINGS, min_size=1, max_size=4), verb=st.sampled_from(["validate", "validate", "plan"]))
def test_any_overrides_are_accepted_or_refused_by_their_keys(answer, settings, verb):
    overrides = [f"{key}={value if isinstance(value, str) else flow(value)}" for key, value in settings]
    code, problems = answer(verb, yaml_of([]), overrides)
    assert code in PROMISED
    assert all(names_a_key(problem, settings) for problem in problems), problems


@given(settings=st.lists(SETTINGS, max_size=3), at=st.integers(0, 10**6), inserted=st.text(max_size=3))
def test_any_damage_to_the_text_is_refused_with_the_files_name(answer, settings, at, inserted):
    text = yaml_of(settings)
    at %= len(text)
    code, problems = answer("validate", text[:at] + inserted + text[at + 1 :], [])
    assert code in PROMISED
    assert all(
        "run.yaml" in problem or "rows.jsonl:" in problem or names_a_key(problem, settings) for problem in problems
    ), problems
