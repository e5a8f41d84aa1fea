from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from changed_messages import changed, lost, with_header, with_payload
from nodes_here import Here, MadeParts, deploy, emulate, left_by, make_node, visits_of
from scipy.stats import chisquare
from shared_runs import digest
from updates import update

from fedlight import CoordinateMedian, FedAvg, Fleet, Quantize, Scaffold, Wire
from fedlight.callbacks.loop.parts import ProductError
from fedlight.federation import WeightedSum
from fedlight.federation.asynchronous import FedBuff
from fedlight.federation.client import Diverged, Update
from fedlight.federation.forward import ZerothOrder
from fedlight.federation.privacy import ClipAndNoise, Private
from fedlight.flower.messages import Parcel, Refused
from fedlight.flower.secure import masks, ring
from fedlight.flower.secure.node_side import NodeSecrets
from fedlight.flower.secure.refusals import refuse_unsummable

pytest.importorskip("flwr", reason="needs fedlight[flower]")

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches

KINDS = ["everybody", "all_fedprox", "all_uniform", "all_noised", "all_shared_noise"]


def nodes(name, folder, number=3, secure=True):
    """Return nodes that share the clients."""
    numbers = range(1, number + 1)
    return {n: make_node(name, folder / f"node{n}", (n - 1, number), secure=secure) for n in numbers}


def secure_run(name, folder, change=lambda message: message.answer, number=3, rounds=None):
    there = Here(nodes(name, folder, number), change)
    return *deploy(name, folder / "server", there, rounds, secure=True), there


@pytest.mark.parametrize("name", KINDS)
def test_a_masked_run_ends_with_the_emulators_bits(tmp_path, name, monkeypatch):
    monkeypatch.setattr(Private, "keep_secret", lambda self: None)  # else the noise is another in each run
    emulated = emulate(name, tmp_path / "emulated")
    module, loop, there = secure_run(name, tmp_path)
    assert left_by(module, loop) == left_by(*emulated)
    assert not loop.nodes.refused
    rows, expected = visits_of(tmp_path / "server"), visits_of(tmp_path / "emulated")
    for key in ("client", "round", "steps", "bytes_down", "dropped", "reason"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected]
    masked = {one.node: len(one.answer.payloads["masked"]) for one in there.of("visit")}
    assert {*masked.values()} == {one.asked.due_bytes for one in there.of("visit")}
    for round_idx in {row["round"] for row in rows}:
        sent = [int(row["bytes_up"]) for row in rows if row["round"] == round_idx]
        assert sum(sent) == sum(masked.values())


def test_what_leaves_a_node_is_its_keys_letters_and_one_masked_sum(tmp_path):
    _, _, there = secure_run("everybody", tmp_path)
    allowed = {"format", "action", "run", "nonce", "round"}
    for one in there.of("visit"):
        assert one.answer.header.keys() == allowed | {"visits", "lost"}
        for visit in one.answer.header["visits"]:
            assert (visit["loss"], visit["training"], visit["payload"]) == (None, {}, None)
        assert [*one.answer.payloads] == ["masked"]
    more = {"keys": {"mask", "letter", "seed"}, "shares": {"letters"}, "unmask": {"seeds", "masks"}}
    for action, names in more.items():
        assert {key for one in there.of(action) for key in one.answer.header} == allowed | names


def p_value(data):
    """Return the chance of such counts of bytes if all values of a byte were equally likely."""
    return chisquare(np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)).pvalue


def test_a_single_upload_looks_uniform_and_without_its_mask_does_not(tmp_path):
    update = {"w": torch.randn(4000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}
    own = WeightedSum("weight")
    own.add(Update("a", update, 0.5))
    plain, rounded = ring.encode(own.partial(), {"w": (4000,)})
    assert not rounded
    there = three(tmp_path)
    masked = there[0].mask(Parcel({"round": 1}), plain)
    again = there[1].mask(Parcel({"round": 1}), plain)
    assert p_value(ring.to_bytes(plain)) < 1e-9
    for bits in (masked, again, masked - again, masked ^ again, masked - plain):
        assert p_value(ring.to_bytes(bits)) > 1e-6
    both = masked.copy()
    ring.add(both, again)  # without the masks that two nodes share, with their own and those of the third
    assert p_value(ring.to_bytes(both)) > 1e-6


@pytest.mark.parametrize(("action", "drops"), [("keys", 1), ("shares", 1), ("visit", 1), ("unmask", 0)])
def test_a_node_that_is_lost_at_any_step_is_left_out_and_the_rest_is_the_unmasked_sum(
    tmp_path, action, drops
):
    """So many may be lost: of five nodes four are enough."""
    module, loop, _ = secure_run("all_fedprox", tmp_path, lost(action, 2, round_idx=1), number=5)
    plain = nodes("all_fedprox", tmp_path / "plain", 5, secure=False)
    unmasked = Here(plain, lost("visit" if drops else "none", 2, round_idx=1))
    assert left_by(module, loop) == left_by(*deploy("all_fedprox", tmp_path / "plain/server", unmasked))
    assert loop.nodes.refused == {"lost": 1}
    reasons, expected = (
        {row["client"] for row in visits_of(folder / "server") if row["reason"].startswith("dropped")}
        for folder in (tmp_path, tmp_path / "plain")
    )
    assert reasons == expected
    assert len(reasons) == (2 if drops else 0)


@pytest.mark.parametrize("action", ["keys", "shares", "visit", "unmask"])
def test_with_too_few_nodes_a_round_leaves_the_model_alone_and_says_why(tmp_path, action):
    module, loop, _ = secure_run("everybody", tmp_path, lost(action, 2, 3), rounds=1)
    assert weights_of(module) == weights_of(untrained(tmp_path))
    assert loop.rounds_done == 1
    rows = visits_of(tmp_path / "server")
    assert len(rows) == 10
    assert all(row["reason"].startswith("dropped: ") for row in rows)


def diverging(node):
    """Return a node of which each client diverges."""
    run = node._run

    def changed(task, *given):
        loop, trainer = run(task, *given)
        loop.diverged = dict.fromkeys(task.shares, "not finite")
        loop.summed = {"sums": [], "divisors": []}
        return loop, trainer

    node._run = lambda task, *given: (changed if task.action == "visit" else run)(task, *given)
    return node


@pytest.mark.parametrize(
    ("diverged", "gone", "number", "steps"),
    [((), 3, 3, False), ((1, 2), 0, 4, False), ((1, 2, 3), 4, 4, False), ((1,), 0, 4, True)],
)
def test_a_sum_is_of_three_nodes_with_an_update_or_is_not_unmasked(tmp_path, diverged, gone, number, steps):
    there = Here(nodes("everybody", tmp_path, number), lost("visit", gone))
    for n in diverged:
        there.homes[n] = diverging(there.homes[n])
    module, loop = deploy("everybody", tmp_path / "server", there, 1, secure=True)
    assert loop.rounds_done == 1
    assert bool(there.of("unmask")) == steps
    assert (weights_of(module) != weights_of(untrained(tmp_path))) == steps
    reasons = {row["client"]: row["reason"] for row in visits_of(tmp_path / "server")}
    for n, node in there.homes.items():
        for name in node._served(sorted(reasons)):
            assert (reasons[name] == "diverged") == (n in diverged)


def at_two(action, key, value):
    """Return a change of one field of the answers of node 2."""

    def change(answer):
        return with_header(key, value(answer.header[key]) if callable(value) else value, answer)

    return changed(action, 2, change)


def sum_of_two(value):
    return changed("visit", 2, partial(with_payload, value))


def first_share(text):
    return lambda own: {name: text if name == "1" else share for name, share in own.items()}


HOSTILE = {
    "no_key": at_two("keys", "mask", ""),
    "short_key": at_two("keys", "mask", "ab" * 31),
    "key_of_a_low_order": at_two("keys", "mask", "00" * 32),
    "letter_key_of_a_low_order": at_two("keys", "letter", "00" * 32),
    "key_no_text": at_two("keys", "letter", 7),
    "letters_to_nobody": at_two("shares", "letters", {}),
    "letters_to_a_stranger": at_two("shares", "letters", lambda own: own | {"9": own["1"]}),
    "letter_too_short": at_two("shares", "letters", first_share("00")),
    "letter_no_hex": at_two("shares", "letters", first_share("zz" * masks.LETTER_BYTES)),
    "letter_damaged": at_two("shares", "letters", first_share("00" * masks.LETTER_BYTES)),
    "no_sum": changed("visit", 2, lambda answer: Parcel(answer.header)),
    "two_sums": changed("visit", 2, lambda answer: Parcel(answer.header, answer.payloads | {"more": b"1"})),
    "sum_cut": sum_of_two(lambda own: own[:-1]),
    "sum_too_long": sum_of_two(lambda own: own * 2),
    "sum_of_zeros": sum_of_two(lambda own: bytes(len(own))),
    "sum_of_other_weights": sum_of_two(lambda own: own[:-1] + bytes([own[-1] ^ 0x80])),
    "visits_missing": at_two("visit", "visits", []),
    "visit_of_a_stranger": at_two("visit", "visits", lambda own: [*own, own[0] | {"client": "x"}]),
    "steps_negative": at_two("visit", "visits", lambda own: [one | {"steps": -1} for one in own]),
    "seconds_nan": at_two("visit", "visits", lambda own: [one | {"seconds": float("nan")} for one in own]),
    "shares_missing": at_two("unmask", "seeds", {}),
    "share_of_another": at_two("unmask", "seeds", first_share("09" + "00" * 51)),
    "shares_wrong": at_two("unmask", "seeds", lambda own: {n: one[:-2] + "00" for n, one in own.items()}),
    "shares_no_text": at_two("unmask", "seeds", lambda own: dict.fromkeys(own, 3)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_broken_message_never_changes_what_the_others_have_sent(tmp_path, name, one_round):
    """The model is that of the round without the node, or without its lie, or that before the round."""
    module, loop, _ = secure_run("everybody", tmp_path, HOSTILE[name], number=4, rounds=1)
    assert loop.nodes.refused or name == "shares_wrong"  # others have enough right ones
    left = "before" if weights_of(module) == weights_of(untrained(tmp_path)) else weights_of(module)
    assert left in ("before", *one_round)
    assert (left == "before") == (name in ("sum_of_zeros", "sum_of_other_weights"))


@pytest.fixture(scope="module")
def one_round(tmp_path_factory):
    """Weights after an unmasked round of four nodes, and after one without each of the first two of them."""
    found = []
    for gone in (0, 1, 2):
        folder = tmp_path_factory.mktemp("plain")
        plain = Here(nodes("everybody", folder, 4, secure=False), lost("visit", gone))
        found.append(weights_of(deploy("everybody", folder / "server", plain, 1)[0]))
    assert len({*found}) == 3
    return found


def weights_of(module):
    return digest(dict(module.state_dict()))


def untrained(folder):
    return MadeParts(["--kind=everybody", f"--trainer.default_root_dir={folder}"], bool).model


@pytest.mark.parametrize(("threshold", "number"), [(2, 3), (4, 6), (66, 100)])
def test_any_shares_from_the_threshold_on_give_the_secret_and_fewer_do_not(threshold, number):
    secret = masks.new_secret()
    shares = masks.split(secret, threshold, number)
    assert {len(share) for share in shares} == {masks.SHARE_BYTES}
    for some in (shares[:threshold], shares[-threshold:], shares[::-1][:threshold]):
        assert masks.join(some) == secret
    assert masks.join(shares[1:threshold]) != secret
    with pytest.raises(Refused, match="two shares of a secret have the same holder"):
        masks.join([shares[0], shares[0]])


def test_shares_are_those_of_flowers_own_sharing():
    shamir = pytest.importorskip("flwr.common.secure_aggregation.crypto.shamir")
    secret = masks.new_secret()
    padded = shamir.create_shares(secret, 3, 5)  # a third block holds the padding
    assert masks.join([share[: masks.SHARE_BYTES] for share in padded[1:4]]) == secret
    ours = [a + b[-16:] for a, b in zip(masks.split(secret, 3, 5), padded, strict=True)]
    assert shamir.combine_shares(ours[:3]) == secret


def three(tmp_path, run="r", round_idx=1, until="visit"):
    """Return three nodes that have made their masks."""
    there = [NodeSecrets(tmp_path / f"n{n}", run) for n in range(3)]
    asked = Parcel({"round": round_idx})
    listed = {str(n + 1): one.keys(asked) for n, one in enumerate(there)}
    if until == "keys":
        return there, listed
    letters = [one.shares(Parcel({"round": round_idx, "nodes": listed})) for one in there]
    for n, one in enumerate(there):
        own = {str(m + 1): letters[m][str(n + 1)] for m in range(3) if m != n}
        if until == "shares":
            return there, own
        one.take_letters(Parcel({"round": round_idx, "letters": own}))
    return there


def test_the_masks_of_all_nodes_and_their_seeds_leave_the_sum(tmp_path):
    there = three(tmp_path)
    values = ring.from_bytes(np.random.default_rng(0).bytes(ring.BYTES * 50))
    total = ring.zeros(50)
    seeds = [bytes.fromhex(one._read(Parcel({"round": 1}), "letters")["seed"]) for one in there]
    for one in there:
        ring.add(total, one.mask(Parcel({"round": 1}), values))
    for seed in seeds:
        ring.add(total, ring.negative(masks.stream(seed, 50)))
    expected = [(3 * one) % 2**192 for one in ring.as_integers(values)]
    assert [one % 2**192 for one in ring.as_integers(total)] == expected


def refused_by_shares(listed):
    one, two, three_ = (dict(listed[n]) for n in "123")
    yield "two nodes", {"1": one, "2": two}
    yield "other numbers", {"1": one, "2": two, "7": three_}
    yield "a key twice", {"1": one, "2": two, "3": two}
    yield "a mask key twice", {"1": one, "2": two | {"mask": one["mask"]}, "3": three_}
    yield "own keys missing", {"1": three_ | {"mask": "11" * 32}, "2": two, "3": three_}
    yield "a key that is none", {"1": one, "2": two, "3": three_ | {"letter": "x"}}
    yield "no keys", {"1": one, "2": two, "3": 5}
    yield "a list", [one, two, three_]


def test_a_node_refuses_lists_of_keys_that_would_not_hide_it(tmp_path):
    there, listed = three(tmp_path, until="keys")
    for name, given in refused_by_shares(listed):
        with pytest.raises(Refused):
            there[0].shares(Parcel({"round": 1, "nodes": given}))
            pytest.fail(name)
    with pytest.raises(Refused, match="step"):
        there[0].shares(Parcel({"round": 2, "nodes": listed}))
    assert there[0].shares(Parcel({"round": 1, "nodes": listed}))


def test_a_node_trains_only_with_letters_of_enough_nodes_of_the_round(tmp_path):
    there, own = three(tmp_path, until="shares")
    first = next(iter(own))
    for given in ({}, {first: own[first]}, own | {"9": own[first]}, dict.fromkeys(own, own[first]), [1]):
        with pytest.raises(Refused):
            there[0].take_letters(Parcel({"round": 1, "letters": given}))
    with pytest.raises(Refused, match="step"):
        there[0].mask(Parcel({"round": 1}), ring.zeros(3))
    there[0].take_letters(Parcel({"round": 1, "letters": own}))


@pytest.mark.parametrize(
    ("alive", "gone"),
    [
        ("123", "3"),
        ("12", ""),
        ("12", "3"),
        ("1", "23"),
        ("23", "1"),
        ("1233", ""),
        ([1, 2, 3], ""),
        ("", ""),
        ([["1"]], ""),
        ("124", ""),
    ],
)
def test_a_node_never_gives_both_shares_of_a_node_nor_unmasks_a_sum_of_too_few(tmp_path, alive, gone):
    one = three(tmp_path)[0]
    one.mask(Parcel({"round": 1}), ring.zeros(3))
    with pytest.raises(Refused):
        one.unmask(Parcel({"round": 1, "alive": [*alive], "gone": [*gone]}))


def test_a_node_unmasks_once(tmp_path):
    one = three(tmp_path)[0]
    with pytest.raises(Refused, match="step"):
        one.unmask(Parcel({"round": 1, "alive": ["1", "2", "3"], "gone": []}))
    one.mask(Parcel({"round": 1}), ring.zeros(3))
    found = one.unmask(Parcel({"round": 1, "alive": ["1", "2", "3"], "gone": []}))
    assert (found["seeds"].keys(), found["masks"].keys()) == ({"1", "2", "3"}, set())
    with pytest.raises(Refused, match="no secrets"):
        one.unmask(Parcel({"round": 1, "alive": ["1", "3"], "gone": ["2"]}))
    assert not [*(tmp_path / "n0").iterdir()]


def test_a_node_set_to_secure_aggregation_sends_nothing_unmasked(tmp_path):
    there = Here(nodes("everybody", tmp_path))
    _, loop = deploy("everybody", tmp_path / "server", there, 1)  # the server is not set to it
    assert all("secure-aggregation" in reason or "no secrets" in reason for reason in loop.nodes.refused)
    assert all(isinstance(one.answer, Refused) for one in there.of("visit"))


def test_nodes_refuse_a_sum_of_fewer_than_share_its_noise(tmp_path):
    _, loop, there = secure_run("four_share_noise", tmp_path, lost("visit", 4), number=4)
    assert all(isinstance(one.answer, Refused) for one in there.of("unmask"))
    assert any("3 of 4 nodes have answered, too few" in reason for reason in loop.nodes.refused)
    assert {row["reason"][:7] for row in visits_of(tmp_path / "server")} == {"dropped"}


def test_a_node_without_a_client_that_has_noise_gives_no_sum(tmp_path, monkeypatch):
    """Else a server could have others diverge by its model, and the rest would have too little noise."""
    own = nodes("all_shared_noise", tmp_path, 4)
    answer = own[2].answer

    def diverge(codec, values, sizes):
        raise Diverged("of this client")

    def answer_without_results(asked):
        with monkeypatch.context() as patch:
            patch.setattr(ClipAndNoise, "encode", diverge)
            return answer(asked)

    own[2].answer = answer_without_results
    there = Here(own)
    _, loop = deploy("all_shared_noise", tmp_path / "server", there, None, secure=True)
    assert {one.node for one in there.of("visit") if not isinstance(one.answer, Refused)} == {1, 3, 4}
    assert any("would lack its part of the noise" in reason for reason in loop.nodes.refused)


@pytest.mark.parametrize("end", ["node", "server"])
def test_shared_noise_is_refused_without_masks(tmp_path, end):
    with pytest.raises(ValueError, match=r"ClipAndNoise with shared_by=4 needs secure-aggregation"):
        there = Here(nodes("four_share_noise", tmp_path, 4, secure=end == "server"))
        deploy("four_share_noise", tmp_path / "server", there, 1, secure=end == "node")


def settings(**changes):
    empty = dict.fromkeys(("aggregation", "forward", "fleet"))
    return {"algorithm": FedAvg(), "channel": Wire(), "parts": []} | empty | changes


class Derived(FedAvg):
    """An algorithm that is not known to need a sum alone."""


REFUSED = {
    "Scaffold": settings(algorithm=Scaffold()),
    "Derived": settings(algorithm=Derived()),
    "CoordinateMedian": settings(aggregation=CoordinateMedian()),
    "channel.up=Quantize": settings(channel=Wire(up=Quantize("int8"))),
    "parts": settings(parts=[ProductError()]),
    "forward=ZerothOrder": settings(forward=ZerothOrder()),
    "fleet.buffered": settings(fleet=Fleet(buffered=FedBuff())),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_single_uploads_is_refused_with_its_reason(name):
    with pytest.raises(ValueError, match=f"{name}.* does not work with secure-aggregation: .*: ") as error:
        refuse_unsummable(REFUSED[name])
    assert len(str(error.value)) < 300


def test_a_callback_that_looks_at_uploads_is_refused_and_what_a_sum_is_enough_for_is_not():
    with pytest.raises(ValueError, match="single uploads"):
        refuse_unsummable(settings(), [SimpleNamespace(on_upload=lambda upload: None)])
    refuse_unsummable(settings(channel=Wire(up=ClipAndNoise(1.0, 1.0), down=Quantize("int8"))))


@pytest.mark.parametrize("divide_by", ["weight", "count", "one"])
def test_sums_in_the_ring_are_the_exact_sums(divide_by):
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (ring.BLOCK + 7,), "c": ()}
    powers = {n: 10.0 ** torch.randint(-12, 3, s, generator=generator) for n, s in shapes.items()}
    updates = []
    for i in range(5):
        numbers = {n: torch.randn(s, generator=generator).double() * powers[n] for n, s in shapes.items()}
        updates.append(Update(str(i), numbers, 0.1 + i))
    whole, masked, total = WeightedSum(divide_by), WeightedSum(divide_by), None
    for own in (updates[:2], updates[2:3], updates[3:]):
        part = WeightedSum(divide_by)
        for one in own:
            whole.add(one)
            part.add(one)
        values, rounded = ring.encode(part.partial(), shapes)
        assert rounded == 0
        total = values if total is None else total
        ring.add(total, values) if total is not values else None
    masked.merge(ring.decode(ring.from_bytes(ring.to_bytes(total)), shapes))
    expected = whole.result()
    assert all(torch.equal(value, expected[name]) for name, value in masked.result().items())


@pytest.mark.parametrize("value", [2.0**32, -(2.0**60), 1e300, float("nan"), float("inf")])
def test_what_does_not_fit_into_the_ring_is_refused_and_bits_below_its_unit_are_counted(value):
    own = WeightedSum("count")
    own.add(update("a", w=[2.0**-147, 2.0**-146, -(2.0**-160)]))
    values, rounded = ring.encode(own.partial(), {"w": (3,)})
    assert (ring.as_integers(values)[:3], rounded) == ([0, 1, 0], 2)
    own.add(update("b", w=[value, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"too large|not finite"):
        ring.encode(own.partial(), {"w": (3,)})
