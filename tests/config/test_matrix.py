"""The support matrix: whole, fresh in the docs, true to its tests, and kept to when a config is read."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from sftplay.config.cluster import Strategy
from sftplay.config.load import load_config
from sftplay.config.matrix import METHODS, PRECISIONS, STRATEGIES, TABLE, as_markdown, rows
from sftplay.config.run import TuningConfig
from sftplay.config.train import Precision
from sftplay.errors import ConfigErrors

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "configs/run_lora.yaml"


def test_every_combination_the_config_can_name_has_a_cell():
    modes = get_args(TuningConfig.model_fields["mode"].annotation)
    assert set(METHODS) == set(modes)
    assert set(STRATEGIES) == set(get_args(Strategy)) - {"auto"} | {"single"}
    assert set(PRECISIONS) == set(get_args(Precision))
    assert len(list(rows())) == len(METHODS) * len(STRATEGIES) * len(PRECISIONS)


NAMED = sorted({cell.why for cells in TABLE.values() for cell in cells if cell.state == "works"})


@pytest.mark.parametrize("name", NAMED)
def test_the_test_a_cell_names_is_written(name):
    file, _, test = name.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert test.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_in_the_docs_is_what_the_table_says_today():
    page = (ROOT / "docs/strategies.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "run `make matrix > docs/strategies.md`"


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
