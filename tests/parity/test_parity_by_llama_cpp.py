"""`parity` of a GGUF file by llama.cpp: the written file agrees, and what is wrong in another one is named."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from in_process import Finished, Inputs, train
from lively import lively_model
from small_run import WORDS
from test_parity import ask
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.export.merge import merge

pytestmark = [
    pytest.mark.skipif(
        not (find_spec("xllamacpp") and find_spec("gguf")), reason="needs llama.cpp: make install EXTRAS=gguf"
    ),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory, verbs_environment: None) -> Finished:
    """A run that trains an adapter and the head, on a lively base, and its merged model."""
    home = tmp_path_factory.mktemp("parity-gguf")
    base = Path(shutil.copytree(inputs.model, home / "base"))
    lively_model(base).save_pretrained(base)
    learn_years(base)
    lora = {"r": 4, "modules_to_save": ["lm_head"]}
    done = train(home, Inputs(base, inputs.train, inputs.held_out), train__learning_rate=0.05, tuning__lora=lora)
    merge(done.cfg, done.folder, out=done.folder.path / "merged")
    return done


def learn_years(base: Path) -> None:
    """Give the tokenizer of `base` whole years: rules that split numbers after three digits read these otherwise."""
    rng = random.Random(0)
    texts = [f"{' '.join(rng.choices(WORDS, k=8))} in {rng.randint(1990, 2009)}" for _ in range(600)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    trained = tokenizer.train_new_from_iterator(texts, 400)
    trained.save_pretrained(base)
    assert len(trained("in 1999").input_ids) <= 3


def write(run: Finished, path: Path, *, quant: str = "f32", change: Callable[[Any, Any], Any] | None = None) -> Path:
    """A GGUF file of the merged model; `change` gets model and vocabulary, and returns a vocabulary."""
    from sftplay.export.gguf.vocabulary import describe_vocabulary
    from sftplay.export.gguf.write import write_gguf

    merged = run.folder.path / "merged"
    model = AutoModelForCausalLM.from_pretrained(merged)
    vocabulary = describe_vocabulary(AutoTokenizer.from_pretrained(merged), rows=model.config.vocab_size, end_ids=[2])
    vocabulary = change(model, vocabulary) if change else vocabulary
    write_gguf(model, vocabulary, path, quant=quant, name="run")
    return path


@pytest.mark.parametrize(("quant", "bound"), [("f32", 1e-4), ("f16", 0.05), ("q8_0", 0.4)])
def test_a_written_file_answers_as_the_trained_model(quant: str, bound: float, run: Finished, tmp_path: Path):
    file = write(run, tmp_path / "run.gguf", quant=quant)
    code, found = ask(run, "--engine", "llama.cpp", "--served", str(file))
    assert (code, found["cause"], found["bound"]) == (0, None, bound)
    assert found["same_prompt_ids"] == 6
    assert found["max_logprob_diff"] < bound
    assert found["adapter_changes_answers"] is True
    print(quant, found["max_logprob_diff"], found["same_answer_ids"])


def leave_unpermuted(model: Any, vocabulary: Any) -> Any:
    """The converter's permutation undone before it is made."""
    from sftplay.parity.gguf_causes import permute

    for name, value in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            twice = permute(permute(value.data, 8), 8)  # of heads of 8 rows, three times is none at all
            value.data = twice
    return vocabulary


def set_pre_tokenizer(model: Any, vocabulary: Any) -> Any:
    return replace(vocabulary, pre="llama-bpe")


def set_template(model: Any, vocabulary: Any) -> Any:
    return replace(vocabulary, chat_template=vocabulary.chat_template.replace("<|im_start|>", "<|im_start|> ", 1))


def set_old_head(model: Any, vocabulary: Any) -> Any:
    model.lm_head.weight.data.mul_(0.7)
    return vocabulary


def set_theta(model: Any, vocabulary: Any) -> Any:
    model.config.rope_parameters["rope_theta"] = 500.0
    return vocabulary


def set_end(model: Any, vocabulary: Any) -> Any:
    return replace(vocabulary, special={**vocabulary.special, "eos": 5, "eot": 5})


FAULTS = {
    leave_unpermuted: "q and k are not permuted for llama.cpp's rotary embedding (4 tensors, blk.0.attn_q.weight",
    set_pre_tokenizer: "the pre-tokenizer 'llama-bpe' (tokenizer 'gpt2') splits texts otherwise",
    set_template: "the chat template differs at character",
    set_old_head: "output.weight differs",
    set_theta: "llama.rope.freq_base is 500, the run's 10000",
    set_end: "the file ends answers at [5, 5], training at 2",
}


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_file_that_is_not_the_trained_model_is_refused_with_its_fault(
    change: Callable[[Any, Any], Any], run: Finished, tmp_path: Path
):
    file = write(run, tmp_path / "run.gguf", change=change)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "in 1999 the old boats"}\n{"prompt": "seven quiet hills"}\n')
    code, found = ask(run, "--engine", "llama.cpp", "--served", str(file), "--in", str(rows))
    assert code == 5
    assert FAULTS[change] in found["cause"]
