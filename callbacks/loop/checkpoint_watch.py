"""Around the files of checkpoints: they are looked at before they are loaded, and followed until they are written.

Lightning has no hook at either place: a callback's ``setup`` does not know which file will be loaded, and ``state_dict`` is
asked before a file is written.
"""

from pathlib import Path
from typing import Any

from fedlight.federation.client_state import ClientMemories
from fedlight.support.checkpoint_files import damage_named


def check_what_is_loaded(trainer: Any) -> None:
    """Has the trainer refuse a damaged checkpoint by name: torch does not compare the checksums in the file.

    That reads the file once more: a third of a second for each GB that the system has in RAM.
    """
    connector = trainer._checkpoint_connector

    def resume_start(checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        if not checkpoint_path:
            type(connector).resume_start(connector, checkpoint_path, weights_only)
            return
        with damage_named(checkpoint_path):
            type(connector).resume_start(connector, checkpoint_path, weights_only)

    connector.resume_start = resume_start


def follow_what_is_saved(trainer: Any, memory: ClientMemories, state_key: str) -> None:
    """Has the clients' memories know when a checkpoint is on the disk: until then the one before it needs its files.

    Args:
        trainer: that saves.
        memory: of the clients.
        state_key: of the federated loop, under which a checkpoint has the memories.
    """
    strategy = trainer.strategy

    def save_checkpoint(
        checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        state = checkpoint.get("callbacks", {}).get(state_key, {}).get("memory", {})
        with memory.being_saved(state, filepath):
            type(strategy).save_checkpoint(strategy, checkpoint, filepath, storage_options)

    strategy.save_checkpoint = save_checkpoint
