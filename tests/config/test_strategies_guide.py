"""Every YAML block of the guide on strategies is accepted or answered, and docs/guides.md has each of its blocks."""

import re
from pathlib import Path

import pytest

from sftplay.config.cluster import ClusterConfig
from sftplay.config.load import load_config
from sftplay.config.other_kits import read_foreign_keys
from sftplay.errors import ConfigErrors

ROOT = Path(__file__).parents[2]
GUIDE = ROOT.parent / "shared/guides/rl-distributed-strategies.md"

needs_guide = pytest.mark.skipif(not GUIDE.exists(), reason="needs the guide on strategies in ../shared/guides")


def rows(title: str) -> list[str]:
    """The first columns of a table."""
    document = (ROOT / "docs/guides.md").read_text(encoding="utf-8")
    text = re.search(rf"^## {title}\n(.*?)(?=^#|\Z)", document, re.M | re.S)[1]
    return [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]


def blocks(language: str) -> list[tuple[str, str]]:
    """Heading above, and text."""
    found, heading = [], ""
    for match in re.finditer(r"^##+ ([^\n]*)$|^```(\w+)\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.M | re.S):
        heading = match[1] or heading
        if match[2] == language:
            found.append((heading, match[3]))
    return found


@pytest.mark.contract
@needs_guide
def test_every_key_of_the_guides_yaml_is_accepted_or_refused_with_what_to_do_here(tmp_path):
    listed = set(re.findall(r"`([\w.]+)`", " ".join(rows("Keys of its YAML"))))
    assert len(blocks("yaml")) == 8
    for number, (_, text) in enumerate(blocks("yaml")):
        path = tmp_path / f"block{number}.yaml"
        path.write_text(text)
        required = [] if "\nmodel:" in text else ["model.name=builtin:tiny"]
        with pytest.raises(ConfigErrors) as caught:
            load_config(path, [*required, "data.train_path=rows.jsonl"])
        problems = {problem.where.rpartition(" ")[2]: problem.fix for problem in caught.value.problems}
        assert set(problems) <= listed
        assert all(re.search(r"write |make |did you mean|remove", fix) for fix in problems.values())


def test_answers_are_for_keys_that_are_none_of_ours():
    assert not set(read_foreign_keys().cluster) & set(ClusterConfig.model_fields)
