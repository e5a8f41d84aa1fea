"""Fleets of devices that are written for a test, and runs with them."""

from copy import copy

from plain_lightning import Numbers, module, ten_clients, trainer

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.devices.fleet import Fleet

FAST = {
    "memory_gib": 64,
    "tflops": 10,
    "download_mbps": 100,
    "upload_mbps": 50,
    "watts": 10,
    "memory_share": 1,
}


def device_file(folder, name, **changes):
    """A profile: the file's path."""
    file = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{key}: {value}\n" for key, value in {**FAST, **changes}.items()))
    return str(file)


def make_fleet(folder, seed=0, deadline_seconds=None, over_selection=1.0, buffered=None, **devices):
    """A fleet of equal parts: ``make_fleet(tmp_path, slow={"tflops": 1}, fast={})``."""
    files = {device_file(folder, name, **changes): 1.0 for name, changes in devices.items()}
    return Fleet(files, seed, 1.0, deadline_seconds, over_selection, buffered)


def without_wall(rows):
    """What must not depend on this machine."""
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def with_buffer(fleet, fedbuff):
    """The same fleet, for buffered rounds."""
    fleet = copy(fleet)
    fleet.buffered = fedbuff
    return fleet


def rounds_of(rounds=3, clients=ten_clients, model=None, **loop):
    """Rows of all rounds, the model and the loop."""
    rows = []

    class Watch(VisitLog):
        def on_train_epoch_end(self, trainer, pl_module):
            rows.extend(dict(row) for row in made.visit_records)

    made = FederatedLoop(**{"clients_per_round": 3, "local_steps": 2, **loop})
    model = model or module()
    fit = trainer(rounds, [made, Watch()])
    fit.fit(model, FederatedWrapper(Numbers(), clients))
    return rows, model, made, fit
