"""Find what is wrong with a GGUF file: template, tokens, pre-tokenizer, hyperparameters, weights.

It knows llama.cpp's names and order of rows by itself, so that a fault of what writes such files is seen too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch

from sftplay.errors import ConfigError, RunError
from sftplay.export.gguf.vocabulary import describe_vocabulary
from sftplay.parity import causes
from sftplay.parity.causes import Tensors, find_altered_tensors
from sftplay.parity.compare import BOUNDS, LOOSEST, Reference
from sftplay.parity.engine import Question
from sftplay.parity.gguf_check import check_tokens

ERRORS = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "q8_0": 0.03, "q6_k": 0.06, "q5_k": 0.1, "q5_0": 0.12, "q5_1": 0.12}
"""Largest root mean square of a tensor's error, relative to that of its values, by how it is stored."""

WIDEST = 0.25
"""For kinds that keep four bits and fewer."""

TORCH_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def explain_gguf(file: Path, reference: Reference, questions: Sequence[Question]) -> list[str]:
    """Return what differs from the run, the likeliest cause first."""
    try:
        reader = gguf.GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError) as error:
        return [f"the file cannot be read ({error})"]
    said = causes.explain_template(reference.tokenizer.chat_template, _read(reader, "tokenizer.chat_template"))
    said += _explain_tokens(reader, reference)
    said += _explain_splits(file, reader, reference, questions)
    model = reference.merged()
    said += _explain_settings(reader, model.config)
    return said + _explain_tensors(reader, model)


def read_precision(file: Path) -> str | None:
    """Return in what most values of the matrices are stored, as `compare.BOUNDS` names it."""
    try:
        tensors = gguf.GGUFReader(file).tensors
    except (OSError, ValueError, KeyError, IndexError):
        return None
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            counts[tensor.tensor_type.name.lower()] += int(tensor.n_elements)
    kinds = [TORCH_NAMES.get(kind, kind) for kind, count in counts.items() if count > 0.05 * counts.total()]
    return max(kinds, key=lambda kind: BOUNDS.get(kind, LOOSEST), default=None)


def _read(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _explain_tokens(reader: Any, reference: Reference) -> list[str]:
    """Compare the tokens of the file with the tokenizer's, and where answers end."""
    tokenizer, tokens = reference.tokenizer, _read(reader, "tokenizer.ggml.tokens") or []
    said = []
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    if len(tokens) < len(tokenizer):
        said.append(f"the file has {len(tokens):,} tokens, the run's tokenizer {len(tokenizer):,}")
    # Only byte-level tokenizers write tokens as transformers does.
    is_plain = _read(reader, "tokenizer.ggml.model") == "gpt2"
    for number, (wanted, found) in enumerate(zip(names, tokens) if is_plain else ()):
        if wanted is not None and wanted != found and number not in special:
            said.append(f"token {number} is {found!r}, the run's {wanted!r}")
            break
    ends = [_read(reader, f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if missing := [token for token in reference.end_ids if token not in ends]:
        known = [token for token in ends if token is not None]
        said.append(f"the file ends answers at {known}, training at {missing[0]} ({tokenizer.decode([missing[0]])!r})")
    return said


def _explain_splits(file: Path, reader: Any, reference: Reference, questions: Sequence[Question]) -> list[str]:
    """Say the first text of the run, or of many scripts, that llama.cpp reads as other tokens."""
    try:
        rows = reference.model.get_input_embeddings().num_embeddings
        approximates = describe_vocabulary(reference.tokenizer, rows=rows, end_ids=reference.end_ids).approximates
        check_tokens(file, reference.tokenizer, [question.text for question in questions], approximates=approximates)
    except (RunError, ConfigError) as error:
        pre, model = (_read(reader, f"tokenizer.ggml.{key}") for key in ("pre", "model"))
        return [f"the pre-tokenizer {pre!r} (tokenizer {model!r}) splits texts otherwise: {error.what}"]
    return []


def _explain_settings(reader: Any, config: Any) -> list[str]:
    """Compare the numbers that llama.cpp computes with."""
    arch, text = _read(reader, "general.architecture"), config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    heads = getattr(text, "num_attention_heads", None)
    expected = {
        "block_count": getattr(text, "num_hidden_layers", None), "embedding_length": getattr(text, "hidden_size", None),
        "attention.head_count": heads, "attention.head_count_kv": getattr(text, "num_key_value_heads", heads),
        "feed_forward_length": getattr(text, "intermediate_size", None),
        "attention.layer_norm_rms_epsilon": getattr(text, "rms_norm_eps", None),
        "rope.freq_base": rope.get("full_attention", rope).get("rope_theta"),
    }  # fmt: skip
    said = []
    for key, wanted in expected.items():
        found = _read(reader, f"{arch}.{key}")
        if wanted is not None and found is not None and abs(found - wanted) > 1e-6 * abs(wanted):
            said.append(f"{arch}.{key} is {found:g}, the run's {wanted:g}")
    return said


def _explain_tensors(reader: Any, model: Any) -> list[str]:
    """Compare each tensor of the file with the trained one."""
    text = model.config.get_text_config()
    arch_name = _read(reader, "general.architecture")
    arch = next((arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == arch_name), None)
    if arch is None:
        return [f"the architecture {arch_name!r} of the file is unknown"]
    names = gguf.get_tensor_name_map(arch, text.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    trained, unpermuted = dict[str, torch.Tensor](), list[str]()
    for name, value in model.named_parameters(remove_duplicate=False):
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target is None or target not in stored:
            continue  # a head that is the embedding, or experts, which the file keeps in other pieces
        wanted = value.detach().cpu().float()
        found = _load(stored[target])()
        if ".attn_q." in target or ".attn_k." in target:
            turned = permute(wanted, head_dim)
            right, wrong = (turned, wanted) if arch_name == "llama" else (wanted, turned)
            if not _is_near(found, right) and _is_near(found, wrong):
                unpermuted.append(target)
                continue
            wanted = right
        elif "norm" in target and _is_near(found, wanted + 1.0):
            wanted = wanted + 1.0  # llama.cpp multiplies by what Gemma adds to 1
        trained[target] = wanted
    said = []
    if unpermuted:
        is_missing = "q and k are not permuted" if arch_name == "llama" else "q and k are permuted, and must not be"
        said.append(f"{is_missing} for llama.cpp's rotary embedding ({len(unpermuted)} tensors, {unpermuted[0]} first)")
    for kind in sorted({stored[name].tensor_type.name.lower() for name in trained}):
        part = [name for name in trained if stored[name].tensor_type.name.lower() == kind]
        error = ERRORS.get(kind, WIDEST)
        tensors = Tensors({n: trained[n] for n in part}, {n: _load(stored[n]) for n in part}, {}, error)
        said += find_altered_tensors(tensors)
    if len(trained) + len(unpermuted) < 2:
        said.append("the file holds none of the trained tensors by the names that llama.cpp knows")
    return said


def permute(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the rows of q or k in llama.cpp's order: neighbours are a pair of the rotation, not halves of a head."""
    shape = (len(weight) // head_dim, 2, head_dim // 2, *weight.shape[1:])
    return weight.reshape(shape).transpose(1, 2).reshape(weight.shape)


def _load(tensor: Any) -> Callable[[], torch.Tensor]:
    shape = [int(size) for size in reversed(tensor.shape)]
    return lambda: (
        torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float().reshape(shape)
    )


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).norm() <= 0.2 * b.norm())
