"""Rounds shared by the processes of a team: their exchange, so that all go on from the same state.

Every process plans all visits, trains its own, and at the end of the round gathers all changes by visits outside of their
clients: sums of updates and buffers, memories, rows, logged values, schedules, loss scales, counts of steps. The parts are
merged in the order of the plan, and the server's step is computed in each process, so no result depends on their number.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from fedlight.callbacks.loop.guard import SameFederation
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.plan import RoundPlanner
from fedlight.callbacks.loop.run import Run, seed_all
from fedlight.callbacks.loop.visits.round import OpenRound
from fedlight.callbacks.loop.visits.visit import TakesUpload, TakesVisitStart
from fedlight.federation.algorithm import Aggregation, Algorithm, aggregation_of, pieces_of
from fedlight.federation.client import State
from fedlight.federation.client_state import ClientMemories
from fedlight.processes.seat import split_as, whole
from fedlight.processes.team import Team
from fedlight.support.pokes import count_steps_of_others, logged_names, saves_inside_epochs, stops_at_a_batch
from fedlight.support.settings_record import described, digest
from fedlight.support.torch_parts import with_parts

OF_ALL_PROCESSES = (
    *("max_epochs", "min_epochs", "precision", "gradient_clip_val", "gradient_clip_algorithm"),
    *("check_val_every_n_epoch", "limit_val_batches", "num_sanity_val_steps"),
)
"""Settings of the trainer that decide what a process does and when."""
COMPARED = (Tensor, np.ndarray, str, bytes, int, float)
"""Parts of an example that are compared."""
STEP = "training_step."
"""Prefix of Lightning's keys for values that training_step logs."""


@runtime_checkable
class MergesVisits(Protocol):
    """Algorithm whose visits change attributes that the server needs, in each of several processes."""

    def partial(self) -> dict[str, Any]:
        """Return the visits' contributions of a round so far, as tensors and plain values, and start anew."""

    def merge(self, partial: Mapping[str, Any]) -> None:
        """Add the `partial` of one of the processes, this one's among them; their order must not matter."""


@runtime_checkable
class SharesFindings(Protocol):
    """Module whose steps keep values for later steps of any client, such as a reference's log-probabilities."""

    def new_findings(self) -> dict[Any, Any]:
        """Return the values found since the last call, as tensors and plain values."""

    def add_findings(self, findings: Mapping[Any, Any]) -> None:
        """Take the new values of all processes."""


class KeptByAlgorithm:
    """Changes by visits in attributes of an algorithm; refuses an algorithm that does not declare them.

    Raises:
        ValueError: in `visited`, if a visit has changed an attribute and the algorithm has no ``partial``.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._before: dict[str, str] | None = None
        self._checked = isinstance(algorithm, MergesVisits)

    def start_round(self) -> None:
        """Note the attributes before this process's first visit of the run."""
        if not self._checked:
            self._before = _attributes(self._algorithm)

    def visited(self) -> None:
        if self._checked or self._before is None:
            return
        self._checked, now = True, _attributes(self._algorithm)
        changed = [name for name in {**self._before, **now} if self._before.get(name) != now.get(name)]
        if changed:
            raise ValueError(
                f"a visit changes {type(self._algorithm).__name__}.{changed[0]}, which the processes of "
                "trainer.strategy=client_parallel would have unlike: keep what belongs to a visit in its Visiting, and give "
                "the algorithm partial() and merge(partial) for what the server adds up, as Scaffold does; or train in one "
                "process, trainer.devices=1"
            )

    def pieces(self) -> Iterator[Any]:
        return pieces_of(self._algorithm) if isinstance(self._algorithm, MergesVisits) else iter(())

    def merge(self, partials: Sequence[Any]) -> None:
        assert isinstance(self._algorithm, MergesVisits)
        for partial in partials:
            self._algorithm.merge(partial)


def _attributes_of(module: L.LightningModule) -> dict[str, str]:
    """Return a digest of each public attribute of a module that is a plain value or a tensor."""
    digests = _attributes(module).items()
    return {
        name: value for name, value in digests if not name.startswith("_") and not value.startswith("object ")
    }


def _attributes(owner: object) -> dict[str, str]:
    """Return a digest of each attribute by its content; objects other than plain values and tensors count by identity."""
    return {name: _digest(value) for name, value in vars(owner).items()}


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return _digest(("tensor", str(value.dtype), value.reshape(-1).double().numpy()))
    if isinstance(value, np.ndarray):
        return hashlib.blake2b(np.ascontiguousarray(value).tobytes()).hexdigest()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_digest(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"[{', '.join(map(_digest, value))}]"
    return repr(value) if isinstance(value, (str, bytes, int, float, type(None))) else f"object {id(value)}"


class VisitsMade:
    """Rows, logged values and findings of the visits that this process has made in a round, and then of all visits.

    Args:
        places: places of this process's visits among all visits of the round, in their order.
        run: the run, with the values that the algorithm has logged, and rows of clients that dropped out; rows of visits
            are added behind them.
    """

    def __init__(self, places: Sequence[int], run: Run) -> None:
        self._places, self._run, self._records = places, run, run.records
        self._others = len(run.records)
        self._logged: list[dict[str, float]] = []
        self._before = run.logged
        run.logged = {}

    def visited(self) -> None:
        self._logged.append(self._run.logged)
        self._run.logged = {}

    def partial(self) -> Any:
        rows, module = self._records[self._others :], self._run.lightning_module
        findings = module.new_findings() if isinstance(module, SharesFindings) else {}
        return [*zip(self._places, rows, self._logged, strict=True)], findings

    def merge(self, partials: Sequence[Any]) -> None:
        module = self._run.lightning_module
        if isinstance(module, SharesFindings):  # equal in all processes, also where two have found a value
            module.add_findings({key: value for _, findings in partials for key, value in findings.items()})
        made = sorted((visit for visits, _ in partials for visit in visits), key=lambda visit: visit[0])
        if [place for place, _, _ in made] != [*range(len(made))]:
            raise ValueError(
                "the processes have shared out the visits of a round unlike: have the algorithm's plan and the data depend "
                "on nothing but their settings, the seed and the round"
            )
        self._records[self._others :] = [row for _, row, _ in made]
        self._run.logged = dict(self._before)
        for _, _, logged in made:
            self._run.logged |= logged


class SavedMemories:
    """Clients' memories that the visits of a round have changed: those in RAM, and the names of those in files."""

    def __init__(self, team: Team, memory: ClientMemories, round_idx: int, saved: Mapping[str, None]) -> None:
        self._team, self._memory, self._round_idx = team, memory, round_idx
        self._saved = saved if team.leads else {}  # a client's other processes take what the first has

    def agree(self) -> None:
        """Move all memories to the disk if those of all processes are over the limit."""
        uses = self._team.gather([*self._memory.use()], "memories")[:: self._team.per_client]
        versions = self._memory.move_if_over(sum(growth for growth, _ in uses), self._round_idx)
        if self._memory.on_disk and not all(was_on_disk for _, was_on_disk in uses):
            self.merge([self._team.broadcast(versions, "memories on disk")])

    def hand_over(self) -> None:
        """Leave the files of all processes to the first one, once it has noted them."""
        if self._memory.on_disk:
            self._team.barrier("memories noted")
            self._memory.hand_over()

    def pieces(self) -> Iterator[Any]:
        return ({client: self._memory.sent(client)} for client in [*self._saved])

    def merge(self, partials: Sequence[Any]) -> None:
        for partial in partials:
            for client, memory in partial.items():
                if client not in self._saved:
                    self._memory.take(client, memory)


class StepCounts:
    """Lightning's counts of batches and steps, which after a round are those of all its visits in every process.

    They are in checkpoints and beside logged values, and ``trainer.global_step`` is one of them.
    """

    def __init__(self, trainer: L.Trainer, planned: RoundPlanner) -> None:
        schedule = planned.schedule
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        self._batches = schedule.num_batches if schedule.visits else 0
        self._passed_over = 0 if schedule.visits else schedule.num_batches
        self._counts_passed = not planned.everything.visits
        self._accumulation = schedule.accumulation
        self._before = self._steps()

    def _trackers(self) -> list[Any]:
        optimizer = self._loop.automatic_optimization.optim_progress.optimizer
        manual = self._loop.manual_optimization.optim_step_progress
        return [optimizer.step.total, optimizer.zero_grad.total, manual.total]

    def _steps(self) -> list[dict[str, int]]:
        return [dict(vars(tracker)) for tracker in self._trackers()]

    def _made(self) -> list[dict[str, int]]:
        pairs = zip(self._steps(), self._before, strict=True)
        return [{name: now[name] - before[name] for name in now} for now, before in pairs]

    def partial(self) -> Any:
        counts = self._batches > 0 or self._counts_passed
        return {"batches": self._batches, "steps": self._made() if counts else None}

    def merge(self, partials: Sequence[Any]) -> None:
        # Without any visit, every process passes over the same batch, which counts once.
        made = [partial["steps"] for partial in partials if partial["steps"] is not None]
        made = made[:1] if self._counts_passed else made
        for place, (tracker, steps) in enumerate(zip(self._trackers(), self._made(), strict=True)):
            for name, number in steps.items():
                others = sum(each[place][name] for each in made) - number
                setattr(tracker, name, getattr(tracker, name) + others)
        if self._counts_passed:
            return
        others = sum(partial["batches"] for partial in partials) - self._batches - self._passed_over
        total = self._loop.batch_progress.total
        for name in vars(total):
            setattr(total, name, getattr(total, name) + others)
        count_steps_of_others(self._trainer, others // self._accumulation)


class Ranks(Part):
    """Process of a team in the rounds of a run."""

    def __init__(self, team: Team, memory: ClientMemories, settings: SameFederation) -> None:
        self._team, self._memory, self._settings = team, memory, settings
        self._said = False

    def check(self, run: Run) -> None:
        refuse_uneven(run.trainer)

    def meet(self, run: Run) -> None:
        refuse_unmergeable(run.aggregation or aggregation_of(run.algorithm, len(run.clients)))

    def attach(self, run: Run) -> None:
        run.gather = self._team.gather
        self._run, self._kept = run, KeptByAlgorithm(run.algorithm)
        if isinstance(run.algorithm, MergesVisits):
            run.algorithm.partial()  # refuses unshareable values before any work
        settings = self._settings.settings | own_settings(run.trainer, run.data)
        same_start(self._team, run.lightning_module, settings)

    def agree(self, run: Run) -> None:
        agree_on_monitored(self._team, run.trainer)

    def after_step(self, run: Run, state: State) -> None:
        agree_on_model(self._team.same_place, state)

    def start_round(self, run: Run) -> None:
        planned = run.planned
        places = {id(visit): place for place, visit in enumerate(planned.everything.visits)}
        places_here = [places[id(visit)] for visit in planned.schedule.visits]
        self._made = VisitsMade(places_here, run)
        self._counts = StepCounts(run.trainer, planned)
        self._kept.start_round()
        self._trains = bool(planned.schedule.visits)
        if self._trains and not self._said:
            self._attributes = _attributes_of(run.lightning_module)

    def visited(self, run: Run) -> None:
        self._kept.visited()
        self._made.visited()

    def end_visits(self, run: Run, round: OpenRound) -> None:
        """Give every process the changes by all visits, here and in the other parts of the run."""
        self._say_what_is_partial()
        memories = SavedMemories(self._team, self._memory, run.round_idx, round.saved)
        memories.agree()
        others = [part for part in run.parts if part is not self]
        small: list[Any] = [self._made, self._counts, round.training, *others]
        large: list[Any] = [self._kept, memories, round.contributions]  # as large as the model, or as several
        for holder in (round.contributions.aggregation, run.algorithm, run.buffers):
            sums: Any = getattr(holder, "sums", None)
            if hasattr(sums, "add_up"):
                sums.add_up(self._team.same_place)
        # All start anew before the first merge, or a process would send values that it received.
        first, streams = [part.partial() for part in small], [part.pieces() for part in large]
        pieces = ((part, piece) for part, stream in enumerate(streams) for piece in stream)
        if not self._team.leads:
            deque(pieces, maxlen=0)
        messages = self._team.gather_each(chain([(0, first)], pieces), f"end of round {run.round_idx + 1}")
        opening = next(messages)
        firsts = [sent.pop(0)[1] for sent in opening]
        for place, part in enumerate(small):
            # Metrics are of the rows of a process, all else of the visit.
            step = 1 if part is round.training else self._team.per_client
            part.merge([of_process[place] for of_process in firsts[::step]])
        for message in chain([opening], messages):
            for sent in message:
                while sent:  # merged pieces are freed
                    place, piece = sent.pop(0)
                    large[place].merge([piece])
        memories.hand_over()

    def _say_what_is_partial(self) -> None:
        """Say once, after the first visits, which values are of the clients of one process alone."""
        if self._said or not self._trains:
            return
        self._said = True
        keys = logged_names(self._run.trainer)
        names = sorted({key.removeprefix(STEP) for key in keys if key.startswith(STEP)})
        if names:
            rank_zero_info(
                f"{', '.join(names)}: training_step logs it, so under trainer.strategy=client_parallel it is of the clients "
                "that process 0 trains, also with sync_dist=True; fed/loss is of all"
            )
        module = self._run.trainer.lightning_module
        now, before = _attributes_of(module), self._attributes
        changed = ", ".join(sorted(name for name in {**before, **now} if before.get(name) != now.get(name)))
        if changed and not isinstance(module, TakesVisitStart):
            rank_zero_info(
                f"{type(module).__name__}'s {changed}: visits change it, and each process of "
                "trainer.strategy=client_parallel has its own. If a step depends on it, the result depends on the number of "
                "processes: start it anew in on_visit_start(client_id), or register it as a buffer"
            )


def _unlike(team: Team, values: Mapping[str, Any], what: str) -> list[tuple[str, int, Any]]:
    """Return the names with another value in another process, each with that process and its value."""
    digest = hashlib.blake2b(repr(dict(values)).encode()).hexdigest()
    if len({*team.gather(digest, what)}) == 1:  # else names and values travel
        return []
    return [
        (name, rank, others.get(name))
        for rank, others in enumerate(team.gather(dict(values), what))
        for name in values
        if others.get(name) != values[name]
    ]


@torch.no_grad()
def same_start(team: Team, module: L.LightningModule, settings: Mapping[str, Any]) -> None:
    """Give every process the weights of process 0 where its own differ, and compare settings and data.

    Raises:
        ValueError: the processes have unlike data or settings.
    """
    for name, rank, other in _unlike(team, settings, "settings"):
        raise ValueError(
            f"{name} is {settings[name]} in process {team.rank} and {other} in process {rank}: give all processes the same "
            "settings and data, and seed whatever makes them"
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: value for name, value in tensors.items() if not value.is_meta}
    sums = {name: sum_of_bits(whole(value)) for name, value in tensors.items()}
    others = {name for name, _, _ in _unlike(team, sums, "weights")}
    unlike = [name for name in sums if name in others]
    first = team.broadcast({name: whole(tensors[name]) for name in unlike}, "first weights")
    for name, value in split_as(first, tensors).items():
        tensors[name].copy_(value)


def sum_of_bits(value: Tensor) -> list[int]:
    """Return two sums over the bytes of a tensor, plain and weighted by place; random weights differ in them."""
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.numel() > 2**20:  # a base of billions: some bytes of each part are enough to see another draw
        flat = flat[:: flat.numel() // 2**19]
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    return [int(flat.sum()), int((flat * places).sum())]


@runtime_checkable
class ReadsFirstExamples(Protocol):
    """Data whose first examples the processes compare."""

    def first_examples(self) -> Any:
        """Return a few training examples as a batch; None where worker processes read them."""


def own_settings(trainer: L.Trainer, data: object) -> dict[str, str]:
    """Return settings that must be equal in all processes: trainer, optimizers, versions, first examples."""
    settings = {f"trainer.{name}": str(getattr(trainer, name)) for name in OF_ALL_PROCESSES}
    for number, optimizer in enumerate(trainer.optimizers):
        # `use_fused_kernels` sets fused on a CPU alone.
        groups = [{**g, "params": len(g["params"]), "fused": None} for g in optimizer.param_groups]
        settings[f"optimizers[{number}]"] = str(
            {"class": type(optimizer).__name__, "groups": described(groups)}
        )
    settings["versions"] = f"torch {torch.__version__}, lightning {L.__version__}"
    if isinstance(data, ReadsFirstExamples):
        with isolate_rng():
            seed_all(0, "first examples")
            examples = data.first_examples()
        parts: list[str] = []

        def compared(value: Any) -> Any:
            if isinstance(value, COMPARED):
                parts.append(_digest(value))
                return value
            return with_parts(value, compared)

        compared(examples)
        settings["data.first_examples"] = f"digest {digest(*parts)}"
    return settings


def agree_on_model(team: Team, state: State) -> None:
    """Raise ValueError if processes have unlike global models after a round."""
    digests = {name: sum_of_bits(value) for name, value in state.items()}
    for name, rank, _ in _unlike(team, digests, "global model"):
        raise ValueError(
            f"the server's step has given processes {team.rank} and {rank} unlike global models ({name}): have "
            "aggregation and server compute from what is merged and from seeded streams alone, or set trainer.devices=1"
        )


def agree_on_monitored(team: Team, trainer: L.Trainer) -> None:
    """Raise ValueError if processes have unlike values of a metric that a callback or schedule monitors."""
    monitors = [getattr(callback, "monitor", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    monitors += [each.monitor for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    names = sorted({str(monitor) for monitor in monitors if monitor})
    if not names:
        return
    values = {name: trainer.callback_metrics.get(name) for name in names}
    digits = {name: None if value is None else float(value).hex() for name, value in values.items()}
    for name, _, _ in _unlike(team, digits, "monitored values"):
        raise ValueError(
            f"monitor={name}: under trainer.strategy=client_parallel each process logs it over the clients that it trains, "
            "so the processes would decide unlike: monitor a value of validation, or one that begins with fed/"
        )


def refuse_unmergeable(aggregation: Aggregation) -> None:
    """Raise ValueError for an aggregation that cannot merge the contributions of several processes."""
    kind: Any = type(aggregation)
    for name in ("partial", "merge"):
        if getattr(kind, name, None) in (None, getattr(Aggregation, name)):
            raise ValueError(
                f"{kind.__name__} has no {name}, by which the processes of trainer.strategy=client_parallel put their "
                "updates together: add partial() and merge(partial), as CoordinateMedian has, or set trainer.devices=1"
            )


def refuse_uneven(trainer: L.Trainer) -> None:
    """Raise ValueError for callbacks that work by the batches or the clock of one process."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint) and (setting := saves_inside_epochs(callback)):
            raise ValueError(
                f"{type(callback).__name__}({setting}=...) saves inside a round, by the batches or the clock of each "
                "process of trainer.strategy=client_parallel: set every_n_epochs, which counts rounds"
            )
        if isinstance(callback, TakesUpload) and not getattr(callback, "shares_uploads", False):
            raise ValueError(
                f"{type(callback).__name__}.on_upload sees the uploads of those clients that its own process of "
                "trainer.strategy=client_parallel trains: have it gather what it finds when a round is over, "
                "fedlight.processes.current_team().gather(...), and give the class shares_uploads = True; or set "
                "trainer.devices=1"
            )
        if isinstance(callback, Timer) and stops_at_a_batch(callback):
            raise ValueError(
                "trainer.max_time and Timer stop by the clock at a batch, and the processes of "
                "trainer.strategy=client_parallel have unlike batches: take Timer(duration, interval='epoch')"
            )
