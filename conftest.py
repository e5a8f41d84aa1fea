"""Files of the package that need an extra are collected, for the examples in them, where it is installed."""

from importlib.util import find_spec

NEED_FLOWER = (
    "client_app",
    "records",
    "secure/masks",
    "secure/node_side",
    "secure/server_side",
    "server_app",
)
collect_ignore = [] if find_spec("flwr") else [f"fedlight/flower/{name}.py" for name in NEED_FLOWER]
