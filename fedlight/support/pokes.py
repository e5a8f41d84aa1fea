"""Places where fedlight reaches past the public interfaces of Lightning, torch and jsonargparse, with the reason.

Read in Lightning 2.6.6, torch 2.13.0 and jsonargparse 4.53; each function names the test that fails where another version
differs. No other file does so (``tests/support/test_pokes.py``).
"""

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def checkpoint_connector(trainer: Any) -> Any:
    """Return the object that makes and loads a trainer's checkpoints; its methods may be replaced on it.

    Callbacks have no hook for a checkpoint of the weights alone, and others may come after theirs
    (``tests/test_resume.py``, ``tests/test_damaged_files.py``).
    """
    return trainer._checkpoint_connector


def loading_checkpoint(trainer: Any) -> Any:
    """Return the checkpoint that a run has begun to load and not finished, else None (``tests/test_interruptions.py``)."""
    return trainer._checkpoint_connector._loaded_checkpoint


def training_source(trainer: Any) -> Any:
    """Return the source of the training loader: the trainer's loader comes from its ``dataloader()``.

    A trainer without a datamodule has it alone (``tests/test_by_client.py``).
    """
    return trainer.fit_loop._data_source


def set_training_source(trainer: Any, source: Any) -> None:
    """Replace the source of the training loader (``tests/test_by_client.py``)."""
    trainer.fit_loop._data_source = source


def forget_training_loader(trainer: Any) -> None:
    """Make the trainer ask for a new training loader (``tests/callbacks/test_broken_off_rounds.py``).

    Where the number of steps was asked for, it has made one before the first round was planned.
    """
    trainer.fit_loop._combined_loader = None


def attach_datamodule(trainer: Any, datamodule: Any) -> None:
    """Attach another datamodule than the one given to ``fit`` (``tests/test_by_client.py``)."""
    connector = trainer._data_connector
    connector.attach_datamodule(connector._datahook_selector.model, datamodule)


def may_stop(trainer: Any) -> bool:
    """Return whether ``trainer.should_stop`` counts, which it does not before ``min_epochs``.

    The trainer says it in no other way (``tests/conformance/rows_trainer.py``).
    """
    return bool(trainer.fit_loop._can_stop_early)


def logged_names(trainer: Any) -> list[str]:
    """Return the names under which the hooks of a running epoch log (``tests/conformance/rows_processes.py``)."""
    return [*(trainer._results or {})]


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, -1 outside of one (``tests/stacking``)."""
    import torch  # here, as below: recipes are read without it

    return torch._C._current_graph_task_id()


def add_differences(
    factor: float, sums: "Sequence[Tensor]", first: "Sequence[Tensor]", second: "Sequence[Tensor]"
) -> None:
    """Add ``factor * (first - second)`` to ``sums``, in place, in few kernels (``tests/federation/test_fedprox.py``)."""
    import torch

    torch._foreach_add_([*sums], torch._foreach_sub([*first], [*second]), alpha=factor)


def parser_types() -> ModuleType:
    """Return jsonargparse's module of values by type hint, two of whose functions fedlight wraps.

    The parser has no setting for what they decide (``tests/test_whole_numbers.py``).
    """
    from jsonargparse import _typehints  # here: recipes are read without it

    return _typehints
