from collections import Counter

import pytest
import torch
from changed_messages import after_visits, with_header
from nodes_here import ALL_KINDS, Here, deploy, emulate, left_by, make_node, two_nodes, visits_of
from refusals import refusal
from shared_runs import Kind
from tastes import Adapters, Tastes

from fedlight import FedAvg, FedBiscuit
from fedlight.callbacks.loop.parts import DPSGD
from fedlight.federation.privacy import Private, PrivateMean
from fedlight.flower.messages import Refused

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches


def run_deployed(name, folder):
    there = Here(two_nodes(name, folder))
    return *deploy(name, folder / "server", there), there


def first_replies(there):
    """Return the visits and the payloads of the first round's replies, by node."""
    answers = {one.node: one.answer for one in there.of("visit") if one.asked.header["round"] == 0}
    visits = {n: [one | {"seconds": 0} for one in answer.header["visits"]] for n, answer in answers.items()}
    return visits, {node: answer.payloads for node, answer in answers.items()}


def test_the_seed_does_not_give_a_nodes_noise(tmp_path, monkeypatch):
    """Two runs of one seed: clients train alike on one model, and what they send is another each time."""
    _, _, there = run_deployed("noised", tmp_path / "first")
    _, _, again = run_deployed("noised", tmp_path / "second")
    visits, payloads = first_replies(there)
    assert first_replies(again)[0] == visits
    both = payloads, first_replies(again)[1]
    sent = [[payload for node in sorted(each) for payload in each[node].values()] for each in both]
    assert [*map(len, sent[0])] == [*map(len, sent[1])]
    assert len({*sent[0], *sent[1]}) == 2 * len(sent[0]) > 0
    # With noise from the seed, which the server knows, both are what the emulator sends.
    monkeypatch.setattr(Private, "keep_secret", lambda self: None)
    seeded = [run_deployed("noised", tmp_path / name) for name in ("third", "fourth")]
    assert first_replies(seeded[0][2]) == first_replies(seeded[1][2])
    assert first_replies(seeded[0][2])[0] == visits
    assert left_by(*seeded[0][:2]) == left_by(*emulate("noised", tmp_path / "emulated"))


def test_the_seed_does_not_give_the_noise_of_single_examples(tmp_path, monkeypatch):
    """The server counts at most a pass for each step, because it does not know how many steps a pass has."""
    ends = [run_deployed("noised_examples", tmp_path / name) for name in ("first", "second")]
    assert left_by(*ends[0][:2])[0] != left_by(*ends[1][:2])[0]
    counted, steps = ends[0][1].privacy.passes, Counter()
    for row in visits_of(tmp_path / "first" / "server"):
        steps[row["client"]] += int(row["steps"])
    assert counted == steps
    monkeypatch.setattr(Private, "keep_secret", lambda self: None)
    seeded = run_deployed("noised_examples", tmp_path / "third")
    emulated = emulate("noised_examples", tmp_path / "emulated")
    assert weights(seeded[0]) == weights(emulated[0])
    assert all(times <= counted[client] for client, times in emulated[1].privacy.passes.items())


def protect(monkeypatch, algorithm=lambda: FedBiscuit(1, 2), delta=0.01):
    """Name a kind of run ``protected``, whose nodes protect examples."""
    model = Adapters if isinstance(algorithm(), FedBiscuit) else lambda: Adapters(1)

    def kind(root):
        loop = {"algorithm": algorithm(), "clients_per_round": 5, "parts": [DPSGD(0.5, 2.0, delta=delta)]}
        return Kind(loop, model, Tastes, rounds=4)

    monkeypatch.setitem(ALL_KINDS, "protected", kind)


def test_a_node_sends_no_loss_of_examples_that_it_protects(tmp_path, monkeypatch):
    protect(monkeypatch)
    _, _, there = run_deployed("protected", tmp_path)
    visits = [visit for one in there.of("visit") for visit in one.answer.header["visits"]]
    assert len(visits) == 20
    assert all(visit["loss"] is None and visit["training"] == {} for visit in visits)
    first, *_ = run_deployed("uniform", tmp_path / "plain")[2].of("visit")
    assert all(visit["loss"] > 0 for visit in first.answer.header["visits"])


@pytest.mark.parametrize("algorithm", [lambda: FedBiscuit(1, 2), FedAvg])
def test_a_node_scores_training_rows_only_where_its_own_settings_say_so(tmp_path, monkeypatch, algorithm):
    protect(monkeypatch)
    _, _, there = run_deployed("protected", tmp_path)
    [asked, *_] = [one.asked for one in there.of("losses") if one.node == 1]
    protect(monkeypatch, algorithm)
    node = make_node("protected", tmp_path / "asked", (0, 2))
    for name, value in (("losses_on", "own"), ("by_example", True)):
        with pytest.raises(Refused, match=r"the server asks for losses on .* settings do not allow"):
            node.answer(with_header(name, value, asked))
    if algorithm is not FedAvg:
        losses = node.answer(asked).header["losses"]
        assert {len(values) for each in losses.values() for values in each} == {1}


def test_a_node_compares_delta_with_its_examples(tmp_path, monkeypatch):
    """The server does not know how many there are where clients weigh the same."""
    protect(monkeypatch, lambda: FedAvg("uniform"), delta=0.3)
    with pytest.raises(TimeoutError, match=r"DPSGD: delta=0\.3 is not below one over the \d+ examples"):
        run_deployed("protected", tmp_path)


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).tolist()


def test_the_seed_gives_neither_noise_nor_cohorts_of_a_private_mean_whose_epsilon_lasts(tmp_path):
    """The server finds the noise that the emulator finds, and a node, which counts no rounds, looks for none."""
    emulated, cohorts, ends = emulate("budget", tmp_path / "emulated")[1], set(), set()
    for name in ("first", "second", "third"):
        module, loop, there = run_deployed("budget", tmp_path / name)
        assert loop.privacy.noise == emulated.privacy.noise == {"": loop.aggregation.noise}
        assert loop.privacy.rounds == emulated.privacy.rounds == {(4, 10): 3}
        assert 0.999 * 20 < loop.aggregation.spent(loop.privacy.rounds) <= 20
        cohorts.add(str([(row["round"], row["client"]) for row in visits_of(tmp_path / name / "server")]))
        ends.add(str(weights(module)))
    assert len(ends) == 3
    assert len(cohorts) > 1  # of three rounds with four of ten clients
    for node in there.homes.values():
        mean = node._settings["aggregation"]
        assert isinstance(mean, PrivateMean)
        with refusal("a run sets the noise"):
            mean.noise  # noqa: B018


def test_clients_in_turn_are_known_and_the_correlated_noise_is_secret(tmp_path, monkeypatch):
    module, emulated = emulate("in_turn", tmp_path / "emulated")
    turns = [(row["round"], row["client"]) for row in visits_of(tmp_path / "emulated")]
    ends = [run_deployed("in_turn", tmp_path / name) for name in ("first", "second")]
    for name, (_, loop, _) in zip(("first", "second"), ends, strict=True):
        assert [(row["round"], row["client"]) for row in visits_of(tmp_path / name / "server")] == turns
        assert loop.privacy.asked == emulated.privacy.asked
    assert len({str(weights(each)) for each in (module, ends[0][0], ends[1][0])}) == 3
    # With noise from the seed a server that was started again ends as the emulator does: the noises are in its checkpoint.
    monkeypatch.setattr(Private, "keep_secret", lambda self: None)
    there = Here(two_nodes("in_turn", tmp_path / "stopped"))

    def stop():
        raise InterruptedError

    after_visits(there, 4, stop)
    with pytest.raises(InterruptedError):
        deploy("in_turn", tmp_path / "stopped" / "server", there)
    again = Here(two_nodes("in_turn", tmp_path / "stopped"))
    assert left_by(*deploy("in_turn", tmp_path / "stopped" / "server", again)) == left_by(module, emulated)
    assert {one.asked.header["round"] for one in again.of("visit")} == {2}


def test_a_node_that_comes_later_may_change_the_turns(tmp_path):
    homes = {number: make_node("in_turn", tmp_path / str(number), (number, 5)) for number in range(5)}
    late = homes.pop(4)
    there = Here(homes)

    after_visits(there, 1, lambda: there.homes.update({4: late}))
    with refusal("again before bands=2 rounds are over, because clients have come or gone"):
        deploy("in_turn", tmp_path / "server", there)
    # The second cohort has nobody of the first.
    assert {one.asked.header["round"] for one in there.of("visit")} == {0, 1}
