import pytest
from plain_lightning import assert_equal
from stacked import CLIENTS, Points, fit
from two_parts import Recorder, TwoParts, close, mean, share_of, trained, weights

from fedlight.federation.algorithms import FedRep
from fedlight.federation.client import serialized_bytes

HEAD, BODY = {"head.weight", "head.bias"}, {"body.weight", "body.bias"}


def some(state, names):
    return {name: state[name] for name in state if name in names}


def written_out(module, start, rounds):
    """Algorithm 1 of FedRep on recorded batches; of FedPer, where a client has one visit."""
    body, heads, between = some(start, BODY), {}, {}
    for visits in rounds.values():
        ends, shares = [], []
        for visit, batches in visits:
            client = visit.client_id
            own = body | heads.get(client, some(start, HEAD))
            if visit.part == "head":
                heads[client] = some(trained(module, own, batches, names=HEAD), HEAD)
                between[client] = True
                continue
            names = BODY if between.get(client) else None
            end = trained(module, own, batches, names=names)
            heads[client] = some(end, HEAD)
            ends.append(some(end, BODY))
            shares.append(share_of(client, CLIENTS))
        body = mean(ends, shares)
    return body, heads


OPTIMIZERS = {
    "SGD": {"optimizer": "SGD"},
    "momentum": {"optimizer": "SGD", "momentum": 0.9, "weight_decay": 0.2},
    "AdamW": {"optimizer": "AdamW", "lr": 0.02, "weight_decay": 0.3},
}


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounds_equal_the_algorithm_written_out(optimizer, together):
    """The reference's optimizer holds the trained part alone, so what is fixed cannot move there."""
    seen, module = Recorder(), TwoParts(**OPTIMIZERS[optimizer])
    start = weights(module)
    algorithm = FedRep(head_epochs=2, together=together, weighting="normalized")
    *_, loop = fit(module, Points(), rounds=4, clients_per_round=2, algorithm=algorithm, callbacks=[seen])
    visits = [(visit.part, len(batches)) for one in seen.visits.values() for visit, batches in one]
    assert visits == ([("", 3)] * 8 if together else [("head", 6), ("", 3)] * 8)
    body, heads = written_out(module, start, seen.visits)
    close(some(weights(module), BODY), body)
    assert_equal(some(weights(module), HEAD), some(start, HEAD))  # of the global model it is nobody's
    assert len(heads) < 4 or len(seen.visits) == 4
    for client in CLIENTS:
        assert (loop.own_state(client) is None) == (client not in heads)
        if client in heads:
            close(loop.own_state(client), heads[client])


class ByHand(TwoParts):
    """An optimizer for each part, stepped by hand; weights move by both or, with one fixed, by the other."""

    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [self.make_optimizer(part.parameters()) for part in (self.body, self.head)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss


def test_two_optimizers_stepped_by_hand_train_what_one_does():
    """A fixed part takes no step."""
    kind = {"optimizer": "AdamW", "lr": 0.02, "weight_decay": 0.3}
    one, two = TwoParts(**kind), ByHand(**kind)
    _, rows, _, loop = fit(one, Points(), rounds=2, algorithm=FedRep())
    _, others, _, other = fit(two, Points(), rounds=2, algorithm=FedRep())
    close(weights(two), weights(one))
    close(other.own_state("a"), loop.own_state("a"))
    assert [row["steps"] for row in others] == [row["steps"] for row in rows] == [3] * 16


def test_the_head_is_sent_once_and_the_body_alone_comes_back():
    module = TwoParts()
    _, rows, *_ = fit(module, Points(), rounds=2, algorithm=FedRep())
    whole, body = serialized_bytes(weights(module)), serialized_bytes(some(weights(module), BODY))
    assert body < whole
    sizes = {(row["round"], row["split"], row["bytes_down"], row["bytes_up"]) for row in rows}
    assert sizes == {
        (0, "head", whole, 0),
        (1, "head", body, 0),
        (0, "train", 0, body),
        (1, "train", 0, body),
    }
    _, rows, *_ = fit(TwoParts(), Points(), rounds=2, algorithm=FedRep(together=True))
    sizes = {(row["round"], row["bytes_down"], row["bytes_up"]) for row in rows}
    assert sizes == {(0, whole, body), (1, body, body)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FedRep(private="head"), r"private='head' must be a Sequence\[str\]"),
        (lambda: FedRep(private=[]), r"private=\[\] must be a list"),
        (lambda: FedRep(head_epochs=0), "head_epochs=0 must be at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (["lora_B"], r"private=\['lora_B'\] names none of the 4 trained parameters, such as body.weight"),
        (["hea"], "names none of the 4"),
        (["head", "body"], "names all 4 trained parameters, such as body.weight, so nothing would be shared"),
    ],
)
def test_patterns_that_name_nothing_or_everything_are_refused(private, message):
    with pytest.raises(ValueError, match=message):
        fit(TwoParts(), Points(), rounds=1, algorithm=FedRep(private))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("head", "heads.adapter0.head.weight", True),
        ("head", "heads.adapter0.body.weight", False),
        ("layers.1", "net.layers.1.weight", True),
        ("layers.1", "net.layers.11.weight", False),
        ("lora_?", "net.0.lora_A.default.weight", True),
        ("classifier", "network.base_model.model.classifier.modules_to_save.default.weight", True),
        ("body.0", "body._orig_mod.0.weight", True),  # a body that torch.compile has wrapped
    ],
)
def test_a_pattern_is_a_part_of_a_dotted_name(pattern, name, expected):
    assert FedRep(private=[pattern]).is_private(name) == expected
