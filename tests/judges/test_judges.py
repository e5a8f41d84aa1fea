import json
import math

import pytest
import torch
from answered import predicted
from tiny_world import EVAL_PROMPTS, fedlight, table, write_rows

from fedlight.datamodules.preferences.completions import CompletionPairDataModule
from fedlight.datamodules.preferences.labelling import form_pairs, majority
from fedlight.datamodules.rows.rows import load_rows
from fedlight.judges import OracleJudge, SelectorJudge
from fedlight.modules.selector import SelectorModule
from fedlight.toy import rows
from fedlight.toy.oracle import Oracle

VOTES = rows("votes", num_clients=3)[:24]
FIELDS = [{"prompt": row["prompt"]} for row in VOTES]
OURS, THEIRS = ([row[name] for row in VOTES] for name in ("response_a", "response_b"))


def adapters(model, folder, number):
    """A selector whose adapters differ, saved."""
    module = SelectorModule(model, num_adapters=number)
    module.configure_model()
    stream = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in sorted(module.state_dict().items()):
            if "lora_B" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=stream))
    module.save_adapter(folder)
    return str(folder)


@pytest.fixture(scope="module", params=[1, 3], ids=["one", "three"])
def adapter(request, tiny_model, tmp_path_factory):
    return adapters(tiny_model, tmp_path_factory.mktemp("selector") / "adapter", request.param)


@pytest.mark.parametrize("group", [None, "terse"])
def test_the_oracle_prefers_the_higher_utility(group):
    oracle = Oracle(seed=2, opposition=1.0)
    utilities = [
        [oracle.utility(own["prompt"], answer, group) for answer in answers]
        for own, *answers in zip(FIELDS, OURS, THEIRS, strict=True)
    ]
    expected = [0.5 if a == b else float(a > b) for a, b in utilities]
    assert OracleJudge(seed=2, opposition=1.0, group=group).verdicts(FIELDS, OURS, THEIRS) == expected
    assert {0.0, 1.0} <= set(expected)


def test_groups_that_contradict_each_other_judge_differently():
    judges = (OracleJudge(opposition=1.0, group=group) for group in ("warm", "terse"))
    warm, terse = (judge.verdicts(FIELDS, OURS, THEIRS) for judge in judges)
    assert warm != terse
    with pytest.raises(ValueError, match="group='nobody' has no clients"):
        OracleJudge(group="nobody")


def by_the_recipe(model, adapter, orders, tmp_path):
    """What ``votes.yaml`` and the majority say, in the form of scores."""
    pairs = [{"fields": f, "completions": [a, b]} for f, a, b in zip(FIELDS, OURS, THEIRS, strict=True)]
    file = write_rows(tmp_path / "pairs.jsonl", pairs)
    data = CompletionPairDataModule(file, orders=orders, tokenizer=model, max_tokens=128)
    found, _ = form_pairs(load_rows(file), file)
    assert len(found) == len(pairs)
    votes = predicted(SelectorModule(model, adapter=adapter), data, len(pairs), orders)
    return [{0: 1.0, 1: 0.0, -1: 0.5}[winner] for winner in majority(votes).tolist()]


@pytest.mark.parametrize("orders", ["one", "both"])
def test_the_selector_says_what_the_recipe_makes_of_its_votes(adapter, orders, tiny_model, tmp_path):
    judge = SelectorJudge(adapter, model=tiny_model, orders=orders, batch_size=7)
    found = judge.verdicts(FIELDS, OURS, THEIRS)
    assert found == by_the_recipe(tiny_model, adapter, orders, tmp_path)
    assert {0.0, 1.0} <= set(found)
    if orders == "both":  # who is called ours does not matter
        assert judge.verdicts(FIELDS, THEIRS, OURS) == [1 - score for score in found]


def test_equal_answers_are_not_read_and_the_model_is_loaded_once(adapter, tiny_model):
    judge = SelectorJudge(adapter, model=tiny_model)
    assert judge.verdicts(FIELDS[:3], ["", "same", " x"], [" ", "same", "x "]) == [0.5] * 3
    assert judge._selector.network is None
    first = judge.verdicts(FIELDS[:4], OURS[:4], THEIRS[:4])
    assert {type(score) for score in first} == {float}
    network = judge._selector.network
    assert judge.verdicts(FIELDS[:4], OURS[:4], THEIRS[:4]) == first
    assert judge._selector.network is network
    assert not any(part.training for part in judge._selector.modules())


def test_a_selector_that_has_diverged_is_refused(adapter, tiny_model):
    judge = SelectorJudge(adapter, model=tiny_model)
    judge.verdicts(FIELDS[:1], OURS[:1], THEIRS[:1])
    for name, weight in judge._selector.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="gives no numbers for a pair: train it anew at a lower rate"):
        judge.verdicts(FIELDS[:1], OURS[:1], THEIRS[:1])


def test_an_empty_answer_is_read_where_the_other_is_none(adapter, tiny_model):
    scores = SelectorJudge(adapter, model=tiny_model, orders="one").verdicts(
        FIELDS, [""] * len(FIELDS), THEIRS
    )
    assert set(scores) <= {0.0, 1.0}


def test_too_long_pairs_are_unread_and_said_once(adapter, tiny_model, caplog):
    long = ["anna bakes bread . " * 40, *OURS[1:4]]
    judge = SelectorJudge(adapter, model=tiny_model)
    whole = judge.verdicts(FIELDS[:4], OURS[:4], THEIRS[:4])
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        assert repr(judge.verdicts(FIELDS[:4], long, THEIRS[:4])) == repr([math.nan, *whole[1:]])
        judge.verdicts(FIELDS[:4], long, THEIRS[:4])
    assert [record.message for record in caplog.records] == [
        "SelectorJudge: 1 of 4 pairs are longer than max_tokens=128 and are not read"
    ]
    assert judge.too_long == 2
    with pytest.raises(ValueError, match="batch_size=-1 must be at least 1"):
        SelectorJudge(adapter, model=tiny_model, batch_size=-1)
    judge = SelectorJudge(adapter, model=tiny_model, max_tokens=20)  # all are
    assert all(map(math.isnan, judge.verdicts(FIELDS[:2], OURS[:2], THEIRS[:2])))


def test_cut_inputs_are_said_once_and_counted_or_left_out(adapter, tiny_model, caplog):
    fields = [{"prompt": "anna bakes bread . " * 40}, *FIELDS[1:4]]
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        judge = SelectorJudge(adapter, model=tiny_model)
        for _ in range(2):
            assert 0.5 not in judge.verdicts(fields, OURS[:4], THEIRS[:4])
    assert [record.message for record in caplog.records] == [
        "SelectorJudge: 2 of 8 inputs are longer than max_tokens=128 and lose the end of {prompt}"
    ]
    assert (judge.trimmed, judge.too_long) == (4, 0)
    judge = SelectorJudge(adapter, model=tiny_model, trim=None)
    assert math.isnan(judge.verdicts(fields, OURS[:4], THEIRS[:4])[0])
    assert (judge.trimmed, judge.too_long) == (0, 1)


def test_what_is_wrong_is_said_before_a_model_is_loaded(tiny_model, tmp_path, adapter):
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        SelectorJudge(str(tmp_path / "none"))
    for index in range(2):
        adapters(tiny_model, tmp_path / f"adapter{index}", 1)
    with pytest.raises(ValueError, match="an even number of selectors can tie"):
        SelectorJudge(str(tmp_path))
    with pytest.raises(ValueError, match="orders='all' is not one of one, both"):
        SelectorJudge(adapter, orders="all")
    with pytest.raises(ValueError, match=r"no slot \{response_a\}"):
        SelectorJudge(adapter, choice_template="{prompt}:")
    for judge in (SelectorJudge(adapter), OracleJudge()):
        with pytest.raises(ValueError, match=r"reads \{prompt\}, but the prompts have post"):
            judge.verdicts([{"post": "x"}], ["a"], ["a"])


@pytest.mark.parametrize("adapter", [3], indirect=True)
def test_a_config_names_prompts_and_judges(adapter, tiny_model, tmp_path):
    source = {"source": EVAL_PROMPTS, "tokenizer": tiny_model, "max_tokens": 128}
    prompts = {"class_path": "PromptDataModule", "init_args": source}
    options = {"OracleJudge": {"opposition": 1.0}, "SelectorJudge": {"adapter": adapter, "model": tiny_model}}
    judges = {name: {"class_path": name, "init_args": given} for name, given in options.items()}
    settings = {"prompts": prompts, "judges": judges, "max_new_tokens": 6}
    callback, config = {"class_path": "WinRate", "init_args": settings}, tmp_path / "win.yaml"
    config.write_text(json.dumps({"trainer": {"callbacks+": [callback]}}))
    outcome = fedlight(
        *("fit", "--config=dpo.yaml", f"--config={config}", "--trainer.accelerator=cpu", "--model.lr=0.05"),
        *(f"--trainer.default_root_dir={tmp_path / 'run'}", "--trainer.max_epochs=1"),
        *(f"--model.model={tiny_model}", f"--data.source={write_rows(tmp_path / 'pairs.jsonl', VOTES)}"),
    )
    assert outcome.code == 0, outcome.err
    rows = table(tmp_path / "run/metrics/version_0/metrics.csv")
    for name in options:
        start, end = (float(row[f"win_rate/{name}"]) for row in rows if row[f"win_rate/{name}"])
        assert start == 0.5
        assert 0 <= end <= 1
