"""The files every run of this folder starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
from in_process import Inputs


@pytest.fixture(scope="session")
def inputs(tiny_llama: Path, chat_rows: Path, held_out_rows: Path) -> Inputs:
    return Inputs(tiny_llama, chat_rows, held_out_rows)
