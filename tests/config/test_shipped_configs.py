"""Every YAML in configs/ is a run that loads, and explains itself."""

import re
from pathlib import Path

import pytest

from sftplay.config.data import row_paths
from sftplay.config.keys import all_keys
from sftplay.config.load import load_config, notes
from sftplay.config.resolved import dump_resolved

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))
RUNS = [path for path in FILES if path.name != "config_base.yaml"]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_shipped_file_loads_with_nothing_to_note_and_data_that_is_there(path):
    cfg = load_config(path.relative_to(ROOT))
    assert notes(cfg) == []
    paths = [path for _, path in row_paths(cfg)]
    assert all(Path(path).is_file() for path in paths if not path.startswith(("data/processed/", "builtin:")))
    assert dump_resolved(cfg)


@pytest.mark.contract
def test_the_base_file_becomes_a_run_with_a_model_and_data(tmp_path):
    cfg = load_config("configs/config_base.yaml", ["model.name=builtin:tiny", "data.train_path=rows.jsonl"])
    assert cfg.model.name == "builtin:tiny"


def test_the_base_file_changes_no_default():
    cfg = load_config("configs/config_base.yaml", ["model.name=a", "data.train_path=b"])
    for key in cfg.origins:
        if key not in ("model.name", "data.train_path"):
            assert cfg.get_value(key) == all_keys()[key].get_default(call_default_factory=True, validated_data={}), key


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_command_in_a_header_names_its_own_file(path):
    command = re.search(r"# Command: (make .*)", path.read_text(encoding="utf-8"))[1]
    assert command == "make demo" if path.stem == "run_demo" else f"CONFIG=configs/{path.name}" in command
    makefile = ROOT / "Makefile"
    if makefile.exists():
        assert re.search(rf"^{command.split()[1]}:", makefile.read_text(encoding="utf-8"), re.M), command


@pytest.mark.contract
def test_the_sudoku_run_is_that_of_the_published_code_and_trm_is_a_preset_of_its_keys():
    hrm = load_config("configs/run_hrm_sudoku.yaml")
    assert (hrm.train.effective_batch_size, hrm.train.learning_rate, hrm.train.weight_decay) == (768, 1e-4, 1.0)
    assert (hrm.hrm.epochs, hrm.hrm.n_supervision, hrm.hrm.h_cycles, hrm.hrm.l_cycles) == (20_000, 16, 2, 2)
    steps = 20_000 * 1000 // 768
    assert round(hrm.train.warmup_ratio * steps) == 2000
    trm = load_config("configs/run_trm_sudoku.yaml").hrm
    assert (trm.arch, trm.grad, trm.l_layers, trm.q_continue, trm.ema) == ("single", "full_last_cycle", 2, False, 0.999)
    assert (trm.h_cycles, trm.l_cycles, trm.epochs, trm.puzzle_emb_len) == (3, 6, 50_000, 16)


@pytest.mark.contract
def test_the_distributed_gemma_run_is_the_one_of_the_guide():
    cfg = load_config("configs/run_gemma27b_distributed.yaml")
    assert (cfg.model.name, cfg.model.max_seq_len) == ("google/gemma-3-27b-it", 2048)
    assert (cfg.tuning.mode, cfg.train.effective_batch_size, cfg.train.precision) == ("qlora", 32, "bf16")


@pytest.mark.contract
@pytest.mark.parametrize(("name", "beta2"), [("gsm8k", 0.1), ("mbpp", 0.25)])
def test_two_turn_runs_have_the_batch_of_the_guide_and_the_published_weights(name, beta2):
    cfg = load_config(f"configs/run_score_{name}.yaml")
    # the guide: 64 in all, 32 on each of two GPUs, 4 at a time, 8 times
    assert (cfg.train.effective_batch_size, cfg.train.batch_size, cfg.train.grad_accum) == (64, 4, "auto")
    assert (cfg.score.alpha, cfg.score.beta1, cfg.score.beta2, cfg.score.value_coef) == (10, 0.01, beta2, 0.01)
    assert (cfg.model.name, cfg.tuning.mode) == ("meta-llama/Llama-3.2-3B-Instruct", "lora")


@pytest.mark.contract
def test_the_demo_measures_itself_before_and_after_without_a_download():
    cfg = load_config("configs/run_demo.yaml")
    assert (cfg.model.name, cfg.run_name) == ("builtin:tiny", "demo")
    assert (cfg.eval.before, cfg.eval.after) == (True, True)
