"""GGUF files of random models: llama.cpp reads them, and says what transformers says. Faults in a file are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from sftplay.errors import ConfigError, RunError
from sftplay.parity import by_llama_cpp
from sftplay.parity.engine import Question

gguf = pytest.importorskip("gguf", reason="needs make install EXTRAS=gguf")
pytest.importorskip("xllamacpp", reason="needs make install EXTRAS=gguf")

from gguf_models import FAMILIES, LLAMA3_ROPE, ROOT, ROWS, TOKENIZERS, YARN, make_model  # noqa: E402

from sftplay.export.gguf import families, vocabulary, write  # noqa: E402
from sftplay.export.gguf.write import file_bytes, list_types, write_gguf  # noqa: E402
from sftplay.parity import gguf_check  # noqa: E402
from sftplay.parity.gguf_check import make_texts  # noqa: E402

make = cache(make_model)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Threads that wait for each other on busy cores take longer than the small models themselves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def describe(tokenizer: Any) -> vocabulary.Vocabulary:
    return vocabulary.describe_vocabulary(tokenizer, rows=ROWS)


@cache
def questions(tokenizer: Any) -> list[list[int]]:
    asked = ["Say 12345 and hello", "What's the world's end?\n\nYes"]
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in asked
    ]


@cache
def reference(name: str, positions: int) -> tuple[Any, Any]:
    model, tokenizer = make(name)
    sequences = gguf_check.make_sequences(model, questions(tokenizer), positions=positions)
    return sequences, gguf_check.reference_logprobs(model, sequences)


def written(path: Path, name: str, *, quant: str = "f32", **changes: Any) -> Path:
    model, tokenizer = make(name)
    file = path / f"{name}-{quant}.gguf"
    write_gguf(model, replace(describe(tokenizer), **changes), file, quant=quant, name=name)
    return file


@pytest.mark.parametrize("name", [name if name in ("llama", "qwen3") else slow(name) for name in FAMILIES])
def test_llama_cpp_computes_a_random_model_of_each_family_as_transformers_does(name: str, tmp_path: Path):
    sequences, expected = reference(name, 200)
    found = gguf_check.check_scores(written(tmp_path, name), sequences, expected, quant="f32")
    assert found["positions"] >= 200
    assert found["same_tokens"] == found["positions"]
    assert found["max_kl"] < 1e-5  # the bound is 1e-4
    assert all(
        float(rows.exp().max(-1).values.mean()) < 0.9 for rows in expected
    )  # not sure of itself: KL says something


@pytest.mark.parametrize("name", ["llama", *map(slow, ("llama-biases", "mistral", "qwen2", "gemma3"))])
def test_llama_cpp_reads_a_thousand_texts_of_all_scripts_as_each_tokenizer_does(name: str, tmp_path: Path):
    _, tokenizer = make(name)
    own = [tokenizer.decode(ids) for ids in questions(tokenizer)]
    found = gguf_check.check_tokens(written(tmp_path, name), tokenizer, own, approximates="")
    assert (found["texts"], found["same"], found["own_same"]) == (1000, 1000, len(own))
    # Qwen composes characters, and llama.cpp does not: the other texts are the same as they stand.
    assert (found["not_composed"] > 0) == (name == "qwen2")


def test_the_texts_are_of_all_scripts_and_the_same_ones_each_time():
    texts = make_texts()
    assert texts == make_texts()
    assert len(texts) == 1000
    assert len({chr(ord(letter) & ~0x7F) for text in texts for letter in text}) > 150  # blocks of 128 code points
    for needed in ("\r\n", "\u200d", "\u0301", "they've", "12", "     ", "\t"):
        assert any(needed in text for text in texts)


BOUNDED = {"f16": 0.6, "bf16": 0.6, "q8_0": 0.35, "q6_k": 0.3, "q5_k_m": 0.27, "q4_k_m": 0.25}
"""Mixture -> its file is at most so large, relative to fp32's."""


@cache
def make_wide() -> tuple[Any, Any]:
    """A model with rows of 256 values, as the K-quants need, and 8 layers, of which some get more bits."""
    return make_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=8, initializer_range=0.06)


@pytest.fixture(scope="module")
def wide() -> tuple[Any, Any, Any, Any]:
    """`make_wide` with its greedy answers and what it says of them."""
    model, tokenizer = make_wide()
    sequences = gguf_check.make_sequences(model, questions(tokenizer), positions=50)
    return model, tokenizer, sequences, gguf_check.reference_logprobs(model, sequences)


@pytest.mark.parametrize("quant", list(map(slow, BOUNDED)))
def test_a_quantised_file_is_small_and_within_its_bound(quant: str, wide: Any, tmp_path: Path):
    model, tokenizer, sequences, expected = wide
    file = tmp_path / "wide.gguf"
    write_gguf(model, describe(tokenizer), file, quant=quant, name="wide")
    found = gguf_check.check_scores(file, sequences, expected, quant=quant)
    assert 0 < found["mean_kl"] < gguf_check.BOUNDS[quant]
    assert file_bytes(model, quant) < file.stat().st_size < BOUNDED[quant] * file_bytes(model, "f32")


def test_the_mixture_of_q4_k_m_is_that_of_llama_quantize():
    """`llama-quantize` of llama.cpp: half of attn_v and ffn_down in Q6_K, the head too, norms in fp32, rest Q4_K."""
    kinds = {name: kind.name for name, _, kind in list_types(make_wide()[0], "q4_k_m")}
    better = [layer for layer in range(8) if kinds[f"blk.{layer}.attn_v.weight"] == "Q6_K"]
    # use_more_bits of 8 layers: the first eighth, the last eighth, each third from the second on
    assert better == [0, 3, 6, 7]
    assert [kinds[f"blk.{layer}.ffn_down.weight"] == "Q6_K" for layer in range(8)] == [
        layer in better for layer in range(8)
    ]
    assert kinds["output.weight"] == "Q6_K"
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_K"
    assert kinds["output_norm.weight"] == "F32"


@pytest.mark.parametrize(("kind", "error"), [("Q4_K", 0.085), ("Q5_K", 0.045), ("Q6_K", 0.022)])
def test_blocks_of_llama_cpp_are_read_back_by_the_package_gguf_near_what_they_were(kind: str, error: float):
    values = np.random.default_rng(0).normal(size=(4, 3, 512)).astype(np.float32)
    kept = write.quantize(values, gguf.GGMLQuantizationType[kind], name="x")
    found = gguf.quants.dequantize(kept, gguf.GGMLQuantizationType[kind])
    assert found.shape == values.shape
    assert float(np.sqrt(((found - values) ** 2).mean())) < error  # of values with a deviation of 1


def test_values_that_a_format_cannot_hold_are_refused():
    values = np.full((2, 32), 1e6, dtype=np.float32)
    with pytest.raises(RunError, match="F16 cannot hold"):
        write.quantize(values, gguf.GGMLQuantizationType.F16, name="x")
    with pytest.raises(RunError, match="cannot hold"):
        write.quantize(np.full((2, 32), np.nan, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0, name="x")


# Planted faults: each must be caught.


def without_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "permute", lambda values, heads: values)


def without_norm_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        families.FAMILIES, "Gemma3ForCausalLM", replace(families.FAMILIES["Gemma3ForCausalLM"], norm_offset=0.0)
    )


def with_another_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_add_rope_scaling", lambda *_: None)


@pytest.mark.parametrize(
    ("name", "plant", "quant"),
    [
        ("llama", without_permutation, "f32"), slow("mistral", without_permutation, "q8_0"),
        slow("mistral", without_permutation, "f32"), slow("gemma3", without_norm_offset, "f32"),
        slow("gemma3", without_norm_offset, "q4_k_m"),
        slow("qwen2", with_another_rope, "f32"), slow("gemma3", with_another_rope, "f32"),
    ],
)  # fmt: skip
def test_a_planted_fault_of_the_weights_is_caught(
    name: str, plant: Callable[[pytest.MonkeyPatch], None], quant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sequences, expected = reference(name, 40)
    plant(monkeypatch)
    with pytest.raises(RunError, match="answers otherwise than the model"):
        gguf_check.check_scores(written(tmp_path, name, quant=quant), sequences, expected, quant=quant)


@pytest.mark.parametrize(
    ("name", "pre"), [("llama", "qwen2"), slow("qwen2", "gpt-2"), slow("mistral", "gpt-2"), slow("llama", "default")]
)
def test_another_pre_tokenizer_is_caught(name: str, pre: str, tmp_path: Path):
    _, tokenizer = make(name)
    with pytest.raises(RunError, match="as other tokens: at token"):
        gguf_check.check_tokens(written(tmp_path, name, pre=pre), tokenizer, [], approximates="")


@pytest.mark.slow
def test_a_rule_without_a_name_is_delivered_only_where_most_texts_have_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """builtin:tiny splits digits in pairs, which llama.cpp has no name for."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data" / "base" / "tiny")
    model, _ = make_model("qwen3", vocab_size=len(tokenizer))
    words = vocabulary.describe_vocabulary(tokenizer, rows=len(tokenizer))
    assert r"\p{N}{1,2}" in words.approximates
    file = tmp_path / "x.gguf"
    write_gguf(model, words, file, quant="f32", name="x")
    found = gguf_check.check_tokens(file, tokenizer, ["Born on 17 November 1996."], approximates=words.approximates)
    assert 750 < found["same"] < 1000
    assert (found["own_texts"], found["own_same"]) == (1, 1)
    with pytest.raises(RunError, match="of 1,000 texts"):
        gguf_check.check_tokens(file, tokenizer, [], approximates="")
    monkeypatch.setattr(gguf_check, "LEAST_SAME", 0.9)
    with pytest.raises(RunError, match="of 1,000 texts") as refusal:
        gguf_check.check_tokens(file, tokenizer, [], approximates=words.approximates)
    assert "LLAMA_CPP=" in refusal.value.fix


def test_another_chat_template_is_caught(tmp_path: Path):
    _, tokenizer = make("qwen3")
    template = tokenizer.chat_template
    assert gguf_check.check_template(written(tmp_path, "qwen3"), tokenizer) == 3
    with pytest.raises(RunError, match="the model learned"):
        gguf_check.check_template(written(tmp_path, "qwen3", chat_template=template.replace("\\n", " ")), tokenizer)


# Refused by name.


def test_an_unknown_architecture_and_a_value_that_llama_cpp_does_not_compute_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"GPT2LMHeadModel is not among .* Llama, Mistral, Qwen2, Qwen3, Qwen3Moe, Gemma3"
    ) as refusal:
        families.find_family(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9)))
    assert "LLAMA_CPP=" in refusal.value.fix
    model, _ = make_model("llama", hidden_act="gelu")
    with pytest.raises(ConfigError, match="hidden_act is 'gelu'"):
        families.find_family(model)


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window is True"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3-moe", {"attention_bias": True}, "attention_bias is True"),
        ("gemma3", {"attention_bias": True}, "attention_bias is True"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
    ],
)  # fmt: skip
def test_a_setting_that_llama_cpp_does_not_compute_is_refused_by_name(name: str, changes: dict[str, Any], what: str):
    model, _ = make_model(name, **changes)
    with pytest.raises(ConfigError, match=what) as refusal:
        families.find_family(model)
    assert "LLAMA_CPP=" in refusal.value.fix


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("qwen2", YARN | {"attention_factor": 1.3}),
        ("qwen3", LLAMA3_ROPE),
    ],
)  # fmt: skip
def test_a_rope_that_has_no_key_is_refused(name: str, rope: dict[str, Any], tmp_path: Path):
    model, tokenizer = make_model(name, rope_parameters=rope)
    with pytest.raises(ConfigError, match="no key for this rope"):
        write_gguf(model, describe(tokenizer), tmp_path / "x.gguf", quant="f32", name="x")


def test_a_tokenizer_that_is_not_of_the_fast_kind_is_refused():
    with pytest.raises(ConfigError, match="ByT5Tokenizer is not written as GGUF"):
        describe(ByT5Tokenizer())


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows_is_refused():
    with pytest.raises(ConfigError, match="and the model has 100 rows of embeddings"):
        vocabulary.describe_vocabulary(TOKENIZERS["qwen2"](), rows=100)


def test_a_mixture_that_is_not_written_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="'q4_k_s' is not written here") as refusal:
        write.check_quants(("f16", "q4_k_s"))
    assert refusal.value.fix == "did you mean 'q4_k_m'? (llama-quantize makes others of the f16 file)"
    with pytest.raises(ConfigError) as refusal:
        write.check_quants(("zz",))
    assert refusal.value.fix == "choose one of these (llama-quantize makes others of the f16 file)"


@pytest.mark.parametrize(("windows", "what"), [((1, 2), "no period"), ((), "no window")])
def test_layers_whose_windows_llama_cpp_does_not_compute_are_refused(windows: tuple[int, ...], what: str):
    kinds = ["sliding_attention" if layer in windows else "full_attention" for layer in range(4)]
    model, tokenizer = make_model("gemma3", num_hidden_layers=4, layer_types=kinds)
    with pytest.raises(ConfigError, match=what):
        write_gguf(model, describe(tokenizer), Path("/nowhere/x.gguf"), quant="f32", name="x")


def test_mistrals_window_bounds_the_context_that_llama_cpp_may_use():
    model, _ = make_model("mistral", sliding_window=100)
    assert families.find_context(model.config) == 100
    assert families.find_context(make("mistral")[0].config) == 512


# The engine.


def test_llama_cpp_answers_dialogues_and_texts_as_transformers_does(tmp_path: Path):
    model, tokenizer = make("mistral")
    messages = [{"role": "user", "content": "Count from one to five"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    plain = tokenizer("Once upon a time").input_ids
    asked = [Question(0, messages, tokenizer.decode(ids), ids), Question(1, None, "Once upon a time", plain)]
    reply = by_llama_cpp.answer_all(written(tmp_path, "mistral"), asked, max_new_tokens=12)
    assert reply.version.startswith("xllamacpp ")
    assert reply.template == tokenizer.chat_template
    for answer, prompt in zip(reply.answers, (ids, plain), strict=True):
        assert list(answer.prompt_ids) == list(prompt)
        with torch.inference_mode():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)[
                0, len(prompt) :
            ]
            scores = (
                model(torch.cat([torch.tensor(prompt), expected])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            )
        assert list(answer.answer_ids) == expected.tolist()
        assert answer.logprobs == pytest.approx(scores.gather(1, expected[:, None])[:, 0].tolist(), abs=1e-4)


def test_a_file_that_llama_cpp_cannot_open_ends_with_its_message_and_not_with_this_process(tmp_path: Path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(RunError, match=r"llama\.cpp ended with"):
        by_llama_cpp.tokenize_all(file, ["a"])


def test_the_last_line_of_a_process_that_names_no_error_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho loading\necho out of luck\nexit 137\n")
    program.chmod(0o755)
    monkeypatch.setattr(by_llama_cpp.sys, "executable", str(program))
    with pytest.raises(RunError) as caught:
        by_llama_cpp.ask_llama_cpp(program, {})
    assert caught.value.what == "llama.cpp ended with 137: out of luck"


def test_scores_that_are_no_numbers_are_not_taken_for_the_same():
    reference = torch.full((4,), torch.nan)
    assert not gguf_check.divergence(reference, dict.fromkeys(range(4), -1.4)) <= 1.0


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path):
    with pytest.raises(RunError, match=r"has not answered in 0\.01 s"):
        by_llama_cpp.ask_llama_cpp(written(tmp_path, "qwen2"), {"texts": ["a"]}, deadline_s=0.01)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_each_id_has_a_token_of_its_own_and_rows_without_one_are_unused(name: str):
    tokenizer = TOKENIZERS[name]()
    found = describe(tokenizer)
    assert len(found.tokens) == len(set(found.tokens)) == len(found.kinds) == ROWS
    unused = [number for number, kind in enumerate(found.kinds) if kind == gguf.TokenType.UNUSED]
    assert unused == list(range(len(tokenizer), ROWS))
    control = {number for number, kind in enumerate(found.kinds) if kind == gguf.TokenType.CONTROL}
    assert control == set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}
