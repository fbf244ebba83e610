"""Find what is wrong with a served folder, from its files: template, tokenizer, config, weights, adapter and ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from sftplay.atomic import examine_object, read_object
from sftplay.config.run import RunConfig
from sftplay.data.render.templates import template_hash
from sftplay.export.adapter_names import WEIGHTS
from sftplay.export.merge import RECORD
from sftplay.export.merge_check import UNITS, is_rounded_once
from sftplay.launch.checkpoints import is_marked, list_checkpoints
from sftplay.launch.run_folder import RunFolder
from sftplay.model.hub import first_line
from sftplay.model.source import ADAPTER_CONFIG
from sftplay.parity.compare import first_difference
from sftplay.parity.engine import Question
from sftplay.parity.questions import encode

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
            return f"was rounded to {str(dtype).removeprefix('torch.')} and is stored as if it were exact"
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


PROBES = (
    "Hello, world!", "  two spaces,\ttab\n\nnewlines  ", "1234567890 3.14 10,000 0x1F", "don't I'll they've WE'RE",
    "naïve café Straße Ünï", "Привет, мир! Ёлка", "你好，世界。今天3月5日", "こんにちは カタカナ 漢字",
    "안녕하세요 세계", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "Γειά σου Κόσμε",
    "🙂👍🏽👩\u200d👩\u200d👧 emoji", "e\u0301 \u00a0 \u200b \ufeff", "def f(x):\n    return x**2  # comment",
    "<b>tag</b> & \"quotes\" 'single'", "a_b-c/d\\e|f@g#h$i%j^k*l", "\r\nDOS\r\n",
)  # fmt: skip
"""Texts on which two tokenizers that are not the same differ somewhere."""

HARMLESS = {
    "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache", "tie_word_embeddings",
    "_attn_implementation_internal", "output_hidden_states", "output_attentions", "return_dict", "pad_token_id",
    "eos_token_id", "bos_token_id", "architectures", "id2label", "label2id", "problem_type", "is_encoder_decoder",
}  # fmt: skip
"""Fields of config.json that change no answer, or that are checked elsewhere (tied head, end tokens)."""

SHOWN = 24
"""Characters of a template that are shown on each side."""


def explain_template(run: str | None, served: str | Mapping[str, str] | None) -> list[str]:
    """Say where two chat templates part. transformers gives several ones by their names, and takes `default`."""
    if isinstance(served, Mapping):
        others = sorted(set(served) - {"default"})
        said = explain_template(run, served.get("default"))
        return said or [f"the chat template differs: {', '.join(others)} is there too, which the run has not"]
    if (run or "") == (served or ""):
        return []
    a, b = run or "", served or ""
    place = first_difference(a, b)
    here, there = (text[max(0, place - SHOWN // 3) : place + SHOWN] for text in (a, b))
    return [f"the chat template differs at character {place:,}: {there!r} is served, {here!r} is the run's"]


def explain_trained_template(template: str | None, folder: RunFolder) -> list[str]:
    """Say that the template in the run's own result is not the one that it was trained with."""
    trained = folder.read_json("manifest.json").get("template_sha256")
    stored = template_hash(template or "")
    if trained in (None, stored, template_hash("")):  # of a run that learned plain text the template is the base's
        return []
    return [
        f"the chat template in {folder.result} is not the one of the training (sha256 {stored[:12]}, {trained[:12]})"
    ]


def explain_tokenizer(run: Any, served: Any, questions: Sequence[Question]) -> list[str]:
    """Say the first text that two tokenizers turn into other ids, and the special tokens that differ."""
    said = []
    for text in (*PROBES, *(question.text for question in questions)):
        a, b = (list(tokenizer(text)["input_ids"]) for tokenizer in (run, served))
        if a != b:
            place = first_difference(a, b)
            ids = f"{b[place : place + 4]} where the run has {a[place : place + 4]}"
            said.append(f"the tokenizer differs: of {text[:40]!r} it makes {ids} (token {place})")
            break
    if len(run) != len(served):
        said.append(f"the tokenizer has {len(served):,} tokens, the run's {len(run):,}")
    for name in ("eos_token", "bos_token"):
        a, b = getattr(run, name), getattr(served, name)
        if a != b:
            said.append(f"the tokenizer's {name} is {b!r}, the run's {a!r}")
    return said


def explain_prompts(run: Any, served: Any, questions: Sequence[Question]) -> list[str]:
    """Say the first prompt that the folder's own tokenizer and template write otherwise than the run's."""
    for question in questions:
        try:
            ids = encode(served, question)
        except (ValueError, TypeError, KeyError) as error:  # jinja's errors are ValueErrors of transformers
            return [f"its chat template refuses row {question.row} ({first_line(error)})"]
        if ids != list(question.prompt_ids):
            place = first_difference(ids, question.prompt_ids)
            texts = [
                tokens.decode(list(found[place : place + 8]))
                for tokens, found in ((served, ids), (run, question.prompt_ids))
            ]
            return [
                f"the prompt of row {question.row} differs from token {place} on: {texts[0]!r}, the run's {texts[1]!r}"
            ]
    return []


def open_tokenizer(folder: Path | str, *, trusts_code: bool) -> tuple[Any, list[str]]:
    """Return the tokenizer of a folder, or None and why."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts_code), []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, [f"no tokenizer can be opened in {folder} ({first_line(error)})"]


def flatten(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested objects with dotted names."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def explain_config(run: Any, folder: Path, *, trusts_code: bool) -> list[str]:
    """Say the fields of config.json that differ from the trained model's config."""
    try:
        served = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code).to_dict()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"config.json cannot be used ({first_line(error)})"]
    a, b = (dict(flatten(tree)) for tree in (run.to_dict(), served))
    keys = [key for key in {**a, **b} if key.rpartition(".")[2] not in HARMLESS and a.get(key) != b.get(key)]
    found = [f"{key} is {json.dumps(b.get(key))}, the run's {json.dumps(a.get(key))}" for key in keys]
    return (
        [f"config.json differs: {'; '.join(found[:3])}" + (f" and {len(found) - 3} more" if found[3:] else "")]
        if found
        else []
    )


def find_dtypes(folder: Path) -> dict[str, list[str]]:
    """Return dtype -> names of the tensors stored in it, from the headers of the safetensors files of a folder."""
    words, found = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}, dict[str, list[str]]()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a safe_open is no mapping
                kind = file.get_slice(name).get_dtype()
                found.setdefault(words.get(kind, kind), []).append(name)
    return found


def explain_dtype(folder: Path, *, stored: str | None) -> tuple[str | None, list[str]]:
    """Return the dtype in which most tensors are stored, and what contradicts it.

    Expected is what the merge recorded, else `stored`, the base's own.
    """
    try:
        found = find_dtypes(folder)
    except (OSError, SafetensorError) as error:
        return None, [f"the weights cannot be read ({first_line(error)})"]
    if not found:
        return None, []
    main = max(found, key=lambda kind: len(found[kind]))
    config = read_object(folder / "config.json")
    says = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    merged = read_object(folder / RECORD).get("dtype")
    said = []
    if says and says not in found:
        said.append(f"the weights are saved in {main}, config.json says {says}")
    expected = merged or stored
    if expected and expected not in found:
        by = f"{RECORD} says the merge made" if merged else "the base is in"
        said.append(f"saved in the wrong precision: {main}, {by} {expected}")
    return main, said


def explain_adapter(
    model: Any, served: Path, *, trained: Path, cfg: RunConfig, names: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Say what is wrong with the adapter in `served`: keys that fit nothing, zeros, settings, other values.

    `model` is PEFT's model of the run's own adapter in `trained`; `names` are the keys of vLLM for each key of it,
    where those are meant.
    """
    try:
        with safe_open(served / WEIGHTS, framework="pt") as file:
            given = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        return [f"the adapter's weights cannot be read ({first_line(error)})"]
    given = restore_names(given, names) if names else given
    said = []
    expected = get_peft_model_state_dict(model)
    lost = [name for name in expected if name not in given]
    modules, losing = ({_module(name) for name in found} for found in (expected, lost))
    if lost or not set(given) <= set(expected):
        foreign = next((name for name in given if name not in expected), None)
        like = next((name for name in expected if foreign and name.endswith(foreign[-30:])), next(iter(expected), ""))
        keys = f"; {foreign} fits nothing, {like} would" if foreign else f"; {lost[0]} is missing"
        said.append(f"the adapter's keys match {len(modules - losing)} of {len(modules)} modules{keys}")
    ups = [value for name, value in given.items() if "lora_B" in name or "lora_embedding_B" in name]
    if ups and not any(bool(value.any()) for value in ups):
        said.append(f"the adapter is all zeros: none of its {len(ups)} lora_B holds another value")
    return (
        said
        + _explain_settings(served, trained=trained, cfg=cfg)
        + ([] if names else _explain_targets(served, modules))
        + _explain_values(given, trained, is_own=served.samefile(trained))
    )


def restore_names(given: Mapping[str, torch.Tensor], names: Mapping[str, Sequence[str]]) -> dict[str, torch.Tensor]:
    """Return an adapter under the names of PEFT again, halves of one layer joined; what has no such name stays."""
    rest, found = dict(given), {}
    for key, parts in names.items():
        if not all(part in given for part in parts):
            continue
        values = [given[part] for part in parts]
        if "lora_B" in key or all(torch.equal(values[0], value) for value in values):
            found[key] = torch.cat(values) if "lora_B" in key else values[0]
            for part in parts:
                rest.pop(part, None)
    return rest | found


def _explain_targets(served: Path, modules: Collection[str]) -> list[str]:
    """Say that target_modules leaves out modules that have tensors: PEFT ignores these tensors."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        config = PeftConfig.from_pretrained(served)
        kept = set(getattr(config, "modules_to_save", None) or ())
        names = [name.removeprefix("base_model.model.") for name in modules]
        low_rank = [name for name in names if name.rpartition(".")[2] not in kept]
        if getattr(config, "target_parameters", None) or not getattr(config, "target_modules", None):
            return []
        left = [name for name in low_rank if not check_target_module_exists(config, name)]
        if left:
            count = f"{len(low_rank) - len(left)} of {len(low_rank)} modules"
            return [f"{ADAPTER_CONFIG} differs: target_modules names {count}, {min(left)} for one is left out"]
    return []


def _module(name: str) -> str:
    for part in (".lora_", ".weight", ".bias", ".base_layer"):
        name = name.partition(part)[0]
    return name


def _explain_settings(served: Path, *, trained: Path, cfg: RunConfig) -> list[str]:
    given, kept = (read_object(folder / ADAPTER_CONFIG) for folder in (served, trained))
    if not given:
        return [f"{ADAPTER_CONFIG} is not there, or cannot be read"]
    lora, said = cfg.tuning.lora, []
    if cfg.model.adapter is None or cfg.model.merge_adapter:  # a continued adapter keeps its own shape
        kept = {
            **kept, "r": lora.r, "lora_alpha": lora.alpha if lora.alpha is not None else 2 * lora.r,
            "use_rslora": lora.rslora, "use_dora": lora.dora,
        }  # fmt: skip
    names = (
        "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias", "peft_type",
        "target_parameters", "modules_to_save", "layers_to_transform", "fan_in_fan_out",
    )  # fmt: skip
    for name in names:
        if (given.get(name) or None) != (kept.get(name) or None):
            said.append(f"{name} is {json.dumps(given.get(name))}, the run's {json.dumps(kept.get(name))}")
    bases = [str(found.get("base_model_name_or_path")) for found in (given, read_object(trained / ADAPTER_CONFIG))]
    if bases[0] not in (bases[1], Path(bases[1]).name):  # an export names no path of this machine
        said.append(f"its base is {bases[0]}, the run's {bases[1]}")
    return [f"{ADAPTER_CONFIG} differs: {'; '.join(said)}"] if said else []


def _explain_values(given: Mapping[str, torch.Tensor], trained: Path, *, is_own: bool) -> list[str]:
    """Say which values of an adapter are not the run's."""
    if is_own or not (trained / WEIGHTS).is_file():
        return []
    with safe_open(trained / WEIGHTS, framework="pt") as file:
        names = [name for name in file.keys() if name in given]  # noqa: SIM118
        stored = {name: file.get_tensor(name) for name in names}
    kinds = [sorted({str(value.dtype).removeprefix("torch.") for value in found.values()}) for found in (given, stored)]
    if kinds[0] != kinds[1]:
        return [f"the adapter is saved in the wrong precision: {', '.join(kinds[0])}, the run's {', '.join(kinds[1])}"]
    altered = [name for name in names if not is_close(given[name], stored[name])]
    if not altered:
        return []
    what = _describe_value(altered[0], given[altered[0]].float(), stored)
    if len(altered) == len(names):
        what = f"it is another adapter than the run's ({what})"
    return [f"{what}: {len(altered)} of {len(names)} of its tensors have other values"]


def _describe_value(name: str, value: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> str:
    """Say what a tensor of an adapter holds instead of its own values."""
    trained = stored[name].float()
    if not bool(value.isfinite().all()):
        return f"{name} holds values that are not finite"
    if other := next((key for key, kept in stored.items() if key != name and torch.equal(kept.float(), value)), ""):
        return f"{name} is the run's {other}"
    if value.shape == trained.shape and bool(trained.any()):
        factor = float((value * trained).sum() / trained.square().sum())
        if factor and bool(torch.allclose(value, factor * trained, rtol=1e-4)):
            return f"{name} holds {factor:.6g} times its values"
    return f"{name} is not the run's"


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to one rounding to the narrower of their dtypes."""
    if a.shape != b.shape:
        return False
    tolerance = max({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(value.dtype, 1e-6) for value in (a, b))
    smallest = 2.0**-24 if torch.float16 in (a.dtype, b.dtype) else 1e-9
    return bool(torch.allclose(a.float(), b.float(), rtol=tolerance, atol=smallest))


def explain_seal(folder: RunFolder, cfg: RunConfig) -> list[str]:
    """Say that the run's adapter is not what its last checkpoint holds: the files were changed behind the training.
    Of a run that goes on, `folder` holds an earlier checkpoint.
    """
    stored = folder.path / "adapter" / WEIGHTS
    status = folder.read_json("status.json")
    is_other = cfg.train.best_metric or cfg.train.early_stopping or status.get("state") == "running"
    name = f"checkpoint-{status.get('step')}"
    last = next((path for path in list_checkpoints(folder.checkpoints) if path.name == name), None)
    if is_other or last is None or not is_marked(last) or not stored.is_file() or not (last / WEIGHTS).is_file():
        return []
    with suppress(OSError, SafetensorError), safe_open(stored, "pt") as a, safe_open(last / WEIGHTS, "pt") as b:
        names = sorted(set(a.keys()) & set(b.keys()))
        altered = [name for name in names if not is_close(a.get_tensor(name), b.get_tensor(name))]
        if len(names) < len(list(a.keys())) or altered:
            count = f"{len(altered)} of {len(names)} tensors have other values" if altered else "its keys are others"
            return [f"adapter/ is not what the training left in {last.name}: {count}"]
    return []


INDEX = "model.safetensors.index.json"

ACTS = (
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "bad_words_ids",
    "begin_suppress_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "min_length", "num_beams",
    "min_new_tokens", "max_length", "max_new_tokens", "guidance_scale", "exponential_decay_length_penalty",
    "stop_strings",
)  # fmt: skip
"""Fields of generation_config.json that change or cut a greedy answer. Temperature and the like are the client's."""

IDLE: tuple[Any, ...] = (None, [], {}, 0, 1, 20)
"""Values by which such a field does nothing, or which transformers puts in unasked (20 as max_length)."""


def explain_generation(base: Mapping[str, Any], folder: Path) -> list[str]:
    """Say the settings of generation_config.json that change greedy answers and are not the base's.

    `base` are the settings in the base's config.json and generation_config.json.
    """
    path = folder / "generation_config.json"
    given, why = examine_object(path)
    if why:
        return [f"{path.name} cannot be read ({why})"]
    said = [
        f"{name} is {json.dumps(given[name])}, the base's {json.dumps(base.get(name))}"
        for name in ACTS
        if given.get(name) not in IDLE and given[name] != base.get(name)
    ]
    return [f"{path.name} differs: {'; '.join(said)}"] if said else []


def explain_ends(folder: Path, end_ids: Sequence[int], *, known: Collection[int], tokenizer: Any) -> list[str]:
    """Say that the folder's configs do not end an answer where training did.

    `end_ids` must end an answer; `known` are all tokens that may, those of the base too.
    """
    config, generation = (read_object(folder / name) for name in ("config.json", "generation_config.json"))
    text = config.get("text_config")
    of_config = _ids(config.get("eos_token_id")) or _ids(text.get("eos_token_id") if isinstance(text, dict) else None)
    ends = _ids(generation.get("eos_token_id")) or of_config
    if missing := [token for token in end_ids if token not in ends]:
        token = tokenizer.decode([missing[0]])
        return [f"generation_config.json ends answers at {sorted(ends)}, training at {missing[0]} ({token!r})"]
    for name, found in (("generation_config.json", ends), ("config.json", of_config)):
        if other := sorted(found - set(known)):
            token = tokenizer.decode([other[0]])
            return [f"{name} ends answers at {other[0]} ({token!r}) too, which neither training nor the base does"]
    return []


def _ids(given: Any) -> set[int]:
    return {given} if isinstance(given, int) else set(given or [])


def explain_class(base: Any, folder: Path, *, bos: int | None) -> list[str]:
    """Say what engines read of config.json and transformers does not: the class, the first token, a second rope_theta.

    `base` is the config of the trained model, `bos` the first token of the run's tokenizer.
    """
    raw, said = read_object(folder / "config.json"), []
    opened = AutoModelForCausalLM._model_mapping.get(type(base), None)
    known = {*(base.architectures or []), *([opened.__name__] if opened else [])}
    given = raw.get("architectures") or []
    if raw and base.architectures and not (given and set(given) <= known):
        said.append(f"architectures is {json.dumps(given)}, the run's {json.dumps(base.architectures)}")
    if raw.get("bos_token_id") not in (None, bos, base.bos_token_id):
        said.append(f"bos_token_id is {raw['bos_token_id']}, the run's {json.dumps(base.bos_token_id)}")
    rope = raw.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    if theta is not None and raw.get("rope_theta", theta) != theta:
        said.append(f"rope_theta is {raw['rope_theta']} and in rope_parameters {theta}")
    return [f"config.json differs: {'; '.join(said)}"] if said else []


def explain_index(folder: Path) -> list[str]:
    """Say that the index of the weight files cannot be read, or names files that are not there."""
    path = folder / INDEX
    if not path.is_file():
        return []
    places = read_object(path).get("weight_map")
    if not isinstance(places, dict):
        return [f"{INDEX} cannot be read: it names no weights"]
    missing = sorted({str(name) for name in places.values() if not (folder / str(name)).is_file()})
    return [f"{INDEX} names {len(missing)} files that are not there, {missing[0]} for one"] if missing else []


def explain_tie(model: Any) -> list[str]:
    """Say that config.json ties head and embedding, whose stored values differ: transformers then keeps both apart."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if not model.config.get_text_config().tie_word_embeddings or any(end is None for end in ends):
        return []
    embedding, head = (end.weight for end in ends)
    if embedding is head or (embedding.shape == head.shape and bool((embedding == head).all())):
        return []
    return ["config.json differs: tie_word_embeddings is true, and the stored head is not the embedding; "
            "an engine that ties them leaves the trained head out"]  # fmt: skip


def explain_second_template(folder: Path, template: str | None) -> list[str]:
    """Say that tokenizer_config.json has a chat template too, and another one: older releases read that."""
    second = read_object(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(second, str) or second == template:
        return []
    return ["the chat template differs: tokenizer_config.json holds another one than the run's chat_template.jinja"]


def explain_rules(run: Any, served: Any, folder: Path) -> list[str]:
    """Say which part of tokenizer.json is not the run's, also where no text of ours shows it."""
    if not all(hasattr(tokenizer, "backend_tokenizer") for tokenizer in (run, served)):
        return []
    a, b = (json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (run, served))
    said = [f"{name} of tokenizer.json is not the run's" for name in _differing(a, b)]
    raw = read_object(folder / "tokenizer.json").get("added_tokens")
    if not said and isinstance(raw, list):  # transformers puts back what tokenizer_config.json names; others do not
        declared = read_object(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
        known = {token.get("content") for token in (*raw, *declared.values()) if isinstance(token, dict)}
        lost = [token["content"] for token in a["added_tokens"] if token["content"] not in known]
        said = [f"tokenizer.json does not list the added token {lost[0]!r}"] if lost else []
    return [f"the tokenizer differs: {', '.join(said)}"] if said else []


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    for name in ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if a[name] != b[name]:
            yield name
    first, second = a["model"], b["model"]
    yield from (key for key in ("vocab", "merges", "type") if first.get(key) != second.get(key))
