import itertools
import types

import numpy as np
import pytest
from plain_lightning import trainer as make_trainer
from refusals import refusal
from thread_team import on_team
from tiny_world import write_rows

from fedlight.augmentation import DirectRetrieval, FedDCA, FedDCAStar, RandomSampling, retrieval
from fedlight.augmentation.overlap import overlap, retrieval_overlap
from fedlight.augmentation.retrieval import compute_centers
from fedlight.datamodules.rows.fields import instruction_text
from fedlight.datamodules.vectors import Encoder, HashedEncoder, vector_index
from fedlight.modules import ProjectorModule

TOPICS = ("bread flour oven yeast", "court law judge trial", "goal ball team match", "planet star orbit moon")
RNG = np.random.default_rng(0)
ENCODER = HashedEncoder(dimension=64)


def make(topic, count, extra=4):
    """Rows of a topic: some of its words and a few of everybody's."""

    def text():
        return " ".join([*RNG.choice(TOPICS[topic].split(), 3), *RNG.choice([*"abcdefghijkl"], extra)])

    return [{"instruction": text(), "input": "", "response": f"{topic}"} for _ in range(count)]


CLIENTS = {f"c{number}": make(number % 4, 20) + make((number + 1) % 4, 8) for number in range(5)}
PUBLIC = [row for topic in range(4) for row in make(topic, 60, extra=5)]


def vectors(rows, encoder=ENCODER):
    return encoder.encode([instruction_text(row) for row in rows])


def rows_of(added):
    return {client: [row.row for row in rows] for client, rows in added.items()}


def check(added, number):
    """Rows exist once, carry their texts and come best first."""
    for rows in added.values():
        assert len(rows) == len({row.row for row in rows}) == number
        assert all(row.fields == PUBLIC[row.row] for row in rows)
        assert all(one.score >= other.score for one, other in itertools.pairwise(rows))


def written_out(centers, sizes, seed, public, number, alpha, selection="drop_i"):
    """Algorithm 1 of the paper, lines 6 to 18, as loops, in the order in which ``order`` has the clients."""
    from fedlight.support.seeding import derive_seed

    names = sorted(centers)
    order = np.random.default_rng(derive_seed(seed, "order of centres")).permutation(len(names))
    chosen = {}
    for turn, name in enumerate(names[at] for at in order):
        near = [sum(float(c @ centers[n][i]) for n, i in chosen.items()) for c in centers[name]]
        left = sorted(range(len(near)), key=lambda i: -near[i])
        if selection == "drop_i":
            left = left[min(turn, len(near) - 1) :]
        elif turn:
            left = left[::-1][: len(names) - turn]
        chosen[name] = max(left, key=lambda i: (sizes[name][i], -near[i]))
    found = {}
    for name, index in chosen.items():
        scores = public @ centers[name][index]
        below = [row for row in range(len(public)) if alpha is None or scores[row] < alpha]
        found[name] = sorted(below, key=lambda row: -scores[row])[:number]
    return found


@pytest.mark.parametrize("selection", ["drop_i", "keep_n_minus_i"])
@pytest.mark.parametrize("alpha", [0.45, 0.7, None])
def test_feddca_is_algorithm_1(alpha, selection):
    augmentation = FedDCA(ENCODER, number=12, clusters=6, alpha=alpha, selection=selection)
    added = augmentation.augment(CLIENTS, PUBLIC, seed=3)
    check(added, 12)
    sent = compute_centers(ENCODER, CLIENTS, 6, seed=3)
    centers, sizes = ({c: own[at] for c, own in sent.items()} for at in (0, 1))
    public = vectors(PUBLIC)
    assert rows_of(added) == written_out(centers, sizes, 3, public, 12, alpha, selection)
    top = max(row.score for rows in added.values() for row in rows)
    assert top < (alpha or 1)
    notes = augmentation.record()["clients"]
    assert {own["sent_bytes"] for own in notes.values()} == {6 * 64 * 4 + 6 * 8}
    for client, rows in added.items():
        scores = public[[row.row for row in rows]] @ centers[client][notes[client]["chosen"]]
        np.testing.assert_allclose([row.score for row in rows], scores, rtol=1e-5)


@pytest.mark.parametrize("change", [{"selection": "keep_n_minus_i"}, {"alpha": 0.45}])
def test_a_setting_bites_here(change):
    """Five clients with six centres each: otherwise the tests above and below would say nothing of it."""
    one, other = (FedDCA(ENCODER, 12, clusters=6, **{"alpha": None, **more}) for more in ({}, change))
    assert rows_of(one.augment(CLIENTS, PUBLIC, 3)) != rows_of(other.augment(CLIENTS, PUBLIC, 3))
    assert FedDCA(ENCODER, 12).settings()["selection"] == "drop_i"


def test_two_clients_of_one_kind_are_sent_apart():
    """Both have the same two topics, one of them twice as often: one client is sent what the other is not."""
    words = [TOPICS[0]] * 20 + [TOPICS[1]] * 10
    both = [{"instruction": f"{text} {'abcdefghij'[n % 10]}", "response": ""} for n, text in enumerate(words)]
    clients = {"c0": both, "c1": both}
    added = FedDCA(ENCODER, 10, clusters=2, alpha=None).augment(clients, PUBLIC, seed=0)
    counts = [[row.fields["response"] for row in rows].count("0") for rows in added.values()]
    assert min(counts) <= 1
    assert max(counts) >= 9
    direct = DirectRetrieval(ENCODER, 10, clusters=2).augment(clients, PUBLIC, seed=0)
    assert all(3 <= [row.fields["response"] for row in rows].count("0") <= 7 for rows in direct.values())


def test_direct_retrieval_takes_its_share_of_every_centre():
    augmentation = DirectRetrieval(ENCODER, number=12, clusters=4)
    added = augmentation.augment(CLIENTS, PUBLIC, seed=3)
    check(added, 12)
    public = vectors(PUBLIC)
    for client, own in compute_centers(ENCODER, CLIENTS, 4, seed=3).items():
        taken = []
        for center in own.centers:
            nearest = [row for row in np.argsort(-(public @ center), kind="stable") if row not in taken]
            taken += nearest[:3]
        assert sorted(taken) == sorted(row.row for row in added[client])
    assert augmentation.record() == {"sent_bytes": dict.fromkeys(CLIENTS, 4 * 64 * 4 + 4 * 8)}


def test_random_rows_depend_on_seed_and_client_alone():
    added = RandomSampling(number=20).augment(CLIENTS, PUBLIC, seed=0)
    rows = rows_of(added)
    assert all(len(set(own)) == 20 for own in rows.values())
    assert rows["c0"] != rows["c1"]
    assert rows_of(RandomSampling(20).augment({"c1": []}, PUBLIC, 0)) == {"c1": rows["c1"]}
    assert rows_of(RandomSampling(20).augment(CLIENTS, PUBLIC, 1)) != rows
    drawn = [RandomSampling(60).augment({"c": []}, PUBLIC, seed)["c"] for seed in range(40)]
    share = np.mean([row.fields["response"] == "0" for rows in drawn for row in rows])
    assert abs(share - 0.25) < 0.03  # a quarter of the rows; three standard deviations of 2,400 draws


def test_fewer_rows_than_clusters_and_fewer_public_rows_than_wanted():
    clients = {"c0": make(0, 2), "c1": [make(1, 1)[0]] * 3}
    augmentation = FedDCA(ENCODER, number=500, clusters=10, alpha=None)
    added = augmentation.augment(clients, PUBLIC, seed=0)
    assert [len(rows) for rows in added.values()] == [240, 240]
    notes = augmentation.record()["clients"]
    assert [len(own["sizes"]) for own in notes.values()] == [2, 1]
    assert notes["c1"]["sizes"] == [3]
    direct = DirectRetrieval(ENCODER, number=500).augment(clients, PUBLIC, seed=0)
    assert [len(rows) for rows in direct.values()] == [240, 240]


def test_all_rows_above_alpha_give_nothing_and_the_reason():
    augmentation = FedDCA(ENCODER, number=3, alpha=-0.99)
    assert augmentation.augment(CLIENTS, PUBLIC, seed=0) == {client: [] for client in CLIENTS}
    assert augmentation.why_fewer() == "no more rows lie below alpha=-0.99"
    assert FedDCA(ENCODER, number=3, alpha=None).why_fewer() == "no more rows"


@pytest.fixture
def poor_graph(monkeypatch):
    """Graphs of few links that start at ef = number: they miss much of 240 rows."""
    pytest.importorskip("hnswlib")
    for name, value in {"LINKS": 4, "BUILD_EFFORT": 10, "MIN_EFFORT": 1, "SEARCH_EFFORT": 1}.items():
        monkeypatch.setattr(vector_index, name, value)


def augmentations(**settings):
    """One of each kind that searches an index; FedDCA* with a projector that changes nothing."""
    star = FedDCAStar(ENCODER, ENCODER, projector="none", number=12, clusters=6, alpha=None, **settings)
    star._load_projector = lambda: types.SimpleNamespace(project=lambda centers: centers)
    return {
        "FedDCA": FedDCA(ENCODER, number=12, clusters=6, alpha=None, **settings),
        "FedDCAStar": star,
        "DirectRetrieval": DirectRetrieval(ENCODER, number=12, clusters=6, **settings),
    }


@pytest.mark.parametrize("name", ["FedDCA", "FedDCAStar", "DirectRetrieval"])
def test_the_recall_of_a_graph_is_raised_printed_and_recorded(name, poor_graph, monkeypatch, caplog):
    exact, poor = augmentations()[name], augmentations(index="hnsw", index_recall=0.0)[name]
    right, missed = exact.augment(CLIENTS, PUBLIC, 0), poor.augment(CLIENTS, PUBLIC, 0)
    assert "index" not in exact.record()
    (tried,) = poor.record()["index"]["tried"]
    assert tried["recall"] < 0.99
    assert rows_of(missed) != rows_of(right)
    for price, searched in ((0, "hnsw"), (1000, "exact")):  # of a further ef
        monkeypatch.setattr(vector_index, "ROWS_PER_CANDIDATE", price)
        raised = augmentations(index="hnsw", index_recall=1.0)[name]
        with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
            caplog.clear()
            assert rows_of(raised.augment(CLIENTS, PUBLIC, 0)) == rows_of(right)
        notes = raised.record()["index"]
        assert (notes["searched"], notes["number"], notes["target"]) == (searched, 12, 1.0)
        assert notes["queries"] == (30 if name == "DirectRetrieval" else 5)
        assert notes["tried"][0] == tried
        assert (notes["tried"][-1]["recall"] == 1) == (searched == "hnsw")
        (line,) = (text for text in caplog.messages if text.startswith("index of"))
        assert line.startswith(f"index of 240 x 64: hnsw, ef {notes['tried'][-1]['ef']} for 12 rows, recall ")


def test_one_of_several_processes_measures_the_recall_for_all(poor_graph, monkeypatch):
    monkeypatch.setattr(vector_index, "ROWS_PER_CANDIDATE", 0)
    calls, reach = [], vector_index.reach_recall
    monkeypatch.setattr(retrieval, "reach_recall", lambda *given: calls.append(1) or reach(*given))
    alone = FedDCA(ENCODER, 12, 6, index="hnsw")
    added = alone.augment(CLIENTS, PUBLIC, 0)
    assert len(alone.record()["index"]["tried"]) > 1
    assert alone.settings()["index_recall"] == alone.record()["index"]["target"] == 0.99
    calls.clear()

    def body(rank):
        own = FedDCA(ENCODER, 12, 6, index="hnsw")
        return own.augment(CLIENTS, PUBLIC, 0), own.record()

    assert on_team(monkeypatch, 3, body) == [(added, alone.record())] * 3
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("make_one", "complaint"),
    [
        (lambda: FedDCA(ENCODER, 0), "number=0"),
        (lambda: FedDCA(ENCODER, 5, index_recall=-0.1), r"index_recall=-0.1 must be in \[0, 1\]"),
        (lambda: FedDCA(ENCODER, 5, index_recall=1.5), r"index_recall=1.5 must be in \[0, 1\]"),
        (lambda: FedDCA(ENCODER, 5, clusters=0), "clusters=0 must be at least 1"),
        (lambda: FedDCA(ENCODER, 5, alpha=1.5), r"alpha=1.5 must be in \(-1, 1\]"),
        (lambda: DirectRetrieval(ENCODER, 5, alpha=-1), "alpha=-1 must be in"),
        (lambda: FedDCAStar(ENCODER, ENCODER, "p.ckpt", 5, clusters=-1), "clusters=-1"),
        (lambda: FedDCA(ENCODER, 5, selection="keep"), "selection='keep' is not one of drop_i, keep_n_min"),
        (lambda: FedDCAStar(ENCODER, ENCODER, "p.ckpt", 5, selection=""), "selection='' is not one of"),
    ],
)
def test_settings_out_of_range_are_refused(make_one, complaint):
    with refusal(complaint):
        make_one()


class Turned(Encoder):
    """Another encoder's vectors, turned by a fixed rotation into more dimensions."""

    identity = "turned"
    dimension = 96

    def __init__(self):
        self.turn = np.linalg.qr(np.random.default_rng(1).standard_normal((96, 64)))[0].astype(np.float32)

    def encode(self, texts):
        return ENCODER.encode(texts) @ self.turn.T


def save(module, file):
    trainer = make_trainer(enable_checkpointing=True)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(file)
    return str(file)


@pytest.fixture
def projector(tmp_path):
    """The rotation itself: ReLU(x) - ReLU(-x) is x."""
    import torch

    turn = torch.from_numpy(Turned().turn)
    module = ProjectorModule(64, 96, hidden_dimension=128)
    with torch.no_grad():
        module.layers[0].weight.copy_(torch.cat([torch.eye(64), -torch.eye(64)]))
        module.layers[2].weight.copy_(torch.cat([turn, -turn], dim=1))
        for layer in (module.layers[0], module.layers[2]):
            layer.bias.zero_()
    return save(module, tmp_path / "projector.ckpt")


@pytest.mark.parametrize("selection", ["drop_i", "keep_n_minus_i"])
def test_a_perfect_projector_gives_what_the_large_encoder_would(projector, selection):
    star = FedDCAStar(ENCODER, Turned(), projector, number=12, clusters=6, alpha=0.6, selection=selection)
    added = star.augment(CLIENTS, PUBLIC, seed=3)
    check(added, 12)
    large = FedDCA(ENCODER, 12, 6, 0.6, selection=selection)
    assert rows_of(added) == rows_of(large.augment(CLIENTS, PUBLIC, seed=3))
    assert {own["sent_bytes"] for own in star.record()["clients"].values()} == {6 * 64 * 4 + 6 * 8}


def test_the_record_knows_a_projector_by_its_content(projector, tmp_path):
    def settings(file, number=5):
        return FedDCAStar(ENCODER, Turned(), str(file), number).settings()

    moved = tmp_path / "moved.ckpt"
    moved.write_bytes((tmp_path / "projector.ckpt").read_bytes())
    assert settings(projector) == settings(moved)
    assert settings(projector)["client_encoder"] == ENCODER.identity
    assert settings(projector) != settings(save(ProjectorModule(64, 96), tmp_path / "other.ckpt"))
    with pytest.raises(FileNotFoundError, match=r"projector=.*none.ckpt: no such file. Make one with"):
        settings(tmp_path / "none.ckpt")


def test_a_projector_for_other_encoders_is_refused(projector):
    with refusal(r"is for encoders of 64 and 96 dimensions, but client_encoder has 64 and"):
        FedDCAStar(ENCODER, ENCODER, projector, 5).augment(CLIENTS, PUBLIC, 0)


def write_added(folder, rows):
    folder.mkdir()
    lines = [
        {"client": client, "rank": rank, "row": row, "score": 0.5, "source": "x", "fields": {"prompt": "p"}}
        for client, numbers in rows.items()
        for rank, row in enumerate(numbers)
    ]
    write_rows(folder / "added.jsonl", lines)
    return str(folder)


def test_records_are_compared_client_by_client(tmp_path):
    reference = write_added(tmp_path / "large", {"u": [4, 5, 6, 7], "v": [1, 2]})
    same = write_added(tmp_path / "same", {"v": [2, 1], "u": [7, 6, 5, 4]})
    other = write_added(tmp_path / "other", {"u": [4, 9], "v": [4, 5]})
    assert retrieval_overlap(same, reference) == 1.0
    assert retrieval_overlap(other, reference) == 0.125  # a quarter for u, nothing for v


def test_what_is_missing_is_named(tmp_path):
    with refusal("no client has rows in the reference"):
        overlap({"u": [1]}, {"u": []})
    with refusal(r"added\.jsonl: there is no such file: give the augmentation_folder"):
        retrieval_overlap(str(tmp_path), str(tmp_path))
