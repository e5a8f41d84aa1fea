import jsonargparse
import pytest
import torch
import yaml
from plain_lightning import assert_equal, federate, weights
from safetensors.torch import load, save

from fedlight import ClipAndNoise, Quantize, TopK
from fedlight.federation.channel import Wire, pack, unpack
from fedlight.federation.client import Channel, Client, Identity, movement

CHAINS = {
    "fp16": [Quantize("fp16")],
    "int8": [Quantize("int8")],
    "nf4": [Quantize("nf4")],
    "top": [TopK(0.1)],
    "top nf4": [TopK(0.25), Quantize("nf4")],
    "noise int8": [ClipAndNoise(1.0, 0.01), Quantize("int8")],
}


def adapter(seed=0, scale=1.0):
    """LoRA of three layers, the last of which has 15 values in one of its tensors."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"layer{i}.lora_{ab}": s for i in range(2) for ab, s in (("A", (8, 128)), ("B", (128, 8)))}
    shapes |= {"last.lora_A": (1, 15), "last.lora_B": (40, 1)}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def client():
    return Client("c", 1, 1.0)


def state(**tensors):
    return {name: torch.tensor(values) for name, values in tensors.items()}


def test_without_codecs_it_is_the_identity():
    assert_equal(weights(federate(channel=Wire())[0]), weights(federate()[0]))
    before, after = adapter(0), adapter(1)
    wire, identity = Wire(), Identity()
    assert wire.down(before, client()).num_bytes == identity.down(before, client()).num_bytes
    assert_equal(wire.down(before, client()).state, before)
    assert_equal(wire.up(before, after, client()).state, movement(before, after))
    assert wire.up_bytes(after) == wire.down_bytes(after) == identity.up_bytes(after) == len(save(after))
    assert identity.down_bytes(after) == identity.down(after, client()).num_bytes


@pytest.mark.parametrize("codecs", CHAINS.values(), ids=CHAINS)
def test_bytes_are_those_of_a_file_and_known_before(codecs):
    wire, before, after = Wire(up=codecs), adapter(0), adapter(1)
    torch.manual_seed(0)
    known = wire.up_bytes(after)  # without a draw from the stream
    payload = wire.up(before, after, client())
    torch.manual_seed(0)
    sent = {name: value.float() for name, value in movement(before, after).items()}
    file = save(pack(sent, codecs))
    assert known == payload.num_bytes == len(file) < len(save(after))
    arrived = unpack(load(file), {name: value.shape for name, value in after.items()}, codecs)
    assert_equal(payload.state, {name: value.double() for name, value in arrived.items()})
    assert list(payload.state) == list(after)


def test_bytes_the_way_down():
    codec, parameters = Quantize("int8"), adapter()
    wire = Wire(down=codec)
    payload = wire.down(parameters, client())
    assert payload.num_bytes == wire.down_bytes(parameters) == len(save(pack(parameters, [codec])))
    assert wire.up_bytes(parameters) == len(save(parameters))
    for name, value in parameters.items():
        assert payload.state[name].dtype == torch.float32
        assert payload.state[name].shape == value.shape
        assert 0 < (payload.state[name] - value).abs().max() <= value.abs().max() / 250
    # Movements are from what the client has received.
    trained = {name: value + 0.5 for name, value in payload.state.items()}
    assert_equal(wire.up(payload.state, trained, client()).state, movement(payload.state, trained))


def test_bytes_of_part_of_a_state_and_of_nothing():
    wire = Wire(up=CHAINS["top nf4"], down=Quantize("nf4"))
    part = {"last.lora_A": torch.ones(1, 15)}
    assert wire.up_bytes(part) == wire.up(adapter(), part, client()).num_bytes < wire.up_bytes(adapter())
    assert wire.up_bytes({}) == wire.down_bytes({}) == wire.down({}, client()).num_bytes == 0
    assert wire.up(adapter(), {}, client()).num_bytes == Identity().up_bytes({}) == 0
    skeleton = {name: value.to("meta") for name, value in adapter().items()}
    assert wire.up_bytes(skeleton) == wire.up_bytes(adapter())
    unknown = Wire(up=[ClipAndNoise(1.0, epsilon=4.0), Quantize("int8")])  # the noise of an epsilon
    assert unknown.up_bytes(adapter()) == Wire(up=CHAINS["noise int8"]).up_bytes(adapter())


def test_error_feedback_by_hand():
    """The larger of two is sent; what is left out comes when it has become the larger one."""
    wire, there, zero = Wire(up=TopK(0.5)), client(), state(w=[0.0, 0.0])
    arrived = [wire.up(zero, state(w=[4.0, 1.5]), there).state["w"].tolist() for _ in range(4)]
    assert arrived == [[4.0, 0.0], [4.0, 0.0], [0.0, 4.5], [8.0, 0.0]]
    assert there.memory["wire"]["w"].tolist() == [0.0, 1.5]
    silent, there = Wire(up=TopK(0.5, error_feedback=False)), client()
    arrived = [silent.up(zero, state(w=[4.0, 1.5]), there).state["w"].tolist() for _ in range(4)]
    assert arrived == [[4.0, 0.0]] * 4
    assert there.memory == {}


@pytest.mark.parametrize("codecs", [[TopK(0.1), Quantize("nf4")], [Quantize("nf4", error_feedback=True)]])
def test_error_feedback_is_that_of_the_whole_chain(codecs):
    """What arrived and what is still kept are what was meant, over rounds."""
    wire, there, zero = Wire(up=codecs), client(), {name: 0 * value for name, value in adapter().items()}
    arrived, meant = dict(zero), dict(zero)
    for seed in range(5):
        trained = adapter(seed)
        payload = wire.up(zero, trained, there).state
        arrived = {name: arrived[name] + payload[name] for name in zero}
        meant = {name: meant[name] + trained[name] for name in zero}
    for name in zero:
        kept = there.memory["wire"][name]
        assert kept.dtype == torch.float32
        assert kept.abs().max() > 0.01
        torch.testing.assert_close(arrived[name] + kept, meant[name].double(), rtol=0, atol=1e-5)


def test_what_is_not_sent_this_time_keeps_its_residual():
    wire, there = Wire(up=TopK(0.5)), client()
    zero = state(a=[0.0, 0.0], b=[0.0, 0.0])
    wire.up(zero, state(a=[2.0, 1.0], b=[5.0, 3.0]), there)
    wire.up(zero, state(a=[2.0, 0.0]), there)
    kept = {name: value.tolist() for name, value in there.memory["wire"].items()}
    assert kept == {"a": [0.0, 1.0], "b": [0.0, 3.0]}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("way", ["up", "down"])
def test_what_is_not_finite_is_refused(way, bad):
    wire, broken = Wire(**{way: Quantize("nf4")}), state(v=[1.0], w=[1.0, bad])
    whose = "client 'c'" if way == "up" else "the server"
    sent = (state(v=[0.0], w=[0.0, 0.0]), broken) if way == "up" else (broken,)
    with pytest.raises(ValueError, match=rf"channel.{way}: w of {whose} is not finite"):
        getattr(wire, way)(*sent, client())


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        ({"up": [Quantize("nf4"), TopK(0.1)]}, "channel.up: Quantize must be last"),
        ({"down": [Quantize("nf4"), Quantize("int8")]}, "channel.down: Quantize must be last"),
        ({"up": [TopK(0.1, False), ClipAndNoise(1.0, 1.0)]}, "channel.up: ClipAndNoise must be first"),
        ({"up": [ClipAndNoise(1.0, 1.0), TopK(0.1)]}, "ClipAndNoise cannot go with error feedback"),
        ({"down": TopK(0.1)}, "channel.down: TopK is for movements"),
        ({"down": [ClipAndNoise(1.0, 1.0)]}, "channel.down: ClipAndNoise is for movements"),
    ],
)
def test_senseless_chains_are_refused(chains, message):
    with pytest.raises(ValueError, match=message):
        Wire(**chains)


def test_yaml():
    text = """
    class_path: Wire
    init_args:
      up:
        - {class_path: TopK, init_args: {share: 0.2}}
        - {class_path: Quantize, init_args: {to: nf4}}
      down: {class_path: Quantize, init_args: {to: int8, block: 64}}
    """
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--channel", type=Channel)
    wire = parser.instantiate(parser.parse_object({"channel": yaml.safe_load(text)})).channel
    assert [type(codec) for codec in wire.up_codecs] == [TopK, Quantize]
    assert (wire.up_codecs[0].share, wire.up_codecs[1].to) == (0.2, "nf4")
    assert [vars(codec) for codec in wire.down_codecs] == [vars(Quantize("int8", 64))]


def test_a_state_that_goes_to_everybody_is_encoded_once():
    wire, state = Wire(down=Quantize("int8")), {"w": torch.randn(4, 8)}
    first, second = (wire.down(state, Client(name, 1, 0.5)) for name in "ab")
    assert second is first
    assert wire.down({"w": state["w"] + 1}, Client("a", 1, 0.5)) is not first
