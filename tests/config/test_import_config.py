"""`import-config`: every leaf of another kit's config is answered; what is written is the same run, or is refused."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sftplay.cli import main
from sftplay.config.keys import all_keys, list_keys
from sftplay.config.kits.conversions import CONVERSIONS, HAND_ON_STATES
from sftplay.config.kits.convert import Imported, import_config
from sftplay.config.kits.table import Kit, read_kits
from sftplay.config.load import load_config
from sftplay.data.records import Chat, Message, Source
from sftplay.data.render.templates import ChatTemplate
from sftplay.errors import ConfigError
from sftplay.plan.find_shape import find_shape, read_table
from sftplay.runs.inputs import known_shape

ROOT = Path(__file__).resolve().parents[2]
CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("foreign_configs.yaml").read_text())
COLLECTION = ROOT.parent / "shared" / "data" / "foreign-configs"
REAL = sorted(path for path in COLLECTION.glob("*/*.y*ml"))
needs_collection = pytest.mark.skipif(not REAL, reason="needs ../shared/data/foreign-configs")
VERDICTS = {"translated", "no_effect", "auto", "not_offered"}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def write(folder: Path, case: str, **changes: Any) -> Path:
    path = folder / f"{case}.yaml"
    path.write_text(yaml.safe_dump(CASES[case] | changes, sort_keys=False))
    return path


def imported(folder: Path, case: str, **changes: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Imported]:
    """The config that was written, its fields by their keys, and all of it."""
    made = import_config(write(folder, case, **changes))
    return yaml.safe_load(made.text), {one["key"]: one for one in made.fields}, made


def count_leaves(value: Any) -> int:
    """Count as the promise does: what is neither a mapping nor a list with one in it; an empty one is a leaf."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    is_whole = not inner or (isinstance(value, list) and not any(isinstance(one, dict) for one in inner))
    return 1 if is_whole else sum(count_leaves(one) for one in inner)


@pytest.fixture(scope="module")
def real() -> dict[Path, Imported]:
    return {path: import_config(path) for path in REAL}


def problems_of(path: Path, made: Imported) -> Iterator[str]:
    """What is wrong with the answer for a file."""
    tree = yaml.safe_load(path.read_text())
    kind = {"axolotl": "axolotl", "LLaMA-Factory": "llamafactory"}.get(path.parent.name, path.stem.partition("-")[0])
    if made.kit.name != kind:
        yield f"{path.name}: taken for {made.kit.name}"
    if len(made.fields) != count_leaves(tree) or len({one["key"] for one in made.fields}) != len(made.fields):
        yield f"{path.name}: {len(made.fields)} answers for {count_leaves(tree)} leaves"
    for one in made.fields:
        if one["verdict"] not in VERDICTS or not (one["why"] or one["became"]):
            yield f"{path.name} {one['key']}: {one['verdict']} without a reason"
        if one["verdict"] in ("translated", "auto") and one["became"] is None:
            yield f"{path.name} {one['key']}: {one['verdict']} and no key of ours"
    refused = re.findall(r"^# NOT OFFERED", made.text, re.M)
    for problem in made.problems:
        has_no_rows = "data.train_path" in problem.where
        if not has_no_rows and not (refused and "task_mode" in problem.where):
            yield f"{path.name}: {problem}"


@pytest.mark.parametrize("case", CASES)
def test_each_leaf_has_one_answer_and_what_is_written_validates_or_is_refused_by_its_kind(case, tmp_path):
    path = write(tmp_path, case)
    assert list(problems_of(path, import_config(path))) == []


@needs_collection
def test_each_leaf_of_the_real_configs_has_one_answer_and_what_is_written_validates_or_is_refused(real):
    assert [problem for path, made in real.items() for problem in problems_of(path, made)] == []


@needs_collection
def test_at_most_one_in_a_hundred_keys_of_the_real_configs_is_unknown(real):
    fields = [one for made in real.values() for one in made.fields]
    unknown = [one["key"] for one in fields if "is not known of" in one["why"]]
    assert len(unknown) <= len(fields) / 100, Counter(unknown)


@needs_collection
@pytest.mark.slow
def test_nearly_all_real_configs_of_text_that_can_train_here_plan_unedited(tmp_path, capsys):
    """The others name pictures, or nothing to train on. That only the hub knows a model's shape counts."""
    planned, causes = 0, Counter[str]()
    for path in REAL:
        made = import_config(path, nproc=8)
        if made.problems:
            causes["not trained here"] += 1
            continue
        out = tmp_path / f"{path.stem}.yaml"
        out.write_text(made.text)
        if known_shape(load_config(out)) is None:
            causes["shape not known here"] += 1
            continue
        capsys.readouterr()  # what was said where transformers' own class had to count it
        code = main(["plan", "--config", str(out), "--gpus", "8xH100", "--json"])
        plan = json.loads(capsys.readouterr().out)
        planned += "verdict" in plan
        causes[plan.get("verdict") or f"{code}: {plan['error']['what'][:60]}"] += 1
    trained = len(REAL) - causes["not trained here"]
    assert planned / (trained - causes["shape not known here"]) > 0.95, causes
    assert planned / trained > 0.6, causes


def test_a_qlora_config_of_axolotl_becomes_the_same_run(tmp_path):
    ours, fields, made = imported(tmp_path, "axolotl-qlora")
    assert made.problems == []
    assert ours["model"] == {"name": "NousResearch/Llama-2-7b-hf", "max_seq_len": 4096, "attn": "auto"}
    lora = {"r": 32, "alpha": 16, "dropout": 0.05, "target_modules": "auto"}
    assert ours["tuning"] == {"mode": "qlora", "lora": lora}
    train = ours["train"]
    assert float(train["learning_rate"]) == 2e-4
    assert (train["effective_batch_size"], train["epochs"], train["max_steps"]) == (8, 4, 200)
    assert (train["optim"], train["lr_scheduler"], train["warmup_ratio"]) == ("paged_adamw_32bit", "cosine", 0.05)
    assert (train["packing"], train["gradient_checkpointing"]) == (True, True)
    assert ours["data"]["train_path"] == "mhenrichsen/alpaca_2k_test"
    assert (ours["data"]["format"], ours["data"]["split"]) == ("alpaca", 0.05)
    assert ours["data"]["template"] == "configs/templates/alpaca.jinja"
    assert fields["tf32"]["verdict"] == fields["wandb_project"]["verdict"] == "no_effect"
    assert fields["attn_implementation"]["verdict"] == "auto"
    # axolotl counts blocks of sequence_len tokens, this kit rows.
    assert re.search(r"^# - sample_packing: true - .*multiply train.effective_batch_size", made.text, re.M)


def test_rows_of_a_model_whose_layers_carry_a_state_are_not_packed_and_the_head_says_why(tmp_path, capsys):
    """The plan refuses `train.packing: true` for Qwen3.5, whose linear attention hands a row's state to the next."""
    changes = {"base_model": "Qwen/Qwen3.5-27B", "sample_packing": True}
    ours, fields, made = imported(tmp_path, "axolotl-qlora", **changes)
    assert ours["train"]["packing"] == "auto"
    assert (fields["sample_packing"]["verdict"], fields["sample_packing"]["became"]) == ("auto", "train.packing")
    assert re.search(r"^# - sample_packing: true - .*carry a state along the row", made.text, re.M)
    out = tmp_path / "run.yaml"
    out.write_text(made.text)
    assert main(["plan", "--config", str(out), "--gpus", "8xH100", "--json"]) == 0
    assert "verdict" in json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_the_names_of_models_whose_rows_are_not_packed_are_those_of_the_table_of_shapes():
    shapes = {name: find_shape(name) for name in read_table()}
    known = {name for name, shape in shapes.items() if shape is not None and shape.state_leaks}
    assert known
    assert known == {name for name in shapes if any(part in name.lower() for part in HAND_ON_STATES)}


def test_defaults_of_axolotl_that_are_not_ours_are_written_out(tmp_path):
    """Values from axolotl 0.18.0: schemas/config.py and training.py, core/builders/base.py."""
    ours, _, made = imported(tmp_path, "axolotl-bare")
    assert ours["model"]["max_seq_len"] == 512
    assert ours["tuning"]["mode"] == "full"
    train = ours["train"]
    assert (train["epochs"], train["effective_batch_size"], train["packing"]) == (1.0, 1, False)
    assert (train["lr_scheduler"], train["weight_decay"], train["optim"]) == ("cosine", 0.0, "adamw_torch_fused")
    assert (train["gradient_checkpointing"], train["save_total_limit"]) == (False, 4)
    assert (ours["data"]["split"], ours["data"]["too_long"], ours["data"]["template"]) == (0, "drop", "auto")
    assert "max_seq_len: 512                           # axolotl's default of sequence_len 512" in made.text


def test_defaults_of_llamafactory_that_are_not_ours_are_written_out(tmp_path):
    """Values from LLaMA-Factory 0.9.6.dev0: hparams/*.py; transformers' TrainingArguments."""
    ours, _, _ = imported(tmp_path, "llamafactory-bare")
    assert ours["model"]["max_seq_len"] == 2048
    assert ours["tuning"] == {"mode": "lora", "lora": {"r": 8, "dropout": 0.0, "target_modules": "auto"}}
    train = ours["train"]
    assert float(train["learning_rate"]) == 5e-5
    assert (train["lr_scheduler"], train["warmup_ratio"], train["epochs"]) == ("linear", 0.0, 3.0)
    assert (train["effective_batch_size"], train["packing"], train["save_steps"]) == (8, False, 500)
    assert (ours["data"]["train_path"], ours["data"]["split"]) == ("llamafactory/alpaca_en", 0)
    assert ours["logging"]["steps"] == 500


def test_rows_of_a_step_are_multiplied_by_the_gpus(tmp_path):
    path = write(tmp_path, "axolotl-full-fsdp")
    one, eight = (yaml.safe_load(import_config(path, nproc=n).text)["train"] for n in (1, 8))
    assert (one["effective_batch_size"], eight["effective_batch_size"]) == (8, 64)


def test_fsdp_columns_roles_and_an_optimizer_that_is_not_offered(tmp_path):
    ours, fields, _ = imported(tmp_path, "axolotl-full-fsdp")
    assert ours["cluster"]["strategy"] == "fsdp"
    assert (ours["data"]["format"], ours["data"]["columns"]) == ("sharegpt", {"conversations": "talk"})
    assert ours["data"]["template"] == "chatml"
    assert (fields["optimizer"]["verdict"], fields["optimizer"]["became"]) == ("not_offered", "train.optim")
    assert ours["train"]["optim"] == "adamw_torch_fused"
    assert fields["fsdp_config.fsdp_offload_params"]["verdict"] == "no_effect"
    assert fields["datasets.0.roles.assistant"]["verdict"] == "no_effect"
    _, fields, _ = imported(tmp_path, "axolotl-full-fsdp", fsdp_config={"fsdp_offload_params": True})
    assert fields["fsdp_config.fsdp_offload_params"]["verdict"] == "not_offered"


def test_documents_become_blocks_and_a_deepspeed_path_its_stage(tmp_path):
    ours, fields, _ = imported(tmp_path, "axolotl-documents")
    assert ours["task_mode"] == "cpt"
    assert (ours["data"]["train_path"], ours["data"]["columns"]) == ("corpus.jsonl", {"text": "body"})
    assert ours["cluster"] == {"strategy": "zero3", "deepspeed": "deepspeed_configs/zero3_offload.json"}
    # A block is a row of a step there too, so nothing is to be multiplied.
    assert (fields["sample_packing"]["verdict"], fields["sample_packing"]["became"]) == ("auto", "task_mode")
    ours, _, _ = imported(tmp_path, "llamafactory-full-zero")
    assert (ours["task_mode"], ours["cluster"]["strategy"]) == ("cpt", "zero2")


def test_a_deepspeed_file_that_is_there_says_the_stage_itself(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    ours, _, _ = imported(tmp_path, "llamafactory-full-zero", deepspeed="mine.json")
    assert ours["cluster"]["strategy"] == "zero1"


def test_several_sets_are_mixed_and_the_head_says_what_that_means(tmp_path):
    ours, fields, made = imported(tmp_path, "axolotl-two-sets")
    assert [(one["name"], one["path"], one["type"]) for one in ours["datasets"]] == [
        ("one", "org/one", "chat"),
        ("two", "org/two", "chat"),
    ]
    assert (ours["task_mode"], fields["datasets.1.path"]["became"]) == ("cpt_mixed", "datasets")
    assert fields["datasets.1.split"]["verdict"] == "not_offered"
    assert re.search(r"^# - datasets.0.path: org/one - .*equal shares, as the sizes are not known", made.text, re.M)


@pytest.mark.parametrize(
    ("case", "key", "changes"),
    [
        (
            "axolotl-dpo",
            "datasets.0.path",
            {"datasets": [{"path": "org/a", "type": "chatml.ultra"}, {"path": "org/b"}]},
        ),
        ("llamafactory-bare", "dataset", {"stage": "dpo", "dataset": "dpo_en_demo,ultrafeedback"}),
        ("swift-dpo", "dataset", {"dataset": ["org/a", "org/b"]}),
        ("trl-dpo", "dataset_mixer.org/a", {"dataset_name": None, "dataset_mixer": {"org/a": 1.0, "org/b": 1.0}}),
    ],
)
def test_several_sets_of_pairs_are_refused_and_neither_one_alone_nor_another_task_trains(tmp_path, case, key, changes):
    ours, fields, made = imported(tmp_path, case, **changes)
    assert (ours["task_mode"], ours.get("data", {}).get("train_path")) == ("dpo", None)
    assert fields[key]["verdict"] == "not_offered"
    assert ["data.train_path" in problem.where for problem in made.problems] == [True]
    head = made.text.partition("# NOT OFFERED, so `validate` refuses this config")[2].partition("\n\n")[0]
    assert f"# - {key}: " in head
    assert "into one file or folder, and name it with data.train_path" in head


def test_dataset_info_says_where_rows_lie_and_their_number_is_their_share(tmp_path):
    info = {
        "mine": {"file_name": "mine.json", "columns": {"prompt": "frage", "response": "antwort"}},
        "talk": {"file_name": "talk.jsonl", "formatting": "sharegpt", "columns": {"messages": "turns"}},
    }
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text(json.dumps(info))
    (data / "mine.json").write_text(json.dumps([{"frage": "a", "antwort": "b"}] * 3))
    ours, _, _ = imported(tmp_path, "llamafactory-lora", dataset="mine")
    assert ours["data"]["train_path"] == str(data / "mine.json")
    assert ours["data"]["columns"] == {"instruction": "frage", "output": "antwort"}
    ours, _, _ = imported(tmp_path, "llamafactory-lora", dataset="talk")
    assert (ours["data"]["format"], ours["data"]["columns"]) == ("sharegpt", {"conversations": "turns"})
    (data / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json"}, "b": {"file_name": "b.jsonl"}}))
    row = {"instruction": "x\u2028", "output": "y\x85"}  # neither ends a line of JSON
    (data / "a.json").write_text(json.dumps([row] * 3))
    (data / "b.jsonl").write_text(f"{json.dumps(row, ensure_ascii=False)}\n" * 5)
    ours, _, _ = imported(tmp_path, "llamafactory-lora", dataset="a, b")
    assert [one["weight"] for one in ours["datasets"]] == [3.0, 5.0]
    assert ours["cpt"] == {"weights_of": "examples"}
    # Its shares are read where it interleaves; without any it takes the sets by turns (0.9.6, data/data_utils.py).
    probs = {"interleave_probs": "0.7, 0.3"}
    for options, weights, said in (
        (probs, [3.0, 5.0], "shares by their rows"),
        (probs | {"mix_strategy": "interleave_under"}, [0.7, 0.3], "the shares that it names"),
        ({"mix_strategy": "interleave_over"}, [1.0, 1.0], "the shares that it names"),
    ):
        ours, _, made = imported(tmp_path, "llamafactory-lora", dataset="a, b", **options)
        assert [one["weight"] for one in ours["datasets"]] == weights
        assert said in made.text
    (data / "a.json").write_text(json.dumps({"version": 1, "data": [row]}, indent=1))
    _, _, made = imported(tmp_path, "llamafactory-lora", dataset="a, b")
    assert "equal shares, as the sizes are not known here" in made.text


@pytest.mark.parametrize(
    ("case", "mode"), [("axolotl-steps", "process_reward_model"), ("llamafactory-pictures", "multimodal")]
)
def test_a_kind_of_training_that_is_not_offered_is_written_so_that_nothing_trains(case, mode, tmp_path, capsys):
    out = tmp_path / "run.yaml"
    assert main(["import-config", "--in", str(write(tmp_path, case)), "--out", str(out), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["validates"] is False
    assert len(answer["fields"]) == count_leaves(CASES[case])
    assert yaml.safe_load(out.read_text())["task_mode"] == mode
    assert main(["train", "--config", str(out), "--dry-run"]) == 2
    assert f"no task called '{mode}'" in capsys.readouterr().err


def test_keys_that_belong_to_something_else_that_is_off_have_no_effect(tmp_path):
    _, fields, _ = imported(tmp_path, "llamafactory-full-zero")
    assert (fields["lora_rank"]["verdict"], fields["lora_rank"]["why"]) == (
        "no_effect",
        "only where finetuning_type is lora",
    )
    assert fields["badam_mode"]["verdict"] == "not_offered"
    _, fields, _ = imported(tmp_path, "llamafactory-full-zero", use_badam=False)
    assert fields["badam_mode"]["verdict"] == "no_effect"


def test_an_unknown_key_is_named_with_its_nearest(tmp_path):
    _, fields, made = imported(tmp_path, "axolotl-bare", micro_batch_sise=4)
    field = fields["micro_batch_sise"]
    assert (field["verdict"], field["became"]) == ("not_offered", None)
    assert field["why"] == "this key is not known of axolotl; did you mean micro_batch_size?"
    assert "# - micro_batch_sise: 4 - this key is not known" in made.text


def test_a_value_that_this_kit_refuses_is_left_out_and_said(tmp_path):
    ours, fields, made = imported(tmp_path, "axolotl-bare", cosine_min_lr_ratio=1.0, early_stopping_patience=3)
    assert made.problems == []
    assert "min_lr_ratio" not in ours["train"]
    assert fields["cosine_min_lr_ratio"]["verdict"] == "not_offered"
    assert fields["cosine_min_lr_ratio"]["why"].startswith("refused here: 1.0 is not a number")
    assert "needs held-out rows" in fields["early_stopping_patience"]["why"]


def test_a_token_is_nowhere_in_the_answer(tmp_path, capsys):
    out = tmp_path / "run.yaml"
    source = write(tmp_path, "llamafactory-lora")
    assert main(["import-config", "--in", str(source), "--out", str(out), "--json"]) == 0
    assert "not_a_real_token" not in capsys.readouterr().out + out.read_text()


@pytest.mark.contract
def test_the_verb_writes_a_config_that_validates_and_prints_what_became_of_each_field(tmp_path, capsys):
    source, out = write(tmp_path, "llamafactory-lora"), tmp_path / "run.yaml"
    assert main(["import-config", "--in", str(source), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"^learning_rate +0.0001 +train.learning_rate$", shown.out, re.M)
    assert re.search(r"^max_samples +1000 +NOT OFFERED: all rows are read", shown.out, re.M)
    assert f"LLaMA-Factory: {count_leaves(CASES['llamafactory-lora'])} fields" in shown.out + shown.err
    assert main(["validate", "--config", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["train"]["eval_steps"] == 500


@pytest.mark.contract
def test_a_file_that_is_there_is_refused_before_anything_else(tmp_path, capsys):
    out = tmp_path / "run.yaml"
    out.write_text("mine")
    assert main(["import-config", "--in", str(tmp_path / "nowhere"), "--out", str(out)]) == 2
    assert "run.yaml" in capsys.readouterr().err
    assert out.read_text() == "mine"


@pytest.mark.contract
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a: [1\nb: 2", "is not YAML"),
        ("- a\n- b", "holds no keys with values"),
        ("", "holds no keys with values"),
        ("model: {name: builtin:tiny}\ntrain: {epochs: 1}", "is no config of"),
        ("distributed_type: FSDP\nnum_processes: 2", "is no config of"),
        ("base_model: &loop {inner: *loop}", "lead round in a circle"),
    ],
    ids=["no YAML", "a list", "empty", "one of this kit", "accelerate's", "endless"],
)
def test_a_file_of_no_kit_is_refused_with_place_and_remedy(text, what, tmp_path, capsys):
    path, out = tmp_path / "odd.yaml", tmp_path / "run.yaml"
    path.write_text(text)
    assert main(["import-config", "--in", str(path), "--out", str(out), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert what in error["what"]
    assert error["where"].startswith(str(path))
    assert error["fix"]
    assert ("make train-distributed" in error["fix"]) == ("distributed_type" in text)
    assert not out.exists()


ODD = (
    None,
    [],
    {},
    "",
    "x",
    0,
    -1,
    True,
    2.5,
    float("inf"),
    "2e-5",
    ["a"],
    [{}],
    {"a": {"b": None}},
    10**30,
    "\u00e9: #\n",
)


def list_paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield (*at, name)
        yield from list_paths(inner, (*at, name))


@given(case=st.sampled_from(sorted(CASES)), data=st.data())
def test_any_value_of_any_key_is_answered(case, data, tmp_path):
    tree = copy.deepcopy(CASES[case])
    for _ in range(data.draw(st.integers(1, 4))):
        *outer, last = data.draw(st.sampled_from(list(list_paths(tree))))
        place: Any = tree
        for name in outer:
            place = place[name]
        place[last] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    path = tmp_path / f"{case}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    made = import_config(path, case.partition("-")[0])
    assert len(made.fields) == count_leaves(yaml.safe_load(path.read_text()))
    assert json.loads(json.dumps(made.fields, allow_nan=False)) == made.fields
    assert all(one["became"] for one in made.fields if one["verdict"] in ("translated", "auto"))


def test_the_kind_can_be_named_where_the_keys_do_not_tell(tmp_path):
    path = tmp_path / "few.yaml"
    path.write_text("model_name_or_path: builtin:tiny\nlearning_rate: 1e-4\n")
    assert import_config(path, "llamafactory").kit.name == "llamafactory"


def test_the_alpaca_template_writes_the_prompt_of_axolotl():
    """prompters.py of axolotl 0.18.0, style instruct, without an input."""
    template = ChatTemplate(
        (ROOT / "configs/templates/alpaca.jinja").read_text(), {"bos_token": "<s>", "eos_token": "</s>"}
    )
    chat = Chat((Message("user", "Name a colour."), Message("assistant", "Red.")), Source("rows", 1))
    text, learned = template.render(chat.messages)
    system = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    assert text == f"<s>{system}\n\n### Instruction:\nName a colour.\n\n### Response:\nRed.</s>"
    assert [text[start:end] for start, end in learned] == ["Red.</s>"]


@pytest.mark.parametrize("kit", read_kits().values(), ids=read_kits())
def test_a_table_names_keys_of_ours_and_conversions_that_exist_and_each_key_once(kit: Kit):
    ours = {*all_keys(), *list_keys()}
    targets = [rule if isinstance(rule, str) else rule.get("to", "") for rule in kit.rules.values()]
    inside = ("train.extra.", "grpo.extra.", "data.columns.")
    wrong = [key for key in targets if key and key not in ours and not key.startswith(inside)]
    autos = [reason.partition(": ")[0] for reason in kit.auto]
    assert wrong + [key for key in autos if key not in ours and "." in key] == []
    assert {rule["by"] for rule in kit.rules.values() if isinstance(rule, dict) and "by" in rule} <= set(CONVERSIONS)
    groups = [*kit.no_effect.values(), *kit.auto.values(), *kit.not_offered.values()]
    named = Counter(name for names in groups for name in set(names.split()))
    assert [name for name in kit.rules if name in named] == []
    assert set(kit.defaults) <= set(kit.rules), "a default goes through a rule"


def test_a_config_of_another_kit_that_is_validated_is_sent_to_the_import(tmp_path, capsys):
    path = write(tmp_path, "axolotl-qlora")
    assert main(["validate", "--config", str(path), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["where"], error["what"]) == (str(path), "seems to be a config of another kit")
    assert f"make import-config IN={path}" in error["fix"]


def test_a_key_that_another_one_has_decided_says_so(tmp_path):
    ours, fields, _ = imported(tmp_path, "axolotl-bare", noisy_embedding_alpha=5, neftune_noise_alpha=10)
    assert ours["train"]["neftune_alpha"] == 5
    assert (fields["neftune_noise_alpha"]["verdict"], fields["neftune_noise_alpha"]["became"]) == ("no_effect", None)
    assert fields["neftune_noise_alpha"]["why"] == "train.neftune_alpha is 5 by another key"


def test_a_type_of_ones_own_names_columns_and_its_prompt_is_not_offered(tmp_path):
    kind = {
        "system_prompt": "Be brief.",
        "field_instruction": "q",
        "field_output": "output",
        "format": "[INST] {instruction}",
    }
    ours, fields, _ = imported(tmp_path, "axolotl-bare", datasets=[{"path": "org/rows", "type": kind}])
    assert (ours["data"]["format"], ours["data"]["columns"]) == ("alpaca", {"instruction": "q"})
    assert ours["data"]["system"] == "Be brief."
    assert fields["datasets.0.type.format"]["verdict"] == "not_offered"


def test_a_warm_up_of_no_steps_gives_way_to_the_share_but_in_axolotl(tmp_path):
    """transformers' TrainingArguments.get_warmup_steps of 4.x: steps above 0 decide; axolotl 0.18.0, base.py: any."""
    both = {"warmup_steps": 0, "warmup_ratio": 0.1}
    ours, fields, _ = imported(tmp_path, "llamafactory-lora", **both)
    assert ours["train"]["warmup_ratio"] == 0.1
    assert fields["warmup_steps"]["why"] == "it is off, so warmup_ratio decides"
    ours, fields, _ = imported(tmp_path, "axolotl-bare", **dict(reversed(both.items())))
    assert ours["train"]["warmup_ratio"] == 0.0
    assert fields["warmup_ratio"]["verdict"] == "no_effect"


@pytest.mark.parametrize("on", [True, False])
def test_axolotl_keeps_the_best_weights_where_each_checkpoint_falls_on_an_evaluation(on, tmp_path):
    """core/builders/causal.py and utils/config/__init__.py of axolotl 0.18.0; a file that is silent means true."""
    per_epoch = {"saves_per_epoch": 1, "evals_per_epoch": 4 if on else None}
    ours, _, made = imported(tmp_path, "axolotl-bare", val_set_size=0.1, num_epochs=4, **per_epoch)
    assert (ours["train"].get("best_metric"), made.problems) == ("loss" if on else None, [])
    steps = {"save_steps": 100, "eval_steps": 50 if on else 30, "load_best_model_at_end": True}
    ours, _, _ = imported(tmp_path, "axolotl-bare", val_set_size=0.1, **steps)
    assert ours["train"].get("best_metric") == ("loss" if on else None)
    ours, _, _ = imported(tmp_path, "axolotl-bare", **steps)
    assert "best_metric" not in ours["train"]


def test_the_name_of_a_metric_alone_picks_no_best_weights(tmp_path):
    for case in ("axolotl-bare", "llamafactory-lora", "trl-bare"):
        ours, fields, _ = imported(tmp_path, case, metric_for_best_model="eval_loss", load_best_model_at_end=False)
        assert ("best_metric" in ours["train"], fields["metric_for_best_model"]["verdict"]) == (False, "no_effect")


def test_steps_between_checkpoints_count_only_where_the_strategy_is_steps(tmp_path):
    ours, fields, _ = imported(tmp_path, "llamafactory-lora", save_strategy="epoch", save_steps=50)
    assert ("save_steps" in ours["train"], fields["save_steps"]["verdict"]) == (False, "auto")
    ours, _, _ = imported(tmp_path, "llamafactory-bare", save_strategy="epoch")
    assert "save_steps" not in ours["train"], "the default of 500 steps is none of the strategy epoch"


@pytest.mark.parametrize("key", ["use_wandb", "use_mlflow", "use_tensorboard", "use_swanlab", "wandb_project"])
def test_a_tracker_that_is_switched_off_is_not_switched_on(key, tmp_path):
    ours, fields, _ = imported(tmp_path, "axolotl-bare", **{key: "" if key == "wandb_project" else False})
    assert fields[key]["verdict"] == "no_effect"
    assert "logging" not in ours


def test_documents_by_a_name_alone_or_without_a_type_are_read_as_axolotl_does(tmp_path):
    """utils/data/sft.py and schemas/datasets.py of axolotl 0.18.0: the type of documents is pretrain."""
    for sets in ("org/texts", [{"path": "org/texts", "text_column": "body"}]):
        ours, _, _ = imported(tmp_path, "axolotl-bare", pretraining_dataset=sets, datasets=None)
        assert (ours["task_mode"], ours["data"]["train_path"]) == ("cpt", "org/texts")
        assert ours["data"].get("columns") == (None if sets == "org/texts" else {"text": "body"})


def test_a_text_where_a_block_is_wanted_is_not_called_empty(tmp_path):
    _, fields, made = imported(tmp_path, "axolotl-bare", datasets="org/rows")
    assert fields["datasets"]["verdict"] == "not_offered"
    assert "# - datasets: org/rows - is no block of keys" in made.text


def test_a_template_whose_text_is_not_the_models_is_said_at_the_top(tmp_path):
    """LLaMA-Factory 0.9.6.dev0, data/template.py: default has a text of its own; llama3 is the model's."""
    for name, said in (("default", True), ("empty", True), ("llama3", False), ("chatml_de", True)):
        _, _, made = imported(tmp_path, "llamafactory-lora", template=name)
        assert (f"\n# - template: {name} - " in made.text) == said, name
    _, _, made = imported(tmp_path, "axolotl-bare", chat_template="llama3")
    assert "\n# - chat_template: llama3 - axolotl has a text of its own" in made.text


def test_a_block_of_deepspeed_says_the_stage_itself_and_offloading_to_nowhere_is_none(tmp_path):
    zero = {"stage": 2, "offload_optimizer": {"device": "none"}, "overlap_comm": True}
    block = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "gradient_clipping": 0.5}
    for case in ("axolotl-bare", "llamafactory-bare", "trl-bare", "swift-bare"):
        ours, fields, made = imported(tmp_path, case, deepspeed=block)
        assert ours["cluster"] == {"strategy": "zero2"}, case
        assert fields["deepspeed.gradient_clipping"]["verdict"] == "not_offered"
        assert made.problems == []
    zero["offload_optimizer"] = {"device": "cpu"}
    ours, _, _ = imported(tmp_path, "axolotl-bare", deepspeed=block)
    assert ours["cluster"]["deepspeed"] == "deepspeed_configs/zero2_offload.json"


@pytest.mark.parametrize(
    "changes",
    [
        {"": 1},
        {"chat_template": "\u4f60" * 150},
        {"deepspeed": "a" * 300},
        {"deepspeed": {"zero_optimization": None}},
        {"datasets": [{"path": "a", "type": "chat_template", "message_property_mappings": "role", "roles": ["user"]}]},
        {"datasets": [{"path": "a", "type": "chat_template", "roles": {"user": [["human"]]}}]},
        {"datasets": [{"path": "a", "type": "chat_template", "field_messages": [["x"]]}]},
        {"optim_args": [float("inf")]},
    ],
)
def test_odd_but_readable_values_are_answered(changes, tmp_path):
    _, fields, made = imported(tmp_path, "axolotl-bare", **changes)
    assert len(fields) == count_leaves(CASES["axolotl-bare"] | changes)
    assert json.loads(json.dumps(made.fields, allow_nan=False)) == made.fields
    assert made.problems == []


@pytest.mark.parametrize(
    ("case", "changes", "key", "said"),
    [
        ("axolotl-bare", {"adapter": None, "load_in_4bit": True}, "load_in_4bit", "4 bits are for an adapter"),
        ("axolotl-bare", {"datasets": [{"path": "a/b"}]}, "datasets.0.path", "token ids already"),
        ("axolotl-bare", {"datasets": [{"path": "s3://a/b", "type": "alpaca"}]}, "datasets.0.path", "copy the files"),
        ("axolotl-bare", {"output_dir": "${OUT}/x"}, "output_dir", "${...} is not replaced here"),
        ("verl-sft", {"model": {"path": "???", "lora_rank": 4}}, "model.path", "the value is missing"),
        ("llamafactory-lora", {"adapter_name_or_path": "a,b"}, "adapter_name_or_path", "takes one"),
        ("llamafactory-lora", {"template": "qwen3", "enable_thinking": False}, "enable_thinking", "decides about"),
        ("swift-lora", {"target_modules": "DEFAULT"}, "target_modules", "which layers that means"),
    ],
)
def test_what_cannot_be_done_is_said_at_the_top(case, changes, key, said, tmp_path):
    _, fields, made = imported(tmp_path, case, **changes)
    assert said in fields[key]["why"]
    assert re.search(rf"^# - {re.escape(key)}: .*{re.escape(said)}", made.text, re.M)


def test_words_of_other_forms_mean_the_same(tmp_path):
    """FSDP's strategies by number; all layers in capitals; an adapter that is none; rows of a step as 8.0."""
    ours, _, _ = imported(tmp_path, "axolotl-bare", fsdp_config={"fsdp_sharding_strategy": 2})
    assert ours["cluster"]["strategy"] == "zero2"
    _, fields, _ = imported(tmp_path, "axolotl-bare", fsdp_config={"reshard_after_forward": False})
    assert fields["fsdp_config.reshard_after_forward"]["became"] == "cluster.strategy"
    ours, _, _ = imported(tmp_path, "swift-lora", target_modules="ALL")
    assert ours["tuning"]["lora"]["target_modules"] == "auto"
    assert imported(tmp_path, "axolotl-bare", adapter="None")[0]["tuning"] == {"mode": "full"}
    ours, _, _ = imported(tmp_path, "llamafactory-bare", gradient_accumulation_steps=4.0)
    assert ours["train"]["effective_batch_size"] == 32
    assert imported(tmp_path, "llamafactory-bare", packing=False, neat_packing=True)[0]["train"]["packing"] is True


def test_an_adapter_that_is_not_offered_keeps_its_rank(tmp_path):
    ours, _, _ = imported(tmp_path, "axolotl-bare", adapter="dora", lora_r=8)
    assert (ours["tuning"]["mode"], ours["tuning"]["lora"]["r"]) == ("lora", 8)


def test_columns_that_are_not_written_are_not_called_translated(tmp_path):
    sets = [{"path": "a/b", "type": "completion", "field": "body"}, {"path": "c/d", "type": "alpaca"}]
    _, fields, _ = imported(tmp_path, "axolotl-bare", datasets=sets)
    assert fields["datasets.0.field"]["verdict"] == "not_offered"
    _, fields, _ = imported(tmp_path, "axolotl-bare", datasets=[sets[0] | {"field": "text"}])
    assert fields["datasets.0.field"]["verdict"] == "no_effect"


def test_a_file_without_a_stage_is_still_one_of_llamafactory(tmp_path):
    path = tmp_path / "few.yaml"
    path.write_text("model_name_or_path: m\ndo_train: true\ndataset: identity\nlora_target: all\noutput_dir: o\n")
    assert import_config(path).kit.name == "llamafactory"


def test_lists_of_lists_by_aliases_are_refused_before_they_fill_the_memory(tmp_path):
    path = tmp_path / "bomb.yaml"
    steps = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path.write_text("\n".join(["base_model: m", "a0: &a0 [x, x]", *steps]))
    with pytest.raises(ConfigError, match="to no end"):
        import_config(path)


def test_weights_that_are_held_in_16_bits_there_are_said_at_the_top(tmp_path):
    """axolotl 0.18.0, loaders/model.py, loads them as bf16 says; LLaMA-Factory with pure_bf16; TRL and ms-swift by
    dtype. Here mode full holds them in 32."""
    said = "every weight is held in 32 bits here"
    for case, changes, halves in (
        ("axolotl-full-fsdp", {"bf16": True}, True),
        ("axolotl-full-fsdp", {"bf16": False, "fp16": False}, False),
        ("axolotl-qlora", {"bf16": True}, False),
        ("llamafactory-full-zero", {"bf16": True, "pure_bf16": False}, False),
        ("llamafactory-full-zero", {"bf16": None, "pure_bf16": True}, True),
        ("trl-bare", {"dtype": "bfloat16"}, True),
        ("trl-bare", {"bf16": True}, False),
        ("trl-qlora", {"dtype": "bfloat16"}, False),
        ("swift-lora", {"torch_dtype": "bfloat16", "tuner_type": "full"}, True),
    ):
        _, _, made = imported(tmp_path, case, **changes)
        assert len(re.findall(f"^# - .*{said}", made.text, re.M)) == halves, (case, changes)


def test_a_schedule_of_another_form_is_said_and_its_decay_is_a_share(tmp_path):
    changes = {"max_steps": 100, "lr_scheduler_kwargs": {"num_decay_steps": 10}}
    for case, key in (("axolotl-bare", "lr_scheduler"), ("trl-bare", "lr_scheduler_type")):
        ours, fields, _ = imported(tmp_path, case, **{key: "warmup_stable_decay"}, **changes)
        assert (ours["train"]["lr_scheduler"], ours["train"]["decay_ratio"]) == ("warmup_stable_decay", 0.1)
        assert fields[key]["verdict"] == "not_offered"


def test_the_best_checkpoint_as_the_result_is_said_at_the_top(tmp_path):
    """transformers saves with the strategy best, and keeps the last weights all the same."""
    for case in ("axolotl-qlora", "llamafactory-lora"):
        ours, _, made = imported(tmp_path, case, save_strategy="best", load_best_model_at_end=False)
        assert ours["train"]["best_metric"] == "loss"
        assert re.search("^# - save_strategy: best - .*the best ones are the result", made.text, re.M), case


def test_a_data_set_of_llamafactory_that_is_named_by_its_file_keeps_its_suffix(tmp_path):
    (tmp_path / "x.jsonl").write_text("")
    for name, path in (("x.json", "data/x.json"), ("x.jsonl", str(tmp_path / "x.jsonl")), ("x", "data/x.json")):
        ours, fields, _ = imported(tmp_path, "llamafactory-lora", dataset=name)
        assert (ours["data"]["train_path"], fields["dataset"]["verdict"]) == (path, "not_offered")


def test_a_config_of_llamafactorys_v1_trainer_is_refused_by_name_and_gets_no_defaults_of_the_older_one(tmp_path):
    """src/llamafactory/v1/config/*.py has keys and defaults of its own."""
    path = tmp_path / "v1.yaml"
    path.write_text(yaml.safe_dump({
        "model": "Qwen/Qwen3-0.6B", "model_class": "llm", "template": "qwen3", "train_dataset": "data/rows.yaml",
        "dist_config": {"name": "fsdp2"}, "peft_config": {"name": "lora", "r": 16}, "micro_batch_size": 1, "bf16": True,
    }))  # fmt: skip
    made = import_config(path)
    assert "\n# - train_dataset: data/rows.yaml - this is a config of LLaMA-Factory's v1 trainer" in made.text
    assert "v1" in str(made.problems[0])
    assert {one["key"]: one["verdict"] for one in made.fields}["peft_config.r"] == "not_offered"


def test_a_shell_script_is_refused_with_what_can_be_read_instead(tmp_path):
    """Most examples of ms-swift and verl are scripts; both write the whole config of a run."""
    script = tmp_path / "sft.sh"
    script.write_text("#!/bin/bash\nswift sft --model Qwen/Qwen3-0.6B \\\n  --lora_rank 8\n")
    with pytest.raises(ConfigError, match="is a shell script") as refusal:
        import_config(script)
    assert all(word in refusal.value.fix for word in ("`lora_rank: 8`", "args.json", ".hydra/config.yaml"))


def test_splits_that_are_not_read_are_said(tmp_path):
    """alignment-handbook's dataset_splits name the parts to train on and to hold out."""
    mixer = {"dataset_name": None, "dataset_mixer": {"org/pairs": 1.0}}
    for splits, verdict in ((["train_prefs", "test_prefs"], "not_offered"), (["train", "test"], "no_effect")):
        _, fields, _ = imported(tmp_path, "trl-bare", dataset_splits=splits, **mixer)
        assert fields["dataset_splits"]["verdict"] == verdict


def test_packed_documents_of_axolotl_are_full_blocks(tmp_path):
    """axolotl 0.18.0, utils/data/streaming.py: encode_packed_streaming fills micro_batch_size x sequence_len tokens."""
    documents = {"datasets": None, "pretraining_dataset": [{"path": "org/documents"}], "sample_packing": True}
    ours, fields, made = imported(tmp_path, "axolotl-bare", **documents)
    assert (ours["task_mode"], fields["sample_packing"]["verdict"]) == ("cpt", "auto")
    assert "rows in a block" not in made.text


def test_one_label_is_what_a_reward_model_of_axolotl_has(tmp_path):
    pairs = [{"path": "a.jsonl", "type": "bradley_terry.chat_template"}]
    _, fields, _ = imported(tmp_path, "axolotl-bare", reward_model=True, num_labels=1, datasets=pairs)
    assert fields["num_labels"]["verdict"] == "no_effect"


@pytest.mark.parametrize("info", [[], {"rows": []}, {"rows": {"file_name": "r.json", "columns": ["a"], "tags": "b"}}])
def test_an_odd_dataset_info_is_no_traceback(info, tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    _, fields, made = imported(tmp_path, "llamafactory-bare", dataset="rows", dataset_dir=str(tmp_path))
    assert (fields["dataset"]["became"], made.problems) == ("data.train_path", [])


def test_columns_of_a_mixture_that_are_no_list_are_answered(tmp_path):
    mixture = {"datasets": [{"id": "a/b", "columns": 2.5}, {"id": "c/d", "columns": [{"x": 1}]}]}
    _, fields, _ = imported(tmp_path, "trl-bare", dataset_mixture=mixture)
    assert "dataset_mixture.datasets.0.columns" in fields


def test_a_name_too_long_for_a_file_is_no_traceback(tmp_path):
    sets = [{"path": f"{'a' * 300}.json", "type": "alpaca"}, {"path": "b", "type": "alpaca"}]
    problems = imported(tmp_path, "axolotl-bare", datasets=sets)[2].problems
    assert [one.where.rpartition(" ")[2] for one in problems] == ["datasets.0.path"]
    _, fields, _ = imported(tmp_path, "llamafactory-bare", dataset_dir="a" * 300)
    assert fields["dataset_dir"]["verdict"] == "no_effect"


def test_files_by_their_splits_are_read(tmp_path):
    sets = [{"path": "json", "data_files": {"train": "a.jsonl"}, "type": "alpaca"}]
    ours, fields, _ = imported(tmp_path, "axolotl-bare", datasets=sets)
    assert (ours["data"]["train_path"], fields["datasets.0.data_files.train"]["verdict"]) == ("a.jsonl", "translated")


@pytest.mark.parametrize(
    ("case", "changes", "nproc", "rows"),
    [
        ("axolotl-bare", {"micro_batch_size": 2, "context_parallel_size": 4}, 8, 4),
        ("axolotl-bare", {"micro_batch_size": 2, "sequence_parallel_degree": 4}, 8, 4),
        ("axolotl-bare", {"micro_batch_size": 2, "sequence_parallel_degree": 4, "context_parallel_size": 4}, 8, 4),
        ("axolotl-bare", {"micro_batch_size": 2, "tensor_parallel_size": 2, "sequence_parallel_degree": 2}, 16, 8),
        ("axolotl-bare", {"micro_batch_size": 2, "sequence_parallel_degree": 4}, 1, 2),
        ("swift-bare", {"batch_size": 2, "gradient_accumulation_steps": 3, "sequence_parallel_size": 4}, 8, 12),
        ("swift-bare", {"batch_size": 1, "sequence_parallel_size": 4}, 8, 4),
    ],
)  # fmt: skip
def test_gpus_that_share_a_row_are_one_in_the_rows_of_a_step(case, changes, nproc, rows, tmp_path):
    """axolotl 0.18.0, utils/config/__init__.py, divides the GPUs; the older name holds where the new one is not given
    (utils/schemas/validation.py). ms-swift 4.6.0, sequence_parallel/utils.py: a group reads the same rows, while
    trainers/arguments.py accumulates to 16 rows of all GPUs."""
    text = import_config(write(tmp_path, case, **changes), nproc=nproc).text
    assert yaml.safe_load(text)["train"]["effective_batch_size"] == rows


def test_a_switch_that_is_a_text_is_the_switch(tmp_path):
    switches = {"bf16": "false", "fp16": "False", "use_dora": "True", "packing": "true"}
    ours, _, _ = imported(tmp_path, "llamafactory-lora", **switches)
    assert (ours["train"]["precision"], ours["tuning"]["lora"]["dora"], ours["train"]["packing"]) == (
        "fp32",
        True,
        True,
    )
