import stat
from itertools import pairwise

import pytest
import torch
from nodes_here import FakeNode, Here, deploy, make_node, two_nodes, visits_of

from fedlight.flower.identity import own_key, signed, verified
from fedlight.flower.messages import Bounds, Parcel, Refused
from fedlight.flower.node import versions
from fedlight.flower.nodes import Nodes

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches
ASKS = {"num_rounds": 1, "sizes": True, "groups": False}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return make_node("everybody", tmp_path_factory.mktemp("node"))


@pytest.fixture
def fake(real):
    return lambda *clients: FakeNode("everybody", list(clients), real)


def met(homes, **how):
    """Return nodes that have been asked to join."""
    nodes = Nodes(Here(homes), "run", ASKS, versions(), **how)
    nodes.welcome()
    return nodes


def test_a_key_is_made_once_and_read_by_its_owner_alone(tmp_path):
    key = own_key(tmp_path / "a")
    assert own_key(tmp_path / "a") == key
    assert own_key(tmp_path / "b") != key
    assert stat.S_IMODE((tmp_path / "a/node.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"00", b"zz" * 32, b"\xff" * 64])
def test_a_damaged_key_is_named_with_the_remedy(tmp_path, content):
    (tmp_path / "node.key").write_bytes(content)
    with pytest.raises(Refused, match=r"node\.key is damaged: restore it"):
        own_key(tmp_path)


def test_a_signature_holds_for_its_key_run_and_nonce_alone():
    shown = signed(b"1" * 32, "run", "nonce")
    assert verified(shown, "run", "nonce") == shown["key"]
    other = signed(b"2" * 32, "run", "nonce")
    for broken, run, nonce in [
        (shown, "other", "nonce"),
        (shown, "run", "other"),
        (shown | {"key": other["key"]}, "run", "nonce"),
        (shown | {"signature": other["signature"]}, "run", "nonce"),
    ]:
        with pytest.raises(Refused, match="its signature is not that of its key"):
            verified(broken, run, nonce)


def test_of_two_nodes_that_name_one_client_the_second_is_refused_with_the_remedy(fake):
    nodes = met({1: fake("a", "b"), 2: fake("b", "c")})
    assert nodes.homes(["a", "b", "c"]) == {1: ["a", "b"]}
    (why,) = nodes.why_not()
    assert "node 2: client b belongs to the node with the key" in why
    assert "give it the folder that it had" in why


def test_clients_of_a_node_that_is_away_are_not_given_to_another(fake):
    homes = {1: fake("a", "b")}
    nodes = met(homes)
    away = homes.pop(1)
    homes[2] = fake("a", "b")
    nodes.welcome()
    assert nodes.homes(["a", "b"]) == {}
    homes[3] = away  # Flower has given it another id
    nodes.welcome()
    assert nodes.homes(["a", "b"]) == {3: ["a", "b"]}


def test_a_node_gets_its_clients_back_while_flower_still_lists_its_old_id(fake):
    home = fake("a", "b")
    homes = {1: home}
    nodes = met(homes)
    homes[9] = home
    home.clients = ["a"]  # it has left one at home
    nodes.welcome()
    assert nodes.homes(["a", "b"]) == {9: ["a"]}
    assert not nodes.why_not()


def test_a_node_cannot_show_another_nodes_answer(fake, real):
    shown = []

    def replayed(message):
        if message.node == 1:
            shown.append({name: message.answer.header[name] for name in ("key", "signature")})
            return message.answer
        return Parcel(message.answer.header | shown[0])

    nodes = Nodes(Here({1: fake("a"), 2: fake("b")}, replayed), "run", ASKS, versions())
    nodes.welcome()
    assert nodes.homes(["a", "b"]) == {1: ["a"]}
    assert nodes.why_not() == ["node 2: its signature is not that of its key"]


@pytest.mark.parametrize(
    ("number", "bound"), [(4, 3), pytest.param(1_000_000, 10_000, marks=pytest.mark.slow)]
)
def test_a_node_with_too_many_clients_is_refused_with_the_setting(fake, number, bound):
    homes = {1: fake("a"), 2: fake(*(f"c{i}" for i in range(number)))}
    nodes = met(homes, bounds=Bounds(clients=bound, header_mib=64))
    assert [*nodes.sizes] == ["a"]
    assert f"names {number:,} clients, more than max-clients={bound} in the app's setti" in nodes.why_not()[0]


def test_a_reply_with_a_header_that_is_too_long_is_refused_with_the_setting(fake):
    homes = {1: fake("a"), 2: fake(*(f"client-{i:090}" for i in range(11_000)))}  # 1.1 MB
    nodes = met(homes, bounds=Bounds(clients=20_000, header_mib=1))
    assert [*nodes.sizes] == ["a"]
    assert "of which 0 are due: the rest is more than max-header-mib=1 in the app" in nodes.why_not()[0]


def test_a_server_that_was_stopped_knows_whose_clients_they_are(tmp_path):
    """The impostor is there first, after the server was started again."""
    there = Here(two_nodes("fedavg", tmp_path))
    _, loop = deploy("fedavg", tmp_path / "server", there, 2)
    bound = dict(loop.nodes.keys)
    assert len(set(bound.values())) == 2
    (saved,) = tmp_path.glob("server/checkpoints/epoch=1.ckpt")
    state = torch.load(saved, weights_only=True)["callbacks"]["FederatedLoop"]
    assert state["nodes"]["keys"] == bound

    places = {5: ("impostor", 0), 7: ("node1", 0), 8: ("node2", 1)}
    homes = {n: make_node("fedavg", tmp_path / name, (part, 2)) for n, (name, part) in places.items()}
    _, loop = deploy("fedavg", tmp_path / "server", Here(homes), 4)
    assert loop.nodes.keys == bound
    assert set(loop.nodes._home.values()) == {7, 8}
    (why,) = loop.nodes.why_not()
    assert why.startswith("node 5: client c0 belongs to the node with the key ")
    rounds = [int(row["round"]) for row in visits_of(tmp_path / "server")]
    assert set(rounds) == {0, 1, 2, 3}
    assert all(first <= second for first, second in pairwise(rounds))


def test_a_node_that_comes_back_under_another_id_goes_on_with_its_memories(tmp_path):
    quiet = tmp_path / "quiet"
    _, expected = deploy("scaffold", quiet / "server", Here(two_nodes("scaffold", quiet)), 4)
    there = Here(two_nodes("scaffold", tmp_path))

    def restart():
        if len(there.of("visit")) == 4 and 2 in there.homes:
            del there.homes[2]
            there.homes[12] = make_node("scaffold", tmp_path / "node2", (1, 2))

    # Between two rounds: the transport is asked for its nodes when the next round is planned.
    nodes, there.nodes = there.nodes, lambda: (restart(), nodes())[1]
    _, loop = deploy("scaffold", tmp_path / "server", there, 4)
    assert {one.node for one in there.of("visit")} == {1, 2, 12}
    assert visits_of(tmp_path / "server") == visits_of(quiet / "server")
    assert not loop.nodes.refused
    assert len(loop.nodes.keys) == len(expected.nodes.keys) == 10
    assert len(set(loop.nodes.keys.values())) == 2
