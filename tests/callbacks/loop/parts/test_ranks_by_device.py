import pytest
from fleets import make_fleet
from plain_lightning import assert_equal
from ranked import Ranked, run, trained_of
from rich.console import Console
from safetensors.torch import save
from stacked import CLIENTS, Points

from fedlight.callbacks.progress.run_summary import device_table
from fedlight.devices import BatchShape, CostMeter
from fedlight.devices.memory import resting_footprint
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA


def costs(rank, batch=4):
    """Return the memory at rest and with a batch, and the operations of it, in a module of that rank."""
    data, module = Points(), Ranked("AdamW", lr=0.01, rank=rank)
    data.setup()
    meter = CostMeter(module, lambda examples: data.collate(range(examples)))
    return resting_footprint(module, 16, 8), meter.cost(BatchShape(batch))


def rounds(algorithm, fleet, ranks, rounds=1, **loop):
    return run(
        algorithm, Points(), rounds=rounds, ranks=ranks, module=Ranked("AdamW", lr=0.01), fleet=fleet, **loop
    )


@pytest.mark.parametrize("algorithm", [HetLoRA, FlexLoRA])
def test_ranks_by_device_are_counted_as_a_module_of_that_rank(algorithm, tmp_path, caplog):
    """A client's own rank comes before its device's."""
    fleet = make_fleet(tmp_path, small={}, large={})
    devices = {client: device.name for client, device in fleet.assign(CLIENTS).items()}
    single = next(client for client, name in devices.items() if name == "small")
    _, _, rows, _, _ = rounds(algorithm(), fleet, {"small": 2, single: 1})
    assert not any("was to send" in message for message in caplog.messages)
    for row in rows:
        rank = 1 if row["client"] == single else {"small": 2, "large": 4}[devices[row["client"]]]
        assert (row["device"], row["lora_rank"]) == (devices[row["client"]], rank)
        at_rest, step = costs(rank)
        parts = ("base", "adapter", "gradient", "moment")
        assert [row[f"{part}_bytes"] for part in parts] == [
            getattr(at_rest, f"{part}_bytes") for part in parts
        ]
        sent = len(save(trained_of(Ranked(rank=rank))))
        assert (row["bytes_down"], row["bytes_up"]) == (sent, sent)
        if row["client"] != "c":  # which has three examples in a batch
            assert row["flops"] == 3 * step.flops
            assert row["activation_bytes"] == step.activation_bytes


def peak(rank):
    """Return the least memory of a visit of that rank: one example at a time."""
    at_rest, one = costs(rank, batch=1)
    return at_rest.peak_bytes + one.activation_bytes


@pytest.mark.parametrize(("missing", "expected"), [(0, 4), (1, 2)])
def test_one_byte_decides_which_rank_is_the_largest_that_fits(missing, expected, tmp_path):
    fleet = make_fleet(tmp_path, small={"memory_gib": f"{(peak(4) - missing + 0.5) / 2**30:.15f}"})
    _, _, rows, _, _ = rounds(HetLoRA(), fleet, [1, 2, 4])
    assert {row["budget_bytes"] for row in rows} == {peak(4) - missing}
    assert {(row["lora_rank"], row["reason"]) for row in rows} == {(expected, "")}


def test_a_device_that_fits_no_rank_drops_out_at_the_smallest(tmp_path):
    """The others have the largest; a row of a dropout has the same columns."""
    small = {"memory_gib": f"{(peak(1) - 0.5) / 2**30:.15f}"}
    fleet = make_fleet(tmp_path, small=small, large={})
    _, _, rows, _, loop = rounds(FlexLoRA(), fleet, [1, 3], rounds=2)
    kinds = {(row["device"], row["lora_rank"], row["reason"]) for row in rows}
    assert kinds == {("small", 1, "out_of_memory"), ("large", 3, "")}
    assert len({tuple(row) for row in rows}) == 1
    assert [client.lora_rank for client in loop.clients.values()].count(3) == 2
    console = Console(width=200, record=True, quiet=False, file=None)
    with console.capture() as printed:
        console.print(device_table([{name: str(value) for name, value in row.items()} for row in rows]))
    lines = [line.split() for line in printed.get().splitlines()]
    assert ["small", "1"] in [line[:2] for line in lines]
    assert ["all", "1,", "3"] in [line[:3] for line in lines]


def test_a_fleet_of_ideal_devices_changes_nothing(tmp_path):
    by_hand = run(FlexLoRA(), Points(), ranks={"a": 2}, module=Ranked("AdamW", lr=0.01))
    emulated = rounds(FlexLoRA(), make_fleet(tmp_path, fast={}), {"a": 2}, rounds=3)
    assert_equal(by_hand[1], emulated[1])


def test_a_name_of_no_device_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ranks\.phone: there is no such client or device; .* devices fast"):
        rounds(HetLoRA(), make_fleet(tmp_path, fast={}), {"phone": 2})


def test_a_client_that_has_pruned_itself_is_counted_at_its_new_rank(tmp_path, caplog):
    """Bytes are those that were planned, also in the round in which it prunes."""
    algorithm = HetLoRA(gamma=0.5, lam=0.5)
    _, _, rows, _, _ = run(algorithm, Points(), rounds=2, ranks=None, fleet=make_fleet(tmp_path, fast={}))
    assert [row["lora_rank"] for row in rows[:4]] == [4] * 4
    assert {row["lora_rank"] for row in rows[4:]} == {2}
    for row in rows:
        own = trained_of(Ranked(rank=row["lora_rank"]))
        assert row["bytes_up"] == len(save(own))
        assert row["adapter_bytes"] == sum(value.nbytes for value in own.values())
    assert not any("was to send" in message for message in caplog.messages)
