"""Which of two answers is better, by the selectors in this folder; needs torch, transformers and peft alone.

    python vote.py BASE '{"prompt": "..."}' "first answer" "second answer"

BASE is the hub name or the folder of the base model; it is left out for a merged selector, which is a whole model.

Each selector reads both answers in both orders, so that a taste for the first place cancels, and the mean of the
log-probabilities decides. Of several selectors (FedBiscuit, https://arxiv.org/abs/2407.03038) the majority decides.
"""

import json
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SETTINGS = "selector.json"


class Selectors:
    """Selectors of a folder on their base.

    Args:
        folder: with ``selector.json``.
        base: hub name or folder of the base; None for a merged selector.
    """

    def __init__(self, folder: str | Path, base: str | None = None) -> None:
        settings = json.loads((Path(folder) / SETTINGS).read_text(encoding="utf-8"))
        self.template, self.choices = settings["template"], settings["choices"]
        self.prior, self.temperature = settings["prior"], settings["temperature"]
        self.is_chat = settings["is_chat"]  # then the template holds its first tokens, if there are any
        self.max_tokens = settings["max_tokens"]
        self.names = settings["adapters"]
        self.tokenizer = AutoTokenizer.from_pretrained(base or folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
        for place, name in enumerate(self.names):
            path = Path(folder) if name == "default" else Path(folder) / name
            if place:
                self.model.load_adapter(str(path), adapter_name=name)
            else:
                from peft import PeftModel  # a merged selector does not need it

                self.model = PeftModel.from_pretrained(self.model, str(path), adapter_name=name)
        self.model.eval()

    def log_probs(self, fields: dict[str, str], first: str, second: str) -> list[tuple[float, float]]:
        """Return of each selector the mean log-probabilities that the first, and that the second answer is better."""
        pairs = []
        for name in self.names or [None]:
            if name is not None:
                self.model.set_adapter(name)
            as_a, as_b = self._shown(fields, first, second), self._shown(fields, second, first)
            # The first answer is A in one order and B in the other: a taste for a place cancels.
            pairs.append(((as_a[0] + as_b[1]) / 2, (as_a[1] + as_b[0]) / 2))
        return pairs

    def vote(self, fields: dict[str, str], first: str, second: str) -> tuple[int, int]:
        """Return the number of selectors that prefer the first, and the second answer."""
        pairs = self.log_probs(fields, first, second)
        return sum(a > b for a, b in pairs), sum(b > a for a, b in pairs)

    def _shown(self, fields: dict[str, str], a: str, b: str) -> list[float]:
        """Return the log-probabilities of both choices, with the answers in this order."""
        text = self.template.format(**fields, response_a=a.strip(), response_b=b.strip())
        texts = [f"{text} {choice}" for choice in self.choices]
        rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        plain = self.tokenizer("x", add_special_tokens=False)["input_ids"]
        opening = takewhile(lambda token: token not in plain, self.tokenizer("x")["input_ids"])
        ids = [*(() if self.is_chat else opening), *rows[0][:-1]]  # all but the choice, which is one token
        if len(ids) > self.max_tokens:
            raise ValueError(
                f"{len(ids)} tokens; the selectors were trained on at most {self.max_tokens}: shorten it"
            )
        with torch.no_grad():
            logits = self.model(torch.tensor([ids], device=self.model.device)).logits[0, -1]
        choices = logits[[row[-1] for row in rows]].float() - torch.tensor([0.0, self.prior])
        log_probs: list[float] = (choices / self.temperature).log_softmax(0).tolist()
        return log_probs


def main(arguments: list[str]) -> None:
    """Print the votes on two answers."""
    *base, fields, first, second = arguments
    selectors = Selectors(Path(__file__).parent, base[0] if base else None)
    votes = selectors.vote(json.loads(fields), first, second)
    winner = "first" if votes[0] > votes[1] else "second" if votes[1] > votes[0] else "neither"
    print(json.dumps({"better": winner, "votes": votes}))


if __name__ == "__main__":
    main(sys.argv[1:])
