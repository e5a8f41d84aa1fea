"""Clients with rows of one word, candidates that a test wants, and a model that scores them as a test wants."""

import json
from collections import Counter

from nested import nested
from scripted_model import ScriptedModel
from torch import nn

from fedlight.datamodules.clients.partition import Partition
from fedlight.datamodules.synthesis.datamodule import SyntheticInstructionDataModule
from fedlight.datamodules.synthesis.synthesis import Candidate, Synthesis

TEMPLATE = "POST: {instruction} ANSWER:"
COLUMNS = {"instruction": "instruction", "response": "output"}
OWN = [{"instruction": f"w{i}", "output": "x"} for i in range(8)]


class Listed(Synthesis):
    """Client number n makes so many candidates w20, w21 w21, ...: each a word longer than the one before."""

    def __init__(self, sizes=(6, 2), weight=1.0, chooses=True):
        super().__init__()
        self.sizes, self.weight, self.chooses = sizes, weight, chooses
        self.calls = []

    def make(self, clients, template, model, seed):
        self.calls.append(({client: len(rows) for client, rows in clients.items()}, seed))
        made = {
            client: [
                Candidate({"instruction": f"w{20 + n}", "response": " ".join(["y"] * (n + 1))}, self.weight)
                for n in range(self.sizes[int(client[1:])])
            ]
            for client in clients
        }
        self.counts = Counter(tried=9, survived=sum(map(len, made.values())))
        return made


class Words(Listed):
    """Candidates in words that the tiny model knows, each a word longer than the one before, and other ones every time."""

    def make(self, clients, template, model, seed):
        made = super().make(clients, template, model, seed)
        words = ["rude", "plain", "kind", "right", "wrong", "silent"]
        for own in made.values():
            for n, candidate in enumerate(own):
                text = f"which {words[seed % 6]} {words[n]} ?"
                candidate.fields.update(instruction=text, input="", response=" ".join(words[: n + 1]))
        return made


class Scorer(ScriptedModel, nn.Module):
    """Knows the loss of every response: ``losses`` by its number of words; counts what it is asked."""

    def __init__(self, losses=()):
        nn.Module.__init__(self)
        ScriptedModel.__init__(self)
        self.losses, self.asked = list(losses), []

    def log_likelihoods(self, prompts, continuations):
        self.asked.append((list(prompts), [list(own) for own in continuations]))
        found = super().log_likelihoods(prompts, continuations)
        return [
            [
                one._replace(
                    log_prob=-self.losses[one.tokens - 1] * one.tokens if prompt else -one.tokens * 2.0
                )
                for one in own
            ]
            for prompt, own in zip(prompts, found, strict=True)
        ]


def make_data(
    folder, tokenizer, synthesis=None, setup=True, kind=SyntheticInstructionDataModule, own=OWN, **options
):
    """Two clients with four rows each, unless told otherwise."""
    file = folder / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in own))
    settings = {"template": TEMPLATE, "tokenizer": tokenizer, "batch_size": 2, "columns": COLUMNS}
    settings |= {"partition": Partition("iid", 2), "val_share": 0.0, **options}
    if kind is SyntheticInstructionDataModule:
        settings["synthesis"] = synthesis or Listed()
    module = kind(str(file), **nested(kind, **settings))
    if setup:
        module.setup("fit")
    return module
