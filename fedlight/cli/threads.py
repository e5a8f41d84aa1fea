"""``--threads N``: number of threads of torch and of the libraries under it, a setting of all commands.

It belongs to the machine and not to the experiment, so it is no key of a config.
"""

import os
import sys

NAME = "--threads"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Variables of the environment that torch's and numpy's libraries read."""


def take_threads(arguments: list[str]) -> list[str]:
    """Set the number of threads if the arguments give one, anywhere; return the other arguments.

    Raises:
        ValueError: the number is missing, no whole number, or below 1.
    """
    others, words = [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == NAME:
            number = value if equals else next(words, "")
            # Other scripts have digits too.
            if not number.isascii() or not number.isdecimal() or int(number) < 1:
                given = f"{NAME} {number}".rstrip()
                raise ValueError(f"{given} needs a number of at least 1, as in {NAME} 1")
            # Before a command imports the libraries, which read these when they are loaded; processes inherit them.
            os.environ.update(dict.fromkeys(VARIABLES, number))
            if "torch" in sys.modules:  # in a process that has run another command
                sys.modules["torch"].set_num_threads(int(number))
        else:
            others.append(word)
    return others
