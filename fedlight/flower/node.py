"""Node: a process that has the rows of some clients and does what the server asks for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from fedlight import __version__
from fedlight.federation.protocols import NamesGroups, SynthesizesData
from fedlight.flower.messages import FORMAT, Parcel, Refused, value_of
from fedlight.flower.node_loop import Answered, NodeLoop, Task, base_digest
from fedlight.flower.node_memories import NodeMemories, Versions
from fedlight.flower.parts import Parts, kept_by_node, refuse_unsupported, say_left_out
from fedlight.support.settings_record import digest

QUIET = {
    **{
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    **{"num_sanity_val_steps": 0, "limit_val_batches": 0},
}
"""Settings of a node's trainers: validation, logs and checkpoints are the server's."""


class Node:
    """Node of a deployment; one process may serve many messages with it.

    Args:
        args: arguments of ``fedlight fit`` that the server has as well, such as ``["--config", "selector.yaml"]``.
        own: settings of this node alone, such as ``{"data.init_args.source": "/data/votes.jsonl"}``.
        folder: folder in which the node keeps what its clients remember and make.
        clients: ids of the clients that it serves; None for all in its rows.
        part: ``(i, n)``: of these, in the order of their ids, every n-th from the i-th on.

    Raises:
        ValueError: the config does not fit a deployment.
    """

    def __init__(
        self,
        args: Sequence[str],
        own: Mapping[str, Any],
        folder: str | Path,
        clients: Sequence[str] | None = None,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        self._folder, self._wanted, self._part = Path(folder).absolute(), clients, part
        settings = [f"--{name}={value}" for name, value in own.items()]
        self._parts = Parts([*args, *settings, f"--trainer.default_root_dir={self._folder}"], kept_by_node)
        self._settings = self._parts.settings()
        refuse_unsupported(self._settings)
        others = [name for name in self._parts.left_out if name not in dir(L.pytorch.callbacks)]
        say_left_out(others, "node", "which are the server's")

    def answer(self, asked: Parcel) -> Parcel:
        """Do what a message asks for, and return the reply.

        Raises:
            Refused: the message cannot be understood, or asks for what this node does not have.
        """
        head = asked.header
        action, run = value_of(head, "action", str), value_of(head, "run", str)
        answers = {"join": self._join, "prepare": self._prepare, "losses": self._losses, "visit": self._visit}
        if action not in answers:
            raise Refused(f"the action {action!r:.40} is unknown")
        header, payloads = answers[action](asked)
        given = {name: head[name] for name in ("round", "nonce") if name in head}
        return Parcel({"format": FORMAT, "action": action, "run": run, **given, **header}, payloads)

    def _join(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        task = Task("join", num_rounds=value_of(asked.header, "num_rounds", int))
        loop, trainer = self._run(task, "join")
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        own = self._own_clients([*loop.clients])
        sizes = {name: loop.clients[name].num_examples if asked.header.get("sizes") else 1 for name in own}
        found = data.client_groups if isinstance(data, NamesGroups) and asked.header.get("groups") else None
        groups = {name: group for name, group in (found or {}).items() if name in sizes}
        return {
            "clients": sizes,
            "groups": groups,
            "base": base_digest(trainer.lightning_module),
            **versions(),
        }, {}

    def _prepare(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        loop, trainer = self._run(self._task(asked), value_of(asked.header, "run", str), asked)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, SynthesizesData)
        return {"made": {name: data.num_synthetic(name) for name in loop.task.shares}}, {}

    def _losses(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        loop, _ = self._run(self._task(asked), value_of(asked.header, "run", str), asked)
        by_example = asked.header.get("by_example", False)
        found = {
            name: [one.tolist() if by_example else [float(one.mean())] for one in each]
            for name, each in loop.losses.items()
            if name in self._own_clients([*loop.clients])
        }
        return {"losses": found}, {}

    def _visit(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        loop, _ = self._run(self._task(asked), value_of(asked.header, "run", str), asked)
        rows = {(str(row["client"]), str(row["split"])): row for row in loop.visit_records}
        visits, payloads = [], {}
        for (client, label), row in rows.items():
            reason = loop.diverged.get(client, "")
            reply = loop.replies.get((client, label))
            name = f"p{len(payloads)}" if reply is not None and reply.payload and not reason else None
            if name is not None and reply is not None:
                payloads[name] = reply.payload
            visits.append(
                {
                    **{"client": client, "label": label, "payload": name, "diverged": reason},
                    **{"names": None if reply is None else reply.names},
                    **{"steps": row["steps"], "seconds": row["seconds"]},
                    "loss": None if row["loss"] == "" else row["loss"],
                    "training": _sums(loop, client, label),
                }
            )
        return {"visits": visits}, payloads

    def _task(self, asked: Parcel) -> Task:
        """Return what a message of a round asks for."""
        head = asked.header
        received: dict[tuple[str, str], bytes | None] = {}
        for one in head.get("visits", []):
            received[one["client"], one["label"]] = (
                None if one["payload"] is None else asked.payloads[one["payload"]]
            )
        model = head.get("model")
        return Task(
            value_of(head, "action", str),
            value_of(head, "round", int),
            value_of(head, "num_rounds", int),
            dict(head.get("shares", {})),
            None if model is None else asked.payloads[model],
            received,
            dict(head.get("algorithm", {})),
            head.get("rates"),
            (head.get("losses_on", "val"), head.get("adapters", [])),
        )

    def _run(self, task: Task, run: str, asked: Parcel | None = None) -> tuple[NodeLoop, L.Trainer]:
        """Run a loop for a task in a new trainer."""
        folder = self._folder / digest(run)
        found = {} if asked is None else asked.header.get("memories", {})
        kept = {name: Versions(*pair) for name, pair in found.items()}
        changes = {"clients_per_round": 1, "over_selection": 1.0, "clients_at_once": 1, "memory": None}
        loop = NodeLoop(**(self._settings | changes))
        loop.give(task, NodeMemories(folder / "clients", kept))
        of_round = {"max_epochs": task.round_idx + 1, "min_epochs": None, "default_root_dir": str(folder)}
        trainer = self._parts.new_trainer([loop], **QUIET, **of_round)
        done: Any = trainer.fit_loop.epoch_progress.current
        done.ready = done.started = done.processed = done.completed = task.round_idx
        try:
            trainer.fit(self._parts.model, datamodule=self._parts.datamodule)
        except Answered:
            pass
        return loop, trainer

    def _own_clients(self, known: Sequence[str]) -> list[str]:
        """Return the clients that the node serves, of those in its rows."""
        if self._wanted is not None and (missing := [name for name in self._wanted if name not in known]):
            raise Refused(f"client {missing[0]} has no rows on this node, which is to serve it")
        wanted = sorted(known if self._wanted is None else self._wanted)
        return wanted[self._part[0] :: self._part[1]]


def versions() -> dict[str, str]:
    """Return the versions that both ends compare."""
    return {"fedlight": __version__, "torch": torch.__version__.split("+")[0], "lightning": L.__version__}


def _sums(loop: NodeLoop, client: str, label: str) -> dict[str, Any]:
    """Return sums and counts of a visit's training metrics."""
    labels = [str(row["split"]) for row in loop.visit_records if row["client"] == client]
    found = loop.sums.get(client, [])
    place = labels.index(label)
    return (
        {name: [total, count] for name, (total, count) in found[place].items()} if place < len(found) else {}
    )
