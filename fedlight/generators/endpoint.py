"""Text generators: the interface that Self-Instruct and judges ask, and the endpoint behind it.

An endpoint speaks OpenAI's chat-completions format, as do vLLM, llama.cpp, Ollama and most services.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedlight.datamodules.instructions.augmentation import settings_of
from fedlight.generators.answer_cache import AnswerCache
from fedlight.generators.chat_server import Answer, ChatServer
from fedlight.generators.request_costs import Costs, Limits, Prices, costs_of
from fedlight.support.checks import Checked, check_range, refuse_below
from fedlight.support.needs import Need, Package, Server
from fedlight.support.seeding import derive_seed


class TextGenerator(Checked, ABC):
    """Source of one text for each prompt. A subclass keeps every argument of its constructor under the same name."""

    without_effect: tuple[str, ...] = ()
    """Arguments on which no answer depends (a timeout, a folder), left out of `settings`."""

    sends_to: str | None = None
    """Host that receives the prompts; None where they stay on this machine."""

    shares_work: bool = False
    """Whether the processes of a team call `complete` together and share its prompts; otherwise one of them calls it."""

    @abstractmethod
    def complete(self, prompts: Sequence[str], draw: int = 0) -> list[str]:
        """Return one answer per prompt, in the order of the prompts; empty where there is none.

        Args:
            prompts: texts; a repeated prompt is drawn as often as it comes, if answers are drawn.
            draw: another number gives other answers to the same prompts, if answers are drawn.
        """

    def costs(self, prompts: Sequence[str], draw: int = 0) -> Costs | None:
        """Return the costs of `complete`, None where answers cost nothing; raise ValueError if they would pass a limit."""
        return None

    def settings(self) -> dict[str, object]:
        """Return the arguments on which answers depend, as plain values without secrets."""
        return settings_of(self, self.without_effect)

    def usage(self) -> dict[str, int]:
        """Return counts of requests and tokens so far, by name."""
        return {}

    def release(self) -> None:
        """Free the memory of a model; the next `complete` loads it again."""


@dataclass
class Usage:
    """Counts of a `ChatEndpoint`: answers of the server and of the cache, retries, tokens."""

    asked: int = 0
    cached: int = 0
    retries: int = 0
    cut: int = 0
    too_long: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: Answer) -> None:
        """Count one answer of the server."""
        self.asked += 1
        self.retries += answer.retries
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens


class ChatEndpoint(TextGenerator):
    """Text generator that asks a server in OpenAI's chat-completions format; needs the extra ``chat``.

    An absent host, a wrong key or an unknown model raises at once. Too many requests, faults of the server, timeouts,
    broken connections and replies that are no chat completion are tried again, after waits that double or that the server
    asks for. Every answer is kept on disk under a hash of its request, so that a killed or repeated run pays for nothing
    twice; prompts and the key are not kept.

    The prompts leave this machine unless the server is on it: with Self-Instruct they contain clients' private rows.

    Args:
        base_url: such as ``https://api.openai.com/v1`` or ``http://localhost:8000/v1``.
        model: its name at the server.
        api_key_variable: environment variable of the key, which is never kept, logged or saved; None: no key is sent.
        system: a system message before each prompt, if any.
        temperature: 0 or more; at 0 a prompt that comes several times is asked once.
        top_p: share of the probability to draw from, in (0, 1].
        max_tokens: most tokens of an answer.
        stop: an answer ends before any of these texts.
        seed: where it is given, a seed that follows from it is sent along; another asks anew.
        extra: more fields of a request; null removes one: ``{max_tokens: null, max_completion_tokens: 512}``.
        keep_cut: return what was cut off at ``max_tokens``, too; else it counts as no answer.
        timeout_seconds: longest wait for one answer.
        retries: most further tries of one request.
        wait_seconds: the first wait between two tries.
        concurrent: requests under way at the same time.
        prompt_price: of a million tokens of prompts, in any currency.
        answer_price: of a million tokens of answers.
        max_requests: most that this process sends; more are refused before the first is sent. None: no limit.
        max_cost: most that it may spend, by these prices; likewise.
        cache: folder of the answers; None keeps none.

    Attributes:
        counts: what was done so far.

    Raises:
        ValueError: a setting is out of range.
    """

    without_effect = (
        *("api_key_variable", "timeout_seconds", "retries", "wait_seconds", "concurrent", "cache"),
        *("prompt_price", "answer_price", "max_requests", "max_cost"),
    )

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_variable: str | None = "OPENAI_API_KEY",
        system: str | None = None,
        temperature: float = 0.7,
        top_p: float = 1.0,
        max_tokens: int = 512,
        stop: list[str] | None = None,
        seed: int | None = None,
        extra: dict[str, Any] | None = None,
        keep_cut: bool = False,
        timeout_seconds: float = 60.0,
        retries: int = 6,
        wait_seconds: float = 1.0,
        concurrent: int = 8,
        prompt_price: float | None = None,
        answer_price: float | None = None,
        max_requests: int | None = None,
        max_cost: float | None = None,
        cache: str | None = "~/.cache/fedlight/answers",
    ) -> None:
        if not model:
            raise ValueError("model='' must be a name")
        check_range("temperature", temperature, 0, float("inf"))
        check_range("top_p", top_p, 0, 1, above_low=True)
        refuse_below(1, max_tokens=max_tokens, concurrent=concurrent)
        self.base_url, self.model, self.api_key_variable, self.system = (
            base_url,
            model,
            api_key_variable,
            system,
        )
        self.temperature, self.top_p, self.max_tokens, self.stop = temperature, top_p, max_tokens, stop
        self.seed, self.extra, self.keep_cut = seed, extra, keep_cut
        self.timeout_seconds, self.retries, self.wait_seconds = timeout_seconds, retries, wait_seconds
        self.concurrent, self.cache = concurrent, cache
        self.prompt_price, self.answer_price = prompt_price, answer_price
        self.max_requests, self.max_cost = max_requests, max_cost
        self._limits = Limits(max_requests, max_cost, Prices(prompt_price, answer_price))
        self.counts = Usage()
        self._server = ChatServer(base_url, api_key_variable, timeout_seconds, retries, wait_seconds)
        self._cache = AnswerCache(cache)
        self.sends_to = self._server.outside

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> list[Need]:
        """Return the server with the key to it, and the package that asks it."""
        return [
            Server(settings["base_url"], settings["api_key_variable"]),
            Package("openai", "'fedlight[chat]'"),
        ]

    def complete(self, prompts: Sequence[str], draw: int = 0) -> list[str]:
        """Return an answer to each prompt; see `TextGenerator`.

        Raises:
            ModuleNotFoundError: the extra ``chat`` is not installed.
            OSError: the server cannot be reached, refuses, or failed too often.
            ValueError: the environment has no key, or a limit would be passed.
        """
        keys, answers, wanted = self._looked_up(prompts, draw)
        if wanted:
            self._checked(keys, wanted)
            self._server.check()
        self.counts.cached += sum(key in answers for key in keys)

        def keep(key: str, answer: Answer) -> None:
            self.counts.add(answer)
            self._cache.write(key, answer)
            answers[key] = answer

        if wanted:
            self._server.ask(wanted, self.concurrent, keep)
        return [self._text(answers[key]) for key in keys]

    def costs(self, prompts: Sequence[str], draw: int = 0) -> Costs:
        """Return the costs of `complete`; nothing is sent."""
        keys, _, wanted = self._looked_up(prompts, draw)
        return self._checked(keys, wanted)

    def usage(self) -> dict[str, int]:
        """Return the counts of `Usage` by name."""
        return vars(self.counts).copy()

    def _looked_up(
        self, prompts: Sequence[str], draw: int
    ) -> tuple[list[str], dict[str, Answer], dict[str, dict[str, Any]]]:
        """Return each prompt's key, the saved answers, and by key the requests for the others."""
        bodies = list(self._bodies(prompts, draw))
        keys = [self._cache.key(self.base_url, body, which) for body, which in bodies]
        answers = self._cache.read(keys)
        return keys, answers, {k: body for k, (body, _) in zip(keys, bodies, strict=True) if k not in answers}

    def _checked(self, keys: Sequence[str], wanted: Mapping[str, Mapping[str, Any]]) -> Costs:
        most = (self.extra or {}).get("max_completion_tokens") or self.max_tokens
        costs = costs_of(wanted.values(), len(set(keys)) - len(wanted), most, self._limits.prices)
        self._limits.check(costs, self.counts.asked, self.counts.prompt_tokens, self.counts.completion_tokens)
        return costs

    def _bodies(self, prompts: Sequence[str], draw: int) -> Iterator[tuple[dict[str, Any], str]]:
        """Yield each request with the number of its draw."""
        seen: Counter[str] = Counter()
        for prompt in prompts:
            # Without a temperature all draws have the same answer, which is asked for once.
            which = f"{draw}.{seen[prompt]}" if self.temperature > 0 else "0.0"
            seen[prompt] += 1
            yield self._body(prompt, which), which

    def _body(self, prompt: str, which: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
            "seed": None if self.seed is None else derive_seed(self.seed, "endpoint", which) >> 1,  # 31 bits
            **(self.extra or {}),
        }
        return {name: value for name, value in body.items() if value is not None}

    def _text(self, answer: Answer) -> str:
        self.counts.cut += answer.cut
        self.counts.too_long += answer.too_long
        return answer.text.strip() if self.keep_cut or not answer.cut else ""
