import random

import pytest
from refusals import refusal

from fedlight.datamodules.rows.exclusion import normalize_text
from fedlight.datamodules.rows.rows import load_rows
from fedlight.toy import rows
from fedlight.toy.oracle import Oracle
from fedlight.toy.votes import COMMON, OPPOSED, WorldOptions, group_taste, population, utility, vote
from fedlight.toy.world import NAMES, PEOPLE, Traits, draw_post, draw_summary, facts_of, measure

SETS = ("votes", "heldout", "prompts", "eval_prompts")
POST = "anna bakes bread . ben reads maps . carla keeps bees . dan fixes clocks ."


@pytest.fixture(scope="module")
def heldout() -> list[dict[str, str]]:
    return rows("heldout", size=3000)


def share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)


def decided(votes: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in votes if row["choice"] != "tie"]


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        ("kindly anna bakes bread . ben reads maps .", Traits(2, 0, 1, 0, 7, 0)),
        ("duh anna bakes pies . literally ben reads poems .", Traits(0, 2, -1, 1, 8, 0)),
        ("anna bakes bread . anna bakes bread .", Traits(1, 0, 0, 0, 6, 0)),
        ("ben bakes bread", Traits(0, 1, 0, 0, 3, 0)),
        ("anna bakes . bread", Traits(1, 0, 0, 0, 3, 0)),
        ("anna anna xyz kindly", Traits(0, 0, 1, 0, 4, 3)),
        ("", Traits(0, 0, 0, 0, 0, 0)),
    ],
)
def test_traits_of_hand_written_summaries(summary: str, expected: Traits) -> None:
    assert measure(POST, summary) == expected


def test_own_texts_are_well_formed() -> None:
    rng = random.Random(0)
    for _ in range(200):
        post = draw_post(rng)
        summary = draw_summary(rng, post)
        assert len({name for name, _, _ in facts_of(post)}) == 4
        traits = measure(post, summary)
        assert traits.junk == 0
        assert 1 <= traits.covered + traits.invented <= 4


def test_an_invented_fact_is_as_plausible_as_a_true_one() -> None:
    """Without its post no fact looks invented: whatever is stated is true about 7 times in 10."""
    rng = random.Random(1)
    stated: dict[str, list[bool]] = {}
    for _ in range(8000):
        post = draw_post(rng)
        for name, verb, thing in facts_of(draw_summary(rng, post)):
            assert verb == PEOPLE[name][0]
            assert thing in PEOPLE[name][1]
            stated.setdefault(thing, []).append(thing in post.split())
    assert len(stated) == 3 * len(NAMES)
    # 0.7 of some 500 facts with each object: four standard errors are 0.08
    assert all(share(true) == pytest.approx(0.7, abs=0.085) for true in stated.values())


@pytest.mark.parametrize("name", SETS)
def test_rows_are_a_function_of_the_options(name: str) -> None:
    options = {"num_clients": 5, "votes_per_client": 10, "size": 20}
    first = rows(name, seed=3, **options)
    assert first == rows(name, seed="3", **{option: str(value) for option, value in options.items()})
    assert first != rows(name, seed=4, **options)


def test_the_sets_share_no_post() -> None:
    posts = [{normalize_text(row["prompt"]) for row in rows(name)} for name in SETS]
    assert len(set.union(*posts)) == sum(map(len, posts))
    assert min(map(len, posts)) > 100
    assert not posts[0] & {normalize_text(row["prompt"]) for row in rows("heldout", seed=1)}


def test_columns_and_clients() -> None:
    votes = rows("votes")
    assert set(votes[0]) == {"prompt", "response_a", "response_b", "choice", "client", "group"}
    numbers = [sum(row["client"] == client for row in votes) for client in {row["client"] for row in votes}]
    assert len(numbers) == 40
    assert max(numbers) > 8 * min(numbers)
    assert 0.01 < share([row["choice"] == "tie" for row in votes]) < 0.08
    assert {row["group"] for row in votes} == set(OPPOSED)


def test_position_tells_nothing(heldout: list[dict[str, str]]) -> None:
    """3000 votes: four standard errors of a fair coin are 0.037."""
    assert share([row["choice"] == "a" for row in decided(heldout)]) == pytest.approx(0.5, abs=0.037)
    gaps = [len(row["response_a"].split()) - len(row["response_b"].split()) for row in heldout]
    assert share([gap > 0 for gap in gaps]) == pytest.approx(share([gap < 0 for gap in gaps]), abs=0.052)


def test_no_name_of_a_client_or_group_is_in_a_text(heldout: list[dict[str, str]]) -> None:
    texts = (row[column] for row in heldout for column in ("prompt", "response_a", "response_b"))
    words = {word for text in texts for word in text.split()}
    assert not words & ({row["client"] for row in heldout} | set(OPPOSED) | {"a", "b", "A", "B"})


def test_a_vote_without_noise_follows_the_taste() -> None:
    better, worse = Traits(2, 0, 1, 0, 7, 0), Traits(1, 1, 0, 0, 6, 0)
    assert utility(COMMON, better) == pytest.approx(2.4 + 1.2 - 1.05)
    assert utility(COMMON, worse) == pytest.approx(1.2 - 1.6 - 0.9)
    assert vote(random.Random(0), COMMON, better, worse, noise=0) == "a"
    assert vote(random.Random(0), COMMON, worse, better, noise=0) == "b"
    assert vote(random.Random(0), COMMON, worse, worse, noise=0) == "tie"


def test_noise_is_that_of_bradley_and_terry() -> None:
    """At a difference of 1 and scale 1 the first wins with probability 1 / (1 + e^-1) = 0.731, ties apart."""
    rng, taste = random.Random(0), (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    better, worse = Traits(1, 0, 0, 0, 0, 0), Traits(0, 0, 0, 0, 0, 0)
    choices = [vote(rng, taste, better, worse, noise=1.0) for _ in range(20000)]
    # P(difference > 0.15) = 1 / (1 + e^-0.85) = 0.7006; P(difference < -0.15) = 1 - 1 / (1 + e^-1.15) = 0.2405
    assert choices.count("a") / 20000 == pytest.approx(0.7006, abs=0.013)
    assert choices.count("b") / 20000 == pytest.approx(0.2405, abs=0.013)


def test_opposition_moves_groups_from_the_common_taste_to_their_own() -> None:
    assert group_taste("terse", 0.5)[2] == pytest.approx((1.2 - 1.2) / 2)
    voters = population(WorldOptions(num_clients=6, votes_per_client=10))
    assert [voter.group for voter in voters].count("warm") == 2
    agreement = [Oracle(opposition=o).accuracy(rows("heldout", opposition=o)) for o in (0.0, 0.5, 1.0)]
    assert agreement[0] > agreement[1] + 0.03 > agreement[2] + 0.06


def test_simple_rules_are_clearly_worse_than_the_oracle(heldout: list[dict[str, str]]) -> None:
    limit = Oracle().accuracy(heldout)

    def rule(trait: str, sign: int) -> float:
        hits = []
        for row in decided(heldout):
            a, b = (sign * getattr(measure(row["prompt"], row[f"response_{side}"]), trait) for side in "ab")
            hits.append(0.5 if a == b else float((a > b) == (row["choice"] == "a")))
        return sum(hits) / len(hits)

    assert 0.84 < limit < 0.93
    assert Oracle().accuracy(heldout, personal=True) > limit
    rules = {"covered": 1, "invented": -1, "polite": 1, "filler": -1}.items()
    assert max(rule(*each) for each in (*rules, ("words", 1), ("words", -1))) < limit - 0.08


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("vote", "toy rows 'vote' do not exist: choose from votes, heldout"),
        ("votes?sed=1", "toy option 'sed' does not exist: choose from seed, num_clients"),
        ("votes?num_clients", "toy option num_clients='' is not a number"),
        ("votes?40", "toy option '40' does not exist: choose from seed, num_clients"),
        ("votes?seed=1&seed=1", r"toy:votes\?seed=1&seed=1: an option is given twice"),
        ("votes?seed=one", "toy option seed='one' is not a number"),
        ("votes?opposition=2", r"toy option opposition=2.* between 0 and 1"),
        ("votes?num_clients=0", "num_clients=0"),
        ("votes?noise=-1", "noise=-1"),
        ("votes?votes_per_client=inf", "votes_per_client=inf must lie between"),
        ("instructions?domains=farm", "toy option 'domains' does not exist: choose from seed, split, domain"),
        ("instructions?domain=law", "toy option domain='law' does not exist: choose from craft, kitchen"),
        ("instructions?split=train", "split='train' does not exist: choose from private, public, test"),
        ("instructions?topic_rows=many", "toy option topic_rows='many' is not a number"),
        ("instructions?topic_rows=501", "toy option topic_rows=501 must lie between 1 and 500"),
        ("instructions?chatter=-1", "toy option chatter=-1 must lie between 0 and"),
        ("writing?sizes=3", "toy option 'sizes' does not exist: choose from seed, size, questions, domain"),
        ("writing?size=0", "toy option size=0 must lie between 1 and"),
        ("writing?known=49", "toy option known=49 must lie between 0 and 48"),
        ("writing?questions=-1", "toy option questions=-1 must lie between 0 and"),
        ("writing?domain=law", "toy option domain='law' does not exist: choose from craft, kitchen"),
        ("instructions?split=test&written=6", "written=6 goes with split=private, not with split=test"),
        ("instructions?held=1", "held=1 goes with split=test, not with split=private"),
        ("instructions?joined=2", "toy option joined=2 must lie between 0 and 1"),
        ("instructions?rule=2", "toy option rule=2 must lie between 0 and 1"),
    ],
)
def test_bad_options_are_named(source: str, message: str) -> None:
    with refusal(message):
        load_rows(f"toy:{source}")
    with refusal("toy option num_clients=2.5 is not a number"):
        Oracle(num_clients=2.5)


def test_better_summaries_are_worth_more() -> None:
    oracle = Oracle()
    ladder = [
        *("", "ugh anna bakes pies . basically ben reads poems .", "anna bakes pies . ben reads maps ."),
        *("anna bakes bread . basically ben reads maps .", "anna bakes bread . ben reads maps ."),
        "kindly anna bakes bread . ben reads maps .",
    ]
    values = [oracle.utility(POST, text) for text in ladder[1:]]
    assert values == sorted(values)
    assert oracle.utility(POST, ladder[0]) < values[2]


def test_text_that_says_nothing_is_low_but_graded() -> None:
    oracle = Oracle()
    values = [oracle.utility(POST, text) for text in ("anna bread", "anna bread anna bread", "x " * 20)]
    assert values == sorted(values, reverse=True)
    assert values[0] < oracle.utility(POST, "anna bakes bread .")


def test_no_group_means_the_mean_over_clients() -> None:
    """With one client of each group the mean of the three groups' utilities is that over all clients."""
    oracle = Oracle(num_clients=3, opposition=1.0)
    text = "kindly anna bakes bread ."
    groups = [oracle.utility(POST, text, group) for group in ("thorough", "warm", "terse")]
    assert oracle.utility(POST, text) == pytest.approx(sum(groups) / 3)
    assert max(groups) - min(groups) > 1


def test_accuracy_by_hand() -> None:
    """Right, wrong, a draw of equal texts (one half) and a tie left out: (1 + 0 + 0.5) / 3."""
    good, bad = "kindly anna bakes bread .", "ugh anna bakes pies ."
    row = {"prompt": POST, "response_a": good, "response_b": bad, "client": "c000", "group": "warm"}
    votes = [row | {"choice": choice} for choice in ("a", "b", "tie")]
    votes.append(row | {"response_b": good, "choice": "a"})
    assert Oracle().accuracy(votes) == Oracle().accuracy(votes, personal=True) == 0.5


def test_bad_requests_are_named() -> None:
    with pytest.raises(ValueError, match="group='cold' has no clients: choose one of"):
        Oracle().utility(POST, "", group="cold")
    with pytest.raises(ValueError, match="no choice but ties"):
        Oracle().accuracy([])
