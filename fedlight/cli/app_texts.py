"""Texts of an app's folder: its pyproject.toml, README.md and .gitignore."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from fedlight.flower.messages import Bounds
from fedlight.flower.settings import OF_APP

GITIGNORE = "# What Flower does not send to the nodes.\nruns/\nnodes/\nkeys/\ncertificates/\nrehearsal/\nsuperlink.db*\n"

DEFAULTS: dict[str, str | int | bool] = {
    "set": "",
    "min-clients": 0,
    "deadline-seconds": 0,
    "wait-seconds": 600,
    "max-clients": Bounds.clients,
    "max-metrics": Bounds.metrics,
    "max-header-mib": Bounds.header_mib,
    "secure-aggregation": False,
}

PYPROJECT = Template("""\
# A Flower app that runs a config of fedlight; README.md has the commands.

[project]
name = "$name"
version = "1.0.0"
description = "$config of fedlight on real devices"
license = "Apache-2.0"
# fedlight[flower] is installed on all machines beforehand, in one version, so nothing is fetched at a start.
dependencies = []

[tool.flwr.app]
publisher = "fedlight"             # yours, where you publish the app

[tool.flwr.app.components]
serverapp = "fedlight.flower.server_app:app"
clientapp = "fedlight.flower.client_app:app"

[tool.flwr.app.config]             # for one run: flwr run . --run-config 'deadline-seconds=600'
$settings
""")


def pyproject(name: str, config: str, settings: Sequence[str]) -> str:
    """Return the pyproject.toml of an app."""
    values = {"config": config, **DEFAULTS, "set": shlex.join(settings)}  # both ends split it by shlex
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
    lines = [f"# {OF_APP[key]}\n{key} = {text}" for key, text in texts.items()]
    return PYPROJECT.substitute(name=name, config=config, settings="\n".join(lines))


README = Template("""\
# $name

`$config` of fedlight, as a [Flower](https://flower.ai) app. The file is that of the emulator, but for
`trainer.default_root_dir`. On every machine, in one version: `pip install "fedlight[flower]"`.
$notes
## Simulation

Two nodes on this machine, which share the clients of the data:

```bash
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1    # nothing to fetch: fedlight is installed
flwr run . --stream --federation-config 'num-supernodes=2'
```

`flwr run` starts a local SuperLink if there is none and leaves it running; `client-resources-num-cpus` and
`client-resources-num-gpus` are further settings of `--federation-config`. `flwr log RUN_ID --show` prints the log of
a run, `flwr list` all runs, `flwr stop RUN_ID` ends one.

## SuperLink and SuperNodes

A rehearsal on one machine, with TLS and registered keys, which stops by itself:

```bash
fedlight flower up "$folder" --nodes 2
```

By hand, here without TLS, each command in a terminal of its own; a second node takes `--port 9095` and `partition-id=1`:

```bash
flower-superlink --insecure --database "$folder/superlink.db" --disable-runtime-dependency-installation
flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9094 \\
  --node-config 'folder="$folder/nodes/a" partition-id=0 num-partitions=2'
```

`~/.flwr/config.toml` names the SuperLink, and `flwr run` takes its name:

```toml
[superlink.here]
address = "127.0.0.1:8000"
insecure = true
```

```bash
flwr run . here --stream
```

## TLS

A certificate authority of your own, and a certificate for the SuperLink; for other machines add their names to
`subjectAltName`:

```bash
mkdir -p certificates && cd certificates
openssl req -x509 -newkey rsa:4096 -sha256 -days 365 -nodes -keyout ca.key -out ca.crt -subj "/CN=$name"
openssl req -newkey rsa:4096 -sha256 -nodes -keyout server.key -out server.csr -subj "/CN=localhost"
printf "subjectAltName=DNS:localhost,IP:127.0.0.1" > server.ext
openssl x509 -req -sha256 -days 365 -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial \\
  -extfile server.ext -out server.pem
cd ..
flower-superlink --database "$folder/superlink.db" --disable-runtime-dependency-installation \\
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.pem --ssl-keyfile certificates/server.key
flower-supernode --superlink 127.0.0.1:8000 --root-certificates certificates/ca.crt --port 9094 \\
  --node-config 'folder="$folder/nodes/a" partition-id=0 num-partitions=2'
```

```toml
[superlink.here]
address = "127.0.0.1:8000"
root-certificates = "$folder/certificates/ca.crt"    # an absolute path
```

`ca.key` and `server.key` stay where they are; nodes and those who run `flwr` get `ca.crt`.

## Node authentication

The SuperLink admits registered keys alone; it needs TLS. A key for each node, registered by whoever runs the
SuperLink:

```bash
mkdir -p keys && ssh-keygen -t ecdsa -b 384 -N "" -f keys/a
flower-superlink --enable-supernode-auth --database "$folder/superlink.db" --disable-runtime-dependency-installation \\
  --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.pem --ssl-keyfile certificates/server.key
flwr supernode register keys/a.pub here
flower-supernode --superlink 127.0.0.1:8000 --root-certificates certificates/ca.crt --port 9094 \\
  --auth-supernode-private-key keys/a --node-config 'folder="$folder/nodes/a" partition-id=0 num-partitions=2'
```

## Settings of a node

`--node-config` takes, in one text, divided by spaces:

* `folder="/var/lib/fedlight/a"`: where the node keeps what its clients remember. Give an absolute path, and the same
  one after a restart. Without it, this is `fedlight/node-ID` below Flower's own folder (`~/.flwr` or `FLWR_HOME`);
  the ID is another one after a restart, unless the node has a registered key.
* any setting of the config, with its dots: `data.init_args.source="/data/votes.jsonl"`, `trainer.accelerator="cuda"`
* `clients="alice,bob"`: which of the clients in its rows the node serves; all without it
* `partition-id=0 num-partitions=2`: every second one of these; for tries in which all nodes have the same rows

Before it joins, `fedlight client check --config $config --data.init_args.source=/data/votes.jsonl` says whether it
can take part.

## Where the run is, and after a stop

The server writes to `$folder/runs`; on another machine, set `trainer.default_root_dir` in `$config`. Flower runs the
app from a copy in its own folder, and relative paths begin where the SuperLink or SuperNode was started.

A run begins when $clients clients are there (`min-clients`; `federated.clients_per_round` for 0). After a stop of any
kind, start what is gone again and give `flwr run .` once more: it goes on from the newest checkpoint in that folder,
with the same result as without the stop. A node has to have the `folder` that it had. For a new run, take another
`trainer.default_root_dir`. With `deadline-seconds` a round goes on without the clients that have not answered;
`visits.csv` names them and the reason.
""")


def readme(name: str, config: str, folder: Path, clients: int, notes: Sequence[str]) -> str:
    """Return the README.md of an app.

    Args:
        name: of the app.
        config: file name of its config.
        folder: its absolute path.
        clients: least number of them for a start.
        notes: sentences about callbacks and paths.
    """
    listed = "".join(f"\n* {note[:1].upper()}{note[1:]}." for note in notes) + "\n" * bool(notes)
    return README.substitute(name=name, config=config, folder=folder, clients=clients, notes=listed)
