"""The short script a TRL user writes for the same run; argv: padded|packed. Measured by overhead.py."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from benchmarks.material import MAX_LENGTH, MICRO_BATCH, PACKED_ROWS, SEED, STEP_ROWS


class Clock(TrainerCallback):
    """Notes when training begins, when the first step is done, and when it ends."""

    def on_train_begin(self, args, state, control, **_):
        self.cpu_began = time.process_time()

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 1:
            self.first_step_s = time.time() - float(os.environ["BENCH_STARTED"])

    def on_train_end(self, args, state, control, **_):
        self.train_cpu_s = time.process_time() - self.cpu_began


layout = sys.argv[1]
out = Path(os.environ["BENCH_OUT"])
rows = load_dataset("json", data_files=os.environ["BENCH_ROWS"], split="train", cache_dir=str(out / "cache"))
clock = Clock()
set_seed(SEED)  # so that the adapter starts where ours does
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(os.environ["BENCH_MODEL"]),
    processing_class=AutoTokenizer.from_pretrained(os.environ["BENCH_MODEL"]),
    train_dataset=rows,
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    callbacks=[clock],
    args=SFTConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        seed=SEED,
        per_device_train_batch_size=MICRO_BATCH if layout == "padded" else 1,
        gradient_accumulation_steps=STEP_ROWS // MICRO_BATCH if layout == "padded" else PACKED_ROWS,
        num_train_epochs=1,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_length=MAX_LENGTH,
        assistant_only_loss=True,
        packing=layout == "packed",
        activation_checkpointing=False,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
)
trainer.train()
trainer.save_model(str(out / "adapter"))
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
told = {"train_cpu_s": clock.train_cpu_s, "first_step_s": clock.first_step_s, "losses": losses}
(out / "told.json").write_text(json.dumps(told))
