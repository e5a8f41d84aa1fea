"""Every test runs offline, on one thread and without a GPU, so that results do not depend on the machine.

What is marked ``gpu`` runs where it is asked for, with ``pytest -m gpu``, and there is a GPU.
"""

import functools
import gc
import importlib.metadata
import os
import re
import signal
import sys
from importlib.util import find_spec

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, therefore before everything else
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # about how Lightning calls it

import pytest
import torch

torch.set_num_threads(1)
collect_ignore = ["support/simulated_gpu.py"]  # a plugin, imported before torch or not at all
collect_ignore += [] if find_spec("flwr") else ["support/superlink_stub.py"]
# Every Trainer asks for callbacks of installed packages, and reads the folders of all for it: once is enough.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)


@pytest.fixture
def capsys(_lightning_is_imported, capsys):
    return capsys


@pytest.fixture
def capfd(_lightning_is_imported, capfd):
    return capfd


@pytest.fixture(scope="session")
def _lightning_is_imported() -> None:
    """Imports Lightning, whose log handler keeps the stderr of its import: that of ``capsys`` is closed with its test."""
    import lightning.pytorch  # noqa: F401


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> str:
    """Folder of an untrained language model that knows the words of the embedded world."""
    from tiny_world import make_model

    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def on_disk(monkeypatch) -> None:
    """Keeps no client's memory in RAM."""
    from fedlight.federation import client_state

    monkeypatch.setattr(client_state, "LIMIT_MIB", 0)


@pytest.fixture
def any_text(monkeypatch) -> None:
    """Lets tests that are not about words train a tiny model on text that its tokenizer does not know."""
    from fedlight.datamodules.text import tokens

    monkeypatch.setattr(tokens, "SOME_UNKNOWN", 1.0)
    monkeypatch.setattr(tokens, "MOST_UNKNOWN", 1.0)


def pytest_configure(config: pytest.Config) -> None:
    """Hides GPUs before torch looks for them: a command with ``accelerator: auto`` would train there, in bf16."""
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # ignored under nohup, and so in the processes that tests start
    if not re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is marked ``gpu`` where there is no CUDA device, or it is hidden; several processes begin with the slow."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A file is one process's: of two, one would wait in the end for the other's last minute-long file.
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device and pytest -m gpu"))


def pytest_collection_finish() -> None:
    """Looks for garbage more rarely, and not among the millions of objects that imports and collection have left."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def counted_anew():
    """Forget the costs of steps that other tests have counted, some of them with changed constants."""
    if cost := sys.modules.get("fedlight.devices.cost"):
        cost.COUNTED.clear()
