"""What follows from layers of several kinds: no packing where a state runs along the row, and attention with a sink."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, MachineError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan import sizing
from sftplay.plan.find_shape import find_shape, read_table
from sftplay.plan.sizing import Decision, decide_numerics, size_run

ROOT = Path(__file__).resolve().parents[2]
HYBRID, SINKS, PLAIN = "Qwen/Qwen3.5-9B", "openai/gpt-oss-20b", "Qwen/Qwen3-0.6B"


H100 = Gpu(0, "NVIDIA H100", 80 * 2**30, 79 * 2**30, (9, 0))
MACHINE = Machine(
    gpus=(H100,), gpu_reason="", ram_bytes=2**36, cores=8, python="3.11.0", system="Linux", libraries={}
)  # fmt: skip


def decided(model: str, **values: object) -> dict[str, Decision]:
    """With flash attention installed, on an H100."""
    cfg: RunConfig = load_config(ROOT / "configs/run_lora.yaml").with_values({"model.name": model, **values}, "test")
    with patch.object(sizing, "find_module", lambda name: object()):
        return decide_numerics(cfg, MACHINE, shape=find_shape(model))


def test_rows_are_packed_where_all_layers_attend_and_not_where_a_state_runs_along_the_row():
    assert decided(PLAIN)["train.packing"].value is True
    refused = decided(HYBRID)["train.packing"]
    assert refused.value is False
    assert "carry a state along the row" in refused.reason
    with pytest.raises(ConfigError, match="carry a state from one packed row into the next") as caught:
        decided(HYBRID, **{"train.packing": True})
    assert "train.packing: false" in caught.value.fix


def test_attention_with_a_sink_is_the_one_that_has_it():
    assert decided(SINKS)["model.attn"].value == "eager"
    with pytest.raises(MachineError, match="learned sink, which sdpa leaves out"):
        decided(SINKS, **{"model.attn": "sdpa"})


@pytest.mark.parametrize("asks", [False, True])
def test_the_head_is_one_that_a_run_accepts_where_config_json_asks_for_the_routers_loss(asks: bool, tmp_path: Path):
    config = read_table()["Qwen/Qwen3-30B-A3B"] | {"num_hidden_layers": 24, "output_router_logits": asks}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cfg = load_config(ROOT / "configs/run_lora.yaml").with_values({"model.name": str(tmp_path)}, "test")
    large = {"model.max_seq_len": 4096, "train.effective_batch_size": 64}
    sized = size_run(cfg.with_values(large, "test"), MACHINE, shape=find_shape(str(tmp_path)))
    assert sized.cfg.train.loss_head == ("standard" if asks else "chunked")
    assert not asks or "output_router_logits" in sized.decisions["train.loss_head"].reason
