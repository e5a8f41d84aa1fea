"""Neither a stop after any round nor the order of a round's clients changes a bit, in no kind of run."""

import shutil

import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from plain_lightning import Regression
from ranked import RANKS, Ranked
from shared_runs import (
    KINDS,
    NO_VALIDATION,
    Exploding,
    Kind,
    Scheduled,
    files_of,
    folder_of,
    pairs,
    train,
    write_devices,
)
from stacked import Lora, Points
from tastes import Adapters, Tastes

from fedlight import Ditto, FedAdam, FedAvg, FedAvgM, FedBiscuit, FedProx, LocalOnly, Scaffold, TopK, Wire
from fedlight.callbacks.loop.parts import DPSGD, AveragedBuffers, LocalBuffers, Malicious
from fedlight.federation import ClientMemories, CoordinateMedian, FedAdagrad, FedYogi, PrivateMean
from fedlight.federation.algorithms import SoftGroups
from fedlight.federation.algorithms.lora import FlexLoRA, HetLoRA
from fedlight.federation.byzantine import Bulyan, FLTrust, GeometricMedian, Krum, Liars
from fedlight.federation.forward import ZerothOrder

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


def plain(**settings):
    return Regression(**{"optimizer": "SGD", "dropout": 0.0, **settings})


def on_disk(root, limit_mib=0.0):
    return ClientMemories(str(root / "clients"), limit_mib)


def moody(root):
    """Devices that are away at times, or too late."""
    night = "{intervals_hours: [[0, 0.2]], period_hours: 0.5, spread_hours: 0.3}"
    devices = {"moody": {"availability": 0.6, "tflops": 0.001}, "nightly": {"availability": night}}
    return make_fleet(root / "moody", deadline_seconds=400.0, over_selection=1.5, **devices)


def selectors(count):
    return lambda: Adapters(count, "AdamW")


def of_factors(algorithm, model=Ranked, **loop):
    return Kind({"algorithm": algorithm, **loop}, model, Points, NO_VALIDATION)


def with_norm(part):
    return Kind({"algorithm": Scaffold(), "parts": [part]}, lambda: plain(norm=True), clients=pairs)


def forward_only(at_once, **loop):
    forward = ZerothOrder(0.01, perturbations=2)
    loop |= {"forward": forward, "clients_at_once": at_once, "clients_per_round": 4, "local_steps": 3}
    return Kind(loop, lambda: Lora(dropout=0.2, lr=0.02), Points, NO_VALIDATION)


LIARS = Liars(clients=["c1", "c4", "c6"])
MORE = {
    "avgm": lambda root: Kind({"algorithm": FedAvg("normalized"), "server": FedAvgM(lr=0.9, beta=0.8)}),
    "adagrad": lambda root: Kind({"server": FedAdagrad(lr=0.1, tau=0.01)}),
    "adam": lambda root: Kind({"server": FedAdam(lr=0.1, tau=0.01)}),
    "yogi": lambda root: Kind({"server": FedYogi(lr=0.1, tau=0.01)}),
    "median": lambda root: Kind({"aggregation": CoordinateMedian(), "clients_per_round": 5}),
    "krum": lambda root: Kind({"aggregation": Krum(0.2), "clients_per_round": 7}),
    "multi_krum": lambda root: Kind({"aggregation": Krum(0.2, multi=True), "clients_per_round": 7}),
    "bulyan": lambda root: Kind({"aggregation": Bulyan(0.15), "clients_per_round": 8}),
    "geometric": lambda root: Kind({"aggregation": GeometricMedian(), "clients_per_round": 7}),
    "fltrust": lambda root: Kind({"aggregation": FLTrust("c1"), "clients_per_round": 10}),
    "clip_quantile": lambda root: Kind({"aggregation": PrivateMean(0.05, 0.5, delta=0.01, clip_quantile=0.5)}),
    "dpsgd": lambda root: Kind({"parts": [DPSGD(1.0, 1.0)]}),
    "liars": lambda root: Kind({"parts": [Malicious("noise", 2.0, LIARS)], "clients_per_round": 6}),
    "scaffold_in_ram": lambda root: Kind({"algorithm": Scaffold(), "clients_per_round": 5}, rounds=4),
    "scaffold_moves": lambda root: Kind(  # to the disk, in the second round
        {"algorithm": Scaffold(), "memory": on_disk(root, 0.001), "clients_per_round": 5}, rounds=4
    ),
    "scaffold_top_k": lambda root: Kind({"algorithm": Scaffold(), "channel": Wire(up=TopK(0.2))}, rounds=4),
    "fedbiscuit_adamw": lambda root: Kind(
        {"algorithm": FedBiscuit(1, 3)}, selectors(3), Tastes, NO_VALIDATION, rounds=8
    ),
    "soft_adamw": lambda root: Kind(
        {"algorithm": FedBiscuit(1, 2, SoftGroups(), group_by="own")},
        selectors(3), Tastes, NO_VALIDATION, rounds=7,
    ),
    "local_only_on_disk": lambda root: Kind({"algorithm": LocalOnly(), "memory": on_disk(root)}, rounds=4),
    "local_buffers_on_disk": lambda root: Kind(
        {"parts": [LocalBuffers()], "memory": on_disk(root)}, lambda: Regression(norm=True), clients=pairs
    ),
    "zero_padding": lambda root: of_factors(HetLoRA(sparsity_weighted=False, ranks=RANKS)),
    "hetlora_skip": lambda root: of_factors(HetLoRA(sparsity_weighted=False, missing="skip", ranks=RANKS)),
    "flexlora_padded": lambda root: of_factors(FlexLoRA(ranks=RANKS)),
    "forward_scaffold": lambda root: forward_only(1, algorithm=Scaffold()),
    "forward_ditto": lambda root: forward_only(1, algorithm=Ditto(0.5, personal_epochs=2)),
    "forward_at_once": lambda root: forward_only(3),
    "forward_scaffold_at_once": lambda root: forward_only(3, algorithm=Scaffold()),
    "forward_ditto_at_once": lambda root: forward_only(3, algorithm=Ditto(0.5, personal_epochs=2)),
    "scaffold_local_buffers": lambda root: with_norm(LocalBuffers()),
    "scaffold_average_buffers": lambda root: with_norm(AveragedBuffers()),
    "diverging_scaffold": lambda root: Kind({"algorithm": Scaffold(), "clients_per_round": 10}, Exploding),
    "at_once": lambda root: Kind(
        {"algorithm": FedProx(0.1), "clients_at_once": 3, "local_steps": 3},
        lambda: Lora("AdamW", 0.01), Points, NO_VALIDATION,
    ),
    "accumulation_changes": lambda root: Kind(callbacks=lambda: [GradientAccumulationScheduler({1: 3, 3: 2})], rounds=4),
    "schedules_of_a_pass": lambda root: Kind({"local_steps": None, "clients_per_round": 4}, Scheduled, rounds=4),
    "loss_scale": lambda root: Kind({"local_steps": 3}, plain, settings={"plugins": [half_precision()]}),
    "moody": lambda root: Kind({"fleet": moody(root), "clients_per_round": 2}, rounds=6),
    "moody_scaffold": lambda root: Kind(
        {"algorithm": Scaffold(), "fleet": moody(root), "clients_per_round": 2}, plain, rounds=6
    ),
}  # fmt: skip
RUNS = {**KINDS, **MORE}


def half_precision():
    """A scale that overflows in the first steps."""
    return MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**18))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an uninterrupted run of a kind leaves, and its folder."""
    root, left = tmp_path_factory.mktemp("whole"), {}
    write_devices(root)

    def of(name):
        if name not in left:
            left[name] = train(name, root, "whole", 1, kind=RUNS[name](root))
        return left[name], folder_of(root, name, "whole"), root

    return of


def rows_of(folder):
    """Rows of both tables, without empty cells."""
    return {
        file.rpartition("/")[2]: [{name: text for name, text in row.items() if text} for row in rows]
        for file, rows in files_of(folder).items()
    }


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_goes_on_from_any_checkpoint_ends_with_the_bits_of_the_whole_one(name, whole):
    expected, folder, root = whole(name)
    tables, saved = rows_of(folder), len([*(folder / "checkpoints").iterdir()])
    for done in {1, saved // 2 + 1, saved - 1} - {saved}:
        again = folder_of(root, name, f"from_{done}")
        (again / "checkpoints").mkdir(parents=True)
        shutil.copy(folder / f"checkpoints/epoch={done - 1}.ckpt", again / "checkpoints")
        assert train(name, root, again.parent.name, 1, resumes=True, kind=RUNS[name](root)) == expected
        for table, rows in rows_of(again).items():
            assert rows == tables[table][-len(rows) :]
            assert rows


@pytest.mark.parametrize("name", [name for name in RUNS if name != "buffered"])  # it has an order of its own
def test_the_order_of_a_rounds_clients_changes_no_bit(name, whole):
    expected, _, root = whole(name)
    kind = RUNS[name](root)
    algorithm = kind.loop.setdefault("algorithm", FedAvg())
    plan = type(algorithm).plan

    def backwards(*args):
        visits = plan(algorithm, *args)
        clients = [*dict.fromkeys(visit.client_id for visit in visits)]
        return sorted(visits, key=lambda visit: -clients.index(visit.client_id))

    algorithm.plan = backwards
    found = train(name, root, "backwards", 1, kind=kind)
    in_turn = kind.loop.get("clients_per_round") != 1 and kind.loop.get("clients_at_once", 1) == 1
    assert found.pop("rows") != expected["rows"] or not in_turn
    assert found == {key: value for key, value in expected.items() if key != "rows"}
