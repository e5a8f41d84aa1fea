"""Base of the attacks on a model during training: their times, their targets, and the files of their findings."""

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import lightning as L
import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from fedlight.callbacks.attacks.records import GLOBAL, AttackTable, remove_later
from fedlight.callbacks.logs.trainer import find_callback, log_now
from fedlight.evaluation.tasks.model import AnswersPrompts, KnowsWhatFits, ScoresRaw
from fedlight.evaluation.tasks.sampling import Sampling
from fedlight.federation.client import State, Upload
from fedlight.processes.work import is_first, merged, once
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.files import quoted, refuse_unwritable, write_json_lines
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields, FieldsByClient

Target = Literal["global", "uploads"]
Asked = TypeVar("Asked")


@runtime_checkable
class HoldsClientRows(Protocol):
    """Datamodule that knows the clients' rows (template slot or ``response`` -> text) after ``setup("fit")``."""

    client_rows: FieldsByClient  # client id -> its own training rows, with planted canaries
    planted: FieldsByClient  # client id -> its canaries, each once; only clients that have some
    template: Any  # template of prompts; see ``fedlight.datamodules.text.templates``

    def unseen_rows(self) -> Sequence[Fields]:
        """Return rows like the clients' that are not trained on; empty where there are none."""


SCORING: tuple[type, str] = ScoresRaw, "log_likelihoods"
WRITING: tuple[type, str] = AnswersPrompts, "generate, log_likelihoods"
"""Needs of attacks that have the module score, or write, texts; see `Attack.needs`."""


@runtime_checkable
class HoldsStates(Protocol):
    """Federated loop that gives its callbacks each upload, ``on_upload``, and can hold one in the module."""

    rounds_done: int

    def before_round(self) -> AbstractContextManager[None]:
        """Put the server's model from before the round into the module while the body runs."""

    def holding(self, state: State) -> AbstractContextManager[None]:
        """Put this state into the module while the body runs."""


class Found(NamedTuple):
    """Findings of one attack on one target: metrics by name, and all texts and numbers that were seen, as plain values."""

    metrics: dict[str, float]
    records: list[dict[str, Any]]


class Attack(Checked, L.Callback, ABC):
    """Base class of attacks: a subclass states its needs in ``prepare`` and attacks in ``attack``.

    The server's model, of several adapters the first, is attacked at the end of each n-th round (each n-th epoch without a
    federated loop) and of the last of ``max_epochs``, before it is validated. During these rounds each client's upload is
    attacked as it arrives. Training continues as if nothing had been measured. Metrics are logged as ``attack/NAME/METRIC``,
    and their means over a round's uploads as ``attack/NAME/uploads/METRIC``, at the number of optimizer steps made so far.
    ``OUTPUT/attacks.csv`` holds them all (`AttackTable`), ``OUTPUT/round_3/NAME.jsonl`` the records of the third round.

    Args:
        every_n_rounds: at least 1.
        before_training: also attack the model before training, as round 0.
        targets: ``global``, ``uploads`` or both.
        seed: seed of all draws; examples and draws are the same in every round.
        output: a folder; None: ``attacks`` in ``trainer.default_root_dir``.

    Raises:
        ValueError: a setting is out of range; in ``setup``, the module, the datamodule or the trainer lacks a needed part.
        OSError: the disk is full; in ``setup``, the folder cannot be written.
    """

    name: ClassVar[str]
    """Name in metrics and files."""

    needs: ClassVar[tuple[type, str] | None] = None
    """Protocol that the module must have besides `KnowsWhatFits`, and its methods in words; None: any module."""

    shares_uploads = True  # each process attacks its clients' uploads, and all have the findings

    def __init__(
        self,
        every_n_rounds: int = 1,
        before_training: bool = False,
        targets: Sequence[Target] = ("global",),
        seed: int = 0,
        output: str | None = None,
    ) -> None:
        self.check_at_least_one(every_n_rounds=every_n_rounds)
        if not targets:
            raise ValueError(f"{type(self).__name__}.targets=[] must name `global`, `uploads` or both")
        self.every_n_rounds, self.before_training = every_n_rounds, before_training
        self.targets = tuple(targets)
        self.seed, self.output = seed, output
        self._rounds_done = self._restored = 0
        self._before: str | None = None
        self._table: AttackTable | None = None
        self._uploads: dict[str, list[Found]] = {}
        self._reported: set[str | None] = set()

    def check_settings(self, module: object, data: object) -> None:
        """Raise ValueError for a kind of module or data that cannot be attacked; neither has been set up."""
        if not isinstance(data, HoldsClientRows):
            raise ValueError(
                f"{type(self).__name__} needs a datamodule that knows the clients' rows, such as InstructionDataModule, not "
                f"{type(data).__name__}"
            )
        if self.needs and not (isinstance(module, self.needs[0]) and isinstance(module, KnowsWhatFits)):
            raise ValueError(
                f"{type(self).__name__} needs a module with {self.needs[1]} and fits, such as SFTModule, not "
                f"{type(module).__name__}"
            )

    @abstractmethod
    def prepare(self, data: HoldsClientRows, module: Any) -> None:
        """Take the data that the attack needs; raise ValueError for rows that cannot be attacked."""

    @abstractmethod
    def attack(self, module: Any, client: str | None) -> Found:
        """Attack the module's present parameters, searching for the rows of ``client``, or of all clients if None."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find the loop and the clients' rows, so that missing ones are reported before any work."""
        if stage != "fit":
            return
        who = type(self).__name__
        if trainer.world_size > 1:
            raise ValueError(f"{who} attacks in one process: set devices=1 and num_nodes=1")
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.check_settings(pl_module, data)
        assert isinstance(data, HoldsClientRows)
        self._loop = self._move_behind_loop(trainer)
        if "uploads" in self.targets and (self._loop is None or GLOBAL in data.client_rows):
            raise ValueError(
                f"{who}.targets={list(self.targets)} needs uploads, and so a federated loop: add one, or name global alone"
                if self._loop is None
                else f"{who}.targets={list(self.targets)}: a client is called {GLOBAL!r}, as the server's model; rename it"
            )
        if trainer.current_epoch == 0:  # a checkpoint is loaded later
            self._rounds_done, self._before = 0, None
        self._reported.clear()  # once a fit
        self._folder = Path(self.output or Path(trainer.default_root_dir) / "attacks")
        self._table = AttackTable(self._folder / "attacks.csv", self.name)
        self.prepare(data, pl_module)
        if is_first():
            refuse_unwritable(self._folder, f"{who}.output")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remove rounds that will be measured again; a checkpoint is loaded by now."""
        if self._loop is not None:
            self._rounds_done = self._loop.rounds_done
        self._uploads = {}
        self._trainer, self._module = trainer, pl_module
        assert self._table is not None
        self._table.restart(self._rounds_done, self._before if self._rounds_done == self._restored else None)
        remove_later(self._folder, f"{self.name}.jsonl", self._rounds_done)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # A run without a federated loop may resume inside its first epoch.
        if self.before_training and self._rounds_done == 0 and trainer.global_step == 0:
            self._finish(trainer, {GLOBAL: self._attack_server(pl_module)})

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Attack the server's model at the end of a round."""
        # At on_train_epoch_end a checkpoint may be taken already, and a resumed run would lack the round.
        done = self._loop.rounds_done if self._loop else trainer.current_epoch + trainer.is_last_batch
        if done > self._rounds_done:
            self._rounds_done = done
            if self._is_due(trainer, done):
                everybody = {GLOBAL: self._attack_server(pl_module)} if "global" in self.targets else {}
                self._finish(trainer, {**self._all_uploads(), **everybody})
            self._uploads = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished rounds, and a digest of their findings."""
        return {
            "rounds_done": self._rounds_done,
            "before": self._table.digest if self._table is not None else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._rounds_done = self._restored = state_dict["rounds_done"]
        self._before = state_dict.get("before")

    def check_at_least_one(self, **settings: int) -> None:
        """Raise ValueError for a setting below 1."""
        refuse_below(1, f"{type(self).__name__}.", **settings)

    def _draw_unseen(self, rows: Sequence[Fields], number: int) -> list[Fields]:
        """Return up to ``number`` of these rows, the same in every round."""
        return random.Random(derive_seed(self.seed, self.name)).sample(rows, len(rows))[:number]

    def _keep_fitting(
        self,
        module: KnowsWhatFits,
        asked: Sequence[Asked],
        prompts: Sequence[str],
        new_tokens: int,
        client: str | None,
    ) -> list[Asked]:
        """Return the entries whose prompts fit into the model; report the number of others once for each target."""
        fits = module.fits(prompts, new_tokens)
        kept = [entry for entry, fit in zip(asked, fits, strict=True) if fit]
        if len(kept) < len(asked) and client not in self._reported:
            self._reported.add(client)
            rank_zero_info(
                f"{self.name}: {len(asked) - len(kept)} of {len(asked)} prompts are left out, since they do not fit into "
                f"the model with {new_tokens} more tokens"
            )
        return kept

    def _move_behind_loop(self, trainer: L.Trainer) -> HoldsStates | None:
        """Return the loop, None without one; make Lightning call it first from now on, or uploads come a batch late."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        loop = find_callback(trainer, HoldsStates)
        if loop is not None and callbacks.index(loop) > callbacks.index(self):
            # In a new list: Lightning is iterating over the old one. The command line puts the loop behind all callbacks.
            others = [callback for callback in callbacks if callback is not self]
            at = others.index(loop) + 1
            trainer.callbacks = [*others[:at], self, *others[at:]]  # type: ignore[attr-defined]
        holder: HoldsStates | None = loop
        return holder

    def _is_due(self, trainer: L.Trainer, round_number: int) -> bool:
        return round_number % self.every_n_rounds == 0 or round_number == trainer.max_epochs

    def on_upload(self, upload: Upload) -> None:
        """Attack the upload of a visit that has just ended."""
        if "uploads" in self.targets and self._is_due(self._trainer, upload.round_idx + 1):
            assert self._loop is not None  # checked in setup
            # The module may still hold what the client keeps, such as the B of FedSALoRA.
            with self._loop.before_round(), self._loop.holding(upload.state):
                finding = self._measure(self._module, upload.client_id)
            self._uploads.setdefault(upload.client_id, []).append(finding)

    def _all_uploads(self) -> dict[str, Found]:
        """Return the findings on the round's uploads, those that other processes have attacked among them, by client.

        Of a client with several uploads, one of each selector, the metrics are the means over them.
        """
        if "uploads" not in self.targets:
            return {}
        plain = merged({client: [*map(_plain, findings)] for client, findings in self._uploads.items()})
        return {
            client: Found(
                mean_metrics([metrics for metrics, _ in findings]),
                [record for _, records in findings for record in records],
            )
            for client, findings in sorted(plain.items())
        }

    def _attack_server(self, module: L.LightningModule) -> Found:
        """Attack the server's model."""
        # The first of several processes attacks, and all have its findings.
        return Found(*once(lambda: _plain(self._measure(module, None)), forward=True))

    def _measure(self, module: L.LightningModule, client: str | None) -> Found:
        start = time.perf_counter()
        with isolate_rng():  # training draws as if nothing had been measured
            finding = self.attack(module, client)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in finding.metrics.items())
        whose = f"after round {self._rounds_done}" if client is None else f"on the upload of {quoted(client)}"
        rank_zero_info(f"{self.name} {whose}: {shown}  ({time.perf_counter() - start:.1f} s)")
        return finding

    def _finish(self, trainer: L.Trainer, findings: Mapping[str, Found]) -> None:
        """Write and log the findings of a round, by target."""
        if not findings:
            return
        lines = [
            {"target": target, **record} for target, (_, records) in findings.items() for record in records
        ]
        if is_first():
            write_json_lines(self._folder / f"round_{self._rounds_done}" / f"{self.name}.jsonl", lines)
        assert self._table is not None
        self._table.put(self._rounds_done, {target: finding.metrics for target, finding in findings.items()})
        uploads = [finding.metrics for target, finding in findings.items() if target != GLOBAL]
        metrics = {
            f"attack/{self.name}/uploads/{name}": value for name, value in mean_metrics(uploads).items()
        }
        if GLOBAL in findings:
            on_server = findings[GLOBAL].metrics
            metrics |= {f"attack/{self.name}/{name}": value for name, value in on_server.items()}
        log_now(trainer, metrics)


def _plain(finding: Found) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return findings as plain values, which processes exchange."""
    return {name: float(value) for name, value in finding.metrics.items()}, finding.records


def mean_metrics(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the mappings that have it.

    Examples:
        >>> mean_metrics([{"exact": 0.5}, {"exact": 1.0, "canaries": 1.0}])
        {'exact': 0.75, 'canaries': 1.0}
    """
    names = dict.fromkeys(name for metrics in each for name in metrics)
    return {name: float(np.mean([metrics[name] for metrics in each if name in metrics])) for name in names}


def render_prompts(template: Any, rows: Sequence[Fields]) -> list[str]:
    """Return the prompt of each row."""
    return [template.render(row).text for row in rows]


def write_answers(
    module: AnswersPrompts,
    prompts: Sequence[str],
    max_new_tokens: int,
    batch_size: int,
    stop: Sequence[str] = (),
) -> list[str]:
    """Return greedy answers, written in batches of prompts of similar length."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # little padding
    answers = [""] * len(prompts)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        written = module.generate(
            [prompts[index] for index in batch], 1, 0.0, 1.0, max_new_tokens, 0, stop=stop, strip=True
        )
        for index, [text] in zip(batch, written, strict=True):
            answers[index] = text
    return answers


def sample_texts(
    module: AnswersPrompts,
    prefix: str,
    number: int,
    batch_size: int,
    sampling: Sampling,
    seed: tuple[int | str, ...],
    stop: Sequence[str] = (),
) -> list[str]:
    """Return ``number`` continuations of a prefix, drawn in batches; the batches' seeds derive from ``seed``."""
    texts: list[str] = []
    for start in range(0, number, batch_size):
        [drawn] = module.generate(
            [prefix],
            min(batch_size, number - start),
            sampling.temperature,
            sampling.top_p,
            sampling.max_new_tokens,
            derive_seed(*seed, start),
            stop=stop,
            strip=True,
        )
        texts += drawn
    return texts


def without_planted(data: HoldsClientRows) -> dict[str, list[Fields]]:
    """Return client id -> its own rows without canaries."""
    return {
        client: [row for row in rows if row not in data.planted.get(client, ())]
        for client, rows in data.client_rows.items()
    }
