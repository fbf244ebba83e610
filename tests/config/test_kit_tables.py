"""The tables of ms-swift, TRL and verl: the installed TRL is known whole, what kits do in silence is written, and
GRPO of all three becomes task_mode grpo."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from sftplay.config.kits.convert import Imported, import_config
from sftplay.config.kits.table import as_number, read_kits

CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("foreign_configs.yaml").read_text())


def imported(folder: Path, case: str, **changes: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]], Imported]:
    """The config that was written, flat; its fields by their keys; and all of it. YAML 1.1 reads 1e-05 as a text."""
    path = folder / f"{case}.yaml"
    path.write_text(yaml.safe_dump(CASES[case] | changes, sort_keys=False))
    made = import_config(path)
    return dict(flat(yaml.safe_load(made.text))), {one["key"]: one for one in made.fields}, made


def flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, inner in value.items():
        found += flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [(f"{prefix}{key}", as_number(inner))]
    return found


def class_fields(package: str, *files: str) -> dict[str, set[str]]:
    """Names of the annotated fields of each class, without those of its bases, read without an import."""
    found: dict[str, set[str]] = {}
    spec = find_spec(package)
    assert spec is not None
    for file in files:
        for node in ast.parse(Path((spec.submodule_search_locations or [""])[0], file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                found[node.name] = {line.target.id for line in lines if isinstance(line.target, ast.Name)}
    return {name: {field for field in names if not field.startswith("_")} for name, names in found.items()}


ARGUMENTS = class_fields("transformers", "training_args.py")["TrainingArguments"]


def test_every_field_of_the_installed_trl_has_an_answer():
    trainers = [f"trainer/{kind}_config.py" for kind in ("base", "sft", "grpo", "dpo", "kto", "reward", "model")]
    classes = class_fields("trl", *trainers, "scripts/utils.py", "scripts/grpo.py")
    wanted = ("SFTConfig", "GRPOConfig", "DPOConfig", "KTOConfig", "RewardConfig", "ModelConfig", "ScriptArguments",
              "GRPOScriptArguments", "DatasetMixtureConfig")  # fmt: skip
    names = ARGUMENTS.union(*(classes[name] for name in wanted))
    names |= {f"datasets.{field}" for field in classes["DatasetConfig"]}
    assert len(names) > 200
    assert sorted(name for name in names if read_kits()["trl"].find(name) is None) == []


def test_every_argument_of_the_installed_transformers_has_an_answer_for_ms_swift():
    names = ARGUMENTS | class_fields("transformers", "training_args_seq2seq.py")["Seq2SeqTrainingArguments"]
    assert sorted(name for name in names if read_kits()["swift"].find(name) is None) == []


def test_the_arguments_of_ms_swifts_megatron_mean_the_same_run(tmp_path):
    """ms-swift 4.6.0, swift/megatron/arguments/megatron_args.py: global_batch_size has the rows of all GPUs."""
    keys = {
        "micro_batch_size": 4, "global_batch_size": 16, "lr_decay_style": "inverse-square-root", "clip_grad": 0.5,
        "adam_eps": 1e-7, "train_iters": 200, "lr_warmup_iters": 20, "optimizer": "adam", "fp8_format": "hybrid",
    }  # fmt: skip
    path = tmp_path / "swift.yaml"
    path.write_text(yaml.safe_dump(CASES["swift-bare"] | keys, sort_keys=False))
    made = import_config(path, nproc=8)
    written, fields = dict(flat(yaml.safe_load(made.text))), {one["key"]: one for one in made.fields}
    assert (written["train.effective_batch_size"], fields["micro_batch_size"]["why"]) == (
        16,
        "global_batch_size decides",
    )
    names = ("lr_scheduler", "max_grad_norm", "warmup_ratio", "max_steps", "optim")
    assert [written[f"train.{name}"] for name in names] == ["inverse_sqrt", 0.5, 0.1, 200, "adamw_torch_fused"]
    assert written["train.extra.adam_epsilon"] == 1e-7
    assert [key for key in keys if fields[key]["verdict"] == "not_offered"] == ["fp8_format"]
    assert "not known" not in made.text
    wsd, fields, _ = imported(tmp_path, "swift-bare", lr_decay_style="WSD")
    assert (wsd["train.lr_scheduler"], fields["lr_decay_style"]["verdict"]) == ("warmup_stable_decay", "not_offered")


def test_what_ms_swift_does_in_silence_is_written(tmp_path):
    written, _, made = imported(tmp_path, "swift-bare")
    assert written == {
        "model.name": "Qwen/Qwen2.5-0.5B-Instruct", "data.train_path": "rows.jsonl", "seed": 42,
        "model.max_seq_len": 2048, "tuning.mode": "lora", "tuning.lora.r": 8, "tuning.lora.alpha": 32,
        "tuning.lora.dropout": 0.05,
        "tuning.lora.target_modules": "auto", "train.learning_rate": 1e-4, "train.lr_scheduler": "cosine",
        "train.warmup_ratio": 0.0, "train.weight_decay": 0.1, "train.extra.adam_beta2": 0.95, "train.epochs": 3.0,
        "train.optim": "adamw_torch_fused", "train.max_grad_norm": 1.0, "train.effective_batch_size": 16,
        "train.precision": "auto", "train.gradient_checkpointing": True, "train.packing": False, "data.split": 0,
        "data.on_bad_row": "skip", "data.too_long": "drop",
    }  # fmt: skip
    assert "longer rows are left out" in made.text.split("model:")[0]
    full, _, _ = imported(tmp_path, "swift-bare", tuner_type="full", per_device_train_batch_size=5)
    assert (full["train.learning_rate"], full["train.effective_batch_size"], "tuning.lora.r" in full) == (
        1e-5,
        20,
        False,
    )


def test_what_trl_does_in_silence_is_written(tmp_path):
    written, _, made = imported(tmp_path, "trl-bare")
    assert written == {
        "model.name": "org/model", "data.train_path": "rows.jsonl", "seed": 42, "model.max_seq_len": 1024,
        "tuning.mode": "full", "train.learning_rate": 2e-5, "train.lr_scheduler": "linear", "train.warmup_ratio": 0.0,
        "train.weight_decay": 0.0, "train.epochs": 3.0, "train.optim": "adamw_torch_fused", "train.max_grad_norm": 1.0,
        "train.effective_batch_size": 8, "train.precision": "auto", "train.gradient_checkpointing": True,
        "train.packing": False, "data.split": 0, "data.too_long": "truncate",
    }  # fmt: skip
    assert "TRL learns every token of rows with messages" in made.text.split("model:")[0]
    adapted, _, made = imported(tmp_path, "trl-bare", use_peft=True, assistant_only_loss=True)
    lora = {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": ["q_proj", "v_proj"]}
    assert {key: adapted[f"tuning.lora.{key}"] for key in lora} == lora
    assert "TRL learns every token" not in made.text
    _, _, made = imported(tmp_path, "trl-bare", eval_strategy="steps")
    assert "default of dataset_test_split: test" in made.text


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("verl-sft", {"seed": 1, "data.split": None, "train.max_grad_norm": 1.0, "train.precision": "bf16"}),
        (
            "verl-sft-older",
            {
                "seed": 1, "train.learning_rate": 1e-5, "train.lr_scheduler": "cosine", "train.warmup_ratio": 0.1,
                "train.extra.adam_beta2": 0.95, "train.weight_decay": 0.01, "tuning.mode": "full", "data.split": 0,
                "model.max_seq_len": 1024, "data.too_long": "error", "data.columns.question": "frage",
                "data.columns.answer": "antwort",
            },
        ),
    ],
)  # fmt: skip
def test_what_both_sft_trainers_of_verl_do_in_silence_is_written(case, expected, tmp_path):
    written, _, _ = imported(tmp_path, case)
    assert {key: written.get(key) for key in expected} == expected


def test_the_older_name_of_verls_warm_up_is_followed(tmp_path):
    written, answers, _ = imported(tmp_path, "verl-sft-older", optim={"lr": 1e-5, "warmup_steps_ratio": 0.02})
    assert written["train.warmup_ratio"] == 0.02
    assert answers["optim.warmup_steps_ratio"]["became"] == "train.warmup_ratio"


def test_the_constant_rate_of_the_newer_trainer_of_verl_keeps_its_warm_up(tmp_path):
    written, _, _ = imported(tmp_path, "verl-sft", optim={"lr_warmup_steps_ratio": 0.1, "lr_warmup_steps": -1})
    schedule = ("train.learning_rate", "train.lr_scheduler", "train.warmup_ratio")
    assert [written[key] for key in schedule] == [1e-3, "constant_with_warmup", 0.1]
    assert written["output_dir"] == "checkpoints/gsm8k/sft"


GRPO = {
    "swift-grpo": {
        "grpo.num_generations": 8, "grpo.max_prompt_length": 1024, "grpo.max_completion_length": 2048,
        "model.max_seq_len": 3072, "grpo.loss_type": "dr_grpo", "grpo.temperature": 0.9, "grpo.beta": 0.001,
        "grpo.dynamic_sampling_rounds": 3, "grpo.mask_truncated_completions": True, "grpo.steps_per_generation": 2,
        "train.effective_batch_size": 16,
        "rewards": [{"name": "accuracy", "use": "math"},
                    {"name": "format", "use": "format", "options": {"form": "answer_tag"}, "weight": 0.5}],
    },
    "trl-grpo": {
        "grpo.num_generations": 8, "grpo.max_completion_length": 1024, "model.max_seq_len": 1536,
        "grpo.loss_type": "dr_grpo", "grpo.scale_rewards": "none", "grpo.steps_per_generation": 2,
        "train.effective_batch_size": 32,
        "train.learning_rate": 1e-6,
        "rewards": [{"name": "accuracy_reward", "use": "math"},
                    {"name": "brief", "use": "my_rewards:brief", "weight": 0.5},
                    {"name": "think_format_reward", "use": "format", "options": {"form": "reasoning"}, "weight": 0.2}],
    },
    "verl-grpo": {
        "grpo.num_generations": 8, "grpo.max_prompt_length": 512, "grpo.max_completion_length": 1024,
        "model.max_seq_len": 1536, "grpo.loss_type": "grpo", "grpo.importance_sampling_level": "sequence",
        "grpo.scale_rewards": "none", "grpo.beta": 0.001, "grpo.delta": None, "grpo.epsilon_high": 0.28,
        "grpo.steps_per_generation": 4, "train.effective_batch_size": 2048, "train.save_steps": 80,
        "train.eval_steps": 20, "train.warmup_ratio": 0.1, "grpo.extra.use_bias_correction_kl": False,
        "data.val_path": "test.parquet",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", GRPO)
def test_grpo_of_another_kit_becomes_task_mode_grpo(case, tmp_path):
    written, _, made = imported(tmp_path, case)
    assert made.problems == []
    assert {key: written.get(key) for key in {"task_mode": "grpo"} | GRPO[case]} == {"task_mode": "grpo"} | GRPO[case]


@pytest.mark.parametrize(
    ("loss", "agg", "written"),
    [
        ("gspo", "token-mean", ("grpo", None)),
        ("vanilla", "seq-mean-token-mean", ("grpo", 3.0)),
        ("vanilla", "seq-mean-token-sum-norm", ("dr_grpo", 3.0)),
        ("cispo", "token-mean", ("cispo", None)),
        ("sapo", "token-mean", ("sapo", None)),
    ],
)
def test_each_policy_loss_of_verl_has_its_own_mean_and_bounds(loss, agg, written, tmp_path):
    """verl b178a3c, trainer/ppo/core_algos.py: only the clipped loss reads clip_ratio_c, and gspo takes the mean of
    each completion whatever loss_agg_mode says."""
    actor = CASES["verl-grpo"]["actor_rollout_ref"]
    changed = actor["actor"] | {"policy_loss": {"loss_mode": loss}, "loss_agg_mode": agg, "clip_ratio_high": None}
    ours, _, made = imported(tmp_path, "verl-grpo", actor_rollout_ref=actor | {"actor": changed})
    assert (ours["grpo.loss_type"], ours.get("grpo.delta"), made.problems) == (*written, [])


def test_what_verl_has_off_by_default_is_no_difference(tmp_path):
    """verl b178a3c, trainer/config/_generated_ppo_trainer.yaml, which a run keeps as .hydra/config.yaml."""
    base = CASES["verl-grpo"]["actor_rollout_ref"]
    actor = base["actor"] | {"sum_pi_squared_checkpointing": False, "router_replay": {"mode": "disabled"}}
    rollout = base["rollout"] | {"skip_rollout": False, "skip_dump_dir": "/tmp/x"}
    ours = imported(tmp_path, "verl-grpo", actor_rollout_ref=base | {"actor": actor, "rollout": rollout})[1]
    for key in ("actor.sum_pi_squared_checkpointing", "actor.router_replay.mode", "rollout.skip_dump_dir"):
        assert ours[f"actor_rollout_ref.{key}"]["verdict"] == "no_effect"


def test_prompts_that_verl_leaves_out_do_not_end_the_run_here(tmp_path):
    """verl, utils/dataset/rl_dataset.py: filter_overlong_prompts goes before truncation."""
    assert imported(tmp_path, "verl-grpo")[0]["data.too_long"] == "drop"
    data = CASES["verl-grpo"]["data"] | {"filter_overlong_prompts": False}
    assert imported(tmp_path, "verl-grpo", data=data)[0]["data.too_long"] == "error"
    assert imported(tmp_path, "verl-sft")[0]["data.too_long"] == "truncate"


def test_a_column_of_verl_that_holds_question_and_answer_is_not_named_as_either(tmp_path):
    data = {"train_files": "train.parquet", "prompt_key": "extra_info", "response_key": "extra_info"}
    data |= {"prompt_dict_keys": ["question"], "response_dict_keys": ["answer"]}
    ours, fields, _ = imported(tmp_path, "verl-sft-older", data=data)
    assert not [key for key in ours if key.startswith("data.columns")]
    assert {fields[f"data.{side}_dict_keys"]["verdict"] for side in ("prompt", "response")} == {"not_offered"}


def test_corrections_for_the_sampler_and_lengths_of_other_kits_become_keys(tmp_path):
    actor = CASES["verl-grpo"]["actor_rollout_ref"]
    rollout = CASES["verl-grpo"]["actor_rollout_ref"] | {
        "actor": actor["actor"] | {"policy_loss": {"loss_mode": "cispo"}, "clip_ratio_high": 4.0, "clip_ratio_c": None}
    }
    written, _, made = imported(
        tmp_path, "verl-grpo", actor_rollout_ref=rollout,
        algorithm=CASES["verl-grpo"]["algorithm"] | {
            "rollout_correction": {"rollout_is": "token", "rollout_is_threshold": 2.0}
        },
        reward_model={"reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 128, "penalty_factor": 1.0}}},
    )  # fmt: skip
    assert made.problems == []
    expected = {
        "grpo.loss_type": "cispo", "grpo.epsilon_high": 5.0,  # verl adds it to 1, TRL takes the bound itself
        "grpo.sampler_correction": "token_truncate", "grpo.sampler_ratio_max": 2.0, "grpo.overlong_buffer": 128,
    }  # fmt: skip
    assert {key: written.get(key) for key in expected} == expected
    changes = {"rollout_importance_sampling_mode": "sequence_mask", "rollout_importance_sampling_threshold": 4.0}
    written, _, made = imported(tmp_path, "swift-grpo", **changes)
    assert made.problems == []
    assert (written["grpo.sampler_correction"], written["grpo.sampler_ratio_max"]) == ("sequence_mask", 4.0)


def test_verls_penalty_for_length_is_taken_only_where_it_is_on(tmp_path):
    def taken(**buffer):
        changed = {"reward_kwargs": {"overlong_buffer_cfg": {"len": 128, **buffer}}}
        written, answers, _ = imported(tmp_path, "verl-grpo", reward_model=changed)
        lead = "reward_model.reward_kwargs.overlong_buffer_cfg"
        verdicts = {answers[f"{lead}.{key}"]["verdict"] for key in buffer}
        return written.get("grpo.overlong_buffer"), verdicts - {"no_effect", "translated"}

    assert taken(enable=True, penalty_factor=1.0) == (128, set())
    assert taken(enable=True, penalty_factor=0.5) == (128, {"not_offered"})
    assert taken(enable=False, penalty_factor=0.5) == taken(enable=False, penalty_factor=1) == (None, set())


def test_where_lora_comes_nearest_it_has_the_rank_of_the_file(tmp_path):
    ours, answers, _ = imported(tmp_path, "swift-bare", tuner_type="longlora", lora_rank=4)
    assert (ours["tuning.mode"], ours.get("tuning.lora.r"), ours.get("tuning.lora.alpha")) == ("lora", 4, 32)
    assert (answers["tuner_type"]["verdict"], answers["lora_rank"]["verdict"]) == ("not_offered", "translated")


def test_verls_older_place_of_the_penalty_for_length_is_read(tmp_path):
    buffer = {"overlong_buffer": {"enable": True, "len": 128, "penalty_factor": 0.5}}
    written, answers, _ = imported(tmp_path, "verl-grpo", reward_model=buffer)
    assert written["grpo.overlong_buffer"] == 128
    assert answers["reward_model.overlong_buffer.penalty_factor"]["verdict"] == "not_offered"


@pytest.mark.parametrize(
    ("case", "key", "changes"),
    [
        ("verl-grpo", "data.shuffle", {"data": CASES["verl-grpo"]["data"] | {"shuffle": False}}),
        ("swift-bare", "dataset_shuffle", {"dataset_shuffle": False}),
        ("swift-bare", "train_dataloader_shuffle", {"train_dataloader_shuffle": False}),
    ],
)
def test_rows_that_a_kit_reads_in_the_order_of_their_file_are_said_to_be_shuffled_here(case, key, changes, tmp_path):
    _, answers, made = imported(tmp_path, case, **changes)
    assert answers[key]["verdict"] == "not_offered"
    assert f"# - {key}: false - rows come in an order that the seed decides" in made.text


def test_groups_that_verl_samples_again_are_not_called_a_thing_that_is_not_offered(tmp_path):
    groups = {"enable": True, "metric": "acc", "max_num_gen_batches": 10}
    written, answers, _ = imported(
        tmp_path, "verl-grpo", algorithm=CASES["verl-grpo"]["algorithm"] | {"filter_groups": groups}
    )
    assert written["grpo.dynamic_sampling_rounds"] == 3
    for key in ("metric", "max_num_gen_batches"):
        assert "which is not offered" not in answers[f"algorithm.filter_groups.{key}"]["why"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"dataset_mixture": {"datasets": [{"id": "org/x", "split": s} for s in ("train_sft", "test_sft")]}},
         "dataset_mixture.datasets.1.id"),
        ({"loss_type": "sigmoid", "datasets": [{"path": "org/x", "split": s} for s in ("train", "more")]},
         "datasets.1.path"),
    ],
)  # fmt: skip
def test_a_data_set_that_a_mixture_names_by_its_parts_is_read_once(changes, where, tmp_path):
    """As alignment-handbook's recipes do; a part cannot be chosen here, and twice the same rows are no mixture."""
    ours, answers, made = imported(tmp_path, "trl-bare", **({"dataset_name": None} | changes))
    assert (ours["data.train_path"], ours.get("task_mode", "sft") in ("sft", "dpo"), made.problems) == (
        "org/x",
        True,
        [],
    )
    assert "datasets" not in ours
    assert "it is named before, and read once" in answers[where]["why"]
    assert re.search(f"^# - {where}: org/x - .*read once", made.text, re.M)


def test_a_file_that_does_not_say_which_trainer_of_pairs_reads_it_is_said_to_be_taken_for_dpos(tmp_path):
    """alignment-handbook's ORPO recipe has beta alone, as those of DPO: the script decides."""
    said = "the file does not say which trainer reads it"
    ours, _, made = imported(tmp_path, "trl-bare", beta=0.05)
    assert (ours["task_mode"], f"# - beta: 0.05 - {said}" in made.text) == ("dpo", True)
    for changes in ({"loss_type": "sigmoid"}, {"desirable_weight": 1.0}):
        assert said not in imported(tmp_path, "trl-bare", beta=0.05, **changes)[2].text


def test_a_reward_that_is_code_of_the_kit_is_named(tmp_path):
    for case, key in (("swift-grpo", "reward_funcs"), ("trl-grpo", "reward_funcs")):
        _, answers, _ = imported(tmp_path, case)
        assert answers[key]["verdict"] == "not_offered"
        assert answers[key]["why"].startswith(("mine: code of that kit", "other: code of that kit"))
    _, answers, made = imported(tmp_path, "trl-grpo", reward_funcs=["other"])
    assert [problem.where.rpartition(" ")[2] for problem in made.problems] == ["task_mode"]


def test_vllm_is_written_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr("sftplay.places.ROOT", tmp_path)
    for case in ("trl-grpo", "swift-grpo"):
        _, answers, _ = imported(tmp_path, case)
        assert "vLLM is not installed here" in answers["use_vllm"]["why"]
        assert "make install-vllm" in answers["use_vllm"]["why"]
    python = tmp_path / ".venv-vllm/bin/python"  # where `make install-vllm` puts it
    python.parent.mkdir(parents=True)
    python.touch()
    server, _, _ = imported(tmp_path, "trl-grpo")
    assert server["grpo.generation"] == "vllm_server"
    shared, _, _ = imported(tmp_path, "swift-grpo")
    vllm = {"grpo.generation": "vllm_colocate", "grpo.vllm.memory_share": 0.5, "grpo.vllm.sleep": True}
    assert {key: shared[key] for key in vllm} == vllm


def test_the_clip_ratio_of_verl_is_read_from_the_two_keys_that_decide_there(tmp_path):
    """verl, workers/config/actor.py: clip_ratio_low and _high are 0.2, and core_algos.py reads clip_ratio only where
    they are null."""
    actor = {"clip_ratio": 0.1, "policy_loss": {"loss_mode": "cispo"}}
    changed = CASES["verl-grpo"]["actor_rollout_ref"] | {
        "actor": {key: value for key, value in CASES["verl-grpo"]["actor_rollout_ref"]["actor"].items()
                  if not key.startswith("clip_ratio")} | actor
    }  # fmt: skip
    written, fields, _ = imported(tmp_path, "verl-grpo", actor_rollout_ref=changed)
    assert "grpo.epsilon" not in written
    assert fields["actor_rollout_ref.actor.clip_ratio"]["verdict"] == "no_effect"
    assert "below 1 - clip_ratio_low" in fields["actor_rollout_ref.actor.policy_loss.loss_mode"]["why"]


def test_recomputation_that_fsdp_does_in_axolotl_is_not_undone_by_the_key_of_one_gpu(tmp_path):
    fsdp = {"fsdp_version": 2, "fsdp_activation_checkpointing": True}
    written = imported(tmp_path, "axolotl-bare", gradient_checkpointing=False, fsdp_config=fsdp)[0]
    assert written["train.gradient_checkpointing"] is True
    fsdp["fsdp_activation_checkpointing"] = False
    assert imported(tmp_path, "axolotl-bare", gradient_checkpointing=False, fsdp_config=fsdp)[0][
        "train.gradient_checkpointing"
    ] is False  # fmt: skip


def test_axolotl_samples_as_trl_does_by_default_and_by_vllm_only_where_it_is_asked_to(tmp_path, monkeypatch):
    """axolotl 0.18.0, core/trainers/grpo/__init__.py, hands vllm_mode on where use_vllm is on; TRL's default is
    colocate, and gdpo normalises each reward (core/builders/rl.py)."""
    monkeypatch.setattr("sftplay.places.find_python", lambda: "python")
    monkeypatch.setattr("sftplay.config.kits.conversions.find_python", lambda: "python")
    rewards = {"reward_funcs": ["mine.short"], "num_generations": 2, "max_completion_length": 64}
    vllm = {"gpu_memory_utilization": 0.4}
    for trl, generation, share in (
        ({"use_vllm": True}, "vllm_colocate", 0.4),
        ({"use_vllm": True, "vllm_mode": "server"}, "vllm_server", None),
        ({"use_vllm": False, "vllm_mode": "server"}, None, None),
    ):
        ours, _, made = imported(tmp_path, "axolotl-bare", rl="grpo", trl=rewards | trl, vllm=vllm)
        assert (ours.get("grpo.generation"), ours.get("grpo.vllm.memory_share")) == (generation, share), trl
        assert (ours.get("grpo.aggregation"), made.problems) == (None, [])
    assert imported(tmp_path, "axolotl-bare", rl="gdpo", trl=rewards)[0]["grpo.aggregation"] == "normalize_then_sum"


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("axolotl-steps", "process_reward_model"), ("swift-classifier", "seq_cls"), ("verl-ppo", "ppo"),
    ],
)  # fmt: skip
def test_a_kind_of_training_that_is_not_offered_is_refused_by_its_name(case, mode, tmp_path):
    written, _, made = imported(tmp_path, case)
    assert written["task_mode"] == mode
    assert any("task_mode" in problem.where for problem in made.problems)


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("axolotl-dpo", {}, {"task_mode": "dpo", "preference.beta": 0.1, "data.template": "chatml"}),
        ("axolotl-dpo", {"dpo_loss_type": ["ipo"]}, {"task_mode": "ipo"}),
        ("axolotl-dpo", {"dpo_loss_type": ["hinge"]}, {"task_mode": "dpo", "preference.loss": "hinge"}),
        # TRL's CPOConfig, by which axolotl trains simpo, has these where the file is silent
        ("axolotl-dpo", {"rl": "simpo"}, {"task_mode": "simpo", "preference.beta": 0.1, "preference.gamma": 0.5}),
        ("axolotl-dpo", {"rl": "kto", "rl_beta": 0.2, "kto_desirable_weight": 0.5},
         {"task_mode": "kto", "preference.beta": 0.2, "preference.desirable_weight": 0.5}),
        ("axolotl-dpo", {"rl": "orpo", "orpo_alpha": 0.3}, {"task_mode": "orpo", "preference.beta": 0.3}),
        ("llamafactory-lora", {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.7},
         {"task_mode": "simpo", "preference.gamma": 0.7, "preference.beta": 0.1}),
        ("llamafactory-lora", {"stage": "dpo", "pref_beta": 0.2, "pref_ftx": 0.5},
         {"task_mode": "dpo", "preference.beta": 0.2, "preference.rpo_alpha": 0.5}),
        ("llamafactory-lora", {"stage": "kto", "kto_rejected_weight": 2.0},
         {"task_mode": "kto", "preference.undesirable_weight": 2.0}),
        ("llamafactory-lora", {"stage": "rm"}, {"task_mode": "reward_model"}),
        ("swift-dpo", {}, {"task_mode": "dpo", "preference.beta": 0.1, "preference.rpo_alpha": 0.1}),
        ("swift-dpo", {"rlhf_type": "rm"}, {"task_mode": "reward_model"}),
        ("swift-dpo", {"loss_type": "robust", "label_smoothing": 0.1},
         {"preference.loss": "robust", "preference.label_smoothing": 0.1}),
        ("trl-dpo", {}, {"task_mode": "dpo", "preference.loss": "sigmoid", "preference.beta": 0.1}),
        ("trl-dpo", {"loss_type": ["ipo"]}, {"task_mode": "ipo", "preference.beta": 0.1}),
        ("trl-bare", {"loss_type": "simpo"},
         {"task_mode": "simpo", "preference.beta": 0.1, "preference.gamma": 0.5, "train.learning_rate": 1e-6}),
        ("trl-dpo", {"loss_type": "simpo", "simpo_gamma": 0.7, "beta": 2.0},
         {"task_mode": "simpo", "preference.beta": 2.0, "preference.gamma": 0.7}),
        ("trl-bare", {}, {"task_mode": None, "preference.beta": None, "preference.gamma": None, "grpo.beta": None}),
        ("trl-dpo", {"loss_type": "kto", "desirable_weight": 1.5},
         {"task_mode": "kto", "preference.desirable_weight": 1.5}),
        ("trl-reward", {}, {"task_mode": "reward_model", "reward_model.center": 0.01, "train.learning_rate": 1e-4}),
    ],
)  # fmt: skip
def test_preferences_and_reward_models_become_the_tasks_here(case, changes, expected, tmp_path):
    written, answers, _ = imported(tmp_path, case, **changes)
    assert {key: written.get(key) for key in expected} == expected
    unanswered = {key: answers[key]["why"] for key in changes if answers[key]["verdict"] == "not_offered"}
    assert unanswered == {}


@pytest.mark.parametrize(("case", "changes"), [
    ("axolotl-dpo", {"rl": "simpo"}), ("swift-dpo", {"rlhf_type": "simpo"}), ("trl-dpo", {"loss_type": "simpo"}),
])  # fmt: skip
def test_the_likelihood_of_chosen_answers_that_simpo_has_there_is_said(case, changes, tmp_path):
    # TRL's CPOTrainer, by which all three train simpo: loss + cpo_alpha x the loss of chosen answers, 1.0 by default
    _, _, made = imported(tmp_path, case, **changes)
    assert "# - default of cpo_alpha: 1.0" in made.text
    _, answers, made = imported(tmp_path, case, **changes, cpo_alpha=0)
    assert answers["cpo_alpha"]["verdict"] == "no_effect"
    assert "# - cpo_alpha" not in made.text
    _, _, made = imported(tmp_path, case)
    assert "cpo_alpha" not in made.text


def test_a_loss_of_trls_fine_tuning_that_is_not_offered_makes_no_run_of_pairs(tmp_path):
    written, answers, made = imported(tmp_path, "trl-bare", loss_type="dft")
    assert {"task_mode", "preference.loss"}.isdisjoint(written)
    assert (answers["loss_type"]["verdict"], answers["loss_type"]["became"]) == ("not_offered", None)
    assert "# - loss_type: dft" in made.text


def test_a_loss_of_pairs_that_is_not_offered_is_said_and_the_nearest_is_written(tmp_path):
    written, answers, made = imported(tmp_path, "trl-dpo", loss_type=["exo_pair"])
    assert (written["preference.loss"], answers["loss_type"]["verdict"]) == ("sigmoid", "not_offered")
    assert "# - loss_type: " in made.text


def test_older_names_of_ms_swift_are_followed(tmp_path):
    written, answers, _ = imported(tmp_path, "swift-older-names")
    expected = {"model.name": "Qwen/Qwen2.5-0.5B-Instruct", "tuning.mode": "full", "train.learning_rate": 1e-5,
                "train.precision": "bf16", "data.too_long": "truncate"}  # fmt: skip
    assert {key: written[key] for key in expected} == expected
    assert answers["truncation_strategy"]["verdict"] == answers["loss_scale"]["verdict"] == "not_offered"
    assert "tuning.lora.r" not in written


@pytest.mark.parametrize(("given", "expected"), [
    ({"torch_dtype": "bfloat16"}, "bf16"), ({"torch_dtype": "float32"}, "fp16"), ({}, "auto"),
    ({"torch_dtype": "float32", "bf16": False, "fp16": False}, "fp32"), ({"fp16": True}, "fp16"),
])  # fmt: skip
def test_number_formats_of_ms_swift_follow_its_weights(given, expected, tmp_path):
    written, _, _ = imported(tmp_path, "swift-bare", **given)
    assert written["train.precision"] == expected


def test_a_lowest_rate_and_steps_of_warm_up_become_shares(tmp_path):
    written, answers, _ = imported(tmp_path, "trl-qlora")
    shares = ("train.lr_scheduler", "train.min_lr_ratio", "train.warmup_ratio", "tuning.mode")
    assert [written[key] for key in shares] == ["cosine", 0.1, 0.1, "qlora"]
    assert answers["packing"]["verdict"] == "translated"
    assert answers["push_to_hub"]["verdict"] == "not_offered"
