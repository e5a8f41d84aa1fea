import json
import re

import pytest
from refusals import refusal
from scripted_generator import CLIENTS, Scripted, made, rows, unlike

from fedlight.augmentation.self_instruct.self_instruct import (
    SelfInstruct,
    extract_instruction,
    extract_response,
)
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


def test_the_prompts_are_those_of_figure_7_and_show_a_clients_own_rows_alone():
    generator = Scripted()
    SelfInstruct(2, generator).augment(CLIENTS, [], seed=0)
    words = re.compile(
        r"You are asked to come up with instructions\. Don't repeat instructions in examples\. Here are some "
        r"examples:\sInstruction 1: Tell about (\w+)\.\sInstruction 2: Tell about (\w+)\.\sProvide a new instruction below:"
    )
    own = [{"apples", "pears", "plums"}, {"mars", "venus"}] * 2
    for prompt, topics in zip(generator.instructions, own, strict=True):
        shown = words.fullmatch(prompt).groups()
        assert set(shown) <= topics
        assert shown[0] != shown[1]
    words = re.compile(
        r"Example 1:\sInstruction: Tell about (\w+)\.\sResponse: All of (\w+)\.\s\sGenerate the response of this "
        r"instruction, Instruction: (\w+ \w+ \w+)"
    )
    for number, (prompt, topics) in enumerate(zip(generator.responses, own, strict=True)):
        one, other, new = words.fullmatch(prompt).groups()
        assert one == other
        assert one in topics
        assert new == unlike(number)


def test_instruction_and_input_are_shown_together_and_braces_are_text():
    own = [{"instruction": "Add {x}.", "input": "1, {2}", "response": "{3}", "category": "math"}]
    generator = Scripted()
    found = SelfInstruct(1, generator).augment({"c": own}, [], seed=0)
    assert generator.instructions[0].count("Add {x}.\n1, {2}\n") == 2  # of one row there is no other
    assert "Instruction: Add {x}.\n1, {2}\nResponse: {3}\n" in generator.responses[0]
    assert list(found["c"][0].fields) == ["instruction", "input", "response"]


@pytest.mark.parametrize(
    ("answer", "instruction"),
    [
        ("Name a planet.", "Name a planet."),
        ("**Instruction 3:** Name a planet.", "Name a planet."),
        ("New instruction: Name a planet.\n\nResponse: Mars.", "Name a planet."),
        ("Name\na planet.\n### Instruction:\nName a star.", "Name\na planet."),
        ("Instruction 3:", ""),
        ("Write an instruction: short.", "Write an instruction: short."),
    ],
)
def test_instructions_in_answers(answer, instruction):
    assert extract_instruction(answer) == instruction


@pytest.mark.parametrize(
    ("answer", "response"),
    [
        ("Response: Mars.", "Mars."),
        ("Mars.\n\nExample 2:\nInstruction: Name a star.\nResponse: Vega.", "Mars."),
        ("Two cases.\nExample 1: a\nExample 2: b", "Two cases.\nExample 1: a\nExample 2: b"),
        ("# Mars\n### Size\nsmall", "# Mars\n### Size\nsmall"),
        ("Mars.\nInstruction: Name a star.", "Mars."),
    ],
)
def test_responses_in_answers(answer, response):
    assert extract_response(answer) == response


def test_a_run_that_was_killed_goes_on_and_makes_what_it_would_have_made(tmp_path):
    def write(number):
        return "" if number % 4 == 1 else unlike(number)

    whole = SelfInstruct(9, Scripted(write), batch_size=4, folder=str(tmp_path / "whole"))
    expected = whole.augment(CLIENTS, [], seed=0)
    dying = Scripted(write, fail_after=7)  # three batches of two calls, and the instructions of the fourth
    with pytest.raises(OSError, match="gone"):
        SelfInstruct(9, dying, batch_size=4, folder=str(tmp_path / "own")).augment(CLIENTS, [], seed=0)
    assert len(dying.instructions) == 16
    going_on = Scripted(lambda number: write(12 + number))
    again = SelfInstruct(9, going_on, batch_size=4, folder=str(tmp_path / "own"))
    assert again.augment(CLIENTS, [], seed=0) == expected
    assert going_on.draws == whole.generator.draws[6:]
    assert len(going_on.instructions) == len(whole.generator.instructions) - 12
    assert again.record() == whole.record()
    (one,), (other,) = ((tmp_path / name).iterdir() for name in ("own", "whole"))
    assert one.read_bytes() == other.read_bytes()


def test_a_run_that_is_given_again_asks_nothing(tmp_path):
    options = {"folder": str(tmp_path)}
    first = SelfInstruct(3, Scripted(), **options).augment(CLIENTS, [], seed=0)
    silent = Scripted(fail_after=0)
    assert SelfInstruct(3, silent, **options).augment(CLIENTS, [], seed=0) == first
    assert not silent.calls


@pytest.mark.parametrize("change", ["seed", "number", "rows", "limit", "generator"])
def test_whoever_changes_anything_begins_anew(change, tmp_path):
    class Other(Scripted):
        pass

    SelfInstruct(3, Scripted(), folder=str(tmp_path)).augment(CLIENTS, [], seed=0)
    generator = Other() if change == "generator" else Scripted()
    number, limit = 4 if change == "number" else 3, 0.6 if change == "limit" else 0.7
    clients = {**CLIENTS, "c1": rows("saturn", "venus")} if change == "rows" else CLIENTS
    trying = SelfInstruct(number, generator, max_rouge_l=limit, folder=str(tmp_path))
    trying.augment(clients, [], seed=int(change == "seed"))
    assert generator.calls
    assert len(list(tmp_path.iterdir())) == 2


def test_a_torn_last_line_is_made_again_and_a_damaged_one_before_is_refused(tmp_path):
    options = {"batch_size": 2, "folder": str(tmp_path)}
    expected = SelfInstruct(3, Scripted(), **options).augment(CLIENTS, [], seed=0)
    (file,) = tmp_path.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    assert json.loads(lines[0])["class"] == "SelfInstruct"
    file.write_bytes(b"".join(lines[:3]) + lines[3][:-9])
    again = Scripted(lambda number: unlike(4 + number))
    assert SelfInstruct(3, again, **options).augment(CLIENTS, [], seed=0) == expected
    assert (len(again.instructions), file.read_bytes()) == (2, b"".join(lines))
    file.write_bytes(b"".join([lines[0], b"[1]\n", *lines[2:]]))
    with pytest.raises(ValueError, match="line 2 is damaged; delete the lines from there on"):
        SelfInstruct(3, Scripted(), **options).augment(CLIENTS, [], seed=0)
