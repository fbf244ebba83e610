"""New tokens: in which form a tokenizer takes terms, and what stays as it was."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from domain import domain_texts, write_terms, write_texts
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.config.data import DataConfig
from sftplay.config.run import LoraConfig, ModelConfig, NewTokensConfig, RunConfig, TuningConfig
from sftplay.errors import ConfigError
from sftplay.launch.run_folder import RunFolder
from sftplay.model import new_tokens
from sftplay.model.adapter import add_adapter
from sftplay.model.embedding_rows import add_rows
from sftplay.model.new_tokens import (
    HAS_NO_FORM,
    IS_ONE_TOKEN,
    NewToken,
    add_to,
    choose_forms,
    extend_for_run,
    make_token,
    read_terms,
)
from sftplay.model.tokenizer import load_extended

PLAIN_TEXT = "the old light walks under green hills and asks why seven quiet boats carry salt"


def byte_level(*more: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False), more)


def metaspace(scheme: str) -> Tokenizer:
    """As SentencePiece models are read: a space is a separate letter."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False))


def old_llama() -> Tokenizer:
    tokenizer = metaspace("first")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def trained(tokenizer: Tokenizer, trainer: trainers.BpeTrainer, more: tuple[str, ...] = ()) -> Tokenizer:
    texts = [*[PLAIN_TEXT] * 20, *["category", "flapping ( ) . , é\t\n 'ä-öx2s"] * 3, *list(more) * 30]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def with_terms(tokenizer: Tokenizer, forms: dict[str, AddedToken]) -> Tokenizer:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens(list(forms.values()))
    return extended


WANTED = ["aileron", "angle of attack", "naïve-flap", "<tool>", "空气动力学"]


@pytest.mark.parametrize("make", [byte_level, lambda: metaspace("first")], ids=["byte level", "metaspace"])
def test_extended_tokenizers_are_lossless_and_shorter(make: Callable[[], Tokenizer]):
    plain = make()
    forms, refused = choose_forms(plain, WANTED)
    assert refused == {}
    assert forms["aileron"] == make_token(" aileron")
    assert (forms["<tool>"], forms["空气动力学"]) == (make_token("<tool>"), make_token("空气动力学"))
    extended = with_terms(plain, forms)
    for text in (f"the {term} and {term}s, ({term}).\n{term}  {term} x{term}2" for term in WANTED):
        assert extended.decode(ids(extended, text), skip_special_tokens=False) == text
        assert len(ids(extended, text)) < len(ids(plain, text))
    assert len(ids(extended, "the ailerons walk")) <= len(ids(plain, "the ailerons walk"))


@pytest.mark.parametrize("make", [lambda: metaspace("always"), old_llama], ids=["always", "old Llama"])
def test_a_tokenizer_that_would_put_spaces_into_texts_is_given_no_words(make: Callable[[], Tokenizer]):
    forms, refused = choose_forms(make(), ["aileron", "angle of attack"])
    assert forms == {}
    assert refused == {"aileron": HAS_NO_FORM, "angle of attack": HAS_NO_FORM}


def test_a_term_that_begins_a_longer_token_leaves_that_token_whole():
    plain = byte_level()
    before = ids(plain, "the quiet hills")
    assert len(before) == 3
    begins = next(part for part in ("quie", "qui", "qu") if len(ids(plain, f" {part}")) > 2)
    forms, _ = choose_forms(plain, [begins])
    assert forms[begins] == make_token(begins, single_word=True)
    assert ids(with_terms(plain, forms), "the quiet hills") == before
    assert choose_forms(plain, ["quiet"])[1] == {"quiet": IS_ONE_TOKEN}


def test_no_word_of_the_data_gets_longer_by_a_term_that_it_begins_with():
    # "hillsboats" is " hills" and "boats"; behind a token " hillsb" there would be "o" and "ats".
    plain = byte_level("boats")
    before = ids(plain, "the hillsboats")
    assert len(before) == 3
    loose, held = (choose_forms(plain, ["hillsb"], words=words)[0] for words in ([], ["hills", "hillsboats", "old"]))
    assert len(ids(with_terms(plain, loose), "the hillsboats")) > len(before)
    assert ids(with_terms(plain, held), "the hillsboats") == before
    assert held == {}  # as a bare word it would leave its space a token, and save none


@given(st.lists(st.sampled_from([*WANTED, *PLAIN_TEXT.split()[:4], "s", "\n", ".", "(", ")", "-"])), st.booleans())
def test_text_with_the_terms_comes_back_unchanged(words: list[str], spaced: bool):
    plain, extended = _pair()
    text = (" " if spaced else "").join(words)
    assert extended.decode(ids(extended, text), skip_special_tokens=False) == text
    assert len(ids(extended, text)) <= len(ids(plain, text))


def _pair(made: list[Tokenizer] = []) -> list[Tokenizer]:  # noqa: B006 - made once
    if not made:
        made += [plain := byte_level(), with_terms(plain, choose_forms(plain, WANTED)[0])]
    return made


def test_a_file_of_terms_is_read_line_by_line(tmp_path: Path):
    path = tmp_path / "terms.txt"
    path.write_text("\ufeffaileron\r\n\n  angle of attack  \naileron\n")
    assert read_terms(str(path)) == ["aileron", "angle of attack"]


@pytest.mark.parametrize(
    ("content", "what"), [(b"\n \n", "holds no term"), (b"\xff\xfe", "is not UTF-8"), (b"a\n" + b"x" * 101, "no term")]
)
def test_a_file_that_holds_no_terms_is_refused(content: bytes, what: str, tmp_path: Path):
    path = tmp_path / "terms.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=what) as caught:
        read_terms(str(path))
    assert f"tuning.new_tokens.path {path}" in caught.value.where


def config(model: Path, home: Path, terms: Path) -> RunConfig:
    rows = write_texts(home / "rows.jsonl", 160, seed=1)
    return RunConfig(
        model=ModelConfig(name=str(model)),
        data=DataConfig(train_path=str(rows), processed_dir=str(home / "processed"), split=0.0),
        tuning=TuningConfig(new_tokens=NewTokensConfig(path=str(terms))),
    )


def test_fifty_listed_terms_shorten_texts_that_plain_transformers_reads_alike(tiny_llama: Path, tmp_path: Path):
    tokenizer, tokens = load_extended(config(tiny_llama, tmp_path, write_terms(tmp_path / "terms.txt")))
    plain, texts = AutoTokenizer.from_pretrained(tiny_llama), domain_texts(160, seed=1)
    before, after = (sum(len(encode(text)["input_ids"]) for text in texts) for encode in (plain, tokenizer))
    assert len(tokenizer) == len(plain) + 50
    assert after < 0.65 * before
    assert sum(token.tokens_saved for token in tokens) == before - after
    tokenizer.save_pretrained(tmp_path / "saved")
    opened = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in domain_texts(20, seed=3):
        assert opened(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert opened.decode(opened(text)["input_ids"]) == text
    assert opened.convert_tokens_to_ids(tokens[-1].content) == len(opened) - 1


def test_the_texts_are_counted_once_for_all_commands(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg = config(tiny_llama, tmp_path, write_terms(tmp_path / "terms.txt"))
    first, tokens = load_extended(cfg)
    monkeypatch.setattr(new_tokens, "read_training_texts", lambda _: pytest.fail("read again"))
    again, same = load_extended(cfg)
    assert (same, again.get_vocab()) == (tokens, first.get_vocab())
    (tmp_path / "terms.txt").write_text("aileron\n")
    with pytest.raises(pytest.fail.Exception):
        load_extended(cfg)


def test_a_listed_term_that_cannot_be_a_token_is_named(tiny_llama: Path, tmp_path: Path):
    (tmp_path / "terms.txt").write_text("aileron\nriver\n")
    with pytest.raises(ConfigError, match="1 of the terms cannot be new tokens, such as 'river': it is one token"):
        load_extended(config(tiny_llama, tmp_path, tmp_path / "terms.txt"))


def test_a_list_that_was_made_for_another_tokenizer_is_refused(tiny_llama: Path):
    token = NewToken("flap", " flap", single_word=False, id=350, pieces=(7, 8), count=1)
    with pytest.raises(ConfigError, match="another one than when 'flap' became token 350: it is 336 now"):
        add_to(AutoTokenizer.from_pretrained(tiny_llama), [token])


TOKENS = [
    NewToken("aileron", " aileron", single_word=False, id=400, pieces=(5, 6, 9), count=1),
    NewToken("flap", " flap", single_word=False, id=401, pieces=(7, 8), count=1),
]


@pytest.mark.parametrize("tied", [False, True], ids=["two weights", "tied"])
def test_rows_of_new_tokens_are_the_mean_of_their_pieces(tied: bool, tiny_llama: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    before = [end.weight.detach().clone() for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    add_rows(model, TOKENS)
    after = [end.weight for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    for old, new in zip(before, after, strict=True):
        assert new.shape == (402, 32)
        assert torch.equal(new[:400], old)
        assert torch.equal(new[400], ((old[5].float() + old[6].float() + old[9].float()) / 3).bfloat16())
        assert torch.equal(new[401], ((old[7].float() + old[8].float()) / 2).bfloat16())
    assert (after[0] is after[1]) == tied
    assert model.config.vocab_size == 402


def test_rows_that_the_model_has_to_spare_are_used(tiny_llama: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    add_rows(model, [NewToken("flap", " flap", single_word=False, id=350, pieces=(7, 8), count=1)])
    weight = model.get_input_embeddings().weight
    assert weight.shape == (400, 32)
    assert torch.allclose(weight[350], (weight[7] + weight[8]) / 2)


@pytest.mark.parametrize(
    ("lora", "tied", "trains"),
    [
        ({}, False, {"embed_tokens": [400, 401], "lm_head": [400, 401]}),
        ({}, True, {"embed_tokens": [400, 401]}),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False, None),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, True, None),
        ({"modules_to_save": ["lm_head"]}, False, {"embed_tokens": [400, 401]}),
    ],
)
def test_rows_train_alone_unless_their_matrix_trains_in_full(
    lora: dict[str, list[str]], tied: bool, trains: dict[str, list[int]] | None, tiny_llama: Path
):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    add_rows(model, TOKENS)
    adapted = add_adapter(model, LoraConfig(**lora), new_ids=[400, 401])
    assert adapted.peft_config["default"].trainable_token_indices == trains
    named = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad and "lora_" not in name}
    rows, matrices = 2 * 32 * len(trains or {}), 402 * 32 * len(lora.get("modules_to_save", []))
    assert sum(named.values()) == rows + matrices


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"modules_to_save": ["lm_head"]}, "tuning.lora.modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "tuning.lora.target_modules"),
    ],
)
def test_new_rows_that_would_not_train_are_refused(lora: dict[str, list[str]], key: str, tiny_llama: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    add_rows(model, TOKENS)
    with pytest.raises(ConfigError) as caught:
        add_adapter(model, LoraConfig(**lora), new_ids=[400, 401])
    assert caught.value.where == key


def test_a_run_of_an_older_release_keeps_the_list_that_was_found_for_it(tiny_llama: Path, tmp_path: Path):
    folder = RunFolder(tmp_path)
    listed = config(tiny_llama, tmp_path, write_terms(tmp_path / "terms.txt", 5))
    tokens = extend_for_run(AutoTokenizer.from_pretrained(tiny_llama), listed, folder=folder)
    without = listed.with_values({"tuning.new_tokens.path": None}, "test")
    again = AutoTokenizer.from_pretrained(tiny_llama)
    assert extend_for_run(again, without, folder=folder) == tokens
    assert again.convert_tokens_to_ids(tokens[-1].content) == tokens[-1].id
