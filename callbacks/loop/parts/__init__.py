"""Parts of the loop: each is one concern of a round, made where the settings need it.

`part` is their base class, `order` makes those of a run, in the order that counts. `optimizers` gives each visit a fresh
start, `buffers` decides about running statistics and the like, `limits` bounds the effect of one client on a round,
`buffered` has buffered rounds, `dpsgd` protects single examples, `privacy_account` counts epsilon, `product_error` measures,
and `malicious` makes clients lie. Groups, forward-only visits and several processes have separate folders.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
