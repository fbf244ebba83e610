"""From files to the rows of a mixture: every token accounted for, shares held, and nothing done twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftplay.config.run import RunConfig
from sftplay.data.mixture.load import MixtureRows, load_mixture, mixture_table
from sftplay.data.mixture.mixture import source_and_block
from sftplay.data.pipeline import load_examples
from sftplay.errors import DataError
from tests.data.mix.sources_at_hand import chat, document, read_rows, same

Mixed = Callable[..., RunConfig]
Write = Callable[..., Path]


def test_documents_and_chats_are_those_that_plain_training_renders_and_masks(
    tokenizer: Any, mixed: Mixed, config: Callable[..., RunConfig], chats: dict[str, Any], domain: dict[str, Any]
):
    rows = load_mixture(mixed([domain, chats], split=0.2), tokenizer)
    plain = load_examples(config(domain["path"], max_seq_len=100_000, split=0.2), tokenizer)
    for side, examples in (("train", plain.train), ("held_out", plain.held_out)):
        documents = list(rows.documents("domain", side))
        assert [doc.ids.tolist() for doc in documents] == list(examples["input_ids"])
        assert [str(doc.place) for doc in documents] == [plain.find_source(side, n) for n in range(len(documents))]
        assert [doc.labels.tolist() for doc in documents] == [[-100, *ids[1:]] for ids in examples["input_ids"]]
    assert all(doc.n_bytes == len(tokenizer.decode(doc.ids, skip_special_tokens=True).encode()) for doc in documents)

    plain = load_examples(config(chats["path"], max_seq_len=64, split=0.2), tokenizer)
    documents = list(rows.documents("chat", "train"))
    assert [doc.ids.tolist() for doc in documents] == list(plain.train["input_ids"])
    assert [doc.labels.tolist() for doc in documents] == list(plain.train["labels"])
    assert rows.held_out_chats("chat") == plain.held_out_chats
    assert rows.renderer.template_hash == plain.renderer.template_hash


def test_every_token_is_learned_or_counted_as_the_first_of_a_document_or_dropped(
    tokenizer: Any, mixed: Mixed, write_rows: Write, domain: dict[str, Any], chats: dict[str, Any]
):
    lines = Path(domain["path"]).read_text().splitlines(keepends=True)
    Path(domain["path"]).write_text("".join([*lines, lines[3], lines[4].replace("the", "THE")]))
    cfg = mixed([domain, {**chats, "weight": 0.4}], split=0.1, duplicates="drop", too_long="drop", size=46)
    rows = load_mixture(cfg, tokenizer)
    labels, ids = Counter[str](), {"domain": Counter[int](), "chat": Counter[int]()}
    documents = {name: list(rows.documents(name, "train")) for name in ids}
    epochs = {entry["name"]: 0 for entry in (domain, chats)}
    for row in read_rows(rows):
        source, _ = source_and_block(row["row"])
        name = rows.sources[source].name
        assert source == row["source"]
        labels[name] += int((row["labels"] != -100).sum())
        epochs[name] += 1
    report = rows.report["sources"]
    for name, entry in report.items():
        assert entry["tokens"] == sum(len(doc.ids) for doc in documents[name])
        assert entry["documents"] == len(documents[name])
        assert entry["tokens"] == entry["label_tokens"] + entry["first_of_document"] + entry["masked_tokens"]
        assert entry["tokens_read"] == entry["tokens"] + sum(entry["dropped_tokens"].values()) + entry["cut_tokens"]
        assert entry["read"] == entry["kept"] + entry["cut"] + sum(entry["dropped"].values()) + entry["refused"]
        assert entry["planned_rows"] == epochs[name]
    assert report["domain"]["dropped"] == {"duplicate": 2}
    assert report["domain"]["masked_tokens"] == 0
    assert report["chat"]["dropped"]["too_long"] > 0
    n_blocks = -(-report["domain"]["tokens"] // 45)
    assert report["domain"]["planned_rows"] >= n_blocks
    assert labels["domain"] >= report["domain"]["label_tokens"]


def test_a_source_of_weight_0_gives_no_row_and_is_measured(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any]
):
    rows = load_mixture(mixed([domain, {**chats, "weight": 0}], split=0.2), tokenizer)
    assert {row["source"] for row in read_rows(rows)} == {0}
    assert set(rows.held_out) == {"domain", "chat"}
    assert sum(rows.held_out["chat"].sizes) == rows.report["sources"]["chat"]["held_out"]["label_tokens"] > 0
    assert rows.held_out["chat"][0]["source"] == 1
    name = f"datasets.chat.val_path={chats['path']}"
    assert rows.report["notes"] == [f"chat: 0.2 of its rows is measured (datasets.chat.split); {name} measures all"]
    whole = mixed([domain, {**chats, "weight": 0, "val_path": str(chats["path"])}], split=0.2)
    report = load_mixture(whole, tokenizer).report
    assert report["sources"]["chat"]["held_out"]["documents"] == 80
    assert report["notes"] == []


def test_report_names_the_source_that_holds_nothing_out_and_the_held_out_rows_that_are_dropped(
    tokenizer: Any, mixed: Mixed, write_rows: Write, chats: dict[str, Any]
):
    few = {"name": "few", "path": write_rows([document(n, 5) for n in (3, 4)], "few.jsonl"), "type": "cpt"}
    report = load_mixture(mixed([few, chats], split=0.05), tokenizer).report
    few_texts = "few: nothing is held out: too few texts for a share of 0.05"
    assert report["notes"] == [f"{few_texts}; raise datasets.few.split or give datasets.few.val_path"]
    chats["val_path"] = str(write_rows([chat(900), chat(901) | {"prompt": "Why? " * 100}], "held.jsonl"))
    report = load_mixture(mixed([few, chats], too_long="drop"), tokenizer).report
    assert report["sources"]["chat"]["held_out"]["documents"] == 1
    assert "; dropped 1: too long" in mixture_table(report)


def test_the_length_of_a_run_follows_from_steps_tokens_epochs_or_the_end_of_a_source(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any]
):
    def rows(**options: Any) -> MixtureRows:
        return load_mixture(mixed([domain, {**chats, "weight": 0.9}], split=0, **options), tokenizer)

    assert rows(train={"max_steps": 7}).steps == 7
    assert rows(cpt={"train_tokens": 1000}).steps == -(-1000 // (4 * 63))
    once, twice = rows(), rows(train={"epochs": 2})
    assert once.steps == once.steps_per_epoch == twice.steps_per_epoch
    assert abs(twice.steps - 2 * once.steps) <= 1
    assert once.report["sources"]["domain"]["planned_epochs"] == pytest.approx(1, rel=0.05)
    assert once.report["sources"]["chat"]["planned_epochs"] > 1.5
    stopped = rows(cpt={"on_source_end": "stop"})
    assert stopped.report["sources"]["chat"]["planned_epochs"] == pytest.approx(1, rel=0.1)
    assert same(read_rows(stopped), read_rows(once)[: len(stopped.train)])


def test_a_second_run_uses_the_stores_of_the_first(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    first = load_mixture(mixed([domain, chats]), tokenizer)
    monkeypatch.setattr("sftplay.data.tokenize.Preparation.run", lambda *_, **__: pytest.fail("read again"))
    second = load_mixture(mixed([domain, chats]), tokenizer)
    assert same(read_rows(first), read_rows(second))
    assert first.fingerprint == second.fingerprint
    assert first.report == second.report
    third = load_mixture(mixed([domain, {**chats, "weight": 0.2}], seed=2), tokenizer)
    assert third.fingerprint != first.fingerprint


def test_a_source_with_nothing_to_learn_or_rows_of_the_other_type_is_refused_by_its_path_or_type(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any]
):
    with pytest.raises(DataError, match="nothing is left to learn: 80 read, 80 too long") as refusal:
        load_mixture(mixed([domain, chats], size=8, too_long="drop", split=0), tokenizer)
    assert refusal.value.where == str(chats["path"])
    with pytest.raises(DataError, match="is a plain text, and its source has type: chat") as refusal:
        load_mixture(mixed([{**domain, "type": "chat"}, chats]), tokenizer)
    assert "type: cpt" in refusal.value.fix
    with pytest.raises(DataError, match="text"):
        load_mixture(mixed([domain, {**chats, "type": "cpt"}]), tokenizer)


def test_what_one_source_holds_out_is_not_trained_on_in_another_that_holds_out_less(
    tokenizer: Any, mixed: Mixed, write_rows: Write
):
    copy = {"name": "copy", "path": write_rows([document(n, 5) for n in range(60)], "copy.jsonl"), "type": "cpt"}
    sources = [{**copy, "split": 0.3}, {**copy, "name": "again", "path": copy["path"].with_name("again.jsonl")}]
    sources[1]["path"].write_bytes(copy["path"].read_bytes())
    val_path = str(write_rows([document(99, 5)], "val.jsonl"))
    for less in ({"split": 0.1}, {"val_path": val_path}, {"split": 0.0, "path": copy["path"]}):
        pair = [sources[0], sources[1] | less]
        with pytest.raises(DataError, match=r"\.jsonl:\d+ is held out as well, at .*copy\.jsonl:\d+"):
            load_mixture(mixed(pair), tokenizer)
        rows = load_mixture(mixed(pair, contamination="drop"), tokenizer)
        held_out, learned = (
            {doc.ids.tobytes() for doc in rows.documents(name, side)}
            for name, side in (("copy", "held_out"), ("again", "train"))
        )
        assert held_out.isdisjoint(learned)
        assert rows.report["dropped"]["leak"] > 0


@pytest.mark.parametrize("crosses", [False, True])
def test_one_epoch_hands_out_each_label_exactly_once(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], crosses: bool
):
    rows = load_mixture(
        mixed([domain], split=0, size=40, train={"effective_batch_size": 1}, cpt={"cross_document": crosses}), tokenizer
    )
    entry = rows.report["sources"]["domain"]
    assert len(rows.train) == rows.steps == -(-entry["tokens"] // 39)
    handed = Counter[int]()
    for row in read_rows(rows)[:-1]:
        handed.update(row["labels"][row["labels"] != -100].tolist())
    last = rows.train[len(rows.train) - 1]
    n_new = entry["tokens"] - (len(rows.train) - 1) * 39
    begin = len(last["labels"]) - 39
    of_epoch = last["labels"][begin : begin + n_new]
    handed.update(of_epoch[of_epoch != -100].tolist())
    expected = Counter[int]()
    for doc in rows.documents("domain", "train"):
        expected.update(doc.ids[0 if crosses else 1 :].tolist())
    if crosses:
        expected.subtract([int(rows.train[0]["input_ids"][0])])
    assert +expected == handed
    assert handed.total() == entry["label_tokens"]


def test_weights_of_examples_count_documents_that_begin(
    tokenizer: Any, mixed: Mixed, domain: dict[str, Any], chats: dict[str, Any]
):
    cfg = mixed([domain, {**chats, "weight": 0.9}], split=0, cpt={"weights_of": "examples"}, train={"epochs": 4})
    rows = load_mixture(cfg, tokenizer)
    n_begun = Counter[int]()
    for row in read_rows(rows):
        # a document ends with EOS, and a chat begins at position 0
        is_one = row["position_ids"] == 0 if row["source"] else row["input_ids"] == tokenizer.eos_token_id
        n_begun[row["source"]] += int(is_one.sum())
    assert n_begun[0] == pytest.approx(4 * 120, rel=0.02)
    assert n_begun[1] == pytest.approx(4 * 120, rel=0.02)
