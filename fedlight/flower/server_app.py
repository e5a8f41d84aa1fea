"""Flower's ServerApp: the server of a deployment."""

from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlight.flower.grid import OverGrid
from fedlight.flower.server import serve
from fedlight.flower.settings import bounds_of, config_arguments, is_secure, number_of

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds, or go on from the newest checkpoint."""
    run: dict[str, Any] = dict(context.run_config)
    arguments, bounds = config_arguments(run), bounds_of(run)
    serve(
        arguments,
        OverGrid(grid, bounds),
        min_clients=int(number_of(run, "min-clients", 0, whole=True)),
        deadline_seconds=number_of(run, "deadline-seconds", 0) or None,  # an app's settings have no null
        wait_seconds=number_of(run, "wait-seconds", 600),
        secure=is_secure(run),
        bounds=bounds,
    )
