"""Each client's own model on the client's own test examples: what training alone has given it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import lightning as L
import numpy as np
import torch
from torchmetrics import Metric

from fedlight.callbacks.loop.data_hooks import ready
from fedlight.federation.module_buffers import put, put_back, snapshot
from fedlight.federation.state import State, write
from fedlight.support.torch_parts import eval_mode


@runtime_checkable
class OwnStates(Protocol):
    """What is needed of the federated loop."""

    def own_state(self, client_id: str) -> State | None:
        """The parameters with which a client would go on alone; None where they are the global ones."""


@runtime_checkable
class OwnTestExamples(Protocol):
    """What is needed of the datamodule.

    Attributes:
        test_set: the test examples, ready after ``setup("test")``.
        test_client_indices: client id -> its examples in ``test_set``.
        eval_batch_size: examples per batch.
    """

    test_set: Any
    test_client_indices: Mapping[str, np.ndarray] | None
    eval_batch_size: int

    def setup(self, stage: str) -> None:
        """Makes the test set."""

    def collate(self, examples: list[Any]) -> Any:
        """Examples -> a batch."""


def outputs_of_own_models(
    trainer: L.Trainer, module: L.LightningModule, loop: OwnStates, data: OwnTestExamples
) -> Iterator[tuple[str, list[Any]]]:
    """What ``test_step`` returns for each client's examples, with the client's own parameters in the module.

    In evaluation mode and without gradients. Nothing is logged, and when a client is done the parameters are again what
    they were, bit for bit.

    Yields:
        The client's id and one output per batch.
    """
    assert data.test_client_indices is not None
    for client_id, indices in data.test_client_indices.items():
        batches = [
            indices[i : i + data.eval_batch_size] for i in range(0, len(indices), data.eval_batch_size)
        ]
        with parameters_of(module, loop.own_state(client_id) or {}), eval_mode(module), unlogged(module):
            outputs = []
            for batch_idx, own in enumerate(batches):
                batch = ready(module, data.collate([data.test_set[int(index)] for index in own]))
                with torch.no_grad(), trainer.precision_plugin.test_step_context():
                    outputs.append(module.test_step(batch, batch_idx))
        yield client_id, outputs


@contextmanager
def parameters_of(module: torch.nn.Module, state: State) -> Iterator[None]:
    """Has ``state``, parameters and buffers by name, in the module while its body runs.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> before = layer.bias.item()
        >>> with parameters_of(layer, {"bias": torch.tensor([4.0])}):
        ...     layer.bias.item()
        4.0
        >>> layer.bias.item() == before
        True
    """
    parameters = {name: p for name, p in module.named_parameters() if name in state}
    before = {name: p.detach().clone() for name, p in parameters.items()}  # as they are: fp32 could lose bits
    buffers = {name: value for name, value in state.items() if name not in parameters}
    buffers_before = snapshot(module) if buffers else {}
    write({name: state[name] for name in parameters}, parameters)
    put(module, buffers)
    try:
        yield
    finally:
        write(before, parameters)
        if buffers:
            put_back(module, buffers_before)


@contextmanager
def unlogged(module: L.LightningModule) -> Iterator[None]:
    """Lets steps run outside of Lightning's loops, where ``self.log`` is refused; their metrics end as empty as before."""
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.log
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
