"""Texts of a domain: sentences whose words a small tokenizer splits into many pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path

SPLIT_WORDS = """
aileron ailerons rudder elevator fuselage empennage longeron bulkhead turnbuckle fairlead monocoque nacelle cowling
hydraulics accumulator actuator bellcrank pushrod sideslip camber dihedral washout stagnation airfoil leading-edge
spoiler slat flaperon trimtab pitot static-port altimeter gyroscope magneto carburetor crankshaft camshaft manifold
turbocharger intercooler propeller feathering governor spinner gearbox undercarriage oleo torque-link downlock wheelwell
deicer anti-ice pneumatics bleed-air pressurization outflow cabin transponder squelch
"""
WHOLE_WORDS = "the old light walks under green hills and asks why seven quiet boats carry salt over stone"
TERMS, PLAIN = SPLIT_WORDS.split(), WHOLE_WORDS.split()


def domain_texts(count: int, *, seed: int) -> list[str]:
    """Sentences of plain words and terms, with a fixed sequence of three words now and then."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        words = [rng.choice(TERMS if rng.random() < 0.4 else PLAIN) for _ in range(18)]
        if rng.random() < 0.5:
            words[4:4] = ["angle", "of", "attack"]
        texts.append("The " + " ".join(words) + ".")
    return texts


def write_terms(path: Path, count: int = 50) -> Path:
    path.write_text("\n".join(["angle of attack", *TERMS][:count]))
    return path


def write_texts(path: Path, count: int, *, seed: int) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in domain_texts(count, seed=seed)))
    return path
