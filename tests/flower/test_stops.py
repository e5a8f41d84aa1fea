import random
import re
import shutil
from functools import partial
from unittest import mock

import pytest
from changed_messages import after_visits, changed, lost, with_header
from lightning.pytorch.callbacks import EarlyStopping
from nodes_here import ALL_KINDS, Here, deploy, emulate, left_by, memories_of, two_nodes, visits_of
from shared_runs import Kind, digest

from fedlight.callbacks.loop.run import Run
from fedlight.devices.outcomes import took_part
from fedlight.flower.loops.node_loop import NodeRun

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches


class Killed(Exception):
    """Stands for the end of the server's process."""


class Fragile(Here):
    """Transport that ends the server at a number of messages: before they are sent, or when they are answered."""

    at, after = None, False

    def pull(self, asked, seconds):
        self.at = None if self.at is None else self.at - 1
        if self.at == 0 and not self.after:
            raise Killed
        found = super().pull(asked, seconds)
        if self.at == 0:
            raise Killed
        return found


def quiet(name, folder, rounds):
    """Return what a run without a stop leaves: digests of the server, rows, and digests of the clients' memories."""
    module, loop = deploy(name, folder / "server", Here(two_nodes(name, folder)), rounds)
    return outcome(folder, module, loop)


def outcome(folder, module, loop):
    memories = {client: digest(kept) for client, kept in memories_of(folder, loop).items()}
    return left_by(module, loop), visits_of(folder / "server"), memories


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rounds", "stops"), [("scaffold", 5, 5), ("fewfedpit", 3, 3), ("fedbiscuit", 5, 2)]
)
def test_a_server_stopped_at_random_moments_ends_as_one_that_was_not(tmp_path, name, rounds, stops):
    expected = quiet(name, tmp_path / "quiet", rounds)
    folder, draws = tmp_path / "stopped", random.Random(name)
    homes = two_nodes(name, folder)
    for _ in range(stops):
        there = Fragile(homes)
        there.at, there.after = draws.randint(2, 6), draws.random() < 0.5
        try:
            module, loop = deploy(name, folder / "server", there, rounds)
            break
        except Killed:
            homes = two_nodes(name, folder)  # their processes are others as well
    else:
        module, loop = deploy(name, folder / "server", Here(homes), rounds)
    assert outcome(folder, module, loop) == expected


@pytest.mark.parametrize(("name", "live_on"), [("scaffold", False), ("frozen_fp16", True)])
def test_a_server_stopped_between_answers_and_checkpoint_asks_again(tmp_path, name, live_on):
    """The nodes have saved what the server has never taken, once in each round."""
    expected = quiet(name, tmp_path / "quiet", 3)
    folder = tmp_path / "stopped"
    homes = two_nodes(name, folder)
    for at in (2, 3, 3):
        there = Fragile(homes)
        there.at, there.after = at, True
        with pytest.raises(Killed):
            deploy(name, folder / "server", there, 3)
        homes = homes if live_on else two_nodes(name, folder)
    module, loop = deploy(name, folder / "server", Here(homes), 3)
    assert outcome(folder, module, loop) == expected


@pytest.mark.parametrize(
    ("name", "node"), [("scaffold", 2), ("hetlora_alike", 1)]
)  # the first row is of node 1
def test_a_lost_reply_drops_its_clients_and_their_memory_is_that_from_before(tmp_path, name, node):
    """A client whose reply was lost in a round goes on as if it had not been asked in that round."""

    def lose_in(folder, silent):
        change = lost("none" if silent else "visit", node, round_idx=1, answer=None)
        there = Here(two_nodes(name, folder), change)
        if silent:  # the node does not even train
            home = there.homes[node]
            answer = home.answer

            def away(asked):
                if asked.header.get("round") == 1 and asked.header["action"] == "visit":
                    raise OSError("away")
                return answer(asked)

            home.answer = away
        module, loop = deploy(name, folder / "server", there, 4, deadline_seconds=5)
        return outcome(folder, module, loop), loop

    (state, rows, memories), loop = lose_in(tmp_path / "lost", silent=False)
    (expected, others, kept), _ = lose_in(tmp_path / "away", silent=True)
    assert state == expected
    assert memories == kept
    reasons = {row["reason"] for row in rows if row["round"] == "1"}
    assert reasons == {"", "dropped: no answer in time, or the node is gone"}
    assert [row["client"] for row in rows] == [row["client"] for row in others]
    assert loop.nodes.refused == {"no answer in time, or the node is gone": 1}
    assert loop.rounds_done == 4


@pytest.mark.parametrize(("name", "clients"), [("fedavg", 10), ("nearest", 9), ("soft", 9)])
def test_a_node_that_comes_later_takes_part_from_then_on(tmp_path, name, clients):
    homes = two_nodes(name, tmp_path)
    late = homes.pop(2)
    there = Here(homes)

    after_visits(there, 2, lambda: there.homes.update({2: late}))
    _, loop = deploy(name, tmp_path / "server", there, 6)
    rows = visits_of(tmp_path / "server")
    first = {row["client"] for row in rows if int(row["round"]) < 2}
    assert len(loop.clients) == clients
    assert len(first) < 6
    assert {row["client"] for row in rows} - first
    assert all(took_part(row["reason"]) for row in rows)


@pytest.mark.parametrize("name", ["fedavg", "fedmit"])
def test_a_node_that_goes_is_counted_as_absent_and_the_run_goes_on(tmp_path, name):
    there = Here(two_nodes(name, tmp_path))

    after_visits(there, 4, lambda: there.homes.pop(2, None))
    module, loop = deploy(name, tmp_path / "server", there, 6)
    rows = visits_of(tmp_path / "server")
    absent = [row for row in rows if row["reason"]]
    last = [row for row in absent if row["round"] == "5"]
    assert float(module.trainer.callback_metrics["fed/dropped"]) == len(last) > 0
    assert loop.rounds_done == 6
    assert {row["reason"].partition(":")[0] for row in absent} <= {"absent", "dropped"}
    assert absent
    assert {row["bytes_up"] for row in absent} == {"0"}


def damage(folder):
    for file in folder.rglob("clients/*.pt"):
        file.write_bytes(file.read_bytes()[:-3] + b"abc")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [(shutil.rmtree, r"remembers of round .*give the node the folder that it had"), (damage, "is damaged")],
)
def test_a_node_that_has_lost_its_memories_or_finds_them_damaged_is_refused(tmp_path, harm, reason):
    there = Here(two_nodes("scaffold", tmp_path))
    after_visits(there, 4, lambda: harm(tmp_path / "node2"))
    _, loop = deploy("scaffold", tmp_path / "server", there, 5)
    assert loop.rounds_done == 5
    assert loop.nodes.refused
    assert all(re.search(reason, each) for each in loop.nodes.refused)
    dropped = {row["client"] for row in visits_of(tmp_path / "server") if "dropped" in row["reason"]}
    assert dropped
    assert dropped <= {client for client, node in loop.nodes._home.items() if node == 2}


def test_a_client_whose_memory_is_lost_is_left_out_alone(tmp_path):
    there = Here(two_nodes("scaffold", tmp_path))

    def lose():
        files = sorted((tmp_path / "node2").rglob("clients/*.pt"))
        for file in files:
            if file.name.split("-")[0] == files[0].name.split("-")[0]:
                file.unlink()

    after_visits(there, 6, lose)
    _, loop = deploy("scaffold", tmp_path / "server", there, 8)
    rows = visits_of(tmp_path / "server")
    dropped = [(row["round"], row["client"], row["reason"]) for row in rows if "dropped" in row["reason"]]
    [lonely] = {client for _, client, _ in dropped}
    assert all("give the node the folder that it had" in reason for _, _, reason in dropped)
    rounds = {round_idx for round_idx, _, _ in dropped}
    beside = {row["client"] for row in rows if row["round"] in rounds}
    assert len(beside - {lonely}) >= 2  # others of the round, of the same node too, have been visited
    assert [*loop.nodes.refused.values()] == [len(dropped)] or len(loop.nodes.refused) == len(dropped)


def test_a_node_keeps_no_more_versions_than_the_server_may_ask_for(tmp_path):
    deploy("scaffold", tmp_path / "server", Here(two_nodes("scaffold", tmp_path)), 8)
    by_client = {}
    for file in tmp_path.glob("node*/*/clients/*.pt"):
        by_client.setdefault(file.name.partition("-")[0], []).append(file)
    assert max(map(len, by_client.values())) <= 3


def test_too_few_clients_end_the_start_with_what_nodes_have_said(tmp_path):
    change = changed("join", 2, partial(with_header, "torch", "0.1"))
    homes = two_nodes("fedavg", tmp_path)
    with pytest.raises(TimeoutError, match=r"5 of 10 clients.*its torch is '0.1'"):
        deploy("fedavg", tmp_path / "server", Here(homes, change), min_clients=10)
    with pytest.raises(TimeoutError, match=r"0 of 4 clients are there after 0 s \(no further node"):
        deploy("fedavg", tmp_path / "server", Here({}))


def test_too_few_nodes_for_a_secure_sum_end_the_start(tmp_path):
    with pytest.raises(TimeoutError, match=r"at 2 of the 3 nodes that a secure sum needs .*start more nodes"):
        deploy("fedavg", tmp_path / "server", Here(two_nodes("fedavg", tmp_path)), secure=True)


@pytest.mark.parametrize("name", ["fedbiscuit", "soft"])
def test_clients_that_are_not_scored_are_grouped_by_what_is_known(tmp_path, name):
    _, loop = deploy(name, tmp_path / "server", Here(two_nodes(name, tmp_path), lost("losses", 2)))
    assert loop.rounds_done == 5
    assert sorted(loop.algorithm.groups) == sorted(loop.clients)
    assert set(loop.nodes.refused) == {"lost"}


def test_a_client_whose_losses_are_no_numbers_is_the_only_one_that_is_not_scored(tmp_path):
    homes = two_nodes("fedbiscuit", tmp_path)
    adapter_losses = Run.adapter_losses

    def diverged(self, on, adapters):
        losses = adapter_losses(self, on, adapters)
        losses[1][sorted(losses[1])[0]][0] = float("nan")
        return losses

    with mock.patch.object(NodeRun, "adapter_losses", diverged, create=True):
        module, loop = deploy("fedbiscuit", tmp_path / "server", Here(homes))
    assert float(module.trainer.callback_metrics["fed/unscored"]) == 1
    assert not loop.nodes.refused


def test_deployment_and_emulator_do_not_go_on_from_each_other(tmp_path):
    """The clients' memories would be empty in silence: those of a deployment are on its nodes."""
    deploy("scaffold", tmp_path / "server", Here(two_nodes("scaffold", tmp_path)), 1)
    emulate("scaffold", tmp_path / "emulated", 1)
    with pytest.raises(ValueError, match="of a deployment, and what its clients remember is on their nodes"):
        emulate("scaffold", tmp_path / "other", 2, tmp_path / "server/checkpoints/epoch=0.ckpt")
    with pytest.raises(ValueError, match="of an emulated run, whose clients' memories no node has"):
        deploy("scaffold", tmp_path / "emulated", Here(two_nodes("scaffold", tmp_path)), 2)


def test_a_run_that_has_stopped_early_is_over(tmp_path, monkeypatch):
    def stopping():
        return [EarlyStopping("fed/loss", patience=2, mode="max", check_on_train_epoch_end=True)]

    monkeypatch.setitem(ALL_KINDS, "stopping", lambda root: Kind(callbacks=stopping, rounds=8))
    first, again = (
        deploy("stopping", tmp_path / "server", Here(two_nodes("stopping", tmp_path))) for _ in range(2)
    )
    assert 2 < first[1].rounds_done < 8
    assert again[1].rounds_done == first[1].rounds_done
    assert left_by(*again) == left_by(*first)


def test_an_outage_of_all_nodes_takes_no_round(tmp_path, monkeypatch):
    expected = quiet("scaffold", tmp_path / "quiet", 4)
    there = Here(two_nodes("scaffold", tmp_path / "waited"))
    listed, left = there.nodes, [3]

    def nodes():
        away = len(there.of("visit")) >= 4 and left[0] > 0
        return [] if away else listed()

    monkeypatch.setattr(there, "nodes", nodes)
    monkeypatch.setattr("fedlight.flower.nodes.time.sleep", lambda seconds: left.append(left.pop() - 1))
    made = deploy("scaffold", tmp_path / "waited/server", there, 4, wait_seconds=60)
    assert left == [0]
    assert outcome(tmp_path / "waited", *made) == expected


def test_a_run_whose_clients_nobody_can_score_ends_with_the_remedy(tmp_path):
    there = Here(two_nodes("fedbiscuit", tmp_path), lost("losses"))
    with pytest.raises(ValueError, match="no client was scored"):
        deploy("fedbiscuit", tmp_path / "server", there)
