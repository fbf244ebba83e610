"""In what two identities of a run differ."""

from __future__ import annotations

from sftplay.train.fingerprint import weights_changes


def test_checkpoints_of_a_kit_that_did_not_look_at_weights_are_not_refused():
    assert weights_changes({}, {"weights": {"a": "1"}}) == []
    (line,) = weights_changes({"weights": {"a": "1", "b": "2"}}, {"weights": {"a": "1"}})
    assert line == "b has changed (content 2 then, none now)"
