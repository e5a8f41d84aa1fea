"""Federated loop: a Lightning epoch becomes a communication round.

`federated_loop` is the callback; `plan` chooses clients and batches, `visits` hold the work at clients, `run` the view of
the run for an algorithm and for `parts`, one for each further concern of a round; `buffers` have the module's state,
`checkpoint` the state after a stop, `guard` the checks, and `devices` with `fitted_step` the visits on emulated devices.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
