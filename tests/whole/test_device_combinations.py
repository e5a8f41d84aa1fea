import json
import math

import lightning as L
import pytest
import torch
from fleets import device_file, make_fleet
from plain_lightning import assert_equal, trainer, weights
from recipe_runs import ran
from tastes import Adapters, Tastes
from tiny_world import VOTES, fedlight, refused, table, tiny_selector

from fedlight import DPOModule, FedAvg, FedBiscuit, FedProx, LocalOnly, Lora, Scaffold, SFTModule, Wire
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.preferences.datamodule import PreferenceDataModule
from fedlight.datamodules.rows.split import Split
from fedlight.devices.outcomes import took_part
from fedlight.federation import Identity
from fedlight.federation.codecs import Quantize, TopK
from fedlight.federation.privacy import ClipAndNoise, PrivateMean, sampled_epsilon
from fedlight.modules.language.optimizers import Optimization
from fedlight.modules.reward import RewardModule
from fedlight.modules.selector import SelectorModule

MODULES = {SelectorModule: "selector", SFTModule: "sft", DPOModule: "dpo", RewardModule: "dpo"}
pytestmark = pytest.mark.filterwarnings("ignore:.*`val_dataloader`")


def federate_language(kind, model, rounds=2, dropout=0.05, base="plain", **loop):
    """A module that was trained, its loop and the rows of the last round."""
    sgd = Optimization(name="SGD", args={})
    module = kind(model, lora=Lora(rank=2, dropout=dropout), lr=0.05, optimizer=sgd, base=base)
    data = PreferenceDataModule(
        VOTES, view=MODULES[kind], tokenizer=model, max_tokens=128, batch_size=4, split=Split(val_share=0)
    )
    made = FederatedLoop(**{"clients_per_round": 2, "local_steps": 2, **loop})
    trainer(rounds, [made], limit_val_batches=0).fit(module, datamodule=data)
    return module, made, data


def trained(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", MODULES)
def test_a_client_of_four_bits_computes_what_a_base_loaded_in_four_bits_does(kind, tiny_model, tmp_path):
    """The server's own base is in its place again afterwards, and its computation as before."""
    quantized, _, _ = federate_language(kind, tiny_model, base="nf4")
    plain, _, _ = federate_language(kind, tiny_model)
    fleet = make_fleet(tmp_path, small={"weight_bits": 4})
    emulated, loop, _ = federate_language(kind, tiny_model, fleet=fleet)
    assert_equal(trained(emulated), trained(quantized))
    assert any(not torch.equal(value, trained(plain)[name]) for name, value in trained(emulated).items())
    assert [row["weight_bits"] for row in loop.visit_records] == [4, 4]
    with torch.no_grad():
        ids = torch.arange(5, 17)[None]
        emulated.load_state_dict(plain.state_dict())
        found, expected = (module.eval().network(input_ids=ids).logits for module in (emulated, plain))
    assert torch.equal(found, expected)


def test_visits_are_ordered_so_that_bases_change_seldom_and_the_order_does_not_matter(tiny_model, tmp_path):
    fleet = make_fleet(tmp_path, a={"weight_bits": 4}, b={"weight_bits": 16}, c={"weight_bits": 8})
    _, loop, _ = federate_language(SelectorModule, tiny_model, 1, fleet=fleet, clients_per_round=6)
    bits = [row["weight_bits"] for row in loop.visit_records]
    assert bits == [16, 16, 8, 8, 4, 4]


def test_a_fleet_of_one_precision_can_have_it_loaded_for_real(tiny_model, tmp_path):
    fleet = make_fleet(tmp_path, small={"weight_bits": 4})
    loaded, _, _ = federate_language(SelectorModule, tiny_model, base="nf4")
    uniform, _, _ = federate_language(SelectorModule, tiny_model, base="nf4", fleet=fleet)
    assert_equal(trained(loaded), trained(uniform))
    large = make_fleet(tmp_path / "large", large={})
    with pytest.raises(ValueError, match="weight_bits=16 does not go with base='nf4'"):
        federate_language(SelectorModule, tiny_model, base="nf4", fleet=large)


def test_what_the_reference_of_dpo_says_on_a_small_base_is_not_remembered_for_others(tiny_model, tmp_path):
    """The server meets all pairs again that the clients have trained on."""
    fleet = make_fleet(tmp_path, small={"weight_bits": 4})
    module, _, data = federate_language(DPOModule, tiny_model, 1, fleet=fleet, clients_per_round=6)
    assert module.base_bits == 16
    fresh = DPOModule(tiny_model, lora=Lora(rank=2))
    fresh.configure_model()
    for batch in data.train_dataloader():
        torch.testing.assert_close(module.reference_log_probs(batch), fresh.reference_pass(batch))


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("kind", MODULES)
def test_micro_batches_and_checkpoints_train_the_same_model(kind, tiny_model, tmp_path):
    """Without dropout, which is drawn anew for each micro-batch."""
    large = make_fleet(tmp_path / "a", large={})
    whole, loop, _ = federate_language(kind, tiny_model, dropout=0.0, fleet=large)
    resting = {row["peak_bytes"] - row["activation_bytes"] for row in loop.visit_records}.pop()
    smallest = min(row["activation_bytes"] for row in loop.visit_records)
    for share, micro_batch, checkpointing in ((0.6, 2, 0), (0.2, 1, 1)):
        budget = (resting + share * smallest) / 2**30
        fleet = make_fleet(tmp_path / str(share), small={"memory_gib": f"{budget:.12f}"})
        fitted, loop, _ = federate_language(kind, tiny_model, dropout=0.0, fleet=fleet)
        ways = {(row["micro_batch"], row["checkpointing"]) for row in loop.visit_records}
        assert ways == {(micro_batch, checkpointing)}
        for name, value in trained(whole).items():
            torch.testing.assert_close(trained(fitted)[name], value, rtol=1e-3, atol=1e-5)


CHANNELS = {
    "fp32": Identity,
    "nf4": lambda: Wire(up=Quantize("nf4")),
    "top": lambda: Wire(up=[TopK(0.3), Quantize("int8")], down=Quantize("fp16")),
}


class Sent(L.Callback):
    """Bytes down and up, planned and in fact, by round and client; taken before the next round is planned."""

    def __init__(self, loop):
        self.loop, self.planned, self.sent = loop, {}, {}

    def on_train_epoch_end(self, trainer, pl_module):
        for row in self.loop.visit_records:
            if took_part(row["reason"]):
                self.sent[row["round"], row["client"]] = row["bytes_down"], row["bytes_up"]
        for outcome in self.loop._run.devices._outcomes:
            if not outcome.reason:
                sizes = outcome.bytes_down, outcome.bytes_up
                self.planned[self.loop.rounds_done - 1, outcome.client_id] = sizes


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("algorithm", [FedAvg, FedProx, Scaffold, LocalOnly])
def test_what_is_sent_is_what_was_planned(algorithm, channel, tmp_path, tiny_model):
    """In both rounds: who comes again may be sent less."""
    parts = {"fleet": make_fleet(tmp_path, fast={}), "channel": CHANNELS[channel]()}
    loop = FederatedLoop(algorithm(), clients_per_round=2, local_steps=1, **parts)
    sgd = Optimization(name="SGD", args={})
    module = SelectorModule(tiny_model, lora=Lora(rank=2), lr=0.05, optimizer=sgd)
    sizes = {"max_tokens": 128, "batch_size": 4, "split": Split(val_share=0)}
    source = "toy:votes?num_clients=2&votes_per_client=10"
    data = PreferenceDataModule(source, view="selector", tokenizer=tiny_model, **sizes)
    watch = Sent(loop)
    trainer(2, [watch, loop], limit_val_batches=0).fit(module, datamodule=data)
    assert len(watch.sent) == 4
    assert watch.sent == watch.planned


def test_selectors_by_group_on_devices(tmp_path):
    """Each client has one of three adapters with it; a round without anybody groups nobody anew and moves nothing."""
    fleet = make_fleet(tmp_path, over_selection=1.5, moody={"availability": 0.5})
    loop = FederatedLoop(FedBiscuit(1, 2), clients_per_round=4, local_steps=2, fleet=fleet)
    module, watch = Adapters(3), Sent(loop)
    before = weights(module)
    trainer(8, [watch, loop]).fit(module, Tastes())
    assert watch.sent == watch.planned
    assert all(not torch.equal(value, before[name]) for name, value in weights(module).items())
    row = next(row for row in loop.visit_records if not row["reason"])
    assert row["adapter_bytes"] == 4 * 5  # one of the three linear models


def epsilons(model, **loop):
    found = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            names = ("fed/epsilon", "fed/epsilon_local")
            found.append([float(trainer.callback_metrics.get(name, math.nan)) for name in names])

    made = FederatedLoop(clients_per_round=4, local_steps=1, **loop)
    trainer(2, [made, Watch()]).fit(model, Tastes())
    return found


def test_private_runs_say_their_epsilon_each_round():
    central = epsilons(Adapters(1), aggregation=PrivateMean(1.0, noise_multiplier=4.0))
    expected = [sampled_epsilon(4.0, 1e-5, [(4, 9)] * rounds) for rounds in (1, 2)]
    assert [row[0] for row in central] == pytest.approx(expected, rel=1e-5)
    assert all(math.isnan(row[1]) for row in central)
    local = epsilons(Adapters(1), channel=Wire(up=[ClipAndNoise(1.0, 4.0), Quantize("int8")]))
    assert all(math.isnan(row[0]) and row[1] > 1 for row in local)
    assert epsilons(Adapters(1))[0] == pytest.approx([math.nan, math.nan], nan_ok=True)


def test_a_fleet_on_the_command_line(tiny_model, tmp_path):
    """A fleet of fedlight, one of its values changed, a device of one's own in it; and the channel in YAML."""
    own = device_file(tmp_path, "toaster", memory_gib=1, weight_bits=8)
    wire = {"class_path": "Wire", "init_args": {"up": [{"class_path": "TopK", "init_args": {"share": 0.5}}]}}
    settings = (
        "--federated.fleet=devices/fleets/edge.yaml",
        f"--federated.channel={json.dumps(wire)}",
        f"--federated.fleet.devices={json.dumps({own: 1, 'macbook_air_m2': 1})}",
        "--federated.fleet.over_selection=2",
    )
    outcome = ran("fit", *tiny_selector(tiny_model, tmp_path / "run", *settings))
    rows = table(tmp_path / "run/visits.csv")
    assert {row["device"] for row in rows} == {"toaster", "macbook_air_m2"}
    assert "toaster" in outcome.out
    assert "took part" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fleet=devices/fleets/phonez.yaml"], "phonez.yaml"),
        (["fleet=Fleet", 'fleet.devices={"iphone_99": 1}'], "there is no device 'iphone_99'"),
        (["fleet=Fleet", "fleet.devices=phonez"], "there is no fleet 'phonez'"),
        (["fleet=Fleet", 'fleet.devices={"iphone_12": 1}', "fleet.seeds=1"], "has no setting 'seeds'"),
        (["deadline_seconds=3"], "did you mean 'fleet.deadline_seconds'?"),
        (["channel=Wire", 'channel.up={"class_path": "Quantize", "init_args": {"to": "int3"}}'], "int3"),
    ],
)
def test_misspelt_devices_and_wires_are_refused_in_one_line(arguments, message, tmp_path):
    """Before any model is loaded: there is none."""
    settings = [f"--federated.{argument}" for argument in arguments]
    outcome = fedlight("fit", *tiny_selector("none", tmp_path / "run", *settings))
    assert message in refused(outcome)
    assert not (tmp_path / "run").exists()
