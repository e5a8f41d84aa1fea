"""Differential privacy of single examples in the clients' training: DP-SGD.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, https://arxiv.org/abs/1607.00133, algorithm 1. A step on B
examples with the gradients g_i uses

    (sum of g_i * min(1, C / |g_i|) + z * C * n) / B

with C the clipping norm, z the noise multiplier and n standard normal numbers. It replaces the gradient of the batch's mean
loss. What optimizer, algorithm, wire and server compute from it costs no further privacy, so an example is protected from
everybody who sees models, the server included. Training losses and metrics have no noise: a node of a deployment keeps them,
and the emulator writes them to its logs.

Accounting, which is not the paper's: it samples each example with a fixed probability in each step, and the loop's visits
cut shuffled passes into batches of a fixed size. So no amplification by sampling is claimed. An example is in one batch of a
pass at most, and a pass is one Gaussian mechanism for it, whatever the other batches are; a client's passes are composed
over all its visits (`fedlight.federation.privacy.gaussian_epsilon`). As there, neighbours have as many examples, and one of
a client's examples is another one, so the sum moves by up to 2 C. No example may decide on the batches of others: they are
drawn by lot, and not by the lengths of texts.

One example after the other is computed, `fedlight.callbacks.loop.fitted_step`: any module will do, and one gradient of an
example is in memory at a time, whatever the batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedlight.callbacks.loop.fitted_step import FittedStep, Gradients
from fedlight.callbacks.loop.groups.at_once import AtOnce
from fedlight.callbacks.loop.parts.buffers import BufferPolicy
from fedlight.callbacks.loop.parts.part import Part
from fedlight.callbacks.loop.plan import batches_per_step
from fedlight.callbacks.loop.run import Run
from fedlight.callbacks.loop.visits.visit import OpenGroup, OpenVisit
from fedlight.federation.algorithms.lora.product_average import ProductAverage
from fedlight.federation.algorithms.lora.unlike_ranks import UnlikeRanks
from fedlight.federation.client import Visit
from fedlight.federation.privacy import Private
from fedlight.support.torch_parts import tensors


@runtime_checkable
class DrawsByLot(Protocol):
    """Data whose batches depend on no example, such as those of a `FederatedDataModule`."""

    def draw_by_lot(self) -> None:
        """Draw all batches by lot from now on; raise ValueError where they depend on examples."""

    def passes(self, visit: Visit) -> int:
        """Return the passes over its client's examples that a visit begins; each has an example in one batch at most."""


class DPSGD(Private, Part):
    """Part that protects each example of a client: ``FederatedLoop(parts=[DPSGD(clip_norm=1.0, noise_multiplier=1.0)])``.

    ``fed/epsilon_example`` is logged after each round, of the client with the most passes. In the emulator the noise comes
    from torch's global stream, which the loop seeds for each visit; on a node of a deployment from the operating system.

    An example is a row of the training batches, and the loss is that of a batch with this row alone. Nothing before the step
    may mix the rows of a batch, as mixup does, and a module with a loss that compares them has ``compares_rows = True``.

    Args:
        clip_norm: largest L2 norm of an example's gradient, all trained parameters together, above 0.
        noise_multiplier: standard deviation of the noise in the sum of the gradients over ``clip_norm``, at least 0.
        delta: chance that the logged epsilon does not hold, above 0 and below one over the examples of each client.
        epsilon: largest epsilon of a run, instead of ``noise_multiplier``: the noise follows for the planned rounds, and the
            run ends before a round that would exceed it.

    Raises:
        ValueError: a value is out of its range, or not one of ``noise_multiplier`` and ``epsilon`` is given; before the
            first round, for a run in which a batch's gradient is not the mean of its examples' gradients, or examples
            decide on batches; at the first step, for a batch whose rows are not the examples drawn for it, and for an
            optimizer that evaluates the loss several times in one.
    """

    bounded = "an example's gradient"
    _trained: frozenset[int] = frozenset()
    _has_gradient = False
    _step: FittedStep | None = None
    _data: Any = None
    _drawn: Sequence[int] = ()  # examples of the batches to come

    def check(self, run: Run) -> None:
        """Raise ValueError for settings under which examples have no separate gradients, or reach others in another way."""
        name, trainer, rounds = type(run.lightning_module).__name__, run.trainer, range(run.num_rounds)
        refused = {
            "is given twice in parts: leave one out": sum(isinstance(part, DPSGD) for part in run.parts) > 1,
            "needs gradients: leave federated.forward out": run.train != "backprop",
            "trains one client at a time: set clients_at_once=1": any(
                isinstance(p, AtOnce) for p in run.parts
            ),
            f"cannot clip the gradients of {name}, whose automatic_optimization is off: have training_step return the "
            "loss": not run.lightning_module.automatic_optimization,
            "clips gradients without a loss scale: set trainer.precision to bf16-mixed or 32-true": (
                trainer.precision == "16-mixed"
            ),
            "adds noise to each batch of a step: set trainer.accumulate_grad_batches=1 and a larger batch, which takes no "
            "more memory": any(batches_per_step(trainer, round_idx) > 1 for round_idx in rounds),
            f"adds noise to whole adapters, and clients of {type(run.algorithm).__name__} train parts of them: take another "
            "algorithm, such as FedAvg": (
                isinstance(run.algorithm, UnlikeRanks)
                or (isinstance(run.algorithm, ProductAverage) and run.algorithm.threshold < 1)
            ),
            "does not protect losses on clients' own rows: set group_by=val": (
                getattr(run.algorithm, "group_by", "val") == "own"
            ),
            f"computes one example at a time, and the loss of {name} compares the rows of a batch: take PrivateMean or "
            "ClipAndNoise": getattr(run.lightning_module, "compares_rows", False),
            f"does not protect the statistics of {type(run.buffers).__name__}: leave it out, and have these layers in "
            "eval(), or take layers such as GroupNorm": type(run.buffers) is not BufferPolicy,
            f"counts passes over examples, which {type(run.data).__name__} does not: derive it from FederatedDataModule, or "
            "add ByClient to the trainer's callbacks": not isinstance(run.data, DrawsByLot),
        }
        for reason, is_so in refused.items():
            if is_so:
                raise ValueError(f"DPSGD {reason}")

    def meet(self, run: Run) -> None:
        assert isinstance(run.data, DrawsByLot)  # see `check`
        run.data.draw_by_lot()
        # Here, because a node alone knows how many examples its clients have where they weigh the same.
        most = max(client.num_examples for client in run.clients.values())
        self.check_delta(most, "examples of a client", "one of them")

    def attach(self, run: Run) -> None:
        """Raise ValueError for a module that normalizes over batches."""
        for name, layer in run.module.named_modules():
            if isinstance(layer, _BatchNorm) and layer.training:
                raise ValueError(
                    f"DPSGD computes one example at a time, and {name} normalizes over a batch: have it in eval(), or take "
                    "GroupNorm"
                )

    def passes(self, run: Run, round_idx: int) -> Counter[str]:
        """Return client -> passes over its examples in a round, whether or not it gets through."""
        counts: Counter[str] = Counter()
        for visit in run.planned.visits_of(round_idx, run.planned.asked(round_idx)):
            counts[visit.client_id] += run.data.passes(visit)  # type: ignore[attr-defined]
        return counts

    def enter(self, run: Run, group: OpenGroup, batch: Any) -> None:
        """Have the steps of a visit clip and add noise, from its first batch on."""
        [open_visit] = group.visits
        visit = open_visit.visiting.visit
        if visit.split != "train":
            raise ValueError(
                f"DPSGD protects training rows, and client {visit.client_id!r} trains on {visit.split!r} data, made from "
                "them without protection: take an algorithm without such data, such as FedAvg"
            )
        gradients = {name: torch.zeros_like(p) for name, p in open_visit.parameters.items()}
        # The algorithm takes out those of parameters that it keeps fixed, which need no noise.
        run.algorithm.adjust_gradients(open_visit.visiting, open_visit.parameters, gradients)
        self._trained = frozenset(id(open_visit.parameters[name]) for name in gradients)
        self._has_gradient = False
        self._data = run.data
        self._drawn = [shape.examples for shape in self._data.batch_shapes(visit, run.round_idx)]
        self._step = FittedStep(run.lightning_module, self)
        self._step.enter(self._together, checkpointing=False)

    @property
    def _together(self) -> int:
        together: int = getattr(self._data, "examples_together", 1)
        return together

    def after_batch(self, run: Run, group: OpenGroup) -> None:
        self._has_gradient = False
        self._drawn = self._drawn[1:]

    def leave(self, run: Run, group: OpenGroup, visit: OpenVisit) -> None:
        self.abort(run)

    def abort(self, run: Run) -> None:
        if self._step is not None:
            self._step.leave()

    # Interface for fedlight.callbacks.loop.fitted_step.FittedStep: gradients are None for weights that no loss has reached

    def check_rows(self, batch: Any, rows: int) -> None:
        """Raise ValueError for a batch whose rows are not the examples that were drawn for it."""
        drawn = self._drawn[0]
        if rows != drawn:
            raise ValueError(
                f"a batch has {rows} rows of {drawn} examples: DPSGD needs one row for each; have collate keep one row per "
                "example"
            )
        if drawn <= self._together or drawn not in _list_lengths(batch):
            return
        # Columns stay as many for fewer examples. No bit of the run may change for the question.
        with isolate_rng():
            fewer = self._data.example_batch(self._together)
        if drawn not in _list_lengths(fewer):
            raise ValueError(
                f"a batch is a list of {drawn} examples: DPSGD needs one row for each; have collate stack them to one tensor"
            )

    def clipped(self, gradients: Gradients, weights: Sequence[Tensor], share: float) -> Gradients:
        """Return an example's gradients with a norm of at most ``share * clip_norm``; None for weights that stay fixed.

        The given ones are ``share`` times those of the example's loss.
        """
        kept = [g if id(w) in self._trained else None for g, w in zip(gradients, weights, strict=True)]
        norm = torch.nn.utils.get_total_norm([gradient for gradient in kept if gradient is not None])
        # The quotient of a norm of 0 is infinite; NaN ends as a divergence.
        scale = (share * self.clip_norm / norm).clamp(max=1.0)
        return [None if gradient is None else gradient * scale for gradient in kept]

    def noised(self, gradients: Gradients, weights: Sequence[Tensor], share: float) -> Gradients:
        """Return the sum of a batch's `clipped` gradients with noise, also for weights that no example has reached."""
        if self._has_gradient:
            raise ValueError(
                "DPSGD counts one gradient of a batch, and the optimizer asks for several in one step, as LBFGS does: take "
                "another one, such as AdamW"
            )
        self._has_gradient = True
        changed: Gradients = []
        for gradient, weight in zip(gradients, weights, strict=True):
            noise = None
            if id(weight) in self._trained:
                noise = self._normal(weight.shape, weight.dtype).to(weight.device)
                noise *= share * self.clip_norm * self.noise
            changed.append(noise if noise is None or gradient is None else noise.add_(gradient))
        return changed


def _list_lengths(batch: Any) -> Iterator[int]:
    """Yield the lengths of all lists and tuples in a batch that hold tensors."""
    if isinstance(batch, (list, tuple)) and any(True for _ in tensors(batch)):
        yield len(batch)
    if isinstance(batch, (Mapping, list, tuple)):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _list_lengths(part)
