import random

import numpy as np
import pytest
import torch
from refusals import refusal
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from fedlight.datamodules.federated.client_positions import read_positions
from fedlight.datamodules.federated.loader_by_client import ClientReading
from fedlight.support.seeding import derive_seed

N = 20
SET = TensorDataset(torch.arange(N))
OWN = {"a": np.array([3, 1, 8, 7, 12]), "b": np.array([0, 2, 4, 6, 10, 14, 16])}
A, B = sorted(OWN["a"].tolist()), OWN["b"].tolist()


def reading(seed=0, make_batches=None, **settings):
    return ClientReading(DataLoader(SET, **({"batch_size": 2} | settings)), make_batches, seed)


def batches(found, client="a", round_idx=0, wanted=3):
    own = found.readable(OWN)[client]
    return found.batches(client, own, round_idx, wanted)


def drawn(number, client="a", round_idx=0, seeds=(0,)):
    """The generator of a visit, and permutations of ``number`` that it gives."""
    generator = torch.Generator().manual_seed(derive_seed(*seeds, "order", round_idx, client))
    sampler = RandomSampler(range(number), generator=generator)
    while True:
        yield [*sampler]


def cut(order, size, drop_last=False):
    pieces = [order[i : i + size] for i in range(0, len(order), size)]
    return [piece for piece in pieces if len(piece) == size or not drop_last]


def test_shuffled_passes_of_a_loader_over_the_clients_examples():
    found, orders = reading(shuffle=True), drawn(5)
    first, second = ([int(OWN["a"][i]) for i in next(orders)] for _ in range(2))
    assert batches(found, wanted=6) == cut(first, 2) + cut(second, 2)
    assert sorted(first) == sorted(second) == A
    assert found.num_batches(OWN["a"]) == 3
    assert [len(batch) for batch in batches(found, wanted=6)] == [2, 2, 1] * 2


def test_the_last_batch_is_left_out_where_the_loader_says_so():
    found = reading(shuffle=True, drop_last=True)
    first = [int(OWN["a"][i]) for i in next(drawn(5))]
    assert batches(found, wanted=2) == cut(first, 2, drop_last=True)
    assert found.num_batches(OWN["a"]) == 2
    with refusal(r"client 'a' has 5 examples, fewer than batch_size=6, .* drop_last=True: leave"):
        reading(batch_size=6, drop_last=True).readable(OWN)


def test_order_is_a_function_of_seed_round_and_client_alone():
    found = reading(shuffle=True)
    first = batches(found)
    assert batches(found, round_idx=1) != first
    assert batches(found, client="b") != first
    torch.manual_seed(9)
    assert batches(found) == first == batches(reading(shuffle=True))
    assert batches(reading(seed=1, shuffle=True)) != first


def test_a_generator_counts_by_its_first_seed():
    def given(seed):
        generator = torch.Generator().manual_seed(seed)
        torch.rand(3, generator=generator)  # used already: what is left of it does not count
        return reading(shuffle=True, generator=generator)

    first = [int(OWN["a"][i]) for i in next(drawn(5, seeds=(0, 7)))]
    assert batches(given(7)) == cut(first, 2)
    assert batches(given(8)) != batches(given(7))


def test_plain_batch_sampler_is_taken_apart():
    given = BatchSampler(SequentialSampler(SET), batch_size=4, drop_last=True)
    found = ClientReading(DataLoader(SET, batch_sampler=given), None, 0)
    assert batches(found, wanted=2) == [[1, 3, 7, 8], [1, 3, 7, 8]]


def test_weights_are_those_of_the_clients_examples():
    weights = torch.zeros(N, dtype=torch.double)
    weights[[1, 3, 8, 0, 2]] = torch.tensor([1.0, 3.0, 6.0, 5.0, 5.0], dtype=torch.double)
    found = reading(sampler=WeightedRandomSampler(weights, N), batch_size=3)
    assert found.readable(OWN)["a"].tolist() == [3, 1, 8]  # those of weight 0 are never read
    generator = torch.Generator().manual_seed(derive_seed(0, "order", 0, "a"))
    by_hand = torch.multinomial(torch.tensor([3.0, 1, 6]).double(), 3, True, generator=generator)
    assert batches(found, wanted=1) == [[[3, 1, 8][i] for i in by_hand]]
    many = [index for batch in batches(found, wanted=4000) for index in batch]
    shares = [many.count(index) / len(many) for index in (1, 3, 8)]
    assert shares == pytest.approx([0.1, 0.3, 0.6], abs=0.02)
    with refusal(r"client 'c': the training loader's WeightedRandomSampler reads none of its 2"):
        found.readable({"c": np.array([17, 18])})
    with refusal("has 3 weights for 20 examples"):
        reading(sampler=WeightedRandomSampler([1.0] * 3, 3))


def test_weights_without_replacement_and_shares_of_longer_passes():
    once = reading(sampler=WeightedRandomSampler([1.0] * N, N, replacement=False), batch_size=10)
    assert [sorted(batch) for batch in batches(once, wanted=2)] == [A, A]
    twice = reading(sampler=WeightedRandomSampler([1.0] * N, 2 * N), batch_size=1)
    assert twice.num_batches(OWN["a"]) == 10
    half = reading(sampler=RandomSampler(SET, num_samples=N // 2), batch_size=1)
    assert half.num_batches(OWN["b"]) == 4  # 3.5, rounded to the even number
    drawn_twice = reading(sampler=RandomSampler(SET, replacement=True), batch_size=5)
    assert any(len(set(batch)) < 5 for batch in batches(drawn_twice, wanted=20))


def test_a_subset_is_the_clients_part_of_it():
    found = reading(sampler=SubsetRandomSampler([1, 8, 12, 0, 2]), batch_size=2)
    own = found.readable(OWN)
    assert {client: sorted(own[client].tolist()) for client in OWN} == {"a": [1, 8, 12], "b": [0, 2]}
    assert [sorted(sum(batches(found, wanted=4)[i : i + 2], [])) for i in (0, 2)] == [[1, 8, 12]] * 2
    with refusal("client 'b': the training loader's SubsetRandomSampler reads none of its 7"):
        reading(sampler=SubsetRandomSampler([1])).readable(OWN)


def test_distributed_sampler_of_one_process():
    shuffled = reading(sampler=DistributedSampler(SET, num_replicas=1, rank=0), batch_size=5)
    assert sorted(batches(shuffled, wanted=1)[0]) == A
    ordered = reading(sampler=DistributedSampler(SET, num_replicas=1, rank=0, shuffle=False), batch_size=5)
    assert batches(ordered, wanted=1) == [A]
    with refusal("DistributedSampler has num_replicas=2 and leaves out the examples of other"):
        reading(sampler=DistributedSampler(SET, num_replicas=2, rank=0))


class Given(Sampler):
    """An order of one's own."""

    def __init__(self, order):
        self.order = [*order]

    def __len__(self):
        return len(self.order)

    def __iter__(self):
        return iter(self.order)


LARGEST_FIRST = Given(range(N - 1, -1, -1))


class Balanced(Sampler):
    """Draws from three streams, and listens to the epoch."""

    epoch = -1

    def __len__(self):
        return 2 * N

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for _ in range(2 * N):
            draws = torch.randint(N, (1,)).item(), np.random.randint(N), random.randrange(N)
            yield (sum(draws) + self.epoch) % N


class Stubborn(Given):
    """Draws from a stream that nobody can set back."""

    rng = np.random.default_rng(0)

    def __iter__(self):
        return iter(self.rng.permutation(self.order))


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0


def test_a_sampler_of_ones_own_gives_each_client_its_own_in_that_order():
    assert batches(reading(sampler=LARGEST_FIRST), wanted=4) == [[12, 8], [7, 3], [1], [12, 8]]

    sampler = Balanced()
    found = reading(sampler=sampler, batch_size=4)
    assert found.readable(OWN)["b"].tolist() == B  # though one pass does not read all
    state = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    seen = {client: batches(found, client, round_idx=3, wanted=1)[0] for client in OWN}
    assert sampler.epoch == 3
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == state[1:]
    seed = derive_seed(0, "sampler", 3, 0)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    everything = [*sampler]
    assert seen == {client: [i for i in everything if i in own][:4] for client, own in OWN.items()}
    torch.set_rng_state(state[0])


def test_a_sampler_that_never_reads_a_client_is_refused_before_any_visit():
    found = reading(sampler=Given([1, 3, 8, 7, 12] * 4))
    with refusal("client 'b': the training loader's Given reads none of its 7 examples"):
        found.readable(OWN)


def test_samplers_that_cannot_be_had_twice_or_have_no_end_are_refused():
    remedy = r"ByClient\(clients, batch_sampler=lambda own_set: BatchSampler"
    with refusal(f"sampler Stubborn gives another order each time, .* {remedy}"):
        reading(sampler=Stubborn(range(N)))
    with refusal(f"sampler Endless has no length: add __len__, set .* {remedy}"):
        reading(sampler=Endless())


class Buckets(Given):
    """Batches of neighbours in length, in random order: what length bucketing does."""

    def __init__(self, examples, size):
        lengths = [int(examples[i][0]) for i in range(len(examples))]
        super().__init__(cut(sorted(range(len(lengths)), key=lengths.__getitem__), size))

    def __iter__(self):
        return iter([self.order[i] for i in torch.randperm(len(self)).tolist()])


def test_batch_samplers_that_mix_clients_are_refused_or_made_for_each():
    loader = DataLoader(SET, batch_sampler=Buckets(SET, 2))
    with refusal(r"batch_sampler=Buckets, .* batch_sampler=lambda own_set: Buckets\(\.\.\.\)"):
        ClientReading(loader, None, 0)

    found = ClientReading(loader, lambda own_set: Buckets(own_set, 2), 0)
    torch.manual_seed(derive_seed(0, "order", 4, "a"))
    order = torch.randperm(3).tolist()
    assert batches(found, round_idx=4) == [[[1, 3], [7, 8], [12]][i] for i in order]
    assert found.num_batches(OWN["b"]) == 4

    with refusal("gives 0 as a batch: give lists of positions"):
        batches(ClientReading(loader, SequentialSampler, 0))
    stream = np.random.default_rng(0)
    with refusal("gives client 'a' other batches each time"):
        batches(ClientReading(loader, lambda own_set: [stream.permutation(len(own_set))], 0))
    with refusal("client 'a': its batch sampler gives no batch"):
        batches(ClientReading(loader, lambda own_set: [], 0))


def test_without_batching_every_example_is_a_batch():
    found = reading(batch_size=None)
    assert batches(found, wanted=6) == [*A, A[0]]
    assert found.num_batches(OWN["b"]) == 7


@pytest.mark.parametrize(
    ("is_by_lot", "settings"),
    [
        (True, {}),
        (True, {"shuffle": True}),
        (True, {"shuffle": True, "drop_last": True}),
        (True, {"sampler": SubsetRandomSampler(range(N))}),
        (True, {"sampler": RandomSampler(SET, num_samples=10)}),
        (False, {"sampler": RandomSampler(SET, num_samples=100)}),  # five permutations, without a break
        (False, {"sampler": RandomSampler(SET, replacement=True)}),
        (False, {"sampler": WeightedRandomSampler(torch.ones(N), N, replacement=False)}),
        (False, {"sampler": LARGEST_FIRST}),
        (False, {"batch_size": None}),
        (False, {"make_batches": lambda own: BatchSampler(SequentialSampler(own), 2, False)}),
    ],
)
def test_batches_that_no_example_decides(is_by_lot, settings):
    found = reading(**settings)
    assert found.is_by_lot(found.readable(OWN)) == is_by_lot


@pytest.mark.parametrize(
    "positions",
    [
        *([1, 3], (1, 3), range(1, 5, 2), [np.int64(1), torch.tensor(3)], [False, True, False, True, False]),
        *(np.array([1, 3], np.uint8), torch.tensor([1, 3], dtype=torch.int32)),
        torch.tensor([0, 1, 0, 1, 0], dtype=torch.bool),
    ],
)
def test_sequences_of_whole_numbers_and_masks(positions):
    found = read_positions({"a": positions, "b": [0]}, 5)
    assert found["a"].dtype == np.int64
    assert {name: own.tolist() for name, own in found.items()} == {"a": [1, 3], "b": [0]}


def test_ids_are_texts_or_whole_numbers():
    assert list(read_positions({3: [0], np.int64(4): [1], np.str_("x"): [2]}, 3)) == ["3", "4", "x"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"u7": [0, 5]}, r"client 'u7' has the position 5, but the training set has 5 examples, 0 to 4"),
        ({"u7": [0, -1]}, r"client 'u7' has the position -1, but"),
        ({"u7": [2**70]}, r"client 'u7' has the position 1180591620717411303424, "),
        ({"u7": [0, None]}, r"client 'u7' has the position None, which is no whole number"),
        ({"u7": [0.0, 1.5]}, r"client 'u7' has the position 0.0, which is no whole number"),
        ({"u7": ["0"]}, r"client 'u7' has the position '0', which is no whole number"),
        ({"u7": [[0, 1]]}, r"client 'u7': positions must be one row of whole numbers"),
        ({"u7": [[0], [1, 2]]}, r"client 'u7': positions must be one row of whole numbers"),
        ({"u7": 3}, r"client 'u7' has a int as positions: give a list, range, array"),
        ({"u7": "12"}, r"client 'u7' has a str as positions"),
        ({"u7": (i for i in range(2))}, r"client 'u7' has a generator as positions"),
        ({"u7": [True, False]}, r"client 'u7' has a mask of 2 truth values, but the training set has 5"),
        ({"u7": [1, 2, 1]}, r"client 'u7' has the position 1 twice"),
        ({"u7": [1, 2], "u8": [3, 2]}, r"position 2 is at client 'u7' and at client 'u8'"),
        ({1: [0], "1": [1]}, r"the client '1' twice, as a text and as a number"),
        ({("a", 1): [0]}, r"client id \('a', 1\) is a tuple: give a text or a whole number"),
        ({None: [0]}, r"client id None is a NoneType"),
        ({True: [0]}, r"client id True is a bool"),
        ([[0, 1], [2]], r"clients gave a list: give a dict"),
        (None, r"clients gave a NoneType: give a dict"),
    ],
)
def test_what_is_no_position_is_named_with_its_client(given, message):
    with pytest.raises(ValueError, match=message):
        read_positions(given, 5)


def test_a_client_without_examples_is_left_to_the_loop_to_name():
    assert read_positions({"u7": []}, 5)["u7"].tolist() == []
