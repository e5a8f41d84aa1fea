"""Work with the models of several clients at once, which differ in trained weights alone.

Pieces of work that ask the same helper questions have their questions answered together. A piece of work is an ordinary
function that calls ``ask`` and goes on with the reply. Each runs in a separate thread, but only one thread runs at a time,
and it gives way only where it asks. So nothing needs a lock, and the order of all that happens is fixed.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fedlight.stacking.stacked_adapters import StackedAdapters

R = TypeVar("R")
State = Mapping[str, Tensor]
CLIENTS_TOGETHER = 8
"""Clients whose models work side by side; it is fixed, as the clients of a batch decide how its sums are rounded."""
ROWS_TOGETHER = 128
"""Most texts that are written at once, unless one client asks for more."""
Ask = Callable[[Any], Any]
"""Function from a question to its reply, which waits until all other pieces of work have asked or ended."""


def work_with_models(
    module: Any,
    states: Sequence[State],
    works: Sequence[Callable[[Any], R]],
    holding: Callable[[Any], AbstractContextManager[None]],
) -> list[R]:
    """Return the results of work with the models of clients, whose texts are written in common batches where possible.

    ``states`` has of each client the tensors that differ from the module's; ``holding`` puts a state into the module. A
    piece of work takes a client's model, which has the module's ``generate``, ``log_likelihoods``, ``free_energies``,
    ``fits`` and ``tokenizer``; it advances no global random stream and calls no other process.
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

    def generate(self, prompts: Sequence[str], n: int = 1, *, seed: int = 0, **settings: Any) -> Any:
        return self._ask(_Prompts(list(prompts), seed, {"n": n, **settings}))

    def _alone(self, name: str, *args: Any, **settings: Any) -> Any:
        return self._ask(lambda module: getattr(module, name)(*args, **settings))


def _can_stack(module: Any, states: Sequence[State]) -> bool:
    if len(states) < 2 or not hasattr(module, "generate_for"):
        return False
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    try:
        # For its checks alone: nothing is stacked yet.
        StackedAdapters(module, trained)
    except ValueError:
        return False
    return all(state.keys() <= trained.keys() for state in states)


def _cut(questions: Sequence[tuple[int, _Prompts]]) -> list[list[tuple[int, _Prompts]]]:
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


class _GivenUp(BaseException):
    """Raised where a piece of work waits for a reply, but another has failed."""


def side_by_side(
    works: Sequence[Callable[[Ask], R]], answer: Callable[[list[tuple[int, Any]]], Sequence[Any]]
) -> list[R]:
    """Return the results of all pieces of work, functions that take `Ask`.

    ``answer`` is a function from the questions that wait, each with the number of its piece of work, to their replies, in
    order. It runs in the calling thread.

    Raises:
        BaseException: the error of a piece of work or of ``answer``; the others are given up.

    Examples:
        >>> works = [lambda ask: ask(1) + ask(2), lambda ask: ask(3)]
        >>> side_by_side(works, lambda asked: [print(asked)] and [10 * question for _, question in asked])
        [(0, 1), (1, 3)]
        [(0, 2)]
        [30, 30]
    """
    told: SimpleQueue[tuple[str, Any]] = SimpleQueue()
    replies: list[SimpleQueue[tuple[bool, Any]]] = [SimpleQueue() for _ in works]

    def wait(number: int) -> Any:
        goes_on, reply = replies[number].get()
        if not goes_on:
            raise _GivenUp
        return reply

    def run(number: int) -> None:
        def ask(question: Any) -> Any:
            told.put(("asks", question))
            return wait(number)

        try:
            # Begins when it is told to: one thread runs at a time.
            wait(number)
            told.put(("is done", works[number](ask)))
        except BaseException as error:
            told.put(("fails", error))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    results: dict[int, R] = {}
    next_replies: list[tuple[int, Any]] = [(number, None) for number in range(len(works))]
    try:
        while next_replies:
            asked = []
            for number, reply in next_replies:
                replies[number].put((True, reply))
                what, value = told.get()
                if what == "fails":
                    raise value
                if what == "asks":
                    asked.append((number, value))
                else:
                    results[number] = value
            answers = answer(asked) if asked else []
            next_replies = [(number, reply) for (number, _), reply in zip(asked, answers, strict=True)]
    finally:
        for inbox in replies:
            inbox.put((False, None))  # ends work that waits for a reply
        for thread in threads:
            thread.join()
    return [results[number] for number in range(len(works))]
