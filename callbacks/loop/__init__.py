"""The federated loop: a Lightning epoch becomes a communication round.

`federated_loop` is the callback; `plan` chooses clients and batches, `visit` is what happens at one client, `run` what an
algorithm sees of the run, `optimizers` and `buffers` what a visit starts with, `checkpoint` what a stop leaves, `guard` what
is refused, and `devices` with `fitted_step` how visits run on emulated devices.
"""

from fedlight.support.lazy import lazy_names

_FILES = {"FederatedLoop": "federated_loop"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
