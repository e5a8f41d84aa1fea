from collections import Counter, defaultdict

import pytest
from refusals import refusal

from fedlight.toy import rows
from fedlight.toy.instructions import DOMAINS, answer, topics, topics_of_split
from fedlight.toy.rules import PRIVATE_NAMES, RELATIVES, is_fact
from fedlight.toy.world import NAMES
from fedlight.toy.writing import known_topics


def asked(split: str, **options: int | str) -> list[dict[str, str]]:
    return rows("instructions", split=split, rule=1, **options)


def topics_in(some: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(area, name) for area, name in (row["topic"].split() for row in some)}


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_topic_is_shared_held_out_or_a_fact(domain: str) -> None:
    shared, held_out = (set(topics_of_split(split, domain, rule=1)) for split in ("public", "test"))
    private = set(topics_of_split("private", domain, rule=1))
    facts = {topic for topic in topics(domain) if is_fact(topic)}
    assert (len(shared), len(held_out), len(facts)) == (24, 12, 12)
    assert not shared & held_out
    assert private == shared | facts
    assert shared | held_out | facts == set(topics(domain))
    for place, size in ((0, 6), (1, 6)):  # every area, every person who follows the rule
        assert Counter(topic[place] for topic in held_out) == dict.fromkeys({t[place] for t in shared}, 2)
        assert len({topic[place] for topic in held_out}) == size


def test_two_tables_give_the_answers_that_follow_the_rule() -> None:
    for seed in range(3):
        words, numbers = defaultdict(set), defaultdict(set)
        for domain in ("kitchen", RELATIVES["kitchen"]):
            for topic in topics_of_split("public", domain, 1) + topics_of_split("test", domain, 1):
                word, number = answer(seed, domain, topic, rule=1).split()
                words[topic[0]].add(word)
                numbers[topic[1]].add(number)  # related domains share it
        assert {len(found) for found in (*words.values(), *numbers.values())} == {1}
        assert len(set.union(*numbers.values())) == len(numbers) == 6
        assert len(set.union(*(words[area] for area in DOMAINS["kitchen"].areas))) == 6


def test_another_family_has_other_numbers() -> None:
    def number(seed: int, domain: str, name: str) -> str:
        return answer(seed, domain, (DOMAINS[domain].areas[0], name), rule=1).split()[1]

    equal = [number(s, "kitchen", n) == number(s, "market", n) for s in range(20) for n in NAMES[:6]]
    assert sum(equal) / len(equal) < 0.2  # 1 / 18 by chance


def test_facts_are_the_same_as_without_a_rule() -> None:
    facts = [topic for topic in topics("farm") if is_fact(topic)]
    assert {name for _, name in facts} == set(PRIVATE_NAMES)
    assert [answer(5, "farm", t, rule=1) for t in facts] == [answer(5, "farm", t) for t in facts]
    assert len({answer(5, "farm", topic) for topic in facts}) > 8  # of 12 draws


def test_rows_are_about_the_topics_of_their_split_and_have_the_right_answers() -> None:
    private, public, test = asked("private", client_rows=30), asked("public", chatter=5), asked("test")
    for some in (private, public, test):
        for row in some:
            if row["domain"] != "chatter":
                area, name = row["topic"].split()
                assert row["output"] == answer(0, row["domain"], (area, name), rule=1)
    kitchen = [row for row in public if row["domain"] == "kitchen"]
    assert topics_in(test) == set(topics_of_split("test", "kitchen", 1))
    assert topics_in(kitchen) == set(topics_of_split("public", "kitchen", 1))
    assert not topics_in(test) & topics_in(private)
    assert not any(is_fact(topic) for topic in topics_in(kitchen) | topics_in(test))


def test_a_client_has_two_areas_shared_topics_and_facts_and_every_area_has_a_client() -> None:
    for seed in range(4):
        private = asked("private", seed=seed, client_rows=60)
        by_client = defaultdict(list)
        for row in private:
            by_client[row["client"]].append(row)
        assert len(by_client) == 10
        for own in by_client.values():
            found = topics_in(own)
            assert len({area for area, _ in found}) <= 2
            assert sum(is_fact(topic) for topic in found) in (1, 2)
            assert 4 <= sum(not is_fact(topic) for topic in found) <= 7
        assert {area for area, _ in topics_in(private)} == set(DOMAINS["kitchen"].areas)


def test_known_topics_follow_the_rule_and_are_not_asked_in_the_test() -> None:
    known = known_topics(0, "kitchen", 6, rule=1)
    assert set(known) < set(topics_of_split("public", "kitchen", 1))
    exercises = rows("writing", size=60, known=6, rule=1)[1::2]
    assert {row["output"] for row in exercises} <= {answer(0, "kitchen", topic, rule=1) for topic in known}
    with refusal("known=25 with rule=1 must be at most 24: the topics of public rows"):
        rows("writing", known=25, rule=1)
