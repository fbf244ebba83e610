"""The data sets that configs of other kits name: where the rows lie, in which layout, and what is learned of them."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sftplay.config.kits.table import Answer, Foreign, Leaf, Rule, Verdict, as_number, find_file, is_off, write
from sftplay.places import ROOT, shipped

ALPACA = "configs/templates/alpaca.jinja"
SHAREGPT = ("conversations", "conversation", "dialogue")
"""Names of the column of turns that the layout sharegpt finds by itself (data/layouts.py)."""

ROLES = ("system", "user", "human", "assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model", "tool", "function",
         "observation", "function_response", "tool_response", "ipython")  # fmt: skip
"""Names of roles in chats that are known here (data/layouts.py)."""


@dataclass
class DataSet:
    """One set of rows, and the answers for the leaves that describe it."""

    path: str
    kind: str = "chat"  # chat, cpt or pairs
    format: str = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    template: str = ""
    weight: float | None = None
    answers: dict[str, Answer] = field(default_factory=dict)


def read_sets(reader: str, keys: str, foreign: Foreign) -> list[DataSet]:
    """Return the data sets of some keys, each once: a part of one cannot be chosen, so all rows of it are read."""
    once: dict[str, DataSet] = {}
    for one in (one for key in keys.split() for one in READERS[reader](key, foreign)):
        first = once.setdefault(repr((one.path, one.kind, one.format, one.columns, one.template)), one)
        if first is one:
            continue
        first.weight = first.weight and one.weight and first.weight + one.weight
        for at, answer in one.answers.items():
            if answer.became == "data.train_path":
                why = "; ".join(filter(None, (answer.why, "it is named before, and read once")))
                answer = replace(answer, why=why, differs=True)
            first.answers[at] = answer
    return list(once.values())


def convert_rows(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """One leaf of the description of data sets. `with`: the reader in READERS. `to`: the key here, where it is not
    data.train_path; of several sets it takes the first."""
    sets = read_sets(rule["with"], leaf.key.partition(".")[0], foreign)
    found = next((one.answers[leaf.key] for one in sets if leaf.key in one.answers), None)
    found = found or Answer("not_offered", None, "how the rows are laid out is not known here")
    if "to" in rule:
        if found.became != "data.train_path":
            return Answer("no_effect", None, "held-out rows are read as the training rows are")
        why = f"the first of {len(sets)} sets only" if len(sets) > 1 else found.why
        verdict: Verdict = "not_offered" if len(sets) > 1 else found.verdict
        return Answer(verdict, rule["to"], why, {rule["to"]: sets[0].path}, found.refuses)
    if found.refuses or not found.became or not sets:
        return found
    values, why, differs = combine(sets)
    values = {**values, **found.values}
    if found.became == "data.columns" and "data.columns" not in values:
        if any(one.columns for one in sets):
            return Answer("not_offered", None, "the columns of these sets differ: give them the same names")
        return Answer("no_effect", None, "the column has this name already")
    is_path = found.became == "data.train_path"
    became = "datasets" if is_path and len(sets) > 1 else found.became
    return Answer(found.verdict, became, "; ".join(filter(None, (found.why, why if is_path else ""))), values,
                  differs=found.differs or (is_path and differs))  # fmt: skip


def convert_template(leaf: Leaf, rule: Rule, foreign: Foreign) -> Answer:
    """The chat template by its name there. `with`: the reader of the data sets; `values`: name -> auto, chatml or
    alpaca; any other is the model's own, which auto takes. `own`: names whose text need not be the model's, * all;
    `says`: name -> in what the one that is taken differs."""
    sets = read_sets(rule["with"], rule.get("sets", "datasets"), foreign) if "with" in rule else []
    to, name, known = "data.template", str(leaf.value), rule.get("values", {})
    if sets and all(one.template or one.kind == "cpt" for one in sets):
        return Answer("no_effect", None, "the rows have a prompt of their own, or none")
    here, says = known.get(name), rule.get("says", {}).get(name, "")
    if name in known and here is None:
        return Answer("no_effect", None, "another key has the template")
    if here == "alpaca":
        return write(to, find_shipped(ALPACA), "the Alpaca prompt")
    if here:
        return write(to, here, says, differs=bool(says))
    if name.endswith((".jinja", ".jinja2", ".j2")) or find_file(Path(name)):
        return write(to, name)
    if "{" in name:
        return Answer("not_offered", to, "write the template into a file and name that")
    if rule.get("own") == "*" or name in rule.get("own", "").split():
        why = f"{foreign.kit.title} has a text of its own for it; here the tokenizer's own is taken, or a Jinja file"
        return Answer("auto", to, why, differs=True)
    return Answer("auto", to, "the tokenizer's own; a base model without one needs chatml or a Jinja file")


def find_shipped(path: str) -> str:
    """Return the path of a shipped file, from the current folder if that is the checkout."""
    return path if Path.cwd() == ROOT else str(shipped(path))


def combine(sets: Sequence[DataSet]) -> tuple[dict[str, Any], str, bool]:
    """Return what is written for these sets, a word on it, and whether the run is another one by that."""
    is_alike = all(one.columns == sets[0].columns for one in sets)
    columns = sets[0].columns if is_alike else {}
    values: dict[str, Any] = {}
    kinds = {one.kind for one in sets}
    if kinds == {"cpt"}:
        values["task_mode"] = "cpt"
    elif len(sets) > 1 and "pairs" not in kinds:
        values["task_mode"] = "cpt_mixed"
    formats = {one.format for one in sets if one.kind == "chat"}
    if len(formats) == 1 and formats != {"auto"}:
        values["data.format"] = formats.pop()
    if columns:
        values["data.columns"] = columns
    if template := next((one.template for one in sets if one.template), ""):
        values["data.template"] = template
    if len(sets) == 1:
        return {**values, "data.train_path": sets[0].path}, "", False
    entries: list[dict[str, Any]] = []
    counts = [one.weight or count_rows(one.path) for one in sets]
    is_counted = all(counts)
    for number, (one, count) in enumerate(zip(sets, counts, strict=True)):
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", Path(one.path).stem)[:56] or "rows"
        name = f"{name}-{number}" if any(entry["name"] == name for entry in entries) else name
        kind = "cpt" if one.kind == "cpt" else "chat"
        weight = float(count or 1) if is_counted else 1.0
        entries.append({"name": name, "path": one.path, "type": kind, "weight": weight})
    values |= {"datasets": entries, "cpt.weights_of": "examples"}
    shares = "shares by their rows" if is_counted else "equal shares, as the sizes are not known here: set weight"
    shares = "the shares that it names" if all(one.weight for one in sets) else shares
    why = f"several sets are mixed as full blocks ({shares}); for rows put them into one file, with task_mode sft"
    why += "" if is_alike else "; their columns differ: give them the same names"
    why += (
        "" if len({one.template for one in sets}) == 1 else "; their prompts differ, and data.template is one for all"
    )
    return values, why, True


def count_rows(path: str) -> int:
    """Count the rows of a local JSON file; 0 where there is none."""
    file = find_file(Path(path))
    if file is None or file.suffix not in (".json", ".jsonl"):
        return 0
    try:
        with file.open("rb") as stream:
            if stream.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                stream.seek(0)
                return len([row for row in json.load(stream) if row])
            stream.seek(0)
            lines = [line.strip()[:1] for line in stream if line.strip()]
    except (OSError, ValueError, RecursionError):
        return 0
    is_document = file.suffix == ".json" and (
        len(lines) < 2 or set(lines) != {b"{"}
    )  # an object, whose rows lie inside
    return 0 if is_document else len(lines)


def read_axolotl(key: str, foreign: Foreign) -> list[DataSet]:
    """Data sets as axolotl writes them: a list of `path`, `type`, `field_messages` and others."""
    found = foreign.get(key)
    entries = found if isinstance(found, list) else [found] if isinstance(found, dict) else []
    if isinstance(found, str) and key == "pretraining_dataset":
        answer = Answer("translated", "data.train_path", "documents, all of whose tokens are learned, in full blocks")
        return [DataSet(found, kind="cpt", answers={key: answer})]
    return [
        _axolotl_set(entry, f"{key}.{number}" if isinstance(found, list) else key, foreign)
        for number, entry in enumerate(entries)
        if isinstance(entry, dict)
    ]


def _axolotl_set(entry: Mapping[str, Any], prefix: str, foreign: Foreign) -> DataSet:
    files, path = entry.get("data_files"), str(entry.get("path") or "")
    named = [f"data_files.{name}" for name in files] if isinstance(files, dict) else ["data_files"]
    files = list(files.values()) if isinstance(files, dict) else files if isinstance(files, list) else [files]
    files = [str(file) for file in files if file]
    one, answers = DataSet(path), {}
    if files and path in ("json", "csv", "parquet", "text", "arrow"):
        one.path = str(files[0])
        answers[f"{prefix}.path"] = Answer("no_effect", None, "the kind of a file is told by its name")
        kept = len(files) == 1
        verdict: Verdict = "translated" if kept else "not_offered"
        why = "" if kept else "the first file only"
        answers |= {f"{prefix}.{name}": Answer(verdict, "data.train_path", why) for name in named}
    else:
        answers[f"{prefix}.path"] = Answer("translated", "data.train_path")
        if files:
            why = "some files of a data set cannot be chosen: all rows of its split train are read"
            answers |= {f"{prefix}.{name}": Answer("not_offered", None, why) for name in named}
    if re.search(r"[*?]|://", one.path):
        why = "is no file, folder or name of the hub: copy the files here, and name their folder"
        where = f"{prefix}.{named[0]}" if one.path != path else f"{prefix}.path"
        answers[where] = Answer("not_offered", "data.train_path", why)
    if foreign.is_on("rl=dpo,ipo,kto,orpo,simpo") or foreign.is_on("reward_model"):
        one.answers = answers | _axolotl_pairs(one, entry, prefix, foreign)
        return one
    kind = entry.get("type") or ("pretrain" if prefix.startswith("pretraining_dataset") else None)
    if is_off(foreign.kit, "datasets.type", kind) and prefix.startswith("datasets"):
        why = "without a type its rows are token ids already, which are not read: give the texts"
        answers[f"{prefix}.path"] = Answer("not_offered", "data.train_path", why)
    answers |= _axolotl_type(one, kind, prefix, foreign)
    turns, mapping, roles = (entry.get(name) for name in ("field_messages", "message_property_mappings", "roles"))
    turns = None if turns is None else str(turns)
    mapping, roles = (value if isinstance(value, dict) else {} for value in (mapping, roles))
    role = mapping.get("role") or entry.get("message_field_role")
    content = mapping.get("content") or entry.get("message_field_content")
    is_sharegpt = role == "from" or content == "value" or (turns in SHAREGPT and one.format != "messages")
    if str(kind).startswith("chat_template") and (turns or role):
        one.format = "sharegpt" if is_sharegpt else "messages"
        name = "conversations" if is_sharegpt else "messages"
        if turns and turns != name and turns not in (SHAREGPT if is_sharegpt else ()):
            one.columns[name] = turns
    to = "data.columns" if one.columns else "data.format"
    keeps = role in (None, "from", "role") and content in (None, "value", "content")
    why = "" if keeps else "only from and value, or role and content, are read: rename the keys in the rows"
    for name in ("field_messages", *(f"message_property_mappings.{inner}" for inner in mapping),
                 "message_field_role", "message_field_content"):  # fmt: skip
        last = name.rpartition(".")[2]
        is_plain = last in ("field_messages", "role", "content", "message_field_role", "message_field_content")
        verdict = "translated" if last == "field_messages" or (keeps and is_plain) else "not_offered"
        reason = why if is_plain else "this key of a message is found by its own name, or not read"
        answers[f"{prefix}.{name}"] = Answer(verdict, to if verdict == "translated" else None, reason)
    for role_name, names in roles.items():
        is_known = all(name in ROLES for name in (names if isinstance(names, list) else [names]))
        answers[f"{prefix}.roles.{role_name}"] = (
            Answer("no_effect", None, "these roles are known here")
            if is_known
            else Answer("not_offered", None, f"roles are {', '.join(ROLES[:6])} and the like: rename them in the rows")
        )
    one.answers = answers
    return one


PAIR_FIELDS = ("prompt", "chosen", "rejected", "completion", "label", "messages", "system")


def _axolotl_pairs(one: DataSet, entry: Mapping[str, Any], prefix: str, foreign: Foreign) -> dict[str, Answer]:
    """The answers for a set of pairs, or of answers with a verdict; its columns are written where they have other
    names."""
    kind, answers = entry.get("type"), {}
    one.kind = "pairs"
    fields = {f"{prefix}.{name}": (name, entry[name]) for name in entry if name.startswith("field_")}
    if isinstance(kind, dict):
        fields |= {f"{prefix}.type.{name}": (name, value) for name, value in kind.items()}
    else:
        text, known = str(kind or ""), foreign.kit.rows["pairs"]
        form, _, name = text.rpartition(".")
        columns = known.get(text, known.get(name))
        if columns is None:
            why = "how these rows are laid out is not known here: name their columns in data.columns"
            answers[f"{prefix}.type"] = Answer("not_offered", None, why)
        else:
            kto = foreign.is_on("rl=kto")
            one.columns |= {key: column for key, column in columns.items() if not kto or key == "prompt"}
            prompted = "" if form in ("chatml", "chat_template", "bradley_terry", "passthrough") else form
            one.template = "chatml" if form == "chatml" else ""
            why = (
                f"axolotl writes the prompt of {prompted} around these rows: here the chat template does"
                if prompted
                else ""
            )
            became = "data.columns" if one.columns else "data.template" if one.template else None
            verdict: Verdict = "translated" if became or prompted else "no_effect"
            why = why or ("" if became else "the columns have their own names")
            answers[f"{prefix}.type"] = Answer(verdict, became, why, differs=bool(prompted))
    for at, (name, value) in fields.items():
        field_name = name.removeprefix("field_")
        if name.startswith("field_") and field_name in PAIR_FIELDS and value:
            one.columns |= {field_name: str(value)} if value != field_name else {}
            answers[at] = Answer("translated", "data.columns")
        elif name.endswith("_format") and value in (None, "", f"{{{name.removesuffix('_format')}}}"):
            answers[at] = Answer("no_effect", None, "the text as it is, as here")
        else:
            why = "a prompt of your own is a Jinja file here: name it with data.template"
            answers[at] = Answer("not_offered", None, why)
    for name in ("message_property_mappings", "roles"):
        inner = entry.get(name)
        for key in inner if isinstance(inner, dict) else ():
            answers[f"{prefix}.{name}.{key}"] = Answer(
                "no_effect", None, "roles and their keys are found by their names"
            )
    return answers


def _axolotl_type(one: DataSet, kind: Any, prefix: str, foreign: Foreign) -> dict[str, Answer]:
    """The answers for the type of a set, which may be a mapping of fields; the set is changed by it."""
    types, at = foreign.kit.rows["types"], f"{prefix}.type"
    if isinstance(kind, dict):
        one.format, answers = "alpaca", {}
        for name in kind:
            field_name = name.removeprefix("field_")
            if not kind[name]:
                answers[f"{at}.{name}"] = Answer("no_effect", None, "empty")
            elif name.startswith("field_") and field_name in ("instruction", "input", "output", "system"):
                one.columns |= {field_name: str(kind[name])} if kind[name] != field_name else {}
                answers[f"{at}.{name}"] = Answer("translated", "data.columns")
            elif name == "system_prompt":
                answers[f"{at}.{name}"] = write("data.system", str(kind[name]))
            else:
                why = "a prompt of your own is a Jinja file here: name it with data.template"
                answers[f"{at}.{name}"] = Answer("not_offered", "data.template", why)
        return answers
    if is_off(foreign.kit, "datasets.type", kind):
        return {at: Answer("not_offered", None, "rows that are token ids already are not read: give the texts")}
    text = str(kind)
    rule = next((types[name] for name in (text, *re.split(r"[:.]", text)[:1]) if name in types), None)
    if rule is None or isinstance(rule, str):
        why = rule or "code of that kit makes these rows: write them out as messages, or prompt and completion"
        return {at: Answer("not_offered", "data.format", why)}
    one.kind, one.format = rule.get("kind", "chat"), rule.get("format", "auto")
    one.columns |= rule.get("columns", {})
    if rule.get("template"):
        one.template = find_shipped(ALPACA) if rule["template"] == "alpaca" else rule["template"]
    answers = {}
    if one.kind == "cpt":
        entry = foreign.get(prefix.partition(".")[0])
        number = prefix.partition(".")[2]
        row = entry[int(number)] if number else entry
        column = row.get("field") or row.get("text_column")
        for name in ("field", "text_column"):
            answers[f"{prefix}.{name}"] = Answer("translated", "data.columns")
        if column and column != "text":
            one.columns["text"] = str(column)
    became = "task_mode" if one.kind == "cpt" else "data.format"
    answers[at] = Answer("translated", became, rule.get("why", ""), differs=bool(rule.get("differs")))
    return answers


def read_llamafactory(key: str, foreign: Foreign) -> list[DataSet]:
    """Data sets as LLaMA-Factory names them: names with commas, which dataset_info.json explains."""
    value = foreign.get(key)
    names = value if isinstance(value, list) else str(value or "").split(",")
    names = [str(name).strip() for name in names if str(name).strip()]
    folder = str(foreign.get("dataset_dir") or "data")
    places = [foreign.folder / folder, Path(folder), foreign.folder, foreign.folder / "data"]
    file = find_file(*(place / "dataset_info.json" for place in places))
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except ValueError:
        known = {}
    known = known if isinstance(known, dict) else {}
    root = file.parent if file else Path(folder)
    sets = [_llamafactory_set(name, known, root, foreign) for name in names]
    if str(foreign.get("mix_strategy")).startswith("interleave"):  # else its shares are not read
        shares = [as_number(share.strip()) for share in str(foreign.get("interleave_probs") or "").split(",")]
        is_each = len(shares) == len(sets) and all(isinstance(share, int | float) and share > 0 for share in shares)
        for one, share in zip(sets, shares if is_each else [1] * len(sets), strict=True):
            one.weight = float(share)
    reasons = [answer for one in sets for answer in one.answers.values()]
    whole = next((answer for answer in reasons if answer.refuses), None)
    said = "; ".join(dict.fromkeys(answer.why for answer in reasons if answer.why))
    verdict: Verdict = "not_offered" if any(answer.verdict == "not_offered" for answer in reasons) else "translated"
    answer = whole or Answer(verdict, "data.train_path", said)
    for one in sets:
        one.answers = {key: answer}
    return sets


def _llamafactory_set(name: str, known: Mapping[str, Any], root: Path, foreign: Foreign) -> DataSet:
    rows = foreign.kit.rows
    info = known.get(name) if isinstance(known.get(name), dict) else None
    if info is None and str(foreign.get("dataset_dir")).upper() == "ONLINE":
        info = {"hf_hub_url": name}
    if info is None:
        if name in rows.get("images", "").split():
            answer = Answer("not_offered", "task_mode", rows["why_images"], {"task_mode": "multimodal"}, True)
            return DataSet(name, answers={name: answer})
        for entry in rows.get("shipped", ()) if not str(foreign.get("dataset_dir")).startswith("REMOTE:") else ():
            if place := entry["sets"].get(name):
                info = {**entry, ("file_name" if "/" not in place and "." in place else "hf_hub_url"): place}
    if info is None:
        why = f"what {name} is stands in dataset_info.json, which is not here: write the path of its file"
        file = name if Path(name).suffix in (".json", ".jsonl", ".csv", ".parquet", ".txt") else f"{name}.json"
        path = find_file(root / file, foreign.folder / file) or root / file
        return DataSet(str(path), answers={name: Answer("not_offered", "data.train_path", why)})
    columns, tags = (info[key] if isinstance(info.get(key), dict) else {} for key in ("columns", "tags"))
    if {"images", "videos", "audios"} & set(columns):
        answer = Answer("not_offered", "task_mode", rows["why_images"], {"task_mode": "multimodal"}, True)
        return DataSet(name, answers={name: answer})
    local, hub = info.get("file_name"), info.get("hf_hub_url")
    one = DataSet(str(root / local) if local else str(hub or info.get("ms_hub_url") or name))
    notes = []
    if info.get("ranking") or {"chosen", "rejected", "kto_tag"} & set(columns):
        ours = {"query": "input", "messages": "conversations", "kto_tag": "label", "response": "completion"}
        ours["prompt"] = "instruction" if "query" in columns else "prompt"
        one.kind = "pairs"
        one.columns = {ours.get(key, key): column for key, column in columns.items() if ours.get(key, key) != column}
    elif foreign.get("stage") == "pt":
        one.kind = "cpt"
        column = columns.get("prompt")
        one.columns = {"text": column} if column and column != "text" else {}
    elif info.get("formatting", "alpaca") == "alpaca":
        one.format = "alpaca"
        ours = {"prompt": "instruction", "query": "input", "response": "output", "history": "history",
                "system": "system", "tools": "tools"}  # fmt: skip
        one.columns = {ours[name]: column for name, column in columns.items()
                       if name in ours and column and column != ours[name]}  # fmt: skip
    else:
        is_openai = tags.get("role_tag") == "role" or info.get("formatting") == "openai"
        one.format = "messages" if is_openai else "sharegpt"
        turns = columns.get("messages", "conversations")
        name_here = "messages" if is_openai else "conversations"
        if turns != name_here and (is_openai or turns not in SHAREGPT):
            one.columns[name_here] = turns
        one.columns |= {key: columns[key] for key in ("system", "tools") if columns.get(key) and columns[key] != key}
    if local is None and hub is None:
        notes.append("it is on another hub or made by a script: write the path of its file")
    for part, default in (("subset", None), ("split", "train"), ("folder", None), ("num_samples", None)):
        if info.get(part) not in (None, default):
            notes.append(f"its {part} {info[part]} cannot be chosen here: the default part is read whole")
    verdict: Verdict = "not_offered" if notes else "translated"
    if local and name not in known:
        notes.append(f"{local} ships with LLaMA-Factory, in its folder data: write the path to it")
    one.answers = {name: Answer(verdict, "data.train_path", "; ".join(notes))}
    return one


def read_names(key: str, foreign: Foreign) -> list[DataSet]:
    """Names or paths, as a list or a text with commas; `NAME:SUBSET#ROWS` as ms-swift writes them."""
    value = foreign.get(key)
    names = value if isinstance(value, list) else str(value or "").split(",")
    sets = []
    for name in (str(name).strip() for name in names if str(name).strip()):
        path, _, rows = name.partition("#")
        hub, _, subset = path.removeprefix("HF::").removeprefix("MS::").partition(":")
        notes = [f"{rows} rows cannot be chosen: all are read"] if rows else []
        notes += [f"the subset {subset} cannot be chosen: the default one is read"] if subset else []
        answer = Answer("not_offered" if notes else "translated", "data.train_path", "; ".join(notes))
        sets.append(DataSet(hub, answers={key: answer}))
    said = "; ".join(dict.fromkeys(one.answers[key].why for one in sets if one.answers[key].why))
    for one in sets:
        one.answers = {key: Answer("not_offered" if said else "translated", "data.train_path", said)}
    return sets


def read_trl(key: str, foreign: Foreign) -> list[DataSet]:
    """Data sets as TRL's scripts name them: one `dataset_name`, or a mixture as a list, or as name: share."""
    for place in ("datasets", "dataset_mixture.datasets"):
        if isinstance(entries := foreign.get(place), list) and entries:
            return [
                _trl_set(entry, f"{place}.{number}") for number, entry in enumerate(entries) if isinstance(entry, dict)
            ]
    if isinstance(shares := foreign.get("dataset_mixer"), dict) and shares:
        chosen = [str(name) for name in foreign.get("dataset_splits") or () if str(name) not in ("train", "test")]
        split = _part(" and ".join(chosen) or None, "train")
        return [
            DataSet(name, answers={f"dataset_mixer.{name}": _whole(share), "dataset_splits": split})
            for name, share in shares.items()
        ]
    answers = {"dataset_name": Answer("translated", "data.train_path")}
    for name, usual in (("dataset_config", "default"), ("dataset_train_split", "train"), ("dataset_split", "train")):
        answers[name] = _part(foreign.get(name), usual)
    return [DataSet(str(foreign.get("dataset_name") or ""), answers=answers)]


def _trl_set(entry: Mapping[str, Any], prefix: str) -> DataSet:
    """One entry of a mixture, with `path` or `id`, and perhaps `name`, `split`, `columns`, `data_files` and a share."""
    files, columns = entry.get("data_files"), entry.get("columns") or []
    files, name = [files] if isinstance(files, str) else files, str(entry.get("path") or entry.get("id") or "")
    is_file = isinstance(files, list) and len(files) == 1
    one, answers = DataSet(str(files[0]) if is_file and files else name), {}
    for inner, value in entry.items():
        at = f"{prefix}.{inner}"
        if inner in ("path", "id"):
            answers[at] = Answer("translated", "data.train_path", "its file is read" if is_file else "")
        elif inner == "data_files" and is_file:
            answers[at] = Answer("translated", "data.train_path")
        elif inner in ("fraction", "weight"):
            answers[at] = _whole(value)
        elif inner == "columns" and isinstance(columns, list) and ("chosen" in columns or "rejected" in columns):
            one.kind = "pairs"
            answers[at] = Answer("no_effect", None, "the columns of a row are found by their names")
        elif inner == "columns":
            answers[at] = Answer("no_effect", None, "the columns of a row are found by their names")
        else:
            answers[at] = _part(value, "train" if inner == "split" else "default")
    one.answers = answers
    return one


def _whole(share: Any) -> Answer:
    """The answer for a share of the rows of a set."""
    if share in (None, 1, 1.0):
        return Answer("translated", "data.train_path", "all rows are read")
    return Answer("not_offered", None, f"a share ({share}) of the rows cannot be chosen: all are read")


def _part(name: Any, usual: str) -> Answer:
    """The answer for a part of a data set."""
    if name in (None, usual):
        return Answer("no_effect", None, "this part is read")
    return Answer("not_offered", None, f"only the {usual} part of a hub's data set is read: write {name} into a file")


READERS: dict[str, Callable[[str, Foreign], list[DataSet]]] = {
    "axolotl": read_axolotl,
    "llamafactory": read_llamafactory,
    "names": read_names,
    "trl": read_trl,
}
