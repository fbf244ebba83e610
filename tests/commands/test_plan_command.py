"""`plan`: what it answers, to people and to scripts, for machines that are here and that are not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sftplay.cli import main

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
GEMMA = "configs/run_gemma27b_distributed.yaml"
LLAMA = "configs/run_llama70b.yaml"
GIB = 2**30

INVENTED = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3000,
    "num_hidden_layers": 7,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 50_000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code = main(["plan", *arguments, "--json"])
    return {"code": code, **json.loads(capsys.readouterr().out)}


def test_the_answer_for_scripts_has_the_promised_keys_and_adds_up(capsys):
    plan = answer(capsys, "--config", GEMMA, "--gpus", "2xH200")
    promised = (
        "verdict", "world_size", "batch_size", "grad_accum", "effective_batch_size", "budget_bytes", "peak_bytes",
        "peak_phase", "components", "suggestions", "steps",
    )  # fmt: skip
    assert set(promised) <= set(plan)
    assert plan["code"] == 0
    assert plan["verdict"] == "fits"
    assert plan["batch_size"] * plan["grad_accum"] * plan["world_size"] == plan["effective_batch_size"] == 32
    assert sum(plan["components"].values()) == plan["peak_bytes"] <= plan["budget_bytes"]


def test_the_cost_is_that_of_all_gpus_for_the_planned_time(capsys):
    words = ["--config", "configs/run_lora.yaml", "--gpus", "8xH100", "data.processed_dir=nothing"]
    assert answer(capsys, *words)["cost"] is None
    plan = answer(capsys, *words, "cluster.price_per_hour=2.5")
    assert plan["world_size"] == 8
    assert plan["cost"] == pytest.approx(plan["seconds"] / 3600 * 8 * 2.5)
    assert main(["plan", *words, "cluster.price_per_hour=2.5"]) == 0
    assert f"cost        about {plan['cost']:.2f}: 8 GPUs x 2.5 an hour" in (text := capsys.readouterr().out)
    assert text.index("time   ") < text.index("cost   ")
    assert main(["plan", *words]) == 0
    assert "cost    " not in capsys.readouterr().out
    main(["plan", "--config", "configs/run_grpo_math.yaml", "--gpus", "1xH100", "cluster.price_per_hour=2"])
    assert "cost        not estimated: 1 GPU x 2 an hour" in capsys.readouterr().out


def test_a_price_is_a_number_from_zero_on(capsys):
    for price in ("-1", "inf", "nan", "two"):
        assert main(["plan", "--config", "configs/run_lora.yaml", f"cluster.price_per_hour={price}"]) == 2
        assert "cluster.price_per_hour" in capsys.readouterr().err


def test_gemma_27b_in_four_bits_weighs_what_hand_arithmetic_says(capsys):
    # specs/sizing.md section 7: 25.60e9 weights in the linears, 1.41e9 in the tied embedding; beside them a tower of
    # 0.4e9. NF4 with double quantisation is 0.5 + 1/64 + 4/16384 bytes, the rest 2; r 32 in fp32 makes 227e6 weights.
    plan = answer(capsys, "--config", GEMMA, "--gpus", "2xH200")
    linears, others = 25.60e9, 1.41e9 + 0.42e9
    assert plan["components"]["weights"] == pytest.approx(linears * (0.5 + 1 / 64 + 4 / 16384) + 2 * others, rel=0.005)
    assert plan["components"]["adapters"] == pytest.approx(4 * 227e6, rel=0.005)
    assert plan["components"]["optimizer"] == 2 * plan["components"]["adapters"]


def test_half_of_the_cards_gives_twice_the_accumulation(capsys):
    two = answer(capsys, "--config", GEMMA, "--gpus", "2xH200")
    one = answer(capsys, "--config", GEMMA, "--gpus", "H200")
    assert one["effective_batch_size"] == two["effective_batch_size"]
    assert one["batch_size"] * one["grad_accum"] == 2 * two["batch_size"] * two["grad_accum"]


@pytest.mark.parametrize("fleet", ["2xH100", "4xH100", "8xH100"])
def test_70b_in_four_bits_fits_on_h100s(capsys, fleet):
    # 68.5e9 weights of 0.5159 bytes and 2.1e9 of 2 bytes are 36.8 GiB: half of the card.
    assert answer(capsys, "--config", LLAMA, "--gpus", fleet)["verdict"] == "fits"


@pytest.mark.parametrize("where", [("--gpus", "V100-32GB"), ("--gpus", "RTX-4060"), ("--vram", "24GiB")])
def test_70b_does_not_fit_on_a_card_that_is_smaller_than_its_weights(capsys, where):
    plan = answer(capsys, "--config", LLAMA, *where)
    assert plan["code"] == 3
    assert plan["verdict"] == "does_not_fit"
    assert plan["components"]["weights"] > plan["budget_bytes"]
    assert plan["suggestions"]


def test_suggestions_lead_to_a_run_that_fits_when_they_are_followed(capsys):
    plan = answer(capsys, "--config", "configs/run_full.yaml", "--gpus", "RTX-4060")
    assert plan["verdict"] == "does_not_fit"
    first = next(each for each in plan["suggestions"] if each["fits"])
    followed = answer(capsys, "--config", "configs/run_full.yaml", "--gpus", "RTX-4060", *first["change"].split(", "))
    assert followed["verdict"] == "fits"
    assert followed["peak_bytes"] <= followed["budget_bytes"]


LONG = ("--config", "configs/run_lora.yaml", "model.max_seq_len=8192")


def test_what_a_run_does_already_is_not_suggested(capsys):
    for given, suggested in (("true", False), ("false", True)):
        plan = answer(capsys, *LONG, "--vram", "10GiB", f"train.gradient_checkpointing={given}")
        changes = [each["change"] for each in plan["suggestions"]]
        assert ("train.gradient_checkpointing=true" in changes) is suggested


@pytest.mark.parametrize("given", ["standard", "chunked"])
def test_changes_that_fit_only_together_name_each_key_once(capsys, given):
    open_ones = ("train.gradient_checkpointing=false", "train.optim=sgd", f"train.loss_head={given}")
    plan = answer(capsys, *LONG, "--vram", "6GiB", *open_ones)
    (only,) = plan["suggestions"]
    keys = [each.partition("=")[0] for each in only["change"].split(", ")]
    changed = {"train.gradient_checkpointing", "tuning.mode", "model.max_seq_len"}
    assert set(keys) == changed | ({"train.loss_head"} if given == "standard" else set())
    assert (only["fits"], len(keys)) == (True, len(set(keys)))


def test_rows_that_nobody_has_counted_leave_the_steps_open(capsys):
    arguments = ("--config", "configs/run_lora.yaml", "--gpus", "H200", "data.train_path=data/demo")
    assert main(["plan", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "\nsteps       not known: the rows are counted when the data are prepared\n" in printed
    assert "\ndevice      H200, " in printed
    assert " train.packing = false: " in printed  # as a config has it


def test_an_old_card_is_planned_in_fp16(capsys):
    plan = answer(capsys, "--config", LLAMA, "--gpus", "V100-32GB", "train.precision=auto")
    assert {each["key"]: each["value"] for each in plan["decisions"]}["train.precision"] == "fp16"


def test_explicit_sizes_are_planned_as_they_are(capsys):
    plan = answer(capsys, "--config", GEMMA, "--gpus", "2xH200", "train.batch_size=2")
    assert (plan["batch_size"], plan["grad_accum"]) == (2, 8)


CPU_CONFIGS = [f"configs/run_{name}.yaml" for name in ("demo", "dpo_toy", "grpo_toy", "score_toy", "hrm_sudoku4")]


@pytest.mark.parametrize("config", CPU_CONFIGS)
def test_without_a_gpu_the_memory_of_the_machine_is_the_budget_and_cublas_takes_none(capsys, config: str):
    plan = answer(capsys, "--config", config)
    assert not plan["components"].get("workspace")
    assert plan["code"] == 0
    assert plan["device"]["is_gpu"] is False
    assert 0 < plan["budget_bytes"] <= 0.92 * plan["device"]["total_bytes"] + 1


def test_a_model_that_nobody_knows_is_planned_from_its_config_json(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(INVENTED))
    arguments = ("--config", "configs/run_full.yaml", "--gpus", "A10", f"model.name={tmp_path}")
    plan = answer(capsys, *arguments)
    # q and o 1024 x 1024, k and v 1024 x 256, three of 1024 x 3000; two norms a layer, one at the end; two of 50,000.
    layer = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 3000 + 2 * 1024
    assert plan["components"]["weights"] == 4 * (7 * layer + 1024 + 2 * 50_000 * 1024)


def test_the_comparison_names_one_row_to_take(capsys):
    assert main(["plan", "--config", GEMMA, "--gpus", "2xH200", "--compare", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["mode"] for row in rows} == {"full", "lora", "qlora"}
    assert {"single", "ddp", "zero1", "zero2", "zero3", "fsdp"} <= {row["strategy"] for row in rows}
    (taken,) = (row for row in rows if row["recommended"])
    assert (taken["mode"], taken["strategy"], taken["verdict"]) == ("qlora", "ddp", "fits")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "2xH20"), "did you mean H200"),
        (("--gpus", "0xH200"), "no card called"),
        (("--vram", "lots"), "not a size: 'lots'"),
        (("--gpus", "H200", "--vram", "24GiB"), "do not go together"),
        (("--gpus", "H200", "--nproc", "2"), "2 processes need 2 GPUs"),
        (("model.name=Qwen/Qwen2.5-7B-Instrct",), "did you mean Qwen/Qwen2.5-7B-Instruct"),
        (("--gpus", "3xH200"), "30 or 33"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_nearest(capsys, arguments, message):
    assert main(["plan", "--config", GEMMA, *arguments]) in (2, 3)
    assert message in capsys.readouterr().err


def test_a_run_on_rewards_is_told_its_groups_and_what_each_phase_of_a_step_takes(capsys):
    assert main(["plan", "--config", "configs/run_grpo_toy.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "8 prompts x 8 completions = 64 a rollout batch, by transformers" in printed
    assert "prompts of 40 tokens, completions of 24, at most" in printed
    assert "GiB of it keys and values" in printed
    phases = re.findall(r"^  (while|in) (.+?) +[\d.]+ GiB", printed, re.M)
    assert [name for _, name in phases] == [
        "completions are sampled", "the loss", "a layer's backward pass", "the optimizer step",
    ]  # fmt: skip
    assert main(["plan", "--config", "configs/run_grpo_toy.yaml", "grpo.num_iterations=2"]) == 0
    assert "  while completions are scored without gradients  " in capsys.readouterr().out


def test_keys_and_values_are_told_at_full_length_where_the_prompts_alone_are_the_peak(capsys):
    # Qwen2.5-1.5B in bf16: 2 x 28 layers x 2 heads x 128 x 2 bytes = 28 KiB a token; 64 completions of 512 + 512.
    # 32 prompts are computed once, and 64 rows hold them with room for 64 more tokens.
    arguments = ("--config", "configs/run_grpo_code.yaml", "--gpus", "H100", "grpo.num_generations=2")
    assert main(["plan", *arguments]) == 0
    assert "1.422 GiB of it keys and values, 1.750 GiB at full length" in capsys.readouterr().out
    assert main(["plan", *arguments, "grpo.max_prompt_length=8"]) == 0
    assert "GiB at full length" not in capsys.readouterr().out


@pytest.mark.parametrize("fleet", ["2xA40", "A100"])
def test_the_layouts_of_the_docs_are_what_the_command_prints(capsys, fleet):
    assert main(["plan", "--config", str(ROOT / "configs/run_score_gsm8k.yaml"), "--gpus", fleet, "--compare"]) == 0
    printed = capsys.readouterr()
    table = [line for line in (printed.out + printed.err).splitlines() if line.startswith("|")]
    assert "\n".join(table) in (ROOT / "docs/score.md").read_text(encoding="utf-8")


def test_what_the_docs_say_of_four_cards_is_what_the_command_prints(capsys):
    assert main(["plan", "--config", str(ROOT / "configs/run_score_gsm8k.yaml"), "--gpus=4xA40", "--compare"]) == 0
    each, host = re.findall(r"\| full \| sharded \| 4 \| (\S+) \| (\S+) \| \S+ \| fits", capsys.readouterr().out)[0]
    told = f"(`GPUS=4xA40`: `sharded`, {each} GiB on each and {host} of the host)"
    assert told in (ROOT / "docs/score.md").read_text(encoding="utf-8")


def test_the_layouts_for_scripts_say_what_each_device_holds_and_why_it_does_not_fit(capsys):
    arguments = ["--config", str(ROOT / "configs/run_score_gsm8k.yaml"), "--gpus", "2xA40", "--compare", "--json"]
    assert main(["plan", *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    (apart,) = (row for row in rows if row["layout"] == "roles" and row["mode"] == "full")
    assert set(apart["devices"]) == {"cuda:0", "cuda:1"}
    assert (apart["verdict"], apart["world_size"]) == ("does_not_fit", 1)
    assert "optimizer state" in apart["why"]
    (taken,) = (row for row in rows if row["recommended"])
    assert (taken["mode"], taken["layout"], taken["world_size"]) == ("lora", "shared", 2)


def test_two_whole_models_are_planned_in_shards_on_as_many_processes_as_there_are_gpus(capsys):
    arguments = ["plan", "--config", str(ROOT / "configs/run_score_gsm8k.yaml"), "--gpus", "4xA40"]
    assert main([*arguments, "tuning.mode=full"]) == 0
    said = capsys.readouterr()
    assert "sharded: a part of solver, guide, ref in each of 4 processes; value whole in each" in said.out + said.err


def test_two_turn_episodes_take_one_process_where_their_parts_lie_on_several_gpus(capsys):
    arguments = ["plan", "--config", str(ROOT / "configs/run_score_gsm8k.yaml"), "--gpus", "2xA40"]
    assert main([*arguments, "score.placement=roles"]) == 0
    said = capsys.readouterr()
    assert "roles: solver on cuda:0; guide, value on cuda:1" in said.out + said.err
    assert main([*arguments, "score.placement=roles", "--nproc", "2"]) == 2
    assert "one process holds all parts" in capsys.readouterr().err


def test_the_worked_example_of_the_docs_is_what_the_command_prints(capsys):
    assert main(["plan", "--config", GEMMA, "--gpus", "2xH200"]) == 0
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).strip().splitlines()
    written = (ROOT / "docs/plan.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.rstrip() not in [each.rstrip() for each in written]] == []
