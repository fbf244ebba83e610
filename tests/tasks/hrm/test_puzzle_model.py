"""The puzzle model against a reference written by hand: what it computes, where gradients go, how it begins."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sftplay.config.run import RunConfig
from sftplay.errors import DataError
from sftplay.tasks.hrm.network import Grid, PuzzleModel, State, load_published
from sftplay.tasks.hrm.section import HrmConfig
from sftplay.tasks.hrm.spec import SPEC

WIDTH, HEADS, CELLS, VOCAB, BATCH = 8, 2, 5, 4, 3
SMALL = {"hidden_size": WIDTH, "num_heads": HEADS, "h_layers": 1, "l_layers": 1}
GRID = Grid(vocab_size=VOCAB, cells=CELLS, identifiers=3)
INPUTS = torch.randint(0, VOCAB, (BATCH, CELLS), generator=torch.Generator().manual_seed(5))


def small(**changes: Any) -> PuzzleModel:
    torch.manual_seed(3)
    model = PuzzleModel(HrmConfig(**{**SMALL, **changes}), GRID).double()
    model.dtype = torch.float64
    with torch.no_grad():  # a head of zeros would hide what reaches it
        model.q_head.weight.normal_()
    return model


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()


def rotated(x: Tensor, position: int) -> Tensor:
    """Each pair (i, i + half) of a head's numbers, turned by position * 10000^(-2i / width)."""
    half = len(x) // 2
    turned = x.clone()
    for i in range(half):
        angle = position * 10000.0 ** (-2 * i / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        turned[i] = x[i] * cos - x[i + half] * sin
        turned[i + half] = x[i + half] * cos + x[i] * sin
    return turned


def block(weights: dict[str, Tensor], x: Tensor, *, turns: bool) -> Tensor:
    """One block on a single row [positions, WIDTH], head by head."""
    queries, keys, values = (x @ weights["attention.qkv.weight"].T).split(WIDTH, dim=-1)
    size, heads = WIDTH // HEADS, []
    for n in range(HEADS):
        part = slice(n * size, (n + 1) * size)
        q, k, v = (each[:, part] for each in (queries, keys, values))
        if turns:
            q, k = (torch.stack([rotated(row, at) for at, row in enumerate(each)]) for each in (q, k))
        heads.append(((q @ k.T) / math.sqrt(size)).softmax(dim=-1) @ v)
    x = norm(x + torch.cat(heads, dim=-1) @ weights["attention.out.weight"].T)
    gate, up = (x @ weights["feed_forward.gate_up.weight"].T).chunk(2, dim=-1)
    return norm(x + (functional.silu(gate) * up) @ weights["feed_forward.down.weight"].T)


def module_of(model: PuzzleModel, name: str) -> dict[str, Tensor]:
    start = f"{name}.blocks.0."
    return {k.removeprefix(start): v for k, v in model.named_parameters() if k.startswith(start)}


def by_hand(model: PuzzleModel, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and Q values of one puzzle after the first segment of 2 x 2 cycles, gradients as the paper has them."""
    low_weights, high_weights = module_of(model, "low"), module_of(model, "own_high")
    turns = model.hrm.positions == "rope"
    embedded = torch.cat((rows.view(1, WIDTH), model.tokens[inputs]))
    if not turns:
        assert model.places is not None
        embedded = (embedded + model.places) / math.sqrt(2)
    embedded = embedded * math.sqrt(WIDTH)
    high, low = (each.expand(1 + CELLS, WIDTH) for each in (model.start_high, model.start_low))
    with torch.no_grad():
        for call in range(3):
            low = block(low_weights, low + high + embedded, turns=turns)
            if call == 1:
                high = block(high_weights, high + low, turns=turns)
    low = block(low_weights, low + high + embedded, turns=turns)
    high = block(high_weights, high + low, turns=turns)
    return high[1:] @ model.head.weight.T, high[0] @ model.q_head.weight.T + model.q_head.bias


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_answers_and_one_step_gradients_are_those_of_two_blocks_written_by_hand(positions: str):
    model = small(positions=positions)
    rows = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    mixed = torch.randn(BATCH, CELLS * VOCAB + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    given = rows.clone().requires_grad_()
    _, answer = model(model.start(BATCH), INPUTS, puzzle_rows=given)
    flat = torch.cat((answer.logits.flatten(1), torch.stack((answer.q_halt, answer.q_continue), dim=1).double()), dim=1)
    (flat * mixed).sum().backward()
    mine = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    its_rows = rows.clone().requires_grad_()
    outs = [by_hand(model, INPUTS[n], its_rows[n]) for n in range(BATCH)]
    expected = torch.stack([torch.cat((logits.flatten(), q)) for logits, q in outs])
    assert torch.allclose(flat, expected, atol=1e-6)  # the model's cosines are fp32
    (expected * mixed).sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert torch.allclose(mine[name], weight.grad, atol=1e-6, rtol=1e-5), name
    assert given.grad is not None
    assert torch.allclose(given.grad, its_rows.grad, atol=1e-6, rtol=1e-5)


def test_a_segment_begins_from_a_state_without_gradients_and_leaves_one():
    model = small()
    state = State(*(each.clone().requires_grad_() for each in model.start(BATCH)))
    after, answer = model(state, INPUTS, puzzle_rows=torch.zeros(BATCH, WIDTH, dtype=torch.float64))
    answer.logits.sum().backward()
    assert state.high.grad is None
    assert state.low.grad is None
    assert not after.high.requires_grad
    assert not after.low.requires_grad


@pytest.mark.parametrize(
    ("positions", "changes"),
    [("rope", {"h_layers": 3}), ("learned", {"arch": "single", "puzzle_emb_dim": 9}), ("rope", {"puzzle_emb_dim": 0})],
)
def test_the_judgement_alone_is_that_of_the_whole_answer(positions: str, changes: dict[str, Any]):
    model = small(positions=positions, **changes)
    width = 0 if model.puzzles is None else model.puzzles.rows.shape[1]
    given = {"puzzle_rows": torch.randn(BATCH, width, dtype=torch.float64)}
    with torch.no_grad():
        _, whole = model(model.start(BATCH), INPUTS, **given)
        after, judged = model(model.start(BATCH), INPUTS, judges_alone=True, **given)
    assert torch.allclose(judged.q_halt, whole.q_halt, atol=1e-12)
    assert torch.allclose(judged.q_continue, whole.q_continue, atol=1e-12)
    assert judged.logits.shape == (BATCH, 0, VOCAB)
    assert after.high.shape == (BATCH, 1, WIDTH)


def trm_by_hand(model: PuzzleModel, inputs: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and Q values of one puzzle by TRM's layout (models/recursive_reasoning/trm.py, `puzzle_emb_len`).

    The puzzle's embedding is filled up with zeros to so many positions, the cells come behind them, and all are rotated
    by their place. Q is read from the first position.
    """
    before = model.hrm.puzzle_emb_len or 1
    prefix = functional.pad(rows, (0, before * WIDTH - len(rows))).view(before, WIDTH)
    embedded = torch.cat((prefix, model.tokens[inputs])) * math.sqrt(WIDTH)
    high, low = (each.expand(before + CELLS, WIDTH) for each in (model.start_high, model.start_low))
    weights = module_of(model, "low")
    for cycle in range(model.hrm.h_cycles):
        with torch.set_grad_enabled(cycle == model.hrm.h_cycles - 1):
            for _ in range(model.hrm.l_cycles):
                low = block(weights, low + high + embedded, turns=True)
            high = block(weights, high + low, turns=True)
    return high[before:] @ model.head.weight.T, high[0] @ model.q_head.weight.T + model.q_head.bias


@pytest.mark.parametrize("length", [None, 16])
def test_the_prefix_has_the_positions_of_the_published_model_that_it_is_given(length: int | None):
    model = small(arch="single", grad="full_last_cycle", h_cycles=3, l_cycles=2, puzzle_emb_len=length)
    rows = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    state, answer = model(model.start(BATCH), INPUTS, puzzle_rows=rows)
    assert state.high.shape == (BATCH, (length or 1) + CELLS, WIDTH)
    weights = list(model.low.parameters())
    mine = torch.autograd.grad(answer.logits.square().sum(), weights, retain_graph=True)
    found = [trm_by_hand(model, INPUTS[n], rows[n]) for n in range(BATCH)]
    for n, (logits, q) in enumerate(found):
        assert torch.allclose(answer.logits[n], logits, atol=1e-6)  # the model's cosines are fp32
        assert torch.allclose(torch.stack((answer.q_halt[n], answer.q_continue[n])).double(), q, atol=1e-6)
    its = torch.autograd.grad(sum(logits.square().sum() for logits, _ in found), weights)
    for one, other in zip(mine, its, strict=True):  # of the whole last cycle
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dim", "fix"), [(600, "write hrm.puzzle_emb_len: 2, or more"), (0, "remove hrm.puzzle_emb_len")]
)
def test_a_prefix_that_cannot_hold_the_embedding_is_refused(dim: int, fix: str):
    hrm = {"puzzle_emb_len": 1, "puzzle_emb_dim": dim}
    text = {"task_mode": "hrm", "model": {"name": "builtin:hrm"}, "tuning": {"mode": "full"}, "hrm": hrm}
    (violation,) = SPEC.broken_rules(RunConfig.model_validate(text))
    assert (violation.keys[0], violation.fix) == ("hrm.puzzle_emb_len", fix)


def test_a_segment_has_the_same_gradients_however_its_threads_take_turns(request: pytest.FixtureRequest):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(2)
    grid, found = Grid(vocab_size=11, cells=81, identifiers=3), set[bytes]()
    model = PuzzleModel(HrmConfig(**{**SMALL, "hidden_size": 64}), grid)
    inputs = torch.randint(0, 11, (64, 81), generator=torch.Generator().manual_seed(5))
    for _ in range(12):
        model.zero_grad()
        model(model.start(len(inputs)), inputs, puzzle_rows=torch.zeros(64, 64))[1].logits.square().sum().backward()
        weights = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.add(torch.cat([each.flatten() for each in weights]).numpy().tobytes())
    assert len(found) == 1


def test_what_is_drawn_at_the_start_has_the_standard_deviations_of_the_paper_within_two_percent():
    torch.manual_seed(0)
    hrm = HrmConfig(hidden_size=256, num_heads=4, h_layers=1, l_layers=1, positions="learned")
    model = PuzzleModel(hrm, Grid(vocab_size=120, cells=100, identifiers=2))
    wanted = {"tokens": 1 / 16, "places": 1 / 16, "head.weight": 1 / 16}
    for name, weight in model.named_parameters():
        if name.startswith("q_head"):
            continue
        target = wanted.get(name, weight.shape[-1] ** -0.5)
        assert float(weight.detach().std()) == pytest.approx(target, rel=0.02), name
        assert float(weight.detach().abs().max()) <= 2 / 0.8796256 * target * 1.0001, name
    assert not model.q_head.weight.any()
    assert model.q_head.bias.tolist() == [-5, -5]
    assert model.puzzles is not None
    assert not model.puzzles.rows.any()


def test_the_published_model_has_27_million_weights_and_the_small_one_108_thousand():
    with torch.device("meta"):
        published = PuzzleModel(HrmConfig(), Grid(vocab_size=11, cells=81, identifiers=1))
    # 8 blocks of 4 x 512^2 (attention) + 3 x 512 x 1536 (SwiGLU), embedding and head of 11 x 512, 2 x 512 + 2 for Q
    expected = 8 * (4 * 512**2 + 3 * 512 * 1536) + 2 * 11 * 512 + 2 * 512 + 2
    assert sum(weight.numel() for weight in published.parameters()) == expected == 27_275_266
    tiny = HrmConfig(hidden_size=64, num_heads=4, h_layers=1, l_layers=1, positions="learned")
    model = PuzzleModel(tiny, Grid(vocab_size=6, cells=16, identifiers=1))
    # 2 blocks of 4 x 64^2 + 3 x 64 x 192, 6 + 17 + 6 rows of 64, 2 x 64 + 2
    assert sum(weight.numel() for weight in model.parameters()) == 2 * (4 * 64**2 + 3 * 64 * 192) + 29 * 64 + 130


def published_names(*, layers: int, modules: tuple[str, ...], learns_positions: bool) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each weight in a checkpoint of HRM's code at commit 42410da (pretrain.py saves the loss head's
    state_dict, compiled unless DISABLE_COMPILE is set), for the sizes of this file."""
    inner = 32  # two thirds of 4 * WIDTH, rounded up
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.embedding_weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH), "q_head.weight": (2, WIDTH),
        "q_head.bias": (2,), "puzzle_emb.weights": (3, WIDTH), "H_init": (WIDTH,), "L_init": (WIDTH,),
    }  # fmt: skip
    if learns_positions:
        shapes["embed_pos.embedding_weight"] = (1 + CELLS, WIDTH)
    for module in modules:
        for n in range(layers):
            shapes |= {
                f"{module}.layers.{n}.self_attn.qkv_proj.weight": (3 * WIDTH, WIDTH),
                f"{module}.layers.{n}.self_attn.o_proj.weight": (WIDTH, WIDTH),
                f"{module}.layers.{n}.mlp.gate_up_proj.weight": (2 * inner, WIDTH),
                f"{module}.layers.{n}.mlp.down_proj.weight": (WIDTH, inner),
            }
    return {f"_orig_mod.model.inner.{name}": shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("modules", "changes"),
    [
        (("H_level", "L_level"), {}),
        (("H_level", "L_level"), {"positions": "learned"}),
        (("L_level",), {"arch": "single"}),
    ],
    ids=["HRM", "learned positions", "TRM"],
)
def test_a_published_checkpoint_gives_every_weight_its_place(modules, changes, tmp_path: Path):
    names = published_names(layers=1, modules=modules, learns_positions="positions" in changes)
    saved = {name: torch.randn(shape) for name, shape in names.items()}
    torch.save(saved, tmp_path / "step_5")
    model = PuzzleModel(HrmConfig(**{**SMALL, **changes}), GRID)
    load_published(model, tmp_path / "step_5")
    of = {name.removeprefix("_orig_mod.model.inner."): weight for name, weight in saved.items()}
    block = "L_level.layers.0."
    assert torch.equal(model.low.blocks[0].attention.qkv.weight, of[f"{block}self_attn.qkv_proj.weight"])
    assert torch.equal(model.low.blocks[0].attention.out.weight, of[f"{block}self_attn.o_proj.weight"])
    assert torch.equal(model.low.blocks[0].feed_forward.gate_up.weight, of[f"{block}mlp.gate_up_proj.weight"])
    assert torch.equal(model.low.blocks[0].feed_forward.down.weight, of[f"{block}mlp.down_proj.weight"])
    assert torch.equal(
        model.high.blocks[0].attention.qkv.weight, of[f"{modules[0]}.layers.0.self_attn.qkv_proj.weight"]
    )
    assert torch.equal(model.tokens, of["embed_tokens.embedding_weight"])
    assert torch.equal(model.puzzles.rows, of["puzzle_emb.weights"])
    assert torch.equal(model.start_high, of["H_init"])
    assert torch.equal(model.start_low, of["L_init"])
    assert torch.equal(model.head.weight, of["lm_head.weight"])
    assert len(saved) == len(model.state_dict())


def test_a_checkpoint_of_other_sizes_is_refused_by_name(tmp_path: Path):
    names = published_names(layers=2, modules=("H_level", "L_level"), learns_positions=False)
    torch.save({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "step_5")
    with pytest.raises(DataError, match="does not fit the model of this config: Unexpected key") as refused:
        load_published(PuzzleModel(HrmConfig(**SMALL), GRID), tmp_path / "step_5")
    assert "blocks.1" in refused.value.what
    assert "all_config.yaml" in refused.value.fix
    (tmp_path / "step_6").write_text("no weights")
    with pytest.raises(DataError, match="holds no weights"):
        load_published(PuzzleModel(HrmConfig(**SMALL), GRID), tmp_path / "step_6")
