"""Faults planted between trainer and a real vLLM, or inside it, are named in the step in which they begin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_server import ROOT, run_by_vllm_python, served

from sftplay.places import find_vllm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.fresh_start,
    pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm"),
]

MODEL = ROOT / "data/base/tiny"
OPTIONS = "--max-model-len 128 --block-size 32 --worker-extension-cls vllm_faulty_worker.FaultyWorker"

NAMED = {
    "temperature": (1, "temperature", "the sampler's is 1.1, and the run learns with 1"),
    "top_p": (1, "top_p", "the likeliest 0.9 of each distribution"),
    "template": (1, "template", "from token 3 on [9, "),
    "half-loaded adapter": (2, "half-loaded adapter", "7 of its 28 parts are missing, model.layers.1."),
    "stale prefix cache": (2, "stale prefix cache", "once its prefix cache is passed by"),
    "stale prefix cache, adapter": (2, "stale prefix cache", "once its prefix cache is passed by"),
    "old head": (2, "old head", "the one before the last update"),
    "dropout": (1, "dropout", "each time it is asked for the same tokens"),
    "another dtype": (1, "another dtype", "computes in bfloat16, the learner in float32"),
}
"""Planted fault -> the step in which it begins, the cause that the run names, and a part of its words."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm-faults")


@pytest.fixture(scope="module")
def found(home: Path) -> Iterator[dict[str, Any]]:
    """The trainings of `vllm_faults`."""
    with served(home, MODEL, OPTIONS) as (url, _):
        yield run_by_vllm_python("vllm_faults", home, url, str(MODEL))


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_is_named_in_the_step_in_which_it_begins(fault: str, found: dict[str, Any]):
    step, cause, words = NAMED[fault]
    first, *others = found[fault]["events"]
    assert (first["step"], first["cause"], others) == (step, cause, [])
    assert words in first["words"]
    causes = [line["sampler_cause"] for line in found[fault]["metrics"]]
    assert causes == [None] * (step - 1) + [cause] * (len(causes) - step + 1)


@pytest.mark.parametrize("kind", ["none", "none, adapter", "none, in one process"])
def test_a_vllm_without_a_fault_is_not_accused(kind: str, found: dict[str, Any]):
    assert found[kind]["events"] == []
    assert [line["sampler_cause"] for line in found[kind]["metrics"]] == [None, None]
    assert all(0 < line["sampler_gap"] < 5e-6 for line in found[kind]["metrics"])
    assert found[kind]["dtype"] == "float32"
