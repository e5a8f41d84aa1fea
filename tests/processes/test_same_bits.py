"""The same bits on any number of processes: weights, memories, tables, counts of steps, and where a resumed run ends."""

import pytest
import torch
from ranks import run_ranks
from shared_runs import KINDS, files_of, folder_of, train, write_devices

pytestmark = [
    pytest.mark.slow,  # teams of processes
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
ON_DISK = ("scaffold", "one_over_the_limit", "all_over_the_limit", "emptied_on_disk")
SIZES = {1: KINDS, 2: KINDS, 4: ("one_pass", *ON_DISK, "fewfedpit", "schedules", "fleet", "one_client")}
PRODUCTS = (
    *("adapters", "private_adapters", "ffa_lora", "ro_lora", "product_average"),
    *("hetlora", "flexlora", "forward_ranks"),
)
"""Runs that average LoRA adapters of which the server knows both factors."""
RESUMED = (*ON_DISK, "schedules", "average_buffers", "fleet", "buffered", "in_turn")
CHANGES = ((2, 1), (1, 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All kinds of runs in one, two and four processes: number of processes -> results of each rank by kind."""
    root = tmp_path_factory.mktemp("runs")

    def all_kinds(size):
        return lambda rank: {name: train(name, root, size, size) for name in SIZES[size]}

    write_devices(root)

    return root, {size: run_ranks(size, all_kinds(size), root / f"logs{size}", 240) for size in SIZES}


def sizes_of(name):
    """Numbers of processes, above 1, in which a kind of run is tried."""
    return [size for size, names in SIZES.items() if size > 1 and name in names]


@pytest.mark.parametrize("name", KINDS)
def test_every_process_ends_with_what_one_process_ends_with(runs, name):
    _, results = runs
    alone = results[1][0][name]
    for size in sizes_of(name):
        for rank in range(size):
            assert results[size][rank][name] == alone, (size, rank)


@pytest.mark.parametrize("name", KINDS)
def test_tables_are_those_of_one_process(runs, name):
    root, _ = runs
    alone = files_of(folder_of(root, name, 1))
    assert [file.rpartition("/")[2] for file in alone] == ["metrics.csv", "visits.csv"]
    [metrics] = [rows for file, rows in alone.items() if file.endswith("metrics.csv")]
    assert any(row.get("fed/product_error") for row in metrics) == (name in PRODUCTS)
    assert alone["visits.csv"]
    for size in sizes_of(name):
        assert files_of(folder_of(root, name, size)) == alone


def memories_in(file):
    """Return the state of the clients' memories in a checkpoint."""
    callbacks = torch.load(file, weights_only=True)["callbacks"]
    [state] = [state["memory"] for key, state in callbacks.items() if key.startswith("FederatedLoop")]
    return state


@pytest.mark.parametrize("name", ON_DISK)
def test_memories_on_disk_are_written_by_all_and_kept_by_the_first(runs, name):
    """Each process writes those of its own clients; in the end there are the files that checkpoints name, and no notes."""
    root, _ = runs
    for size in sizes_of(name):
        folder = folder_of(root, name, size)
        states = [memories_in(file) for file in (folder / "checkpoints").glob("*.ckpt")]
        files = [file.name for file in (folder / "clients").iterdir()]
        assert {*files} == {version for state in states for version in state.get("versions", {}).values()}
        writers = {name.split("-")[2] for name in files}
        assert len(writers) == size


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Runs that were stopped after two rounds and went on in another number of processes: results by kind and sizes."""
    root = tmp_path_factory.mktemp("resumed")

    def some(label, size, **how):
        return lambda rank: {name: train(name, root, label, size, **how) for name in RESUMED}

    write_devices(root)
    found = {}
    for first, then in CHANGES:
        label = f"{first}_{then}"
        run_ranks(first, some(label, first, rounds=2), root / f"logs{label}" / "first")
        found[first, then] = run_ranks(then, some(label, then, resumes=True), root / f"logs{label}" / "then")
    return root, found


@pytest.mark.parametrize("sizes", CHANGES, ids=str)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_in_another_number_of_processes(runs, resumed, name, sizes):
    root, results = resumed
    alone = runs[1][1][0][name]
    for found in results[sizes]:
        assert found[name] == alone
    folder = folder_of(root, name, f"{sizes[0]}_{sizes[1]}")
    assert files_of(folder)["visits.csv"] == files_of(folder_of(runs[0], name, 1))["visits.csv"]
