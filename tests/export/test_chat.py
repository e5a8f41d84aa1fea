"""``fedlight chat``: both answers are those of the run and of its base, and selectors say which they prefer."""

import io
import re
import sys

import numpy as np
import pytest
import torch
from tiny_world import fedlight, refused

from fedlight.datamodules.text.encoding import Comparison
from fedlight.datamodules.text.templates import Template
from fedlight.export import chat
from fedlight.export.opened import open_run
from fedlight.export.vote import Selectors
from fedlight.export.write import template_of

PAIR = ("bees rambles", "carla sounds")
POSTS = ["carla sounds longer bees", "finn"]


@pytest.fixture
def piped(monkeypatch):
    """Lines of a pipe for ``fedlight chat``, and a wide terminal for its answers."""

    def chat_with(lines, *arguments):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        monkeypatch.setenv("COLUMNS", "90")  # both answers below each other
        return fedlight("chat", *map(str, arguments))

    return chat_with


def panels(shown):
    """The texts of the panels, in order."""
    found = []
    for line in shown.splitlines():
        if line.startswith("╭"):
            found.append("")
        elif line.startswith("│"):
            found[-1] = f"{found[-1]} {line.strip('│ ')}".strip()
    return found


def test_both_answers_are_greedy_ones_of_the_run_and_of_its_base(run, piped):
    done = piped(["", *POSTS], run, "--max-new-tokens", 8)
    assert done.code == 0, done.err
    module = open_run(run).load()
    template = template_of(open_run(run))
    fields = dict.fromkeys(template.slots, "")
    prompts = [template.render({**fields, chat._slot_of(template): post}).text for post in POSTS]
    settings = {"n": 1, "temperature": 0.0, "max_new_tokens": 8}
    raw, tuned = (module.generate(prompts, raw=is_raw, **settings) for is_raw in (True, False))
    expected = [text for pair in zip(raw, tuned, strict=True) for (text,) in pair]
    assert panels(done.out) == [" ".join(text.split()) or "(nothing)" for text in expected]
    assert expected[0] != expected[1]  # else nothing is shown


def test_the_preference_is_that_of_the_exported_selectors(selectors, base, exported_selectors):
    exported = Selectors(exported_selectors, base)
    fields = dict.fromkeys(Template.named(exported.template, asks="choice").slots, "apple")
    with chat._selector(str(selectors)) as judge:
        said = chat.preference(judge, fields, "apple", *PAIR)
        assert chat.preference(judge, fields, "apple", PAIR[0], PAIR[0]) == "both answers are the same"
        assert "max_tokens" in chat.preference(judge, fields, "apple", PAIR[0], f"{PAIR[1]} " * 200)
    pairs = exported.log_probs(fields, *PAIR)
    shares = [float(torch.tensor(pair).softmax(0)[1]) for pair in pairs]
    assert [float(share) for share in re.findall(r"0\.\d+", said)] == pytest.approx(shares, abs=0.001)
    votes = exported.vote(fields, *PAIR)
    winner = "tuned" if votes[1] > votes[0] else "raw"
    assert said.startswith(f"{max(votes)} of 3 selectors prefer the {winner} answer")


def test_two_orders_of_an_undecided_selector_cancel():
    class First:
        template, max_tokens = Template("Q: {prompt} A: {response_a} B: {response_b}:", "prompt"), 9

        def log_probs(self, pairs):
            assert pairs == [Comparison({"prompt": "why"}, "x", "y")]
            return np.log([[[0.75, 0.25]]])

    said = chat.preference(First(), {"prompt": ""}, "why", "x", "y")
    assert said == "the selector prefers the raw answer (probability of the tuned one: 0.250)"


def test_a_pair_is_compared_after_each_answer(run, selectors, piped):
    done = piped(POSTS, run, "--selector", selectors, "--max-new-tokens", 4)
    assert done.code == 0, done.err
    assert len(re.findall(r"selectors prefer|both answers are the same", done.out)) == len(POSTS)


def test_a_prompt_that_is_too_long_is_told_and_the_next_one_answered(run, piped):
    done = piped(["word " * 5000, POSTS[0]], run, "--max-new-tokens", 4)
    assert done.code == 0, done.err
    assert done.out.count("not answered: ") == 1
    assert len(panels(done.out)) == 2


def test_what_cannot_be_talked_with_is_refused_with_its_remedy(run, selectors, piped):
    assert "this one with --selector" in refused(piped([], selectors))
    assert "is no selector" in refused(piped([], run, "--selector", run))
    for name in ("nothing", "prompt"):
        assert "besides prompt, which is typed" in refused(piped([], run, "--set", f"{name}=x"))
    assert "SLOT=TEXT" in refused(piped([], run, "--set", "nothing"))
    assert f"--seed={2**64} must be in" in refused(piped([], run, "--seed", 2**64))


def test_ctrl_d_and_quit_end_a_conversation(run, monkeypatch):
    lines = iter(["", "/quit"])
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: next(lines))
    assert fedlight("chat", str(run)).code == 0
    monkeypatch.setattr("rich.console.Console.input", lambda self, prompt: (_ for _ in ()).throw(EOFError))
    assert fedlight("chat", str(run)).code == 0
