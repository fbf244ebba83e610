"""The script that a TRL user writes for a run of task grpo; argv: a job file. Measured by grpo.py.

The rewards are the kit's own, so that both contestants pay alike, and for the same price.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(job: dict) -> None:
    import torch  # in here, because the rewards' processes import this file
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from sftplay.config.load import load_resolved
    from sftplay.launch.command import one_gpu_environment
    from sftplay.machine.probe import probe
    from sftplay.model.recomputation import recomputation_arguments
    from sftplay.reward.reward_set import RewardSet, combined

    cfg = load_resolved(Path(job["config"]))
    os.environ.update(one_gpu_environment(probe().gpus))  # TRL takes one
    told = {"seconds": [], "rewards": []}

    class Clock(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            self.last, self.cpu = time.perf_counter(), time.process_time()

        def on_log(self, args, state, control, logs, **_):
            if "loss" in logs:  # from line to line, as the kit measures
                now = time.perf_counter()
                told["seconds"].append(now - self.last)
                self.last = now

        def on_train_end(self, args, state, control, **_):
            told["cpu_seconds"] = time.process_time() - self.cpu

    def pay(completions, **columns):
        known = {name: columns[name] for name in job["columns"]}  # TRL hands over more than the data's columns
        paid = combined(reward_set.score(completions, known), reward_set.weights)
        told["rewards"].append(sum(paid) / len(paid))
        return paid

    with RewardSet(cfg) as reward_set:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                job["model"], dtype=torch.float32, attn_implementation=cfg.model.attn
            ),
            processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
            reward_funcs=pay,
            train_dataset=Dataset.from_list(job["rows"]),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=job["out"],
                use_cpu=not torch.cuda.is_available(),
                bf16=cfg.train.precision == "bf16",
                fp16=cfg.train.precision == "fp16",
                seed=cfg.seed,
                per_device_train_batch_size=int(cfg.train.batch_size),
                gradient_accumulation_steps=int(cfg.train.grad_accum),
                max_steps=cfg.train.max_steps,
                learning_rate=cfg.train.learning_rate,
                lr_scheduler_type="constant",
                weight_decay=cfg.train.weight_decay,
                max_grad_norm=cfg.train.max_grad_norm,
                optim="adamw_torch_fused",
                num_generations=cfg.grpo.num_generations,
                max_completion_length=cfg.grpo.max_completion_length,
                **recomputation_arguments(recomputes=False),
                shuffle_dataset=False,
                logging_steps=1,
                save_strategy="steps",
                save_steps=cfg.train.save_steps,
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    told["tokens"] = [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]
    (Path(job["out"]) / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
