"""The text of one Word paragraph: its runs, fields, notes and formulas in one string, and its text boxes apart."""

from __future__ import annotations

from typing import Any, Protocol

from sftplay.data.ingest.extract.office.archive import attribute, local
from sftplay.data.ingest.extract.office.word_styles import W

SKIPPED = (
    "pPr",
    "rPr",
    "del",
    "moveFrom",
    "instrText",
    "delText",
    "Fallback",
    "commentReference",
    "annotationRef",
    "rt",
)
SIGNS = {"tab": "\t", "cr": "\n", "noBreakHyphen": "-", "softHyphen": ""}
SUPERSCRIPT = "superscript"


class Cites(Protocol):
    """Numbers the notes of a document."""

    def cite(self, kind: str, note_id: str) -> str: ...


def runs_of(paragraph: Any, notes: Cites) -> tuple[str, list[Any]]:
    """A paragraph's text, with line breaks as they stand in it, and the contents of its text boxes."""
    boxes: list[Any] = []
    return "".join(_texts(paragraph, notes, boxes=boxes)), boxes


def _texts(element: Any, notes: Cites, *, boxes: list[Any]) -> list[str]:
    """The texts below an element, in order."""
    out: list[str] = []
    for child in element:
        name = local(child)
        if name == "t":
            out.append(child.text or "")
        elif name in SIGNS:
            out.append(SIGNS[name])
        elif name == "br":
            out.append("\n" if attribute(child, "type") in (None, "textWrapping") else " ")
        elif name in ("footnoteReference", "endnoteReference"):
            out.append(notes.cite(name.removesuffix("Reference"), attribute(child, "id") or ""))
        elif name == "txbxContent":
            boxes.append(child)
        elif name == "oMath":
            out.append(f"${formula(child)}$")
        elif name == "r":
            out += _run(child, notes, boxes=boxes)
        elif name and name not in SKIPPED:
            out += _texts(child, notes, boxes=boxes)
    return out


def _run(run: Any, notes: Cites, *, boxes: list[Any]) -> list[str]:
    """The texts of a run: none where it is hidden, a power marked as one."""
    properties = run.find(f"{W}rPr")
    if properties is not None and properties.find(f"{W}vanish") is not None:
        return []
    texts = _texts(run, notes, boxes=boxes)
    raised = properties is not None and attribute(properties.find(f"{W}vertAlign"), "val") == SUPERSCRIPT
    digits = "".join(texts).strip()
    return [f"^{digits}"] if raised and digits.lstrip("-+−").isdecimal() else texts


def formula(element: Any) -> str:
    """A formula in one line, with the structures that change its meaning: fractions, powers, indices, roots."""
    out = ""
    for child in element:
        name = local(child)
        if name == "t":
            out += child.text or ""
        elif name == "f":
            out += f"({_part(child, 'num')})/({_part(child, 'den')})"
        elif name in ("sSup", "sSub", "sSubSup"):
            out += _part(child, "e")
            out += f"_{{{_part(child, 'sub')}}}" if name != "sSup" else ""
            out += f"^{{{_part(child, 'sup')}}}" if name != "sSub" else ""
        elif name == "rad":
            out += f"sqrt({_part(child, 'e')})"
        elif name == "d":
            out += f"({_part(child, 'e')})"
        elif name and not name.endswith("Pr"):
            out += formula(child)
    return out


def _part(element: Any, name: str) -> str:
    """The formula in one part of a structure."""
    return "".join(formula(child) for child in element if local(child) == name)
