"""A row of the conformance matrix: something of Lightning or torch, and which of three things it does in a federation.

The column is the kind of proof, and there are three kinds of proof:

    Equals   the run gives the parameters of the loop in `reference`
    Refused  the run ends before the first training batch, with an error that names the setting and the remedy; where only
             training can show it, before the first round is over
    Works    the meaning that the row states is asserted
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from project import CLIENTS_PER_ROUND, LOCAL_STEPS, SIZES, Project, Run, examples, rows_of_clients, weights
from reference import Train, federated_averaging, local_training


@dataclass(frozen=True)
class Equals:
    """The final global parameters are those of federated averaging written out.

    Attributes:
        project: what is run.
        train: a visit, written out.
        tolerance: largest difference of a parameter; 0 is bit for bit.
        sizes: examples of each client that count.
        buffers: what becomes of those that training changes, ``average`` or ``local``; they are compared as well.
        also: what else is asserted of the run.
    """

    column = "equals a hand-written federated loop"
    project: Project
    train: Train = local_training
    tolerance: float = 0.0
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)
    buffers: str = "none"
    also: Callable[[Run], None] = lambda run: None

    def check(self, folder: Path) -> None:
        run = Run(self.project, folder).fit()
        assert_federated(run)
        expected = federated_averaging(
            self.project.make_module(), run.rounds, self.train, self.sizes, buffers=self.buffers
        )
        found, start = run.weights(), weights(self.project.make_module())
        assert any(not torch.equal(found[name], start[name]) for name in found), "nothing was trained"
        for name, value in weights(expected).items():
            assert (found[name] - value).abs().max().item() <= self.tolerance, name
        if self.buffers != "none":
            torch.testing.assert_close(dict(run.module.named_buffers()), dict(expected.named_buffers()))
        self.also(run)


REFUSALS = (ValueError, TypeError, RuntimeError, ModuleNotFoundError, MisconfigurationException)


@dataclass(frozen=True)
class Refused:
    """Ends with an error that has both texts, before a training batch.

    Attributes:
        project: what is run.
        says: what of the error names the setting and the value.
        remedy: what of the error says what to do instead.
        in_training: only training can show it: it ends the run before the first round is over, with the model of its start.
        moved: parameters that the federation does not hold, and so does not put back then.
        call: what is done with the run; where Lightning would start processes first, `Run.ask`.
        missing: a package or an accelerator without which Lightning itself refuses; with it the row is skipped.
    """

    column = "refused with a remedy"
    project: Project
    says: str
    remedy: str
    in_training: bool = False
    moved: tuple[str, ...] = ()
    call: Callable[[Run], Any] = Run.fit
    missing: str = ""

    def check(self, folder: Path) -> None:
        if self.missing and (
            find_spec(self.missing) or (self.missing == "cuda" and torch.cuda.is_available())
        ):
            pytest.skip(f"{self.missing} is here, so Lightning does not refuse")
        run = Run(self.project, folder)
        before = run.weights()
        with pytest.raises(REFUSALS) as refusal:
            self.call(run)
        assert self.says in str(refusal.value)
        assert self.remedy in str(refusal.value)
        assert (run.steps > 0) is self.in_training
        assert run.loop.rounds_done == 0
        for name, value in run.weights().items():
            assert name in self.moved or torch.equal(value, before[name].to(value.dtype)), name


@dataclass(frozen=True)
class Works:
    """Asserts the meaning.

    Attributes:
        assertions: for a folder of the row's own.
    """

    column = "works, with the effect in its row"
    assertions: Callable[[Path], None]

    def check(self, folder: Path) -> None:
        self.assertions(folder)


Proof = Equals | Refused | Works
COLUMNS = [kind.column for kind in (Equals, Refused, Works)]


@dataclass(frozen=True)
class Row:
    """One subject in one column.

    Attributes:
        kind: of subject, a section of the page.
        subject: as its users write it, in Markdown without backticks.
        proof: what shows it.
        means: what a user has to know; may be empty where the column says all.
        covers: names of the subject in Lightning's or torch's own lists.
    """

    kind: str
    subject: str
    proof: Proof
    means: str = ""
    covers: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if isinstance(self.proof, Works) and not self.means:
            raise ValueError(f"{self.subject} works: the row must say what it means")


def row(kind: str, subject: str, proof: Proof, means: str = "", covers: str | None = None) -> Row:
    """A row that covers the names in its subject, with blanks between them, unless others are given.

    What works means what the docstring of its assertions says, unless ``means`` is given.
    """
    if isinstance(proof, Works):
        means = means or inspect.getdoc(proof.assertions) or ""
    return Row(kind, subject, proof, means, tuple((subject if covers is None else covers).split()))


class kind:
    """Makes rows of a kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, subject: str, proof: Proof, means: str = "", covers: str | None = None) -> Row:
        """With any proof."""
        return row(self.name, subject, proof, means, covers)

    def equals(
        self, subject: str, *proof: Any, means: str = "", covers: str | None = None, **how: Any
    ) -> Row:
        """With `Equals` of the other arguments."""
        return self(subject, Equals(*proof, **how), means, covers)

    def refused(
        self, subject: str, *proof: Any, means: str = "", covers: str | None = None, **how: Any
    ) -> Row:
        """With `Refused` of the other arguments."""
        return self(subject, Refused(*proof, **how), means, covers)


def assert_federated(run: Run) -> None:
    """Each round has its clients, each visit its batches, and every example of a batch is the client's own."""
    wanted = run.project.loop.get("clients_per_round", CLIENTS_PER_ROUND)
    assert len(run.rounds) == run.project.rounds
    owners = {}
    for client, rows in rows_of_clients().items():
        owners.update({tuple(features.tolist()): client for features in examples().tensors[0][rows]})
    for visits in run.rounds:
        assert len({client for client, _ in visits}) == len(visits) == wanted
        for client, batches in visits:
            assert len(batches) >= (run.project.loop.get("local_steps", LOCAL_STEPS) or 1)
            for batch in batches:
                if isinstance(batch.content, list) and batch.content[0].is_floating_point():  # of the 24 rows
                    features = batch.content[0].float()
                    assert {owners.get(tuple(one.tolist())) for one in features} == {client}
