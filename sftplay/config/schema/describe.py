"""What a key takes, in plain words, from its JSON schema: `a whole number of at least 1, or auto`."""

from __future__ import annotations

from typing import Any


def described(node: dict[str, Any]) -> str:
    """What a JSON schema node accepts, in words."""
    forms = node.get("anyOf", [node])
    words = [word for form in forms if _is_choice(form) for word in choices_of(form)]
    lists = [form for form in forms if form.get("type") == "array"]
    others = [_form(form) for form in forms if not _is_choice(form) and form.get("type") not in ("array", "null")]
    parts = [*others, *([listed(words)] if words else []), *(_list_form(form, words) for form in lists)]
    if accepts(node, "null"):
        parts.append("null")
    return ", or ".join(parts)


def choices_of(node: dict[str, Any]) -> list[str]:
    """The words a JSON schema node accepts, list items included."""
    found = [str(word) for word in [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]]
    for inner in (*node.get("anyOf", ()), *([node["items"]] if "items" in node else ())):
        found += [word for word in choices_of(inner) if word not in found]
    return found


def accepts(node: dict[str, Any], kind: str) -> bool:
    """True if one of the forms a node takes is of that JSON type."""
    return any(form.get("type") == kind for form in node.get("anyOf", [node]))


def _is_choice(node: dict[str, Any]) -> bool:
    return "enum" in node or "const" in node


def _form(node: dict[str, Any]) -> str:
    kind = str(node.get("type"))
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _limits(node)
    if "propertyNames" in node:
        return f"text for any of {listed(node['propertyNames']['enum'])}"
    if "pattern" in node:
        longest = f", of at most {node['maxLength']} characters" if "maxLength" in node else ""
        return f"text that matches {node['pattern']}{longest}"
    return {"boolean": "true or false", "string": "text", "object": "keys with values"}.get(kind, "any value")


def _list_form(node: dict[str, Any], words: list[str]) -> str:
    items = choices_of(node)
    some = "a list of one or more" if node.get("minItems") else "a list of"
    if not items:
        return f"{some} names"
    return "a list of several" if set(items) <= set(words) else f"{some} words out of {listed(items)}"


def _limits(node: dict[str, Any]) -> str:
    limits = [
        f"{word} {_number(node[name])}"
        for name, word in (
            ("minimum", "of at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "of at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in node
    ]
    return " " + " and ".join(limits) if limits else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def listed(words: list[str]) -> str:
    """The words as a sentence lists them: `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
