"""Work with the models of several clients at once, which differ in trained weights alone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from fedlight.stacking.side_by_side import Ask, side_by_side
from fedlight.stacking.stacked_adapters import StackedAdapters

R = TypeVar("R")
State = Mapping[str, Tensor]
CLIENTS_TOGETHER = 8
"""Clients whose models work side by side; it is fixed, as the clients of a batch decide how its sums are rounded."""
ROWS_TOGETHER = 128
"""Most texts that are written at once, unless one client asks for more."""


@runtime_checkable
class WritesForClients(Protocol):
    """Module that writes for several clients in one batch, such as a ``LanguageModule``."""

    def generate(self, prompts: Sequence[str], *args: Any, **settings: Any) -> list[list[str]]:
        """Complete prompts with the module as it stands."""

    def generate_for(
        self, states: Sequence[State], prompts: Sequence[Sequence[str]], seeds: Sequence[int], **settings: Any
    ) -> list[list[list[str]]]:
        """Complete the prompts of several clients, each client's by its own weights."""


def work_with_models(
    module: Any,
    states: Sequence[State],
    works: Sequence[Callable[[Any], R]],
    holding: Callable[[Any], AbstractContextManager[None]],
) -> list[R]:
    """Return the results of work with the models of clients, whose texts are written in common batches where possible.

    Args:
        module: shared module.
        states: tensors of each client that differ from the module's, by name.
        works: of each client a function of its model, which has the module's ``generate``, ``log_likelihoods``,
            ``free_energies``, ``fits`` and ``tokenizer``. It advances no global random stream and calls no other process.
        holding: function that puts a state into the module while its context lasts.
    """
    if not _can_stack(module, states):
        results = []
        for state, work in zip(states, works, strict=True):
            with holding(state):
                results.append(work(module))
        return results

    def answer(asked: list[tuple[int, Any]]) -> list[Any]:
        replies: dict[int, Any] = {}
        alike: dict[str, list[tuple[int, _Prompts]]] = {}
        for number, question in asked:
            if isinstance(question, _Prompts):
                # Calls with equal settings are written together.
                alike.setdefault(repr(sorted(question.settings.items())), []).append((number, question))
            else:
                with holding(states[number]):
                    replies[number] = question(module)
        for part in (part for questions in alike.values() for part in _cut(questions)):
            texts = module.generate_for(
                [states[number] for number, _ in part],
                [question.prompts for _, question in part],
                [question.seed for _, question in part],
                **part[0][1].settings,
            )
            replies |= {number: answers for (number, _), answers in zip(part, texts, strict=True)}
        return [replies[number] for number, _ in asked]

    def begin(work: Callable[[Any], R]) -> Callable[[Ask], R]:
        return lambda ask: work(_ClientModel(module, ask))

    return side_by_side([begin(work) for work in works], answer)


class _Prompts(NamedTuple):
    """Prompts of one call of ``generate``, the seed of their draws, and its other settings."""

    prompts: list[str]
    seed: int
    settings: dict[str, Any]


class _ClientModel:
    """Model of one client, which answers when all clients' models have been asked."""

    def __init__(self, module: Any, ask: Ask) -> None:
        self._ask = ask
        self.tokenizer, self.fits = module.tokenizer, module.fits
        for name in ("log_likelihoods", "free_energies"):
            if hasattr(module, name):
                setattr(self, name, partial(self._alone, name))

    def generate(
        self,
        prompts: Sequence[str],
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        **more: Any,
    ) -> Any:
        settings = {
            "n": n,
            "temperature": temperature,
            "top_p": top_p,
            "max_new_tokens": max_new_tokens,
            **more,
        }
        return self._ask(_Prompts(list(prompts), seed, settings))

    def _alone(self, name: str, *args: Any, **settings: Any) -> Any:
        return self._ask(lambda module: getattr(module, name)(*args, **settings))


def _can_stack(module: Any, states: Sequence[State]) -> bool:
    if len(states) < 2 or not isinstance(module, WritesForClients):
        return False
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}  # type: ignore[attr-defined]
    try:
        # For its checks alone: nothing is stacked yet.
        StackedAdapters(module, trained)  # type: ignore[arg-type]
    except ValueError:
        return False
    return all(state.keys() <= trained.keys() for state in states)


def _cut(questions: Sequence[tuple[int, _Prompts]]) -> list[list[tuple[int, _Prompts]]]:
    """Return the questions in parts of at most `ROWS_TOGETHER` texts, or of one question."""
    parts: list[list[tuple[int, _Prompts]]] = []
    rows = 0
    for number, question in questions:
        size = len(question.prompts) * question.settings["n"]
        if not parts or rows + size > ROWS_TOGETHER:
            parts.append([])
            rows = 0
        parts[-1].append((number, question))
        rows += size
    return parts
