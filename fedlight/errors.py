"""One clear line for what a user can mend; the stack on request."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program with the message of a bad setting, file or checkpoint instead of its stack.

    ``FEDLIGHT_TRACEBACK=1`` in the environment shows the stack.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    try:
        yield
    except (ValueError, OSError, MisconfigurationException) as error:
        if os.environ.get("FEDLIGHT_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        sys.exit(f"fedlight: {message}\n(FEDLIGHT_TRACEBACK=1 shows where)")
