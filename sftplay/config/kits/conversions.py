"""Named conversions of values: what the rules of the tables call, from a value there to what is written here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sftplay.config.keys import all_keys, general_key
from sftplay.config.kits import rows
from sftplay.config.kits.rows import find_shipped, read_sets
from sftplay.config.kits.table import (
    Answer,
    Foreign,
    Leaf,
    Rule,
    Verdict,
    as_number,
    find_file,
    is_off,
    write,
    write_precision,
)
from sftplay.config.resolved import flow
from sftplay.places import find_python

HAND_ON_STATES = ("qwen3.5", "qwen3-next", "lfm2", "mamba", "falcon-h1", "granite-4.0-h", "nemotron-h", "jamba")
"""Parts of the names of models whose layers carry a state from one packed row into the next. The plan refuses to pack
their rows."""


def convert_batch(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Rows of a micro-batch times accumulation times GPUs. `with`: the keys `rows` and `accum`, perhaps
    `total`, and `splits` (see `count_replicas`)."""
    names = rule["with"]
    sizes = [foreign.number(names[name]) or None if name in names else None for name in ("rows", "accum", "total")]
    sizes = [int(size) if isinstance(size, float) and size.is_integer() else size for size in sizes]
    if any(isinstance(size, bool) or not isinstance(size, int | None) or (size or 1) < 1 for size in sizes):
        return Answer("not_offered", None, "no number of rows can be made of it")
    rows, accum, total = sizes[0] or 1, sizes[1] or 1, None if sizes[1] else sizes[2]
    gpus, how_many = count_replicas(names, foreign)
    how = f"a step of {total}" if total else f"micro-batch {rows} x accumulation {accum}"
    return write("train.effective_batch_size", (total or rows * accum) * gpus, f"{how} x {how_many}")


def count_replicas(names: Rule, foreign: Foreign) -> tuple[int, str]:
    """Return how many GPUs or groups of them read rows of their own, and that in words. A group, whose size is that of
    the keys `splits` together, reads the same rows."""
    sizes = [foreign.number(key) for key in names.get("splits", "").split()]
    shared = math.prod(max(1, size) for size in sizes if isinstance(size, int))
    how = f"GPUs {foreign.nproc}" + (f" / {shared} that share their rows" if shared > 1 else "")
    return max(1, foreign.nproc // shared), how


def convert_steps(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Steps between two events; below 1 a share of all steps. `with`: the key of the number of steps, if there is one;
    `epochs: true`: the value counts events in an epoch; `when`: the key that says whether steps count at all."""
    to, value, names = rule["to"], as_number(leaf.value), rule.get("with", {})
    if to == "train.eval_steps" and not foreign.holds_out:
        return Answer("no_effect", None, "there are no held-out rows to evaluate")
    if (word := str(foreign.get(names["when"])) if "when" in names else "") in ("epoch", "no", "best", "False"):
        return Answer("auto", to, f"once an epoch here: {names['when']} is {'no' if word == 'False' else word}")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        return Answer("auto", to, "once an epoch here")
    if names.get("epochs"):
        why = "once an epoch" if value == 1 else "once an epoch here; for more write it, as steps"
        return Answer("translated" if value == 1 else "auto", to, why)
    if value >= 1:
        return write(to, int(value))
    total = foreign.number(names.get("total", ""))
    if isinstance(total, int) and total > 0:
        return write(to, max(1, math.ceil(value * total)), f"{value:g} of {total} steps")
    return Answer("auto", to, "once an epoch here: it is a share of the steps, which depend on the rows")


def convert_above_one(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A distance above 1, where the bound itself is written here."""
    value = as_number(leaf.value)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        return Answer("not_offered", None, "is no distance above 1")
    return write(rule["to"], round(1 + value, 9), "the bound itself, 1 and this")


def convert_warmup(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Steps of warm-up as a share of all steps. `with`: the key of their number, `total`; `first`: a key that goes
    before this one, where it is above 0, or with `zero` in any case; `share`: one that decides where this one is 0."""
    value, names, to = as_number(leaf.value), rule.get("with", {}), "train.warmup_ratio"
    first, share = names.get("first", ""), names.get("share", "")
    if first and (foreign.get(first) is not None if names.get("zero") else foreign.number(first)):
        return Answer("no_effect", None, f"{first} goes before it")
    if share and not value and foreign.number(share):
        return Answer("no_effect", None, f"it is off, so {share} decides")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        return Answer("not_offered", None, "is no number of steps")
    if value < 1:
        return write(to, float(value), "a share of the steps")
    total = foreign.number(names.get("total", ""))
    if isinstance(total, int) and total > value:
        return write(to, round(value / total, 6), f"{value:g} of {total} steps")
    why = f"a share of the steps is wanted: write {value:g} / steps (`make plan` counts them); 0.03 until then"
    return Answer("not_offered", to, why, {to: 0.03})


def convert_held_out(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Share of the rows to hold out, or their number."""
    value = as_number(leaf.value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return write("data.split", float(value) if value else 0, "" if value else "nothing is held out")
    why = "a share of the rows is wanted, this is a number of rows; one prompt in twenty is held out"
    return Answer("not_offered", "data.split", why, {"data.split": 0.05})


def convert_precision(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The number format that several switches make together. `with`: the keys `bf16` and `fp16`, each one or more;
    `pure`, the switch of weights in 16 bits, or `adapter`, the key without which all weights train so."""
    names = rule["with"]

    def is_asked(kind: str, of: Callable[[str], Any]) -> bool:
        return any(of(key) not in (None, False, "false", "auto", "AUTO") for key in names[kind].split())

    if is_asked("bf16", foreign.tree.get):
        chosen = "bf16"
    elif is_asked("fp16", foreign.tree.get):
        chosen = "fp16"
    else:  # where one is switched off, and the other not on, nothing but fp32 is left
        is_auto = any(foreign.get(key) in ("auto", "AUTO") for key in names["bf16"].split())
        chosen = "auto" if is_auto else "fp32"
    says = names.get("pure") or names["bf16"].split()[0]
    halves = foreign.get(names["pure"]) is True if "pure" in names else not foreign.is_on(names["adapter"])
    return write_precision(leaf.key, chosen, says, halves=halves)


def convert_targets(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Names of the layers that get an adapter: a list, a text with commas, or a word for all linear layers. `with`: the
    words, and the key that asks for all of them."""
    to, names, value = "tuning.lora.target_modules", rule.get("with", {}), leaf.value
    if names.get("all") and foreign.get(names["all"]):
        return Answer("translated", to, f"{names['all']} takes every linear layer", {to: "auto"})
    parts = value if isinstance(value, list) else re.split(r",\s*", str(value))
    parts = [str(part).strip() for part in parts if str(part).strip()]
    if any(part.lower() in names.get("words", "all all-linear all_linear").split() for part in parts) or not parts:
        return write(to, "auto", "every linear layer but the output head")
    if any(part.lower() in ("default", "auto", "embedding") for part in parts):
        return Answer(
            "not_offered", to, "which layers that means is not known here; auto takes every linear one", {to: "auto"}
        )
    if any(set(part) & set("*[]()|^$\\+?") for part in parts):
        why = "a pattern is not offered, only names of layers; auto takes every linear layer"
        return Answer("not_offered", to, why, {to: "auto"})
    return write(to, parts)


def convert_names(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A list, or a text with commas between the names."""
    value = leaf.value if isinstance(leaf.value, list) else re.split(r",\s*", str(leaf.value))
    return write(rule["to"], [str(name).strip() for name in value if str(name).strip()], rule.get("why", ""))


def convert_mode(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A kind of training. One that is not among `values` is written as it is called, which `validate` refuses; `with`
    is what it is called where the value is only a switch."""
    values = rule.get("values", {})
    shown = str(leaf.value).lower()
    if shown in values:
        here = values[shown]
        return Answer("translated", "task_mode", rule.get("why", "")) if here is None else write("task_mode", here)
    if is_off(foreign.kit, general_key(leaf.key), leaf.value):
        return Answer("no_effect", None, "it is off, as it is here")
    name = rule.get("with") or shown
    return Answer("not_offered", "task_mode", rule["otherwise"], {"task_mode": name}, refuses=True)


def convert_deepspeed(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The ZeRO stage of a DeepSpeed file, from the file or else from its name."""
    to, value, block = "cluster.strategy", foreign.get("deepspeed"), leaf.key.partition(".")[2]
    if block and not block.startswith(("zero_optimization.stage", "zero_optimization.offload")):
        why = "only the stage and offloading are read of it; cluster.deepspeed takes a file with all of it"
        is_usual = leaf.value in (False, "auto") or block.startswith(("train_", "bf16.", "fp16.", "zero_optimization."))
        return Answer("no_effect" if is_usual else "not_offered", None, why)
    settings: Any = value
    if isinstance(value, str):
        file = find_file(Path(value), foreign.folder / value)
        try:
            settings = json.loads(file.read_text(encoding="utf-8", errors="replace") if file else "{}")
        except (OSError, ValueError, RecursionError):
            settings = {}
    zero = settings.get("zero_optimization") if isinstance(settings, dict) else {}
    zero = zero if isinstance(zero, dict) else {}
    named = re.search(r"z(?:ero)?[-_]?([0-3])", str(value)) if isinstance(value, str) else None
    stage = as_number(zero.get("stage", int(named[1]) if named else None))
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        return Answer("not_offered", to, "no ZeRO stage can be found in it: write zero1, zero2 or zero3", {})
    places = (zero.get(key) for key in ("offload_optimizer", "offload_param"))
    moved = any(place.get("device") != "none" if isinstance(place, dict) else place for place in places)
    offloads = moved or (not zero and "offload" in str(value)) or zero.get("cpu_offload") is True
    strategy = "ddp" if stage == 0 else f"zero{stage}"
    if offloads and stage >= 2:
        shown = f"deepspeed_configs/zero{stage}_offload.json"
        return Answer("translated", to, "with offloading", {to: strategy, "cluster.deepspeed": find_shipped(shown)})
    return write(to, strategy, "" if stage else "ZeRO stage 0 shares nothing")


def convert_fsdp(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """What FSDP shards, from all keys that say a word on it. `with`: `words`, keys of words or lists of words; `keeps`,
    switches that are false where weights stay whole; `replicas`, the key of their number."""
    to, names = "cluster.strategy", rule["with"]
    words = [str(foreign.get(key) or "") for key in names["words"].split()]
    numbered = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard"}
    shown = " ".join(numbered.get(word, word) for word in words).lower()
    kept = names.get("keeps", "").split()
    if is_off(foreign.kit, general_key(leaf.key), leaf.value) and not shown.strip() and leaf.key not in kept:
        return Answer("no_effect", None, "it is off")
    keeps = any(foreign.get(key) is False for key in kept)
    replicas = foreign.number(names["replicas"]) if "replicas" in names else None
    if "hybrid" in shown or (isinstance(replicas, int) and replicas > 1):
        found = "hsdp"
    else:
        found = "zero2" if "grad_op" in shown or keeps else "ddp" if "no_shard" in shown else "fsdp"
    if "offload" in shown:
        return Answer("not_offered", to, "fsdp without offloading; zero3 with cluster.deepspeed offloads", {to: found})
    return write(to, found)


def convert_tuning(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """What trains, and in how many bits the base lies. `with`: the key `mode`, and `four_bits`, the keys that ask for
    4."""
    to, names = "tuning.mode", rule["with"]
    mode = foreign.get(names["mode"])
    here = rule["values"].get(str(mode or ""))
    if here is None:
        return Answer("not_offered", to, rule["otherwise"], {to: rule["nearest"]})
    bits = [as_number(foreign.get(key)) for key in names["four_bits"].split()]
    if leaf.key != names["mode"] and is_off(foreign.kit, leaf.key, leaf.value):
        return Answer("no_effect", None, "it is off")
    if leaf.key != names["mode"] and here == "full":
        return Answer(
            "not_offered", None, "4 bits are for an adapter on a frozen base: every weight trains, in 16 bits"
        )
    if leaf.key != names["mode"] and as_number(leaf.value) not in (True, 4):
        return Answer("not_offered", None, "4 bits are offered, as qlora; here the base lies in 16 bits")
    here = "qlora" if here == "lora" and any(value in (True, 4) for value in bits) else here
    return write(to, here, "every weight trains" if here == "full" else "")


def convert_packing(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Rows packed into blocks. Other kits count blocks where this one counts rows, which `why` says. `with`: the reader
    and the keys of the data sets: documents, and several sets, are blocks in any case; `forces`: a key that does it."""
    packs = leaf.value in (True, "true", "True")
    if "with" in rule:
        packs = packs or foreign.get(rule["with"].get("forces", "")) is True
        sets = read_sets(rule["with"]["reader"], rule["with"]["sets"], foreign)
        if sets and (len(sets) > 1 or sets[0].kind == "cpt"):
            return Answer("auto", "task_mode", "the rows are full blocks of model.max_seq_len tokens")
    if packs and _hands_on_states(foreign):
        why = f"{rule['why']}; layers of this model carry a state along the row, so that its rows are not packed here"
        return write(rule["to"], "auto", why, differs=True, verdict="auto")
    return write(rule["to"], packs, rule["why"] if packs else "", differs=packs)


def _hands_on_states(foreign: Foreign) -> bool:
    """Whether rows of the model may not be packed, by its name: only a later floor reads shapes."""
    rules = {key: rule.get("to") if isinstance(rule, Mapping) else rule for key, rule in foreign.kit.rules.items()}
    name = next((str(value) for key in rules if rules[key] == "model.name" and (value := foreign.get(key))), "")
    return any(part in name.lower() for part in HAND_ON_STATES)


def convert_listed(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """A list of names. `values`: a part of a name -> null where it changes nothing, else the kind of training that it
    makes."""
    names = leaf.value if isinstance(leaf.value, list) else [leaf.value]
    for name in names:
        known = [part for part in rule["values"] if part in str(name)]
        if known and (mode := rule["values"][known[0]]):
            return Answer("not_offered", "task_mode", f"{mode} is not offered", {"task_mode": mode}, refuses=True)
        if not known:
            return Answer("not_offered", None, f"{name}: {rule['otherwise']}")
    return Answer("no_effect", None, rule["why"])


def convert_column(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The name of a column. `with`: the field of ours."""
    name = rule["with"]
    if leaf.value == name:
        return Answer("no_effect", None, "the column has this name already")
    return Answer("not_offered", None, f"write data.columns: {{{name}: {flow(leaf.value)}}}")


def convert_rewards(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Reward functions: `module.function`, or the path of a file and a function. `with`: the key `weights`."""
    names = leaf.value if isinstance(leaf.value, list) else re.split(r"[\s,]+", str(leaf.value))
    weights = foreign.get(rule["with"]["weights"]) or []
    entries = []
    for number, name in enumerate(str(name) for name in names):
        module, _, function = name.rpartition(".")
        if not module:
            return Answer("not_offered", "rewards", f"{name}: write it as module:function in rewards")
        weight = as_number(weights[number]) if isinstance(weights, list) and number < len(weights) else 1.0
        weight = weight if isinstance(weight, int | float) else 1.0
        entries.append({"name": re.sub(r"[^A-Za-z0-9_-]", "-", function)[:64], "use": f"{module}:{function}",
                        "weight": float(weight)})  # fmt: skip
    why = "a function here gets `completions` and the columns by name, see docs/rewards.md"
    return Answer("translated", "rewards", why, {"rewards": entries})


def convert_best(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Whether the weights of the best evaluation are the result: only where each checkpoint falls on an evaluation.
    `with`: `save` and `eval`, each the key of steps and that of events in an epoch; `epochs`; `patience`."""
    names = rule["with"]
    if not foreign.holds_out or (leaf.value is False and not foreign.get(names["patience"])):
        return Answer("no_effect", None, "the last weights are kept, as here")

    def find_steps(kind: str) -> Any:
        steps, events = (foreign.number(key) for key in names[kind].split())
        count, epochs = events or 0, foreign.number(names["epochs"])
        is_share = isinstance(count, int | float) and isinstance(epochs, int | float) and count * epochs > 1
        return 1 / (count * epochs) if is_share else steps

    saving, evaluating = find_steps("save"), find_steps("eval")
    if (
        not all(isinstance(steps, int | float) and 0 < steps < math.inf for steps in (saving, evaluating))
        or saving % evaluating
    ):
        return Answer("no_effect", None, "no checkpoint falls on an evaluation, so the last weights are kept, as here")
    return write("train.best_metric", "loss", "each checkpoint falls on an evaluation, and the best one is the result")


def convert_tracker(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """Trackers by transformers' names. One that is not installed here is said, as `validate` would refuse it. `with`:
    the tracker, where the value is something else of it."""
    to = "logging.backend"
    if is_off(foreign.kit, leaf.key, leaf.value):
        return Answer("no_effect", None, "it is off")
    value = (
        [rule["with"]] if "with" in rule else leaf.value if isinstance(leaf.value, list) else str(leaf.value).split(",")
    )
    names = [str(name).strip().lower() for name in value]
    names = [name for name in names if name and name not in ("none", "false")]
    if names == ["all"]:
        return Answer("auto", to, "TensorBoard; name others one by one")
    known = [name for name in names if name in str(all_keys()[to].annotation)]
    here = [name for name in known if find_spec(name)]
    if not names:
        return write(to, "none")
    if here == names:
        return write(to, here[0] if len(here) == 1 else here)
    missing = ", ".join(name for name in names if name not in here)
    return Answer("not_offered", to, f"{missing}: not installed here; pip install it, then name it in {to}")


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
    """Rows of a micro-batch, which are accumulated until a step has at least so many on GPUs that all count alike.
    `with`: the key `rows`, `least`, and `splits` (see `count_replicas`)."""
    rows, gpus = foreign.number(rule["with"]["rows"]) or 1, foreign.nproc
    if not isinstance(rows, int) or rows < 1:
        return Answer("not_offered", None, "is no number of rows")
    accum = max(1, math.ceil(rule["with"]["least"] / rows / gpus))
    replicas, how = count_replicas(rule["with"], foreign)
    return write("train.effective_batch_size", rows * accum * replicas, f"{rows} rows x {accum} micro-batches x {how}")


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
    for known in (vars(rows), globals())
    for name, function in known.items()
    if name.startswith("convert_")
}
"""What a rule names with `by`: every function of this folder by its name behind `convert_`."""
