"""Server of a deployment: waits for nodes, runs the rounds, and goes on from its newest checkpoint after a stop."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.guard import refuse_cut_rounds
from fedlight.federation.algorithms.assignments import KnownGroups
from fedlight.flower.loops.server_data import ServerData, without_hooks
from fedlight.flower.loops.server_loop import ServerLoop
from fedlight.flower.messages import Bounds
from fedlight.flower.node import versions
from fedlight.flower.nodes import Nodes, Transport
from fedlight.flower.parts import (
    Parts,
    clients_needed,
    judge_of,
    kept_by_server,
    refuse_unknown_monitors,
    refuse_unsupported,
)
from fedlight.flower.secure.refusals import LEAST_NODES, refuse_shared_noise, refuse_unsummable, shared_by
from fedlight.lightning_cli.run_folder import alone_in
from fedlight.lightning_cli.run_record import recorded
from fedlight.lightning_cli.second_fit import checkpoints_of
from fedlight.support.checkpoint_files import newest_checkpoint


def serve(
    args: Sequence[str],
    transport: Transport,
    min_clients: int = 0,
    deadline_seconds: float | None = None,
    wait_seconds: float = 600.0,
    secure: bool = False,
    bounds: Bounds | None = None,
) -> tuple[L.Trainer, ServerLoop]:
    """Run a federation whose clients are nodes, from the start or from the newest checkpoint in the run's folder.

    Args:
        args: arguments of ``fedlight fit``, such as ``["--config", "selector.yaml"]``.
        transport: way to the nodes.
        min_clients: clients that have to be there for a start, at least `clients_needed`; 0: as many.
        deadline_seconds: wall time after which a round goes on without those that have not answered; None: it waits.
        wait_seconds: longest wait for the clients of a start, and before a round for the first node.
        secure: secure aggregation, `fedlight.flower.secure`.
        bounds: most that is taken of one node.

    Returns:
        The trainer and its loop, with all rounds done.

    Raises:
        ValueError: the config does not fit a deployment, or ``min_clients`` are too few for a round.
        TimeoutError: too few clients are there.
    """
    parts = Parts(args, kept_by_server)
    settings = parts.settings()
    refuse_unsupported(settings)
    if 0 < min_clients < (needed := clients_needed(settings)):
        raise ValueError(
            f"min-clients={min_clients} is less than the {needed} clients that a round asks, also of a run that goes on: "
            f"set min-clients=0, or to {needed} or more"
        )
    refuse_shared_noise(settings, secure)
    if secure:
        refuse_unsummable(settings, parts.callbacks)
    parts.say_left_out("server", "which need the clients' rows or models")
    loop = ServerLoop(**(settings | {"clients_at_once": 1}))  # it is the nodes'
    trainer = parts.new_trainer([loop])
    algorithm = settings["algorithm"]
    asks = {
        "num_rounds": trainer.max_epochs,
        "sizes": getattr(algorithm, "weighting", "") != "uniform",
        "groups": isinstance(getattr(algorithm, "assignment", None), KnownGroups),
    }
    run = secrets.token_hex(8)  # a run that goes on takes its old name from the checkpoint
    nodes = Nodes(
        transport,
        run,
        asks,
        versions(),
        deadline_seconds,
        wait_seconds=wait_seconds,
        needed=max(LEAST_NODES, shared_by(settings)) if secure else 1,
        bounds=bounds or Bounds(),
    )
    loop.connect(nodes, secure, judge_of(parts, trainer), trainer.check_val_every_n_epoch or 1)
    refuse_cut_rounds(trainer, 0)  # nodes refuse the same, for which a start would wait
    data = ServerData(loop, parts.datamodule)
    if not data.validates:
        rank_zero_info(
            "no validation at the server: it has no rows, and data.split.val_source names none for it"
            + (
                ": nodes validate on theirs"
                if loop.judge
                else "; trainer.limit_val_batches=0 has nodes validate nothing"
                if trainer.limit_val_batches == 0
                else "; ClientAccuracy has nodes validate on theirs"
            )
        )
        refuse_unknown_monitors(parts.callbacks)
        # Callbacks would save, or stop the run, after the validation of every n-th round, which Lightning never makes.
        trainer.check_val_every_n_epoch = 1
    folder = Path(trainer.default_root_dir)
    with ExitStack() as stack:
        stack.enter_context(alone_in(folder, "trainer.default_root_dir"))
        stack.enter_context(recorded(folder, "fit", ["fit", *args], parts.config["fit"].seed_everything))
        checkpoint = newest_checkpoint(checkpoints_of(trainer), federated=True)
        loop.recall(checkpoint)  # before a node joins: another one could name its clients first
        nodes.wait_for(min_clients or clients_needed(settings))
        stack.enter_context(without_hooks(parts.model))
        trainer.fit(parts.model, datamodule=data, ckpt_path=checkpoint)
    return trainer, loop
