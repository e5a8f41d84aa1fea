"""Memory extraction: the model is given the beginning of its prompt template and writes instructions from memory.

Attack of Carlini et al., "Extracting Training Data from Large Language Models", USENIX Security 2021,
https://arxiv.org/abs/2012.07805, on instruction tuning, as in Wang et al. (FedDCA, https://arxiv.org/abs/2409.20135,
appendix A.8). Their one prompt, Figure 8, is the beginning of Alpaca's form for rows without an input, "Below is an
instruction that describes a task. Write ...", up to ``### Instruction:``. With ``forms="all"`` the beginning of the form for
rows with an input is used in turn as well, since such rows are trained with it. The model then answers each instruction that
it has written, and its answers are compared with the clients' responses.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from fedlight.callbacks.attacks.attack import (
    WRITING,
    Attack,
    Found,
    HoldsClientRows,
    render_prompts,
    sample_texts,
    without_planted,
    write_answers,
)
from fedlight.callbacks.attacks.records import GLOBAL
from fedlight.evaluation.extraction import (
    are_written,
    compare_with_all,
    identifiers,
    later_texts,
    opening_of,
)
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.evaluation.tasks.task import continuation
from fedlight.support.checks import check_range
from fedlight.support.types import Fields

Forms = Literal["all", "without_input"]


class MemoryExtraction(Attack):
    """Attack that samples instructions with responses and compares them with those of the clients, or of an upload's client.

    Compared is the text from the template's first slot to where the template continues: Alpaca's instruction, or the
    instruction and its input where nothing separates the two. Metrics: ``rouge_l`` is the mean over all pairs (FedDCA),
    ``rouge_l_best`` the mean of the best matches, ``exact`` the share of samples that equal an instruction, ``extracted``
    the share of different instructions that were sampled, ``canaries`` the share of planted instructions that were
    sampled; see `fedlight.evaluation.extraction`. ``response_rouge_l`` and so on say the same of the responses, and
    ``response_identifiers`` is the share of numbers and codes in the clients' responses that a sampled one has exactly.

    Args:
        samples: number of texts to sample.
        temperature: temperature of the samples, above 0.
        top_p: share of the probability to draw from, in (0, 1].
        max_new_tokens: largest number of tokens in a sample, and in its response, which is written greedily.
        batch_size: samples that are written at once.
        clients: ids of the clients whose instructions are searched for in the server's model; None: all.
        forms: forms of the template at the start of samples: ``without_input``, only the one for rows without an input
            (FedDCA's Figure 8, with Alpaca), or ``all`` in turn. A template of one form, such as ``alpaca_joined``, begins
            in one way. The samples are compared with the instructions of all rows in either case.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module or data lack a needed part, a client has no rows, or
            the template begins with a slot.
    """

    name: ClassVar[str] = "memory_extraction"
    needs = WRITING

    def __init__(
        self,
        samples: int = 100,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 64,
        batch_size: int = 50,
        clients: Sequence[str] | None = None,
        forms: Forms = "without_input",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.check_at_least_one(samples=samples, max_new_tokens=max_new_tokens, batch_size=batch_size)
        if clients is not None and not clients:
            raise ValueError("MemoryExtraction.clients=[] must name clients, or be null for all")
        check_range("MemoryExtraction.temperature", temperature, 0, float("inf"), above_low=True)
        check_range("MemoryExtraction.top_p", top_p, 0, 1, above_low=True)
        self.samples, self.temperature, self.top_p, self.forms = samples, temperature, top_p, forms
        self.max_new_tokens, self.batch_size, self.clients = max_new_tokens, batch_size, clients

    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        self._template = data.template
        forms = [data.template.text, *([data.template.without.text] if data.template.without else [])]
        self._opening = opening_of(forms)
        used = forms[-1:] if self.forms == "without_input" else forms  # Figure 8 of FedDCA has no input
        self._prefixes = opening_of(used).prefixes
        # Reversed, so that the first of two forms with the same prefix stays.
        self._later = {opening_of([form]).prefixes[0]: later_texts(form) for form in reversed(used)}
        self._rows, self._planted = data.client_rows, data.planted
        self._own = {client: self._bodies(rows) for client, rows in data.client_rows.items()}
        self._codes = {
            client: {code for row in rows for code in identifiers(row["response"])}
            for client, rows in without_planted(data).items()  # canaries have their own metric
        }
        wanted = list(self._own if self.clients is None else self.clients)
        if unknown := [client for client in wanted if not self._own.get(client)]:
            raise ValueError(
                f"MemoryExtraction.clients: {unknown[0]!r} has no rows; there are {', '.join(list(self._own)[:5])} ..."
            )
        self._everybody = wanted

    def attack(self, module: Any, client: str | None) -> Found:
        clients = self._everybody if client is None else [client]
        texts = self._sample(module, client or GLOBAL)
        metrics, records = compare_with_all(texts, [text for owner in clients for text in self._own[owner]])
        answered, answers = self._answer(module, texts, client)
        if answers:
            truths = [row["response"] for owner in clients for row in self._rows[owner]]
            compared, more = compare_with_all(answers, truths)
            if codes := set().union(*(self._codes[owner] for owner in clients)):
                compared["identifiers"] = float(np.mean(are_written([*codes], answers)))
            metrics |= {f"response_{name}": value for name, value in compared.items()}
            for at, record in zip(answered, more, strict=True):
                records[at] |= {f"response_{name}": value for name, value in record.items()}
        planted: list[dict[str, Any]] = [
            {"canary": body, "client": owner, "recovered": are_written([body], texts)[0]}
            | {"secret": row["response"], "secret_recovered": are_written([row["response"]], answers)[0]}
            for owner in clients
            for row in self._planted.get(owner, ())
            for body in self._bodies([row])
        ]
        if planted:
            metrics["canaries"] = sum(row["recovered"] for row in planted) / len(planted)
        if planted and answers:
            metrics["response_canaries"] = sum(row["secret_recovered"] for row in planted) / len(planted)
        return Found(metrics, [*records, *planted])

    def _sample(self, module: AnswersPrompts, target: str) -> list[str]:
        """Return texts that continue the beginnings of the template's forms in turn."""
        texts: list[str] = []
        sampling = Sampling(self.temperature, self.top_p, self.max_new_tokens)
        for at, prefix in enumerate(self._prefixes):
            seed = self.seed, self.name, target, at  # all rounds draw alike
            stops = self._opening.stops
            texts += sample_texts(module, prefix, self._share(at), self.batch_size, sampling, seed, stops)
        return texts

    def _answer(self, module: Any, texts: Sequence[str], client: str | None) -> tuple[list[int], list[str]]:
        """Return the indices of the sampled texts that leave room for a response, and their greedy responses."""
        forms = [prefix for at, prefix in enumerate(self._prefixes) for _ in range(self._share(at))]
        answers: dict[int, str] = {}
        for form, later in self._later.items():
            asked = [index for index, prefix in enumerate(forms) if prefix == form]
            written, prompts = [texts[index] for index in asked], [form] * len(asked)
            # Where a form has an input after the instruction, the model writes that first.
            for fixed, stop in zip(later, [*later[1:], ""], strict=True):
                prompts = [
                    prompt + continuation(prompt, text) + fixed
                    for prompt, text in zip(prompts, written, strict=True)
                ]
                pairs = self._keep_fitting(
                    module, list(zip(asked, prompts, strict=True)), prompts, self.max_new_tokens, client
                )
                asked, prompts = [index for index, _ in pairs], [prompt for _, prompt in pairs]
                stops = [stop.strip()] if stop.strip() else []
                written = write_answers(module, prompts, self.max_new_tokens, self.batch_size, stops)
            answers |= dict(zip(asked, written, strict=True))
        return sorted(answers), [answers[index] for index in sorted(answers)]

    def _share(self, form: int) -> int:
        """Return the number of samples that begin with a form."""
        return len(range(form, self.samples, len(self._prefixes)))

    def _bodies(self, rows: Sequence[Fields]) -> list[str]:
        return [self._opening.body(text) for text in render_prompts(self._template, rows)]
