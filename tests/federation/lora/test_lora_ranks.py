import pytest
import torch
from plain_lightning import Uploads
from refusals import refusal

from fedlight.callbacks.loop.visits.visit import RankedExchange
from fedlight.federation import Algorithm, Client, Identity, Quantize, TopK, Visit, Wire, Work
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA
from fedlight.federation.lora.ranks import (
    PRUNED,
    cut_module,
    cut_to_rank,
    largest_rank,
    pad_like,
    prune,
    rank_of,
    ranks_by_hand,
    refuse_moved_zeros,
)
from fedlight.federation.payloads import predict_payloads

A, B = "q.lora_A.default.weight", "q.lora_B.default.weight"
WORK = Work(num_steps=1, lr=1.0, mean_loss=0.0, seconds=0.0)


def state(rank=3, layer="q"):
    """Factors of a layer of 5 inputs and 2 outputs, all numbers unlike, and a head."""
    a = torch.arange(1.0, 1 + 5 * rank).reshape(rank, 5)
    b = torch.arange(1.0, 1 + 2 * rank).reshape(rank, 2).T.contiguous()
    return {
        f"{layer}.lora_A.default.weight": a,
        f"{layer}.lora_B.default.weight": b,
        "head.weight": torch.ones(2, 2),
    }


def test_what_is_cut_is_padded_with_zeros():
    whole = state()
    small = cut_to_rank(whole, 2)
    assert [small[A].tolist(), small[B].tolist()] == [whole[A][:2].tolist(), whole[B][:, :2].tolist()]
    padded = pad_like(small, whole, 2)
    assert torch.equal(padded[A][:2], whole[A][:2])
    assert torch.equal(padded[B][:, :2], whole[B][:, :2])
    assert padded[A][2].tolist() == [0.0] * 5
    assert padded[B][:, 2].tolist() == [0.0] * 2
    assert padded["head.weight"] is whole["head.weight"]
    assert torch.equal(padded[B] @ padded[A], small[B] @ small[A])
    assert cut_to_rank(whole, None) is whole
    assert pad_like(whole, whole, None) is whole


def test_layers_of_unlike_ranks_keep_the_smaller_one():
    both = state(3) | state(1, "v")
    small = cut_to_rank(both, 2)
    assert [value.shape[0] for name, value in small.items() if "lora_A" in name] == [2, 1]
    assert {n: v.shape for n, v in pad_like(small, both, 2).items()} == {n: v.shape for n, v in both.items()}
    assert largest_rank(both) == 3


def test_a_module_is_cut_as_states_are():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, out, inner in (("lora_A", 3, 5), ("lora_B", 2, 3)):
                layer = torch.nn.Linear(inner, out, bias=False)
                self.add_module(name, torch.nn.ModuleDict({"default": layer}))

    module = torch.nn.ModuleDict({"q": Layer()}).to("meta")
    module["q"].lora_A["default"].weight.requires_grad_(False)
    cut_module(module, 2)
    assert {name: (tuple(p.shape), p.requires_grad, p.is_meta) for name, p in module.named_parameters()} == {
        A: ((2, 5), False, True),
        B: ((2, 2), True, True),
    }


def test_a_client_goes_on_with_the_rank_to_which_it_has_pruned():
    assert rank_of(Client("a", 1, 1.0)) is None
    assert rank_of(Client("a", 1, 1.0, lora_rank=2)) == 2
    client = Client("a", 1, 1.0, {"wire": cut_to_rank(state(), 2)}, lora_rank=2)
    prune(client, 1)
    assert rank_of(client) == client.memory[PRUNED] == 1
    assert client.memory["wire"][A].shape == (1, 5)
    assert client.memory["wire"][B].shape == (2, 1)


def test_a_client_comes_before_its_device_and_both_before_the_rest():
    devices = {"a": "phone", "b": "phone", "c": "board", "d": ""}
    ranks = ranks_by_hand({"phone": 2, "b": 3}, devices, ["phone", "board"], 8)
    assert ranks == {"a": 2, "b": 3, "c": 8, "d": 8}
    with refusal(r"ranks\.tablet: there is no such client or device; clients are a, b"):
        ranks_by_hand({"tablet": 2}, devices, ["phone", "board"], 8)
    with refusal(r"ranks\.a: there is a client and a device of this name"):
        ranks_by_hand({"a": 2}, {"a": "b", "c": "a"}, ["a", "b"], 8)
    assert ranks_by_hand({"c": 2}, {"a": "b", "c": "a"}, ["a", "b"], 8) == {"a": 8, "c": 2}


NO_TYPE = r"ranks=.* must be a dict\[str, int\] or a list\[int\] or None"


@pytest.mark.parametrize("make", [HetLoRA, FlexLoRA])
@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({}, "ranks={} must give a rank"),
        ([], r"ranks=\[\] must give a rank"),
        ({"a": 0}, "0 is no rank"),
        ("auto", NO_TYPE),
        (4, NO_TYPE),
        ({"a": True}, NO_TYPE),
        ([2, 1.5], NO_TYPE),
    ],
)
def test_what_gives_no_ranks_is_refused(make, ranks, message):
    with refusal(message):
        make(ranks=ranks)
    for given in (None, {"a": 1}, [1, 2]):
        assert make(ranks=given).ranks == given
    assert make(ranks={0: 2, "b": 1}).ranks == {"0": 2, "b": 1}  # names of digits are those of clients


def test_what_is_refused_when_the_parameters_are_known():
    with refusal(r"4 is above the rank 3 .* model.lora.rank to 5"):
        largest_rank(state(), {"a": 4, "b": 5})
    with refusal("no trained parameter is the A or B"):
        largest_rank({"head.weight": torch.ones(2, 2)})
    with refusal(r"lora_B.default.weight cannot be cut .* no lora_A"):
        largest_rank({B: torch.ones(2, 3)})


def test_factors_that_moved_beyond_the_rank_are_refused():
    padded = pad_like(cut_to_rank(state(), 2), state(), 2)
    refuse_moved_zeros(padded, 2)
    refuse_moved_zeros(state(), None)
    for name, place in ((A, (2, 0)), (B, (0, 2))):
        moved = {n: value.clone() for n, value in padded.items()}
        moved[name][place] = 1e-30
        with refusal("q was trained beyond the client's rank 2"):
            refuse_moved_zeros(moved, 2)


class Whole(Algorithm):
    """FedAvg that takes unlike ranks, and keeps what it is given."""

    unlike_ranks = True

    def finish_visit(self, visiting, movement, work):
        self.visiting, self.movement = visiting, movement
        return super().finish_visit(visiting, movement, work)


WIRES = {
    "lossless": Identity,
    "nf4": lambda: Wire(up=Quantize("nf4"), down=Quantize("fp16")),
    "top": lambda: Wire(up=[TopK(0.4, error_feedback=True), Quantize("int8")]),
}


@pytest.mark.parametrize("wire", WIRES)
def test_over_the_wire_goes_the_slice_and_hooks_see_zeros_beyond_it(wire):
    """The bytes are those of an adapter of the client's own rank, and those that were predicted."""
    algorithm, channel, whole = Whole(), WIRES[wire](), state()
    client = Client("a", 1, 1.0, lora_rank=2)
    exchange = RankedExchange(algorithm, channel, seed=0, round_idx=0, state=whole)
    visiting, down = exchange.down(Visit("a", 1), client, None)
    small = cut_to_rank(whole, 2)
    assert down == channel.down_bytes(small) < channel.down_bytes(whole)
    assert visiting.lora_rank == 2
    assert {n: v.shape for n, v in visiting.start.items()} == {n: v.shape for n, v in whole.items()}
    assert not visiting.start[A][2:].any()
    trained = {name: value + (value != 0) for name, value in visiting.start.items()}
    update, up = exchange.up(visiting, trained, WORK)
    assert up == channel.up_bytes(small) < channel.up_bytes(whole)
    [predicted] = predict_payloads(algorithm, [Visit("a", 1)], client, whole)
    assert (channel.down_bytes(predicted.down), channel.up_bytes(predicted.up)) == (down, up)
    assert algorithm.movement[A].shape == whole[A].shape
    assert not algorithm.movement[A][2:].any()
    assert not algorithm.movement[B][:, 2:].any()
    assert algorithm.movement[A][:2].any()
    uploads = Uploads()
    exchange.call_on_upload([uploads])
    assert uploads.seen[0].state[A].shape == whole[A].shape  # as the module has it, for attacks
    if wire == "lossless":
        assert update.movement[A][:2].tolist() == [[1.0] * 5] * 2
    if wire == "top":
        assert client.memory["wire"][A].shape == (2, 5)


def test_an_optimizer_that_moves_what_has_no_gradient_is_refused():
    exchange = RankedExchange(Whole(), Identity(), seed=0, round_idx=0, state=state())
    visiting, _ = exchange.down(Visit("a", 1), Client("a", 1, 1.0, lora_rank=1), None)
    with refusal("Take an optimizer that steps each number by itself"):
        exchange.up(visiting, {name: value + 0.1 for name, value in visiting.start.items()}, WORK)


def test_a_second_visit_has_what_the_first_received():
    class Twice(Whole):
        def send(self, visit, client, state):
            return state if visit.part == "first" else None

    exchange, client = RankedExchange(Twice(), Identity(), 0, 0, state()), Client("a", 1, 1.0, lora_rank=1)
    first, _ = exchange.down(Visit("a", 1, part="first"), client, None)
    second, down = exchange.down(Visit("a", 1, part="second"), client, first)
    assert down == 0
    assert second.received is first.received
