"""A renderer travels to other processes as plain data; plain texts and very long ones are rendered too."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_reference import make_chat, shipped_templates
from processes import HANG_S
from tokenizers.processors import TemplateProcessing

from sftplay.data.records import Message, Record, Source, Text
from sftplay.data.render import masks
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import CHATML
from sftplay.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
WHERE = Source("rows.jsonl", 1)
IN_ANOTHER_PROCESS = """
import pickle, sys
from sftplay.data.render.render import Renderer
recipe, records, messages = pickle.load(open(sys.argv[1], "rb"))
renderer = Renderer.from_recipe(recipe)
prompt = renderer.prompt_ids(messages) if recipe.template else []
found = (renderer.render(records), prompt, renderer.end_token_ids, renderer.method, renderer.template_hash)
pickle.dump((found, sorted({name.split(".")[0] for name in sys.modules})), open(sys.argv[2], "wb"))
"""


RECORDS: list[Record] = [
    make_chat("One?", "First stone."),
    make_chat("One </s>?", "<think>\nhm\n</think>\n\nFirst.", "Two?", "Second <|im_end|>."),
    Text("It says </s>.", WHERE),
    make_chat("Hi \ufdd0?", "Ho."),
]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "gptoss", "glm4moe", "llava_next", "none"])
def test_renderer_of_a_recipe_renders_the_same_without_transformers_or_torch(
    modern_tokenizer: Any, tmp_path: Path, name: str
):
    template = {"chatml": CHATML, "none": None}.get(name) if name in ("chatml", "none") else shipped_templates()[name]
    renderer = Renderer.prove(modern_tokenizer, template, samples=[])
    messages = [Message("user", "What </s>?")]
    given, taken = tmp_path / "given", tmp_path / "taken"
    given.write_bytes(pickle.dumps((renderer.recipe(), RECORDS, messages)))
    subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, given, taken], cwd=ROOT, check=True, timeout=HANG_S)
    found, modules = pickle.loads(taken.read_bytes())
    prompt = renderer.prompt_ids(messages) if template else []
    here = (renderer.render(RECORDS), prompt, renderer.end_token_ids, renderer.method, renderer.template_hash)
    assert found == here
    assert {"transformers", "torch", "datasets", "pydantic"}.isdisjoint(modules)


def with_bos(tokenizer: Any) -> Any:
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def test_text_is_learned_whole_between_the_tokenizers_own_bos_and_one_eos(modern_tokenizer: Any):
    text = "Seven stones over a quiet hill."
    ids = modern_tokenizer(text, add_special_tokens=False)["input_ids"]
    eos = modern_tokenizer.eos_token_id
    (bare,) = Renderer.prove(modern_tokenizer, None, samples=[]).render([Text(text, WHERE)])
    assert (bare.input_ids, bare.labels) == ([*ids, eos], [*ids, eos])
    tokenizer = with_bos(modern_tokenizer)
    (found,) = Renderer.prove(tokenizer, CHATML, samples=[]).render([Text(text, WHERE)])
    assert found.input_ids == [*tokenizer(text)["input_ids"], eos]
    assert found.input_ids == [tokenizer.bos_token_id, *ids, eos]
    assert found.labels == [-100, *ids, eos]


def test_chat_without_a_template_has_a_problem_and_texts_go_on(modern_tokenizer: Any):
    renderer = Renderer.prove(modern_tokenizer, None, samples=RECORDS)
    chat, text = renderer.render([make_chat("Hi?", "Ho."), Text("A hill.", WHERE)])
    assert "no chat template" in chat.problem
    assert (text.problem, renderer.method) == ("", "none")
    assert renderer.end_token_ids == [modern_tokenizer.eos_token_id]
    with pytest.raises(DataError, match="no chat template"):
        renderer.prompt_ids([Message("user", "Hi?")])


@pytest.mark.parametrize("typed", ["", " </s>"])
def test_of_a_very_long_text_only_the_beginning_is_tokenised(
    modern_tokenizer: Any, typed: str, monkeypatch: pytest.MonkeyPatch
):
    assert (masks.SPARE_CHARACTERS, masks.CHARACTERS_A_TOKEN) == (1_000_000, 64)
    monkeypatch.setattr(masks, "SPARE_CHARACTERS", 20_000)
    sentence = "seven stones over a quiet hill "
    long = sentence * 6_000  # 186,000 characters; read are 20,000 + 64 * 512
    records: list[Record] = [
        make_chat("Say it.", long + typed, "Again?", "No."),
        Text(long + typed, WHERE),
        make_chat("Say it.", sentence + typed),
    ]
    renderer = Renderer.prove(modern_tokenizer, CHATML, samples=[])
    chat, text, short = renderer.render(records, max_tokens=512)
    whole = len(modern_tokenizer(long, add_special_tokens=False)["input_ids"])
    assert [example.n_tokens for example in (chat, text)] == pytest.approx([whole, whole], rel=0.05)
    assert (text.n_tokens % 1000, short.n_tokens) == (0, 0)
    beginning = modern_tokenizer(long[: 20_000 + 64 * 512], add_special_tokens=False)["input_ids"]
    assert text.input_ids == text.labels == beginning
    prompt = renderer.prompt_ids([Message("user", "Say it.")])
    assert chat.input_ids[:512] == [*prompt, *beginning][:512]
    assert len(chat.input_ids) > 512
    assert chat.labels[: len(prompt) + 1] == [*[-100] * len(prompt), beginning[0]]
    assert replace(short, record_index=0) == renderer.render(records[2:])[0]


def test_answer_text_is_what_the_template_writes_for_the_last_turn(modern_tokenizer: Any):
    chat = make_chat("One?", "First.", "Two?", " Second <|im_end|>. ")
    expected = {
        "chatml": "Second <|im_end|>.",
        "llama3": "Second <|im_end|>.",
        "qwen3": "<think>\n\n</think>\n\n Second <|im_end|>.",
        "gptoss": "<|channel|>final<|message|> Second <|im_end|>.",
        "glm4moe": "<think></think>\nSecond <|im_end|>.",
    }
    for name, text in expected.items():
        template = CHATML if name == "chatml" else shipped_templates()[name]
        assert Renderer.prove(modern_tokenizer, template, samples=[]).answer_text(chat) == text, name


def test_eos_that_the_tokenizer_adds_itself_is_not_doubled(modern_tokenizer: Any):
    ends = [("<s>", modern_tokenizer.bos_token_id), ("</s>", modern_tokenizer.eos_token_id)]
    backend = modern_tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    (found,) = Renderer.prove(modern_tokenizer, None, samples=[]).render([Text("A hill.", WHERE)])
    assert found.input_ids == modern_tokenizer("A hill.")["input_ids"]


def test_text_without_an_end_is_refused(modern_tokenizer: Any):
    modern_tokenizer.eos_token = None
    (found,) = Renderer.prove(modern_tokenizer, None, samples=[]).render([Text("A hill.", WHERE)])
    assert "no EOS" in found.problem


@pytest.mark.parametrize("typed", ["", "</s>"])
def test_text_of_few_tokens_in_many_characters_is_tokenised_to_its_end(
    modern_tokenizer: Any, typed: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(masks, "SPARE_CHARACTERS", 1_000)
    modern_tokenizer.backend_tokenizer.add_tokens(["=" * 500])
    long = Text(f"a{typed}{'=' * 40_000}b", WHERE)
    (found,) = Renderer.prove(modern_tokenizer, None, samples=[]).render([long], max_tokens=128)
    assert found.n_tokens == 0
    assert found.input_ids[-1] == modern_tokenizer.eos_token_id
    assert modern_tokenizer.decode(found.input_ids) == long.text + "</s>"
