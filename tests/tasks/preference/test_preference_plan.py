"""Preferences in the plan: memory of a step against a real model on the CPU, and what a reference costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from oracle.live_bytes import LiveBytes
from oracle.trace import recompute
from pair_files import pair_config, random_pairs
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.machine.probe import probe
from sftplay.plan.find_shape import find_shape
from sftplay.plan.flops import model_flops
from sftplay.plan.forecast import Device, Forecast, Hardware, RowLengths, Setting, Size, forecast, standing_bytes
from sftplay.plan.memory_setup import MemorySetup
from sftplay.plan.shape_from_config import shape_from_config
from sftplay.plan.sizing import size_run
from sftplay.runs.inputs import known_lengths, known_shape
from sftplay.tasks.preference.load_pairs import load
from sftplay.tasks.preference.losses import dpo_losses
from sftplay.tasks.preference.plan import OTHER, PART_SCORES, PASS, PLAN, PairMemory
from sftplay.tasks.preference.shared_prompt import PairCollator, completion_logps, put_chunked_logps
from sftplay.tasks.reward_model.scores import pair_losses as score_losses
from sftplay.tasks.reward_model.scores import pair_scores, to_score_model

HOST = Device("CPU", 2**40, 2**40, is_gpu=False, cores=2)
ON_CPU = MemorySetup(
    weight_bytes=4, compute_bytes=4, stream_bytes=4, attention="efficient", repeats_kv=True, is_masked=True,
    logits_bytes=4,
)  # fmt: skip
MOVING = ("mask", "activations", "head", "layer")
LLAMA = find_shape("meta-llama/Llama-3.1-8B")


class Beside(LiveBytes):
    """Counts what lives next to a model's weights and gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __enter__(self) -> Beside:
        super().__enter__()
        for parameter in self.model.parameters():
            assert [parameter.detach(), *([parameter.grad.detach()] if parameter.grad is not None else [])]
        self.enter_phase("run")
        self.resting = self.live_bytes
        return self

    @property
    def peak(self) -> int:
        return self.peaks_bytes["run"] - self.resting


def batch_of(side: int, prompt: int = 1) -> Any:
    """Two pairs whose prompt and answers fill the side, up to a token: padding needs a mask."""
    rows, longest = [], side - prompt
    for number, (first, second) in enumerate([(longest, longest - 1), (longest - 1, longest)]):
        ids = torch.randint(3, 50, (prompt + first + second,)).tolist()
        columns = {"prompt_tokens": prompt, "chosen_tokens": first, "row": number, "index": number}
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], **columns})
    return PairCollator(0)(rows)


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    ("vocab", "side", "prompt", "chunked"),
    [
        (20_000, 60, 1, False),
        (400, 200, 1, False),
        (20_000, 80, 60, False),
        pytest.param(400, 200, 160, False, marks=pytest.mark.slow),
        pytest.param(20_000, 200, 1, True, marks=pytest.mark.slow),
    ],
    ids=["scores decide", "layers decide", "a long prompt, scores", "a long prompt, layers", "scores in chunks"],
)
def test_a_step_of_pairs_takes_what_a_real_model_takes(
    vocab: int, side: int, prompt: int, chunked: bool, checkpointing: bool, shares: bool
):
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=128, intermediate_size=352, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model, batch = Qwen2ForCausalLM(config).train(), batch_of(side, prompt)
    if chunked:
        put_chunked_logps(model)
    if checkpointing:
        recompute(model, {"use_reentrant": False})

    def step() -> None:
        dpo_losses(completion_logps(model, batch, shares=shares).sums, "sigmoid", 0.1, 0.0).sum().backward()

    step()
    with Beside(model) as learning:
        step()
    model.eval()
    with torch.no_grad(), Beside(model) as scoring:
        completion_logps(model, batch, shares=shares)
    shape = shape_from_config(config.to_dict(), name="tiny")
    setup = replace(ON_CPU, checkpointing=checkpointing, head="chunked" if chunked else "standard")
    answers = 2 * (side - prompt) - 1
    known = {"joined": prompt + answers, "answer_labels": answers} if prompt > 1 else {}
    task = PairMemory(shares="yes" if shares else "no", has_reference=True, **known)
    seen = forecast(
        Setting(shape=shape, execution=setup, device=HOST, task=task), Size(rows=2, seq=side, accumulates=True)
    )
    moving = {name: sum(parts.get(part, 0) for part in MOVING) for name, parts in seen.footprint.phases.items()}
    assert max(moving["head"], moving["layer"]) == pytest.approx(learning.peak, rel=0.06)
    # A logsumexp makes exponentials of its own, which no trace of tensors sees.
    labels = min(256, 2 * (answers + 1)) if chunked else 2 * (answers + 1)
    unseen = 4 * min(PART_SCORES, labels * vocab)
    assert scoring.peak <= moving[PASS] <= 1.25 * (scoring.peak + unseen)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_of_a_reward_model_has_no_scores_over_the_vocabulary_and_no_old_head(tied: bool, tmp_path: Path):
    config = Qwen2Config(
        vocab_size=20_000, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=tied,
    )  # fmt: skip
    model = to_score_model(Qwen2ForCausalLM(config).train(), pad_token_id=0, seed=1)
    config.save_pretrained(tmp_path)
    shape = known_shape(config_of(task_mode="reward_model", model__name=str(tmp_path)))
    assert shape is not None
    held = standing_bytes(shape, replace(ON_CPU, head="score"))
    assert held.weights == sum(weight.nbytes for weight in model.parameters())
    assert (held.gradients, held.optimizer) == (held.weights, 2 * held.weights)
    assert (flops := model_flops(shape, ON_CPU)) is not None
    assert flops.per_label_token == 6 * 128
    batch = batch_of(60)

    def step() -> None:
        score_losses(pair_scores(model, batch, shares=True), None, center=0.0).sum().backward()

    step()
    with Beside(model) as learning:
        step()
    setup = replace(ON_CPU, checkpointing=False, head="score")
    setting = Setting(shape=shape, execution=setup, device=HOST, task=PairMemory(shares="yes"))
    phases = forecast(setting, Size(rows=2, seq=60, accumulates=True)).footprint.phases
    moving = [sum(phases[name].get(part, 0) for part in MOVING) for name in ("head", "layer")]
    assert max(moving) == pytest.approx(learning.peak, rel=0.06)


def test_pairs_that_were_prepared_are_planned_as_long_as_they_are(tmp_path: Path, tiny_llama: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    rows = [row | {"prompt": "Why salt? " * 30} for row in random_pairs(12, seed=1)]
    cfg = pair_config(tmp_path, rows, max_seq_len=1024)
    pairs = load(cfg, tokenizer)
    ids, labels = pairs.train["input_ids"][:], pairs.train["labels"][:]
    known = known_lengths(cfg)
    assert known is not None
    assert known.joined == max(map(len, ids)) < 2 * known.longest
    assert known.labels == max(len(row) - row.count(-100) for row in labels)
    by_length, by_limit = (
        size_run(config_of(train__batch_size=4), probe(), shape=LLAMA, lengths=lengths).forecast
        for lengths in (known, replace(known, joined=None, labels=None))
    )
    assert by_length is not None
    assert by_limit is not None
    assert by_length.peak_bytes < by_limit.peak_bytes


def seen_of(task: PairMemory, *, rows: int = 4, seq: int = 1024, strategy: Any = "single") -> Forecast:
    setup = MemorySetup(weight_bytes=4, compute_bytes=2, stream_bytes=4, has_autocast=True, head="chunked")
    device = Device("H100", 80 * 2**30, 80 * 2**30, is_gpu=True, capability=(9, 0), tflops=989.0)
    world = 1 if strategy == "single" else 4
    setting = Setting(shape=LLAMA, execution=setup, device=device, task=task, strategy=strategy, world_size=world)
    return forecast(setting, Size(rows=rows, seq=seq, accumulates=True))


def test_where_it_is_open_how_pairs_are_computed_the_larger_form_is_planned():
    peaks = {form: seen_of(PairMemory(shares=form, has_reference=True)).peak_bytes for form in ("yes", "no", "open")}
    assert peaks["open"] == max(peaks["yes"], peaks["no"])
    assert peaks["yes"] > peaks["no"], "flash attention needs no mask where each answer is a row"


def test_answers_of_kto_take_half_of_what_pairs_take():
    one, two = (seen_of(PairMemory(shares="no", scores_one=one)).footprint.phases for one in (True, False))
    assert one["layer"]["activations"] == two["layer"]["activations"] / 2


def test_another_model_lies_there_during_the_pass_alone_and_whole_on_every_device():
    task = PairMemory(shares="no", has_reference=True, other=LLAMA)
    for strategy in ("single", "zero3", "fsdp"):
        phases = seen_of(task, strategy=strategy).footprint.phases
        setup = seen_of(task).setting.execution
        assert phases[PASS][OTHER] == standing_bytes(LLAMA, setup).weights
        assert not any(OTHER in parts for name, parts in phases.items() if name != PASS)
    assert seen_of(replace(task, other=None)).footprint.phases[PASS][OTHER] == 0


def test_a_loss_without_a_reference_has_no_pass():
    assert PASS not in seen_of(PairMemory(shares="open")).footprint.phases


def test_the_costs_of_a_reference_are_a_pass_its_time_and_8_bytes_a_row():
    task = PairMemory(shares="open", has_reference=True, rows=100_000, row_tokens=500.0)
    setting = seen_of(task).setting
    # 100,000 rows x 500 tokens x 2 operations a weight (8.03e9, without the embedding) at 35 % of 989 TFLOP/s
    assert task.pass_seconds(setting) == pytest.approx(1e5 * 500 * 2 * 7.5e9 / (0.35 * 989e12), rel=0.01)
    head, *lines = task.describe_costs(setting)
    assert "one forward pass over 100,000 rows before the first step" in head
    assert "1.5 MiB on disk" in head  # 2 copies of 2 fp32 numbers a row
    assert [line.split()[0] for line in lines[1:]] == ["start", "adapter_off", "a", "none"]
    assert "needs an adapter" in lines[2]
    assert "29.92 GiB of memory" in lines[3]  # 8.03e9 weights in fp32


def config_of(**values: Any) -> RunConfig:
    cfg = RunConfig.model_validate(
        {"task_mode": "dpo", "model": {"name": "meta-llama/Llama-3.1-8B"}, "data": {"train_path": "rows.jsonl"}}
    )
    return cfg.with_values({key.replace("__", "."): value for key, value in values.items()}, "test")


def test_a_sized_run_packs_no_rows_and_has_the_beta_of_its_paper():
    for task, beta in (("dpo", 0.1), ("orpo", 0.1), ("simpo", 2.0)):
        sized = size_run(config_of(task_mode=task), probe(), shape=LLAMA)
        assert sized.cfg.train.packing is False
        assert sized.cfg.preference.beta == beta
    assert size_run(config_of(preference__beta=0.3), probe(), shape=LLAMA).cfg.preference.beta == 0.3


def test_a_reference_that_is_not_there_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="no model folder") as caught:
        size_run(config_of(preference__reference="./nowhere"), probe(), shape=LLAMA)
    assert caught.value.where == "test preference.reference"


def test_what_a_user_should_know_is_noted():
    notes = [*PLAN.notes(config_of(task_mode="kto", train__effective_batch_size=8), None)]
    assert notes == [
        "train.effective_batch_size 8: kto estimates its KL term by the rows of a step, and 16 or more are usual"
    ]
    assert not PLAN.notes(config_of(), None)
    (note,) = PLAN.notes(config_of(preference__reference="none"), None)
    assert "nothing measures how far the model moves" in note


def test_the_work_of_a_run_contains_the_pass():
    lengths = RowLengths(longest=900, mean=1200.0, count=10_000)
    hardware = Hardware(replace(seen_of(PairMemory(shares="no")).setting.device), 1, lengths)
    works = []
    for reference in ("start", "none"):
        cfg = size_run(config_of(preference__reference=reference), probe(), shape=LLAMA).cfg
        task = PLAN.memory(cfg, hardware=hardware)
        works.append(PLAN.workload(cfg, seen_of(task), lengths=lengths))
    assert works[0].tokens == works[1].tokens
    assert works[0].disk_bytes - works[1].disk_bytes == 2 * 8 * 10_000
    assert works[0].seconds > works[1].seconds > 0
    assert "of it for the reference" in works[0].time_basis


def test_the_plan_for_people_says_what_each_reference_costs(
    tmp_path: Path, sftplay: Callable[..., CompletedProcess[str]]
):
    path = tmp_path / "run.yaml"
    path.write_text(
        "task_mode: dpo\nmodel: {name: meta-llama/Llama-3.1-8B, max_seq_len: 512}\n"
        f"data: {{train_path: {tmp_path}/absent.jsonl, processed_dir: {tmp_path}/processed}}\n"
    )
    done = sftplay("plan", "--config", path, "--gpus", "1xH100")
    assert done.returncode == 0, done.stderr
    assert "reference   one forward pass over all rows before the first step, 8 bytes a row on disk" in done.stdout
    assert "a path       the pass, and about 14.96 GiB of memory until it ends" in done.stdout
    assert "prompts of 512 tokens with each answer" in done.stdout
    document = json.loads(sftplay("plan", "--config", path, "--gpus", "1xH100", "--json").stdout)
    assert document["phases"][PASS] > 0
    assert document["verdict"] == "fits"


@pytest.mark.parametrize(
    ("row", "steps"),
    [
        ({"prompt": "Why?", "chosen": "a", "rejected": "b"}, 2),  # each pair becomes two answers
        ({"prompt": "Why?", "completion": "a", "label": True}, 1),
    ],
)
def test_steps_of_kto_count_answers(row: dict[str, Any], steps: int, tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 32)
    cfg = config_of(
        task_mode="kto", data__train_path=str(rows), data__processed_dir=str(tmp_path), train__epochs=1,
        train__effective_batch_size=32,
    )  # fmt: skip
    sized = size_run(cfg, probe(), shape=LLAMA)
    assert sized.forecast is not None
    assert PLAN.workload(cfg, sized.forecast).steps == steps
    assert PLAN.unit(cfg) == "answers"


def test_what_is_known_of_the_rows_of_one_task_is_not_taken_for_those_of_another(tmp_path: Path, tiny_llama: Path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    pairs = pair_config(tmp_path, random_pairs(12, seed=1))
    load(pairs, tokenizer)
    assert known_lengths(pairs.with_values({"task_mode": "orpo"}, "test")) == known_lengths(pairs) is not None
    answers = pairs.with_values({"task_mode": "kto"}, "test")
    assert known_lengths(answers) is None
    load(answers, tokenizer)
    known = known_lengths(answers), known_lengths(pairs)
    assert [one and one.count for one in known] == [24, 12]
