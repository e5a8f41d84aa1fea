import numpy as np
import pytest
from nested import datamodule
from refusals import refusal
from tiny_world import write_rows

from fedlight.datamodules.preferences import CompletionPairDataModule, PreferenceDataModule, PromptDataModule
from fedlight.datamodules.preferences.format import Format
from fedlight.datamodules.preferences.labelling import agreement, form_pairs, gather, label, majority
from fedlight.datamodules.rows.rows import RowsError
from fedlight.datamodules.text.encoding import Comparison


def test_all_pairs_of_different_completions():
    rows = [
        {"fields": {"post": "p", "title": "t"}, "prompt": "rendered", "completions": ["u", "v", "w", "u"]},
        {"prompt": "q", "completions": ["u", ""]},
    ]
    pairs, skipped = form_pairs(rows, "rows")
    assert [pair.first + pair.second for pair in pairs] == ["uv", "uw", "vw", "vu", "wu"]
    assert skipped == 2
    assert pairs[0].fields == {"post": "p", "title": "t"}
    with pytest.raises(RowsError, match=r"rows, row 1: no list `completions`; columns are: prompt"):
        form_pairs([{"prompt": "q"}], "rows")
    with pytest.raises(RowsError, match=r"neither `fields` nor `prompt`"):
        form_pairs([{"completions": ["u", "v"]}], "rows")
    with pytest.raises(RowsError, match=r"no prompt has two different completions"):
        form_pairs([{"prompt": "q", "completions": ["u", "u"]}], "rows")


def test_both_orders_cancel_a_taste_for_the_first_position():
    # Says A with 0.9 whatever is shown, but for a little more if the second answer is A.
    shown = [
        {"index": 0, "order": 0, "logp_a": np.log(0.9), "logp_b": np.log(0.1)},
        {"index": 0, "order": 1, "logp_a": np.log(0.95), "logp_b": np.log(0.05)},
    ]
    assert majority(gather(shown, 1, "one")).tolist() == [0]
    both = gather(shown, 1, "both")
    assert both[0, 0] == pytest.approx([np.log(0.9 * 0.05) / 2, np.log(0.1 * 0.95) / 2])
    assert majority(both).tolist() == [1]


def test_majority_counts_selectors_not_confidence():
    sure, unsure = [-0.01, -5.0], [-0.8, -0.6]
    assert majority(np.array([[sure], [unsure], [unsure]])).tolist() == [1]
    with refusal(r"2 selectors vote: an even number can tie; use an odd number, for example 3"):
        majority(np.zeros((2, 4, 2)))
    with refusal(r"0 selectors vote"):
        majority(np.zeros((0, 4, 2)))


def test_votes_of_unequally_many_selectors_are_refused():
    rows = [
        {"index": 0, "order": 0, "logp_a": [-1.0, -2.0, -3.0], "logp_b": [-1.0, -2.0, -3.0]},
        {"index": 0, "order": 1, "logp_a": -1.0, "logp_b": -2.0},
    ]
    with pytest.raises(RowsError, match="some rows are of 1 selectors, others of 3"):
        gather(rows, 1)
    assert np.isnan(gather([], 2)).tolist() == [[[True, True], [True, True]]]


def test_agreement_leaves_out_what_has_no_label():
    def of(*margins):
        first = np.array(margins, float)
        return agreement(np.stack([first, np.zeros_like(first)], axis=2))

    # Labelled are the first and the third pair; the second has one vote each, the fourth was not read by all.
    found = of([1, 1, -1, np.nan], [1, -1, 0, 1], [-1, 0, -1, 1])
    assert found.with_majority == [1.0, 0.5, 0.5]
    assert found.pairwise == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    one, nothing = of([1, -1, 0]), of([0], [0], [0])
    assert one.with_majority == [1.0]
    assert np.isnan([one.pairwise, *nothing.with_majority, nothing.pairwise]).all()
    with refusal("2 selectors vote"):
        of([1], [1])


def test_every_labelled_pair_is_kept_whichever_side_won():
    # Public code kept only the pairs won by B.
    pairs = [Comparison({"prompt": f"p{i}"}, "u", "v") for i in range(4)]
    log_probs = np.array([[[-0.1, -2.0], [-2.0, -0.1], [-0.7, -0.7], [np.nan, np.nan]]])
    rows, counts = label(pairs, log_probs)
    assert [(row["prompt"], row["choice"]) for row in rows] == [("p0", "a"), ("p1", "b")]
    assert rows[0]["margin"] == pytest.approx(1.9)
    assert str(counts) == (
        "2 labelled pairs (first answer won 1, second 1); left out: 1 undecided, 1 not read by every selector"
    )


CHOICE, ANSWER = "POST: {prompt} A: {response_a} B: {response_b} CHOICE:", "POST: {prompt} ANSWER:"


@pytest.mark.parametrize("orders", ["one", "both"])
def test_from_prompts_to_pairs_for_dpo(tmp_path, causal, words, orders):
    asked = write_rows(tmp_path / "prompts.jsonl", [{"text": "w0"}, {"text": "w1"}, {"text": "w0"}])
    prompts = PromptDataModule(asked, columns={"prompt": "text"}, template=ANSWER, tokenizer=causal)
    prompts.setup("predict")
    (batch,) = prompts.predict_dataloader()
    assert batch["prompt"] == ["POST: w0 ANSWER:", "POST: w1 ANSWER:"]  # the same prompt is asked once
    assert batch["index"].tolist() == [0, 1]
    lines = [
        {"prompt": prompt, "fields": fields, "completions": ["bad", "good", "long long"]}
        for prompt, fields in zip(batch["prompt"], batch["fields"], strict=True)
    ]
    source = write_rows(tmp_path / "completions.jsonl", lines)
    settings = {"format": Format(choice_template=CHOICE), "tokenizer": causal, "eval_batch_size": 5}
    pairs = CompletionPairDataModule(source, orders=orders, **settings)
    pairs.setup("predict")
    predictions = []
    for batch in pairs.predict_dataloader():
        assert "labels" not in batch
        columns = (batch[name].tolist() for name in ("input_ids", "attention_mask", "index", "order"))
        for ids, mask, index, order in zip(*columns, strict=True):
            text = words(pairs.tokenizer, ids[: sum(mask)])
            likes_a = -0.1 if "A: good" in text else -1.0
            predictions.append({"index": index, "order": order, "logp_a": likes_a, "logp_b": -0.5})
    assert len(predictions) == (6 if orders == "one" else 12)
    formed, _ = form_pairs(lines, source)
    rows, counts = label(formed, gather(predictions, len(formed), orders))
    good = [row for row in rows if "good" in (row["response_a"], row["response_b"])]
    assert len(good) == 4
    assert all(row[f"response_{row['choice']}"] == "good" for row in good)
    assert counts.first_won > 0 < counts.second_won
    # The labelled rows are preference data with the default column names.
    columns = {name: name for name in ("prompt", "response_a", "response_b", "choice")}
    settings = {"view": "dpo", "format": Format(generation_template=ANSWER), "tokenizer": causal}
    labelled = write_rows(tmp_path / "labelled.jsonl", rows)
    dpo = PreferenceDataModule(labelled, columns=columns, batch_size=4, **settings)
    dpo.setup("fit")
    # Read in both orders, "bad" against "long long" is undecided: whichever is shown second is preferred.
    assert dpo.client_sizes() == {"c0": 5 if orders == "one" else 3}
    assert len(dpo.val_set) == 1


@pytest.fixture
def read(tmp_path, causal):
    """Batches of prompts with completions; the form is a choice unless told otherwise."""

    def read(*prompts, **options):
        rows = [{"prompt": prompt, "completions": completions} for prompt, completions in prompts]
        source = write_rows(tmp_path / "completions.jsonl", rows)
        settings = {"choice_template": CHOICE, "tokenizer": causal, "max_tokens": 12, **options}
        module = datamodule(CompletionPairDataModule, source, **settings)
        module.setup("predict")
        return module, list(module.predict_dataloader())

    return read


def test_completions_must_have_the_template_s_slots(read):
    with pytest.raises(RowsError, match=r"the template has a slot {post}; fields has prompt"):
        read(("w0", ["x", "y"]), choice_template=CHOICE.replace("{prompt}", "{post}"))


def test_pairs_too_long_are_left_out_with_their_index_kept(read):
    _, [batch] = read(("w0", ["x", "long " * 20, "y"]))
    assert (batch["index"].tolist(), batch["order"].tolist()) == ([1, 1], [0, 1])


@pytest.mark.parametrize(
    ("trim", "indices", "told"),
    [("auto", [0, 0, 1, 1], "0 too long, 2 inputs cut"), (None, [1, 1], "1 too long, 0 inputs cut")],
)
def test_pairs_with_long_prompts_are_cut_or_left_out_and_counted(trim, indices, told, read, caplog):
    _, [batch] = read(("w0 " * 20, ["x", "y"]), ("w1", ["x", "y"]), trim=trim)
    assert sorted(batch["index"].tolist()) == indices
    assert told in caplog.text


def test_a_reward_model_reads_each_pair_once_as_two_responses(read, words):
    rows = ("w0", ["x", "long long long", "y"]), ("w1", ["u", "long " * 20])
    settings = {"form": "responses", "generation_template": ANSWER, "eval_batch_size": 2}
    module, batches = read(*rows, orders="one", **settings)
    assert [batch["index"].tolist() for batch in batches] == [[1, 0], [2]]  # by length; pair 3 is too long
    assert [batch["order"].tolist() for batch in batches] == [[0, 0], [0]]
    chosen, rejected = batches[0]["chosen"], batches[0]["rejected"]
    shown = [words(module.tokenizer, side["input_ids"][0]) for side in (chosen, rejected)]
    assert shown[0].startswith("<s> POST: w0 ANSWER: x </s>")
    assert shown[1].startswith("<s> POST: w0 ANSWER: y </s>")
    assert chosen["attention_mask"].sum(dim=1).tolist() == [6, 6]
    assert rejected["attention_mask"].sum(dim=1).tolist() == [6, 8]
    with refusal(r"form='responses' has no order.*orders='both': set orders to one"):
        read(*rows, **settings)


def test_prompts_are_cut_left_out_and_limited(tmp_path, causal, caplog):
    rows = [{"prompt": "w0 w1 w2 w3"}, {"prompt": "w4"}, {"prompt": "w5"}, {"prompt": ""}]
    source = write_rows(tmp_path / "prompts.jsonl", rows)

    def prompts(**options):
        module = PromptDataModule(source, template="POST: {prompt} ANSWER:", tokenizer=causal, **options)
        module.setup("predict")
        return list(module.predict_set.datasets["prompt"])

    assert prompts(max_tokens=5) == ["POST: w0 w1 ANSWER:", "POST: w4 ANSWER:", "POST: w5 ANSWER:"]
    assert "3 prompts; 0 too long, 1 cut" in caplog.text
    assert prompts(limit=1) == ["POST: w0 w1 w2 w3 ANSWER:"]
    with pytest.raises(RowsError, match=r"no prompt fits into max_tokens=3"):
        prompts(max_tokens=3)
    with refusal(r"limit=0 must be at least 1"):
        prompts(limit=0)
