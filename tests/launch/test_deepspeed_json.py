"""DeepSpeed files: shipped ones are accepted, and a user's mistakes are reported with their lines."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.errors import ConfigError, ConfigErrors
from sftplay.launch.deepspeed_json import (
    AUTO_NAMES,
    OUTDATED,
    REMOVED,
    SECTIONS,
    read_deepspeed,
    run_values,
)

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "deepspeed_configs").glob("*.json"))


def file_of(folder, text):
    path = folder / "own.json"
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder, text, expected=None):
    with pytest.raises(ConfigErrors) as caught:
        read_deepspeed(file_of(folder, text), expected)
    return [(one.where.rsplit("/", 1)[-1], f"{one.what} {one.fix}") for one in caught.value.problems]


@pytest.fixture
def cfg():
    return load_config(
        ROOT / "configs/run_lora.yaml",
        ["train.effective_batch_size=32", "train.batch_size=4", "train.grad_accum=4", "train.precision=bf16"],
    )


@pytest.fixture(scope="module")
def upstream():
    """DeepSpeed's own names: section -> fields of its config classes as a file spells them, without deprecated ones."""
    pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    classes = {
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "fp16": DeepSpeedFP16Config,
        "bf16": DeepSpeedBF16Config,
    }
    return {
        section: {
            field.alias or name
            for name, field in kind.model_fields.items()
            if not (field.json_schema_extra or {}).get("deprecated")
        }
        for section, kind in classes.items()
    }


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_accepted_for_a_run_of_its_stage(path, cfg):
    stage = int(next(iter(re.findall(r"zero(\d)", path.stem)), 2))
    values = read_deepspeed(path, run_values(cfg, world_size=2, stage=stage))
    assert values["zero_optimization"]["stage"] == stage


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_without_comments_is_what_deepspeed_itself_reads(path, upstream):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = read_deepspeed(path)["zero_optimization"]
    known = {name: value for name, value in zero.items() if value != "auto"}
    assert DeepSpeedZeroConfig(**known).stage == zero["stage"]


@pytest.mark.parametrize(
    "section",
    ["zero_optimization", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "fp16", "bf16"],
)
def test_the_known_names_are_those_of_the_installed_deepspeed(section, upstream):
    assert set(SECTIONS[section].split()) == upstream[section]


def test_what_deepspeed_has_removed_is_refused_by_the_same_names(upstream):
    import deepspeed.runtime.config as module

    zero = {f"zero_optimization.{name}" for name in module._REMOVED_ZERO_CONFIG_KEYS}
    assert set(REMOVED) == set(module._REMOVED_TOP_LEVEL_CONFIG_KEYS) | zero


def test_names_deepspeed_calls_deprecated_are_outdated_here(upstream):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = DeepSpeedZeroConfig.model_fields.items()
    old = {f"zero_optimization.{name}" for name, field in fields if (field.json_schema_extra or {}).get("deprecated")}
    assert len(old) >= 4
    assert old <= set(OUTDATED)


def test_auto_is_accepted_only_where_transformers_or_accelerate_fill_it_in():
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations import deepspeed

    sources = inspect.getsource(deepspeed) + inspect.getsource(DeepSpeedPlugin)
    assert [name for name in AUTO_NAMES.split() if f'"{name}"' not in sources] == []


def zero(text):
    return f'{{"zero_optimization": {{"stage": 2,\n {text}}}}}'


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        (zero('"overlap_com": true'), ":2 zero_optimization.overlap_com", "did you mean 'overlap_comm'"),
        (zero('"gradient_clipping": 1.0'), ":2 zero_optimization.gradient_clipping", "move it to the top"),
        ('{"zero_optimization": {"stage": 2},\n "stage": 2}', ":2 stage", "move it to zero_optimization"),
        (zero('"cpu_offload": true'), ":2 zero_optimization.cpu_offload", "offload_optimizer"),
        (zero('"mics_shard_size": 4'), ":2 zero_optimization.mics_shard_size", "remove it"),
        (zero('"allgather_bucket_size": "auto"'), ":2 zero_optimization.allgather_bucket_size", "nothing replaces"),
        ("{}", ":1 zero_optimization", "nothing would be sharded"),
        # DeepSpeed says that it is saved while it is still written.
        (zero('"stage": 2}, "checkpoint": {"writer": {"decoupled": true}').replace('"stage": 2,', "", 1),
         ":2 checkpoint.writer.decoupled", "while it is still written"),
        ('{"zero_optimization": {"stage": 2}\n "fp16": {}}', ":2", "no JSON"),
        ('{"fp16": {}, "fp16": {}, "zero_optimization": {"stage": 2}}', "own.json", "twice"),
        ("[1]", "own.json", "no object"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_its_line_and_remedy(tmp_path, text, where, said):
    with pytest.raises(ConfigError) as caught:
        read_deepspeed(file_of(tmp_path, text))
    assert caught.value.where.endswith(where)
    assert said in f"{caught.value.what} {caught.value.fix}"


def test_a_comment_inside_a_string_is_no_comment(tmp_path):
    text = zero('"overlap_comm": true}, /* two\n lines */ "tensorboard": {"output_path": "s3://x"')
    assert read_deepspeed(file_of(tmp_path, text))["tensorboard"] == {"output_path": "s3://x"}


def test_all_contradictions_with_the_run_are_reported_at_once(tmp_path, cfg):
    text = """{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 2,
  "fp16": {"enabled": true},
  "bf16": {"enabled": true},
  "optimizer": {"type": "Lamb", "params": {"lr": "auto"}},
  "scheduler": {"type": "OneCycle", "params": {"warmup_type": "linear"}},
  "zero_optimization": {"stage": 3}
}"""
    found = problems(tmp_path, text, run_values(cfg, world_size=2, stage=2))
    assert [where.split(":")[1] for where, _ in found] == [
        "2 train_batch_size",
        "4 gradient_accumulation_steps",
        "5 fp16.enabled",
        "7 optimizer.type",
        "8 scheduler.type",
        "9 zero_optimization.stage",
    ]
    assert "train.grad_accum" in found[1][1]
