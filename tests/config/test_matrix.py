"""The support matrix: whole, fresh in the docs, true to its tests, and kept to when a config is read."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from sftplay.config.cluster import Strategy
from sftplay.config.load import load_config
from sftplay.config.matrix import METHODS, PRECISIONS, STRATEGIES, TABLE, as_markdown, as_table, rows
from sftplay.config.run import Precision, TuningConfig
from sftplay.errors import ConfigErrors

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "configs/run_lora.yaml"


def test_every_combination_the_config_can_name_has_a_cell():
    modes = get_args(TuningConfig.model_fields["mode"].annotation)
    assert set(METHODS) == set(modes)
    assert set(STRATEGIES) == set(get_args(Strategy)) - {"auto"} | {"single"}
    assert set(PRECISIONS) == set(get_args(Precision))
    assert len(list(rows())) == len(METHODS) * len(STRATEGIES) * len(PRECISIONS)


def test_a_blocked_cell_has_a_reason_and_a_way_out_that_is_not_blocked_and_no_other_points_elsewhere():
    blocked = [row for row in rows() if row.cell.state == "blocked"]
    assert blocked == [row for row in rows() if row.cell.nearest]
    for row in blocked:
        assert len(row.cell.why) > 20
        key, _, value = row.cell.nearest.partition(": ")
        assert key == "cluster.strategy"
        assert TABLE[row.method, value][PRECISIONS.index(row.precision)].state != "blocked"


NAMED = sorted({cell.why for cells in TABLE.values() for cell in cells if cell.state == "works"})


@pytest.mark.parametrize("name", NAMED)
def test_the_test_a_cell_names_is_written(name):
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_every_test_a_cell_names_is_collected(collected: frozenset[str]):
    files = {name.partition("::")[0] for name in NAMED}
    if missing := sorted(files - {name.partition("::")[0] for name in collected}):
        pytest.skip(f"needs all tests to be collected, as `make test-slow` does; {missing[0]} is not")
    assert [name for name in NAMED if name not in collected] == []


def test_the_page_in_the_docs_is_what_the_table_says_today():
    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "run `make matrix > docs/strategies.md`"


def test_the_page_names_each_combination_once_in_its_lists():
    lists = as_markdown().partition("## ")[2]
    found = []
    for line in (line for line in lists.splitlines() if line.startswith("- ")):
        places = line[2:].partition(": ")[0]
        for place in places.split("; "):
            precision, methods, strategies = re.fullmatch(r"(\S+) (.+) under (.+)", place).groups()
            found += [(m, s, precision) for m in methods.split(", ") for s in strategies.split(", ")]
    assert sorted(found) == sorted((row.method, row.strategy, row.precision) for row in rows())


@pytest.mark.parametrize("row", list(rows()), ids=lambda row: f"{row.method}-{row.strategy}-{row.precision}")
def test_a_config_is_refused_exactly_where_its_cell_is_blocked(row):
    if row.strategy == "single":
        pytest.skip("it is not written in a config: it is what one process is")
    words = [f"tuning.mode={row.method}", f"cluster.strategy={row.strategy}", f"train.precision={row.precision}"]
    if row.cell.state != "blocked":
        assert load_config(RUN, words).cluster.strategy == row.strategy
        return
    with pytest.raises(ConfigErrors) as caught:
        load_config(RUN, words)
    assert row.cell.why in str(caught.value)
    assert row.cell.nearest in str(caught.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["cluster.strategy=fsdp", "cluster.deepspeed=deepspeed_configs/zero2.json"], "does not use one"),
        (["cluster.strategy=zero2", "tuning.backend=unsloth"], "trains in one"),
    ],
)
def test_what_goes_with_no_such_strategy_is_refused(words, says):
    with pytest.raises(ConfigErrors, match=says):
        load_config(RUN, words)


def test_the_matrix_of_a_terminal_is_aligned_and_keeps_to_its_width():
    lines = as_table(80).splitlines()
    assert max(map(len, lines)) <= 80
    header, rows_shown = lines[1], lines[2 : 2 + len(STRATEGIES)]
    starts = [place for place in range(len(header)) if header[place - 1 : place] == " " and header[place] != " "]
    assert len(starts) == len(METHODS) * len(PRECISIONS)
    for strategy, line in zip(STRATEGIES, rows_shown, strict=True):
        assert line.startswith(strategy)
        words = [line[start : start + 4].strip() for start in starts]
        states = [cell.state for method in METHODS for cell in TABLE[method, strategy]]
        assert words == [{"works": "yes", "gpu": "gpu", "blocked": "no"}[state] for state in states]
