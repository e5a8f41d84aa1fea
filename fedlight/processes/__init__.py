"""Several processes that train one federation, each its share of every round: ``trainer.strategy=client_parallel``.

`strategy` starts the processes through Lightning's launchers and environments, `joining` brings them together and notices
the loss of one, `team` exchanges results, and `work` shares the work around the rounds, such as generation.
"""

from fedlight.support.lazy import room_names

_FILES = {"Team": "team", "ALONE": "team", "share": "team", "current_team": "team"}
__getattr__ = room_names(__name__, _FILES)
