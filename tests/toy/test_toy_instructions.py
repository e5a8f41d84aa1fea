from collections import Counter, defaultdict

import pytest
import torch
from refusals import refusal

from fedlight.toy import MODEL, rows
from fedlight.toy.instructions import CHATTER, DOMAINS, TEMPLATE, answer, topics, topics_of_split
from fedlight.toy.rules import PRIVATE_NAMES, RELATIVES, is_fact
from fedlight.toy.world import NAMES
from fedlight.toy.writing import known_topics

SPLITS = ("private", "public", "test")


def texts(some: list[dict[str, str]]) -> set[tuple[str, str]]:
    return {(row["instruction"], row["input"]) for row in some}


def instructions(split: str, **options: int | str) -> list[dict[str, str]]:
    return rows("instructions", split=split, **options)


@pytest.fixture(scope="module")
def splits() -> dict[str, list[dict[str, str]]]:
    return {split: instructions(split) for split in SPLITS}


def test_domains_share_neither_areas_nor_words() -> None:
    areas = [area for domain in DOMAINS.values() for area in domain.areas]
    words = [word for domain in DOMAINS.values() for word in domain.words]
    assert len(set(areas)) == len(areas) == 24
    assert len(set(words)) == len(words) == 8
    assert not set(areas) & set(words)


def test_public_rows_have_every_topic_of_every_domain_equally_often(splits: dict) -> None:
    counts = Counter((row["domain"], row["topic"]) for row in splits["public"])
    assert counts.pop((CHATTER, CHATTER)) == 1000
    assert set(counts.values()) == {16}
    assert len(counts) == 4 * 48
    assert len(texts(splits["public"])) == len(splits["public"]) == 4 * 48 * 16 + 1000


def test_test_rows_have_every_topic_of_one_domain(splits: dict) -> None:
    counts = Counter(row["topic"] for row in instructions("test", domain="farm", topic_rows=3))
    assert counts == {f"{area} {name}": 3 for area, name in topics("farm")}
    assert {row["domain"] for row in splits["test"]} == {"kitchen"}


def test_clients_know_few_topics_unevenly() -> None:
    for seed in range(3):
        found = instructions("private", seed=seed)
        clients = sorted({row["client"] for row in found})
        assert clients == [f"c{index}" for index in range(10)]
        for client in clients:
            own = [row for row in found if row["client"] == client]
            counts = sorted(Counter(row["topic"] for row in own).values())
            assert len(own) == len(texts(own)) == 100
            assert 3 <= len(counts) <= 6
            assert counts[-1] >= 2 * counts[0]
        assert 14 <= len({row["topic"] for row in found}) <= 30  # of 48


def test_no_text_is_in_two_splits_whatever_the_seed() -> None:
    found = [texts(instructions(split, seed=seed, topic_rows=6)) for seed, split in enumerate(SPLITS)]
    assert len(set.union(*found)) == sum(map(len, found))


def test_every_row_has_the_answer_to_its_topic(splits: dict) -> None:
    for row in splits["private"] + splits["test"] + splits["public"]:
        if row["domain"] != CHATTER:
            area, name = row["topic"].split()
            assert row["output"] == answer(0, row["domain"], (area, name))
            assert row["input"].endswith(f"{name} {area}")
        else:
            assert row["input"].startswith(row["output"] + " .")


def test_facts_are_another_seeds_others() -> None:
    by_seed = [[answer(seed, "farm", topic) for topic in topics("farm")] for seed in (0, 1)]
    assert sum(a == b for a, b in zip(*by_seed, strict=True)) < 5
    assert len(set(by_seed[0])) > 30  # of 48 draws from 6 x 18


def test_the_tokenizer_knows_every_word(splits: dict) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for row in splits["private"][::4] + splits["public"][::4]:
        ids = tokenizer(TEMPLATE.format(**row) + " " + row["output"])["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert len(ids) <= 24
        assert tokenizer.decode(tokenizer(row["output"])["input_ids"]) == row["output"]


def test_the_model_knows_no_fact_beforehand() -> None:
    from fedlight.modules.sft import SFTModule

    torch.manual_seed(0)
    module = SFTModule("toy", dtype="fp32")
    module.configure_model()
    asked = instructions("test", topic_rows=1)[::2]
    prompts = [TEMPLATE.format(**row) for row in asked]
    answers = module.generate(prompts, temperature=0, max_new_tokens=3, seed=0)
    assert not any(said == row["output"] for (said,), row in zip(answers, asked, strict=True))


def test_rows_of_a_domain_are_its_private_and_its_public_ones(splits: dict) -> None:
    found = instructions("domain")
    public = [row for row in splits["public"] if row["domain"] == "kitchen"]
    assert texts(found) == texts(splits["private"]) | texts(public)
    assert not any("client" in row for row in found)


def test_all_domains_are_one_after_the_other() -> None:
    for split in ("private", "test", "domain"):
        each = [instructions(split, domain=domain, client_rows=5, topic_rows=1) for domain in DOMAINS]
        together = instructions(split, domain="all", client_rows=5, topic_rows=1)
        assert together == [row for rows_of_one in each for row in rows_of_one]
    assert instructions("public", domain="all") == instructions("public")
    clients = Counter(row["client"] for row in instructions("private", domain="all", client_rows=5))
    assert [*clients.values()] == [20] * 10


def test_rows_are_a_function_of_the_options() -> None:
    few = {"topic_rows": 2, "chatter": 9, "client_rows": 9}
    for split in SPLITS:
        first, again, other = (instructions(split, seed=seed, **few) for seed in (3, "3", 4))
        assert first == again != other
    assert instructions("test", domain="craft", **few) != instructions("test", domain="farm", **few)


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
    private, public, test = (
        instructions("private", rule=1, client_rows=30),
        instructions("public", rule=1, chatter=5),
        instructions("test", rule=1),
    )
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
        private = instructions("private", rule=1, seed=seed, client_rows=60)
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
