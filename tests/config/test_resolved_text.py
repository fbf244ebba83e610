"""The resolved config: everything in it, origins beside it, and the same config when read again."""

import string
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sftplay.config import layers
from sftplay.config.data import DataConfig, EvalConfig
from sftplay.config.keys import all_keys
from sftplay.config.load import load_config, load_resolved
from sftplay.config.resolved import dump_resolved, flow
from sftplay.config.run import LoggingConfig, LoraConfig, ModelConfig, RunConfig, TrainConfig, TuningConfig

AWKWARD = [
    "no",
    "2e-4",
    "a: b",
    "#x",
    "x #y",
    "",
    " ",
    "null",
    "~",
    "true",
    "007",
    "0x1F",
    ".5",
    "- a",
    "<<",
    "*a",
    "&a",
]
AWKWARD += ["!!str", "'", '"', "\\", "a\nb", "\t", "\x00", "\x85", "\u2028", "\ufeff", "é", "日本", "\U0001f600", "a,b"]
AWKWARD += ["[a]", "{a: b}", "%", "@", "`", "?", "a:", ":", "---", "...", "None", "1_000", "12:30", "a\\nb", "C:\\x"]
TEXTS = st.sampled_from(AWKWARD) | st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_is_read_back_as_itself(value):
    again = layers.parse(f"key: {flow(value)}  # origin\n", "f").values["key"]
    assert again == value
    assert _types(again) == _types(value)


def _types(value):
    if isinstance(value, list):
        return [_types(item) for item in value]
    return {key: _types(item) for key, item in value.items()} if isinstance(value, dict) else type(value)


# Texts that a rule of the config refuses as a name (empty, `None`) are no part of a config that loaded, nor is a home
# folder's `~`: it has been replaced.
CLEAN = TEXTS.filter(lambda text: "\0" not in text)
NAMES = CLEAN.filter(lambda text: text.strip() and not text.startswith("~") and text not in ("None", "none"))
FOLDERS = st.text(string.ascii_letters + string.digits + "äß日 _-#:{}[],&*!|>'\"%@`", min_size=1, max_size=12)
EXTRA = {
    "adam_beta1": st.floats(allow_nan=False, allow_infinity=False),
    "lr_scheduler_kwargs": st.dictionaries(CLEAN, CLEAN | st.floats(allow_nan=False)),
}


@st.composite
def configs(draw):
    quarter = st.sampled_from([1, 2, 4, "auto"])
    return RunConfig(
        run_name=draw(st.none() | FOLDERS.filter(lambda text: text.strip() and text.lower() != "none")),
        output_dir=draw(NAMES),
        seed=draw(st.integers(0, 2**32 - 1)),
        model=ModelConfig(name=draw(NAMES), revision=draw(st.none() | NAMES)),
        tuning=TuningConfig(
            mode=draw(st.sampled_from(["full", "lora", "qlora"])),
            lora=LoraConfig(
                alpha=draw(st.none() | st.floats(1e-300, 1e300)),
                target_modules=draw(st.just("auto") | st.lists(CLEAN, min_size=1, max_size=3)),
            ),
        ),
        train=TrainConfig(
            learning_rate=draw(st.just("auto") | st.floats(0, 10)),
            batch_size=draw(quarter),
            grad_accum=draw(quarter),
            precision=draw(st.sampled_from(["auto", "bf16", "fp16", "fp32"])),
            extra=draw(st.fixed_dictionaries({}, optional=EXTRA)),
        ),
        data=DataConfig(train_path=draw(NAMES) + ".jsonl"),  # a file: no folder that is written to lies in it
        eval=EvalConfig(metrics=draw(st.lists(st.sampled_from(["chrf", "rouge_l"]), min_size=1, unique=True))),
        logging=LoggingConfig(backend=draw(st.sampled_from(["none", "wandb", ["wandb", "mlflow"]]))),
    )


@given(configs())
def test_a_resolved_config_loads_back_to_an_equal_config(cfg):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.resolved.yaml")
        path.write_text(dump_resolved(cfg), encoding="utf-8")
        assert load_config(path).model_dump() == cfg.model_dump()


def test_every_key_is_written_and_every_value_that_was_set_names_its_origin(load, write):
    write("seed: 7\n", "base.yaml")
    cfg = load("include: base.yaml\ntrain:\n  epochs: 1\n  extra: {adam_beta1: 0.8}\n", "train.max_steps=5")
    lines = dump_resolved(cfg).splitlines()
    assert "seed: 7  # base.yaml:1" in lines
    assert "  epochs: 1.0  # run.yaml:3" in lines
    assert "    adam_beta1: 0.8  # run.yaml:4" in lines
    assert "  max_steps: 5  # command line" in lines
    assert "  save_steps: null" in lines
    assert len(lines) >= 1 + len(all_keys())


def test_an_origin_with_a_line_break_in_its_path_stays_a_comment(load):
    cfg = load("").with_values({"seed": 1}, "a\nseed: 2")
    assert "seed: 1  # a?seed: 2" in dump_resolved(cfg)


def test_origins_are_read_back_from_the_comments(tmp_path):
    cfg = RunConfig(
        model=ModelConfig(name="a  # b"), data=DataConfig(train_path='"x"  # y', columns={"question": "k # l"})
    )
    origins = {"model.name": "my runs/a # b.yaml:3", "data.columns.question": "command line", "seed": "run.yaml:1"}
    written = cfg.with_origins(origins)
    (tmp_path / "config.resolved.yaml").write_text(dump_resolved(written), encoding="utf-8")
    again = load_resolved(tmp_path / "config.resolved.yaml")
    assert again.model_dump() == cfg.model_dump()
    assert again.origins == origins
