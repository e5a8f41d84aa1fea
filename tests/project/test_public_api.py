"""The public names: an exact list, each found and explained, and nothing heavy loaded before it is asked for."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from dataclasses import is_dataclass

import pytest
from tiny_world import fedlight as run
from tiny_world import refused

import fedlight
from fedlight.further_names import FURTHER
from fedlight.lightning_cli.class_names import CLASS_FILES, class_of
from fedlight.lightning_cli.cli import find_by_name

FIRST_MET = ["__version__", "FederatedLoop", "ByClient", "FederatedWrapper", "FederatedDataModule"]
PUBLIC = {
    *FIRST_MET,
    # whose example is whose
    *("ClientParallelStrategy", "PartitionByField", "Partition", "iid", "dirichlet", "by_key"),
    # what is shown and written
    *("RoundProgress", "VisitLog", "AdapterExport"),
    # clients and server
    *("FedAvg", "FedProx", "Scaffold", "FedBiscuit", "FewFedPIT", "Ditto", "LocalOnly"),
    *("Limits", "Part", "FedAvgM", "FedAdam", "CoordinateMedian", "TrimmedMean", "PrivateMean"),
    # the wire and the devices
    *("Wire", "Quantize", "TopK", "ClipAndNoise", "Fleet"),
    # language models and their data
    *("SelectorModule", "FeatureSelectorModule", "SFTModule", "DPOModule", "RewardModule"),
    *("Lora", "Optimization", "Sampling"),
    *("PreferenceDataModule", "InstructionDataModule", "PromptDataModule"),
    # what clients train on besides their own
    *("AugmentedInstructionDataModule", "FedDCA", "FedDCAStar", "LESS", "HashedEncoder", "SentenceEncoder"),
    *("SyntheticInstructionDataModule", "SelfGeneration"),
    # evaluation
    *("WinRate", "TaskScores", "Judge"),
    # to write a part of one's own
    *("Algorithm", "ServerOptimizer", "Aggregation", "Codec"),
    *("Client", "Visit", "Visiting", "Work", "Update", "State", "derive_seed"),
}
HEAVY = {"torch", "lightning", "numpy", "transformers", "peft", "sklearn", "rich", "matplotlib", "jinja2"}


def test_the_list_is_this_one_and_begins_with_what_a_newcomer_meets():
    assert fedlight.__all__[: len(FIRST_MET)] == FIRST_MET
    assert set(fedlight.__all__) == PUBLIC
    assert len(fedlight.__all__) == len(PUBLIC)
    assert not PUBLIC & FURTHER.keys()


def test_each_name_is_found_and_explained():
    for name in sorted(PUBLIC - {"__version__"}):
        value = getattr(fedlight, name)
        assert inspect.getdoc(value), name
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__name__ == name
            assert value.__doc__, name  # of its own, not of the class that it derives from
            assert getattr(importlib.import_module(value.__module__), name) is value


def test_a_name_that_is_not_there_is_refused():
    with pytest.raises(AttributeError, match="module 'fedlight' has no attribute 'FedAvgg'"):
        _ = fedlight.FedAvgg
    with pytest.raises(ImportError, match="cannot import name 'FedAvgg'"):
        exec("from fedlight import FedAvgg")


def test_a_further_name_is_imported_from_its_room_and_refused_here():
    for name, file in FURTHER.items():
        room = f"fedlight.{file.rpartition('.')[0]}"
        value = getattr(importlib.import_module(room), name)
        assert value.__doc__, name
        assert value is class_of(name)
        line = re.escape(f"write `from {room} import {name}`, and in a config {room}.{name}")
        with pytest.raises(ImportError, match=line):
            exec(f"from fedlight import {name}")
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {line}"):
            getattr(fedlight, name)
        assert not hasattr(fedlight, name)


def test_type_checkers_see_the_same_names_in_the_same_files():
    tree = ast.parse(inspect.getsource(fedlight))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    checked = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    imports = [node for block in checked for node in block.body]
    seen = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    assert seen == {name: f"fedlight.{file}.{name}" for name, file in fedlight._FILES.items()}


def test_import_fedlight_loads_nothing_heavy_and_a_name_its_file_alone():
    code = "import sys, fedlight; before = set(sys.modules)\n"
    code += "assert {'FedAvg', 'FederatedLoop'} <= set(dir(fedlight)); fedlight.derive_seed\n"
    code += "print(*before); print(*(set(sys.modules) - before))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    at_first, with_a_name = (set(line.split()) for line in printed.splitlines())
    assert at_first & HEAVY == set()
    assert "fedlight.support.seeding" in with_a_name
    assert with_a_name & HEAVY == set()


def test_a_config_may_name_them_and_is_written_out_with_them():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--algorithm", type=fedlight.Algorithm)
    config = parser.parse_args(["--algorithm=fedlight.FedProx", "--algorithm.mu=0.5"])
    assert parser.instantiate_classes(config).algorithm.mu == 0.5
    assert "class_path: fedlight.FedProx" in parser.dump(config)


def test_a_config_gives_each_name_alone():
    from jsonargparse import ArgumentParser

    find_by_name()
    kinds = {name: kind for name in CLASS_FILES if (kind := class_of(name)) is not None}
    made = [name for name, kind in kinds.items() if not (is_dataclass(kind) or inspect.isabstract(kind))]
    made.remove("Aggregation")  # a protocol
    assert len(made) > 100
    for name in made:
        kind = kinds[name]
        base = next(each for each in kind.__mro__[::-1] if each.__module__.startswith("fedlight."))
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(base, "part", skip=set(inspect.signature(kind).parameters))
        assert class_of(parser.parse_args([f"--part={name}"]).part.class_path) is kind


@pytest.mark.parametrize("name", ["FedKSeed", "GroupLog", "ProductError"])
def test_a_config_is_told_the_name_to_write(name):
    given = {
        "FedKSeed": "--federated.algorithm=fedlight.FedKSeed",
        "GroupLog": "--trainer.callbacks=[fedlight.GroupLog]",
        "ProductError": "--federated.parts=[fedlight.ProductError]",
    }
    line = refused(run("fit", "--config=selector.yaml", given[name]))
    assert f"there is no 'fedlight.{name}': write {name}" in line
    written = given[name].replace("fedlight.", "")
    assert run("fit", "--config=selector.yaml", written, "--print_config").code == 0


def test_each_room_exports_what_it_lists():
    rooms = [found.name for found in pkgutil.walk_packages(fedlight.__path__, "fedlight.") if found.ispkg]
    listed = {name: getattr(importlib.import_module(name), "_FILES", {}) for name in rooms}
    files = [(name, room, f"{room}.{file}") for room in rooms for name, file in listed[room].items()]
    for name, file in CLASS_FILES.items():
        files.append((name, f"fedlight.{file.rpartition('.')[0]}", f"fedlight.{file}"))
    for name, room, file in files:
        assert getattr(importlib.import_module(file), name) is getattr(importlib.import_module(room), name)
