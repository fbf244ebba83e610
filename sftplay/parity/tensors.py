"""Name the weights of a served model that are not the trained model's, and what they are instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from sftplay.export.merge_check import UNITS, is_rounded_once

NARROWER = (torch.bfloat16, torch.float16)

Load = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Tensors:
    """Weights by name, loaded one at a time."""

    run: Mapping[str, torch.Tensor]
    """The trained model's, adapter merged, fp32."""

    served: Mapping[str, Load]
    base: Mapping[str, Load]
    """The untrained model's; empty where it is not known."""

    error: float | None = None
    """Largest relative error of a served value, None for one rounding to its dtype. Of quantised weights, relative to
    the root mean square of the tensor."""


def find_altered_tensors(tensors: Tensors) -> list[str]:
    """Return one sentence that names the tensors of the served model that differ and says what they hold; or none."""
    missing = [name for name in tensors.run if name not in tensors.served]
    unknown = [name for name in tensors.served if name not in tensors.run]
    altered = [name for name in tensors.run if name in tensors.served and not _is_equal(tensors, name)]
    said = []
    if missing or unknown:
        counts = [f"{len(missing)} weights of the run are not in it, {missing[0]} for one"] if missing else []
        counts += [f"{len(unknown)} weights in it are not the run's, {unknown[0]} for one"] if unknown else []
        said.append("; ".join(counts))
    if altered:
        count = f"{len(altered)} of {len(tensors.run)} tensors differ from the trained model's, {altered[0]} first"
        said.append(f"{_explain(tensors, altered)} ({count})")
    return said


def _is_equal(tensors: Tensors, name: str) -> bool:
    wanted, found = tensors.run[name].detach().cpu().float(), tensors.served[name]()
    if wanted.shape != found.shape:
        return False
    if tensors.error is not None:
        distance = (found.float() - wanted).square().mean().sqrt()
        return bool(distance <= tensors.error * wanted.square().mean().sqrt() + 1e-12)
    return is_rounded_once(found, wanted)


def _explain(tensors: Tensors, altered: list[str]) -> str:
    """Say what the first altered tensor is, and whether all are of that kind."""
    heads = [name for name in altered if "lm_head" in name or "embed_out" in name]
    name = altered[0] if len(heads) != len(altered) else heads[0]
    wanted, found = tensors.run[name].detach().cpu().float(), tensors.served[name]().float()
    base = tensors.base[name]().float() if name in tensors.base else None
    what = _describe(name, wanted, found, base=base, others=tensors.run)
    if len(heads) == len(altered):
        return f"the head is not the trained one: {name} {what}"
    return f"{name} {what}"


def _describe(
    name: str, wanted: torch.Tensor, found: torch.Tensor, *, base: torch.Tensor | None,
    others: Mapping[str, torch.Tensor],
) -> str:  # fmt: skip
    """Say in words what `found` is."""
    if wanted.shape != found.shape:
        if found.dim() == 2 and found.T.shape == wanted.shape and torch.allclose(found.T, wanted, rtol=1e-2):
            return "is transposed"
        return f"has the shape {list(found.shape)}, the run's {list(wanted.shape)}"
    if not bool(found.isfinite().all()):
        return "holds values that are not finite"
    if not bool(found.any()):
        return "is all zeros"
    for dtype in NARROWER:
        is_near = bool(((found - wanted).abs() <= 2 * UNITS[dtype] * wanted.abs() + 1e-12).all())
        if is_near and torch.equal(found, found.to(dtype).float()):
            return f"was rounded to {_word(dtype)} and is stored as if it were exact"
    if base is not None and base.shape == found.shape:
        moved, left = (float((value - base).norm()) for value in (wanted, found))
        if left <= 0.05 * moved:
            return "is the base's, as it was before training"
    if wanted.dim() == 2 and (text := _describe_order(wanted, found)):
        return text
    same_shape = ((other, value) for other, value in others.items() if other != name and value.shape == found.shape)
    for other, value in same_shape:
        if torch.allclose(found, value.detach().cpu().float(), rtol=1e-2, atol=1e-6):
            return f"is the run's {other}: weights have changed places"
    if base is not None and base.shape == found.shape and (text := _describe_scale(wanted - base, found - base)):
        return text
    if wanted.dim() == 2 and found.shape == wanted.shape:
        rows = int(((found - wanted).abs().amax(1) > 1e-3 * wanted.abs().max()).sum())
        largest = float((found - wanted).abs().max())
        return f"differs by up to {largest:.2g} in {rows:,} of {len(wanted):,} rows"
    return f"differs by up to {float((found - wanted).abs().max()):.2g}"


def _describe_order(wanted: torch.Tensor, found: torch.Tensor) -> str:
    """Say that the rows are the trained ones in another order, such as the one for another rotary embedding."""
    if float((found - wanted).norm()) < 0.2 * float(wanted.norm()):
        return ""
    keys = [value.square().sum(1).sort().values for value in (wanted, found)]
    if not torch.allclose(*keys, rtol=2e-2):
        return ""
    return "holds the trained rows in another order (permuted for another rotary embedding, or not permuted)"


def _describe_scale(trained: torch.Tensor, found: torch.Tensor) -> str:
    """Say that the update of the training counts more or less than once."""
    norm = float(trained.square().sum())
    if norm == 0:
        return ""
    factor = float((trained * found).sum()) / norm
    rest = float((found - factor * trained).square().sum())
    if rest < 1e-3 * norm and abs(factor - 1) > 1e-3:
        return f"holds {factor:.3g} times the update of the training (alpha, rank or scale of the adapter)"
    return ""


def find_dtypes(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return dtype -> names of the floating-point tensors stored in it, from the headers of safetensors files."""
    words = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
    found: dict[str, list[str]] = {}
    for name, kind in headers:
        found.setdefault(words.get(kind, kind), []).append(name)
    return found


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
