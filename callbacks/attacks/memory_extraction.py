"""Memory extraction: the model is given the beginning of its prompt template and writes instructions from memory.

Attack of Carlini et al., "Extracting Training Data from Large Language Models", USENIX Security 2021,
https://arxiv.org/abs/2012.07805, on instruction tuning, as in Wang et al. (FedDCA, https://arxiv.org/abs/2409.20135,
appendix A.8). Their one prompt, Figure 8, is the beginning of Alpaca's form for rows without an input, "Below is an
instruction that describes a task. Write ...", up to ``### Instruction:``. With ``forms="all"`` the beginning of the form for
rows with an input is used in turn as well, since such rows are trained with it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fedlight.callbacks.attacks.attack import Attack, Found, HoldsClientRows, render_prompts
from fedlight.callbacks.attacks.records import GLOBAL
from fedlight.evaluation.extraction import contains_secret, matches, memory_metrics, opening_of
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.support.checks import check_range
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields

Forms = Literal["all", "without_input"]


class MemoryExtraction(Attack):
    """Attack that samples instructions and compares each with all instructions of the clients, or of an upload's client.

    Compared is the text from the template's first slot to where the template continues: Alpaca's instruction, or the
    instruction and its input where nothing separates the two. Metrics: ``rouge_l`` is the mean over all pairs (FedDCA),
    ``rouge_l_best`` the mean of the best matches, ``exact`` the share of samples that equal an instruction, ``extracted``
    the share of different instructions that were sampled, ``canaries`` the share of planted instructions that were
    sampled; see `fedlight.evaluation.extraction`.

    Args:
        samples: number of texts to sample.
        temperature: temperature of the samples, above 0.
        top_p: share of the probability to draw from, in (0, 1].
        max_new_tokens: largest number of tokens in a sample.
        batch_size: samples that are written at once.
        clients: ids of the clients whose instructions are searched for in the server's model; None: all.
        forms: forms of the template with which samples begin: ``without_input``, only the one for rows without an input
            (FedDCA's Figure 8, with Alpaca), or ``all`` in turn. A template of one form, such as ``alpaca_joined``, begins
            in one way. The samples are compared with the instructions of all rows in either case.
        kwargs: further arguments of `Attack`: ``every_n_rounds``, ``targets``, ...

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module or data lack what is needed, a client has no rows, or
            the template begins with a slot.
    """

    name: ClassVar[str] = "memory_extraction"

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
        check_range("MemoryExtraction.temperature", temperature, 0, float("inf"), above_low=True)
        check_range("MemoryExtraction.top_p", top_p, 0, 1, above_low=True)
        self.samples, self.temperature, self.top_p, self.forms = samples, temperature, top_p, forms
        self.max_new_tokens, self.batch_size, self.clients = max_new_tokens, batch_size, clients

    def check_settings(self, module: object, data: object) -> None:
        super().check_settings(module, data)
        if not isinstance(module, AnswersPrompts):
            raise ValueError(
                "MemoryExtraction needs a module with generate and log_likelihoods, such as SFTModule, not "
                f"{type(module).__name__}"
            )

    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        self._template = data.template
        forms = [data.template.text, *([data.template.without.text] if data.template.without else [])]
        self._opening = opening_of(forms)
        self._prefixes = (opening_of(forms[-1:]) if self.forms == "without_input" else self._opening).prefixes
        self._own = {client: self._bodies(rows) for client, rows in data.client_rows.items()}
        self._planted = {client: self._bodies(rows) for client, rows in data.planted.items()}
        wanted = list(self._own if self.clients is None else self.clients)
        if unknown := [client for client in wanted if not self._own.get(client)]:
            raise ValueError(
                f"MemoryExtraction.clients: {unknown[0]!r} has no rows; there are {', '.join(list(self._own)[:5])} ..."
            )
        self._everybody = wanted

    def attack(self, module: Any, client: str | None) -> Found:
        clients = self._everybody if client is None else [client]
        references = [text for one in clients for text in self._own[one]]
        planted = [(one, text) for one in clients for text in self._planted.get(one, [])]
        texts = self._sample(module, client or GLOBAL)
        found = matches(texts, references)
        records: list[dict[str, Any]] = [
            {"text": text, **match._asdict(), "nearest": references[match.nearest]}
            for text, match in zip(texts, found, strict=True)
        ]
        metrics = memory_metrics(texts, references, found)
        if planted:
            recovered = [contains_secret(texts, text) for _, text in planted]
            metrics["canaries"] = sum(recovered) / len(planted)
            records += [
                {"canary": text, "client": one, "recovered": hit}
                for (one, text), hit in zip(planted, recovered, strict=True)
            ]
        return Found(metrics, records)

    def _sample(self, module: AnswersPrompts, target: str) -> list[str]:
        """Return texts that continue the beginnings of the template's forms in turn; all rounds draw alike."""
        texts: list[str] = []
        for at, prefix in enumerate(self._prefixes):
            left = len(range(at, self.samples, len(self._prefixes)))
            for start in range(0, left, self.batch_size):
                [drawn] = module.generate(
                    [prefix],
                    min(self.batch_size, left - start),
                    self.temperature,
                    self.top_p,
                    self.max_new_tokens,
                    derive_seed(self.seed, self.name, target, at, start),
                    stop=self._opening.stops,
                    strip=True,
                )
                texts += drawn
        return texts

    def _bodies(self, rows: Sequence[Fields]) -> list[str]:
        return [self._opening.body(text) for text in render_prompts(self._template, rows)]
