"""Which libraries a worker leaves out because its run cannot need them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import HANG_S

from sftplay.config.load import load_config
from sftplay.model.libraries import unneeded

STARTED = """
import sys
from sftplay.startup import begin_imports, leave_out
begin_imports()
leave_out(["bitsandbytes", "deepspeed"])
import sftplay.tasks.sft.task, sftplay.train.run_task
wanted = ("bitsandbytes", "torch._inductor.compile_fx", "peft", "deepspeed")
print(sorted(name for name in wanted if sys.modules.get(name)))
"""


@pytest.mark.parametrize(
    ("values", "needed"),
    [
        ({}, set()),
        ({"tuning__mode": "qlora"}, {"bitsandbytes"}),
        ({"train__optim": "adamw_8bit"}, {"bitsandbytes"}),
        ({"model__name": "builtin:tiny"}, set()),
        ({"model__name": "nobody/has-downloaded-this"}, {"bitsandbytes"}),
        ({"cluster__strategy": "fsdp"}, set()),
        ({"cluster__strategy": "zero2"}, {"deepspeed"}),
    ],
)
def test_a_run_needs_bitsandbytes_for_few_bits_and_deepspeed_for_its_strategies(
    write_config: Callable[..., Path], values: dict[str, Any], needed: set[str]
) -> None:
    cfg = load_config(write_config(**({"tuning__mode": "lora"} | values)))
    assert {"bitsandbytes", "deepspeed"} - set(unneeded(cfg)) == needed


def test_a_base_that_is_published_quantised_needs_it(
    write_config: Callable[..., Path], tiny_llama: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((tiny_llama / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    assert "bitsandbytes" not in unneeded(load_config(write_config(tuning__mode="lora", model__name=str(base))))


@pytest.mark.slow
def test_left_out_it_brings_no_inductor_into_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=HANG_S
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "['peft']"
