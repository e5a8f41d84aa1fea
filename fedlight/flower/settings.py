"""Settings of an app (``[tool.flwr.app.config]``), which server and nodes share, and of a node (``--node-config``)."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedlight.flower.messages import Bounds

OF_APP = {
    "config": "config of fedlight, relative to the app's folder",
    "set": "further settings as on the command line, such as --federated.local_steps 3",
    "min-clients": "clients that have to be there for a start; 0: as many as a round asks, which is the least",
    "deadline-seconds": "wall time after which a round goes on without those that have not answered; 0: it waits",
    "wait-seconds": "longest wait for the clients of a start, and before a round while no node is there",
    "max-clients": "most clients of one node; a node that names more does not take part",
    "max-metrics": "most training metrics of a visit; a client with more is dropped from the round",
    "max-header-mib": "most MiB of a node's reply beside the tensors that are due; the rest of a longer one is not read",
    "secure-aggregation": "whether the server learns the sum of the nodes' updates alone; three nodes at least",
}
"""Name of a setting of the app -> its meaning."""
OF_NODE = ("folder", "clients", "partition-id", "num-partitions")
OF_RUN = "[tool.flwr.app.config]"


def config_arguments(run: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``fedlight fit`` that the settings of an app mean.

    Raises:
        ValueError: a setting is unknown, or there is no config.
    """
    if unknown := [name for name in run if name not in OF_APP]:
        raise ValueError(f"{OF_RUN} has {unknown[0]}, and knows {', '.join(OF_APP)}")
    if not run.get("config"):
        raise ValueError(f"{OF_RUN} has no config: set config to the YAML of the run")
    return ["--config", file_of_app(str(run["config"])), *shlex.split(str(run.get("set", "")))]


def bounds_of(run: Mapping[str, Any]) -> Bounds:
    """Return the bounds on a node's replies from the settings of an app.

    Raises:
        ValueError: a setting is no whole number of at least 1.

    Examples:
        >>> bounds_of({"max-clients": 500})
        Bounds(clients=500, metrics=100, header_mib=16)
    """
    names = [name for name in ("max-clients", "max-metrics", "max-header-mib") if name in run]
    given = {name: int(number_of(run, name, least=1, whole=True)) for name in names}
    return Bounds(**{name.removeprefix("max-").replace("-", "_"): value for name, value in given.items()})


def number_of(
    settings: Mapping[str, Any],
    name: str,
    default: int = 0,
    least: int = 0,
    whole: bool = False,
    where: str = OF_RUN,
) -> float:
    """Return a number from the settings of an app, or of those that ``where`` names.

    Raises:
        ValueError: it is none, below the least, or not ``whole`` where it has to be.
    """
    value = settings.get(name, default)
    try:
        number = -1.0 if isinstance(value, bool) else float(value)  # true is an int
    except (TypeError, ValueError):
        number = -1.0
    if not number >= least or (whole and not number.is_integer()):  # also NaN
        kind = "whole number" if whole else "number"
        raise ValueError(f"{where} has {name}={value!r}: set it to a {kind} of at least {least}")
    return number


def is_secure(run: Mapping[str, Any]) -> bool:
    """Return whether the settings of an app ask for secure aggregation.

    Raises:
        ValueError: the setting is neither true nor false.
    """
    value = run.get("secure-aggregation", False)
    if not isinstance(value, bool):
        raise ValueError(f"{OF_RUN} has secure-aggregation={value!r}: set it to true or false")
    return value


def file_of_app(name: str) -> str:
    """Return the path of a file of the app, or ``name`` where there is none."""
    # Flower installs an app in its own folder, puts that in front of Python's path, and starts the processes elsewhere.
    apps = [Path(folder) for folder in sys.path if folder and (Path(folder) / "pyproject.toml").is_file()]
    return next((str(folder / name) for folder in apps if (folder / name).is_file()), name)


def node_settings(
    node: Mapping[str, Any], node_id: int
) -> tuple[dict[str, Any], Path, list[str] | None, tuple[int, int]]:
    """Return a node's own settings of the config, its folder, the clients that it serves, and its part of them.

    Names with a dot are settings of the config, such as ``data.init_args.source``. ``clients`` are ids, divided by commas.
    In a simulation every node has the rows of all and serves a part of the clients. Without ``folder``, it is one below
    Flower's own folder.

    Raises:
        ValueError: a setting is unknown, or one of the federation other than ``local_steps``.

    Examples:
        >>> values, folder, clients, part = node_settings({"data.init_args.source": "/data/a.jsonl", "clients": "a,b"}, 7)
        >>> values, folder.name, clients, part
        ({'data.init_args.source': '/data/a.jsonl'}, 'node-7', ['a', 'b'], (0, 1))
    """
    values = {name: value for name, value in node.items() if "." in name}
    unknown = [name for name in node if name not in values and name not in OF_NODE]
    # Steps stand in each reply; anything else would be another federation in silence.
    unknown += [name for name in values if re.match(r"federated\.(?!(init_args\.)?local_steps$)", name)]
    if unknown:
        raise ValueError(
            f"--node-config has {unknown[0]}: give {', '.join(OF_NODE)}, or a setting of the config, such as "
            "data.init_args.source='...'; those of federated but local_steps are the same for all, in the app's config"
        )
    where = "--node-config"
    part = (
        int(number_of(node, "partition-id", 0, whole=True, where=where)),
        int(number_of(node, "num-partitions", 1, least=1, whole=True, where=where)),
    )
    if part[0] >= part[1]:
        raise ValueError(
            f"--node-config has partition-id={part[0]} of num-partitions={part[1]}: number the nodes from 0 to {part[1] - 1}"
        )
    # Nodes of a simulation have other ids in each run, and their parts stay.
    name = f"node-{part[0] if part[1] > 1 else node_id}"
    clients = None
    if "clients" in node:  # Flower reads the id 0 as a number
        clients = [client.strip() for client in str(node["clients"]).split(",")]
    # The current folder may be another one after a restart.
    kept = Path(os.environ.get("FLWR_HOME") or "~/.flwr").expanduser() / "fedlight" / name
    return values, Path(str(node.get("folder", kept))).expanduser(), clients, part
