import pytest
from scripted_model import ScriptedModel
from self_generating import dropped, in_words, made, rows

from fedlight.datamodules.synthesis.self_generation import NewInstructions


def of_prompt(bad_of=lambda client_word, number: False):
    """A model whose instructions follow from the prompt: bad ones by the client's word and the count of its prompts."""
    seen = {}

    class Model(ScriptedModel):
        def _one(self, prompt):
            if prompt.endswith("\nInput:"):
                return super()._one(prompt)
            self.first.append(prompt)
            word = prompt.split("explain ")[1].split()[0]
            number = seen[word] = seen.get(word, -1) + 1
            return "?!?" if bad_of(word, number) else f"write about {word} thing{number}"

    return Model()


@pytest.mark.parametrize("number", [5, 32])
def test_what_is_dropped_is_replaced_until_the_number_is_reached(number):
    model = of_prompt(lambda _, n: n % 2 == 0)
    synthesis = in_words(number=number)
    found = made(synthesis, {"a": rows(20)}, model)["a"]
    assert len(found) == number
    # Written out: every second prompt fails, and each pass asks for what is missing alone.
    asked, good, passes = 0, 0, []
    while good < number:
        passes.append(number - good)
        good += sum(n % 2 for n in range(asked, asked + passes[-1]))
        asked += passes[-1]
    assert [call[0] for call in model.calls if call[3] == ("\nTask ", "\n\n")] == [
        min(16, each - at) for each in passes for at in range(0, each, 16)
    ]
    assert synthesis.counts["tried"] == asked
    assert dropped(synthesis) == {"no_letter": asked - number}
    written = {f"write about apple thing{n}" for n in range(asked) if n % 2}
    assert {row["instruction"] for row in found} == written
    assert len(set(model.first)) == asked  # other demonstrations each time


def test_the_limit_of_tries_is_reached_and_what_is_missing_is_counted():
    model = of_prompt(lambda word, number: word == "pear" and number != 3)
    synthesis = in_words(number=4, instructions=NewInstructions(tries=10))
    clients = {"a": rows(9), "b": rows(9, words="pear"), "c": rows(9, words="plum")}
    found = made(synthesis, clients, model)
    assert {client: len(own) for client, own in found.items()} == {"a": 4, "b": 1, "c": 4}
    assert synthesis.counts["tried"] == 4 + 10 + 4
    assert dropped(synthesis) == {"no_letter": 9}
    assert synthesis.notes == {"fewer_demonstrations": 0, "candidates_missing": 3, "clients_short": 1}


def test_four_tries_for_each_candidate_unless_told_otherwise():
    synthesis = in_words(number=3)
    assert made(synthesis, {"a": rows(9)}, of_prompt(lambda *_: True)) == {"a": []}
    assert synthesis.counts["tried"] == synthesis.max_tries == 12
    with pytest.raises(ValueError, match=r"instructions.tries=31 must be at least number=32"):
        in_words(instructions=NewInstructions(tries=31))


def test_failed_responses_and_copies_are_replaced_too():
    own = rows(9)
    answers = {"do thing0": "no form", "do thing1": f"Input: {own[0]['instruction']}\nResponse: it0 is0 so0"}
    model = ScriptedModel(
        write=lambda n: "do it thing2" if n == 3 else f"do thing{n}",
        respond=lambda asked, _: answers.get(asked, "Input: none\nResponse: x"),
    )
    synthesis = in_words(number=3, instructions=NewInstructions(min_words=1), max_rouge_l=0.6)
    found = made(synthesis, {"a": own}, model)["a"]
    assert [row["instruction"] for row in found] == ["do thing2", "do it thing2", "do thing4"]
    assert dropped(synthesis) == {"no_match": 1, "near_example": 1}


def test_a_repetition_of_an_earlier_pass_is_one():
    texts = ["name the sun", "?!?", "name the sun", "name the moon"]
    synthesis = in_words(number=2)
    found = made(synthesis, {"a": rows(9)}, ScriptedModel(write=texts.__getitem__))["a"]
    assert [row["instruction"] for row in found] == ["name the sun", "name the moon"]
    assert dropped(synthesis) == {"no_letter": 1, "repeated": 1}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_client_that_the_first_pass_suffices_is_as_without_others_and_without_further_passes(temperature):
    short = {"pear": lambda number: number % 3 == 0, "apple": lambda _: False}

    def candidates(clients, **settings):
        model = of_prompt(lambda word, number: short[word](number))
        synthesis = in_words(number=6, temperature=temperature, **settings)
        return made(synthesis, clients, model), model

    both = {"a": rows(20), "b": rows(20, words="pear")}
    found, model = candidates(both)
    once, first_pass = candidates(both, instructions=NewInstructions(tries=6))
    assert len(found["a"]) == len(found["b"]) == 6 > len(once["b"])
    assert found["a"] == once["a"]
    assert found["b"][: len(once["b"])] == once["b"]
    assert model.first[:12] == first_pass.first  # the same prompts, and
    assert model.calls[:2] == first_pass.calls[:2]  # the same draws
    # What a client shows depends on itself alone, in further passes as well.
    alone, model_alone = candidates({"b": both["b"]})
    assert alone["b"] == found["b"]
    assert set(model_alone.first) == {prompt for prompt in model.first if "pear" in prompt}
