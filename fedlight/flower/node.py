"""Node: a process that has the rows of some clients and does the server's tasks for them."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import lightning as L
import numpy as np
import torch

from fedlight import __version__
from fedlight.callbacks.logs.client_accuracy import ClientAccuracy
from fedlight.callbacks.loop.parts.limits import Limits
from fedlight.callbacks.loop.ranks.ranks import SharesFindings
from fedlight.callbacks.loop.round_table import Record
from fedlight.federation.algorithms.assignments import scores_examples
from fedlight.federation.client_state import as_bytes
from fedlight.federation.privacy import Private
from fedlight.federation.protocols import LossesOn, NamesGroups, SynthesizesData
from fedlight.flower.identity import own_key, signed
from fedlight.flower.loops.node_loop import Answered, NodeLoop, Task, base_digest
from fedlight.flower.loops.node_memories import NodeMemories, Versions
from fedlight.flower.loops.replies import MOST_VALUE
from fedlight.flower.loops.validation import OF_VOTES, as_sent, sum_of_votes, to_send, votes_of
from fedlight.flower.messages import FORMAT, Parcel, Refused, value_of
from fedlight.flower.parts import Parts, kept_by_node, refuse_unsupported
from fedlight.flower.secure.refusals import refuse_shared_noise, refuse_unsummable, shared_by
from fedlight.flower.secure.ring import PAYLOAD, UNIT, encode, to_bytes
from fedlight.support.files import write_whole
from fedlight.support.settings_record import digest

if TYPE_CHECKING:
    from fedlight.flower.secure.node_side import NodeSecrets

logger = logging.getLogger("fedlight")

QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
) | {"num_sanity_val_steps": 0, "limit_val_batches": 0}
"""Settings of a node's trainers: validation, logs and checkpoints are the server's."""
MOST_ROUNDS = 10**9
"""More rounds are no count."""


class Node:
    """Node of a deployment; one process may serve many messages with it.

    Args:
        args: arguments of ``fedlight fit`` that the server has as well, such as ``["--config", "selector.yaml"]``.
        settings: those of this node alone, such as ``{"data.init_args.source": "/data/votes.jsonl"}``.
        folder: folder for the memories and examples of its clients.
        clients: ids of the clients that it serves; None for all in its rows.
        part: ``(i, n)``: of these, in the order of their ids, every n-th from the i-th on.
        secure: whether the clients' replies are added up and masked; then nothing else of them leaves the node.

    Raises:
        ValueError: the config does not fit a deployment.
    """

    def __init__(
        self,
        args: Sequence[str],
        settings: Mapping[str, Any],
        folder: str | Path,
        clients: Sequence[str] | None = None,
        part: tuple[int, int] = (0, 1),
        secure: bool = False,
    ) -> None:
        self._secure = secure
        self._folder, self._wanted, self._part = Path(folder).absolute(), clients, part
        given = [f"--{name}={value}" for name, value in settings.items()]
        self._parts = Parts([*args, *given, f"--trainer.default_root_dir={self._folder}"], kept_by_node)
        self._settings = self._parts.settings()
        refuse_unsupported(self._settings)
        refuse_shared_noise(self._settings, secure)
        self._shared_by = shared_by(self._settings)
        if secure:
            refuse_unsummable(self._settings)
        # The server learns numbers of examples only where the algorithm weights clients by them.
        self._counts = getattr(self._settings["algorithm"], "weighting", "") != "uniform"
        self._protects_examples = any(isinstance(part, Private) for part in self._settings["parts"])
        self._validates = any(isinstance(each, ClientAccuracy) for each in self._parts.left_out)
        self._parts.say_left_out("node", "which are the server's")

    def answer(self, asked: Parcel) -> Parcel:
        """Do the task of a message, and return the reply.

        Raises:
            Refused: the message cannot be understood, or asks for what this node does not have.
        """
        head = asked.header
        action, run = value_of(head, "action", str), value_of(head, "run", str)
        answers = {"join": self._join, "prepare": self._prepare, "losses": self._losses, "visit": self._visit}
        answers |= {"validate": self._validate} if self._validates else {}
        if self._secure:  # this node's own setting: no message of the server can turn the masks off
            answers = {"join": self._join, "visit": self._masked_visit}
            answers |= {"validate": self._masked_validate} if self._validates else {}
            answers |= dict.fromkeys(("keys", "shares", "unmask"), self._secure_step)
        if action not in answers:
            raise Refused(f"the action {action!r:.40} is unknown, or this node's settings do not allow it")
        header, payloads = answers[action](asked)
        given: dict[str, Any] = {name: head[name] for name in ("round", "nonce") if name in head}
        return Parcel({"format": FORMAT, "action": action, "run": run, **given, **header}, payloads)

    def _join(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        task = Task("join", num_rounds=value_of(asked.header, "num_rounds", int))
        if not -1 <= task.num_rounds < MOST_ROUNDS:
            raise Refused(f"the run has {task.num_rounds} rounds")
        loop, trainer = self._run(task, "join", {})
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        counts = self._counts and asked.header.get("sizes") is True
        names = self._served([*loop.clients])
        sizes = {name: loop.clients[name].num_examples if counts else 1 for name in names}
        named = data.client_groups if isinstance(data, NamesGroups) and asked.header.get("groups") else None
        groups = {name: group for name, group in (named or {}).items() if name in sizes}
        run, nonce = (value_of(asked.header, name, str) for name in ("run", "nonce"))
        header = {"clients": sizes, "groups": groups, "base": base_digest(trainer, trainer.lightning_module)}
        return header | versions() | signed(own_key(self._folder), run, nonce), {}

    def _prepare(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        loop, trainer = self._run_round(asked)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, SynthesizesData):
            raise Refused(f"{type(data).__name__} of this node makes no training data")
        made = {name: data.num_synthetic(name) for name in loop.task.shares}
        return {"made": made if self._counts else {name: min(1, number) for name, number in made.items()}}, {}

    def _losses(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        algorithm, on = self._settings["algorithm"], asked.header.get("losses_on", "val")
        by_example = asked.header.get("by_example", False)
        # This node's own settings decide: losses on training rows say what noise on gradients hides.
        expected = getattr(algorithm, "group_by", "val" if self._protects_examples else on)
        if on != expected or by_example is not scores_examples(algorithm):
            raise Refused(
                f"the server asks for losses on {on!r:.60}, by_example={by_example!r:.60}, which this node's settings do "
                "not allow: give both the same config"
            )
        loop, _ = self._run_round(asked)
        losses = {
            name: [values.tolist() if by_example else [float(values.mean())] for values in loop.losses[name]]
            for name in self._served([*loop.clients])
            if np.isfinite(np.concatenate(loop.losses[name])).all()  # else the server counts it as not scored
        }
        return {"losses": losses}, {}

    def _visit(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        loop, _ = self._run_round(asked)
        visits: list[dict[str, Any]] = []
        payloads: dict[str, bytes] = {}
        # Of a client's visits, in their order.
        metrics = {name: iter(each) for name, each in loop.sums.items()}
        for row in loop.visit_records:
            entry, reply = _entry(loop, row), loop.replies.get((str(row["client"]), str(row["split"])))
            if reply is not None:
                entry["names"] = reply.names
                if reply.payload and not entry["diverged"]:  # of a client that diverged nothing counts
                    entry["payload"] = f"p{len(payloads)}"
                    payloads[entry["payload"]] = reply.payload
            if not self._protects_examples:  # losses and metrics have no noise
                sums: dict[str, Any] = next(metrics.get(entry["client"], iter(())), {})
                loss = row["loss"]
                entry |= {"loss": loss if loss != "" and abs(float(loss)) <= MOST_VALUE else None}
                entry |= {"training": as_sent(sums, self._counts)}
            visits.append(entry)
        return {"visits": visits, "lost": loop.lost}, payloads

    def _validate(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        loop, _ = self._run_round(asked)
        return {"validated": to_send(loop.validated, self._counts)}, {}

    def _secure_step(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        secrets, action = self._secrets(asked), asked.header["action"]
        if action == "keys":
            return secrets.keys(asked), {}
        return ({"letters": secrets.shares(asked)} if action == "shares" else secrets.unmask(asked)), {}

    def _masked_visit(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Make the visits, and return the masked sum of their replies; of each one steps and seconds alone."""
        secrets = self._secrets(asked)
        secrets.take_letters(asked)  # before it trains: with too few others there would be no sum to hide in
        loop, _ = self._run_round(asked)
        visits = [_entry(loop, row) for row in loop.visit_records]
        if len(loop.lost) == len(loop.task.shares):
            raise Refused(next(iter(loop.lost.values())))
        if self._shared_by > 1 and all(visit["diverged"] for visit in visits):
            raise Refused("all clients here diverged, and their sum would lack its part of the noise")
        return {"visits": visits, "lost": loop.lost}, _masked(asked, secrets, loop.summed, loop.shapes)

    def _masked_validate(self, asked: Parcel) -> tuple[dict[str, Any], dict[str, bytes]]:
        """Validate, and return the masked sum of the clients' accuracies, with their names."""
        secrets = self._secrets(asked)
        secrets.take_letters(asked)
        loop, _ = self._run_round(asked)
        votes = votes_of(loop.validated)
        return {"validated": [*votes]}, _masked(asked, secrets, sum_of_votes(votes).partial(), OF_VOTES)

    def _secrets(self, asked: Parcel) -> "NodeSecrets":
        from fedlight.flower.secure.node_side import NodeSecrets  # it needs the extra flower

        run = value_of(asked.header, "run", str)
        return NodeSecrets(self._folder / digest(run), run, self._shared_by)

    def _task(self, asked: Parcel) -> Task:
        head = asked.header
        shares, received = value_of(head, "shares", dict), dict[tuple[str, str], bytes | None]()
        for entry in value_of(head, "visits", list, []):
            if not isinstance(entry, dict):
                raise Refused("the visits of the message are no list of visits")
            key = value_of(entry, "client", str), value_of(entry, "label", str)
            if key in received or key[0] not in shares:
                raise Refused(
                    f"the message names the visit {key[1]!r:.60} to client {key[0]!r:.60} twice, or without a share"
                )
            received[key] = _payload(asked, entry.get("payload"))
        for name in shares:
            if not 0 < value_of(shares, name, float) <= 1:
                raise Refused(f"the share of client {name!r:.60} is {shares[name]}")
        round_idx, num_rounds = value_of(head, "round", int), value_of(head, "num_rounds", int)
        if not 0 <= round_idx < MOST_ROUNDS or not (num_rounds == -1 or round_idx < num_rounds < MOST_ROUNDS):
            raise Refused(f"the message is of round {round_idx + 1} of {num_rounds}")
        on, adapters = value_of(head, "losses_on", str, "val"), value_of(head, "adapters", list, [])
        if on not in get_args(LossesOn) or not all(isinstance(name, str) for name in adapters):
            raise Refused(f"clients cannot be scored on {on!r:.60} under {adapters!r:.60}")
        action, model = value_of(head, "action", str), _payload(asked, head.get("model"))
        heard = value_of(head, "algorithm", dict, {})
        rates = value_of(head, "rates", (dict, type(None)), None)
        return Task(action, round_idx, num_rounds, shares, model, received, heard, rates, (on, adapters))

    def _run_round(self, asked: Parcel) -> tuple[NodeLoop, L.Trainer]:
        return self._run(self._task(asked), value_of(asked.header, "run", str), _versions(asked))

    def _run(self, task: Task, run: str, memories: Mapping[str, Versions]) -> tuple[NodeLoop, L.Trainer]:
        folder = self._folder / digest(run)  # a name of the server's could lead out of the folder
        # Cohort and limits are the server's: a node visits whom it is asked to visit, and sees no other updates.
        changes: dict[str, Any] = {"clients_per_round": 1, "clients_at_once": 1, "fleet": None}
        changes["limits"] = Limits(share=None, norm=None, enforce=False)
        if not self._secure:  # it adds nothing up, and has too few clients for some aggregations
            changes["aggregation"] = None
        loop = NodeLoop(**(self._settings | changes))
        loop.give(task, NodeMemories(folder / "clients", memories), self._secure)
        limits = {"max_epochs": task.num_rounds, "min_epochs": None, "default_root_dir": str(folder)}
        trainer = self._parts.new_trainer([loop], **QUIET, **limits)
        # A module may read the number of the round, so the trainer's counts are those of a run that has come to it.
        done: Any = trainer.fit_loop.epoch_progress.current
        done.ready = done.started = done.processed = done.completed = task.round_idx
        module: Any = self._parts.model
        # Flower starts a process for each message, and what is found once depends on the batch in its last bits.
        file, shares = folder / "findings.pt", isinstance(module, SharesFindings)
        known = torch.load(file, weights_only=True) if shares and file.exists() else {}
        if shares:
            module.add_findings(known)
        with suppress(Answered):
            trainer.fit(module, datamodule=self._parts.datamodule)
        if shares and (new := module.new_findings()):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, as_bytes(known | new))
        return loop, trainer

    def _served(self, known: Sequence[str]) -> list[str]:
        """Return the clients that the node serves, of those in its rows."""
        if self._wanted is not None and (missing := [name for name in self._wanted if name not in known]):
            raise Refused(f"client {missing[0]} has no rows on this node, which is to serve it")
        wanted = sorted({*(known if self._wanted is None else self._wanted)})  # a client named twice is one
        return wanted[self._part[0] :: self._part[1]]


def _masked(
    asked: Parcel, secrets: "NodeSecrets", partial: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> dict[str, bytes]:
    """Return the payload with a masked sum over the node's clients."""
    values, rounded = encode(partial, shapes)
    if rounded:
        logger.warning(
            "%s of %s sums have bits below 2^%s, which are rounded away", rounded, values.shape[1], UNIT
        )
    return {PAYLOAD: to_bytes(secrets.mask(asked, values))}


def _payload(asked: Parcel, name: Any) -> bytes | None:
    """Return the payload of a name, None for None; raise Refused if it is not there."""
    if name is None:
        return None
    if not isinstance(name, str) or name not in asked.payloads:
        raise Refused(f"the payload {name!r:.60} is missing")
    return asked.payloads[name]


def _versions(asked: Parcel) -> dict[str, Versions]:
    """Return which memories of clients count."""
    memories = {}
    for name, pair in value_of(asked.header, "memories", dict, {}).items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise Refused(f"the memory of client {name!r:.60} has no two rounds")
        memories[name] = Versions(*(value_of({"round": n}, "round", (int, type(None))) for n in pair))
    return memories


def versions() -> dict[str, str]:
    """Return the versions that both ends compare."""
    return {"fedlight": __version__, "torch": torch.__version__.split("+")[0], "lightning": L.__version__}


def _entry(loop: NodeLoop, row: Record) -> dict[str, Any]:
    """Return a visit in a reply, without its payload and its metrics."""
    return {
        **{"client": row["client"], "label": row["split"], "payload": None, "names": None},
        **{"diverged": loop.diverged.get(str(row["client"]), ""), "steps": row["steps"]},
        **{"seconds": row["seconds"], "loss": None, "training": {}},
    }
