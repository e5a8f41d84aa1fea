import copy

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_lightning import Metrics
from ranked import (
    LAYERS,
    RANKS,
    Ranked,
    a_of,
    b_of,
    products,
    run,
    sliced,
    trained_alone,
    trained_of,
    written_out,
)
from refusals import refusal
from safetensors.torch import save
from stacked import CLIENTS, Points, assert_same_rows, fit, furthest
from two_parts import Recorder, close, share_of

from fedlight import CoordinateMedian, FedAdam, FedAvg, FedProx, Quantize, TopK, Wire
from fedlight.callbacks.loop.parts import ProductError
from fedlight.federation import Average
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA
from fedlight.federation.forward import ZerothOrder
from fedlight.federation.lora.ranks import PRUNED


def zero_padded(sparsity):
    """HetLoRA's aggregation, dense: factors padded with zeros, weighted by the norm of each layer's product."""

    def combine(state, ends):
        new = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in state.items()}
        for layer in LAYERS:
            sizes = [products(own)[layer].norm().item() if sparsity else 1.0 for _, _, own in ends]
            for size, (_, rank, own) in zip(sizes, ends, strict=True):
                new[a_of(layer)][:rank] += size / sum(sizes) * own[a_of(layer)]
                new[b_of(layer)][:, :rank] += size / sum(sizes) * own[b_of(layer)]
        return {name: value.float() for name, value in new.items()}

    return combine


def over_holders(state, ends):
    """Each row of A and column of B is the mean over the clients that have it; one that nobody has stays."""
    new = {name: value.clone() for name, value in state.items()}
    for layer in LAYERS:
        for row in range(4):
            own = [own for _, rank, own in ends if rank > row]
            if own:
                new[a_of(layer)][row] = sum(o[a_of(layer)][row] for o in own) / len(own)
                new[b_of(layer)][:, row] = sum(o[b_of(layer)][:, row] for o in own) / len(own)
    return new


def by_svd(skip):
    """FlexLoRA, dense: the mean of the products and its SVD; with ``skip`` each rank is a mean over those that have it."""

    def combine(state, ends):
        new = {}
        for layer in LAYERS:
            mean = torch.zeros_like(products(state)[layer])
            for row in range(4):
                shares = [share for share, rank, _ in ends if rank > row or not skip]
                own = [(share, own) for share, rank, own in ends if rank > row]
                own = own or ([(1.0, state)] if skip else [])
                for share, one in own:
                    b, a = one[b_of(layer)][:, row].double(), one[a_of(layer)][row].double()
                    mean += share / (sum(shares) or 1.0) * torch.outer(b, a)
            u, s, vt = np.linalg.svd(mean.numpy())
            new[b_of(layer)] = torch.tensor(u[:, :4] * s[:4]).float()
            new[a_of(layer)] = torch.tensor(vt[:4]).float()
        return new

    return combine


METHODS = {
    "HetLoRA": (HetLoRA(), zero_padded(sparsity=True)),
    "zero-padding": (HetLoRA(sparsity_weighted=False), zero_padded(sparsity=False)),
    "HetLoRA, skip": (HetLoRA(sparsity_weighted=False, missing="skip"), over_holders),
    "FlexLoRA": (FlexLoRA(), by_svd(skip=False)),
    "FlexLoRA, skip": (FlexLoRA(missing="skip"), by_svd(skip=True)),
}


def method(name):
    """An algorithm of its own for each run."""
    return copy.deepcopy(METHODS[name][0])


@pytest.mark.parametrize("name", METHODS)
def test_rounds_equal_the_equations_with_clients_in_modules_of_their_own_rank(name):
    """Two of four clients a round, so that in some rounds nobody has the largest rank; singular vectors have either sign."""
    start, trained, rows, seen, _ = run(method(name), Points(), rounds=4, clients_per_round=2)
    expected = written_out(start, seen.visits, METHODS[name][1])[-1]
    if name.startswith("HetLoRA") or name == "zero-padding":
        close(trained, expected)
    for rank in (1, 2, 3, 4):
        found, other = (products(sliced(one, rank)) for one in (trained, expected))
        torch.testing.assert_close(found, other, rtol=1e-3, atol=2e-6)
    assert furthest(trained, start) > 0.05
    assert [row["lora_rank"] for row in rows] == [RANKS.get(row["client"], 4) for row in rows]
    assert len({row["client"] for row in rows}) == 3


@pytest.mark.parametrize("name", ["HetLoRA, skip", "FlexLoRA"])
def test_under_an_optimizer_with_moments_and_decay_and_a_proximal_term(name):
    algorithm = method(name)
    algorithm.local = FedProx(0.5)
    how = {"optimizer": "AdamW", "lr": 0.02, "weight_decay": 0.3}
    start, trained, _, seen, _ = run(algorithm, Points(), module=Ranked(**how), clients_per_round=3)
    expected = written_out(start, seen.visits, METHODS[name][1], pull=0.5, **how)[-1]
    torch.testing.assert_close(products(trained), products(expected), rtol=1e-3, atol=1e-5)


def test_with_equal_ranks_and_plain_weights_it_is_fedavg():
    """The module's rank for all: the mean of the factors, through a sum that is divided once."""
    plain = fit(Ranked(), Points(), algorithm=FedAvg("uniform"))[0]
    padded = run(HetLoRA(sparsity_weighted=False), Points(), rounds=2, ranks=None)[1]
    assert furthest(padded, plain) < 1e-7


WIRES = {"lossless": None, "nf4": Wire(up=Quantize("nf4"), down=Quantize("fp16"))}


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_are_those_of_adapters_of_the_clients_ranks(wire):
    channel = WIRES[wire]
    _, _, rows, _, _ = run(HetLoRA(), Points(), rounds=1, **({"channel": channel} if channel else {}))
    for row in rows:
        own = trained_of(Ranked(rank=row["lora_rank"]))
        expected = (channel.down_bytes(own), channel.up_bytes(own)) if channel else (len(save(own)),) * 2
        assert (row["bytes_down"], row["bytes_up"]) == expected


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("at_once", [2, 4])
def test_clients_of_unlike_ranks_side_by_side_train_what_each_trains_alone(name, at_once):
    _, alone, rows, _, _ = run(method(name), Points())
    _, beside, others, _, _ = run(method(name), Points(), at_once=at_once)
    assert_same_rows(others, rows)
    assert furthest(products(beside), products(alone)) < 1e-5


FORWARD = {"forward": ZerothOrder(0.01, perturbations=2, weight_decay=0.3)}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("kind", [HetLoRA, FlexLoRA])
def test_one_forward_only_client_of_a_smaller_rank_is_a_module_of_that_rank(kind, clip):
    """Its directions, clipping, weight decay and proximal term are on its own rows and columns alone."""
    how = {"clients_per_round": 1, "rounds": 1, "settings": {"gradient_clip_val": clip}, **FORWARD}
    one = Points({"a": 8})
    start, trained, _, _, _ = run(kind(local=FedProx(3.0)), one, ranks={"a": 2}, **how)
    small = Ranked(rank=2)
    with torch.no_grad():
        for name, value in sliced(start, 2).items():
            small.get_parameter(name).copy_(value)
    alone = fit(small, one, algorithm=FedProx(3.0), **how)[0]
    torch.testing.assert_close(products(sliced(trained, 2)), products(alone), rtol=1e-4, atol=1e-6)
    for layer, before in products(sliced(start, 2)).items():
        assert not torch.allclose(products(alone)[layer], before, atol=1e-3)


def pruning():
    return HetLoRA(gamma=0.5, lam=0.5)


def test_a_run_does_not_go_on_with_other_ranks(tmp_path):
    saved = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    settings = {"settings": {"enable_checkpointing": True, "default_root_dir": tmp_path}}
    run(HetLoRA(), Points(), rounds=1, callbacks=[saved], **settings)
    with refusal(r"federated\.algorithm\.ranks\.a=1 .* not with federated\.algorithm\.ranks\.a=2"):
        run(HetLoRA(), Points(), ranks={**RANKS, "a": 2}, ckpt_path=tmp_path / "last.ckpt", **settings)


@pytest.mark.parametrize("name", METHODS)
def test_the_products_error_is_measured_against_the_clients_products_of_their_own_rank(name):
    """One round, written out: the mean of the products by the clients' weights, and the product that the server has."""
    watch = Metrics("product_error")
    start, trained, _, seen, _ = run(
        method(name), Points(), rounds=1, callbacks=[watch], parts=[ProductError()]
    )
    ends = []
    for visit, batches in seen.visits[0]:
        rank = RANKS.get(visit.client_id, 4)
        weight = share_of(visit.client_id, CLIENTS) if name.startswith("FlexLoRA") else 0.25
        ends.append((weight, products(trained_alone(sliced(start, rank), batches, rank, "SGD", 0.1))))
    distance = norm = 0.0
    for layer in LAYERS:
        mean = sum(weight * own[layer] for weight, own in ends)
        distance += (products(trained)[layer] - mean).norm() ** 2
        norm += mean.norm() ** 2
    [found] = watch.rounds[0].values()
    assert found == pytest.approx(float((distance / norm).sqrt()), rel=1e-4)
    assert found > (1e-4 if name == "FlexLoRA" else 0.05)  # which loses what is beyond rank 4 alone


class Penalized(Ranked):
    """HetLoRA's penalty in the loss itself."""

    def __init__(self, rank, kept, lam):
        super().__init__(rank=rank)
        self.kept, self.lam = kept, lam

    def training_step(self, batch, batch_idx):
        own = {name: p for name, p in self.named_parameters() if p.requires_grad}
        norms = [
            own[b_of(layer)][:, self.kept :].norm() * own[a_of(layer)][self.kept :].norm() for layer in LAYERS
        ]
        return super().training_step(batch, batch_idx) + self.lam * sum(norms)


@pytest.mark.parametrize("at_once", [1, 2])
def test_the_penalty_is_that_of_the_paper_and_clients_prune_what_has_shrunk(at_once):
    """Under a strong penalty the tails of c and d shrink, so they go on with rank 1 and 2; a has nothing to prune."""
    ranks = {"a": 1, "c": 3, "d": 4}
    clients = dict.fromkeys(ranks, 8)
    algorithm = HetLoRA(sparsity_weighted=False, gamma=0.5, lam=0.4)
    start, _, rows, seen, loop = run(
        algorithm, Points(clients), rounds=2, ranks=ranks, at_once=at_once, clients_per_round=3
    )
    assert [row["lora_rank"] for row in rows] == [1, 3, 4, 1, 1, 2]
    assert {name: loop.memory.load(name).get(PRUNED) for name in ranks} == {"a": None, "c": 1, "d": 1}
    one = [row for row in rows if row["client"] == "c"]
    assert one[0]["bytes_up"] == len(save(trained_of(Ranked(rank=3))))
    assert one[1]["bytes_up"] == len(save(trained_of(Ranked(rank=1))))
    if at_once > 1:
        return
    ends = []
    for visit, batches in seen.visits[0]:
        rank = ranks[visit.client_id]
        kept = max(1, rank // 2)
        module = Penalized(rank, kept if kept < rank else rank, 0.4)
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(sliced(start, rank)[name])
        steps = module.configure_optimizers()
        for batch in batches:
            steps.zero_grad()
            module.training_step(batch, 0).backward()
            steps.step()
        ends.append((share_of(visit.client_id, CLIENTS), kept, sliced(trained_of(module), kept)))
    first = zero_padded(sparsity=False)(start, ends)
    once = run(
        HetLoRA(sparsity_weighted=False, gamma=0.5, lam=0.4), Points(clients), 1, ranks, clients_per_round=3
    )
    close(once[1], first, 5e-6)


def test_without_a_penalty_a_client_prunes_only_what_has_shrunk():
    """Norms before and after, summed over layers, of each client's visit."""
    start, _, _, seen, loop = run(HetLoRA(gamma=0.75), Points(), rounds=1)
    for visit, batches in seen.visits[0]:
        rank = RANKS.get(visit.client_id, 4)
        kept = max(1, int(0.75 * rank))
        ends = trained_alone(sliced(start, rank), batches, rank, "SGD", 0.1)

        def tails(state, kept=kept):
            return sum(state[b_of(x)][:, kept:].norm() * state[a_of(x)][kept:].norm() for x in LAYERS)

        shrunk = kept < rank and bool(tails(ends) < tails(sliced(start, rank)))
        assert loop.memory.load(visit.client_id).get(PRUNED) == (kept if shrunk else None)


def test_a_pruned_client_goes_on_over_a_wire_that_remembers():
    channel = Wire(up=TopK(0.3, error_feedback=True))
    _, trained, rows, _, loop = run(pruning(), Points(), rounds=3, channel=channel)
    assert rows[-1]["lora_rank"] < rows[3]["lora_rank"] == 4
    assert loop.memory.load("d")["wire"][a_of(LAYERS[0])].shape[0] == loop.memory.load("d")[PRUNED]
    assert all(value.isfinite().all() for value in trained.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HetLoRA(missing="none"), "missing='none' is not one of zero, skip"),
        (lambda: FlexLoRA(missing="none"), "missing='none' is not one of zero, skip"),
        (lambda: HetLoRA(weighting="unbiased"), "HetLoRA: weighting='unbiased' is not one of uniform, nor"),
        (lambda: FlexLoRA(weighting="unbiased"), "FlexLoRA: weighting='unbiased' is not one of uniform, nor"),
        (lambda: HetLoRA(gamma=0.0), "gamma=0.0 must be above 0"),
        (lambda: HetLoRA(gamma=1.5), "gamma=1.5 must be"),
        (lambda: HetLoRA(gamma=0.5, lam=-1.0), "lam=-1.0 must be at least 0"),
        (lambda: HetLoRA(lam=0.1), "lam=0.1 is a penalty .* gamma=1 never prunes"),
        (lambda: HetLoRA(local=HetLoRA()), "local=HetLoRA changes"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with refusal(message):
        make()


class TwoOptimizers(Ranked):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        a, b = ([p for name, p in self.named_parameters() if part in name] for part in ("lora_A", "lora_B"))
        return [torch.optim.SGD(a, lr=0.1), torch.optim.SGD(b, lr=0.1)]


@pytest.mark.parametrize(
    ("algorithm", "settings", "message"),
    [
        (HetLoRA(), {"aggregation": CoordinateMedian()}, "HetLoRA is an average .* take out aggregation"),
        (FlexLoRA(), {"aggregation": CoordinateMedian()}, "aggregation combines coordinates: take it"),
        (FlexLoRA(), {"server": FedAdam()}, "take Average with lr=1, or HetLoRA"),
        (FlexLoRA(), {"server": Average(0.5)}, "take Average with lr=1, or HetLoRA"),
        (FlexLoRA(), {"channel": Wire(up=TopK(0.1, error_feedback=True))}, "set error_feedback=false"),
        (HetLoRA(gamma=0.5, lam=0.1), {"module": TwoOptimizers()}, "2 optimizers may step them apart"),
        (
            HetLoRA(gamma=0.5, lam=0.1),
            {"forward": ZerothOrder()},
            "lam=0.1: .* leave forward out, or set lam",
        ),
        (HetLoRA(), {"ranks": {"a": 5}}, "5 is above the rank 4 of the module's adapters"),
        (HetLoRA(), {"ranks": {"nobody": 1}}, r"ranks\.nobody: there is no such client or device"),
        (HetLoRA(), {"ranks": [1, 2]}, r"ranks=\[1, 2\] .* set fleet, or name a rank"),
    ],
)
def test_what_does_not_fit_together_is_refused_before_any_work(algorithm, settings, message):
    seen = Recorder()
    with refusal(message):
        run(algorithm, Points(), callbacks=[seen], **settings)
    assert seen.visits == {}
