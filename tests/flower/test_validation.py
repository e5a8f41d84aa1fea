import csv
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
from changed_messages import after_visits, changed, with_header, with_payload
from judges import MARGINS, Grouping, Judge, Margins
from nodes_here import ALL_KINDS, Here, Kind, MadeParts, deploy, emulate, make_node, two_nodes
from tastes import Adapters, Tastes

from fedlight import FedAvg, FedBiscuit, Limits
from fedlight.callbacks.logs.client_accuracy import ClientAccuracy, Tally
from fedlight.flower.loops.validation import Validated, mean_vote, means_of, sum_of_votes, to_send, votes_of
from fedlight.flower.messages import Parcel, Refused
from fedlight.flower.parts import judge_of

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches

LIFTED = Limits(share=None, norm=None)  # the emulator has none
METRICS = [f"val/{own}client_{name}" for own in ("", "own_") for name in ("mean", "worst_tenth", "std")]


def judged(
    algorithm=Grouping, selectors=3, data=Margins, callbacks=lambda: [ClientAccuracy()], loop=None, **settings
):
    return Kind(
        {"algorithm": algorithm(), "clients_per_round": 2, "local_steps": 2, "limits": LIFTED} | (loop or {}),
        lambda: Judge(selectors),
        data,
        settings={"limit_val_batches": 1.0, **settings},
        callbacks=callbacks,
    )


@pytest.fixture
def kind(monkeypatch):
    """Function that defines the kind of run ``judged``."""

    def define(**how):
        monkeypatch.setitem(ALL_KINDS, "judged", lambda root: judged(**how))
        return "judged"

    return define


def rows(folder):
    """Return the rows without the known groups, which a server learns only where it assigns by them."""
    read = csv.DictReader((folder / "clients.csv").read_text().splitlines())
    return [{key: value for key, value in row.items() if key != "group"} for row in read]


@pytest.mark.parametrize(("selectors", "every"), [(3, 1), (1, 2)])
def test_the_numbers_are_the_emulators(tmp_path, kind, selectors, every):
    algorithm = Grouping if selectors == 3 else FedAvg
    name = kind(algorithm=algorithm, selectors=selectors, check_val_every_n_epoch=every)
    module, _ = emulate(name, tmp_path / "emulated")
    there = Here(two_nodes(name, tmp_path))
    deployed, loop = deploy(name, tmp_path / "server", there)
    assert not loop.nodes.refused
    assert len(there.of("validate")) == 2 * (3 // every)
    assert len([*(tmp_path / "server/checkpoints").iterdir()]) == 3  # as often as without a validation
    assert rows(tmp_path / "server") == rows(tmp_path / "emulated")
    assert len(rows(tmp_path / "server")) == 4 * (3 // every)
    expected, logged = module.trainer.callback_metrics, deployed.trainer.callback_metrics
    for metric in METRICS if selectors == 3 else METRICS[:3]:
        assert logged[metric] == expected[metric]
    assert logged["fed/not_validated"] == 0
    last = [one for one in there.of("validate") if one.asked.header["round"] == every * (3 // every) - 1]
    assert logged["fed/validation_bytes_down"] == sum(one.asked.num_bytes for one in last)
    assert logged["fed/validation_bytes_up"] == sum(one.answer.num_bytes for one in last)
    right = sum(float(row["accuracy"]) * int(row["examples"]) for row in rows(tmp_path / "server")[-4:])
    assert float(logged["val/accuracy"]) == pytest.approx(right / 10)


class ValidatesOne(Adapters):
    """The selector that is active is validated, whichever it is."""

    def validation_step(self, batch, batch_idx):
        losses = self.example_losses(batch)
        self.log("val/loss", losses.mean(), batch_size=len(losses))
        return {"correct": (losses[:, None] < 1.0).expand(-1, 2), "vote": losses < 1.0}


class ValidateAll(Tastes):
    def setup(self, stage):
        super().setup(stage)
        self.val_client_indices = {
            name: np.concatenate([self.client_indices[name], own])
            for name, own in self.val_client_indices.items()
        }


def test_nodes_validate_the_selector_that_the_emulator_does(tmp_path, monkeypatch):
    """The last client that one of the nodes visits trains the second one."""

    def made(root):
        loop = {"algorithm": FedBiscuit(1, 1), "clients_per_round": 5, "local_steps": 2, "limits": LIFTED}
        settings = {"limit_val_batches": 1.0}
        return Kind(
            loop,
            lambda: ValidatesOne(2),
            lambda: ValidateAll(batch_size=4),
            settings,
            lambda: [ClientAccuracy()],
        )

    monkeypatch.setitem(ALL_KINDS, "one_active", made)
    module, _ = emulate("one_active", tmp_path / "emulated")
    deployed, _ = deploy("one_active", tmp_path / "server", Here(two_nodes("one_active", tmp_path)))
    losses = [float(each.trainer.callback_metrics["val/loss"]) for each in (module, deployed)]
    assert losses[0] == pytest.approx(losses[1])


def first_changed(value):
    """Return a change of the results that node 1 sends of its first client."""

    def change(answer):
        results = answer.header["validated"]
        first = min(results)
        return with_header("validated", results | {first: value(results[first])}, answer)

    return changed("validate", 1, change)


def with_tally(**fields):
    return lambda entry: entry | {"tally": entry["tally"] | fields}


HOSTILE = {
    "no_entry": lambda entry: 5,
    "no_tally": lambda entry: {"validation": {}, "tally": []},
    "no_metrics": lambda entry: {"tally": None},
    "more_than_right": with_tally(vote=1.5),
    "less_than_wrong": with_tally(correct=[-0.1, 0.5, 0.5]),
    "a_text": with_tally(correct=["1", "1", "1"]),
    "no_selector": with_tally(correct=[]),
    "many_selectors": with_tally(correct=[1.0] * 1001),
    "no_rows": with_tally(examples=0),
    "a_billion_rows": with_tally(examples=10**9),
    "a_truth_value": with_tally(examples=True),
    "an_infinite_sum": lambda entry: entry | {"validation": {"val/loss": [1e300, 1]}},
    "no_count": lambda entry: entry | {"validation": {"val/loss": [1.0, 0]}},
    "a_loader": lambda entry: entry | {"validation": {"val/x/dataloader_idx_0": [1.0, 1]}},
    "a_long_name": lambda entry: entry | {"validation": {"x" * 101: [1.0, 1]}},
    "many_metrics": lambda entry: entry | {"validation": {f"m{i}": [1.0, 1] for i in range(101)}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_results_that_do_not_fit_are_refused_and_the_others_are_taken(tmp_path, kind, name):
    there = Here(two_nodes(kind(), tmp_path), first_changed(HOSTILE[name]))
    module, loop = deploy("judged", tmp_path / "server", there, 1)
    assert loop.rounds_done == 1
    assert sum(loop.nodes.refused.values()) == 1
    served = there.of("validate")[0].asked.header["shares"]
    assert {row["client"] for row in rows(tmp_path / "server")} == {*MARGINS} - {*served}
    assert module.trainer.callback_metrics["fed/not_validated"] == len(served)


def test_fewer_selectors_than_there_are_groups_do_not_end_the_run(tmp_path, kind):
    def change(message):
        answer = deepcopy(message.answer)
        for entry in answer.header.get("validated", {}).values():
            entry["tally"]["correct"] = [1.0]
        return answer

    there = Here(two_nodes(kind(), tmp_path), change)
    module, loop = deploy("judged", tmp_path / "server", there, 3)
    assert loop.rounds_done == 3
    assert module.trainer.callback_metrics["fed/not_validated"] == 4


def test_results_of_another_client_are_refused(tmp_path, kind):
    def change(answer):
        results = answer.header["validated"]
        return with_header("validated", {"zoe": results[min(results)]}, answer)

    there = Here(two_nodes(kind(), tmp_path), changed("validate", 1, change))
    _, loop = deploy("judged", tmp_path / "server", there, 1)
    assert [*loop.nodes.refused] == ["it has validated 'zoe', which it was not asked for"]


def test_one_client_has_no_more_than_its_share_of_the_means():
    results = {f"c{i}": Validated({"val/loss": (10.0, 10)}, Tally(10, [0.5], 0.5)) for i in range(9)}
    liar = Validated({"val/loss": (3e9, 10**9 - 1), "val/made_up": (1.0, 1)}, Tally(10**9 - 1, [1.0], 1.0))
    means, tallies = means_of({**results, "liar": liar}, Limits(share=0.3))
    assert means == pytest.approx({"val/loss": 0.7 + 3 * 0.3, "val/accuracy": 0.5 * 0.7 + 0.3}, rel=1e-6)
    assert len(tallies) == 10
    ones = {f"c{i}": Validated({}, Tally(1 + 99 * (i > 4), [0.0], 0.0)) for i in range(9)}
    means, _ = means_of({**ones, "liar": liar}, Limits(share=0.3))  # beside small clients too
    assert means == pytest.approx({"val/accuracy": 0.3})


def test_a_number_of_selectors_that_few_have_does_not_count():
    results = {name: Validated({}, Tally(2, [0.5, 1.0], None)) for name in "abc"}
    results["d"] = Validated({}, Tally(2, [1.0] * 3, 1.0))
    means, tallies = means_of(results, Limits())
    assert (means, [*tallies]) == ({}, ["a", "b", "c"])
    assert means_of({}, Limits()) == ({}, {})
    del results["a"], results["b"]
    assert means_of(results, Limits()) == ({}, {})  # one against one


@pytest.mark.parametrize("selectors", [2, 3])
def test_a_vote_that_few_have_does_not_count(selectors):
    results = {name: Validated({}, Tally(2, [0.5] * selectors, None)) for name in "abc"}
    liar = Tally(2, [0.5] * selectors, 1.0)
    means, tallies = means_of(results | {"d": Validated({}, liar)}, Limits())
    assert (means, {each.vote for each in tallies.values()}) == ({}, {None})
    means, tallies = means_of({"d": Validated({}, liar)}, Limits())  # an even number has none
    assert (means, tallies["d"].vote) == (({}, None) if selectors == 2 else ({"val/accuracy": 1.0}, 1.0))


def test_names_that_are_the_servers_do_not_count():
    names = ["val/client_mean", "val/own_client_std", "fed/dropped", "train/loss", "epoch", "val/loss"]
    means, _ = means_of({"a": Validated(dict.fromkeys(names, (1.0, 1)), None)}, Limits())
    assert means == {"val/loss": 1.0}


def test_a_loss_that_is_not_finite_is_not_sent_nor_numbers_of_rows_where_all_clients_count_alike():
    sums = {"val/loss": (float("nan"), 4), "val/error": (-float("inf"), 4), "val/margin": (2.0, 4)}
    for counts in (False, True):
        sent = to_send({"a": Validated(sums, None)}, counts)
        assert [*sent["a"]["validation"]] == ["val/margin"]
    sent = to_send({"a": Validated({"val/loss": (6.0, 4)}, Tally(4, [0.25], 0.25))}, counts=False)
    tally = {"examples": 1, "correct": [0.25], "vote": 0.25, "mixed": None}
    assert sent == {"a": {"validation": {"val/loss": [1.5, 1]}, "tally": tally}}


class Loaders(Margins):
    def val_dataloader(self):
        return [super().val_dataloader()] * 2


def test_of_several_loaders_the_first_is_validated(tmp_path, kind):
    _, loop = deploy(kind(data=Loaders), tmp_path / "server", Here(two_nodes("judged", tmp_path)), 1)
    assert not loop.nodes.refused
    assert {row["client"] for row in rows(tmp_path / "server")} == {*MARGINS}


class NoClients(Margins):
    def __init__(self):
        super().__init__(knows=False)


def test_nodes_that_do_not_know_whose_rows_they_are_send_nothing_and_that_is_said(tmp_path, kind, caplog):
    caplog.set_level("INFO")
    there = Here(two_nodes(kind(data=NoClients), tmp_path))
    module, loop = deploy("judged", tmp_path / "server", there)
    assert not loop.nodes.refused
    assert caplog.text.count("no device has sent results of validation rows") == 1
    assert module.trainer.callback_metrics["fed/not_validated"] == 4


class WithRows(Margins):
    val_rows = ("rows.jsonl", "train")


def test_that_nodes_validate_nothing_beside_the_servers_rows_is_said(tmp_path, kind, caplog):
    caplog.set_level("INFO")
    parts = MadeParts([f"--kind={kind(data=WithRows)}", f"--trainer.default_root_dir={tmp_path}"], bool)
    assert judge_of(parts, parts.new_trainer([parts.loop])) is None
    assert "nodes validate nothing: data.split.val_source has rows of the server" in caplog.text


def masked_run(tmp_path, change=lambda message: message.answer, number=3, prepare=lambda there: None):
    numbers = range(number)
    nodes = {n: make_node("judged", tmp_path / f"node{n}", (n, number), secure=True) for n in numbers}
    there = Here(nodes, change)
    prepare(there)
    module, loop = deploy("judged", tmp_path / "server", there, 2, secure=True)
    return module.trainer.callback_metrics, loop, there


def everybody(kind):
    """FedAvg with all four clients in a round, one or two on each of three nodes."""
    kind(algorithm=FedAvg, loop={"clients_per_round": 4})


def test_of_masked_results_the_mean_alone_reaches_the_server(tmp_path, kind):
    everybody(kind)
    module, _ = emulate("judged", tmp_path / "emulated", 2)
    logged, loop, there = masked_run(tmp_path)
    assert not loop.nodes.refused
    exact = float(module.trainer.callback_metrics["val/client_mean"])
    assert float(logged["val/client_mean"]) == pytest.approx(exact, abs=1 / 128)
    assert 0 < logged["val/client_mean"] < 1
    assert logged["fed/not_validated"] == 0
    assert not {"val/client_std", "val/client_worst_tenth", "val/accuracy"} & logged.keys()
    assert not (tmp_path / "server/clients.csv").exists()
    for one in there.of("validate"):
        fields = {"format", "action", "run", "round", "nonce", "validated"}
        assert (one.answer.header.keys(), [*one.answer.payloads]) == (fields, ["masked"])
        assert {*one.answer.header["validated"]} <= {*MARGINS}


class OfOneNode(Margins):
    def setup(self, stage):
        super().setup(stage)
        self.val_client_indices = {"a": self.client_indices["a"]}


def test_where_masked_results_can_have_no_sum_that_is_said_once(tmp_path, kind, caplog):
    kind(algorithm=FedAvg, data=OfOneNode, loop={"clients_per_round": 4})
    logged, loop, there = masked_run(tmp_path)
    assert loop.rounds_done == 2
    assert len(there.of("validate")) == 3
    assert caplog.text.count("1 of 3 nodes have validation rows, too few for a sum") == 1
    assert "val/client_mean" not in logged


class OfThreeNodes(Margins):
    def setup(self, stage):
        super().setup(stage)
        self.val_client_indices = {name: self.client_indices[name] for name in "abc"}


def test_a_node_that_is_away_for_one_masked_validation_ends_no_later_one(tmp_path, kind):
    kind(algorithm=FedAvg, data=OfThreeNodes, loop={"clients_per_round": 4})

    def prepare(there):
        def leave():
            gone = there.homes.pop(0)
            there.before = lambda: len(there.of("validate")) < 3 or there.homes.setdefault(0, gone)

        after_visits(there, 4, leave)

    logged, _, there = masked_run(tmp_path, number=4, prepare=prepare)
    assert [one.node for one in there.of("validate")] == [1, 2, 3, 0, 1, 2, 3]
    assert 0 < logged["val/client_mean"] < 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (partial(with_header, "validated", ["zoe"]), "it has validated other clients than it was asked for"),
        (partial(with_header, "validated", [7]), "it has validated other clients than it was asked for"),
        (lambda answer: Parcel(answer.header), "its masked sum is not 2 elements of 24 bytes"),
        (
            partial(with_payload, lambda data: b"1" * 48),
            "the sum of the nodes is not that of the clients that",
        ),
    ],
)
def test_a_broken_masked_sum_leaves_a_round_without_validation(tmp_path, kind, change, reason):
    everybody(kind)
    logged, loop, _ = masked_run(tmp_path, changed("validate", 1, change))
    assert loop.rounds_done == 2
    assert any(each.startswith(reason) for each in loop.nodes.refused)
    assert "val/client_mean" not in logged
    assert logged["fed/not_validated"] == 4


def test_a_mean_that_is_no_share_is_refused():
    assert mean_vote(sum_of_votes({"a": 0.5, "b": 1.0}).partial()) == 0.75
    with pytest.raises(Refused, match="the mean share of right answers is 2: a node has sent another sum"):
        mean_vote(sum_of_votes({"a": 3.0, "b": 1.0}).partial())
    votes = votes_of({"a": Validated({}, Tally(3, [1 / 3], 1 / 3)), "b": Validated({}, Tally(1, [1.0], 1.0))})
    assert votes == {"a": 21 / 64, "b": 1.0}  # a third is no multiple of one over 64
    with pytest.raises(Refused, match="gives no 'vote'"):
        votes_of({"a": Validated({"val/loss": (1.0, 1)}, None)})


@pytest.mark.parametrize(
    "settings",
    [
        {"limit_val_batches": 1},
        {"limit_val_batches": 0.5},
        {"check_val_every_n_epoch": None, "val_check_interval": 2},
    ],
)
def test_a_part_of_the_rows_is_refused_before_a_node_is_asked(tmp_path, kind, settings):
    there = Here(two_nodes(kind(**settings), tmp_path))
    with pytest.raises(ValueError, match=r"leave trainer\.limit_val_batches out"):
        deploy("judged", tmp_path / "server", there)
    assert not there.messages


class Derived(ClientAccuracy):
    """One of a user's own."""


def test_a_derived_callback_is_known_at_both_ends(tmp_path, kind):
    there = Here(two_nodes(kind(callbacks=lambda: [Derived()]), tmp_path))
    module, loop = deploy("judged", tmp_path / "server", there, 1)
    assert not loop.nodes.refused
    assert module.trainer.callback_metrics["fed/not_validated"] == 0


def test_results_without_anything_in_them_are_no_validation(tmp_path, kind):
    change = first_changed(lambda entry: {"validation": {}, "tally": None})
    module, _ = deploy(kind(), tmp_path / "server", Here(two_nodes("judged", tmp_path), change), 1)
    assert module.trainer.callback_metrics["fed/not_validated"] == 1


def test_where_validation_is_off_the_callback_is_not_named(tmp_path, kind, caplog):
    caplog.set_level("INFO")
    there = Here(two_nodes(kind(limit_val_batches=0), tmp_path))
    deploy("judged", tmp_path / "server", there, 1)
    assert not there.of("validate")
    assert "trainer.limit_val_batches=0 has nodes validate nothing" in caplog.text


def test_without_the_callback_nodes_are_not_asked(tmp_path, kind):
    there = Here(two_nodes(kind(callbacks=tuple, algorithm=FedAvg), tmp_path))
    deploy("judged", tmp_path / "server", there, 1)
    assert not there.of("validate")
    assert {one.asked.header["action"] for one in there.messages} == {"join", "visit"}
    for secure in (False, True):  # a server with other settings learns no accuracies
        node = make_node("judged", tmp_path / f"other{secure}", secure=secure)
        with pytest.raises(Refused, match="'validate' is unknown, or this node's settings do not allow it"):
            node.answer(Parcel({"action": "validate", "run": "r"}))
