"""A trained score as a reward: the values of plain transformers, a process of its own, and what it cannot score."""

from __future__ import annotations

import json

import pytest
import torch
from processes import HANG_S
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from sftplay.config.data import DataConfig
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.reward.model_reward import find_score_model, open_scorer
from sftplay.reward.reward_set import RewardSet
from sftplay.reward.table import reward_problems
from sftplay.tasks.reward_model.scores import to_score_model


@pytest.fixture(scope="module")
def scored(tiny_llama, tmp_path_factory):
    """The folder of a random score model, with scores that are far apart."""
    folder = tmp_path_factory.mktemp("scored") / "model"
    model = to_score_model(AutoModelForCausalLM.from_pretrained(tiny_llama), pad_token_id=0, seed=0)
    with torch.no_grad():
        model.score.weight.mul_(50)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


def config(path, **reward):
    entry = {"name": "helpful", "use": "model", "path": str(path), "deadline": HANG_S, **reward}
    return RunConfig.model_validate(
        {"model": {"name": "builtin:tiny"}, "task_mode": "grpo", "rewards": [{k: v for k, v in entry.items() if v}]}
    )


def plain_scores(folder, chats):
    """Each chat alone in plain transformers, by the tokenizer's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        batches = [tokenizer.apply_chat_template(chat, return_dict=True, return_tensors="pt") for chat in chats]
        return [float(model(**batch).logits[0, 0]) for batch in batches]


def chat(*texts):
    roles = ["user", "assistant"] * 3
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def test_values_are_the_scores_of_plain_transformers_for_prompts_and_for_chats(scored):
    completions = ["the river", "", "old boats carry salt over the quiet hills and the river", "why"]
    dialogue = chat("seven", "old", "boats")
    columns = {
        "prompt": ["green light", "and why", None, "stone"],
        "messages": [None, None, dialogue, None],
        "answer": ["x", None, None, "y"],
    }
    chats = [[*chat(text)] if text else dialogue for text in columns["prompt"]]
    expected = plain_scores(scored, [[*turns, chat("", c)[1]] for turns, c in zip(chats, completions, strict=True)])
    with RewardSet(config(scored)) as rewards:
        found = rewards.score(completions, columns).by_name["helpful"]
    assert found.values == pytest.approx(expected, abs=1e-5)
    assert found.reasons == []
    assert max(expected) - min(expected) > 0.5


@pytest.mark.slow
def test_an_adapter_on_its_base_gives_the_scores_of_the_same_merged(scored, tiny_llama, tmp_path):
    from sftplay.config.run import LoraConfig
    from sftplay.model.adapter import add_adapter

    model = to_score_model(AutoModelForCausalLM.from_pretrained(tiny_llama), pad_token_id=0, seed=3)
    adapted = add_adapter(model, LoraConfig(r=2))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad:
                weight.normal_(std=0.5 if "score" in name else 0.1)
    adapted.peft_config["default"].base_model_name_or_path = str(tiny_llama)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("adapter", "merged"):
        tokenizer.save_pretrained(tmp_path / name)
    expected = plain_scores(tmp_path / "merged", [chat("green", "old salt"), chat("light", "why")])
    with RewardSet(config(tmp_path / "adapter")) as rewards:
        found = rewards.score(["old salt", "why"], {"prompt": ["green", "light"]}).by_name["helpful"]
    assert found.values == pytest.approx(expected, abs=1e-5)


def test_a_batch_of_any_size_gives_the_same_scores(scored):
    model = AutoModelForSequenceClassification.from_pretrained(scored).eval()
    rows = [list(range(3, 3 + n)) for n in (5, 1, 17, 9, 2)]
    with torch.no_grad():
        alone = [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in rows]
    scorer = open_scorer(path=str(scored), data=DataConfig(), output_dir="")
    for budget in (1, 20, 10**6):
        scorer.batch_tokens = budget
        assert scorer.score_rows(rows) == pytest.approx(alone, abs=1e-5)


def test_a_batch_for_which_memory_does_not_suffice_is_halved_and_later_calls_begin_with_the_half(scored):
    scorer, sizes = open_scorer(path=str(scored), data=DataConfig(), output_dir=""), []

    def refuse_many(_model, _given, named):
        sizes.append(len(named["input_ids"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    expected = scorer(["salt"], prompt=["green"]).values
    scorer.model.register_forward_pre_hook(refuse_many, with_kwargs=True)
    for tried in ([8, 4, 2, 2, 2, 2], [2, 2, 2, 2]):
        assert scorer(["salt"] * 8, prompt=["green"] * 8).values == pytest.approx(expected * 8, abs=1e-5)
        assert sizes == tried
        sizes.clear()


def test_what_cannot_be_scored_has_no_value_and_a_reason(scored):
    scorer = open_scorer(path=str(scored), data=DataConfig(), output_dir="", max_tokens=40)
    found = scorer(["a", "b", "salt " * 60], prompt=["green", None, "light"], level=[1, 2, 3])
    assert found.values[0] is not None
    assert found.values[1:] == [None, None]
    assert "has no question" in found.reasons[0]
    assert "more than the 40" in found.reasons[1]


def test_a_run_is_found_by_its_folder_and_by_its_name(scored, tmp_path):
    run = tmp_path / "outputs" / "rm"
    run.mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("")
    with pytest.raises(ConfigError, match="no result yet"):
        find_score_model(str(run), "nowhere")
    (run / "model").symlink_to(scored)
    for path, output in ((str(run), "nowhere"), ("rm", str(tmp_path / "outputs")), (str(run / "model"), "nowhere")):
        assert find_score_model(path, output) == run / "model"


def test_what_gives_no_score_is_refused_before_anything_is_opened_and_what_is_needed_is_named(scored, tmp_path):
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    three = tmp_path / "three"
    three.mkdir()
    labels = {str(n): f"LABEL_{n}" for n in range(3)}
    (three / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForSequenceClassification"], "id2label": labels})
    )
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"task_type": "CAUSAL_LM"}))
    for path, said in (
        (tmp_path / "nothing", "neither a folder nor a run"),
        (tmp_path, "neither config.json nor adapter_config.json"),
        (plain, "holds LlamaForCausalLM, which gives no score"),
        (three, "with 3 labels, which gives no score"),
        (adapter, "holds an adapter, which gives no score"),
    ):
        (problem,) = reward_problems(config(path))
        assert said in problem.what
        assert "task_mode: reward_model" in problem.fix
        assert "rewards.0.path" in problem.where
    assert list(reward_problems(config(scored))) == []


@pytest.mark.slow
def test_a_model_that_cannot_be_read_stops_the_run_at_its_start(scored, tmp_path):
    import shutil

    broken = shutil.copytree(scored, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        RewardSet(config(broken))
    assert "rewards.0.path" in caught.value.where


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"use": "model"}, "needs a model to ask"),
        ({"use": "length", "path": "x", "options": {"most": 3}}, "asks no model"),
    ],
)
def test_a_path_belongs_to_the_reward_that_asks_a_model(entry, said, write_config):
    from sftplay.config.load import load_config

    path = write_config(task_mode="grpo", rewards=[{"name": "a", **entry}])
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_options_of_the_model_are_checked(scored):
    (problem,) = reward_problems(config(scored, options={"max_tokens": 0}))
    assert "max_tokens" in problem.what
    (problem,) = reward_problems(config(scored, options={"max_length": 5}))
    assert "no option 'max_length'" in problem.what


def test_a_score_has_no_full_value_that_would_make_an_answer_right(scored):
    from sftplay.evaluate.rewarded import content_rewards

    assert content_rewards(config(scored).rewards) == []
