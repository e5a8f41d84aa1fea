import math

import pytest
import torch
from refusals import refusal

from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.synthesis.pseudo_responses import PseudoResponses
from fedlight.datamodules.synthesis.synthesis import Candidate, Dropped
from fedlight.datamodules.text.templates import Template
from fedlight.modules.sft import SFTModule

Q = Template("Q: {question} {note} A:")


class Speaker:
    """Answers from a table; the energy of an answer is its length with a minus."""

    def __init__(self, answers):
        self.answers = answers
        self.asked = []

    def generate(self, prompts, n, temperature, top_p, max_new_tokens, seed, *, stop, strip):
        assert (n, temperature, list(stop), strip) == (1, 0.0, [], False)
        self.asked.append(list(prompts))
        return [[self.answers[prompt]] for prompt in prompts]

    def free_energies(self, prompts, answers, temperature):
        assert all(prompt.endswith("A:") for prompt in prompts)
        assert all(answer.startswith(" ") for answer in answers)
        return [-float(len(answer.strip())) for answer in answers]


def row(question, response="own"):
    return {"question": question, "note": "", "response": response}


def test_prompts_are_answered_and_weighted_within_the_client():
    model = Speaker({"Q: a  A:": "four", "Q: b  A:": "six6", "Q: c  A:": "sevens", "Q: d  A:": "t"})
    made = PseudoResponses(energy_temperature=2.0).make(
        {"u": [row("a"), row("c"), row("a", "another")], "v": [row("d")], "w": []}, Q, model, seed=0
    )
    # Energies of u: -4 and -6, so 1 for the second and exp(-2 / 2) for the first.
    assert made == {
        "u": [Candidate(row("a", "four"), pytest.approx(math.exp(-1))), Candidate(row("c", "sevens"), 1.0)],
        "v": [Candidate(row("d", "t"), 1.0)],
        "w": [],
    }
    assert sorted(sum(model.asked, [])) == ["Q: a  A:", "Q: c  A:", "Q: d  A:"]


def test_empty_answers_are_dropped_and_counted():
    synthesis = PseudoResponses()
    made = synthesis.make({"u": [row("a"), row("b")]}, Q, Speaker({"Q: a  A:": "", "Q: b  A:": "x"}), seed=0)
    assert made == {"u": [Candidate(row("b", "x"), 1.0)]}
    assert synthesis.counts == {"tried": 2, "survived": 1, "empty": 1}
    assert synthesis.make({"u": [row("a")]}, Q, Speaker({"Q: a  A:": ""}), seed=0) == {"u": []}
    assert synthesis.counts == {"tried": 1, "empty": 1}
    assert synthesis.dropped == [Dropped("u", row("a", ""), "empty")]


@pytest.fixture(scope="module")
def toy():
    module = SFTModule("toy", dtype="fp32")
    module.configure_model()
    return module


@pytest.fixture(scope="module")
def rows():
    return [{**row, "response": "own"} for row in load_rows("toy:prompts?size=12", "train")]


def test_a_real_model_answers_and_weighs_as_one_prompt_at_a_time(toy, rows):
    template, synthesis = Template.named("toy_generation"), PseudoResponses(40, batch_size=5)
    made = synthesis.make({"u": rows[:6], "v": rows[6:]}, template, toy, seed=0)
    assert synthesis.counts["survived"] == sum(map(len, made.values())) >= 8
    assert sum(count for name, count in synthesis.counts.items() if name != "tried") == 12
    for own in made.values():
        energies = []
        for candidate in own:
            prompt = template.render(candidate.fields).text
            [[answer]] = toy.generate([prompt], temperature=0.0, max_new_tokens=40)
            assert candidate.fields["response"] == answer
            ids = toy.tokenizer(f"{prompt} {answer}", add_special_tokens=False)["input_ids"]
            opened = toy.tokenizer("x")["input_ids"][:1]
            opening = opened if opened == [toy.tokenizer.bos_token_id] else []
            toy.network.eval()
            with torch.no_grad():
                logits = toy.network(input_ids=torch.tensor([opening + ids])).logits[0].double()
            length = len(ids) - len(toy.tokenizer(prompt, add_special_tokens=False)["input_ids"])
            energies.append(float(-logits[-length - 1 : -1].logsumexp(-1).mean()))
        expected = [math.exp(min(energies) - energy) for energy in energies]
        assert [candidate.weight for candidate in own] == pytest.approx(expected, rel=1e-3)
        assert max(candidate.weight for candidate in own) == 1.0
    again = synthesis.make({"v": rows[6:]}, template, toy, seed=5)  # greedy: whoever else is there
    assert [one.fields for one in again["v"]] == [one.fields for one in made["v"]]


def test_answers_without_an_end_are_dropped(toy, rows):
    synthesis = PseudoResponses(max_response_tokens=1)
    assert synthesis.make({"u": rows[:6]}, Template.named("toy_generation"), toy, seed=0) == {"u": []}
    assert synthesis.counts == {"tried": 6, "cut_off": 6}


def test_what_candidates_depend_on_is_said():
    expected = {"class": "PseudoResponses", "max_response_tokens": 256, "energy_temperature": 1.0}
    assert PseudoResponses(batch_size=3).settings() == expected
    assert not PseudoResponses().chooses


@pytest.mark.parametrize("name", ["max_response_tokens", "batch_size"])
def test_numbers_below_one_are_refused(name):
    with refusal(f"{name}=0 must be at least 1"):
        PseudoResponses(**{name: 0})


@pytest.mark.parametrize("temperature", [0.0, math.nan])
def test_a_temperature_out_of_range_is_refused(temperature):
    with refusal(f"energy_temperature={temperature} must be above 0"):
        PseudoResponses(energy_temperature=temperature)


def test_a_model_without_energies_is_refused():
    class Mute:
        generate = Speaker.generate

    with pytest.raises(TypeError, match=r"Mute has no free_energies.*train an SFTModule"):
        PseudoResponses().make({"u": [row("a")]}, Q, Mute(), seed=0)
