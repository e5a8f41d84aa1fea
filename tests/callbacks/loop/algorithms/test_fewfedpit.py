import random

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from plain_lightning import Metrics, Numbers, Uploads, assert_equal, module, ten_clients, weights
from synthesizing import Batches, Synthesizing, run, trained_on
from torch.utils.data import TensorDataset
from two_parts import Recorder

from fedlight import FedAvg, FederatedWrapper, FewFedPIT
from fedlight.federation import Identity

SHARES = {name: len(indices) / 120 for name, indices in ten_clients(None).items()}


class Wiretap(Identity):
    """What each visit sends up, in order."""

    def __init__(self):
        self.ups = []

    def up(self, received, trained, client, without_feedback=()):
        self.ups.append((client.id, {name: value.clone() for name, value in trained.items()}))
        return super().up(received, trained, client, without_feedback)


class Spied(FewFedPIT):
    """Keeps what every visit trained, by client and split."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.trained = {}

    def reply(self, visiting, trained, work):
        visit = visiting.visit
        self.trained[visit.client_id, visit.split] = {name: value.clone() for name, value in trained.items()}
        return super().reply(visiting, trained, work)


def rows(loop):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in loop.visit_records]


def test_beta_one_is_fedavg_bit_for_bit_and_makes_nothing():
    for weighting in ("unbiased", "normalized"):
        pit, loop, data = run(FewFedPIT(beta=1.0, weighting=weighting), rounds=3)
        avg, plain, _ = run(FedAvg(weighting), rounds=3)
        assert_equal(weights(pit), weights(avg))
        assert rows(loop) == rows(plain)
        assert {entry[0] for entry in data.diary} == {"read"}


@pytest.mark.parametrize("beta", [0.0, 0.25])
@pytest.mark.parametrize("scorer", ["private", "global"])
def test_a_round_equals_a_loop_written_out(beta, scorer):
    """Both adapters from g, each with fresh moments, and one movement of their mix for each client."""
    seen, g = Recorder(), weights(module(dropout=0.0))
    model, _, data = run(FewFedPIT(beta, scorer), rounds=2, model=module(dropout=0.0), callbacks=[seen])
    private_models = {}
    for round_idx, visits in seen.visits.items():
        batches = {(visit.client_id, visit.split): own for visit, own in visits}
        clients = {client for client, _ in batches}
        assert len(clients) == 3
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in g.items()}
        for client in clients:
            public = trained_on(g, batches[client, "synthetic"])
            private = g
            if beta > 0 or scorer == "private":
                private = trained_on(g, batches[client, "train"])
                private_models[round_idx, client] = private
            for name in g:
                sent = beta * private[name].double() + (1 - beta) * public[name].double()
                total[name] += 10 / 3 * SHARES[client] * (sent - g[name].double())
        g = {name: (value.double() + total[name]).float() for name, value in g.items()}
    for name, value in weights(model).items():
        torch.testing.assert_close(value, g[name], rtol=1e-5, atol=1e-6)
    if scorer == "private":
        choices = [(client, seen) for what, client, seen, *_ in data.diary if what == "choose"]
        assert len(choices) == len(private_models) == 6
        for client, seen in choices:
            assert any(
                all(torch.allclose(seen[name], private[name], rtol=1e-5, atol=1e-6) for name in seen)
                for (_, who), private in private_models.items()
                if who == client
            )


def test_candidates_are_made_by_the_global_model_for_the_cohort_alone_in_each_round():
    starts = []
    watch = LambdaCallback(on_train_epoch_start=lambda _, model: starts.append(weights(model)))
    _, loop, data = run(FewFedPIT(0.5), rounds=3, callbacks=[watch])
    made = [entry for entry in data.diary if entry[0] == "synthesize"]
    assert [round_idx for _, round_idx, *_ in made] == [0, 1, 2]
    for (_, _, clients, seen), start in zip(made, starts, strict=True):
        assert_equal(seen, start)
        assert len(clients) == 3
    assert made[-1][2] == sorted({row["client"] for row in loop.visit_records})
    assert_equal(starts[0], weights(module()))


def test_without_a_local_model_for_it_beta_zero_reads_nothing_private():
    """Of other private rows the uploads are the same, bit for bit."""

    class Others(Numbers):
        def setup(self, stage):
            super().setup(stage)
            self.data = TensorDataset(self.data.tensors[0] * 7, self.data.tensors[1] - 5)

    tapes, models = [], []
    for numbers in (Numbers, Others):
        tape, data = Wiretap(), Synthesizing(numbers=numbers)
        model, *_ = run(FewFedPIT(0.0, "global"), rounds=3, channel=tape, data=data)
        assert {entry[2] for entry in data.diary if entry[0] == "read"} == {"synthetic"}
        tapes.append(tape.ups)
        models.append(weights(model))
    assert_equal(*models)
    assert len(tapes[0]) == len(tapes[1]) == 9
    for (client, one), (again, other) in zip(*tapes, strict=True):
        assert client == again
        assert_equal(one, other)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_what_goes_up_is_the_mix_and_nothing_else(beta):
    tape, algorithm, uploads = Wiretap(), Spied(beta), Uploads()
    _, loop, _ = run(algorithm, rounds=1, channel=tape, callbacks=[uploads])
    assert [bool(sent) for _, sent in tape.ups] == [False, True] * 3
    for (first, nothing), (client, sent) in zip(tape.ups[::2], tape.ups[1::2], strict=True):
        assert (first, nothing) == (client, {})
        private, public = (algorithm.trained[client, split] for split in ("train", "synthetic"))
        assert sent.keys() == private.keys() == public.keys()
        for name, value in sent.items():
            expected = beta * private[name].double() + (1 - beta) * public[name].double()
            assert torch.equal(value, expected.float())
            assert not torch.equal(private[name], public[name])
    sizes = [(row["split"], row["bytes_down"] > 0, row["bytes_up"] > 0) for row in loop.visit_records]
    assert sizes == [("train", True, False), ("synthetic", False, True)] * 3
    assert [upload.client_id for upload in uploads.seen] == [client for client, _ in tape.ups[1::2]]
    assert_equal(uploads.seen[-1].state, tape.ups[-1][1])


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def test_the_private_adapter_is_in_no_memory_and_no_checkpoint(tmp_path):
    algorithm = Spied(0.5)
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
    _, loop, _ = run(algorithm, rounds=1, callbacks=[save], settings={"enable_checkpointing": True})
    kept = tensors_in(torch.load(tmp_path / "last.ckpt", map_location="cpu", weights_only=True))
    assert len(kept) >= 4  # the global model is there
    held = [loop.memory.load(client) for client in loop.clients]
    assert tensors_in(held) == []
    assert tensors_in([*vars(algorithm).values()]) == tensors_in([algorithm.trained])  # of this test alone
    for (_, split), trained in algorithm.trained.items():
        for private in trained.values() if split == "train" else ():
            assert not any(torch.equal(private, tensor) for tensor in kept if tensor.shape == private.shape)


def test_who_has_no_candidate_left_sends_no_more_than_beta_of_what_is_private(caplog):
    tape, algorithm, start = Wiretap(), Spied(0.25), weights(module())
    everyone = [*ten_clients(None)]
    _, loop, data = run(algorithm, rounds=1, channel=tape, data=Synthesizing(without=everyone))
    assert [row["split"] for row in loop.visit_records] == ["train"] * 3
    assert not [entry for entry in data.diary if entry[0] == "choose"]
    for client, sent in tape.ups:
        for name, value in sent.items():
            moved = algorithm.trained[client, "train"][name].double() - start[name].double()
            assert torch.equal(value, (start[name].double() + 0.25 * moved).float())
    assert "round 1: no example is left of those that" in caplog.text


def test_the_round_says_who_has_none(caplog):
    cohort = [row["client"] for row in run(FedAvg(), rounds=1)[1].visit_records]
    metrics = Metrics("fed/")
    _, loop, _ = run(FewFedPIT(0.5), rounds=1, data=Synthesizing(without=cohort[:1]), callbacks=[metrics])
    assert f"no example is left of those that {cohort[0]} made" in caplog.text
    (logged,) = metrics.rounds
    counts = {"survived": 24, "clients": 3, "clients_without": 1, "chosen": 16}
    assert {name: value for name, value in logged.items() if "synthetic/" in name} == {
        f"fed/synthetic/{name}": value for name, value in counts.items()
    }
    for split in ("train", "synthetic"):
        losses = [row["loss"] for row in loop.visit_records if row["split"] == split]
        assert logged[f"fed/loss/{split}"] == pytest.approx(sum(losses) / len(losses))
    assert logged["fed/loss"] == pytest.approx(sum(row["loss"] for row in loop.visit_records) / 5)
    splits = [row["split"] for row in loop.visit_records]
    assert sorted(splits) == ["synthetic"] * 2 + ["train"] * 3


def test_with_beta_zero_and_no_candidate_anywhere_the_model_stays_and_the_round_says_so(caplog):
    for scorer in ("global", "private"):
        data = Synthesizing(without=[*ten_clients(None)])
        model, loop, _ = run(FewFedPIT(0.0, scorer), rounds=2, data=data)
        assert_equal(weights(model), weights(module()))
        assert loop.rounds_done == 2
    assert "round 2: nobody is left" in caplog.text


def test_what_is_drawn_while_candidates_are_made_changes_nothing_else():
    def fit(draws):
        others = []

        class Others(Batches):
            def on_train_start(self, trainer, pl_module):
                others.append((torch.rand(1).item(), np.random.rand(), random.random()))

            on_train_epoch_end = on_train_start

        model, _, _ = run(FewFedPIT(0.5), rounds=3, data=Synthesizing(draws=draws), callbacks=[Others])
        return weights(model), others

    (quiet, one), (noisy, other) = fit(False), fit(True)
    assert_equal(quiet, noisy)
    assert one == other
    assert len(set(one)) == 4


def test_data_that_cannot_make_candidates_are_refused_before_any_work():
    plain = FederatedWrapper(Numbers(), ten_clients)
    with pytest.raises(ValueError, match="training data for themselves, and LoaderByClient cannot"):
        run(FewFedPIT(0.5), data=plain)
    run(FewFedPIT(1.0), rounds=1, data=FederatedWrapper(Numbers(), ten_clients))
