import lightning as L
import pytest
import torch
from memories import loop_with
from plain_lightning import Numbers, ten_clients, trainer
from ranks import run_ranks

from fedlight import ByClient, CoordinateMedian, Scaffold
from fedlight.federation import aggregation
from fedlight.federation.byzantine import Krum
from fedlight.federation.client_state import ClientMemories
from fedlight.processes.joining import Others

pytestmark = pytest.mark.slow  # teams of processes
NUMBERS = 500_000
NAMES = 2000


class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(4, 1)
        self.table = torch.nn.Parameter(torch.zeros(NUMBERS))

    def training_step(self, batch, batch_idx):
        return (self.head(batch[0]).squeeze(-1) + self.table[:8].sum()).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ManyNames(Wide):
    """With as many tensors as the adapter of a large model has."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.zeros(1) for _ in range(NAMES)])


def received(size, folder, model=Wide, **settings):
    """Return the most bytes of sums, swapped parts and other messages that a process receives in one round."""

    def work(rank):
        bytes_of = {"sums": 0.0, "messages": 0, "swapped": 0}
        exchange, add, swap = Others.exchange, Others.add, Others.swap

        def count_messages(self, data):
            found = exchange(self, data)
            bytes_of["messages"] += sum(len(part) for number, part in enumerate(found) if number != rank)
            return found

        def count_sums(self, tensor):
            bytes_of["sums"] += 2 * tensor.nbytes * (size - 1) / size  # of a ring
            add(self, tensor)

        def count_swapped(self, parts):
            found = swap(self, parts)
            bytes_of["swapped"] += sum(len(part) for number, part in enumerate(found) if number != rank)
            return found

        Others.exchange, Others.add, Others.swap = count_messages, count_sums, count_swapped
        L.seed_everything(0, verbose=False)
        loop = loop_with(clients_per_round=10, local_steps=1, **settings)
        run = trainer(1, [loop, ByClient(ten_clients)], strategy="client_parallel", devices=size)
        run.fit(model(), Numbers())
        return bytes_of

    everyones = run_ranks(size, work, folder)
    return {what: max(each[what] for each in everyones) for what in everyones[0]}


def test_a_process_receives_no_more_where_there_are_more_of_them(tmp_path):
    """The ring sends the two digits of a sum twice; the rest is rows of visits and names, small beside them."""
    found = {size: received(size, tmp_path / str(size)) for size in (2, 4, 8, 16)}
    for size in found:
        assert 8 * NUMBERS < found[size]["sums"] < 2 * 2 * 8 * (NUMBERS + 10) * 1.5, found
        assert found[size]["messages"] < 0.1 * found[size]["sums"], found


@pytest.mark.parametrize("size", [2, 5, 10])
@pytest.mark.parametrize("make", [CoordinateMedian, Krum])
def test_a_process_receives_its_share_of_each_update_and_the_result(tmp_path, monkeypatch, make, size):
    """``(K - k) D / N`` of K clients, of which it trains k, with updates of D bytes, and ``(N - 1) / N`` of the result."""
    monkeypatch.setattr(aggregation, "BLOCK", 4096)
    found = received(size, tmp_path, aggregation=make())
    update = 8 * (NUMBERS + 5)
    whole_blocks = 0.1 if make is Krum else 0.01  # of Krum's shares
    assert found["swapped"] == pytest.approx((10 - 10 / size) * update / size, rel=whole_blocks)
    distances = 200_000 if make is Krum else 0  # of 10 clients to 10 others, for each block
    others = 30_000 * (size - 1) + distances  # settings, rows of visits and names
    assert found["messages"] == pytest.approx(update * (size - 1) / size, abs=others)
    assert found["sums"] == 0


def test_names_of_tensors_do_not_travel(tmp_path):
    """Digests of them do; they were 120 bytes a name."""
    few, many = received(2, tmp_path / "few"), received(2, tmp_path / "many", model=ManyNames)
    assert many["messages"] - few["messages"] < NAMES


def test_memories_on_disk_travel_as_names(tmp_path):
    """In RAM, a process receives those of the clients that others have trained: 8 of 10, 4 bytes a number."""
    memories = {name: ClientMemories(limit_mib=limit) for name, limit in (("disk", 0), ("ram", 256))}
    found = {
        name: received(5, tmp_path / name, algorithm=Scaffold(), memory=memory)["messages"]
        for name, memory in memories.items()
    }
    assert found["ram"] - found["disk"] == pytest.approx(8 * 4 * (NUMBERS + 5), rel=0.01)
    assert found["disk"] < 200_000
