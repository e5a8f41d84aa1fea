"""What each client's own model answers in tasks: what training alone has given it."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.own_models import parameters_of
from fedlight.callbacks.loop.round_table import Row
from fedlight.evaluation.tasks.task import Task
from fedlight.federation.state import State

Records = dict[str, list[dict[str, Any]]]
Scores = dict[str, dict[str, float]]


@runtime_checkable
class KeepsOwnModels(Protocol):
    """What is needed of the federated loop.

    Attributes:
        clients: all clients by id.
        visit_records: a row for each visit of the round.
    """

    clients: Mapping[str, Any]
    visit_records: list[Row]

    def own_state(self, client_id: str) -> State | None:
        """The parameters with which a client would go on alone; None where they are the global ones."""


def loop_of(trainer: L.Trainer) -> KeepsOwnModels:
    """The trainer's federated loop.

    Raises:
        ValueError: there is none.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, KeepsOwnModels):
            return callback
    raise ValueError("TaskScores.own_models=true needs clients: add a federated loop, or leave it at false")


def has_own_models(loop: KeepsOwnModels) -> bool:
    """Whether a client has a model of its own by now; asked in good time, before a run has taken hours.

    Raises:
        ValueError: clients were trained, but none of them keeps a model.
    """
    if any(loop.own_state(client) is not None for client in loop.clients):
        return True
    if any(row["steps"] for row in loop.visit_records):
        raise ValueError(
            "TaskScores.own_models=true, but no client keeps a model of its own: set federated.algorithm to one whose "
            "clients do, such as LocalOnly, or leave it at false"
        )
    return False


def answers_of_own_models(
    module: L.LightningModule, loop: KeepsOwnModels, tasks: Mapping[str, Task]
) -> tuple[Records, Scores]:
    """Has each client's own model do all tasks; a client without one answers with the global model, and that is said.

    A task's prompts are answered in the task's batches, client by client, as each has weights of its own. Afterwards the
    module's parameters are what they were, bit for bit.

    Args:
        module: whose parameters are those of the global model; it answers prompts.
        loop: knows the clients' own parameters.
        tasks: by name.

    Returns:
        By task one record for each client and row, with ``client``; and by task the score of each client, in [0, 1].

    Raises:
        ValueError: no client has a model of its own.
    """
    records: Records = {name: [] for name in tasks}
    scores: Scores = {name: {} for name in tasks}
    states = {client: loop.own_state(client) is not None for client in loop.clients}
    if not any(states.values()):
        raise ValueError("TaskScores.own_models=true, but no client has a model of its own")
    if without := [client for client, has in states.items() if not has]:
        rank_zero_info(
            f"{len(without)} of {len(states)} clients were never trained and answer with the global model"
        )
    for client in loop.clients:
        with parameters_of(module, loop.own_state(client) or {}):
            for name, task in tasks.items():
                result = task.run(module)  # type: ignore[arg-type]  # setup has looked
                records[name] += [{"client": client, **outcome.record()} for outcome in result.outcomes]
                scores[name][client] = result.mean
    return records, scores
