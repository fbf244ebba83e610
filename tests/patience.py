"""Limits that no busy machine reaches, for programs in boxes that are asked what they do and not how fast."""

from __future__ import annotations

from processes import HANG_S

from sftplay.sandbox.boxes.job import Limits

PATIENT = Limits(timeout_s=HANG_S, test_timeout_s=HANG_S)

PATIENT_BOX = {"timeout": HANG_S, "test_timeout": HANG_S}
"""The same as a config's section `sandbox`."""
