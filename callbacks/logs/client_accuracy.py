"""Accuracy by client, for modules that choose between two answers.

``validation_step`` and ``test_step`` return ``{"correct": (batch, U) bool, "vote": (batch,) bool}``: whether each of U
selectors is right, and whether their majority is. An even number of selectors can tie; it has no ``vote``. Where each client
has weights for mixing the selectors, ``log_odds``, ``(batch, U)``, are those of the right answer under each selector. With
``log_odds``, ``orders`` and ``labels``, ``(batch,)``, a client's own model is also judged with both orders averaged.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from fedlight.callbacks.logs.group_log import (
    GroupsClients,
    find_grouping,
    known_groups,
    read_selectors,
    weights_of,
)
from fedlight.callbacks.logs.trainer import KeepsOwnModels, find_own_models, log_now
from fedlight.callbacks.loop.round_table import Record, RoundLog
from fedlight.callbacks.loop.run import parameters_of, ready
from fedlight.evaluation.by_client import per_client, spread
from fedlight.evaluation.judge import judge_both_orders, summarize_both_orders
from fedlight.processes.work import for_each
from fedlight.support.checks import check_range
from fedlight.support.torch_parts import eval_mode

Indices = Mapping[str, np.ndarray]


@runtime_checkable
class OwnTestExamples(Protocol):
    """Datamodule with a test set by client, ready after ``setup("test")``: client id -> indices in ``test_set``."""

    test_set: Any
    test_client_indices: Indices | None
    eval_batch_size: int

    def setup(self, stage: str) -> None:
        """Make the test set."""

    def collate(self, examples: list[Any]) -> Any:
        """Return examples as a batch."""


@dataclass(frozen=True)
class Outcomes:
    """Outcomes of a pass over examples."""

    correct: np.ndarray  # whether each selector is right, ``(examples, U)`` bool
    vote: np.ndarray | None  # whether their majority is, ``(examples,)`` bool; None without a vote
    # log-odds of the right answer under each selector, ``(examples, U)``; None where they are not given
    log_odds: np.ndarray | None
    # both of each example, ``(examples,)``, see `judge_both_orders`; None where they are not given
    orders: np.ndarray | None = None
    labels: np.ndarray | None = None

    def own(self, selector: int | None, weights: Sequence[float] | None) -> np.ndarray | None:
        """Return whether a client's own model is right on each example, ``(examples,)``; None where that is not known.

        ``selector=None`` takes the vote of all; ``weights``, ``(U,)``, take the mixture of the selectors.
        """
        if weights is not None:
            return None if self.log_odds is None else mix_log_odds(self.log_odds, weights) > 0
        return self.vote if selector is None else self.correct[:, selector]

    def own_both_orders(
        self, selector: int | None, weights: Sequence[float] | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return whether a client's own model is right with both orders averaged, and the comparisons' numbers.

        Arguments as `own`; both are ``(judged,)`` as from `judge_both_orders`, empty where orders are not given or an even
        number of selectors would vote.
        """
        if self.log_odds is None or self.orders is None or self.labels is None:
            return np.empty(0), np.empty(0, dtype=np.int64)
        odds = self.log_odds
        if weights is not None:
            odds = mix_log_odds(odds, weights)[:, None]
        elif selector is not None:
            odds = odds[:, [selector]]
        if odds.shape[1] % 2 == 0:  # their votes may tie
            return np.empty(0), np.empty(0, dtype=np.int64)
        # Log-odds of label 1, from those of the right answer.
        return judge_both_orders(self.orders, odds * (2 * self.labels[:, None] - 1), self.labels)


@dataclass(frozen=True)
class Tally:
    """Results of one client's examples."""

    examples: int  # number of examples
    correct: Sequence[float]  # share that each of U selectors answers right, ``(U,)``, in [0, 1]
    vote: float | None = None  # share that their majority answers right; None without a vote
    # share that the client's mixture of selectors answers right; None without weights or log-odds
    mixed: float | None = None


def tally(
    outcomes: Outcomes, indices: Indices, weights: Mapping[str, Sequence[float]] | None = None
) -> dict[str, Tally]:
    """Return the results of each client with an example in the pass, with the selectors mixed by its ``weights``.

    Examples:
        >>> outcomes = Outcomes(np.array([[True], [False], [True]]), np.array([True, False, True]), None)
        >>> tally(outcomes, {"u": np.array([0, 1])})
        {'u': Tally(examples=2, correct=[0.5], vote=0.5, mixed=None)}
    """
    votes = {} if outcomes.vote is None else per_client(outcomes.vote[:, None], indices)
    tallies = {}
    for client, shares in per_client(outcomes.correct, indices).items():
        # A pass may end before the last example, as with limit_val_batches.
        seen = indices[client][indices[client] < len(outcomes.correct)]
        mixed = None
        if weights and client in weights and outcomes.log_odds is not None:
            mixed = float((mix_log_odds(outcomes.log_odds[seen], weights[client]) > 0).mean())
        vote = float(votes[client][0]) if votes else None
        tallies[client] = Tally(len(seen), shares.tolist(), vote, mixed)
    return tallies


class ClientAccuracy(RoundLog):
    """Lightning callback that logs and writes the accuracy on each client's validation and test examples.

    Logs ``val/client_mean``, ``val/client_worst_tenth`` (mean of the worst tenth of the clients, rounded up) and
    ``val/client_std`` (over the clients), and the same under ``test/``. Where clients are grouped, ``own_client_mean`` and
    so on are the metrics of each client's own selector, or, where it has weights over the selectors, of their probabilities
    mixed by these. Writes ``clients.csv``: stage, round (in fit), client, examples, known group, selector, accuracy of the
    vote, own_accuracy, of the client's own selector or mixture, and own_both_orders, of its own model at the end of fit
    with both orders of a comparison averaged; unknown values are empty, such as the accuracy of the vote without one. If an
    epoch validates several times, the first pass is written. A killed and resumed run leaves the same file as an
    uninterrupted one. Without ``correct`` from the module, or clients of examples from the datamodule, the
    callback reports it once and does nothing.

    Args:
        path: the file; None: ``clients.csv`` in the trainer's ``default_root_dir``.
        groups: ``groups.csv`` of a federated run, whose last round gives the clients' selectors in ``test`` and
            ``validate``. A grouping algorithm in the run itself comes first.
        worst: share of clients that count as the worst, in (0, 1]; if not a tenth, part of the name: ``client_worst_0.25``.
        own_models: at the end of fit, test each client's own model (the one that it would continue alone, as in local-only
            training; of grouped clients their selector or mixture) on its own test examples:
            ``own/client_mean`` and so on, and ``own/accuracy``, pooled over the examples; where comparisons come in both
            orders also ``own/accuracy_both_orders``, with the two orders averaged, and the ends of its interval, ``_low``
            and ``_high``. ``own/without_own_model`` counts the clients among them without one, because no round has visited
            them; they are tested with the global model.

    Attributes:
        summary: metrics of ``own_models`` by name.

    Raises:
        ValueError: ``worst`` is out of range; in ``setup``, ``groups`` is not a file of GroupLog or has other clients, or
            ``own_models`` lacks a federated loop or test examples by client.
    """

    log_name = "clients.csv"

    def __init__(
        self,
        path: str | None = None,
        groups: str | None = None,
        worst: float = 0.1,
        own_models: bool = False,
    ) -> None:
        check_range("ClientAccuracy.worst", worst, 0, 1, above_low=True)
        super().__init__(path)
        self.groups, self.worst, self.own_models = groups, worst, own_models
        self.summary: dict[str, float] = {}
        self._outputs: list[Any] = []
        self._messages: set[str] = set()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._grouping: GroupsClients | None = find_grouping(trainer)
        evaluates = stage in ("validate", "test")
        self._selectors, self._weights = (
            read_selectors(Path(self.groups)) if self.groups and evaluates else ({}, {})
        )
        if self._selectors:
            self._check_clients(trainer, "val" if stage == "validate" else "test")
        if stage == "fit" and self.own_models:
            self._loop = find_own_models(trainer, "ClientAccuracy")
            self._data = _find_own_examples(trainer)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._outputs = []

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if dataloader_idx == 0:  # the clients of another loader are not known
            self._outputs.append(outputs)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        rows = self._evaluate(trainer, pl_module, "val")
        if trainer.state.fn != "fit":
            self._replace("validate", rows)
            return
        self._append(trainer, rows)

    def take(self, trainer: L.Trainer, module: L.LightningModule, tallies: Mapping[str, Tally]) -> None:
        """Log and write the results of a validation that the clients' devices have made."""
        if tallies:
            self._append(trainer, self._log(trainer, module, "val", tallies))
        else:
            self._say_once("no device has sent results of validation rows")

    def _append(self, trainer: L.Trainer, rows: Sequence[Record]) -> None:
        self._table.append([{"stage": "val", "round": trainer.current_epoch, **row} for row in rows])

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._replace("test", self._evaluate(trainer, pl_module, "test"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Test the clients' own models; only now are the models of the last round complete, also of a finished run."""
        if not self.own_models:
            return
        clients = [*(self._data.test_client_indices or {})]
        selectors = self._grouping.groups if self._grouping is not None else {}
        weights = weights_of(self._grouping)

        def measure(client: str) -> tuple[list[bool], list[float], list[int]] | None:
            """Return, for a client, which single orders are right, which examples in both, and the comparisons of these."""
            outcomes = stack_outcomes(
                outputs_of_own_model(trainer, pl_module, self._loop, self._data, client)
            )
            selector, mixed = selectors.get(client), weights.get(client)
            single = None if outcomes is None else outcomes.own(selector, weights=mixed)
            if outcomes is None or single is None:
                return None
            right, comparisons = outcomes.own_both_orders(selector, weights=mixed)
            return single.tolist(), right.tolist(), comparisons.tolist()

        # Several processes share the clients.
        shared = zip(clients, for_each(measure, clients), strict=True)
        measured = {client: lists for client, lists in shared if lists is not None}
        correct = {client: np.array(lists[0], dtype=float) for client, lists in measured.items()}
        if len(correct) < len(clients):
            missing = next(client for client in clients if client not in correct)
            return self._say_once(_why_no_own(pl_module, missing, selectors, weights))
        accuracies = {client: float(right.mean()) for client, right in correct.items()}
        by_client = {f"own/{name}": x for name, x in spread([*accuracies.values()], self.worst).items()}
        without = float(sum(c not in selectors and self._loop.own_state(c) is None for c in clients))
        pooled = float(np.concatenate([*correct.values()]).mean())
        rights, comparisons = (np.concatenate([np.array(x[at]) for x in measured.values()]) for at in (1, 2))
        of_both = summarize_both_orders(rights, comparisons.astype(np.int64))
        both_orders = {f"own/accuracy_both_orders{end}": value for end, value in of_both.items()}
        self.summary = {"own/accuracy": pooled, **both_orders, **by_client, "own/without_own_model": without}
        known = known_groups(trainer)
        self._replace(
            "own",
            [
                client_row(
                    c,
                    len(right),
                    known,
                    selector=selectors.get(c),
                    accuracy=float(right.mean()),
                    own_accuracy=float(right.mean()),
                    # Empty where an even number of selectors would vote, or examples have no orders.
                    own_both_orders=float(np.mean(measured[c][1])) if measured[c][1] else None,
                )
                for c, right in correct.items()
            ],
        )
        log_now(trainer, self.summary)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self.summary.items())
        rank_zero_info(f"each of {len(correct)} clients with its own model: {shown}")

    def _evaluate(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> list[Record]:
        """Log the accuracies of the finished pass and return a row for each client."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        outcomes, self._outputs = stack_outcomes(self._outputs), []
        indices = _client_indices(data, stage)
        if outcomes is None:
            self._say_once(f"the {stage} step of {type(module).__name__} gives no 'correct' and 'vote'")
        elif indices is None:
            self._say_once(f"{type(data).__name__} does not know the clients of the {stage} examples")
        elif trainer.world_size > 1:
            self._say_once("several processes share the examples")
        else:
            tallies = tally(outcomes, indices, weights_of(self._grouping) or self._weights)
            return self._log(trainer, module, stage, tallies)
        return []

    def _log(
        self, trainer: L.Trainer, module: L.LightningModule, stage: str, tallies: Mapping[str, Tally]
    ) -> list[Record]:
        if not tallies:  # the pass has ended before an example of a client
            return []
        num_selectors = max(len(each.correct) for each in tallies.values())
        selectors, known = self._own_selectors(num_selectors), known_groups(trainer)
        weights = (weights_of(self._grouping) or self._weights) if selectors else {}
        if any(each.mixed is None for client, each in tallies.items() if client in weights):
            self._say_once(
                f"no 'log_odds' of the {stage} step of {type(module).__name__} are here to mix those of a client",
                "no own accuracy",
            )
            selectors, weights = {}, {}
        rows = []
        for client, each in tallies.items():
            selector = selectors.get(client)
            index = 0 if num_selectors == 1 else selector  # a single selector is everybody's
            own_accuracy = None if index is None else each.correct[index]
            if client in weights:
                own_accuracy = each.mixed
            values = {"selector": selector, "accuracy": each.vote, "own_accuracy": own_accuracy}
            rows.append(client_row(client, each.examples, known, **values))
        voted = [each.vote for each in tallies.values() if each.vote is not None]
        metrics = spread(voted, self.worst) if voted else {}
        if own_accuracies := [float(row["own_accuracy"]) for row in rows if row["selector"] != ""]:
            metrics |= {f"own_{name}": value for name, value in spread(own_accuracies, self.worst).items()}
        named = {f"{stage}/{name}": value for name, value in metrics.items()}
        module.log_dict(named, on_step=False, on_epoch=True, batch_size=1)
        return rows

    def _check_clients(self, trainer: L.Trainer, stage: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        indices = _client_indices(data, stage)
        if indices and not indices.keys() & self._selectors.keys():
            raise ValueError(
                f"groups={self.groups} names none of the {len(indices)} clients of the {stage} examples, such as "
                f"{next(iter(indices))!r}: give the groups.csv of a run on the same clients"
            )

    def _own_selectors(self, num_selectors: int) -> Mapping[str, int]:
        groups = self._grouping.groups if self._grouping is not None else {}
        selectors = groups or self._selectors
        if selectors and max(selectors.values()) >= num_selectors:
            raise ValueError(
                f"groups={self.groups} names selector {max(selectors.values())}, but the model has {num_selectors}, "
                "counted from 0: give the groups.csv of the run that trained it"
            )
        return selectors

    def _replace(self, stage: str, rows: Sequence[Record]) -> None:
        if rows:
            self._table.replace("stage", stage, [{"stage": stage, "round": "", **row} for row in rows])

    def _say_once(self, reason: str, result: str = "no accuracy by client") -> None:
        if reason not in self._messages:
            rank_zero_info(f"ClientAccuracy: {reason}, so there is {result}")
        self._messages.add(reason)


def client_row(client: str, examples: int, known: Mapping[str, str], **values: float | None) -> Record:
    """Return a row of ``clients.csv``, without its stage and round; a value that is None or not given is empty."""
    row: Record = {"client": client, "examples": examples, "group": known.get(client, "")}
    columns = ("selector", "accuracy", "own_accuracy", "own_both_orders")
    return row | {name: "" if (value := values.get(name)) is None else value for name in columns}


def _why_no_own(
    module: L.LightningModule,
    client: str,
    selectors: Mapping[str, int],
    weights: Mapping[str, Sequence[float]],
) -> str:
    """Return why it is not known whether a client's own model is right."""
    if selectors and client not in selectors:
        return f"client {client!r} of the test examples was in no grouping, and an even number of selectors has no vote"
    name = "'log_odds'" if client in weights else "'correct' and 'vote'"
    return f"{type(module).__name__}.test_step gives no {name}"


def stack_outcomes(outputs: Sequence[Any]) -> Outcomes | None:
    """Return the outcomes of a pass; None where a step gave none."""
    if not outputs or not all(isinstance(output, Mapping) and "correct" in output for output in outputs):
        return None

    def stack(name: str) -> np.ndarray | None:
        if name not in outputs[0]:
            return None
        joined = torch.cat([output[name] for output in outputs]).cpu()
        values: np.ndarray = (joined if joined.dtype == torch.bool else joined.double()).numpy()
        return values

    correct = stack("correct")
    assert correct is not None
    orders, labels = (
        None if values is None else values.astype(np.int64) for values in (stack("orders"), stack("labels"))
    )
    return Outcomes(correct, stack("vote"), stack("log_odds"), orders, labels)


def mix_log_odds(log_odds: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the log-odds of the right answer under a mixture of selectors, ``(examples,)``.

    ``log_odds`` are ``(examples, U)``; the weights of the selectors, ``(U,)``, sum to 1.

    Examples:
        >>> mix_log_odds(np.array([[4.0, -1.0], [4.0, -9.0]]), [0.4, 0.6]).round(3).tolist()  # of 0.55 and 0.39
        [0.218, -0.435]
    """
    with np.errstate(divide="ignore"):  # a weight may be 0
        shares = np.log(np.asarray(weights))
    # log p = -log(1 + exp(-odds)), and log(1 - p) with the other sign, without overflow
    right, wrong = (
        np.logaddexp.reduce(shares - np.logaddexp(0, sign * log_odds), axis=1) for sign in (-1, 1)
    )
    mixed: np.ndarray = right - wrong
    return mixed


def _client_indices(data: Any, stage: str) -> Indices | None:
    """Return client id -> positions in the loader's order; None where the datamodule does not know them."""
    indices: Indices | None = getattr(data, f"{stage}_client_indices", None)
    return indices


def _find_own_examples(trainer: L.Trainer) -> OwnTestExamples:
    """Return the datamodule with its test set, made before any training so that a missing one is reported at once."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, OwnTestExamples):
        data.setup("test")
        if data.test_client_indices:
            return data
    raise ValueError(
        f"ClientAccuracy.own_models=true needs test examples by client, which {type(data).__name__} does not have: "
        "give data.split.test_source rows with the column of columns.client, or leave it at false"
    )


def outputs_of_own_model(
    trainer: L.Trainer,
    module: L.LightningModule,
    loop: KeepsOwnModels,
    data: OwnTestExamples,
    client_id: str,
) -> list[Any]:
    """Return the outputs of ``test_step``, one per batch of a client, with its own parameters in the module.

    The module is in evaluation mode, without gradients, logs nothing, and has its parameters back bit for bit.
    """
    assert data.test_client_indices is not None
    indices = data.test_client_indices[client_id]
    starts = range(0, len(indices), data.eval_batch_size)
    places = [indices[start : start + data.eval_batch_size] for start in starts]
    batches = (data.collate([data.test_set[int(place)] for place in each]) for each in places)
    with parameters_of(module, loop.own_state(client_id) or {}):  # {}: the global model
        # Under the precision that Lightning's test has.
        return run_steps(module, module.test_step, trainer.precision_plugin.test_step_context, batches)[0]


Sums = dict[str, tuple[float, int]]
"""Name of a logged value -> its sum over examples, and their number."""


def run_steps(
    module: L.LightningModule,
    step: Callable[..., Any],
    context: Any,
    batches: Iterable[Any],
    hooks: Sequence[Callable[[], Any]] = (),
) -> tuple[list[Any], Sums]:
    """Return the outputs of an evaluation step on batches, and sums of the means that it logs, outside of Lightning's loops.

    Metrics of torchmetrics, values without a batch size, and those that are not reduced by their mean have no sum and are
    left out; metrics end empty. A step is called with the arguments that it takes, as Lightning does; ``hooks`` are called
    before the first batch and after the last one.
    """
    outputs, sums = [], Sums()

    def log(name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        is_mean = kwargs.get("reduce_fx", "mean") in ("mean", "avg", torch.mean)
        if is_mean and batch_size is not None and not isinstance(value, Metric):
            total, count = sums.get(name, (0.0, 0))
            size = int(batch_size)  # a module may give a tensor
            sums[name] = total + float(value) * size, count + size

    takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    takes_loader = is_param_in_hook_signature(step, "dataloader_idx", explicit=True)
    of_loader = {"dataloader_idx": 0} if takes_loader else {}
    module.log = log  # type: ignore[method-assign]  # Lightning's is refused outside of its loops
    try:
        with eval_mode(module), torch.no_grad():
            for hook in hooks[:1]:
                hook()
            for batch_idx, batch in enumerate(batches):
                here = ready(module, batch)
                with context():
                    outputs.append(step(here, *[batch_idx] * takes_index, **of_loader))
            for hook in hooks[1:]:
                hook()
    finally:
        del module.log
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
    return outputs, sums
