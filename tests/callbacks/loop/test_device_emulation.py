import numpy as np
import pytest
import torch
from fleets import make_fleet, rounds_of
from plain_lightning import assert_equal, federate, module, weights


def test_devices_that_can_do_everything_change_nothing(tmp_path):
    plain, _ = federate()
    rows, emulated, loop, _ = rounds_of(fleet=make_fleet(tmp_path, fast={}))
    assert_equal(weights(plain), weights(emulated))
    assert [row["reason"] for row in rows] == [""] * 9
    assert loop.virtual_seconds == rows[-1]["round_end_seconds"] > 0


def test_a_row_says_what_the_visit_took_on_the_device(tmp_path):
    rows, model, _, _ = rounds_of(fleet=make_fleet(tmp_path, fast={"utilisation": 0.5}))
    numel = sum(p.numel() for p in model.parameters())
    for row in rows:
        own = row["examples"]
        # Two steps of at most 4; the last batch of a pass is its rest.
        seen = 2 * own if own <= 4 else min(own, 8)
        # Forward and gradients of weights: 4 -> 8 and 8 -> 1; of inputs: the last layer's alone.
        assert row["flops"] == 2 * seen * (2 * 4 * 8 + 2 * 8 + 8)
        assert row["download_seconds"] == row["bytes_down"] * 8 / 100e6
        assert row["compute_seconds"] == row["flops"] / 5e12
        assert row["upload_seconds"] == row["bytes_up"] * 8 / 50e6
        seconds = row["download_seconds"] + row["compute_seconds"] + row["upload_seconds"]
        assert row["joules"] == pytest.approx(10 * seconds)
        assert (row["base_bytes"], row["adapter_bytes"], row["gradient_bytes"]) == (0, 4 * numel, 4 * numel)
        assert row["moment_bytes"] == 8 * numel  # AdamW
        parts = ("base", "adapter", "gradient", "moment", "activation")
        assert row["peak_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
        assert row["activation_bytes"] > 0
    spent = [sum(r[f"{p}_seconds"] for p in ("download", "compute", "upload")) for r in rows]
    ends = [row["round_end_seconds"] for row in rows]
    assert ends[::3] == pytest.approx(np.cumsum([max(spent[i : i + 3]) for i in (0, 3, 6)]))


def everything(dataset):
    return {"only": np.arange(120)}


def test_one_byte_decides_who_takes_part(tmp_path):
    def peak_and_reasons(folder, budget_bytes):
        fleet = make_fleet(tmp_path / folder, small={"memory_gib": budget_bytes / 2**30})
        rows, _, _, _ = rounds_of(1, fleet=fleet, clients=everything, clients_per_round=1)
        (row,) = rows
        assert row["budget_bytes"] == budget_bytes
        return row["peak_bytes"], row["reason"], row["micro_batch"]

    smallest, reason, micro_batch = peak_and_reasons("tiny", 1)
    assert (reason, micro_batch) == ("out_of_memory", 1)
    assert peak_and_reasons("less", smallest - 1) == (smallest, "out_of_memory", 1)
    assert peak_and_reasons("enough", smallest) == (smallest, "", 1)
    largest, reason, micro_batch = peak_and_reasons("large", 2**30)
    assert (reason, micro_batch) == ("", 4)
    assert peak_and_reasons("nearly", largest - 1)[2] == 2


def test_micro_batches_give_the_same_model_up_to_rounding(tmp_path):
    whole, large, _, _ = rounds_of(fleet=make_fleet(tmp_path, large={}), model=module(dropout=0.0))
    too_little = min(row["peak_bytes"] for row in whole) - 1
    small = {"memory_gib": too_little / 2**30}
    rows, cut, _, _ = rounds_of(fleet=make_fleet(tmp_path, small=small), model=module(dropout=0.0))
    assert {row["micro_batch"] for row in whole} <= {3, 4}
    assert {row["micro_batch"] for row in rows} == {2}
    for name, value in weights(cut).items():
        torch.testing.assert_close(value, weights(large)[name], rtol=1e-4, atol=1e-5)
