import pytest
from refusals import refusal
from scripted_generator import CLIENTS, Scripted, made, unlike

from fedlight.augmentation.self_instruct.self_instruct import SelfInstruct
from fedlight.augmentation.self_instruct.tries import REASONS, ClientTries, next_tries
from fedlight.datamodules.instructions.augmentation import Added


def test_every_client_gets_its_number_of_rows_with_responses_and_no_public_row():
    generator = Scripted()
    found = SelfInstruct(3, generator).augment(CLIENTS, [], seed=0)
    assert made(found) == {"c0": [unlike(n) for n in (0, 2, 4)], "c1": [unlike(n) for n in (1, 3, 5)]}
    first = {"instruction": "write0 some0 words0", "input": "", "response": "about write0 some0 words0"}
    assert found["c0"][0] == Added(first)
    assert [len(call) for call in generator.calls] == [6, 6]  # across clients: two lists, not twelve
    assert generator.released == 1
    assert not SelfInstruct.needs_public


def test_draws_follow_from_seed_client_and_try():
    def prompts(seed, clients):
        generator = Scripted()
        SelfInstruct(20, generator).augment(clients, [], seed)
        return sorted(generator.instructions)

    assert prompts(0, CLIENTS) == prompts(0, CLIENTS) != prompts(1, CLIENTS)
    both = prompts(0, CLIENTS)
    assert prompts(0, dict(reversed(CLIENTS.items()))) == both
    of_c0 = [prompt for prompt in both if "mars" not in prompt and "venus" not in prompt]
    assert prompts(0, {"c0": CLIENTS["c0"]}) == of_c0


def test_a_client_with_few_rows_gets_other_draws_of_the_same_prompts():
    generator = Scripted()
    SelfInstruct(3, generator, batch_size=1).augment({"c": CLIENTS["c0"][:1]}, [], seed=0)
    assert len(set(generator.instructions)) == 1
    assert generator.draws == [0, 0, 1, 1, 2, 2]


def test_what_is_dropped_is_counted_by_reason():
    answers = [
        "",  # empty
        "Instruction 3:",  # nothing but the label
        "tell ABOUT  apples.",  # repeats a row of the client
        "Tell about all apples.",  # 2 * 3 / (3 + 4) with it
        "one two three four five six",  # more than five words
        "fresh start",
        "Fresh start",  # repeats an accepted one
        "no answer here",
        "a good end",
    ]
    generator = Scripted(answers.__getitem__, lambda new: "" if new == "no answer here" else "yes")
    trying = SelfInstruct(2, generator, max_words=5, tries_per_row=9, batch_size=1)
    found = trying.augment({"c": CLIENTS["c0"]}, [], seed=0)
    assert made(found) == {"c": ["fresh start", "a good end"]}
    dropped = dict(zip(REASONS, (2, 1, 2, 1, 1), strict=True))
    assert trying.record() == {"tries": 9, "dropped": dropped, "generator": {}}
    why = "tries_per_row=9 and give_up_after=50 ended the tries"
    told = f"{why} (dropped: 2 empty instruction, 1 instruction too long, 2 a known"
    assert trying.why_fewer().startswith(told)
    assert SelfInstruct(2, generator, tries_per_row=9).why_fewer() == why  # what was made before is read back


def test_rouge_l_is_a_setting():
    def write(number):  # 2 * 3 / 7 = 0.857 with the row of apples, 0.75 with each other
        return f"Tell about {chr(97 + number)} apples."

    for limit, kept in ((0.8, 0), (0.86, 4)):
        found = SelfInstruct(4, Scripted(write), max_rouge_l=limit).augment({"c": CLIENTS["c0"]}, [], 0)
        assert len(found["c"]) == kept


def test_clients_do_not_know_each_others_instructions():
    found = SelfInstruct(1, Scripted(lambda number: "the same")).augment(CLIENTS, [], seed=0)
    assert made(found) == {"c0": ["the same"], "c1": ["the same"]}


def test_nor_is_an_instruction_of_the_same_batch_taken_twice():
    generator = Scripted(lambda number: f"the {number // 2}")
    found = SelfInstruct(2, generator).augment({"c": CLIENTS["c0"]}, [], 0)
    assert made(found) == {"c": ["the 0", "the 1"]}


@pytest.mark.parametrize(("options", "tries"), [({"tries_per_row": 3}, 15), ({"give_up_after": 7}, 10)])
def test_tries_are_bounded(options, tries, capsys, caplog):
    generator = Scripted(lambda number: "")
    trying = SelfInstruct(5, generator, **{"tries_per_row": 9, **options})
    with caplog.at_level("INFO"):
        assert trying.augment({"c": CLIENTS["c0"], "none": []}, [], seed=0) == {"c": [], "none": []}
    assert len(generator.instructions) == tries  # five at once: the seventh in vain is noticed after ten
    assert f"0 rows for 2 clients from {tries} tries; dropped: {tries} empty instruction; 2" in caplog.text
    assert "1 clients have no row to show" in caplog.text


def test_one_that_succeeds_in_between_does_not_give_up():
    generator = Scripted(lambda number: unlike(number) if number % 3 == 2 else "")
    trying = SelfInstruct(5, generator, give_up_after=3, batch_size=1)
    assert len(trying.augment({"c": CLIENTS["c0"]}, [], seed=0)["c"]) == 5
    assert len(generator.instructions) == 15


def test_whoever_sends_private_rows_out_is_told_so_once(tmp_path):
    generator = Scripted()
    generator.sends_to = "api.example.com"
    trying = SelfInstruct(3, generator, batch_size=2, folder=str(tmp_path))
    with pytest.warns(UserWarning, match=r"private rows of 2 clients to api\.example\.com") as told:
        trying.augment({**CLIENTS, "none": []}, [], seed=0)
    assert len(told) == 1
    trying.augment({**CLIENTS, "none": []}, [], seed=0)  # nothing is sent, and warnings are errors here


LEAST_ONE = ("number", "max_words", "tries_per_row", "batch_size", "give_up_after")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        *(({name: 0}, f"{name}=0") for name in LEAST_ONE),
        ({"max_rouge_l": 1.1}, "max_rouge_l=1.1"),
        ({"instruction_prompt": "{first}"}, r"_prompt has the slots {first}, but needs {first}, {second}"),
        ({"response_prompt": "none"}, "response_prompt has the slots none"),
    ],
)
def test_bad_settings_are_refused(options, words):
    with refusal(words):
        SelfInstruct(**{"number": 1, "generator": Scripted(), **options})


def test_a_slot_that_the_rows_lack_is_refused_before_anything_is_asked():
    generator, clients = Scripted(), {"c": [{"post": "x", "title": "y", "response": "z"}]}
    with refusal("slot='instruction', but the clients' rows have post, title: set slot"):
        SelfInstruct(1, generator).augment(clients, [], seed=0)
    assert not generator.calls
    found = SelfInstruct(1, generator, slot="post").augment(clients, [], seed=0)
    assert found["c"][0].fields["post"] == unlike(0)


def test_turns():
    def client(name, number):
        limits = {"max_rouge_l": 0.7, "max_words": 9, "max_tries": 99, "give_up_after": 9}
        return ClientTries(name, CLIENTS["c1"], number, **limits)

    clients = [client("a", 3), client("b", 1), client("c", 0)]
    turns = [(one.name, number) for one, number in next_tries(clients, 9)]
    assert turns == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
    assert len(next_tries(clients, 2)) == 2
    assert next_tries([], 2) == []
