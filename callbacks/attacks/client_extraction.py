"""Client extraction: one client of the federation searches the server's model for private items of the other clients.

Attack of Hu et al., "Simple Yet Effective: Extracting Private Data Across Clients in Federated Fine-Tuning of Large Language
Models", Findings of IJCNLP-AACL 2025, https://arxiv.org/abs/2506.06060 (FedPII). The attacker follows the protocol. It has
the server's model and its own rows, and knows no text of another client. It prompts the model with the texts that precede
private items in its own rows, the most frequent ones first, and may train a copy of the model on these items before. With
``V`` the victims' items, ``E`` those of them that a written text contains, and ``Q`` the number of written texts, here

    coverage = |E| / |V|,    efficiency = |E| / Q.

Rows here are instructions with responses, so an item is preceded by its prompt and the beginning of its response. The paper
has names and addresses as well. Items here are numbers and codes, which a rule finds, and planted secrets. A short secret is
also written by chance, so the share of random secrets in the same texts is measured beside it.
"""

import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from fedlight.callbacks.attacks.attack import (
    WRITING,
    Attack,
    Found,
    HoldsClientRows,
    render_prompts,
    sample_texts,
)
from fedlight.evaluation.extraction import (
    are_written,
    contains_identifier,
    identifiers,
    last_words,
    normalize_space,
    span_of,
)
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.support.checks import check_range, refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.torch_parts import eval_mode

RANDOM_SECRETS = 1000
"""Number of random secrets of no client that are searched for, to measure what is written by chance."""


class Item(NamedTuple):
    """Private item of a row."""

    text: str  # the item, with one blank for each white space
    context: str  # the last words before it
    written: str  # the item as it follows the context
    planted: bool  # whether it is the secret of a canary


class ClientExtraction(Attack):
    """Attack of one client on private items of all others, by the server's model after a round.

    Private items are the numbers and codes of a response with at least three digits, apart from those of its prompt
    (`fedlight.evaluation.extraction.identifiers`), and the secrets of planted canaries. The victims' items are the
    different items of the other clients that the attacker's rows do not contain. The attacker prompts with the most
    frequent contexts of its own items and draws ``samples`` texts after each.

    Metrics: ``coverage``, the share of the victims' items that a text contains exactly; ``efficiency``, the number of these
    items over the number of texts; ``queries``, the number of texts; ``left_out``, the number of the attacker's items too
    long for the model; ``canaries``, the coverage of planted secrets alone; ``chance``, the share of up to 1,000
    random secrets of no client that a text contains: where ``canaries`` is above it, the model remembers.

    Args:
        client: id of the attacker, one with private items; None: drawn by ``seed``. It need not take part in the round.
        prefixes: largest number of contexts.
        context_words: words of a context, separated by white space; None: the prompt and the response up to the item.
        samples: texts for each context.
        temperature: temperature of the texts, above 0.
        max_new_tokens: largest number of tokens in a text.
        steps: steps of AdamW that the attacker first makes on a copy of the trained parameters, with its contexts as prompts
            and its items as responses; 0: none. The copy is dropped afterwards.
        lr: learning rate of these steps, above 0.
        batch_size: texts that are drawn, or items that are trained on, at once.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``seed``, ...; ``targets`` is ``global``, since a client
            sees no upload of another one.

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module or data lack a needed part, or the attacker, or all
            others, have no private item.
    """

    name: ClassVar[str] = "client_extraction"
    needs = WRITING

    def __init__(
        self,
        client: str | None = None,
        prefixes: int = 10,
        context_words: int | None = 8,
        samples: int = 10,
        temperature: float = 1.0,
        max_new_tokens: int = 32,
        steps: int = 0,
        lr: float = 1e-3,
        batch_size: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.targets != ("global",):
            raise ValueError(
                f"ClientExtraction.targets={list(self.targets)}: a client sees the server's model alone; name global alone"
            )
        self.check_at_least_one(
            prefixes=prefixes, samples=samples, max_new_tokens=max_new_tokens, batch_size=batch_size
        )
        refuse_below(1, "ClientExtraction.", context_words=context_words)
        refuse_below(0, "ClientExtraction.", steps=steps)
        check_range("ClientExtraction.temperature", temperature, 0, float("inf"), above_low=True)
        check_range("ClientExtraction.lr", lr, 0, float("inf"), above_low=True)
        self.client, self.prefixes, self.context_words = client, prefixes, context_words
        self.samples, self.temperature, self.max_new_tokens = samples, temperature, max_new_tokens
        self.steps, self.lr, self.batch_size = steps, lr, batch_size

    def check_settings(self, module: object, data: object) -> None:
        super().check_settings(module, data)
        if self.steps and not (hasattr(module, "response_batch") and hasattr(module, "example_losses")):
            raise ValueError(
                f"ClientExtraction.steps={self.steps} needs a module with response_batch and example_losses, such as "
                f"SFTModule, not {type(module).__name__}: set steps to 0"
            )

    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        items = {client: self._items_of(data, client) for client in sorted(data.client_rows)}
        attacker = self._choose([client for client in items if items[client]])
        self._items = items.pop(attacker)
        rows = data.client_rows[attacker]
        known = [
            prompt + data.template.continuation(row["response"])
            for row, prompt in zip(rows, render_prompts(data.template, rows), strict=True)
        ]
        owners: dict[str, list[str]] = {}
        for client, its_items in items.items():
            for text in sorted({item.text for item in its_items}):
                owners.setdefault(text, []).append(client)
        self._owners = {text: owners[text] for text in _unwritten([*owners], known)}
        if not self._owners:
            raise ValueError(
                f"ClientExtraction: no other client has private items that those of {attacker!r} do not contain: {_REMEDY}"
            )
        self._planted = {item.text for its_items in items.values() for item in its_items if item.planted}
        canaries = getattr(data, "canaries", None)
        drawn = canaries.secrets(RANDOM_SECRETS) if canaries else []
        self._random = _unwritten(sorted({*map(normalize_space, drawn)} - {*self._owners}), known)

    def attack(self, module: Any, client: str | None) -> Found:
        whole = [item.context + item.written for item in self._items]
        items = self._keep_fitting(module, self._items, whole, self.max_new_tokens, client)
        counts = Counter(item.context for item in items)
        # Equal counts by text, so that the order of rows does not matter.
        contexts = sorted(counts, key=lambda context: (-counts[context], context))[: self.prefixes]
        counted = {
            "queries": float(len(contexts) * self.samples),
            "left_out": float(len(self._items) - len(items)),
        }
        if not items:
            return Found(counted, [])
        with self._trained(module, items):
            drawn = [self._sample(module, context) for context in contexts]
        texts = [text for of_context in drawn for text in of_context]
        hits = dict(zip(self._owners, are_written([*self._owners], texts), strict=True))
        metrics = {"coverage": _mean(hits.values()), "efficiency": sum(hits.values()) / len(texts)}
        if planted := [hits[text] for text in hits if text in self._planted]:
            metrics["canaries"] = _mean(planted)
        if self._random:
            metrics["chance"] = _mean(are_written(self._random, texts))
        written = [code for code, hit in hits.items() if hit]
        records: list[dict[str, Any]] = [
            {"prefix": context, "text": text, "items": [c for c in written if contains_identifier(text, c)]}
            for context, of_context in zip(contexts, drawn, strict=True)
            for text in of_context
        ]
        records += [
            {"item": text, "clients": self._owners[text], "planted": text in self._planted, "recovered": hit}
            for text, hit in hits.items()
        ]
        return Found({**metrics, **counted}, records)

    def _choose(self, holders: Sequence[str]) -> str:
        """Return the attacker, among the clients with private items."""
        if not holders:
            raise ValueError(f"ClientExtraction: no client has private items: {_REMEDY}")
        if self.client is None:
            return random.Random(derive_seed(self.seed, self.name)).choice(holders)
        if self.client not in holders:
            raise ValueError(
                f"ClientExtraction.client={self.client!r} is no client with private items; such are "
                f"{', '.join(holders[:5])}"
            )
        return self.client

    def _items_of(self, data: HoldsClientRows, client: str) -> list[Item]:
        rows, planted = data.client_rows[client], data.planted.get(client, ())
        items = []
        for row, prompt in zip(rows, render_prompts(data.template, rows), strict=True):
            response, is_planted = row["response"], row in planted
            whole = prompt + data.template.continuation(response)
            for text in [normalize_space(response)] if is_planted else identifiers(response, prompt):
                start, end = (len(whole) - len(response) + at for at in span_of(response, text))
                # A blank belongs to the item's first token.
                before = whole[:start].rstrip(" ")
                context = last_words(before, self.context_words)
                items.append(Item(text, context, whole[len(before) : end], is_planted))
        return items

    def _sample(self, module: Any, context: str) -> list[str]:
        sampling = Sampling(self.temperature, 1.0, self.max_new_tokens)
        seed = self.seed, self.name, context  # all rounds draw alike
        return sample_texts(module, context, self.samples, self.batch_size, sampling, seed)

    @contextmanager
    def _trained(self, module: Any, items: Sequence[Item]) -> Iterator[None]:
        """Train on the attacker's items while the body runs, then restore parameters and gradients bit for bit."""
        if not self.steps:
            yield
            return
        pairs = sorted({(item.context, item.written) for item in items})
        random.Random(derive_seed(self.seed, self.name, "pairs")).shuffle(pairs)
        trained: list[nn.Parameter] = [weight for weight in module.parameters() if weight.requires_grad]
        kept = [(weight.detach().clone(), weight.grad) for weight in trained]
        try:
            optimizer = torch.optim.AdamW(trained, self.lr, weight_decay=0.0)
            # Without dropout, which would draw.
            with eval_mode(module):
                for step in range(self.steps + 1):  # the last one only checks the loss
                    size = min(self.batch_size, len(pairs))
                    batch = [pairs[(step * size + place) % len(pairs)] for place in range(size)]
                    loss = module.example_losses(module.response_batch(*zip(*batch, strict=True))).mean()
                    if not loss.isfinite():
                        raise ValueError(
                            f"ClientExtraction.lr={self.lr}: the attacker's training diverged; lower it"
                        )
                    if step < self.steps:
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
            yield
        finally:
            with torch.no_grad():
                for weight, (value, gradient) in zip(trained, kept, strict=True):
                    weight.copy_(value)
                    weight.grad = gradient


_REMEDY = "set data.rows.canaries, or give rows with numbers or codes of three digits in their responses"


def _unwritten(items: Sequence[str], texts: Sequence[str]) -> list[str]:
    return [item for item, hit in zip(items, are_written(items, texts), strict=True) if not hit]


def _mean(hits: Collection[bool]) -> float:
    return sum(hits) / len(hits)
