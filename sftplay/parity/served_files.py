"""Find what the small files of a served model say otherwise than the run: ends, generation settings, class, index."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from sftplay.atomic import examine_object, read_object

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
