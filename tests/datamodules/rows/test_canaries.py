import pytest
from refusals import refusal

from fedlight.datamodules.rows.canaries import Canaries
from fedlight.datamodules.text.templates import Template
from fedlight.pretrained.hub import load_tokenizer
from fedlight.toy.instructions import TEMPLATE

ROWS = {
    client: [{"instruction": "Add.", "input": "1", "response": "2", "client": client, "category": "sums"}]
    for client in ("ann", "ben", "cid")
}


def texts(planted):
    return [(row["instruction"], row["response"]) for rows in planted.values() for row in rows]


def test_every_client_has_its_own():
    planted = Canaries(number=2).plant(ROWS)
    assert list(planted) == ["ann", "ben", "cid"]
    assert all(len(rows) == 2 for rows in planted.values())
    assert len({key for key, _ in texts(planted)}) == 6
    assert len({secret for _, secret in texts(planted)}) == 6
    assert not any(secret in key for key, secret in texts(planted))
    for row in planted["ben"]:
        assert list(row) == ["instruction", "input", "response"]
        assert row["input"] == ""
        assert len(row["response"].split()) == 6
        assert set(row["response"].split()) <= set("0123456789")


def test_a_function_of_seed_and_client():
    one = Canaries(number=2, seed=3).plant(ROWS)
    assert Canaries(number=2, seed=3).plant(dict(reversed(ROWS.items()))) == one
    assert Canaries(number=2, seed=4).plant(ROWS) != one
    assert Canaries(number=1, seed=3).plant(ROWS) == {client: rows[:1] for client, rows in one.items()}
    assert Canaries(number=2, seed=3).plant({"ben": ROWS["ben"]}) == {"ben": one["ben"]}


def test_some_clients_alone():
    chosen = {tuple(Canaries(clients=2, seed=seed).plant(ROWS)) for seed in range(20)}
    assert chosen == {("ann", "ben"), ("ann", "cid"), ("ben", "cid")}
    [[(client, [row])]] = [Canaries(clients=1, seed=0).plant(ROWS).items()]
    assert row == Canaries(seed=0).plant(ROWS)[client][0]


def test_keys_are_different_where_few_are_possible():
    planted = Canaries(number=160, length=10, words=["yes", "no"], instruction="{key}").plant(ROWS)
    assert len({key for key, _ in texts(planted)}) == 480


def test_words_slot_and_client():
    canaries = Canaries(words=["red", "green", "blue"], length=7, slot="post", instruction="{client}: {key}!")
    planted = canaries.plant({"ann": [], "ben": [{"title": "t", "post": "p", "response": "r"}]})
    [row] = planted["ann"]
    assert list(row) == ["title", "post", "response"]
    assert row["title"] == ""
    assert row["post"].startswith("ann: ")
    assert row["post"].endswith("!")
    assert set(row["post"][5:-1].split()) | set(row["response"].split()) <= {"red", "green", "blue"}


def test_the_embedded_model_can_say_them():
    tokenizer, template = load_tokenizer("toy"), Template.named(TEMPLATE)
    for rows in Canaries(number=5).plant(ROWS).values():
        for row in rows:
            text = f"{template.render(row).text} {row['response']}"
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == " ".join(text.split())


def test_other_secrets_are_of_the_same_kind():
    canaries = Canaries(length=4, words=["a", "b", "c", "d", "e", "f"])
    others = canaries.secrets(300)
    assert others == canaries.secrets(300)
    assert len(set(others)) > 200
    assert {len(text.split()) for text in others} == {4}
    assert {word for text in others for word in text.split()} == set("abcdef")


LEAST_ONE = ("number", "repeats", "clients")
SLOTS = r"must have the slot \{key\}, \{client\} or both, and no other"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(({name: 0}, rf"canaries\.{name}=0 must be at least 1") for name in LEAST_ONE),
        *(({"words": words}, "be different words without blanks") for words in (["a", "a"], ["a b", "c"])),
        ({"words": []}, r"canaries\.length=6 of 0 words gives 0 texts"),
        ({"length": 2}, r"canaries\.length=2 of 10 words gives 100 texts, which can be guessed"),
        *(({"instruction": text}, SLOTS) for text in ("What?", "{key} {name}", "{key}} ?", "{}")),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with refusal(said):
        Canaries(**settings)


def test_rows_that_cannot_have_any():
    with refusal(r"canaries\.slot='post' is no slot of .*: choose from instruction, input"):
        Canaries(slot="post").plant(ROWS)
    with refusal(r"canaries\.slot='instruction' is no slot .*: choose from none"):
        Canaries().plant({"ann": []})
    with refusal(r"canaries\.clients=4, but there are 3"):
        Canaries(clients=4).plant(ROWS)
    with refusal(r"canaries\.number=200 for 3 clients: .* raise canaries\.length"):
        Canaries(number=200, length=3).plant(ROWS)
