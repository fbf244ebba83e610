"""New tokens as a user has them: make train, on one process and on two, make merge, make merge-test."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from domain import domain_texts, write_terms, write_texts
from processes import HANG_S
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
output_dir: {home}/outputs
model: {{name: "builtin:tiny", max_seq_len: 128}}
train: {{max_steps: 4, effective_batch_size: 8, learning_rate: 0.01}}
data: {{train_path: {home}/rows.jsonl, processed_dir: {home}/processed, split: 0.1}}
logging: {{steps: 1, backend: none}}
"""


def make(python: Path, *words: str) -> str:
    argv = ["make", *words, "READY=", f"PY={python}"]
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=HANG_S, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("builtin_tiny")
def test_make_train_with_new_tokens_and_what_is_made_of_the_run(tmp_path: Path, forked_python: Path):
    write_texts(tmp_path / "rows.jsonl", 200, seed=1)
    (tmp_path / "run.yaml").write_text(CONFIG.format(home=tmp_path))
    config, wish = f"CONFIG={tmp_path}/run.yaml", f"tuning.new_tokens.path={write_terms(tmp_path / 'terms.txt')}"
    said = make(forked_python, "train", config, f"ARGS={wish} run_name=one")
    assert "50 new tokens: the texts of" in said
    make(forked_python, "train-distributed", config, "NPROC=2", f"ARGS={wish} run_name=two")
    metrics = [(tmp_path / "outputs" / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two")]
    one, two = ([json.loads(line)["loss"] for line in lines] for lines in metrics)
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-4)
    make(forked_python, "merge", config, "RUN=two")
    assert "greedy texts equal" in make(forked_python, "merge-test", config, "RUN=two")
    merged = tmp_path / "outputs" / "two" / "merged"
    whole, tokenizer = (each.from_pretrained(merged) for each in (AutoModelForCausalLM, AutoTokenizer))
    assert whole.get_input_embeddings().weight.shape[0] == len(tokenizer) == 768 + 50
    assert whole.config.tie_word_embeddings
    plain = AutoTokenizer.from_pretrained(tmp_path / "outputs" / "two" / "base")
    assert len(plain) == len(tokenizer)
    for text in domain_texts(5, seed=8):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
