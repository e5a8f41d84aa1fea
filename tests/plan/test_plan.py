import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from fleets import device_file
from safetensors.torch import save
from tiny_world import fedlight, refused, table, tiny_selector

from fedlight import SelectorModule, Visit
from fedlight.conf import path
from fedlight.datamodules.federated.rounds import RoundPlan
from fedlight.devices.device import known_devices
from fedlight.devices.forecast import Remedy
from fedlight.modules.language.adapters import Lora, trained_parameters
from fedlight.plan import known_shapes, make_plan
from fedlight.plan.plan import advice

FIGURES = "tflops: 1\ndownload_mbps: 80\nupload_mbps: 16\nwatts: 5\nmemory_share: 1\nutilisation: 1\n"
BORING = "lightning.pytorch.demos.boring_classes.Boring"
NO_DATA = "--data.source=nowhere.jsonl"


@pytest.fixture
def fleet(tmp_path):
    """Writes profiles of devices that differ in memory and bits; gives the argument that names them."""

    def fleet(**devices):
        files = {}
        for name, (gib, bits) in devices.items():
            file = tmp_path / f"{name}.yaml"
            file.write_text(f"{FIGURES}memory_gib: {gib:.12f}\nweight_bits: {bits}\n")
            files[str(file)] = 1.0
        settings = {"class_path": "fedlight.devices.fleet.Fleet", "init_args": {"devices": files}}
        return f"--federated.fleet={json.dumps(settings)}"

    return fleet


def planned(*arguments, shape=None, examples=None):
    plan = make_plan(arguments, shape, examples)
    return plan, {found.device.name: found for found in plan.forecasts}


def cells(outcome, number):
    """So many cells of each row that was printed."""
    return [[cell.strip() for cell in line.split("│")[1 : number + 1]] for line in outcome.out.splitlines()]


def test_all_that_it_writes(tmp_path):
    file = tmp_path / "plan.json"
    fleet = "--federated.fleet=devices/fleets/phones.yaml"
    outcome = fedlight("plan", "--config=selector.yaml", fleet, NO_DATA, "--json", str(file))
    assert outcome.code == 0, outcome.err
    assert "SelectorModule on toy: 0.43 M weights frozen, 0.0563 M trained by AdamW" in outcome.out
    assert "a visit is 5 batches of 32 texts of 128 tokens" in outcome.out
    assert max(len(line) for line in outcome.out.splitlines()) < 180
    assert ["iphone_xr", "10%", "yes", "4", "32", "no"] in cells(outcome, 6)
    written = json.loads(file.read_text())
    assert written["settings"]["batches"] == 5
    assert [device["device"] for device in written["devices"]][:2] == ["galaxy_s24_ultra", "pixel_8_pro"]
    for device in written["devices"]:
        parts = ("base", "adapter", "gradient", "moment", "activation")
        in_all = sum(device[f"{part}_bytes"] for part in parts)
        assert in_all == device["peak_bytes"] <= device["budget_bytes"]
        assert (device["reason"], device["remedies"]) == ("", [])


@pytest.fixture(scope="module")
def module():
    module = SelectorModule(model="toy", lora=Lora(rank=8))
    module.configure_model()
    return module


@pytest.fixture(scope="module")
def sent(module):
    """What clients send of it."""
    return {name: weight.detach() for name, weight in trained_parameters(module).items()}


def test_bytes_are_those_of_the_adapter_that_a_run_sends(module, sent):
    plan, found = planned("--config=selector.yaml", NO_DATA)
    assert {one.job.bytes_down for one in plan.forecasts} == {len(save(sent))}
    assert {one.job.bytes_up for one in plan.forecasts} == {len(save(sent))}
    assert plan.settings["trained_parameters"] == sum(weight.numel() for weight in sent.values())
    frozen = sum(weight.numel() for weight in module.parameters() if not weight.requires_grad)
    assert plan.settings["frozen_parameters"] == frozen
    assert sorted(found) == known_devices()  # without a fleet, all that there are


def test_several_visits_of_a_client_are_planned_together(sent):
    body = len(save({name: value for name, value in sent.items() if "lora_B" not in name}))
    few = ["--config=selector.yaml", NO_DATA, "--model.lora.rank=8"]
    plain, _ = planned(*few)
    fedrep = ["--federated.algorithm=FedRep", "--federated.algorithm.private=[lora_B]"]
    rep, _ = planned(*few, *fedrep, "--federated.algorithm.head_epochs=2")
    assert rep.settings["batches"] == 3 * plain.settings["batches"]
    job = rep.forecasts[0].job
    assert (job.bytes_down, job.bytes_up) == (plain.forecasts[0].job.bytes_down, body)
    ditto, _ = planned(*few, "--federated.algorithm=Ditto")
    assert ditto.settings["batches"] == 2 * plain.settings["batches"]
    assert ditto.forecasts[0].job.bytes_up == plain.forecasts[0].job.bytes_up
    assert ditto.forecasts[0].job.flops == 2 * plain.forecasts[0].job.flops


def test_what_a_client_receives_in_later_visits_is_said():
    """FedKSeed's w_0 goes down once, and then the sums alone: 4096 numbers of 4 bytes."""
    few = ["--config=selector.yaml", NO_DATA]
    plain, _ = planned(*few)
    assert plain.settings["later_bytes_down"] == plain.forecasts[0].job.bytes_down
    assert advice(plain) == []
    plan, _ = planned(*few, "--federated.algorithm=FedKSeed", "--federated.forward=ZerothOrder")
    later = len(save({"kseed.sums": torch.zeros(4096)}))
    assert plan.settings["later_bytes_down"] == later < plan.forecasts[0].job.bytes_down
    (line,) = advice(plan)
    assert line.endswith("are of a client's first visit; in later ones it gets 0.0165 MB")


def test_ranks_of_no_device_are_said_to_be_left_out():
    few = ["--config=selector.yaml", NO_DATA, *HETLORA]
    plan, _ = planned(*few, "--federated.algorithm.ranks={pixel_8_pro: 2, pixel_8pro: 4, c001: 4}")
    (line,) = advice(plan)
    assert line.startswith("federated.algorithm.ranks: c001, pixel_8pro: no such device, so they are taken")
    assert advice(planned(*few, "--federated.algorithm.ranks={pixel_8_pro: 2}")[0]) == []


HETLORA = ("--model.lora.rank=8", "--federated.algorithm=HetLoRA")


def at_rank(rank):
    """The plan of clients that all have a module of that rank."""
    _, found = planned("--config=selector.yaml", NO_DATA, f"--model.lora.rank={rank}")
    return {name: (one.fit, one.job.flops, one.job.bytes_up) for name, one in found.items()}


@pytest.mark.slow
def test_ranks_by_device_cost_what_modules_of_these_ranks_cost():
    ranks = "--federated.algorithm.ranks={pixel_8_pro: 2, iphone_xr: 4}"
    _, found = planned("--config=selector.yaml", NO_DATA, *HETLORA, ranks)
    assert {name: one.lora_rank for name, one in found.items()} == {
        name: {"pixel_8_pro": 2, "iphone_xr": 4}.get(name, 8) for name in known_devices()
    }
    for name, rank in (("pixel_8_pro", 2), ("iphone_xr", 4), ("galaxy_a54", 8)):
        one = found[name]
        assert (one.fit, one.job.flops, one.job.bytes_up) == at_rank(rank)[name]


@pytest.mark.slow
def test_the_largest_rank_that_fits_is_planned_for_each_device(fleet, tmp_path):
    """What one example at a time takes with a rank decides, to the byte."""
    few = ["--config=selector.yaml", NO_DATA, *HETLORA]
    _, roomy = planned(*few, "--federated.algorithm.ranks=[8]", fleet(tiny=(1e-9, 16)))
    _, narrow = planned(*few, "--federated.algorithm.ranks=[2]", fleet(tiny=(1e-9, 16)))
    most, least = (one["tiny"].fit.footprint.peak_bytes for one in (roomy, narrow))
    assert least < most
    budgets = {"enough": most, "less": most - 1, "least": least, "tiny": least - 1}
    devices = fleet(**{name: ((size + 0.5) / 2**30, 16) for name, size in budgets.items()})
    file = tmp_path / "plan.json"
    outcome = fedlight("plan", *few, "--federated.algorithm.ranks=[2, 8]", devices, "--json", str(file))
    assert outcome.code == 0, outcome.err
    devices = json.loads(file.read_text())["devices"]
    rows = {row["device"]: (row["lora_rank"], row["reason"]) for row in devices}
    assert rows == {"enough": (8, ""), "less": (2, ""), "least": (2, ""), "tiny": (2, "out_of_memory")}
    assert "LoRA rank" in outcome.out
    assert ["enough", "25%", "yes", "16", "8"] in cells(outcome, 5)


@pytest.mark.slow
def test_backpropagation_at_a_small_rank_comes_before_forward_passes_at_a_large(fleet, tiny_model, tmp_path):
    few = [*tiny_selector(tiny_model, tmp_path / "plan"), *HETLORA]

    def forecast(budget, *more):
        _, found = planned(*few, fleet(phone=((budget + 0.5) / 2**30, 16)), *more)
        return found["phone"]

    def largest_visit(budget, *more):
        folder = tmp_path / f"{budget}{len(more)}"
        phone = fleet(phone=((budget + 0.5) / 2**30, 16))
        own = ("--federated.clients_per_round=6", f"--trainer.default_root_dir={folder}")
        assert fedlight("fit", *few, phone, "--trainer.max_epochs=1", *own, *more).code == 0
        rows = [row for row in table(folder / "visits.csv") if row["peak_bytes"]]
        return max(rows, key=lambda row: (int(row["peak_bytes"]), row["client"]))

    auto = *AUTO, "--federated.algorithm.ranks=[2, 8]"
    for train, rank in (("backprop", 2), ("forward", 8)):
        alone = *WAYS[train], f"--federated.algorithm.ranks=[{rank}]"
        found = forecast(forecast(1, *alone).fit.footprint.peak_bytes, *auto)
        assert (found.lora_rank, found.fit.forward) == (rank, train == "forward")
    one = "--data.batch_size=1", "--data.format.twins_together=false"  # which has no smaller parts
    least = int(largest_visit(2**34, *alone, *one)["peak_bytes"])
    row = largest_visit(least, *auto, *one)
    assert (int(row["peak_bytes"]), row["lora_rank"], row["train"]) == (least, "8", "forward")


WAYS = {"backprop": [], "forward": ["--federated.forward=ZerothOrder"]}
AUTO = [*WAYS["forward"], "--federated.forward.only_where_needed=true"]
BY_RANK = {
    "": [],
    "1": [*HETLORA, "--federated.algorithm.ranks={phone: 1}"],
    "4": ["--model.lora.rank=8", "--federated.algorithm=FlexLoRA", "--federated.algorithm.ranks=[2, 4]"],
}
"""LoRA rank of all clients in a run's rows -> arguments; "" without ranks."""


@pytest.mark.slow
@pytest.mark.parametrize("train", ["backprop", "forward"])
def test_an_a_that_is_never_sent_is_in_memory_in_plan_and_run(train, fleet, tiny_model, tmp_path):
    """FFA-LoRA: A's weights rest there; by backpropagation its gradient is there too, and moments are B's alone."""
    more = ["--federated.algorithm=FFALoRA", *WAYS[train]]
    arguments = [*tiny_selector(tiny_model, tmp_path / "run"), *more, fleet(phone=(1, 16))]
    _, found = planned(*arguments)
    assert fedlight("fit", *arguments, "--trainer.max_epochs=1").code == 0
    of_fedavg, fedavg = tiny_selector(tiny_model, tmp_path / "run"), fleet(phone=(1, 16))
    whole = planned(*of_fedavg, fedavg)[1]["phone"].fit.footprint
    plan = asdict(found["phone"].fit.footprint)
    assert whole.gradient_bytes == whole.adapter_bytes == whole.moment_bytes // 2
    a = plan["base_bytes"] - whole.base_bytes
    b = whole.adapter_bytes - a
    assert a > 0
    assert b > 0
    backward = train == "backprop"
    expected = {"adapter_bytes": b if backward else 2 * b}
    expected |= {"gradient_bytes": a + b if backward else 0, "moment_bytes": 2 * b if backward else 0}
    assert {name: plan[name] for name in expected} == expected
    for row in table(tmp_path / "run/visits.csv"):
        assert {name: int(row[name]) for name in expected} == expected
        assert int(row["base_bytes"]) == plan["base_bytes"]
        resting = int(row["peak_bytes"]) - int(row["activation_bytes"])
        assert resting == sum(plan.values()) - plan["activation_bytes"]


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("rank", BY_RANK)
def test_a_run_keeps_to_its_plan(rank, fleet, tiny_model, tmp_path):
    """What rests in memory and what goes over the wire is the same; shorter texts take less than the longest."""
    more = [*BY_RANK[rank], fleet(phone=(1, 16)), "--trainer.max_epochs=1"]
    arguments = [*tiny_selector(tiny_model, tmp_path / "run"), *more]
    _, found = planned(*arguments)
    assert fedlight("fit", *arguments).code == 0
    plan, job = found["phone"], found["phone"].job
    rows = table(tmp_path / "run/visits.csv")
    assert len(rows) == 2
    for row in rows:
        parts = asdict(plan.fit.footprint)
        activations = parts.pop("activation_bytes")
        assert {name: int(row[name]) for name in parts} == parts
        assert 0 < int(row["activation_bytes"]) <= activations
        assert 0 < int(row["flops"]) <= job.flops
        assert (int(row["bytes_down"]), int(row["bytes_up"])) == (job.bytes_down, job.bytes_up)
        assert (int(row["steps"]), int(row["weight_bits"]), row["reason"]) == (2, 16, "")
        assert row.get("lora_rank", "") == rank
        assert plan.lora_rank == (int(rank) if rank else None)


def test_a_wire_and_several_adapters():
    """Of three selectors one goes over the wire; top-k sends a tenth of its movement, with a position each."""
    one, _ = planned("--config=selector.yaml", NO_DATA)
    top = {"class_path": "TopK", "init_args": {"share": 0.1}}
    wire = f"--federated.channel={json.dumps({'class_path': 'Wire', 'init_args': {'up': top}})}"
    three, _ = planned("--config=fedbiscuit.yaml", NO_DATA, wire)
    whole, tenth = one.forecasts[0].job, three.forecasts[0].job
    assert tenth.bytes_down == pytest.approx(whole.bytes_down, rel=0.02)  # names are longer
    assert tenth.bytes_up == pytest.approx(whole.bytes_up / 5, rel=0.1)
    assert three.forecasts[0].fit.footprint.adapter_bytes == one.forecasts[0].fit.footprint.adapter_bytes


PUBLISHED = {  # shape -> number of weights
    **{"gemma_2b": 2_506_172_416, "gemma_3_270m": 268_098_176, "llama2_7b": 6_738_415_616},
    **{"llama3_8b": 8_030_261_248, "qwen2_0.5b": 494_032_768},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_have_the_published_number_of_weights(name):
    # nothing else is needed
    assert [file.name for file in path(f"shapes/{name}").iterdir()] == ["config.json"]
    module = SelectorModule(model=str(path(f"shapes/{name}"))).skeleton()
    assert sum(one.numel() for one in module.parameters() if not one.requires_grad) == PUBLISHED[name]


def test_what_would_let_a_small_phone_join(fleet):
    """A phone with the memory for one text of 64 tokens is told so, and one with a byte less to take half of it."""
    arguments = ["--config=sft.yaml", NO_DATA, "--data.batch_size=2"]
    arguments += ["--federated=FederatedLoop", "--federated.local_steps=2"]
    nothing = fleet(phone=(1e-6, 4))
    _, found = planned(*arguments, nothing, "--data.max_tokens=64")
    needs = found["phone"].fit.footprint.peak_bytes
    assert (found["phone"].fit.micro_batch, found["phone"].fit.checkpointing) == (1, True)
    for budget, tokens in ((needs, 64), (needs - 1, 32)):
        phone = fleet(phone=((budget + 0.5) / 2**30, 4), large=(16, 16))
        plan, found = planned(*arguments, phone, "--data.max_tokens=128")
        assert (found["phone"].reason, found["large"].reason) == ("out_of_memory", "")
        assert plan.remedies == {"phone": [Remedy(weight_bits=4, tokens=tokens)]}
        assert plan.shares == {"phone": 0.5, "large": 0.5}


def test_a_phone_too_small_for_backpropagation_trains_by_forward_passes_alone(fleet):
    arguments = ["--config=sft.yaml", NO_DATA, "--data.batch_size=2", "--data.max_tokens=64"]
    arguments += ["--federated=FederatedLoop", "--federated.local_steps=2"]
    nothing = fleet(phone=(1e-6, 4))
    by_way = (planned(*arguments, nothing, *more)[1]["phone"] for more in ([], AUTO))
    back, needs = (found.fit.footprint.peak_bytes for found in by_way)
    assert needs < back
    phones = fleet(phone=((needs + 0.5) / 2**30, 4), large=(16, 16))
    _, found = planned(*arguments, phones, *AUTO)
    assert [(one.reason, one.fit.forward) for one in found.values()] == [("", True), ("", False)]
    assert found["phone"].job.flops > 0
    rows = cells(fedlight("plan", *arguments, phones, *AUTO), 4)
    assert ["phone", "50%", "yes", "forward"] in rows
    assert ["large", "50%", "yes", "backprop"] in rows
    outcome = fedlight("plan", *arguments, phones)
    assert "it could join with forward passes alone (--federated.forward ZerothOrder" in outcome.out
    assert ["phone", "50%", "out of memory", "4"] in cells(outcome, 4)


def test_advice_is_printed(fleet):
    phones, short = fleet(tiny=(0.3, 16), middle=(0.7, 16)), ["--data.max_tokens=32", "--data.batch_size=1"]
    outcome = fedlight("plan", "--config=selector.yaml", "--shape=qwen2_0.5b", NO_DATA, phones, *short)
    assert outcome.code == 0, outcome.err
    assert "tiny: needs 0.99" in outcome.out
    assert "0.3; nothing helps but a smaller model, since at 4 bits the base takes 0.441" in outcome.out
    assert "it could join with a base of 8 bits (weight_bits: 8)" in outcome.out
    rows = [line for line in outcome.out.splitlines() if line.startswith("│ tiny ")]
    assert "out of memory" in rows[0]
    assert [cell.strip() for cell in rows[1].split("│")[2:-1]] == ["-"] * 7


def test_the_deadline(fleet):
    arguments = ["--config=selector.yaml", NO_DATA, fleet(phone=(8, 16)), "--data.max_tokens=16"]
    _, found = planned(*arguments)
    seconds = found["phone"].job.seconds
    _, in_time = planned(*arguments, f"--federated.fleet.deadline_seconds={seconds * 1.01}")
    assert in_time["phone"].reason == ""
    outcome = fedlight("plan", *arguments, f"--federated.fleet.deadline_seconds={seconds * 0.99}")
    assert "phone: a visit takes" in outcome.out
    assert "yes, but late" in outcome.out


@pytest.mark.parametrize("config", ["sft", "dpo", "reward", "feddpo", "local_only"])
def test_other_methods(config, fleet):
    arguments = [f"--config={config}.yaml", NO_DATA, "--federated=FederatedLoop", fleet(phone=(8, 8))]
    plan, found = planned(*arguments, "--federated.local_steps=3")
    assert plan.settings["batches"] == 3
    assert found["phone"].reason == ""
    assert found["phone"].job.flops > 0
    up = found["phone"].job.bytes_up
    assert up == 0 if config == "local_only" else up > 0


@pytest.mark.parametrize(
    ("config", "more", "examples", "expected"),
    [
        ("sft", [], 20, (3, 8)),  # the last four are counted as a full batch
        ("sft", [], 24, (3, 8)),
        ("sft", ["--trainer.accumulate_grad_batches=2"], 20, (2, 8)),  # the third would be half a step
        ("sft", [], 5, (1, 5)),
        ("sft", ["--trainer.accumulate_grad_batches=2"], 5, (2, 5)),
        ("selector", ["--trainer.accumulate_grad_batches=4"], None, (20, 8)),  # five steps
        ("selector", [], 20, (5, 8)),
    ],
)
def test_batches_of_a_visit(fleet, config, more, examples, expected):
    arguments = [f"--config={config}.yaml", NO_DATA, "--data.batch_size=8", "--data.max_tokens=16"]
    plan, _ = planned(*arguments, *more, examples=examples)
    assert (plan.settings["batches"], plan.settings["batch_size"]) == expected
    if config == "sft" and not more:
        run = RoundPlan({"client": np.arange(examples)}, batch_size=8, seed=0)
        sizes = [len(batch) for batch in run.batches(Visit("client", run.num_batches("client")), 0)]
        assert sizes == [expected[1]] * expected[0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--config=sft.yaml"], "federated.local_steps is not set, so a visit is one pass"),
        (["--config=sft.yaml", "--examples=0"], "--examples 0: a client has one or more"),
        (["--config=selector.yaml", "--data.max_tokens=0"], "data.max_tokens=0 must be in [1, inf)"),
        (["--config=selector.yaml", "--shape=gpt5"], "--shape gpt5: there is no such architecture; there"),
        (["--config=selector.yaml", "--federated.fleet.devices={iphone_99: 1}"], "no device 'iphone_99'"),
        (["--config=selector.yaml", f"--data={BORING}DataModule"], "data.max_tokens is not set"),
        (["--config=selector.yaml", "--model.lrr=1"], "has no setting 'lrr'"),
        (["--config=selector.yaml", f"--model={BORING}Model", "--data.tokenizer=toy"], "from LanguageModule"),
    ],
)
def test_what_cannot_be_planned(arguments, complaint):
    assert complaint in refused(fedlight("plan", *arguments))


def test_help():
    outcome = fedlight("plan", "--help")
    assert outcome.code == 0
    assert ", ".join(known_shapes()) in " ".join(outcome.out.split())
    assert known_shapes() == [*PUBLISHED]


def test_a_phone_that_keeps_most_of_its_memory_is_told_so(tmp_path):
    own = device_file(tmp_path, "shy", memory_gib=2, memory_share=0.2, weight_bits=4)
    own = f'--federated.fleet={{"class_path": "Fleet", "init_args": {{"devices": {{"{own}": 1}}}}}}'
    short = ["--data.max_tokens=16", "--data.batch_size=1", NO_DATA]
    outcome = fedlight("plan", "--config=selector.yaml", "--shape=qwen2_0.5b", own, *short)
    assert "and has 0.4; nothing helps" in outcome.out
    share = float(outcome.out.partition("(memory_share: ")[2].partition(")")[0])
    needs = float(outcome.out.partition("shy: needs ")[2].partition(" ")[0])
    assert share - 0.01 <= needs / 2 <= share
