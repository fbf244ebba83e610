"""Real runs with unsloth, through the command line, on a model made here; needs the environment of `make test-unsloth`.

The tests themselves never import unsloth: what it left is judged by the plain libraries.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe

PROBLEM = probe().unsloth_problem
pytestmark = [
    pytest.mark.unsloth,
    pytest.mark.skipif(bool(PROBLEM), reason=f"needs the environment that `make test-unsloth` builds: {PROBLEM}"),
]
STEPS = 24


@pytest.fixture
def run(sftplay: Callable[..., CompletedProcess[str]], write_config: Callable[..., Path], tmp_path: Path) -> Any:
    """Trains by a backend in a run of that name: the folder, after checking that it ended well."""

    def train(backend: str, *words: str, **changes: Any) -> RunFolder:
        # The head trains too: behind a random frozen one an adapter of this size can learn next to nothing.
        learns = {"train__max_steps": STEPS, "tuning__lora__modules_to_save": ["lm_head"]}
        config = write_config(f"{backend}.yaml", run_name=backend, **learns, **changes)
        done = sftplay("train", "--config", config, f"tuning.backend={backend}", *words)
        assert done.returncode == 0, done.stderr + done.stdout
        return RunFolder(tmp_path / "outputs" / backend)

    return train


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def mean_loss(model: Any, tokenizer: Any, rows: Path) -> float:
    """Per token of the assistant's turns, as the template marks them: by transformers alone."""
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"], torch.as_tensor(encoded["assistant_masks"]).reshape(1, -1).bool()
        with torch.no_grad():
            scores = model(input_ids=ids).logits[0, :-1]
        wanted = ids[0, 1:][mask[0, 1:]]
        total += float(torch.nn.functional.cross_entropy(scores[mask[0, 1:]], wanted, reduction="sum"))
        count += len(wanted)
    return total / count


def test_lora_by_unsloth_learns_and_plain_peft_loads_what_it_learned(run: Any, tiny_llama: Path, chat_rows: Path):
    folder = run("unsloth")
    trained_losses = losses(folder)
    assert len(trained_losses) == STEPS
    assert sum(trained_losses[-4:]) / 4 < 0.75 * trained_losses[0]
    log_text = (folder.logs / "rank0.log").read_text()
    assert "Starting new LoRA (unsloth) run" in log_text
    assert log_text.count("Unsloth 2026") == 1  # it names itself when it is imported
    assert "unsloth" in folder.read_json("manifest.json")["machine"]["libraries"]
    tokenizer = AutoTokenizer.from_pretrained(folder.path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    before = mean_loss(base, tokenizer, chat_rows)
    tuned = PeftModel.from_pretrained(base, str(folder.path / "adapter")).eval()
    after = mean_loss(tuned, tokenizer, chat_rows)
    print(f"\nloss by step: {' '.join(f'{loss:.3f}' for loss in trained_losses)}")
    print(f"plain PEFT, tokens of the answers: base {before:.3f}, with the adapter {after:.3f}")
    assert before == pytest.approx(trained_losses[0], rel=0.05)
    assert after == pytest.approx(sum(trained_losses[-4:]) / 4, rel=0.05)


def test_qlora_by_unsloth_holds_the_base_in_4_bits_and_learns(run: Any):
    folder = run("unsloth", "tuning.mode=qlora", "train.gradient_checkpointing=true")
    model, trained_losses = folder.read_json("manifest.json")["model"], losses(folder)
    print(f"\nloss by step: {' '.join(f'{loss:.3f}' for loss in trained_losses)}; {model}")
    assert model["four_bit_layers"] == 14
    assert model["trainable_dtypes"] == ["float32"]
    assert sum(trained_losses[-4:]) / 4 < 0.8 * trained_losses[0]
