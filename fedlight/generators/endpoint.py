"""Text generators: the interface that Self-Instruct and judges ask, and the endpoint behind it.

An endpoint speaks OpenAI's chat-completions format, as do vLLM, llama.cpp, Ollama and most services.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlight.datamodules.instructions.augmentation import settings_of
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.generators.chat_server import Answer, ChatServer, Sending
from fedlight.generators.request_costs import Budget, Costs, costs_of
from fedlight.support.checks import Checked
from fedlight.support.files import read_json, sealed, whole_file
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

        If answers are drawn, a repeated prompt is drawn as often as it comes, and another number ``draw`` gives other
        answers.
        """

    def costs(self, prompts: Sequence[str], draw: int = 0) -> Costs | None:
        """Return the costs of `complete`, None where answers cost nothing; raise ValueError if they would pass a limit."""
        return None

    def settings(self) -> dict[str, object]:
        """Return the arguments that answers depend on, as plain values without secrets."""
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
        sampling: temperature and length of answers; at temperature 0 a repeated prompt is asked once.
        stop: an answer ends before any of these texts.
        seed: where it is given, a seed that follows from it is sent along; another asks anew.
        extra: more fields of a request; null removes one: ``{max_tokens: null, max_completion_tokens: 512}``.
        keep_cut: also return answers that were cut off at ``max_new_tokens``; else they count as none.
        sending: waits, tries, and requests under way at the same time.
        budget: limits on requests and money, by the prices of tokens.
        cache: folder of the answers; None keeps none.

    Attributes:
        counts: requests, answers and tokens so far.

    Raises:
        ValueError: a setting is out of range; at an answer, the environment has no key, or a limit would be passed.
        ModuleNotFoundError: at an answer, the extra ``chat`` is not installed.
        OSError: at an answer, the server cannot be reached, refuses, or failed too often.
    """

    without_effect = ("api_key_variable", "sending", "budget", "cache")

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_variable: str | None = "OPENAI_API_KEY",
        system: str | None = None,
        sampling: Sampling = Sampling(),
        stop: list[str] | None = None,
        seed: int | None = None,
        extra: dict[str, Any] | None = None,
        keep_cut: bool = False,
        sending: Sending = Sending(),
        budget: Budget = Budget(),
        cache: str | None = "~/.cache/fedlight/answers",
    ) -> None:
        if not model:
            raise ValueError("model='' must be a name")
        self.base_url, self.model, self.api_key_variable = base_url, model, api_key_variable
        self.system, self.sampling, self.stop = system, sampling, stop
        self.seed, self.extra, self.keep_cut = seed, extra, keep_cut
        self.sending, self.budget, self.cache = sending, budget, cache
        self.counts = Usage()
        self._server = ChatServer(base_url, api_key_variable, sending)
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
        keys, answers, wanted = self._looked_up(prompts, draw)
        if wanted:
            self._checked(keys, wanted)  # before anything is sent
            self._server.check()
        self.counts.cached += sum(key in answers for key in keys)

        def keep(key: str, answer: Answer) -> None:
            self.counts.asked += 1
            self.counts.retries += answer.retries
            self.counts.prompt_tokens += answer.prompt_tokens
            self.counts.completion_tokens += answer.completion_tokens
            self._cache.write(key, answer)
            answers[key] = answer

        if wanted:
            self._server.ask(wanted, keep)
        return [self._text(answers[key]) for key in keys]

    def costs(self, prompts: Sequence[str], draw: int = 0) -> Costs:
        keys, _, wanted = self._looked_up(prompts, draw)
        return self._checked(keys, wanted)

    def usage(self) -> dict[str, int]:
        return vars(self.counts).copy()

    def _looked_up(
        self, prompts: Sequence[str], draw: int
    ) -> tuple[list[str], dict[str, Answer], dict[str, dict[str, Any]]]:
        """Return each prompt's key, the saved answers, and by key the requests for the others."""
        bodies = list(self._bodies(prompts, draw))
        keys = [self._cache.key(self._server.base_url, body, which) for body, which in bodies]
        answers = self._cache.read(keys)
        return keys, answers, {k: body for k, (body, _) in zip(keys, bodies, strict=True) if k not in answers}

    def _checked(self, keys: Sequence[str], wanted: Mapping[str, Mapping[str, Any]]) -> Costs:
        asked = [(self.extra or {}).get(name) for name in ("max_completion_tokens", "max_tokens")]
        most = next(filter(None, asked), self.sampling.max_new_tokens)
        costs = costs_of(wanted.values(), len(set(keys)) - len(wanted), most, self.budget.prices)
        self.budget.check(costs, self.counts.asked, self.counts.prompt_tokens, self.counts.completion_tokens)
        return costs

    def _bodies(self, prompts: Sequence[str], draw: int) -> Iterator[tuple[dict[str, Any], str]]:
        seen: Counter[str] = Counter()
        for prompt in prompts:
            # Without a temperature all draws have the same answer, which is asked for once.
            which = f"{draw}.{seen[prompt]}" if self.sampling.temperature > 0 else "0.0"
            seen[prompt] += 1
            yield self._body(prompt, which), which

    def _body(self, prompt: str, which: str) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_new_tokens,
            "stop": self.stop,
            "seed": None if self.seed is None else derive_seed(self.seed, "endpoint", which) >> 1,  # 31 bits
            **(self.extra or {}),
        }
        return {name: value for name, value in body.items() if value is not None}

    def _text(self, answer: Answer) -> str:
        self.counts.cut += answer.cut
        self.counts.too_long += answer.too_long
        return answer.text.strip() if self.keep_cut or not answer.cut else ""


class AnswerCache:
    """Folder of answers, readable by its owner alone, that several processes may share; None keeps nothing."""

    def __init__(self, folder: str | None) -> None:
        self.folder = Path(folder).expanduser() if folder else None

    @staticmethod
    def key(base_url: str, body: Mapping[str, Any], which: str) -> str:
        """Return thirty-two hex digits for a request's body to a server; ``which`` numbers draws of the same request.

        Examples:
            >>> AnswerCache.key("http://a", {"model": "m"}, "0.0") == AnswerCache.key("http://a", {"model": "m"}, "0.1")
            False
        """
        text = json.dumps([base_url, body, which], sort_keys=True)  # the order of settings must not matter
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def read(self, keys: Iterable[str]) -> dict[str, Answer]:
        """Return the saved answers among these keys."""
        if self.folder is None:
            return {}
        answers = {key: self._read_one(key) for key in set(keys)}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def write(self, key: str, answer: Answer) -> None:
        """Write an answer."""
        if self.folder is None:
            return
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_file(file) as new:
            new.chmod(0o600)  # readable by its owner alone
            new.write_text(json.dumps(sealed(answer._asdict())), encoding="utf-8")

    def _read_one(self, key: str) -> Answer | None:
        try:
            answer = Answer(**read_json(self._file(key), "it is asked for again"))
        except (FileNotFoundError, TypeError, ValueError):  # absent, or damaged
            return None
        return answer if isinstance(answer.text, str) else None  # else damaged

    def _file(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"
