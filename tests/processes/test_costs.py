import numpy as np
import pytest
from plain_lightning import Numbers

from fedlight import FederatedDataModule, Visit
from fedlight.callbacks.loop.plan import STEP_TOKENS, visit_cost
from fedlight.processes import share


def texts(lengths_of_clients, batch_size):
    """Data of texts whose lengths in tokens are given for each client."""
    data = FederatedDataModule(batch_size)
    ends = np.cumsum([0, *map(len, lengths_of_clients.values())])
    indices = {client: np.arange(*ends[place : place + 2]) for place, client in enumerate(lengths_of_clients)}
    data.client_indices, data.train_lengths = indices, np.concatenate([*lengths_of_clients.values()])
    data.train_set = data.train_lengths
    return data


def test_a_visit_to_texts_costs_its_tokens_with_padding():
    data = texts({"a": [10, 30], "b": [500, 500, 500, 500]}, batch_size=2)
    assert visit_cost(data, Visit("a", 3), round_idx=0) == 3 * (2 * 30 + STEP_TOKENS)
    assert visit_cost(data, Visit("b", 1), round_idx=0) == 2 * 500 + STEP_TOKENS


WITHOUT_LENGTHS = texts({"a": [10, 30]}, batch_size=2)
WITHOUT_LENGTHS.train_lengths = None


@pytest.mark.parametrize("data", [Numbers(), object(), WITHOUT_LENGTHS])
def test_a_visit_to_other_data_costs_its_batches(data):
    assert visit_cost(data, Visit("a", 3), round_idx=0) == 3.0


def test_clients_with_unlike_texts_are_shared_out_more_evenly_than_by_batches():
    """Mean largest share of four processes in 20 rounds of 16 clients, whose mean lengths vary by a factor of about 10."""
    rng = np.random.default_rng(0)
    clients = {
        f"c{k:02d}": np.clip(rng.lognormal(mean, 0.5, 40), 8, 1024).astype(int)
        for k, mean in enumerate(rng.normal(4.8, 0.8, 16))
    }
    data = texts(clients, batch_size=4)

    def largest(cost_of, round_idx):
        visits = [Visit(client, 8) for client in clients]
        ranks = share([cost_of(data, visit, round_idx) for visit in visits], 4)
        loads = np.zeros(4)
        for visit, rank in zip(visits, ranks, strict=True):
            loads[rank] += sum(s.examples * s.tokens for s in data.batch_shapes(visit, round_idx))
        return loads.max() / loads.sum()

    by_batches = np.mean([largest(lambda data, visit, _: visit.num_batches, k) for k in range(20)])
    by_tokens = np.mean([largest(visit_cost, k) for k in range(20)])
    assert by_tokens < 0.27 < 0.29 < by_batches, (by_tokens, by_batches)
