"""A run with new tokens: what it saves opens in plain transformers and PEFT, and the merged model says the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from domain import domain_texts, write_terms, write_texts
from in_process import Finished, Inputs, StopAfter, assert_same_course, train, train_in
from lively import lively_model
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from sftplay import cli
from sftplay.errors import ConfigError
from sftplay.export.merge import merge
from sftplay.export.merge_check import test_merge as check_merge
from sftplay.model.load import load_result, load_untrained
from sftplay.model.weights import keep_four_bit_exact

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers)")
"""PEFT's advice on embeddings in an adapter, which is what these runs are about."""
NEW = 50
BASE_ROWS = 336
"""Tokens of the tiny tokenizer. The model has a row for each and no more, so that new tokens need new ones."""


def domain_inputs(home: Path, inputs: Inputs, *, tied: bool) -> Inputs:
    """A base with answers that depend on every token, and rows of domain texts."""
    base = Path(shutil.copytree(inputs.model, home / "tied" if tied else home / "base"))
    model = lively_model(base)
    model.resize_token_embeddings(BASE_ROWS)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(base)
    rows = write_texts(home / "rows.jsonl", 160, seed=1)
    return Inputs(base, rows, write_texts(home / "held_out.jsonl", 8, seed=2))


def trained(home: Path, inputs: Inputs, *, tied: bool, **changes: Any) -> Finished:
    given = domain_inputs(home, inputs, tied=tied)
    listed = {"path": str(write_terms(home / "listed.txt"))}
    wish = {"tuning__new_tokens": listed, "train__learning_rate": 0.05, "eval__after": True, **changes}
    return train(home, given, **wish)


KINDS = [
    pytest.param(("lora", False), id="lora, two weights"),
    pytest.param(("lora", True), id="lora, tied"),
    pytest.param(("qlora", True), id="qlora, tied", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    mode, tied = request.param
    return trained(tmp_path_factory.mktemp("domain"), inputs, tied=tied, tuning__mode=mode)


@pytest.fixture(scope="module")
def merged(run: Finished) -> Path:
    return merge(run.cfg, run.folder, out=run.folder.path / "merged")


def result(run: Finished) -> Path:
    assert run.folder.result
    return run.folder.result


def is_tied(run: Finished) -> bool:
    return Path(run.cfg.model.name).name == "tied"


def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer(text)["input_ids"][:12] for text in domain_texts(6, seed=9)]


def greedy(model: Any, tokenizer: Any) -> list[str]:
    texts = []
    for prompt in prompts(tokenizer):
        out = model.eval().generate(
            input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        texts.append(tokenizer.decode(out[0, len(prompt) :]))
    return texts


def compute_loss(model: Any, tokenizer: Any, rows: Path) -> float:
    """Mean loss of the held-out texts' tokens; an end token is learned behind each, as the kit's rows have it."""
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            total += float(model.eval()(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count


def test_the_run_keeps_its_list_and_a_tokenizer_that_shortens_domain_text(run: Finished):
    kept = json.loads((run.folder.path / "new_tokens.json").read_text())
    assert kept["count"] == len(kept["tokens"]) == NEW
    plain, extended = (AutoTokenizer.from_pretrained(path) for path in (run.cfg.model.name, result(run)))
    texts = domain_texts(20, seed=9)
    before, after = (sum(len(tokenizer(text)["input_ids"]) for text in texts) for tokenizer in (plain, extended))
    assert after < 0.65 * before
    assert [extended.decode(extended(text)["input_ids"]) for text in texts] == texts
    for entry in kept["tokens"]:
        assert extended.convert_tokens_to_ids(entry["content"]) == entry["id"]
        assert len(plain(entry["content"])["input_ids"]) == entry["pieces_before"]
        assert entry["tokens_saved"] == entry["count"] * (entry["pieces_before"] - 1)


def test_plain_peft_opens_the_adapter_and_measures_what_the_run_measured(run: Finished):
    tokenizer = AutoTokenizer.from_pretrained(result(run))
    expected = json.loads((run.folder.eval / "after.json").read_text())["loss"]
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    held_as = {"quantization_config": four_bit} if run.cfg.tuning.mode == "qlora" else {}
    plain = AutoPeftModelForCausalLM.from_pretrained(result(run), **held_as)
    keep_four_bit_exact(plain)  # on some CPUs bitsandbytes would repack the weights, and fails on widths like this one
    assert compute_loss(plain, tokenizer, Path(str(run.cfg.data.val_path))) == pytest.approx(expected, abs=1e-3)


def test_every_new_row_has_trained_and_no_old_one(run: Finished, merged: Path):
    base, whole = (load_file(path / "model.safetensors") for path in (run.folder.path / "base", merged))
    ends = ["model.embed_tokens.weight"] + ([] if is_tied(run) else ["lm_head.weight"])
    for name in ends:
        assert torch.equal(whole[name][:BASE_ROWS], base[name][:BASE_ROWS])
        assert base[name].shape == whole[name].shape == (BASE_ROWS + NEW, 32)
    # Each is scored at every position, so the head's row moves; a row of the embedding needs its token in a batch.
    head = ends[-1]
    assert bool((whole[head][BASE_ROWS:] != base[head][BASE_ROWS:]).any(dim=1).all())
    assert ("lm_head.weight" in whole) != is_tied(run)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] == is_tied(run)


def test_the_merged_model_has_the_greedy_texts_of_the_adapter(run: Finished, merged: Path):
    tokenizer = AutoTokenizer.from_pretrained(merged)
    adapted = AutoPeftModelForCausalLM.from_pretrained(result(run))
    whole, loading = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not loading["missing_keys"]
    expected = greedy(adapted, tokenizer)
    assert greedy(whole, tokenizer) == expected
    assert len(set(expected)) > 1
    assert expected != greedy(AutoModelForCausalLM.from_pretrained(run.folder.path / "base"), tokenizer)
    assert greedy(load_result(run.cfg, run.folder.path), tokenizer) == greedy(run.trainer.model, tokenizer)
    figures = check_merge(run.cfg, run.folder, merged=merged)
    assert figures["texts_equal"]
    assert figures["altered"] == []


def test_new_tokens_beside_matrices_that_train_in_full(inputs: Inputs, tmp_path: Path):
    full = {"r": 4, "modules_to_save": ["embed_tokens", "lm_head"]}
    run = trained(tmp_path, inputs, tied=True, tuning__lora=full, train__max_steps=2, eval__after=False)
    tokenizer = AutoTokenizer.from_pretrained(result(run))
    adapted = AutoPeftModelForCausalLM.from_pretrained(result(run))
    merged = merge(run.cfg, run.folder, out=tmp_path / "merged")
    check_merge(run.cfg, run.folder, merged=merged)
    expected = greedy(run.trainer.model, tokenizer)
    assert greedy(adapted, tokenizer) == expected
    assert greedy(AutoModelForCausalLM.from_pretrained(merged), tokenizer) == expected
    # Each has been trained apart from the other, so they are two weights now, and the config says so.
    weights, config = load_file(merged / "model.safetensors"), json.loads((merged / "config.json").read_text())
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert config["tie_word_embeddings"] is False


def test_full_tuning_saves_a_whole_model_with_the_new_rows(inputs: Inputs, tmp_path: Path):
    run = trained(tmp_path, inputs, tied=True, tuning__mode="full", train__learning_rate=0.01)
    tokenizer = AutoTokenizer.from_pretrained(result(run))
    whole = AutoModelForCausalLM.from_pretrained(result(run))
    assert whole.get_input_embeddings().weight.shape == (BASE_ROWS + NEW, 32)
    assert whole.get_input_embeddings().weight is whole.get_output_embeddings().weight
    expected = json.loads((run.folder.eval / "after.json").read_text())["loss"]
    assert compute_loss(whole, tokenizer, Path(str(run.cfg.data.val_path))) == pytest.approx(expected, abs=1e-3)
    assert not (run.folder.path / "base").exists()
    base = load_untrained(run.cfg, run.folder.path).get_input_embeddings().weight
    pieces = json.loads((run.folder.path / "new_tokens.json").read_text())["tokens"][0]["pieces"]
    assert torch.allclose(base[BASE_ROWS], base[pieces].mean(dim=0), atol=1e-6)


def test_a_loss_in_chunks_trains_the_same_rows(inputs: Inputs, tmp_path: Path):
    rows = []
    for head in ("standard", "chunked"):
        run = trained(tmp_path / head, inputs, tied=False, train__loss_head=head, train__max_steps=2, eval__after=False)
        stored = load_file(result(run) / "adapter_model.safetensors")
        rows.append({name: value for name, value in stored.items() if "trainable_tokens" in name})
    assert len(rows[0]) == 2
    for name, value in rows[0].items():
        assert torch.allclose(rows[1][name], value, atol=1e-4)


@pytest.mark.contract
def test_every_verb_on_a_run_uses_its_tokenizer(
    run: Finished, verbs_environment: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    config = str(run.folder.path.parents[1] / "run.yaml")

    def said(*words: str) -> str:
        capsys.readouterr()
        assert cli.main([words[0], "--config", config, *words[1:]]) == 0
        return capsys.readouterr().out

    figures = json.loads(said("eval", "--json"))
    assert figures["after"]["loss"] < figures["before"]["loss"]
    base = AutoModelForCausalLM.from_pretrained(run.folder.path / "base")
    if run.cfg.tuning.mode == "lora":
        expected = compute_loss(base, AutoTokenizer.from_pretrained(result(run)), Path(str(run.cfg.data.val_path)))
        assert figures["before"]["loss"] == pytest.approx(expected, abs=1e-3)
    kept = json.loads((run.folder.path / "new_tokens.json").read_text())
    rows = json.loads(said("inspect", "--json", "--n", "5"))["rows"]
    assert max(max(row["input_ids"]) for row in rows) >= kept["tokens"][0]["id"]
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"prompt": "why angle of attack"}) + "\n")
    said("infer-batch", "--in", str(asked), "--out", str(tmp_path / "answers.jsonl"))
    said("export", "--out", str(tmp_path / "exported"))
    exported = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert exported.convert_tokens_to_ids(kept["tokens"][-1]["content"]) == kept["tokens"][-1]["id"]


@pytest.mark.slow
def test_documents_and_chats_are_trained_on_with_listed_terms(
    inputs: Inputs, verbs_environment: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    mixture = [
        {"name": "chat", "path": str(inputs.train), "type": "chat", "weight": 0.2},
        {"name": "domain", "path": str(write_texts(tmp_path / "documents.jsonl", 160, seed=1)), "type": "cpt"},
    ]
    run = trained(
        tmp_path, inputs, tied=True, task_mode="cpt_mixed", datasets=mixture, data__train_path=None,
        data__val_path=None, data__split=0.1, cpt__block_size=48, eval__after=False,
    )  # fmt: skip
    kept = json.loads((run.folder.path / "new_tokens.json").read_text())["tokens"]
    terms = {entry["term"] for entry in kept}
    assert len(terms) == NEW
    assert "angle of attack" in terms
    rows = [run.trainer.train_dataset[n]["input_ids"].tolist() for n in range(10)]
    assert sum(id >= BASE_ROWS for row in rows for id in row) > 50
    out = merge(run.cfg, run.folder, out=tmp_path / "merged")
    assert check_merge(run.cfg, run.folder, merged=out)["texts_equal"]
    config = str(run.folder.path.parents[1] / "run.yaml")
    capsys.readouterr()
    assert cli.main(["eval", "--config", config, "--json"]) == 0
    assert cli.main(["inspect", "--config", config, "--json", "--n", "2"]) == 0


@pytest.mark.slow
def test_a_resumed_run_ends_as_one_that_was_never_stopped(inputs: Inputs, tmp_path: Path):
    whole = trained(tmp_path / "whole", inputs, tied=True, train__save_steps=2, eval__after=False)
    wish = {"train__save_steps": 2, "eval__after": False}
    part = trained(tmp_path / "part", inputs, tied=True, stop=StopAfter(2), **wish)
    assert part.outcome.stop_signal
    assert_same_course(train_in(part.cfg.with_values({"train.resume": "auto"}, "test"), part.folder), whole)


def test_a_resume_with_other_terms_is_refused_by_name(inputs: Inputs, tmp_path: Path):
    tmp_path.joinpath("terms.txt").write_text("aileron\nangle of attack\n")
    wish = {"tuning__new_tokens": {"path": str(tmp_path / "terms.txt")}, "train__save_steps": 2, "eval__after": False}
    run = trained(tmp_path, inputs, tied=True, stop=StopAfter(2), **wish)
    tmp_path.joinpath("terms.txt").write_text("aileron\nfuselage\n")
    with pytest.raises(ConfigError, match="without 'angle of attack'; with 'fuselage'") as caught:
        train_in(run.cfg.with_values({"train.resume": "auto"}, "test"), run.folder)
    assert caught.value.where == f"tuning.new_tokens.path {tmp_path / 'terms.txt'}"


@pytest.mark.slow
def test_an_adapter_with_new_tokens_is_trained_further(inputs: Inputs, tmp_path: Path):
    first = trained(tmp_path / "first", inputs, tied=True, train__max_steps=2)
    given = Inputs(first.folder.path, Path(first.cfg.data.train_path or ""), Path(first.cfg.data.val_path or ""))
    second = train(tmp_path / "second", given, train__learning_rate=0.05, train__max_steps=2)
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = [load_file(result(run) / "adapter_model.safetensors")[name] for run in (first, second)]
    assert rows[0].shape == rows[1].shape == (NEW, 32)
    assert not torch.equal(*rows)
    base = AutoModelForCausalLM.from_pretrained(first.folder.path / "base")
    plain = PeftModel.from_pretrained(base, result(second))
    tokenizer = AutoTokenizer.from_pretrained(result(second))
    assert greedy(plain, tokenizer) == greedy(second.trainer.model, tokenizer)
