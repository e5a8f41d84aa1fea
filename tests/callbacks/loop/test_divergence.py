import lightning as L
import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from memories import loop_with
from plain_lightning import Metrics, Numbers, Regression, assert_equal, seeded, ten_clients, trainer, weights
from refusals import refusal
from synthesizing import Synthesizing
from tiny_world import table

from fedlight import CoordinateMedian, FedAdam, FedAvgM, TrimmedMean, VisitLog, Wire
from fedlight.callbacks.progress.run_summary import device_totals, traffic
from fedlight.datamodules.federated import FederatedWrapper
from fedlight.federation import Average, Identity, PrivateMean, Quantize, TopK, Update, Visit
from fedlight.federation.algorithms import FedAvg, FedProx, LocalOnly, Scaffold
from fedlight.federation.algorithms.self_made import FewFedPIT, FewFedWeight

NAN, INF = float("nan"), float("inf")


class Bomb(Regression):
    """At the visits that ``when`` names, the loss is multiplied so that the gradients are no numbers."""

    def __init__(self, when, factor=NAN, **kwargs):
        super().__init__(**{"dropout": 0.0, "optimizer": "SGD"} | kwargs)
        self.when, self.factor = when, factor

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        visit = self.loop.visit  # none while costs are measured
        return loss * self.factor if visit and self.when(self.loop.rounds_done, visit) else loss


def never(round_idx, visit):
    return False


def those(bad):
    """The visits of clients that are named by round."""
    return lambda round_idx, visit: visit.client_id in bad.get(round_idx, ())


def without(algorithm, when):
    """The same algorithm, which does not ask the clients that would diverge."""
    plan = algorithm.plan

    def careful(round_idx, cohort, num_batches):
        return plan(round_idx, [c for c in cohort if not when(round_idx, Visit(c.id, 1))], num_batches)

    algorithm.plan = careful
    return algorithm


def run(model, algorithm=None, rounds=3, data=None, callbacks=(), ckpt_path=None, settings=None, **loop):
    loop = loop_with(algorithm=algorithm or FedAvg(), **({"clients_per_round": 4, "local_steps": 2} | loop))
    model.loop = loop
    t = trainer(rounds, [loop, *callbacks], **(settings or {}))
    t.fit(model, data or FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
    return model, loop


def bomb(*args):
    return seeded(Bomb, *args)


def cohorts(rounds=3):
    """Who is asked in each round."""
    seen = {}

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.setdefault(trainer.current_epoch, set()).add(pl_module.loop.visit.client_id)

    run(bomb(never), callbacks=[Watch()], rounds=rounds)
    return seen


@pytest.fixture(scope="module")
def bad():
    """Somebody in round 1, who comes back in a later one; and two in round 2."""
    asked = cohorts(6)
    first = sorted(asked[1])[1]
    return {1: {first}, 2: set(sorted(asked[2])[:2])}


@pytest.fixture(scope="module")
def out(bad):
    """Who diverges in round 1."""
    return min(bad[1])


def left_out(loop):
    return [(row["client"], row["bytes_up"]) for row in loop.visit_records if row["reason"]]


CASES = {
    "unbiased": {},
    "normalized": {"algorithm": lambda: FedAvg("normalized")},
    "uniform": {"algorithm": lambda: FedAvg("uniform")},
    "prox": {"algorithm": FedProx},
    "scaffold": {"algorithm": Scaffold},
    "local": {"algorithm": LocalOnly},
    "momentum": {"server": lambda: FedAvgM(beta=0.9)},
    "adam": {"server": lambda: FedAdam(lr=0.1)},
    "median": {"aggregation": CoordinateMedian},
    "trimmed": {"aggregation": lambda: TrimmedMean(0.3)},
    "private": {"aggregation": lambda: PrivateMean(1.0, 0.5)},
    "top-k": {"channel": lambda: Wire(up=[TopK(0.2), Quantize("int8")])},
    "int8": {"channel": lambda: Wire(up=Quantize("int8", error_feedback=True), down=Quantize("int8"))},
}


def numbers(loop):
    """What the loop remembers, without the settings."""
    return {name: value for name, value in loop.state_dict().items() if name != "federation"}


@pytest.mark.parametrize(
    ("case", "factor"),
    [*((case, NAN) for case in CASES), *((case, INF) for case in ("adam", "private", "top-k"))],
)
def test_a_run_equals_one_in_which_who_diverges_is_not_asked(case, factor, bad, caplog):
    """Global model, clients' memories, what algorithm and server remember: bit for bit."""

    def settings():
        made = {name: make() for name, make in CASES[case].items()}
        return made.pop("algorithm", None) or FedAvg(), made

    algorithm, options = settings()
    model, loop = run(bomb(those(bad), factor), algorithm, rounds=5, **options)
    algorithm, options = settings()
    expected, careful = run(bomb(never), without(algorithm, those(bad)), rounds=5, **options)
    assert_equal(weights(model), weights(expected))
    assert all(value.isfinite().all() for value in weights(model).values())
    states = numbers(loop), numbers(careful)
    for of in states:
        of["algorithm"] |= {}
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)
    named = [record.message for record in caplog.records if "diverged" in record.message]
    assert len(named) == 2  # one for each round
    assert named[0].startswith(
        f"round 2: 1 of 4 clients diverged and are left out: {min(bad[1])} (NaN or Inf"
    )
    assert "lr=0.05, trainer.gradient_clip_val=None: lower the learning rate" in named[0]
    assert ", ".join(sorted(bad[2])) in named[1]


def test_what_is_logged(tmp_path, bad):
    metrics, settings = Metrics(), {"default_root_dir": tmp_path}
    model, _ = run(bomb(those(bad)), callbacks=[VisitLog(), metrics], settings=settings)
    rows = table(tmp_path / "visits.csv")
    assert {(int(row["round"]), row["client"]) for row in rows if row["reason"]} == {
        (number, client) for number, clients in bad.items() for client in clients
    }
    one_way = Identity().up_bytes(weights(model))
    for row in rows:
        out = row["reason"] == "diverged"
        assert (row["bytes_down"], row["bytes_up"]) == (str(one_way), "0" if out else str(one_way))
        assert (row["loss"] == "") == out
        assert row["reason"] in ("", "diverged")
    logged = [[row[f"fed/{name}"] for name in ("clients", "diverged", "bytes_up")] for row in metrics.rounds]
    assert logged == [[4, 0, 4 * one_way], [3, 1, 3 * one_way], [2, 2, 2 * one_way]]
    for number, loss in enumerate(row["fed/loss"] for row in metrics.rounds):
        known = [float(row["loss"]) for row in rows if row["round"] == str(number) and row["loss"]]
        assert loss == pytest.approx(sum(known) / len(known))
    assert traffic(rows).endswith("clients, of which 3 visits diverged")


def test_on_devices(tmp_path, bad, caplog):
    """The round takes as long as planned; nothing was sent, so less energy was spent."""
    metrics, fleet, settings = Metrics(), make_fleet(tmp_path, fast={}), {"default_root_dir": tmp_path}
    model, loop = run(bomb(those(bad)), callbacks=[VisitLog(), metrics], fleet=fleet, settings=settings)
    plain, _ = run(bomb(those(bad)))
    assert_equal(weights(model), weights(plain))
    assert loop.virtual_seconds > 0
    assert [row["fed/diverged"] for row in metrics.rounds] == [0, 1, 2]
    assert metrics.rounds[0]["fed/round_seconds"] == metrics.rounds[1]["fed/round_seconds"]
    rows = table(tmp_path / "visits.csv")
    assert {row["upload_seconds"] for row in rows if row["reason"]} == {"0.0"}
    totals = device_totals(rows)["fast"]
    assert (len(totals.asked), totals.took_part, totals.dropped["diverged"]) == (12, 9, 3)
    assert "the clock of its rounds is off" not in caplog.text


def test_when_all_diverge_the_run_ends_with_the_last_good_model(tmp_path):
    save = ModelCheckpoint(tmp_path, save_last=True)
    settings = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    good, _ = run(bomb(never), rounds=2)
    model = bomb(lambda round_idx, visit: round_idx == 2)
    with refusal(
        r"round 3: all 4 clients diverged \(NaN or Inf in what they trained; c\d: trained net\.0\.weight is not "
        r"finite\).*"
        r"lr=0\.05, trainer\.gradient_clip_val=None: lower the learning rate, or set trainer\.gradient_clip_val"
    ):
        run(model, rounds=5, callbacks=[save], settings=settings)
    assert_equal(weights(model), weights(good))
    assert_equal(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"], dict(good.state_dict()))


def test_a_server_that_leaves_the_numbers_ends_the_run_with_the_last_good_model():
    """Its clients are fine; the second step is more than fp32 can hold."""

    class Overshoots(Average):
        def step(self, state, movement):
            state, self.lr = super().step(state, movement), 1e300
            return state

    good, _ = run(bomb(never), rounds=1)
    model = bomb(never)
    with refusal(r"round 2: net\.\S+ of the global model is not finite after the step of Overshoots"):
        run(model, server=Overshoots())
    assert_equal(weights(model), weights(good))


@pytest.mark.parametrize("split", ["train", "synthetic"])
@pytest.mark.parametrize("scorer", ["private", "global"])
def test_fewfedpit_leaves_out_a_client_of_which_one_visit_diverges(split, scorer, out):
    def when(round_idx, visit):
        return (round_idx, visit.client_id, visit.split) == (1, out, split)

    rows = []
    watch = LambdaCallback(on_train_epoch_end=lambda _, model: rows.extend(model.loop.visit_records))
    model, _ = run(bomb(when), FewFedPIT(0.5, scorer), data=Synthesizing(), callbacks=[watch])
    not_asked = without(FewFedPIT(0.5, scorer), those({1: [out]}))
    expected, _ = run(bomb(never), not_asked, data=Synthesizing())
    assert_equal(weights(model), weights(expected))
    own = [row for row in rows if (row["round"], row["client"]) == (1, out)]
    assert [(row["split"], row["reason"], row["bytes_up"], row["loss"]) for row in own] == [
        ("train", "diverged", 0, ""), ("synthetic", "diverged", 0, ""),
    ]  # fmt: skip
    assert sum(row["reason"] == "diverged" for row in rows) == 2


def test_a_loss_that_weights_a_client_must_be_a_number(out):
    """Of FewFedWeight it is part of what is sent; the parameters are fine here."""

    class Quiet(Bomb):
        def training_step(self, batch, batch_idx):
            loss = Regression.training_step(self, batch, batch_idx)
            if self.when(self.loop.rounds_done, self.loop.visit):
                return loss + (NAN - loss.detach())  # the gradient is that of the loss
            return loss

    model, loop = run(seeded(Quiet, those({1: [out]})), FewFedWeight(), 2, Synthesizing())
    assert [client for client, _ in left_out(loop)] == [out]
    assert all(value.isfinite().all() for value in weights(model).values())


def test_what_arrives_is_looked_at_as_well(out):
    """A wire that breaks a movement: nothing of it reaches the algorithm."""

    class Broken(Identity):
        def up(self, received, trained, client, without_feedback=()):
            payload = super().up(received, trained, client)
            if client.id == out:
                payload.state["net.0.bias"][0] = INF
            return payload

    class Sees(FedAvg):
        def finish_visit(self, visiting, movement, work):
            assert visiting.client.id != out
            return super().finish_visit(visiting, movement, work)

    _, loop = run(bomb(never), Sees(), 2, channel=Broken())
    assert left_out(loop) == [(out, 0)]


def test_a_weight_that_is_no_number_leaves_a_client_out(out):
    class Odd(FedAvg):
        def finish_visit(self, visiting, movement, work):
            client = visiting.client
            return Update(client.id, movement, NAN if client.id == out else client.share)

    _, loop = run(bomb(never), Odd(), 2)
    assert left_out(loop) == [(out, 0)]
