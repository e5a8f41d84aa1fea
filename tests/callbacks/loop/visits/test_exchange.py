import torch
from plain_lightning import Uploads

from fedlight import Algorithm, Scaffold, TopK, Wire
from fedlight.callbacks.loop.visits.visit import Exchange
from fedlight.federation import Client, Identity, Visit, Work

WORK = Work(num_steps=1, lr=1.0, mean_loss=0.0, seconds=0.0, lr_sums={"w": 1.0})
STATE = {"w": torch.tensor([1.0, 2.0])}


def exchange(algorithm, round_idx=0, channel=None):
    return Exchange(algorithm, channel or Identity(), seed=0, round_idx=round_idx, state=STATE)


def new_uploads(wire):
    watch = Uploads()
    wire.call_on_upload([watch])
    return watch.seen


def test_an_upload_is_what_the_client_sent_and_is_seen_once():
    wire = exchange(Algorithm(), round_idx=4)
    assert new_uploads(wire) == []
    for name, value in (("a", 5.0), ("b", 7.0)):
        visiting, _ = wire.down(Visit(name, 1), Client(name, 1, 0.5), None)
        update, _ = wire.up(visiting, {"w": torch.tensor([value, 2.0])}, WORK)
        assert update.movement["w"].tolist() == [value - 1.0, 0.0]
        [upload] = new_uploads(wire)
        assert (upload.round_idx, upload.client_id, upload.state["w"].tolist()) == (4, name, [value, 2.0])
        assert upload.state["w"].dtype is torch.float32
        assert new_uploads(wire) == []


def test_of_controls_beside_the_parameters_the_upload_has_none():
    wire = exchange(Scaffold())
    visiting, _ = wire.down(Visit("a", 1), Client("a", 1, 1.0), None)
    assert visiting.received.keys() == {"w", "control.w"}
    wire.up(visiting, {"w": torch.tensor([3.0, 3.0])}, WORK)
    [upload] = new_uploads(wire)
    assert {name: value.tolist() for name, value in upload.state.items()} == {"w": [3.0, 3.0]}


def test_of_controls_beside_the_parameters_the_wire_keeps_no_loss():
    """Of four values one goes up, so of w and its control something is lost; the wire hears which of the two it keeps."""
    client, wire = Client("a", 1, 1.0), exchange(Scaffold(), channel=Wire(up=TopK(0.25)))
    visiting, _ = wire.down(Visit("a", 1), client, None)
    reply = wire.algorithm.reply(visiting, {"w": torch.tensor([3.0, 1.0])}, WORK)
    wire.channel.up(visiting.received, reply, client, without_feedback={"control.w"})
    assert client.memory["wire"].keys() == {"w"}
    client.memory = {}
    wire.up(visiting, {"w": torch.tensor([3.0, 1.0])}, WORK)
    assert client.memory["wire"].keys() == {"w"}
