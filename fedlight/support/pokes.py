"""Places where fedlight reaches past the public interfaces of Lightning, torch and jsonargparse, with the reason.

Read in Lightning 2.6.6, torch 2.13.0 and jsonargparse 4.53; each function names the test that fails where another version
differs. No other file does so (``tests/support/test_pokes.py``).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def checkpoint_connector(trainer: Any) -> Any:
    """Return the object that makes and loads a trainer's checkpoints; its methods may be replaced on it.

    Callbacks have no hook for a checkpoint of the weights alone, and others may come after theirs
    (``tests/whole/test_resume.py``, ``tests/whole/test_damaged_files.py``).
    """
    return trainer._checkpoint_connector


def loading_checkpoint(trainer: Any) -> Any:
    """Return the checkpoint that a run has begun to load, else None (``tests/whole/test_interruptions.py``)."""
    return trainer._checkpoint_connector._loaded_checkpoint


def training_source(trainer: Any) -> Any:
    """Return the source of the training loader: the trainer's loader comes from its ``dataloader()``.

    A trainer without a datamodule has it alone (``tests/whole/test_by_client.py``).
    """
    return trainer.fit_loop._data_source


def set_training_source(trainer: Any, source: Any) -> None:
    """Replace the source of the training loader (``tests/whole/test_by_client.py``)."""
    trainer.fit_loop._data_source = source


def forget_training_loader(trainer: Any) -> None:
    """Make the trainer ask for a new training loader (``tests/callbacks/loop/test_broken_off_rounds.py``).

    Where the number of steps was asked for, it has made one before the first round was planned.
    """
    trainer.fit_loop._combined_loader = None


def attach_datamodule(trainer: Any, datamodule: Any) -> None:
    """Attach another datamodule than the one given to ``fit`` (``tests/whole/test_by_client.py``)."""
    connector = trainer._data_connector
    connector.attach_datamodule(connector._datahook_selector.model, datamodule)


def may_stop(trainer: Any) -> bool:
    """Return whether ``trainer.should_stop`` counts, which it does not before ``min_epochs``.

    The trainer has no public property for it (``tests/conformance/rows_trainer.py``).
    """
    return bool(trainer.fit_loop._can_stop_early)


def logged_names(trainer: Any) -> list[str]:
    """Return the names under which the hooks of a running epoch log (``tests/conformance/rows_processes.py``)."""
    return [*(trainer._results or {})]


def saves_inside_epochs(checkpoints: Any) -> str:
    """Return the setting that makes a ``ModelCheckpoint`` save inside an epoch; empty if it does not.

    The callback does not say it (``tests/processes/test_refusals.py``).
    """
    names = "every_n_train_steps", "train_time_interval"
    return next((name for name in names if getattr(checkpoints, f"_{name}")), "")


def stops_at_a_batch(timer: Any) -> bool:
    """Return whether Lightning's ``Timer`` stops the run at a batch (``tests/processes/test_refusals.py``)."""
    return bool(timer._interval == "step")


def count_steps_of_others(trainer: Any, number: int) -> None:
    """Add optimizer steps of other processes to the loggers' count (``tests/processes/test_same_bits.py``)."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += number


def share_threads(processes: int) -> None:
    """Give this process its part of the host's threads, where no setting does (``tests/processes/test_starting.py``)."""
    from lightning.fabric.utilities.distributed import _set_num_threads_if_needed

    _set_num_threads_if_needed(processes)


def process_launcher(environment: Any, processes: int, nodes: int) -> Any:
    """Return Lightning's starter of further processes of the same script (``tests/processes/test_starting.py``)."""
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

    return _SubprocessScriptLauncher(environment, processes, nodes)


def batch_before_transfer(module: Any, batch: Any) -> Any:
    """Return a batch after the hooks that Lightning calls before it is moved (``tests/modules/test_functional.py``)."""
    return module._on_before_batch_transfer(batch)


def batch_on_device(module: Any, batch: Any, device: Any = None) -> Any:
    """Return a batch on a device, by default its module's, as all hooks move it (``tests/modules/test_functional.py``)."""
    return module._apply_batch_transfer_handler(batch, device)


def backward_pass() -> int:
    """Return the number of the backward pass that runs in this thread, -1 outside of one (``tests/stacking``)."""
    import torch  # here, as below: recipes are read without it

    return torch._C._current_graph_task_id()


def add_differences(
    factor: float, sums: "Sequence[Tensor]", first: "Sequence[Tensor]", second: "Sequence[Tensor]"
) -> None:
    """Add ``factor * (first - second)`` to ``sums``, in few kernels (``tests/federation/algorithms/test_fedprox.py``)."""
    import torch

    torch._foreach_add_([*sums], torch._foreach_sub([*first], [*second]), alpha=factor)


PARSER_FUNCTIONS = {
    "path by name": "resolve_class_path_by_name",
    "dropped arguments": "discard_init_args_on_class_path_change",
    "order of types": "union_subtype_sort_key",
}
"""Functions of jsonargparse that fedlight wraps, since the parser has no setting for their decisions: which class a name
alone means, which arguments stay where another class is named, and in which order the types of a union are tried."""


def parser_function(decision: str) -> Any:
    """Return the function that takes a decision of `PARSER_FUNCTIONS` (``tests/project/test_public_api.py``)."""
    from jsonargparse import _typehints  # here: recipes are read without it

    return getattr(_typehints, PARSER_FUNCTIONS[decision])


def set_parser_function(decision: str, function: Callable[..., Any]) -> None:
    """Replace that function in all parsers of this process (``tests/lightning_cli/test_whole_numbers.py``)."""
    from jsonargparse import _typehints

    setattr(_typehints, PARSER_FUNCTIONS[decision], function)


def never_sync_metrics() -> None:
    """Let metrics of torchmetrics compute their own process's value, though torch has a default group.

    Metrics are made anywhere, also before the group is there (``tests/processes/test_split_clients.py``).
    """
    from torchmetrics import Metric

    Metric.sync = lambda *_, **__: None  # type: ignore[method-assign]
