from functools import partial

import numpy as np
import pytest
import torch
from synthetic_data import Listed, Scorer, make_data
from torch import nn

from fedlight import InstructionDataModule, Visit


@pytest.fixture
def build(tmp_path, causal):
    return partial(make_data, tmp_path, causal)


def texts(module, words, visit, round_idx=0):
    """The examples of each batch of a visit, sorted."""
    module.set_visits([visit], round_idx)
    rows = [[module.train_set[i] for i in batch] for batch in module.plan.sampler()]
    return [sorted(words(module.tokenizer, row["ids"]) for row in batch) for batch in rows]


def line(number):
    return f"<s> POST: w{20 + number} ANSWER: {' '.join(['y'] * (number + 1))} </s>"


def test_own_rows_and_candidates_by_split(build, words):
    module = build(keep=None)
    module.synthesize(0, ["c0", "c1"], Scorer())
    assert texts(module, words, Visit("c1", 1, "synthetic")) == [[line(0), line(1)]]
    own = texts(module, words, Visit("c1", 2))
    assert all("ANSWER: x" in text for batch in own for text in batch)
    mixed = sum(texts(module, words, Visit("c1", 3, "mixed")), [])
    assert sorted(mixed) == sorted([line(0), line(1), *sum(own, [])])
    assert (module.num_synthetic("c0"), module.num_synthetic("c1")) == (6, 2)
    passes = [module.num_batches("c0", split) for split in ("train", "synthetic", "mixed")]
    assert passes == [2, 3, 5]
    assert module.client_sizes() == {"c0": 4, "c1": 4}  # a client's weight is that of its own rows


def test_the_best_are_chosen_by_the_model_that_chooses(build, words):
    module = build(keep=3)
    module.synthesize(0, ["c0", "c1"], Scorer())
    assert (module.num_synthetic("c0"), module.num_synthetic("c1")) == (3, 2)
    scorer = Scorer([5.0, 1.0, 4.0, 2.0, 9.0, 3.0])
    module.choose("c0", scorer)
    batches = texts(module, words, Visit("c0", 2, "synthetic"))
    assert set(sum(batches, [])) <= {line(1), line(3), line(5)}
    (asked,) = scorer.asked  # one call
    assert asked[0] == [*(f"POST: w{20 + n} ANSWER:" for n in range(6)), ""]
    assert asked[1][-1] == [" " + " ".join(["y"] * (n + 1)) for n in range(6)]
    module.score_together(["c1"], scorer)  # has no more than it keeps
    module.choose("c1", scorer)
    assert len(scorer.asked) == 1
    module.choose("c0", Scorer([0.0, 9.0, 0.0, 9.0, 0.0, 9.0]))
    assert set(sum(texts(module, words, Visit("c0", 4, "synthetic")), [])) == {line(0), line(2), line(4)}


def chosen(module, words, scorer):
    """What a client chooses in round 0."""
    module.synthesize(0, ["c0"], scorer)
    module.choose("c0", scorer)
    return set(sum(texts(module, words, Visit("c0", 6, "synthetic")), []))


@pytest.mark.parametrize(("score", "best"), [("ifs", {1, 3, 5}), ("ppl", {1, 3, 5}), ("ifd", {0, 2, 4})])
def test_directions_of_the_scores(build, words, score, best):
    scorer = Scorer([5.0, 1.0, 4.0, 2.0, 9.0, 3.0])
    assert chosen(build(keep=3, score=score), words, scorer) == {line(n) for n in best}


def test_random_choices_ask_no_model_and_follow_from_the_seed(build, words):
    scorer = Scorer()
    first, again, *others = (
        chosen(build(keep=3, score="random", seed=seed), words, scorer) for seed in (0, 0, 1, 2, 3, 4)
    )
    assert scorer.asked == []
    assert first == again
    assert len(first) == 3
    assert any(other != first for other in others)


def test_random_choices_differ_by_round_and_by_client(build):
    module = build(Listed(sizes=(6, 6)), keep=3, score="random")
    drawn = {"c0": [], "c1": []}
    for round_idx in range(6):
        module.synthesize(round_idx, ["c0", "c1"], Scorer())
        for client, own in drawn.items():
            module.choose(client, Scorer())
            first = module.plan.indices(client, "synthetic") - module._pool.positions[client][0]
            own.append(tuple(first))
    assert min(len({*own}) for own in drawn.values()) > 1
    assert drawn["c0"] != drawn["c1"]


def test_scores_that_are_not_finite_never_win_and_are_counted(build, words, caplog):
    module = build(keep=3)
    module.synthesize(0, ["c0"], Scorer())
    module.choose("c0", Scorer([float("nan"), 3.0, float("inf"), 5.0, float("nan"), float("nan")]))
    assert "client c0: 4 of 6 candidates have no finite ifs" in caplog.text
    assert module.synthesis_metrics()["scores_not_finite"] == 4
    assert module.num_batches("c0", "synthetic") == 2  # three are kept, in batches of two
    assert texts(module, words, Visit("c0", 1, "synthetic")) == [[line(1), line(3)]]
    module.choose("c0", Scorer([float("nan")] * 6))  # a model that has diverged
    assert set(sum(texts(module, words, Visit("c0", 3, "synthetic")), [])) == {line(0), line(1), line(2)}


def test_batches_of_a_visit_wait_until_it_begins(build, words):
    module = build(keep=2)
    module.synthesize(3, ["c0"], Scorer())
    module.set_visits([Visit("c0", 2), Visit("c0", 1, "synthetic")], 3)
    loader = module.train_dataloader()
    assert len(loader) == 3
    batches = iter(loader)
    next(batches)
    next(batches)
    module.choose("c0", Scorer([9.0, 9.0, 9.0, 1.0, 9.0, 2.0]))
    (batch,) = batches
    seen = zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)
    assert sorted(words(module.tokenizer, row[mask]) for row, mask in seen) == [line(3), line(5)]
    assert "weights" not in batch


def test_a_visit_before_anything_was_chosen_is_refused(build):
    module = build(keep=2)
    module.synthesize(0, ["c0"], Scorer())
    module.set_visits([Visit("c0", 1, "synthetic")], 0)
    with pytest.raises(ValueError, match="client c0 trains on 'synthetic' data, but there are none"):
        next(iter(module.train_dataloader()))


def test_weights_reach_the_batch_where_they_are_not_one(build):
    module = build(Listed(sizes=(1, 2), weight=0.25, chooses=False), keep=1)
    module.synthesize(0, ["c0", "c1"], Scorer())
    assert module.num_synthetic("c1") == 2  # all are used
    module.set_visits([Visit("c1", 3, "mixed"), Visit("c0", 2), Visit("c1", 1, "synthetic")], 0)
    batches = list(module.train_dataloader())
    assert [("weights" in batch) for batch in batches[3:]] == [False, False, True]
    assert batches[5]["weights"].tolist() == [0.25, 0.25]
    drawn = []
    for batch in batches[:3]:
        made = (batch["input_ids"] == module.tokenizer.convert_tokens_to_ids("y")).any(dim=1)
        drawn += [0.25 if one else 1.0 for one in made.tolist()]
        assert ("weights" in batch) == (0.25 in drawn[-2:])
        if "weights" in batch:
            assert batch["weights"].tolist() == drawn[-2:]
            assert batch["weights"].dtype == torch.float32
    assert sorted(drawn) == [0.25] * 2 + [1.0] * 4


def test_shapes_before_the_choice_bound_those_after(build):
    module = build(keep=3, batch_size=2)
    module.synthesize(0, ["c0", "c1"], Scorer())
    for split, batches in (("synthetic", 2), ("mixed", 3)):
        visit = Visit("c0", batches, split)
        before = module.batch_shapes(visit, 0)
        module.choose("c0", Scorer([9.0, 1.0, 1.0, 9.0, 1.0, 9.0]))
        after = module.batch_shapes(visit, 0)
        assert len(before) == len(after) == batches
        for bound, exact in zip(before, after, strict=True):
            assert bound.examples == exact.examples == 2
            assert bound.tokens == 11 >= exact.tokens  # <s> POST: w25 ANSWER: y y y y y y </s>
            assert bound.responses == 13 >= exact.responses  # 7 and 6
        module.set_visits([visit], 0)
        read = list(module.train_dataloader())
        assert [batch["input_ids"].shape[1] for batch in read] == [shape.tokens for shape in after]
        module.synthesize(0, ["c0", "c1"], Scorer())
    assert module.batch_shapes(Visit("c1", 1, "synthetic"), 0)[0].tokens == 7  # has no choice: exact
    assert module.batch_shapes(Visit("c1", 1), 0)[0].tokens == 6


def test_too_long_candidates_are_dropped_and_counted_never_cut(build, words, caplog):
    module = build(keep=None, max_tokens=8)
    module.synthesize(0, ["c0", "c1"], Scorer())
    assert module.num_synthetic("c0") == 3  # <s> POST: w22 ANSWER: y y y </s>
    metrics = {"tried": 9.0, "survived": 5.0, "dropped/too_long": 3.0, "scores_not_finite": 0.0}
    assert module.synthesis_metrics() == metrics
    assert "round 1: 2 clients made 5 candidates in 9 tries (dropped: 3 too long)" in caplog.text
    found = set(sum(texts(module, words, Visit("c0", 2, "synthetic")), []))
    assert found <= {line(0), line(1), line(2)}


def test_a_client_without_candidates_trains_on_its_own_rows(build, words, caplog):
    module = build(Listed(sizes=(0, 0)))
    module.synthesize(0, ["c0", "c1"], Scorer())
    assert "2 clients have none" in caplog.text
    assert module.num_synthetic("c0") == module.num_batches("c0", "synthetic") == 0
    module.choose("c0", Scorer())
    assert texts(module, words, Visit("c0", 2, "mixed")) != []
    assert module.num_batches("c0", "mixed") == 2
    assert module.num_synthetic("nobody") == 0


def test_a_new_round_forgets_the_others_a_further_call_in_it_does_not(build):
    synthesis = Listed()
    module = build(synthesis, keep=None)
    module.synthesize(0, ["c0"], Scorer())
    module.synthesize(0, ["c1"], Scorer())
    assert (module.num_synthetic("c0"), module.num_synthetic("c1")) == (6, 2)
    assert module.synthesis_metrics()["tried"] == 18
    module.synthesize(0, ["c1"], Scorer())  # again
    assert module.synthesis_metrics()["tried"] == 18
    assert len(module.train_set) == 8 + 6 + 2 + 2
    module.synthesize(1, ["c1"], Scorer())
    assert (module.num_synthetic("c0"), module.num_synthetic("c1")) == (0, 2)
    assert len(module.train_set) == len(module.train_lengths) == 8 + 2
    seeds = [seed for _, seed in synthesis.calls]
    assert seeds[0] == seeds[1] != seeds[3]
    assert synthesis.calls[0][0] == {"c0": 4}
    module.reset_synthesis()
    assert module.num_synthetic("c1") == 0
    assert len(module.train_set) == len(module.train_lengths) == 8
    assert module.synthesis_metrics() == {"tried": 0.0, "survived": 0.0, "scores_not_finite": 0.0}


@pytest.mark.parametrize("synthesizes", [False, True])
def test_own_visits_are_those_of_an_instruction_datamodule(build, synthesizes):
    module, plain = build(keep=None), build(kind=InstructionDataModule)
    np.testing.assert_array_equal(module.train_lengths, plain.train_lengths)
    if synthesizes:
        module.synthesize(5, ["c0", "c1"], Scorer())
    for one in (module, plain):
        one.set_visits([Visit("c1", 3), Visit("c0", 2)], 5)
    for mine, other in zip(module.train_dataloader(), plain.train_dataloader(), strict=True):
        assert mine.keys() == other.keys()
        assert all(mine[name].equal(other[name]) for name in mine)
    assert module.num_batches("c0") == plain.num_batches("c0") == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_workers": 1}, "num_workers=1: other processes draw batches before .* set num_workers to 0"),
        ({"keep": 0}, "keep=0 must be at least 1"),
        ({"score": "best"}, "score='best' is not one of ifs, ppl, ifd, random"),
    ],
)
def test_settings_that_cannot_be_are_refused(build, options, named):
    with pytest.raises(ValueError, match=named):
        build(setup=False, **options)


def test_a_module_that_writes_nothing_and_candidates_by_lot_are_refused(build):
    with pytest.raises(TypeError, match="Linear generates no text: train a LanguageModule"):
        build().synthesize(0, ["c0"], nn.Linear(1, 1))
    with pytest.raises(ValueError, match="makes examples of clients' rows: take InstructionDataModule"):
        build().draw_by_lot()
