"""The reference's log-probabilities: what is computed, when, by whom, and where it is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from peft import LoraConfig, get_peft_model
from reference_runs import config_of, pairs_of, plain_sums, run_folder, small_model, state_at, trainer_of
from safetensors.torch import load_file

from sftplay.errors import MachineError, RunError
from sftplay.tasks.preference import reference
from sftplay.tasks.preference.reference import FILE, ComputeReferences, compute_logps


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A folder with the weights of `small_model()`."""
    small_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def cached_file(home: Path) -> Path:
    """The only file of the cache."""
    (found,) = (home / "processed" / "references").glob("*.safetensors")
    return found


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each batch that was computed."""
    seen, honest = list[int](), reference.completion_logps

    def counted(model: Any, batch: Any, **named: Any) -> Any:
        seen.append(len(batch["row"]))
        return honest(model, batch, **named)

    monkeypatch.setattr(reference, "completion_logps", counted)
    return seen


def begin(cfg: Any, pairs: Any, folder: Any, model: Any, *, step: int = 0) -> Any:
    """The trainer after the callback's turn."""
    trainer, callback = trainer_of(model), ComputeReferences(cfg, pairs, folder=folder)
    callback.attach(trainer)
    callback.on_train_begin(None, state_at(step), None)
    return trainer


def adapted(model: Any, *, trained: bool = False) -> Any:
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    for name, weight in model.named_parameters() if trained else ():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    return model


def table(trainer: Any, side: str, n: int) -> torch.Tensor:
    return trainer.references.look_up(side, torch.arange(n))


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_row_has_the_log_probabilities_that_plain_transformers_gives_it(shares: bool, batch_size: int):
    model, rows = small_model(), pairs_of().train
    found = compute_logps(model, rows, pad_token_id=0, shares=shares, batch_size=batch_size)
    assert torch.allclose(found.sums.double(), plain_sums(model, rows), rtol=1e-6, atol=1e-5)
    assert found.tokens.sum() == sum(label != -100 for row in rows for label in row["labels"])


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_rows_in_equally_many_batches_and_all_get_the_same_numbers_as_one(
    world: int, tmp_path: Path, forwards: list[int]
):
    model, rows = small_model(), pairs_of().train
    alone = compute_logps(model, rows, pad_token_id=0, shares=True, batch_size=2)
    forwards.clear()

    def work() -> Any:
        ranks = (torch.distributed.get_rank(), world)
        return compute_logps(model, rows, pad_token_id=0, shares=True, batch_size=2, ranks=ranks), list(forwards)

    results = on_ranks(world, work, tmp_path / "ranks")
    for found, batches in results:
        assert torch.allclose(found.sums, alone.sums, rtol=1e-6, atol=0)
        assert torch.equal(found.tokens, alone.tokens)
        assert batches == results[0][1], "a rank of a model in shards would wait for one with fewer batches"
    assert sum(results[0][1]) == -(-len(rows) // world)


def test_a_batch_that_is_too_large_for_the_memory_is_cut(monkeypatch: pytest.MonkeyPatch):
    model, rows, honest, sizes = small_model(), pairs_of().train, reference.completion_logps, list[int]()

    def narrow(model: Any, batch: Any, **named: Any) -> Any:
        sizes.append(len(batch["row"]))
        if len(batch["row"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return honest(model, batch, **named)

    whole = compute_logps(model, rows, pad_token_id=0, shares=True, batch_size=8)
    monkeypatch.setattr(reference, "completion_logps", narrow)
    found = compute_logps(model, rows, pad_token_id=0, shares=True, batch_size=8)
    assert sizes[:3] == [8, 4, 2]
    assert torch.allclose(found.sums, whole.sums, rtol=1e-6)
    with pytest.raises(Exception, match="out of memory in the log-probabilities: 8 rows at a time"):
        compute_logps(model, rows, pad_token_id=0, shares=True, batch_size=8, computes_together=True)


def test_rows_are_looked_up_by_their_number_on_the_side_they_are_on(tmp_path: Path, stored: Path):
    model, pairs, cfg = small_model(), pairs_of(), config_of(tmp_path, stored, tuning__mode="full")
    trainer = begin(cfg, pairs, run_folder(tmp_path), model)
    for side, rows in (("train", pairs.train), ("held_out", pairs.held_out)):
        index = torch.tensor([3, 0, 3])
        wanted = plain_sums(model, [rows[number] for number in index.tolist()])
        found = trainer.references.look_up(side, index)
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-5)


def test_a_loss_without_a_reference_gets_zeros_and_no_pass(tmp_path: Path, stored: Path, forwards: list[int]):
    for values in ({"preference__reference": "none"}, {"task_mode": "simpo"}, {"task_mode": "orpo"}):
        cfg, folder = config_of(tmp_path, stored, **values), run_folder(tmp_path)
        trainer = begin(cfg, pairs_of(), folder, small_model())
        assert torch.equal(table(trainer, "train", 13), torch.zeros(13, 2))
        assert not (folder.path / FILE).exists()
    assert not forwards


def test_a_second_run_on_the_same_rows_and_weights_computes_nothing(
    tmp_path: Path, stored: Path, forwards: list[int], capsys: pytest.CaptureFixture[str]
):
    pairs, cfg = pairs_of(), config_of(tmp_path, stored, tuning__mode="full")
    first = begin(cfg, pairs, run_folder(tmp_path, "one"), small_model())
    assert sum(forwards) == 18
    forwards.clear()
    said = capsys.readouterr().out
    assert "computing the log-probabilities of 18 rows under the model that the run starts from" in said
    folder = run_folder(tmp_path, "two")
    second = begin(cfg, pairs, folder, small_model())
    assert not forwards
    cached = cached_file(tmp_path)
    assert f"log-probabilities of 18 rows come from {cached}" in capsys.readouterr().out
    assert torch.equal(table(first, "train", 13), table(second, "train", 13))
    assert read(folder.path / FILE) == read(cached)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": "others"}, {"weights": 1}, {"train__precision": "bf16"}, {"n_train": 12},
        {"tuning__mode": "qlora"},
    ],
)  # fmt: skip
def test_what_changes_the_numbers_has_a_file_of_its_own(other: dict[str, Any], tmp_path: Path, stored: Path):
    cfg, folder = config_of(tmp_path, stored, tuning__mode="lora"), run_folder(tmp_path)
    kind = reference.ReferenceKind.find(cfg)
    key = reference.compute_key(cfg, pairs_of(), kind=kind, folder=folder)
    assert key == reference.compute_key(cfg, pairs_of(), kind=kind, folder=folder)
    if seed := other.pop("weights", None):
        small_model(seed).save_pretrained(stored)
    pairs = pairs_of(**{name: other.pop(name) for name in list(other) if "__" not in name})
    changed = cfg.with_values({name.replace("__", "."): value for name, value in other.items()}, "test")
    assert key != reference.compute_key(changed, pairs, kind=kind, folder=folder)


def test_the_model_may_move_and_keeps_its_file(tmp_path: Path, stored: Path):
    cfg, folder = config_of(tmp_path, stored), run_folder(tmp_path)
    kind = reference.ReferenceKind.find(cfg)
    key = reference.compute_key(cfg, pairs_of(), kind=kind, folder=folder)
    moved = stored.rename(tmp_path / "elsewhere")
    assert key == reference.compute_key(config_of(tmp_path, moved), pairs_of(), kind=kind, folder=folder)


def test_a_new_adapter_starts_as_its_base_and_shares_its_file(tmp_path: Path, stored: Path, forwards: list[int]):
    model, pairs = adapted(small_model()), pairs_of()
    cfg = config_of(tmp_path, stored, tuning__mode="lora")
    start = begin(cfg, pairs, run_folder(tmp_path, "one"), model)
    forwards.clear()
    off = begin(
        cfg.with_values({"preference.reference": "adapter_off"}, "test"), pairs, run_folder(tmp_path, "two"), model
    )
    assert not forwards
    assert torch.equal(table(start, "train", 13), table(off, "train", 13))
    assert torch.allclose(
        table(off, "train", 13).double(), plain_sums(small_model(), pairs.train), rtol=1e-6, atol=1e-5
    )


def test_a_run_that_continues_an_adapter_starts_with_it_or_measures_to_the_base(tmp_path: Path, stored: Path):
    model, pairs = adapted(small_model(), trained=True), pairs_of()
    model.save_pretrained(tmp_path / "adapter")
    cfg = config_of(tmp_path, stored, model__adapter=str(tmp_path / "adapter"))
    start = begin(cfg, pairs, run_folder(tmp_path, "one"), model)
    off = begin(
        cfg.with_values({"preference.reference": "adapter_off"}, "test"), pairs, run_folder(tmp_path, "two"), model
    )
    merged = plain_sums(model.merge_and_unload(), pairs.train)
    assert torch.allclose(table(start, "train", 13).double(), merged, rtol=1e-5, atol=1e-4)
    assert torch.allclose(
        table(off, "train", 13).double(), plain_sums(small_model(), pairs.train), rtol=1e-6, atol=1e-5
    )
    assert (merged - table(off, "train", 13)).abs().max() > 0.1


def test_another_model_is_opened_for_the_pass_alone(tmp_path: Path, tiny_llama: Path):
    from transformers import AutoModelForCausalLM

    pairs = pairs_of()
    cfg = config_of(tmp_path, tiny_llama, preference__reference=str(tiny_llama), model__attn="sdpa")
    trainer = begin(cfg, pairs, run_folder(tmp_path), small_model())
    other = AutoModelForCausalLM.from_pretrained(tiny_llama)
    assert torch.allclose(table(trainer, "train", 13).double(), plain_sums(other, pairs.train), rtol=1e-6, atol=1e-5)


def read(path: Path) -> dict[str, Any]:
    return {side: tensor.tolist() for side, tensor in load_file(path).items()}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def swap(path: Path) -> None:
    """A sound file of other rows under the name of this one's."""
    tables = {"train": torch.zeros(13, 2), "held_out": torch.zeros(5, 2)}
    reference.write_tables(path, tables, facts={"key": "other", "rows": "other"})


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(damage, "is damaged"), (cut, "cannot be read"), (swap, "belongs to other rows or another model")],
)
def test_a_file_that_is_damaged_or_foreign_is_computed_again_and_that_is_said(
    spoil: Any, said: str, tmp_path: Path, stored: Path, forwards: list[int], capsys: pytest.CaptureFixture[str]
):
    pairs, cfg = pairs_of(), config_of(tmp_path, stored, tuning__mode="full")
    first = begin(cfg, pairs, run_folder(tmp_path, "one"), small_model())
    cached = cached_file(tmp_path)
    sound = read(cached)
    spoil(cached)
    forwards.clear()
    second = begin(cfg, pairs, run_folder(tmp_path, "two"), small_model())
    assert sum(forwards) == 18
    assert f"note: {cached} is not used, as it {said}" in capsys.readouterr().out
    assert torch.equal(table(first, "train", 13), table(second, "train", 13))
    assert read(cached) == sound


def test_a_resume_reads_what_the_run_keeps_and_never_computes_with_trained_weights(
    tmp_path: Path, stored: Path, forwards: list[int]
):
    pairs, cfg, folder = pairs_of(), config_of(tmp_path, stored, tuning__mode="full"), run_folder(tmp_path)
    first = begin(cfg, pairs, folder, small_model())
    cached_file(tmp_path).unlink()
    forwards.clear()
    trained = small_model(seed=7)
    resumed = begin(cfg, pairs, folder, trained, step=3)
    assert not forwards
    assert torch.equal(table(first, "train", 13), table(resumed, "train", 13))
    (folder.path / FILE).unlink()
    with pytest.raises(RunError, match="its weights have been trained for 3 steps") as caught:
        begin(cfg, pairs, folder, trained, step=3)
    assert caught.value.fix == f"put {FILE} back into the run folder, or start a new run"
    assert not forwards


def test_an_adapter_that_is_resumed_without_its_file_has_its_base_still(tmp_path: Path, stored: Path):
    pairs, cfg, folder = pairs_of(), config_of(tmp_path, stored), run_folder(tmp_path)
    first = begin(cfg, pairs, folder, adapted(small_model()))
    (folder.path / FILE).unlink()
    cached_file(tmp_path).unlink()
    resumed = begin(cfg, pairs, folder, adapted(small_model(), trained=True), step=3)
    assert torch.equal(table(first, "train", 13), table(resumed, "train", 13))


def test_a_cache_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, stored: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "processed").write_text("a file, not a folder")
    cfg, folder = config_of(tmp_path, stored, tuning__mode="full"), run_folder(tmp_path)
    begin(cfg, pairs_of(), folder, small_model())
    assert "note: later runs compute this again" in capsys.readouterr().out
    assert (folder.path / FILE).is_file()


def test_a_log_probability_that_is_not_finite_ends_the_run_with_its_row(tmp_path: Path, stored: Path):
    broken, pairs = small_model(), pairs_of()
    with torch.no_grad():
        broken.lm_head.weight[:] = float("nan")
    with pytest.raises(RunError, match=r"13 rows have a log-probability that is not finite: 100, 101"):
        begin(config_of(tmp_path, stored, tuning__mode="full"), pairs, run_folder(tmp_path), broken)


def test_the_pass_leaves_mode_and_random_numbers_as_they_were(tmp_path: Path, stored: Path):
    model, cfg = small_model().train(), config_of(tmp_path, stored, tuning__mode="full")
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    begin(cfg, pairs_of(), run_folder(tmp_path), model)
    assert torch.equal(torch.rand(3), wanted)
    assert model.training


def test_the_file_says_what_it_belongs_to(tmp_path: Path, stored: Path):
    cfg, folder = config_of(tmp_path, stored, tuning__mode="full"), run_folder(tmp_path)
    begin(cfg, pairs_of(), folder, small_model())
    header = (folder.path / FILE).read_bytes()
    size = int.from_bytes(header[:8], "little")
    facts = json.loads(header[8 : 8 + size])["__metadata__"]
    assert facts["rows"] == "rows"
    assert facts["key"] in cached_file(tmp_path).name


def test_a_reference_that_cannot_be_opened_is_reported_at_its_own_key():
    where = "run.yaml:3 preference.reference"
    with pytest.raises(MachineError) as caught, reference.named_as_reference(where):
        raise MachineError("no such model", where="model.name other", fix="point model.name to the folder")
    assert (caught.value.where, caught.value.fix) == (where, "point preference.reference to the folder")
