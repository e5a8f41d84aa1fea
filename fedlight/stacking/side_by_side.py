"""Several pieces of work that ask the same helper questions: their questions are answered together.

A piece of work is an ordinary function that calls ``ask`` and goes on with the reply. Each runs in a separate thread, but
only one thread runs at a time, and it gives way only where it asks. So nothing needs a lock, and the order of all that
happens is fixed.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")
Ask = Callable[[Any], Any]
"""Function from a question to its reply, which waits until all other pieces of work have asked or ended."""


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
