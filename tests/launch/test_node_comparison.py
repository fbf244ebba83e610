"""Which node differs from the others, and the text of the error."""

from __future__ import annotations

from typing import Any

import pytest

from sftplay.errors import ConfigError, DataError, MachineError
from sftplay.launch.nodes import check_nodes_match, find_differences


def report(**sections: dict[str, Any]) -> dict[str, Any]:
    same = {"versions": {"torch": "2.13.0"}, "config": {"seed": 1}, "files": {"data.train_path": "aa"}}
    return {"host": "h", **same, **sections}


def differences(*reports: dict[str, Any]) -> list[tuple[int, str, str]]:
    return find_differences(reports)


def test_nodes_that_agree_have_no_differences():
    assert differences(report(), report(), report()) == []
    check_nodes_match([report(), report()])


def test_of_two_nodes_node_1_differs_and_of_more_the_one_that_is_alone():
    other = report(versions={"torch": "2.12.0"})
    assert differences(report(), other) == [(1, "machine", "torch is 2.12.0, on node 0 it is 2.13.0")]
    assert differences(other, report(), report()) == [(0, "machine", "torch is 2.12.0, on nodes 1, 2 it is 2.13.0")]


def test_what_a_node_lacks_is_named_as_missing():
    assert differences(report(versions={"torch": "2.13.0", "deepspeed": "0.19.8"}), report()) == [
        (1, "machine", "deepspeed is missing, on node 0 it is 0.19.8")
    ]
    assert differences(report(), report(files={})) == [
        (1, "data", "the path in data.train_path is missing, on node 0 it exists")
    ]


@pytest.mark.parametrize(
    ("odd", "kind", "message"),
    [
        ({"config": {"seed": 2}}, ConfigError, "node 1 (b): seed is 2, on node 0 it is 1"),
        ({"files": {"data.train_path": "bb"}}, DataError, "node 1 (b): the path in data.train_path has other content"),
        ({"versions": {"torch": "9"}}, MachineError, "node 1 (b): torch is 9, on node 0 it is 2.13.0"),
        ({"versions": {"torch": "9"}, "config": {"seed": 2}}, ConfigError, "torch is 9"),
    ],
)
def test_error_is_of_the_kind_of_what_differs_and_names_the_node(odd: dict[str, Any], kind: type, message: str):
    with pytest.raises(kind) as error:
        check_nodes_match([report(), {**report(**odd), "host": "b"}])
    assert message in error.value.what
    assert error.value.fix


def test_an_error_of_a_node_is_reported_with_its_place_and_fix_and_not_compared():
    error_json = DataError("there is no such file", where="x.yaml:3 data.train_path", fix="write it").as_json()
    with pytest.raises(DataError) as error:
        check_nodes_match([report(), {"host": "b", "versions": {"torch": "2.13.0"}, "error": error_json}])
    assert error.value.what == "node 1 (b): x.yaml:3 data.train_path: there is no such file"
    assert error.value.fix == "write it"


def test_long_lists_of_differences_are_cut_and_counted():
    many = {f"key{n:02}": n for n in range(20)}
    with pytest.raises(ConfigError, match="and 8 more"):
        check_nodes_match([report(config=many), report(config=dict.fromkeys(many, -1))])
