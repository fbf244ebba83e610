"""Figures of a model, compared with plain torch, plain generation and the metrics' own libraries."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Inputs, sized, written_config
from lively import lively_model
from plain_loss import mean_loss
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import CHRF
from transformers import AutoModelForCausalLM, AutoTokenizer, OpenAIGPTConfig

from sftplay.data.pipeline import load_examples
from sftplay.evaluate import evaluate as measuring
from sftplay.evaluate.evaluate import evaluate, held_out_loss, ready_to_answer, score_answers
from sftplay.generate.generate import Generator, answer_all, stream_answer
from sftplay.model.recomputation import is_recomputing, recomputation

END = 2
"""Id of <|im_end|> in the tiny tokenizer."""


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    """A model whose answers depend on every token of the prompt and end at different lengths."""
    return lively_model(tiny_llama)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    torch.manual_seed(1)
    return [torch.randint(3, 400, (n,)).tolist() for n in (9, 2, 25, 1, 14, 9, 3, 18, 30, 5)]


def plain_answer(model: Any, tokenizer: Any, prompt: list[int], tokens: int, ends: set[int]) -> str:
    """Greedy decoding by hand: the likeliest token, again and again, without cache, mask or padding."""
    ids = list(prompt)
    for _ in range(tokens):
        with torch.no_grad():
            nearest = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        ids.append(nearest)
        if nearest in ends:
            break
    return tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True)


@pytest.mark.parametrize(
    "shipped",
    [
        {"repetition_penalty": 5.0},
        {"do_sample": True, "temperature": 5.0, "top_k": 400},
        {"min_new_tokens": 12},
    ],
)
def test_settings_shipped_with_a_model_change_no_answer(
    shipped: dict[str, Any], model: Any, tokenizer: Any, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    generator = Generator(model, tokenizer, [END, *range(300, 400)], 12)
    plain = answer_all(generator, prompts, batch_size=4)
    for key, value in shipped.items():
        monkeypatch.setattr(model.generation_config, key, value)
    config = model.generation_config
    assert answer_all(generator, prompts, batch_size=4) == plain
    assert ["".join(stream_answer(generator, prompt)) for prompt in prompts] == plain
    assert model.generation_config is config


def test_end_tokens_shipped_with_a_model_end_an_answer(model: Any, tokenizer: Any, prompts: list[list[int]]):
    with torch.no_grad():
        out = model.generate(torch.tensor([prompts[0]]), max_new_tokens=6, do_sample=False, eos_token_id=399)
    second = int(out[0, len(prompts[0]) + 1])
    for shipped, expected in (([second, 7], {END, 7, second}), (0, {0, END}), (None, {END})):
        other = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=shipped))
        assert Generator(other, tokenizer, [END], 6).greedy().eos_token_id == sorted(expected)


def test_stream_that_fails_ends_with_the_error_instead_of_waiting(model: Any, tokenizer: Any):
    with pytest.raises(IndexError):
        list(stream_answer(Generator(model, tokenizer, [END], 4), [10_000]))


def plain_loss(model: Any, rows: Any) -> float:
    pairs = zip(rows["input_ids"], rows["labels"], strict=True)
    return mean_loss(model, ({"input_ids": ids, "labels": labels} for ids, labels in pairs))


def make_rows(lengths: list[int]) -> dict[str, list[list[int]]]:
    torch.manual_seed(2)
    ids = [torch.randint(3, 400, (n,)).tolist() for n in lengths]
    return {"input_ids": ids, "labels": [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]}


@pytest.mark.parametrize("room", [8192, 40, 1])
def test_held_out_loss_weighs_every_label_token_the_same_however_rows_are_put_together(
    room: int, model: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(measuring, "LOSS_TOKENS", room)
    rows = make_rows([40, 3, 12, 25, 5, 60, 8])
    assert held_out_loss(model, rows, pad_token_id=0) == pytest.approx(plain_loss(model, rows), rel=1e-5)


ANSWERS = ["the river", " old boats carry salt\n", "seven", "", "green Light"]
REFERENCES = ["the river", "old boats carry  salt", "seven stones", "why", "green light"]


def test_metrics_are_those_of_their_libraries():
    means, correct = score_answers(ANSWERS, REFERENCES, metrics=["exact_match", "rouge_l", "chrf"])
    pairs = [(a.strip(), r.strip()) for a, r in zip(ANSWERS, REFERENCES, strict=True)]
    assert correct == [True, False, False, False, False]
    assert means["exact_match"] == pytest.approx(1 / 5)
    rouge = RougeScorer(["rougeL"], use_stemmer=False)
    assert means["rouge_l"] == pytest.approx(sum(rouge.score(r, a)["rougeL"].fmeasure for a, r in pairs) / 5)
    assert means["chrf"] == pytest.approx(sum(CHRF().sentence_score(a, [r]).score for a, r in pairs) / 500)


def test_evaluation_writes_figures_and_every_answer(inputs: Inputs, tmp_path: Path, model: Any, tokenizer: Any):
    cfg = sized(written_config(tmp_path, inputs, eval__limit=5, eval__metrics=["exact_match", "rouge_l", "chrf"]))
    examples = load_examples(cfg, tokenizer)
    figures = evaluate(model, examples, cfg=cfg, path=tmp_path / "eval" / "after.json")
    assert json.loads((tmp_path / "eval" / "after.json").read_text()) == figures
    assert list(figures) == ["n", "loss", "perplexity", "exact_match", "rouge_l", "chrf"]
    assert figures["loss"] == pytest.approx(plain_loss(model, examples.held_out), rel=1e-5)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    rows = [json.loads(line) for line in (tmp_path / "eval" / "after.jsonl").read_text().splitlines()]
    asked = [json.loads(line)["messages"] for line in inputs.held_out.read_text().splitlines()]
    chosen = [asked[i * 12 // 5] for i in range(5)]
    assert figures["n"] == len(rows) == 5
    assert [row["row"] for row in rows] == list(range(5))
    assert [row["prompt"] for row in rows] == [turns[0]["content"] for turns in chosen]
    assert [row["reference"] for row in rows] == [turns[1]["content"] for turns in chosen]
    prompts = [
        tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False) for turns in chosen
    ]
    assert [row["prediction"] for row in rows] == [plain_answer(model, tokenizer, p, 4, {END}) for p in prompts]
    assert all(row["correct"] == (row["prediction"].strip() == row["reference"].strip()) for row in rows)


def test_held_out_texts_without_a_prompt_are_measured_by_their_loss_alone(
    inputs: Inputs, tmp_path: Path, model: Any, tokenizer: Any
):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{n} old boats carry salt"}) + "\n" for n in range(3)))
    cfg = sized(written_config(tmp_path, inputs, data__val_path=str(texts)))
    examples = load_examples(cfg, tokenizer)
    figures = evaluate(model, examples, cfg=cfg, path=tmp_path / "eval" / "after.json")
    assert figures == {"n": 0, "loss": pytest.approx(plain_loss(model, examples.held_out), rel=1e-5), "perplexity":
        pytest.approx(math.exp(figures["loss"]))}  # fmt: skip
    assert (tmp_path / "eval" / "after.jsonl").read_text() == ""


TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}{{ '<|im_start|>' + call['function']['name'] + "
    "(call['function']['arguments'] | tojson) }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""A call is marked by a special token, as in Mistral's and Llama's templates."""


def test_a_call_is_compared_with_what_the_template_writes_for_it(
    inputs: Inputs, tmp_path: Path, model: Any, tokenizer: Any
):
    template, rows = tmp_path / "tools.jinja", tmp_path / "calls.jsonl"
    template.write_text(TOOLS_TEMPLATE)
    function = {"name": "boats", "description": "count", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    call = {"id": "c1", "type": "function", "function": {"name": "boats", "arguments": {"salt": 7}}}
    turns = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows.write_text(json.dumps({"messages": turns, "tools": tools}) + "\n")
    changes = {"data__val_path": str(rows), "data__template": str(template), "model__max_seq_len": 512}
    cfg = sized(written_config(tmp_path, inputs, **changes))
    examples = load_examples(cfg, tokenizer)
    evaluate(model, examples, cfg=cfg, path=tmp_path / "eval" / "after.json")
    (answered,) = (json.loads(line) for line in (tmp_path / "eval" / "after.jsonl").read_text().splitlines())
    assert (answered["prompt"], answered["reference"]) == ("why", 'boats{"salt": 7}')


def test_model_is_left_as_it_was(inputs: Inputs, tmp_path: Path, model: Any):
    cfg = sized(written_config(tmp_path, inputs))
    model.train()
    model.config.use_cache = False
    getattr(model, f"{recomputation()}_enable")()
    with ready_to_answer(model, cfg):
        assert not model.training
        assert model.config.use_cache
        assert not is_recomputing(model)
    assert model.training
    assert not model.config.use_cache
    assert is_recomputing(model)
    getattr(model, f"{recomputation()}_disable")()
    model.eval()


def test_a_model_whose_config_says_nothing_of_a_cache_is_measured(inputs: Inputs, tmp_path: Path):
    cfg = sized(written_config(tmp_path, inputs))
    config = OpenAIGPTConfig(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = AutoModelForCausalLM.from_config(config)
    assert not hasattr(model.config, "use_cache")
    with ready_to_answer(model, cfg):
        assert not model.training


def test_a_kill_between_the_two_files_of_a_measurement_leaves_no_figures_without_answers(
    tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
):
    cfg = sized(written_config(tmp_path, inputs))
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(cfg.model.name),
        AutoTokenizer.from_pretrained(cfg.model.name),
    )
    examples, path, write = load_examples(cfg, tokenizer), tmp_path / "before.json", measuring.write_text

    def write_and_die(target: Path, text: str) -> None:
        write(target, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "write_text", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, examples, cfg=cfg, path=path)
    assert not path.exists()  # else no later start would measure again
    assert path.with_suffix(".jsonl").exists()
