"""Rows to make more of, and what self-generation made of them, with its counts checked."""

from fedlight.datamodules.synthesis.prompts import FEWFEDPIT_PROMPTS
from fedlight.datamodules.synthesis.self_generation import NewInstructions, SelfGeneration
from fedlight.datamodules.text.templates import Template

ALPACA = Template.named("alpaca")


def rows(number, inputs=0, words="apple"):
    return [
        {
            "instruction": f"explain {words} number{n} to my{n} grandmother{n}",
            "input": f"given{n}" if n < inputs else "",
            "response": f"it{n} is{n} so{n}",
        }
        for n in range(number)
    ]


def in_words(**settings):
    """The prompts that need no template."""
    return SelfGeneration(prompts=FEWFEDPIT_PROMPTS, **settings)


def once(number, max_new_tokens=64, **settings):
    """Drafts that are dropped are not replaced."""
    return in_words(
        number=number, instructions=NewInstructions(max_new_tokens=max_new_tokens, tries=number), **settings
    )


def made(synthesis, clients, model, seed=0, template=ALPACA):
    found = synthesis.make(clients, template, model, seed)
    sizes = {client: len(own) for client, own in found.items()}
    assert list(found) == list(clients)
    assert synthesis.counts["survived"] == sum(sizes.values())
    least, most = synthesis.number * len(clients), synthesis.max_tries * len(clients)
    assert least <= synthesis.counts["tried"] <= most
    assert sum(synthesis.counts.values()) == 2 * synthesis.counts["tried"]  # nothing is lost
    lacking = [synthesis.number - size for size in sizes.values()]
    assert min(lacking) >= 0
    assert synthesis.notes["candidates_missing"] == sum(lacking)
    assert synthesis.notes["clients_short"] == sum(map(bool, lacking))
    return {client: [candidate.fields for candidate in own] for client, own in found.items()}


def dropped(synthesis):
    return {name: n for name, n in synthesis.counts.items() if name not in ("tried", "survived") and n}
