"""The short script a TRL user writes for the same DPO run; argv: each-step|precomputed. Measured by preference.py."""

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
from trl import DPOConfig, DPOTrainer

from benchmarks.material import SEED


class Clock(TrainerCallback):
    """Notes the CPU seconds of training. The reference that is computed before it counts, as ours does."""

    def on_train_end(self, args, state, control, **_):
        self.train_cpu_s = time.process_time() - self.cpu_began


job = json.loads(os.environ["BENCH_JOB"])
out = Path(os.environ["BENCH_OUT"])
rows = load_dataset("json", data_files=job["rows"], split="train", cache_dir=str(out / "cache"))
clock = Clock()
set_seed(SEED)  # so that the adapter starts where ours does
lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(job["model"]),
    processing_class=AutoTokenizer.from_pretrained(job["model"]),
    train_dataset=rows,
    peft_config=lora if job["mode"] == "lora" else None,
    callbacks=[clock],
    args=DPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        seed=SEED,
        beta=0.1,
        precompute_ref_log_probs=sys.argv[1] == "precomputed",
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["step_pairs"] // job["micro_batch"],
        num_train_epochs=job["epochs"],
        learning_rate=job["rate"],
        lr_scheduler_type="cosine",
        max_length=job["max_length"],
        activation_checkpointing=False,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    ),
)
clock.cpu_began = time.process_time()
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
(out / "told.json").write_text(json.dumps({"train_cpu_s": clock.train_cpu_s, "losses": losses}))
