"""The support matrix: which tuning mode works under which strategy in which precision, and how that is known.

Three kinds of cells. `works`: a test of this kit runs it on two processes or one, without a GPU. `gpu`: it is the same
code in another number format or on more devices, and nothing here has run it. `blocked`: upstream cannot do it.
The table decides nothing about memory; that is for `plan`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

State = Literal["works", "gpu", "blocked"]

METHODS = ("full", "lora", "qlora")
STRATEGIES = ("single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "tensor", "pipeline")
PRECISIONS = ("fp32", "bf16", "fp16")

SHARDED_TEST = "tests/tasks/test_sharded_runs.py::test_a_sharded_run_has_the_curve_of_one_process"


@dataclass(frozen=True)
class Cell:
    """One combination. `why`: the test that runs it, what a GPU is needed for, or what upstream lacks."""

    state: State
    why: str
    nearest: str = ""
    """Of a blocked one: what to write in its place, as `key: value`."""


@dataclass(frozen=True)
class Row:
    """A cell with its place in the table."""

    method: str
    strategy: str
    precision: str
    cell: Cell

    def as_dict(self) -> dict[str, str]:
        place = {"method": self.method, "strategy": self.strategy, "precision": self.precision}
        return place | {"state": self.cell.state, "why": self.cell.why, "nearest": self.cell.nearest}


def _runs(test: str) -> Cell:
    return Cell("works", test)


_SINGLE = "tests/tasks/test_sft.py"
_PAIR = "tests/tasks/test_processes.py::test_two_processes_train_and_measure_as_one_does"
_FP16 = Cell("gpu", "fp16 and its loss scale need a GPU; a CPU would ignore it")
_BF16 = Cell("gpu", "bf16 as in a single process, gathered as in fp32; not run without a GPU")
_FOUR = Cell("gpu", "needs four devices: two copies, each on two")
_CUT = Cell(
    "blocked",
    "the kit does not cut a model's layers: transformers does so on GPUs, for models that bring a plan, and nobody "
    "here has tried it",
    "cluster.strategy: fsdp",
)
_CUT_CODES = Cell(
    "blocked",
    "bitsandbytes packs 4-bit codes in blocks that do not follow a matrix's rows, so they cannot be cut",
    "cluster.strategy: fsdp",
)
_STAGES = Cell(
    "blocked",
    "a pipeline needs a schedule of its own in place of the Trainer's step, which neither transformers nor TRL has",
    "cluster.strategy: fsdp",
)

TABLE: dict[tuple[str, str], tuple[Cell, Cell, Cell]] = {
    ("full", "single"): (
        _runs(f"{_SINGLE}::test_loss_falls[full]"),
        _runs(f"{_SINGLE}::test_full_16_bit_run_trains_fp32_weights_and_saves_16_bits"),
        _FP16,
    ),
    ("lora", "single"): (
        _runs(f"{_SINGLE}::test_loss_falls[lora]"),
        _runs(f"{_SINGLE}::test_16_bit_run_with_modules_trained_in_full_can_be_measured"),
        _FP16,
    ),
    ("qlora", "single"): (_runs(f"{_SINGLE}::test_loss_falls[qlora]"), _BF16, _FP16),
    ("full", "ddp"): (_runs(f"{SHARDED_TEST}[ddp-full]"), _BF16, _FP16),
    ("lora", "ddp"): (_runs(_PAIR), _BF16, _FP16),
    ("qlora", "ddp"): (_runs(f"{SHARDED_TEST}[ddp-qlora]"), _BF16, _FP16),
    ("full", "fsdp"): (_runs(f"{SHARDED_TEST}[fsdp-full]"), _BF16, _FP16),
    ("lora", "fsdp"): (_runs(f"{SHARDED_TEST}[fsdp-lora]"), _BF16, _FP16),
    ("qlora", "fsdp"): (_runs(f"{SHARDED_TEST}[fsdp-qlora]"), _BF16, _FP16),
    ("full", "hsdp"): (_FOUR, _FOUR, _FP16),
    ("lora", "hsdp"): (_FOUR, _FOUR, _FP16),
    ("qlora", "hsdp"): (_FOUR, _FOUR, _FP16),
    ("full", "zero1"): (_runs(f"{SHARDED_TEST}[zero1-full]"), _BF16, _FP16),
    ("lora", "zero1"): (_runs(f"{SHARDED_TEST}[zero1-lora]"), _BF16, _FP16),
    ("qlora", "zero1"): (_runs(f"{SHARDED_TEST}[zero1-qlora]"), _BF16, _FP16),
    ("full", "zero2"): (_runs(f"{SHARDED_TEST}[zero2-full]"), _BF16, _FP16),
    ("lora", "zero2"): (_runs(f"{SHARDED_TEST}[zero2-lora]"), _BF16, _FP16),
    ("qlora", "zero2"): (_runs(f"{SHARDED_TEST}[zero2-qlora]"), _BF16, _FP16),
    ("full", "zero3"): (_runs(f"{SHARDED_TEST}[zero3-full]"), _BF16, _FP16),
    ("lora", "zero3"): (_runs(f"{SHARDED_TEST}[zero3-lora]"), _BF16, _FP16),
    ("qlora", "zero3"): (_runs(f"{SHARDED_TEST}[zero3-qlora]"), _BF16, _FP16),
    ("full", "tensor"): (_CUT, _CUT, _CUT),
    ("lora", "tensor"): (_CUT, _CUT, _CUT),
    ("qlora", "tensor"): (_CUT_CODES, _CUT_CODES, _CUT_CODES),
    ("full", "pipeline"): (_STAGES, _STAGES, _STAGES),
    ("lora", "pipeline"): (_STAGES, _STAGES, _STAGES),
    ("qlora", "pipeline"): (_STAGES, _STAGES, _STAGES),
}
"""(method, strategy) -> the cells of fp32, bf16 and fp16."""


def rows() -> Iterator[Row]:
    """Every combination, methods together, strategies in the order of `STRATEGIES`."""
    for method in METHODS:
        for strategy in STRATEGIES:
            for precision, cell in zip(PRECISIONS, TABLE[method, strategy], strict=True):
                yield Row(method, strategy, precision, cell)


def cell_of(method: str, strategy: str, precision: str) -> Cell:
    """The cell of one combination."""
    return TABLE[method, strategy][PRECISIONS.index(precision)]


_HEAD = """# Strategies

<!-- Generated by `make matrix` from sftplay/config/rules/matrix.py; do not edit. -->

What may be combined: `tuning.mode` (rows), `cluster.strategy` (columns), `train.precision` (fp32 / bf16 / fp16 in a
cell). `single` is one process.

- **yes**: a test of this kit runs it, without a GPU; the tests are listed below. For fsdp the test replaces one
  decision of accelerate's, which knows no FSDP on a CPU; the kit itself starts it on GPUs only.
- gpu: runs where a GPU is; nothing in this repository's tests has.
- no: refused when the config is read, with the reason and the nearest combination that is not.

"""


def as_markdown() -> str:
    """docs/strategies.md."""
    words = {"works": "**yes**", "gpu": "gpu", "blocked": "no"}
    lines = [f"| | {' | '.join(STRATEGIES)} |", f"| --- |{' --- |' * len(STRATEGIES)}"]
    for method in METHODS:
        cells = [" / ".join(words[cell.state] for cell in TABLE[method, strategy]) for strategy in STRATEGIES]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return (
        _HEAD
        + "\n".join([*lines, "", *_section("Tests", "works"), "", *_section("Not here", "gpu")])
        + ("\n\n" + "\n".join(_section("Refused", "blocked")) + "\n")
    )


def _section(title: str, state: State) -> list[str]:
    """The reasons of one kind of cells, each once, with the combinations it stands for."""
    found: dict[Cell, dict[str, dict[str, list[str]]]] = {}
    for row in rows():
        if row.cell.state == state:
            by_precision = found.setdefault(row.cell, {}).setdefault(row.precision, {})
            by_precision.setdefault(row.method, []).append(row.strategy)
    lines = [f"## {title}", ""]
    for cell, places in found.items():
        why = f"`{cell.why}`" if state == "works" else cell.why
        near = f" Nearest: `{cell.nearest}`." if cell.nearest else ""
        where = "; ".join(_place(precision, places[precision]) for precision in places)
        lines.append(f"- {where}: {why}.{near}")
    return lines


def _place(precision: str, strategies: dict[str, list[str]]) -> str:
    """Strategies of each method, methods with the same ones together."""
    methods: dict[str, list[str]] = {}
    for method, names in strategies.items():
        methods.setdefault(", ".join(names), []).append(method)
    return "; ".join(f"{precision} {', '.join(found)} under {names}" for names, found in methods.items())
