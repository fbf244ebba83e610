"""Tokens a second and MFU of a random model of a public shape on full rows, by the kit or by a plain TRL script.

    python benchmarks/gpu_speed.py --case llama-8b-lora --contestant ours --out FILE.json

One contestant a process, so that neither finds memory that the other has left. Micro-batch, accumulation, adapter,
precision and gradient checkpointing are the same for both; checkpointing is off where the plan says that this fits.
`--case tiny-lora` and `tiny-qlora` go the same way on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
    set_seed,
)
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu_sizing import TINY_CONFIG
from sftplay.atomic import write_text
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.launch.command import one_gpu_environment
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe
from sftplay.model.load import load_base
from sftplay.model.recomputation import recomputation_arguments
from sftplay.model.tokenizer import load_tokenizer
from sftplay.plan.devices import find_card
from sftplay.plan.find_shape import find_shape, read_table
from sftplay.plan.flops import model_flops
from sftplay.plan.memory_setup import read_memory_setup
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.tasks.probe_step import synthetic_rows
from sftplay.tasks.sft import task as sft
from sftplay.train.exact_batch import StepSetup
from sftplay.train.run_task import make_trainable
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.train_run import make_setup

SEED, RANK, RATE = 7, 16, 1e-4
WARM, MEASURED = 1, 3
"""Steps of a run. In the first one kernels are chosen and the optimizer's state appears."""


@dataclass(frozen=True)
class Case:
    """A model of the shipped table (None: a tiny one), what is tuned, tokens a row, rows at a time and in a step."""

    model: str | None
    mode: str
    tokens: int
    micro_batch: int
    effective: int


CASES = {
    "llama-8b-lora": Case("meta-llama/Llama-3.1-8B", "lora", 4096, 2, 32),
    "llama-1b-qlora": Case("meta-llama/Llama-3.2-1B", "qlora", 4096, 2, 32),
    "tiny-lora": Case(None, "lora", 64, 2, 4),
    "tiny-qlora": Case(None, "qlora", 64, 2, 4),
}


class Clock(TrainerCallback):
    """Times each step from its first kernel to its last."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(now() - self._began)


def now() -> float:
    """The time when the device has done all that it was told to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(argv: list[str] | None = None) -> int:
    """Measure one contestant and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--contestant", choices=["ours", "trl"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    os.environ.update(one_gpu_environment(probe().gpus))  # TRL takes one
    with tempfile.TemporaryDirectory(prefix="gpu-speed-") as scratch:
        found = measure(CASES[options.case], options.contestant, Path(scratch))
    write_text(options.out, json.dumps(found, indent=1) + "\n")
    return 0


def measure(case: Case, contestant: str, scratch: Path) -> dict[str, Any]:
    """Figures of one contestant; `does_not_fit` alone where the plan says that the card is too small."""
    model = write_shape(case, scratch / "model")
    sized = sized_to_fit(case, model, scratch)
    if isinstance(sized, str):
        return {"does_not_fit": sized}
    if case.mode == "qlora":  # 4-bit weights are made from files only
        random_model(model, torch.bfloat16, "eager").save_pretrained(model)
        torch.cuda.empty_cache()  # nothing where there is no GPU
    set_seed(SEED)
    clock = Clock()
    build = build_ours if contestant == "ours" else build_trl
    trainer = build(sized.cfg, scratch, clock)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    seconds = sum(clock.seconds[WARM:]) / MEASURED
    return {
        "contestant": contestant,
        "tokens_per_s": case.effective * case.tokens / seconds,
        "mfu": mfu(sized.cfg, case, seconds),
        "step_seconds": clock.seconds,
        "losses": losses,
        "gradient_checkpointing": sized.cfg.train.gradient_checkpointing,
        "loss_head": sized.cfg.train.loss_head,
        "attn": sized.cfg.model.attn,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def write_shape(case: Case, folder: Path) -> Path:
    """A folder with the shape's config.json and a tokenizer of few words, without weights."""
    entry = dict(read_table()[case.model] if case.model else TINY_CONFIG)
    AutoConfig.for_model(entry.pop("model_type"), **entry).save_pretrained(folder)
    words = {"<pad>": 0, "<eos>": 1, **{f"word{n}": n for n in range(2, 768)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word2"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    return folder


def sized_to_fit(case: Case, model: Path, scratch: Path) -> SizedRun | str:
    """The run with every `auto` decided, without gradient checkpointing where that fits; or why it does not fit."""
    machine, shape = probe(), find_shape(str(model))
    peak = 0
    for checkpointing in (False, True):
        values = {
            "run_name": "run",
            "output_dir": str(scratch),
            "seed": SEED,
            "model": {"name": str(model), "max_seq_len": case.tokens},
            "tuning": {"mode": case.mode, "lora": {"r": RANK}},
            "train": {
                "max_steps": WARM + MEASURED, "effective_batch_size": case.effective, "batch_size": case.micro_batch,
                "grad_accum": case.effective // case.micro_batch, "learning_rate": RATE, "warmup_ratio": 0.0,
                "gradient_checkpointing": checkpointing, "packing": False, "probe": "off",
            },
            "data": {"train_path": str(scratch / "unread.jsonl")},
            "logging": {"steps": 1, "backend": "none"},
        }  # fmt: skip
        path = scratch / "run.yaml"
        path.write_text(json.dumps(values))
        sized = size_run(load_config(path), machine, shape=shape)
        assert sized.forecast is not None
        if sized.forecast.verdict != "does_not_fit":
            return sized
        peak = sized.forecast.peak_bytes
    return f"{peak / 2**30:.1f} GiB are planned"


def random_model(folder: Path, dtype: torch.dtype, attn: str) -> Any:
    """A model of the folder's config.json with random weights, made where it will compute."""
    set_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation=attn
        )


def dtype_of(cfg: RunConfig) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[str(cfg.train.precision)]


def build_ours(cfg: RunConfig, scratch: Path, clock: Clock) -> Any:
    """The trainer that the kit's own run has, without what it writes."""
    folder = RunFolder(scratch / "run")
    folder.create()
    write_text(folder.resolved, dump_resolved(cfg))
    four_bit = cfg.tuning.mode == "qlora"
    model = load_base(cfg) if four_bit else random_model(Path(cfg.model.name), dtype_of(cfg), str(cfg.model.attn))
    tokenizer = load_tokenizer(cfg.model)
    rows = synthetic_rows(cfg, tokenizer, count=cfg.train.effective_batch_size * (WARM + MEASURED))
    setup = make_setup(cfg, folder, n_rows=len(rows))
    nothing_kept = {"save_strategy": "no", "eval_strategy": "no"}
    return sft.build_trainer(
        TrainerParts(
            cfg=cfg,
            model=make_trainable(model, cfg),
            tokenizer=tokenizer,
            train=rows.select(setup.order),
            rows=Rows(train=rows, held_out=None, report={}),
            folder=folder,
            held_out=None,
            arguments={**setup.arguments(has_held_out=False), **nothing_kept},
            callbacks=[clock],
            step=StepSetup(micro_batcher=setup.micro_batcher(), loss_head=str(cfg.train.loss_head)),
        )
    )


def build_trl(cfg: RunConfig, scratch: Path, clock: Clock) -> Any:
    """The trainer of the short script that a TRL user writes, on the same rows in the same order."""
    attn, precision = str(cfg.model.attn), cfg.train.precision
    if cfg.tuning.mode == "qlora":
        model = AutoModelForCausalLM.from_pretrained(
            cfg.model.name,
            dtype=dtype_of(cfg),
            attn_implementation=attn,
            device_map={"": 0} if torch.cuda.is_available() else None,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=dtype_of(cfg),
            ),
        )
    else:
        model = random_model(Path(cfg.model.name), dtype_of(cfg), attn)
    tokenizer = load_tokenizer(cfg.model)
    rows = synthetic_rows(cfg, tokenizer, count=cfg.train.effective_batch_size * (WARM + MEASURED))
    order = make_setup(cfg, RunFolder(scratch), n_rows=len(rows)).order
    return SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict(rows.select(order).select_columns(["input_ids"]).to_dict()),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        callbacks=[clock],
        args=SFTConfig(
            output_dir=str(scratch / "trl"),
            use_cpu=not torch.cuda.is_available(),
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            seed=SEED,
            per_device_train_batch_size=int(cfg.train.batch_size),
            gradient_accumulation_steps=int(cfg.train.grad_accum),
            max_steps=WARM + MEASURED,
            learning_rate=RATE,
            lr_scheduler_type="cosine",
            max_length=cfg.model.max_seq_len,
            **recomputation_arguments(recomputes=cfg.train.gradient_checkpointing),
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )


def mfu(cfg: RunConfig, case: Case, seconds: float) -> float | None:
    """Model FLOPs of a step over what the card could have done in its time; None where one of them is not known."""
    card = find_card(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    shape = find_shape(cfg.model.name)
    flops = model_flops(shape, read_memory_setup(cfg)) if shape else None
    if card is None or flops is None or cfg.train.precision == "fp32":
        return None
    labels = case.effective * (case.tokens - 1)
    return flops.of_rows([case.tokens] * case.effective, labels) / seconds / (card.tflops * 1e12)


if __name__ == "__main__":
    raise SystemExit(main())
