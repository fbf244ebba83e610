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
from sftplay.tasks.worker import needs_bitsandbytes

STARTED = """
import sys
from sftplay.tasks.worker import leave_out_bitsandbytes
leave_out_bitsandbytes()
import sftplay.tasks.sft, sftplay.tasks.run.run_task
print(sorted(name for name in ("bitsandbytes", "torch._inductor.compile_fx", "peft") if sys.modules.get(name)))
"""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tuning__mode": "lora"}, False),
        ({"tuning__mode": "full"}, False),
        ({"tuning__mode": "qlora"}, True),
        ({"train__optim": "adamw_8bit"}, True),
        ({"train__optim": "paged_adamw_32bit"}, True),
        ({"model__name": "builtin:tiny"}, False),
        ({"model__name": "nobody/has-downloaded-this"}, True),
    ],
)
def test_a_run_needs_bitsandbytes_for_its_numbers_in_few_bits_only(
    write_config: Callable[..., Path], values: dict[str, Any], expected: bool
) -> None:
    assert needs_bitsandbytes(load_config(write_config(**({"tuning__mode": "lora"} | values)))) is expected


def test_a_base_that_is_published_quantised_needs_it(
    write_config: Callable[..., Path], tiny_llama: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    config = json.loads((tiny_llama / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    assert needs_bitsandbytes(load_config(write_config(tuning__mode="lora", model__name=str(base))))


@pytest.mark.slow
def test_left_out_it_brings_no_inductor_into_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True, timeout=HANG_S
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "['peft']"
