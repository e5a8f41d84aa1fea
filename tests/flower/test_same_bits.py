"""Server and nodes in the place of the emulator: the same bits at the end, and the same bytes of every visit."""

from functools import partial

import pytest
import torch
from nodes_here import ALL_KINDS, Here, deploy, emulate, left_by, make_node, memories_of, two_nodes, visits_of
from plain_lightning import Regression
from shared_runs import Kind, digest
from tiny_world import VOTES

from fedlight import DPOModule, Limits, PreferenceDataModule
from fedlight.flower.loops import server_loop
from fedlight.flower.loops.node_loop import rates_of
from fedlight.flower.loops.server_loop import ServerLoop

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Lightning, about rounds of a few batches
    pytest.mark.filterwarnings("error:this fit goes on after round"),  # it is the server's that does
]

REFUSED = {
    "fedkseed": "algorithm=FedKSeed",
    "average_buffers": "parts=AveragedBuffers",
    "local_buffers": "parts=LocalBuffers",
    "early_stopping": "val/loss",
    "cut": "max_steps=5 would cut a round",
    "thawing": "net.0.bias and 1 others joined or left the optimizer",
    "plateau": "which ReduceLROnPlateau does not",
}
REFUSED |= dict.fromkeys(("hetlora", "flexlora", "forward_ranks"), r"algorithm.ranks=\{")
REFUSED |= dict.fromkeys(("schedules", "restarted_schedules"), "within a round")
EMULATED_DEVICES = ("fleet", "buffered")
MORE_OF_THE_SAME = ("backwards", "adapters", "one_client", "private_mean", "trimmed_mean")
FOR_HOSTILE_REPLIES = ("everybody", "everybody_coded")
FOR_SECURE_SUMS = ("all_fedprox", "all_uniform", "all_noised", "all_shared_noise", "four_share_noise")
FOR_NOISE = ("noised", "noised_examples", "budget", "in_turn", "private_wire", "private_adapters")
OTHERS = (*REFUSED, *EMULATED_DEVICES, *MORE_OF_THE_SAME, *FOR_HOSTILE_REPLIES, *FOR_SECURE_SUMS, *FOR_NOISE)
EQUAL = [name for name in ALL_KINDS if name not in OTHERS]
SLOW = ("written_fewfedpit", "written_fedmit", "written_local")
MARKED = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in EQUAL]
SEND_LESS = ("hetlora_pruning", "diverging")
UNIFORM = ("uniform", "uniform_fewfedpit", "hetlora_alike", "hetlora_pruning")
"""Kinds in which all clients count alike, so that the server does not learn how many examples they have."""


def in_new_processes(name, folder):
    """Return two nodes, made anew for each message, as Flower starts a process for each."""
    there = Here({})
    there.before = lambda: there.homes.update(two_nodes(name, folder))
    there.before()
    return there


@pytest.mark.parametrize("name", MARKED)
def test_a_deployment_ends_with_the_emulators_bits_and_bytes(tmp_path, name):
    emulated = emulate(name, tmp_path / "emulated")
    there = in_new_processes(name, tmp_path)
    deployed = deploy(name, tmp_path / "server", there)
    assert left_by(*deployed) == left_by(*emulated)
    rows, expected = visits_of(tmp_path / "server"), visits_of(tmp_path / "emulated")
    if name in UNIFORM:
        assert {row.pop("examples") for row in rows} == {"1"}
        [row.pop("examples") for row in expected]
    assert rows == expected
    assert not deployed[1].nodes.refused
    for one in there.messages:  # what the server expects of a node is what an honest one sends
        sent, due = sum(map(len, one.answer.payloads.values())), one.asked.due_bytes
        assert sent <= due if name in SEND_LESS else sent == due
    kept = {client: digest(memory) for client, memory in memories_of(tmp_path, deployed[1]).items()}
    assert kept == {client: digest(emulated[1].memory.load(client)) for client in emulated[1].clients}


class NoNumbers(Regression):
    """The loss and a metric of some visits are no numbers, and the gradients are."""

    def sum_training(self):
        self.odd = 0.0

    def training_step(self, batch, batch_idx):
        self.odd += float("nan") if batch[0][0, 0] > 0.8 else 1.0
        return super().training_step(batch, batch_idx) + self.odd

    def training_sums(self):
        return [{"odd": (self.odd, 1)}]


def test_a_loss_that_is_no_number_costs_no_work(tmp_path, monkeypatch):
    monkeypatch.setitem(ALL_KINDS, "no_numbers", lambda root: Kind(model=NoNumbers))
    emulated = emulate("no_numbers", tmp_path / "emulated")
    deployed = deploy("no_numbers", tmp_path / "server", Here(two_nodes("no_numbers", tmp_path)))
    assert left_by(*deployed) == left_by(*emulated)
    assert not deployed[1].nodes.refused
    losses = [[row["loss"] for row in visits_of(tmp_path / end)] for end in ("server", "emulated")]
    assert losses[0] == ["" if loss == "nan" else loss for loss in losses[1]]
    assert "" in losses[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_deployment_does_not_have_is_refused_before_a_node_trains(tmp_path, name):
    there = Here({})
    with pytest.raises(ValueError, match=REFUSED[name]) as error:
        there.homes |= two_nodes(name, tmp_path)
        deploy(name, tmp_path / "server", there)
    assert ": " in str(error.value)  # behind it the remedy
    assert not there.of("visit")


def test_a_reference_of_dpo_that_was_found_in_another_process_is_kept(tmp_path, monkeypatch):
    """Computed anew in another batch, it would differ in its last bits."""
    data = partial(PreferenceDataModule, VOTES, view="dpo", max_tokens=128, batch_size=2)
    loop = {"clients_per_round": 6, "local_steps": 3, "limits": Limits(share=None, norm=None)}
    kind = Kind(loop, partial(DPOModule, "toy", lr=0.01), data, rounds=3)
    monkeypatch.setitem(ALL_KINDS, "dpo", lambda root: kind)
    emulated = emulate("dpo", tmp_path / "emulated")
    there = in_new_processes("dpo", tmp_path)
    assert left_by(*deploy("dpo", tmp_path / "server", there)) == left_by(*emulated)


def test_a_server_with_a_gpu_has_nodes_without(tmp_path, monkeypatch):
    """Adam's kernel for a processor, which the loop takes there, is none of the settings that both need alike."""

    def rates_on_a_gpu(trainer):
        rates = rates_of(trainer)
        for group in rates["groups"][0]:
            assert group["fused"] or torch.cuda.is_available()
            group["fused"] = None
        return rates

    monkeypatch.setattr(server_loop, "rates_of", rates_on_a_gpu)
    emulated = emulate("fedadam", tmp_path / "emulated")
    deployed = deploy("fedadam", tmp_path / "server", Here(two_nodes("fedadam", tmp_path)))
    assert not deployed[1].nodes.refused
    assert left_by(*deployed) == left_by(*emulated)


def test_the_number_of_nodes_changes_nothing(tmp_path):
    found = []
    for number in (1, 3):
        folder = tmp_path / str(number)
        homes = {n: make_node("scaffold", folder / f"node{n}", (n, number)) for n in range(number)}
        found.append(left_by(*deploy("scaffold", folder / "server", Here(homes))))
    assert found[0] == found[1]


def test_a_state_in_the_place_of_another_one_in_memory_has_a_payload_of_its_own():
    loop = ServerLoop()
    loop.connect(None)
    assert len({loop._message({"w": torch.full((2,), float(number))}) for number in range(4)}) == 4


def test_every_round_asks_each_node_once(tmp_path):
    there = Here(two_nodes("fedavg", tmp_path))
    deploy("fedavg", tmp_path / "server", there)
    asked = [(one.node, one.asked.header["round"]) for one in there.of("visit")]
    assert len(asked) == len({*asked})
    assert {round_idx for _, round_idx in asked} == {0, 1, 2}
    assert [one.node for one in there.of("join")] == [1, 2]
