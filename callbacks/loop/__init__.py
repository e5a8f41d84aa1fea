"""Federated loop: a Lightning epoch becomes a communication round.

`federated_loop` is the callback; `plan` chooses clients and batches, `visits` hold the work at clients, `run` the view of
the run for an algorithm, `modes` say whose visits make up a round, `optimizers` and `buffers` the start of a visit,
`checkpoint` the state after a stop, `guard` the checks, `limits` bounds of one client, and `devices` with `fitted_step` the
visits on emulated devices.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"FederatedLoop": "federated_loop", "Limits": "limits"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
