"""DeepSpeed files: shipped ones are accepted, and a user's mistakes are reported with their lines."""

from __future__ import annotations

import inspect
import json
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
    write_plain,
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
def test_a_shipped_file_without_comments_is_what_deepspeed_itself_reads(path, tmp_path, upstream):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    write_plain(read_deepspeed(path), tmp_path / "plain.json")
    zero = json.loads((tmp_path / "plain.json").read_text())["zero_optimization"]
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


def test_a_comment_inside_a_string_is_no_comment(tmp_path):
    text = '{\n  // a word\n  "zero_optimization": {"stage": 2}, /* two\n lines */ '
    text += '"tensorboard": {"output_path": "s3://x"}\n}'
    assert read_deepspeed(file_of(tmp_path, text))["tensorboard"] == {"output_path": "s3://x"}


def test_a_misspelt_name_is_reported_with_its_line_and_the_nearest(tmp_path):
    found = problems(tmp_path, '{\n  "zero_optimization": {\n    "stage": 2,\n    "overlap_com": true\n  }\n}')
    assert found[0][0] == "own.json:4 zero_optimization.overlap_com"
    assert "did you mean 'overlap_comm'" in found[0][1]


def test_a_name_in_the_wrong_section_is_refused_with_its_section(tmp_path):
    found = problems(tmp_path, '{"zero_optimization": {"stage": 2, "gradient_clipping": 1.0},\n "stage": 2}')
    assert [where for where, _ in found] == ["own.json:1 zero_optimization.gradient_clipping", "own.json:2 stage"]
    assert "to the top" in found[0][1]
    assert "zero_optimization" in found[1][1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"cpu_offload": true', "offload_optimizer"),
        ('"cpu_offload_params": true', "offload_param"),
        ('"stage3_gather_fp16_weights_on_model_save": true', "stage3_gather_16bit_weights_on_model_save"),
        ('"mics_shard_size": 4', "remove it"),
    ],
)
def test_an_outdated_name_is_refused_with_todays_spelling(tmp_path, old, new):
    found = problems(tmp_path, f'{{"zero_optimization": {{"stage": 3,\n {old}}}}}')
    assert len(found) == 1
    assert found[0][0].startswith("own.json:2 ")
    assert new in found[0][1]


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


def test_auto_where_nobody_fills_it_in_is_refused(tmp_path):
    found = problems(tmp_path, '{"zero_optimization": {"stage": 2,\n "allgather_bucket_size": "auto"}}')
    assert found[0][0] == "own.json:2 zero_optimization.allgather_bucket_size"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"zero_optimization": {"stage": 2}\n "fp16": {}}', ":2"),
        ('{"fp16": {}, "fp16": {}, "zero_optimization": {"stage": 2}}', "twice"),
        ("[1]", "no object"),
        ("", "no JSON"),
    ],
)
def test_what_is_no_object_of_json_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_deepspeed(file_of(tmp_path, text))
    assert message in str(caught.value)


def test_a_file_without_sharing_is_refused(tmp_path):
    assert problems(tmp_path, "{}")[0][0] == "own.json:1 zero_optimization"


def test_a_writer_that_continues_after_the_end_of_a_save_is_refused(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(
        '{"zero_optimization": {"stage": 2},\n"checkpoint": {"writer": {"type": "FAST", "decoupled": true}}}'
    )
    with pytest.raises(ConfigErrors) as caught:
        read_deepspeed(path)
    assert caught.value.where == f"{path}:2 checkpoint.writer.decoupled"
    path.write_text('{"zero_optimization": {"stage": 2}, "checkpoint": {"writer": {"decoupled": false}}}')
    assert read_deepspeed(path)["checkpoint"]["writer"] == {"decoupled": False}
