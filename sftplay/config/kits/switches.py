"""Conversions of values that depend on what else the file says: a key that is on, the task, other numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sftplay.config.kits import conversions, rows
from sftplay.config.kits.table import (
    Answer,
    Foreign,
    Leaf,
    Rule,
    Verdict,
    as_number,
    find_file,
    write,
    write_precision,
)
from sftplay.config.resolved import flow
from sftplay.places import find_python


def convert_either(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The rule of the first lead in `with` that is on, "" being always. `silent`: the value where the file is silent,
    instead of that in `defaults`; null writes nothing. `says`: a word on that value, with which the run is another."""
    leads = ((lead, inner) for lead, inner in rule["with"].items() if not lead or foreign.is_on(lead))
    lead, found = next(leads, ("", None))
    inner = found if isinstance(found, dict) else {"to": found}
    if leaf.is_default and "silent" in inner:
        leaf = leaf._replace(value=inner["silent"])
    if found is None or leaf.value is None:
        return Answer("no_effect", None, "says nothing of this kind of training")
    answer = follow(leaf, inner, foreign)
    if not leaf.is_default or "silent" not in inner:
        return answer
    said = inner.get("says") or f"{f'with {lead} ' if lead else ''}it is {flow(leaf.value)}"
    return replace(answer, why=said, differs="says" in inner)


def follow(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Return the answer of a rule, or of one within a rule."""
    return CONVERSIONS[rule["by"]](leaf, rule, foreign) if "by" in rule else follow_value(leaf, rule, foreign)


def follow_value(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Return the answer of a rule that has `values`, or none: the value as it is."""
    to, why, differs = rule["to"], rule.get("why", ""), rule.get("differs", False)
    if "first" in rule and foreign.get(rule["first"]) is not None:
        return Answer("no_effect", None, f"{rule['first']} decides")
    choices = {there if str(there)[:1] == "[" else flow(there): here for there, here in rule.get("values", {}).items()}
    shown = flow(leaf.value)
    if shown not in choices and isinstance(leaf.value, float) and leaf.value.is_integer():
        shown = flow(int(leaf.value))  # a table cannot have both 1 and 1.0
    if shown in choices:
        here = choices[shown]
        if here is None:
            return Answer("no_effect", None, why or "it says nothing here")
        verdict: Verdict = rule.get("verdict", "translated") if here == "auto" else "translated"
        return write(to, here, why, differs=differs, verdict=verdict)
    if "otherwise" in rule:
        nearest = rule.get("nearest")
        nearest = nearest.get(shown, nearest.get("*")) if isinstance(nearest, Mapping) else nearest
        values = {} if nearest is None else {to: nearest}
        return Answer("not_offered", to if values else None, rule["otherwise"], values)
    return write(to, as_number(leaf.value), "" if choices else why, differs=differs)


def convert_number_format(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The number format: a true bf16 or fp16 decides, else that of the weights. `with`: the key `dtype` of these, and
    `silent`, what the kit computes in where neither is given, by the format of the weights; `adapter`: the key
    without which all weights train, in the format of the weights."""
    names = rule["with"]
    bf16, fp16, dtype = (foreign.get(key) for key in ("bf16", "fp16", names["dtype"]))
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    if bf16 is True or fp16 is True:
        chosen = "bf16" if bf16 is True else "fp16"
    elif bf16 is False and (fp16 is False or "silent" not in names):
        chosen = short.get(str(dtype), "fp32")
    else:
        chosen = names.get("silent", {}).get(short.get(str(dtype), ""), "auto")
    halves = short.get(str(dtype), "fp32") != "fp32" and not foreign.is_on(names["adapter"])
    return write_precision(leaf.key, chosen, names["dtype"], halves=halves)


def convert_sampling(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A key of sampling and rewards: the file is of task_mode grpo. `is`: what the key is else, a rule or a key."""
    inner = rule["is"] if isinstance(rule["is"], dict) else {"to": rule["is"]}
    found = follow(leaf, inner, foreign)
    return found if found.refuses else replace(found, values={**found.values, "task_mode": "grpo"})


def convert_pairs(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A key of learning from preferences, where no key of the file names the kind of training. `is`: what the key is
    else, a rule or a key here; `modes`: lead -> the kind of training, of the first one that is on."""
    inner = rule["is"] if isinstance(rule["is"], dict) else {"to": rule["is"]}
    mode = next(mode for lead, mode in rule["modes"].items() if not lead or foreign.is_on(lead))
    found = follow(leaf, inner, foreign)
    return replace(found, values={**found.values, "task_mode": mode})


def convert_pair_loss(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The loss of pairs, by its name or in a list. Some losses are kinds of training here; with `mode` the loss alone
    says which. `values`: losses that are none of pairs, each with null or why it is not offered."""
    losses = [str(loss) for loss in (leaf.value if isinstance(leaf.value, list) else [leaf.value])]
    if not losses or losses[0] in rule.get("values", ()):
        if said := rule["values"][losses[0]] if losses else "":
            return Answer("not_offered", None, said)
        return Answer("translated", "task_mode", rule.get("why", ""))
    kinds = {"ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}
    mode = kinds.get(losses[0], "dpo")
    known = len(losses) == 1 and (mode != "dpo" or losses[0] in ("sigmoid", "hinge", "robust"))
    values = {"task_mode": mode} if rule.get("mode") else {}
    if mode == "dpo":
        values = {rule["to"]: losses[0] if losses[0] in ("sigmoid", "hinge", "robust") else "sigmoid", **values}
    if not known:
        why = (
            "one loss is minimised: the first" if len(losses) > 1 else "this loss is not offered; sigmoid comes nearest"
        )
        return Answer("not_offered", next(iter(values), None), why, values)
    if not values:
        return Answer("no_effect", None, f"task_mode {mode} has this loss")
    return Answer("translated", next(iter(values)), "", values)


def convert_vllm(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """What samples completions, or a setting of vLLM. `with`: leads that are on where vLLM samples, `uses`, and
    where it is a server, `server`. Without vLLM on this machine the model itself samples."""
    names, to = rule["with"], rule["to"]
    kind = "vllm_server" if names.get("server") and foreign.is_on(names["server"]) else "vllm_colocate"
    if not foreign.is_on(names["uses"]):
        return Answer("no_effect", None, "the model itself samples")
    if find_python() is None:
        said = (
            f"vLLM is not installed here, so the model itself samples: make install-vllm, then grpo.generation: {kind}"
        )
        return Answer("not_offered" if to == "grpo.generation" else "no_effect", None, said)
    if to == "grpo.generation":
        return write(to, kind)
    belongs = {"grpo.vllm.url": "vllm_server", "grpo.vllm.timeout": "vllm_server", "grpo.vllm.tensor_parallel": kind}
    if belongs.get(to, "vllm_colocate") != kind:
        return Answer("no_effect", None, f"grpo.generation is {kind}")
    return follow_value(leaf, rule, foreign)


def convert_known_rewards(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Names of reward functions. `with`: `weights`, the key of their weights; `known`: name -> `use` and `options`
    here, and `keys`, options that are the value of the first of some keys of the file."""
    names, to = leaf.value if isinstance(leaf.value, list) else [leaf.value], "rewards"
    weights = foreign.get(rule["with"]["weights"])
    weights = [as_number(weight) for weight in weights] if isinstance(weights, list) else []
    is_each = len(weights) == len(names) and all(isinstance(weight, int | float | None) for weight in weights)
    weights = weights if is_each else [None] * len(names)
    known, entries, unknown = rule["with"]["known"], [], []
    for name, weight in zip(map(str, names), weights, strict=True):
        dotted = re.fullmatch(r"([\w.]+)[.:]([A-Za-z_]\w*)", name)
        if entry := known.get(name):
            options = {**entry.get("options", {}), **{
                option: next((foreign.number(key) for key in keys.split() if foreign.number(key)), 512)
                for option, keys in entry.get("keys", {}).items()
            }}  # fmt: skip
            made = {"name": name, "use": entry["use"], **({"options": options} if options else {})}
        elif dotted:
            made = {"name": dotted[2], "use": f"{dotted[1]}:{dotted[2]}"}
        else:
            unknown.append(name)
            continue
        entries.append(made | ({} if weight in (None, 1, 1.0) else {"weight": float(weight)}))
    values: dict[str, Any] = {"task_mode": "grpo"} | ({to: entries} if entries else {})
    said = "; ".join(known[name]["why"] for name in map(str, names) if "why" in known.get(name, {}))
    if unknown:
        why = f"{', '.join(unknown)}: code of that kit; write a function and name it in rewards, as path.py:function"
        return Answer("not_offered", to if entries else None, why, values)
    why = said or "a function of yours gets completions as texts"
    return Answer("translated", to, why, values, differs=bool(said))


def convert_completion(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Most tokens of a completion, which share model.max_seq_len with the prompt. `with`: the key of most tokens of a
    prompt, or a number."""
    to, longest = rule["to"], as_number(leaf.value)
    prompt = next((foreign.number(key) for key in rule["with"].split() if foreign.number(key)), 512)
    if not isinstance(longest, int) or not isinstance(prompt, int):
        return Answer("not_offered", None, "is no number of tokens")
    why = f"model.max_seq_len is this and {prompt} tokens of prompt"
    return Answer("translated", to, why, {to: longest, "model.max_seq_len": longest + prompt})


def convert_rollout(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Optimizer steps that learn from one rollout batch, from its micro-batches or, with `completions`, all of it.
    `with`: the keys `rows` and `accum`."""
    names, to, value = rule["with"], "grpo.steps_per_generation", as_number(leaf.value)
    rows, accum = foreign.number(names["rows"]) or 1, foreign.number(names["accum"]) or 1
    if not all(isinstance(number, int) and number > 0 for number in (rows, accum, value)):
        return Answer("not_offered", None, "no number of steps can be made of it")
    unit = rows * accum * foreign.nproc if names.get("completions") else accum
    if value % unit:
        return Answer("not_offered", None, f"is no multiple of a step, {unit} here: one step learns from each batch")
    return write(to, value // unit)


def convert_ratio(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A value as a share of another one. `with`: the key of that, or its value where the file is silent."""
    value, whole = as_number(leaf.value), foreign.number(rule["with"])
    if not isinstance(value, int | float) or not isinstance(whole, int | float) or not 0 <= value < whole:
        return Answer("not_offered", None, f"is no share of {rule['with']}: write {rule['to']}")
    return write(rule["to"], float(f"{value / whole:.6g}"), f"of {rule['with']} {whole:g}")


def convert_product(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A number times others, divided by others. `with`: the keys `times` and `by`."""
    factors = [as_number(leaf.value), *(foreign.number(key) or 1 for key in rule["with"].get("times", "").split())]
    divisors = [foreign.number(key) or 1 for key in rule["with"].get("by", "").split()]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in [*factors, *divisors]):
        return Answer("not_offered", None, "no number can be made of it")
    if math.prod(factors) < 1:
        return Answer("no_effect", None, "says nothing here")
    size, rest = divmod(math.prod(factors), math.prod(divisors))
    said = " x ".join(["the value", *rule["with"].get("times", "").split()])
    said += "".join(f" / {key}" for key in rule["with"].get("by", "").split())
    if rest or not size:
        return Answer("not_offered", None, f"{said} is no whole number")
    return write(rule["to"], size, said)


def convert_filled(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Rows of a micro-batch, which are accumulated until a step has at least so many. `with`: the key `rows`, and
    `least`."""
    rows, gpus = foreign.number(rule["with"]["rows"]) or 1, foreign.nproc
    if not isinstance(rows, int) or rows < 1:
        return Answer("not_offered", None, "is no number of rows")
    accum = max(1, math.ceil(rule["with"]["least"] / rows / gpus))
    why = f"{rows} rows x {accum} micro-batches x {gpus} GPU{'s' if gpus > 1 else ''} (NPROC=)"
    return write("train.effective_batch_size", rows * accum * gpus, why)


def convert_only(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A list with one entry, or with commas between several."""
    found = leaf.value if isinstance(leaf.value, list) else re.split(r",\s*", str(leaf.value))
    if len(found) > 1:
        return Answer("not_offered", rule["to"], f"takes one: {found[0]}", {rule["to"]: str(found[0])})
    return write(rule["to"], str(found[0])) if found else Answer("no_effect", None, "empty")


def convert_text(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A text, or the name of a .txt file with it; ${key} in it is a value of the file."""
    text = str(leaf.value)
    if text.endswith(".txt"):
        file = find_file(foreign.folder / text, Path(text))
        if file is None:
            return Answer("not_offered", rule["to"], f"the text is in {text}, which is not here: write it there")
        return write(rule["to"], file.read_text(encoding="utf-8", errors="replace"), f"the text of {text}")
    text = re.sub(r"\$\{([\w.]+)\}", lambda found: str(foreign.get(found[1]) or found[0]), text)
    return write(rule["to"], text.replace("\\n", "\n"))


def convert_without(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A list without the entries `drop`, by the rule `is`."""
    entries = leaf.value if isinstance(leaf.value, list) else [leaf.value]
    kept = [entry for entry in entries if entry not in rule["drop"]]
    return follow(leaf._replace(value=kept), rule["is"], foreign) if kept else Answer("no_effect", None, rule["why"])


def convert_entries(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A list whose entries have a key each: `to`, with spaces between them."""
    keys = rule["to"].split()
    if not isinstance(leaf.value, list) or len(leaf.value) != len(keys):
        return Answer("not_offered", None, f"is no list of {len(keys)}")
    return Answer("translated", keys[0], "", dict(zip(keys, map(as_number, leaf.value), strict=True)))


def convert_rank(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The rank of an adapter, 0 where every weight trains."""
    rank = as_number(leaf.value)
    if rank in (0, None):
        return write("tuning.mode", "full", "every weight trains")
    return Answer("translated", "tuning.lora.r", "", {"tuning.mode": "lora", "tuning.lora.r": rank})


CONVERSIONS: dict[str, Callable[[Leaf, Rule, Foreign], Answer]] = {
    name.removeprefix("convert_"): function
    for known in (vars(rows), vars(conversions), globals())
    for name, function in known.items()
    if name.startswith("convert_")
}
"""What a rule names with `by`: every function of this folder by its name behind `convert_`."""
