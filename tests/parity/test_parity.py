"""`parity` agrees where what is served is what was trained, and names the fault where it is not."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
from in_process import Finished, Inputs, train
from lively import lively_model
from safetensors.torch import load_file, save_file

from sftplay import cli
from sftplay.errors import RunError
from sftplay.export.merge import merge
from sftplay.launch.run_folder import RunFolder
from sftplay.parity import by_vllm
from sftplay.parity.compare import Reference
from sftplay.parity.engine import Question
from sftplay.parity.results import find_gguf_files

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie_word_embeddings|save_embedding_layers|missing adapter keys)")


@pytest.fixture(scope="module")
def run(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory, verbs_environment: None) -> Finished:
    """A run that trains an adapter and the head, on a base whose answers depend on every token of the prompt."""
    home = tmp_path_factory.mktemp("parity")
    base = Path(shutil.copytree(inputs.model, home / "base"))
    lively_model(base).save_pretrained(base)
    lora = {"r": 4, "modules_to_save": ["lm_head"]}
    done = train(home, Inputs(base, inputs.train, inputs.held_out), train__learning_rate=0.05, tuning__lora=lora)
    merge(done.cfg, done.folder, out=done.folder.path / "merged")
    return done


@pytest.fixture(autouse=True, scope="module")
def _what_is_trained_answers_once() -> Iterator[None]:
    """The same trained weights give the same answers to the same prompts; most tests here ask them again."""
    usual, known = Reference.answer, {}

    def answer(self: Reference, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        files = sorted(path for name in ("adapter", "model") for path in (self.folder.path / name).glob("*.*"))
        contents = tuple(path.read_bytes() for path in files)
        key = (self.folder.path, contents, tuple(map(tuple, prompts)), max_new_tokens)
        if key not in known:
            known[key] = usual(self, prompts, max_new_tokens)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "answer", answer)
        yield


Weights = dict[str, torch.Tensor]
Plant = Callable[[Path, Finished], object]
"""Puts a fault into a folder."""

QUICK = (
    "second rope_theta", "penalty", "added token", "shard", "earlier merge", "template", "base", "old head", "permuted",
    "lost tensor", "one value", "scaled", "prefix", "zeros", "other values", "first token", "other base",
)  # fmt: skip
"""Faults that are planted each time, one or two of each kind; `make test-slow` plants the others too."""


def faults(**planted: Mapping[str, tuple[Plant, str]]) -> list[Any]:
    """A parameter for each fault: merged or adapter, what plants it, and the cause that must be named."""
    return [
        pytest.param(kind, plant, cause, id=f"{kind}: {name}", marks=[] if name in QUICK else pytest.mark.slow)
        for kind, table in planted.items()
        for name, (plant, cause) in table.items()
    ]


@pytest.fixture
def copied(run: Finished, tmp_path: Path) -> Callable[[str], Path]:
    """Copies the run's merged/ or adapter/, to be spoilt."""
    return lambda name: Path(shutil.copytree(run.folder.path / name, tmp_path / name))


def ask(run: Finished, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of the verb."""
    with redirect_stdout(io.StringIO()) as out:
        code = cli.main(
            ["parity", "--run", str(run.folder.path), "--max-new-tokens", "12", "--n", "6", *words, "--json"]
        )
    content = json.loads(out.getvalue())
    documents.check(content, "$defs/error" if "error" in content else "verbs/parity")
    return code, content


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object], file: str = WEIGHTS) -> None:
    weights = load_file(folder / file)
    change(weights)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / file, {"format": "pt"})


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("against", ["merged", "adapter"])
def test_what_was_trained_is_what_plain_transformers_answers(run: Finished, against: str):
    code, found = ask(run, "--against", against)
    assert (code, found["verdict"], found["cause"]) == (0, "ok", None)
    assert (found["n"], found["same_prompt_ids"], found["same_answer_ids"]) == (6, 6, 6)
    assert found["max_logprob_diff"] < found["bound"] == 1e-4
    assert found["adapter_changes_answers"] is True
    kept = json.loads((run.folder.path / "parity.json").read_text())
    documents.check(kept, "files/parity.json")
    assert kept["results"][f"transformers-{against}"] == found


def base_weights(run: Finished) -> dict[str, torch.Tensor]:
    return load_file(Path(run.cfg.model.name) / WEIGHTS)


def in_json(name: str, **values: Any) -> Plant:
    return lambda folder, run: change_json(folder / name, **values)


def in_weights(change: Callable[[Weights], object]) -> Plant:
    return lambda folder, run: change_weights(folder, change)


def in_adapter(change: Callable[[Weights], object]) -> Plant:
    return lambda folder, run: change_weights(folder, change, ADAPTER)


def in_tokenizer(change: Callable[[dict[str, Any]], object]) -> Plant:
    def plant(folder: Path, run: Finished) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        change(content)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    return plant


def both(*plants: Plant) -> Plant:
    return lambda folder, run: [plant(folder, run) for plant in plants]


def set_template(folder: Path, run: Finished) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>", "<|im_start|> ", 1))


def split_digits(content: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}
    merges = content["model"]["merges"]  # the tiny tokenizer has learned few digits: take some words' merges away
    content["model"]["merges"] = merges[: len(merges) // 2]


def add_first_token(content: dict[str, Any]) -> None:
    first, text = {"SpecialToken": {"id": "<pad>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    special = {"<pad>": {"id": "<pad>", "ids": [0], "tokens": ["<pad>"]}}
    content["post_processor"] = {
        "type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": special
    }  # fmt: skip


def add_named_template(folder: Path, run: Finished) -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")


def name_missing_shard(folder: Path, run: Finished) -> None:
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def answer_as_base(folder: Path, run: Finished) -> None:
    change_weights(folder, lambda weights: weights.update(base_weights(run)))


def keep_old_head(folder: Path, run: Finished) -> None:
    change_weights(folder, lambda weights: weights.update({"lm_head.weight": base_weights(run)["lm_head.weight"]}))


def count_update_twice(folder: Path, run: Finished) -> None:
    base = base_weights(run)
    change_weights(folder, lambda weights: weights.update({k: 2 * v - base[k] for k, v in weights.items()}))


def set_theta(folder: Path, run: Finished) -> None:
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    change_json(folder / "config.json", rope_parameters={**rope, "rope_theta": 500.0})


def use_other_base(folder: Path, run: Finished) -> None:
    base = Path(shutil.copytree(run.cfg.model.name, folder.with_name("other-base")))
    change_weights(base, lambda weights: weights["model.layers.0.mlp.up_proj.weight"].mul_(1.5))
    change_json(folder / "adapter_config.json", base_model_name_or_path=str(base))


def narrow(weights: Weights) -> None:
    weights |= {name: value.bfloat16() for name, value in weights.items()}


def permute(weights: Weights) -> None:
    for name in [name for name in weights if "q_proj" in name or "k_proj" in name]:
        halves = weights[name].reshape(len(weights[name]) // 8, 2, 4, -1)
        weights[name] = halves.transpose(1, 2).reshape(weights[name].shape)


def swap_layers(weights: Weights) -> None:
    for name in [name for name in weights if "layers.0." in name]:
        other = name.replace("layers.0.", "layers.1.")
        weights[name], weights[other] = weights[other], weights[name]


def cut_vocabulary(weights: Weights) -> None:
    weights |= {name: weights[name][:380] for name in ("model.embed_tokens.weight", "lm_head.weight")}


def lose_layer(weights: Weights) -> None:
    for name in [name for name in weights if "layers.1.mlp" in name]:
        del weights[name]


@in_adapter
def set_prefix(weights: Weights) -> None:
    for name in list(weights):
        weights[name.replace("base_model.model.model.", "base_model.model.language_model.")] = weights.pop(name)


@in_adapter
def set_zeros(weights: Weights) -> None:
    for name, value in weights.items():
        value.mul_(0 if "lora_B" in name else 1)


@in_adapter
def set_other_values(weights: Weights) -> None:
    torch.manual_seed(1)
    for value in weights.values():
        value.add_(torch.randn_like(value) * 0.1)


CONFIG, GENERATION, LAYER = "config.json", "generation_config.json", "model.layers.1.mlp"
MERGED: dict[str, tuple[Plant, str]] = {
    "second rope_theta": (in_json(CONFIG, rope_theta=777.0), "rope_theta is 777.0 and in rope_parameters 10000.0"),
    "tied": (in_json(CONFIG, tie_word_embeddings=True), "tie_word_embeddings is true, and the stored head is not"),
    "end in config": (in_json(CONFIG, eos_token_id=5), "config.json ends answers at 5"),
    "bos": (in_json(CONFIG, bos_token_id=7), "bos_token_id is 7, the run's null"),
    "class": (in_json(CONFIG, architectures=["MistralForCausalLM"]), 'architectures is ["MistralForCausalLM"]'),
    "quantised": (
        in_json(CONFIG, quantization_config={"quant_method": "bitsandbytes"}), "quantization_config.quant_method",
    ),
    "penalty": (
        in_json(GENERATION, repetition_penalty=1.3), "generation_config.json differs: repetition_penalty is 1.3",
    ),
    "further end": (in_json(GENERATION, eos_token_id=[2, 5]), "generation_config.json ends answers at 5"),
    "added token": (in_tokenizer(lambda content: content["added_tokens"].pop()), "does not list the added token"),
    "one merge": (in_tokenizer(lambda content: content["model"]["merges"].pop()), "merges of tokenizer.json is not"),
    "first token": (in_tokenizer(add_first_token), "tokenizer differs: of 'Hello"),
    "second template": (
        in_json("tokenizer_config.json", chat_template="{{ messages }}"), "tokenizer_config.json holds another one",
    ),
    "named template": (add_named_template, "tool_use is there too"),
    "shard": (name_missing_shard, "names 1 files that are not there, model-00002-of-00002.safetensors"),
    "earlier merge": (
        both(
            in_weights(lambda weights: weights["model.layers.0.mlp.up_proj.weight"].add_(0.01)),
            in_json("merge.json", adapter_sha256="0" * 64),
        ),
        "was merged from an earlier adapter than the run's present one",
    ),
    "template": (set_template, "chat template differs at character"),
    "pre-tokenizer": (in_tokenizer(split_digits), "tokenizer differs: of "),
    "base": (answer_as_base, "is the base's, as it was before training"),
    "old head": (keep_old_head, "the head is not the trained one: lm_head.weight is the base's"),
    "rounded": (
        in_weights(lambda weights: weights.update({k: v.bfloat16().float() for k, v in weights.items()})),
        "was rounded to bfloat16 and is stored as if it were exact",
    ),
    "bf16": (
        both(in_weights(narrow), in_json(CONFIG, dtype="bfloat16")),
        "saved in the wrong precision: bfloat16, merge.json says the merge made float32",
    ),
    "bf16 in config": (
        in_json(CONFIG, dtype="bfloat16"), "the weights are saved in float32, config.json says bfloat16",
    ),
    "permuted": (in_weights(permute), "rows in another order (permuted for another rotary embedding, or not permuted)"),
    "swapped layers": (in_weights(swap_layers), "is the run's model.layers.1."),
    "lost tensor": (
        in_weights(lambda weights: weights.pop(f"{LAYER}.up_proj.weight")),
        f"1 weights are missing, {LAYER}.up_proj.weight",
    ),
    "vocabulary": (
        both(in_weights(cut_vocabulary), in_json(CONFIG, vocab_size=380)), "vocab_size is 380, the run's 400",
    ),
    "update twice": (count_update_twice, "holds 2 times the update of the training"),
    "rope_theta": (set_theta, "rope_parameters.rope_theta is 500.0, the run's 10000.0"),
    "end": (
        both(in_json(CONFIG, eos_token_id=5), in_json(GENERATION, eos_token_id=5)),
        "ends answers at [5], training at 2",
    ),
    "one value": (
        in_weights(lambda weights: weights[f"{LAYER}.down_proj.weight"][3, 4].add_(1.0)),
        f"{LAYER}.down_proj.weight differs by up to 1 in 1 of 32 rows",
    ),
}  # fmt: skip
IN_PLACE: dict[str, tuple[Plant, str]] = {
    "prefix": (set_prefix, "keys match 1 of 15 modules; base_model.model.language_model."),
    "zeros": (set_zeros, "the adapter is all zeros: none of its 14 lora_B"),
    "alpha": (in_json("adapter_config.json", lora_alpha=16), "lora_alpha is 16, the run's 8"),
    "scale rule": (in_json("adapter_config.json", use_rslora=True), "use_rslora is true, the run's false"),
    "lost layer": (in_adapter(lose_layer), "keys match 12 of 15 modules"),
    "other values": (set_other_values, "adapter/ is not what the training left in checkpoint-4: 29 of 29 tensors"),
}
"""Faults of an adapter that are seen also in the run's own one."""

IN_COPY: dict[str, tuple[Plant, str]] = IN_PLACE | {
    "other values": (set_other_values, "lm_head.weight is not the run's): 29 of 29"),
    "template": (set_template, "chat template differs at character"),
    "half a pair": (
        in_adapter(lambda weights: weights.pop(next(name for name in weights if "lora_A" in name))),
        "lora_A.weight is missing",
    ),
    "scaled": (
        in_adapter(lambda weights: [v.mul_(1.001) for k, v in weights.items() if "lora_B" in k]),
        "lora_B.weight holds 1.001 times its values",
    ),
    "bf16": (in_adapter(narrow), "saved in the wrong precision: bfloat16, the run's float32"),
    "swapped layers": (in_adapter(swap_layers), "is the run's base_model.model.model.layers.1."),
    "few targets": (
        in_json("adapter_config.json", target_modules=["q_proj"]), "target_modules names 2 of 14 modules",
    ),
    "other base": (use_other_base, "its base is "),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "plant", "cause"), faults(merged=MERGED, adapter=IN_COPY))
def test_what_is_not_the_trained_model_is_refused_with_its_fault(
    kind: str, plant: Plant, cause: str, run: Finished, copied: Callable[[str], Path]
):
    folder = copied(kind)
    plant(folder, run)
    code, found = ask(run, "--served", str(folder), "--n", "2", "--max-new-tokens", "4")
    assert (code, found["verdict"]) == (5, "differs")
    assert cause in found["cause"]


@pytest.fixture
def own_adapter(run: Finished) -> Iterator[Path]:
    """The run's own adapter, put back behind the test."""
    folder = run.folder.path / "adapter"
    kept = Path(shutil.copytree(folder, folder.with_name("kept")))
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)


@pytest.mark.parametrize(("kind", "plant", "cause"), faults(adapter=IN_PLACE))
def test_a_fault_in_the_runs_own_adapter_is_seen_although_the_reference_has_it_too(
    kind: str, plant: Plant, cause: str, run: Finished, own_adapter: Path
):
    plant(own_adapter, run)
    code, found = ask(run, "--against", kind)
    assert (code, found["verdict"]) == (5, "differs")
    assert cause in found["cause"]


def test_another_template_in_the_run_itself_is_told_from_the_trained_one(run: Finished, own_adapter: Path):
    set_template(own_adapter, run)  # headers in training and at inference are not the same any more
    code, found = ask(run, "--against", "adapter")
    assert code == 5
    assert "is not the one of the training" in found["error"]["what"]
    template = own_adapter / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|> ", "<|im_start|>") + "{# new #}")
    code, found = ask(run, "--against", "adapter")
    assert code == 5
    assert "is not the one of the training" in found["cause"]


def test_a_tied_head_that_was_saved_apart_is_named(inputs: Inputs, tmp_path: Path):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    model = lively_model(base)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(base)
    done = train(tmp_path, Inputs(base, inputs.train, inputs.held_out), train__learning_rate=0.05)
    merged = merge(done.cfg, done.folder, out=done.folder.path / "merged")
    assert ask(done)[0] == 0
    stale = load_file(merged / WEIGHTS)["model.embed_tokens.weight"] * 0.9
    change_weights(merged, lambda weights: weights.update({"lm_head.weight": stale}))
    change_json(merged / "config.json", tie_word_embeddings=False)
    code, found = ask(done)
    assert code == 5
    assert "the head is not the trained one: lm_head.weight" in found["cause"]


def test_a_base_that_is_served_is_told_from_the_adapter(run: Finished, copied: Callable[[str], Path]):
    folder = copied("merged")
    answer_as_base(folder, run)
    _, found = ask(run, "--served", str(folder))
    assert found["adapter_changes_answers"] is False
    first = found["first_difference"]
    assert first["wanted"] != first["found"]
    assert first["position"] >= 0


def test_a_training_that_changes_next_to_nothing_is_said_and_is_no_fault(inputs: Inputs, tmp_path: Path):
    done = train(tmp_path, inputs, train__learning_rate=1e-9, train__max_steps=1)
    code, found = ask(done, "--against", "adapter")
    assert (code, found["verdict"], found["adapter_changes_answers"]) == (0, "ok", None)
    assert any("the training itself moves no log-probability by more than" in note for note in found["notes"])


def test_a_run_of_all_weights_is_held_against_its_model(inputs: Inputs, tmp_path: Path):
    done = train(tmp_path, inputs, tuning__mode="full", train__learning_rate=0.01)
    code, found = ask(done)
    assert (code, found["against"], found["same_answer_ids"]) == (0, "merged", 6)
    assert found["adapter_changes_answers"] is True


def test_rows_of_a_file_are_asked(run: Finished, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "the river walks"}\n{"messages": [{"role": "user", "content": "seven old boats"}]}\n')
    code, found = ask(run, "--in", str(rows))
    assert (code, found["n"], found["prompts"]) == (0, 2, str(rows))


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--against", "gguf"], 2, "does not serve a GGUF file"),
        (["--served", "/nowhere"], 2, "is not there"),
        (["--url", "http://127.0.0.1:9"], 3, "does not answer"),
    ],
    ids=str,
)
def test_what_cannot_be_held_against_a_run_is_refused(run: Finished, words: list[str], code: int, what: str):
    name, output_dir = run.folder.path.name, f"output_dir={run.folder.path.parent}"
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main(["parity", "--run", name, output_dir, *words, "--json"]) == code
    assert what in json.loads(out.getvalue())["error"]["what"]


def test_gguf_files_of_an_export_that_was_killed_are_not_taken(tmp_path: Path):
    for name in (".export-gguf.part", "export-gguf"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run-f16.gguf").touch()
    assert find_gguf_files(RunFolder(tmp_path)) == [tmp_path / "export-gguf" / "run-f16.gguf"]


def test_report_and_card_say_which_engines_the_run_was_held_against(run: Finished):
    from sftplay.export.export import export

    ask(run, "--against", "adapter")
    out = export(run.cfg, run.folder, out=run.folder.path / "export")
    before = (out / "README.md").read_text()
    assert "| adapter | 20" in before
    ask(run, "--against", "merged", "--n", "3")
    after = (out / "README.md").read_text()
    assert "| merged | 20" in after
    assert "| 3 of 3 | 3 of 3 |" in after
    assert after.partition("## Engines")[0] == before.partition("## Engines")[0]
    page = (run.folder.path / "report.html").read_text()
    assert all(text in page for text in ("Engines", "3 of 3", "Largest difference"))
    assert str(run.folder.path) not in after


def test_a_run_of_plain_texts_is_asked_their_beginnings_and_keeps_its_bases_template(inputs: Inputs, tmp_path: Path):
    base = Path(shutil.copytree(inputs.model, tmp_path / "base"))
    lively_model(base).save_pretrained(base)
    for name, last in (("train", "river"), ("held-out", "hills")):
        rows = [
            {"text": f"the stone {n} walks under green light and asks why seven old boats {last}"} for n in range(40)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = Inputs(base, tmp_path / "train.jsonl", tmp_path / "held-out.jsonl")
    done = train(tmp_path, files, task_mode="cpt", train__learning_rate=0.05)
    code, found = ask(done, "--against", "adapter", "--n", "2")
    assert (code, found["cause"], found["prompts"]) == (0, None, "held-out")


def test_vllm_is_asked_to_read_no_more_than_the_model_does(run: Finished, monkeypatch: pytest.MonkeyPatch):
    merged = run.folder.path / "merged"
    context = json.loads((merged / "config.json").read_text())["max_position_embeddings"]
    asked = list[int]()

    def build(*_: Any, max_model_len: int, **__: Any) -> None:
        asked.append(max_model_len)
        raise RunError("that is all")

    monkeypatch.setattr(by_vllm, "build_server", build)
    for tokens in (40, context - 8):
        question = Question(0, None, "", list(range(tokens)))
        with pytest.raises(RunError, match="that is all"):
            by_vllm.answer_all(merged, [question], max_new_tokens=7, log_file=merged / "log")
    assert asked == [40 + 7 + 16, context]
