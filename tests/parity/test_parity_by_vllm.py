"""`parity` with a real vLLM server: the trained model agrees, and faults of what it serves are named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from in_process import Finished, Inputs, train
from lively import lively_model
from test_parity import ask, set_other_values, set_prefix, set_zeros

from sftplay.export.merge import merge
from sftplay.export.server import build_server
from sftplay.machine.ports import HOST, free_port
from sftplay.parity.by_vllm import started
from sftplay.places import find_vllm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm"),
    pytest.mark.filterwarnings("ignore:.*missing adapter keys"),
]

BLOCK = 128
"""Tokens that vLLM's prefix cache keeps together on a CPU; a shorter prompt is never in it."""


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory, verbs_environment: None) -> Finished:
    """A LoRA run on a lively base with heads of 32, the smallest that vLLM computes on a CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    home = tmp_path_factory.mktemp("parity-vllm")
    base = Path(shutil.copytree(inputs.model, home / "base"))
    config = LlamaConfig(
        vocab_size=400, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512, pad_token_id=0, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(base)
    lively_model(base).save_pretrained(base)
    done = train(home, Inputs(base, inputs.train, inputs.held_out), train__learning_rate=0.05)
    merge(done.cfg, done.folder, out=done.folder.path / "merged")
    return done


@pytest.fixture(scope="module")
def long_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts that fill blocks of the prefix cache."""
    path = tmp_path_factory.mktemp("rows") / "long.jsonl"
    rows = [{"prompt": f"{n} " + "the river stone walks under green light and " * 25} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def served(run: Finished, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """One server with the base and four adapters: the run's, `prefix`, `zeros` and `hot`; its address, their folder."""
    home, adapter, port = tmp_path_factory.mktemp("adapters"), run.folder.path / "adapter", free_port(0)
    for name, plant in {"prefix": set_prefix, "zeros": set_zeros, "hot": set_other_values}.items():
        plant(Path(shutil.copytree(adapter, home / name)), run)
    launch = build_server(
        "vllm", Path(run.cfg.model.name), name="run", port=port, trusts_code=False, adapter=adapter, max_model_len=512,
        is_gated=False,
    )  # fmt: skip
    argv = list(launch.argv)
    at = argv.index("--lora-modules") + 2
    argv[at:at] = [*(f"{name}={home / name}" for name in ("prefix", "zeros", "hot")), "--max-loras", "4"]
    launch = replace(launch, argv=tuple(argv), env={**launch.env, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"})
    with started(launch, port, cwd=home, log_file=home / "vllm.log"):
        yield f"http://{HOST}:{port}", home
    if os.environ.get("SHOW_LOG"):
        print((home / "vllm.log").read_text())


def test_vllm_answers_as_the_merged_model_that_was_trained(run: Finished):
    code, found = ask(run, "--engine", "vllm")
    assert (code, found["cause"]) == (0, None)
    assert found["version"].startswith("vLLM 0.")
    assert (found["same_prompt_ids"], found["same_answer_ids"], found["against"]) == (6, 6, "merged")
    assert found["max_logprob_diff"] < found["bound"] == 1e-4
    assert found["adapter_changes_answers"] is True


def by_url(run: Finished, served: tuple[str, Path], name: str, *words: str) -> tuple[int, dict[str, Any]]:
    return ask(run, "--engine", "vllm", "--url", served[0], "--name", name, *words)


def test_a_running_server_answers_as_the_trained_adapter(run: Finished, served: tuple[str, Path]):
    code, found = by_url(run, served, "run")
    assert (code, found["cause"], found["against"]) == (0, None, "adapter")
    assert (found["same_answer_ids"], found["adapter_changes_answers"]) == (6, True)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("prefix", "keys match 0 of 14 modules"),
        ("zeros", "the adapter is all zeros"),
        ("run-base", "is the base's, as it was before training"),
    ],
)
def test_a_running_server_that_answers_as_the_base_is_refused_with_its_fault(
    name: str, cause: str, run: Finished, served: tuple[str, Path]
):
    code, found = by_url(run, served, name)
    assert (code, found["adapter_changes_answers"]) == (5, False)
    assert cause in found["cause"]


def test_a_stale_prefix_cache_after_a_hot_reload_is_named(run: Finished, served: tuple[str, Path], long_rows: Path):
    url, home = served
    rows = ("--in", str(long_rows))
    code, found = by_url(run, served, "hot", *rows)
    assert code == 5
    assert "it is another adapter than the run's" in found["cause"]
    assert not any("stale" in fault for fault in found["faults"])
    good = run.folder.path / "adapter" / "adapter_model.safetensors"
    shutil.copyfile(good, home / "hot" / good.name)
    body = {"lora_name": "hot", "lora_path": str(home / "hot"), "load_inplace": True}
    asked = Request(f"{url}/v1/load_lora_adapter", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(asked, timeout=300) as response:
        assert response.status == 200
    code, found = by_url(run, served, "hot", *rows)
    assert code == 5
    assert found["cause"].startswith("stale prefix cache")
    assert "with a cache salt it gives the run's answers" in found["cause"]
