import lightning
import pytest
import torch
from finished import finished
from tiny_world import make_model, read_lines, write_rows

from fedlight.callbacks.scores.forgetting import measure
from fedlight.devices import hardware
from fedlight.evaluation.bootstrap import bootstrap_interval
from fedlight.modules.sft import SFTModule
from fedlight.recipes import steps
from fedlight.toy.oracle import Oracle

POST = "anna paints walls . ben bakes bread . leo studies birds . ida cooks soup ."
GOOD, BAD = "anna paints walls . ben bakes bread .", "duh leo studies stars ."


def completions(*answers, prompt="p"):
    """Rows as completions.yaml writes them, one prompt each."""
    return [{"fields": {"prompt": f"{prompt}{i}"}, "completions": [*some]} for i, some in enumerate(answers)]


def votes(*log_odds):
    """Rows as votes.yaml writes them with both orders; the log-odds are those of the first answer."""
    return [
        {"index": index, "order": order, "logp_a": (1 - order) * odds, "logp_b": order * odds}
        for index, odds in enumerate(log_odds)
        for order in (0, 1)
    ]


@pytest.fixture
def rows(tmp_path):
    def write(name, content):
        return write_rows(tmp_path / f"{name}.jsonl", content)

    return write


def joined(*files):
    """Votes of several selectors as lists, as votes.yaml writes them for several adapters."""
    return [
        {**first, **{key: [row[key] for row in (first, *others)] for key in ("logp_a", "logp_b")}}
        for first, *others in zip(*files, strict=True)
    ]


def test_labels_are_the_majority_of_selectors_in_one_file_or_several(rows, tmp_path):
    """Three pairs, three selectors: the first is outvoted once, the third finds the last pair's answers equal."""
    source = rows("completions", completions(("x", "y"), ("same", "same"), ("v", "w"), ("t", "u")))
    said = [votes(-2.0, -1.0, 1.0), votes(3.0, -1.0, 1.0), votes(1.0, -4.0, 0.0)]
    apart = [rows(f"s{i}", content) for i, content in enumerate(said)]
    mixed = [rows("first", said[0]), rows("others", joined(*said[1:]))]
    outputs = [tmp_path / f"{name}.jsonl" for name in ("apart", "together", "mixed")]
    done = [
        steps.label_with_selectors(source, files, str(output))
        for files, output in zip((apart, [rows("all", joined(*said))], mixed), outputs, strict=True)
    ]
    told = [(row["response_a"], row["response_b"], row["choice"]) for row in read_lines(outputs[0])]
    assert told == [("x", "y", "a"), ("v", "w", "b"), ("t", "u", "a")]
    assert [(row["votes_a"], row["votes_b"]) for row in read_lines(outputs[0])] == [(2, 1), (0, 3), (2, 0)]
    assert read_lines(outputs[0]) == read_lines(outputs[1]) == read_lines(outputs[2])
    assert done[0] == done[1] == done[2]
    assert (done[0]["pairs"], done[0]["metrics"]) == (3, {"label/pairs": 3, "label/too_long": 0})
    assert "1 pairs of equal or empty completions skipped" in done[0]["report"]
    # With the label: 2/3, 3/3, 2/3 of the pairs. With each other: (2 + 1 + 2)/9.
    assert done[0]["report"].endswith("the label: 0.667, 1.000, 0.667, with another selector: 0.556")


def test_an_even_number_of_selectors_is_refused(rows, tmp_path):
    source = rows("completions", completions(("x", "y")))
    with pytest.raises(ValueError, match="odd"):
        steps.label_with_selectors(source, [rows("s", votes(1.0))] * 2, str(tmp_path / "out.jsonl"))
    three, one = rows("three", joined(*[votes(1.0)] * 3)), rows("one", votes(1.0))
    with pytest.raises(ValueError, match=r"4 selectors vote: .* use an odd number, for example 5"):
        steps.label_with_selectors(source, [three, one], str(tmp_path / "out.jsonl"))


def test_the_oracle_labels_by_what_clients_like(rows, tmp_path):
    content = [{"fields": {"prompt": POST}, "completions": [BAD, GOOD]}]
    output = tmp_path / "pairs.jsonl"
    steps.label_with_oracle(rows("completions", content), seed=0, output=str(output))
    (row,) = read_lines(output)
    better = "ab"[Oracle(0).utility(POST, GOOD) > Oracle(0).utility(POST, BAD)]
    assert (row["prompt"], row["response_a"], row["choice"]) == (POST, BAD, better)
    assert better == "b"  # two facts said rightly against a rude one that is invented


def test_labels_of_perfect_selectors_by_their_majority_and_by_all_votes(rows, tmp_path):
    """In the loud world two thirds like a kind opening a little, and the others strongly dislike it."""
    content = [{"fields": {"prompt": POST}, "completions": [GOOD, "kindly " + GOOD]}]
    world = {"opposition": 1.0, "tastes": "loud", "seed": 0}
    choices = {}
    for rule in ("mean", "pooled", "people", "groups", "warm", "terse"):
        output = tmp_path / f"{rule}.jsonl"
        steps.label_with_oracle(rows("completions", content), output=str(output), rule=rule, **world)
        (row,) = read_lines(output)
        choices[rule] = {"a": "plain", "b": "kind"}[row["choice"]]
    of_all, of_most = ("mean", "pooled", "terse"), ("people", "groups", "warm")
    assert choices == {**dict.fromkeys(of_all, "plain"), **dict.fromkeys(of_most, "kind")}


def test_answers_are_put_side_by_side_and_have_to_differ(rows, tmp_path):
    ours, theirs = rows("ours", completions("ab"[:1], "b")), rows("theirs", completions("a", "c"))
    output = tmp_path / "duel.jsonl"
    assert steps.pair_answers(ours, theirs, str(output)) == {"prompts": 2, "different": 1}
    assert [row["completions"] for row in read_lines(output)] == [["a", "a"], ["b", "c"]]
    same = rows("same", completions("a", "b"))
    with pytest.raises(ValueError, match="answers all 2 prompts as the raw one does; raise dpo_lr or dpo_e"):
        steps.pair_answers(same, same, str(tmp_path / "duel.jsonl"))


@pytest.fixture
def tested(tmp_path):
    """Folders of stages that tested the raw selector and the trained one."""
    accuracies = {"raw": 0.5, "FedBis": 0.75}
    return {name: finished(tmp_path / name, **{"test/accuracy": x}) for name, x in accuracies.items()}


@pytest.fixture
def label(tmp_path):
    """Folder of a stage that labelled 7 pairs and left 2 out as too long."""
    return finished(tmp_path / "label", **{"label/pairs": 7, "label/too_long": 2})


def test_the_selectors_table(rows, tested, label):
    """Four prompts: won, lost, won, and one answered alike, which counts half."""
    duel = rows("duel", completions(("x", "y"), ("x", "y"), ("same", "same"), ("u", "v")))
    table = steps.compare_by_selector(tested, duel, rows("votes", votes(1.0, -2.0, 0.5)), label)
    low, high = bootstrap_interval([1, 0, 1, 0.5])
    assert table["rows"] == [
        {"method": "raw", "selector_accuracy": 0.5, "win_rate_by_selector": 0.5},
        {
            **{"method": "FedBis", "selector_accuracy": 0.75, "win_rate_by_selector": 2.5 / 4},
            **{"win_rate_by_selector_low": low, "win_rate_by_selector_high": high, "unread": 0},
            **{"labelled": 7, "too_long": 2},
        },
    ]


def test_the_selectors_table_goes_by_the_majority_and_counts_pairs_that_are_too_long(rows, tested, label):
    """By two of three won, lost, and once neither: one for it, one against it, one that finds both equal."""
    duel = rows("duel", completions(("x", "y"), ("x", "y"), ("u", "v")))
    for odds, rate in ((-1.0, 0.5), (1.0, 2.5 / 3)):
        said = joined(votes(1.0, -9.0, 1.0), votes(-9.0, odds, -1.0), votes(1.0, 1.0, 0.0))
        table = steps.compare_by_selector(tested, duel, rows("votes", said), label)
        assert table["rows"][1]["win_rate_by_selector"] == rate
    duel = rows("duel", completions(("x", "y"), ("x", "y"), ("u", "v")))
    row = steps.compare_by_selector(tested, duel, rows("votes", votes(1.0, -2.0)), label)["rows"][1]
    assert row["win_rate_by_selector"] == 0.5  # one won and one lost; the third was not read
    assert row["unread"] == 1


def test_the_oracles_table(rows, tmp_path):
    known = [{"method": "raw", "selector_accuracy": 0.5}, {"method": "FedBis", "selector_accuracy": 0.75}]
    results = finished(tmp_path / "results", known)

    def answered(name, *answers):
        return rows(name, [{"fields": {"prompt": POST}, "completions": [answer]} for answer in answers])

    given = {"raw": (BAD, GOOD), "FedBis": (GOOD, GOOD), "oracle": (GOOD, BAD)}
    answers = {name: answered(name, *texts) for name, texts in given.items()}
    table = steps.compare_with_oracle(0, results, answers)["rows"]
    good, bad = (Oracle(0).utility(POST, text) for text in (GOOD, BAD))
    assert [row["method"] for row in table] == [*given]
    assert [row["win_rate_vs_raw"] for row in table] == [0.5, 0.75, 0.5]
    # All answers are to one prompt, of which no interval is known.
    assert not any(name.endswith(("_low", "_high")) for row in table for name in row)
    assert [row["utility"] for row in table] == pytest.approx([(good + bad) / 2, good, (good + bad) / 2])
    assert [row["selector_accuracy"] for row in table[:2]] == [0.5, 0.75]
    assert 0.6 < table[2]["selector_accuracy"] < 1.0


def test_a_merged_model_says_what_base_and_adapter_say(tmp_path):
    model = make_model(tmp_path / "model")
    trained = SFTModule(model, seed=1)
    trained.configure_model()
    for name, weight in trained.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.05)
    trained.save_adapter(tmp_path / "adapter")
    steps.merge_adapter(model, str(tmp_path / "adapter"), str(tmp_path / "merged"))
    prompts = ["POST : anna paints walls", "ben bakes"]

    def said(**arguments):
        module = SFTModule(**arguments)
        return module.generate(prompts, temperature=0, max_new_tokens=8)

    merged = said(model=str(tmp_path / "merged"))
    assert merged == said(model=model, adapter=str(tmp_path / "adapter"))
    assert merged != said(model=model)


def test_what_tuned_models_lost_stands_beside_their_results(tmp_path, tiny_model, monkeypatch):
    """An adapter, a run with a checkpoint alone, and a method that was not run."""
    asked = []
    monkeypatch.setattr(hardware, "choose_device", lambda name: asked.append(name) or torch.device("cpu"))
    module = SFTModule(tiny_model, dtype="fp32", lr=0.5)
    module.configure_model()
    with torch.no_grad():
        for name, weight in module.state_dict().items():
            if "lora_B" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    module.save_adapter(tmp_path / "adapter")
    trainer = lightning.Trainer(max_epochs=0, default_root_dir=tmp_path, logger=False, accelerator="cpu")
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "run/checkpoints/epoch=0.ckpt")
    rows = [{"method": name, "score": place} for place, name in enumerate(("raw", "a", "b", "c"))]
    table = finished(tmp_path / "table", rows)
    trained = {"a": str(tmp_path / "adapter"), "b": str(tmp_path / "run"), "c": str(tmp_path / "none")}
    found = steps.add_forgetting(table, tiny_model, trained, if_run=["c"])["rows"]
    raw, a, b, c = (row.get("perplexity_elsewhere") for row in found)
    assert raw == pytest.approx(measure(module)["forgetting/perplexity_raw"])
    assert a == b == pytest.approx(measure(module)["forgetting/perplexity"])
    assert a != raw
    assert c is None
    assert [row["score"] for row in found] == [0, 1, 2, 3]
    assert asked == ["auto", "auto"]  # on the GPU where there is one
    assert found[0]["knowledge"] == measure(module)["forgetting/knowledge_raw"]
