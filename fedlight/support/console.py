"""Output of commands besides their results: errors in one line, progress bars, and no notices of libraries.

A notice of a library that asks for no action is left out. Each is listed by its logger and the start of its text, so new
ones are seen; messages of fedlight and warnings that ask for an action pass.
"""

import argparse
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from fedlight.support.files import printable
from fedlight.support.words import first_line, near

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

SECONDS_BETWEEN_LINES = 30
REFUSED = 2
"""Exit code for an error that the user can mend: of the arguments, a config, a file, the disk, or a missing package."""


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends the program as Ctrl-C does, with another exit code."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line and exit code 2 for an error that the user can mend, instead of a stack trace.

    ``FEDLIGHT_TRACEBACK=1`` in the environment shows the stack too. Ctrl-C ends the program with exit code 130, SIGTERM and
    SIGHUP with 143. Another error passes, so Python shows the stack and ends with 1. Notices of libraries are left out.
    """
    # Lightning would end with 0, or go on until the stage is over.
    before = signal.signal(signal.SIGTERM, _stop)
    hook = sys.unraisablehook
    sys.unraisablehook = partial(_stop_later, hook)
    # A closed terminal sends SIGHUP; under nohup it is ignored, and stays so.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, partial(_hang_up, [handle for handle in (1, 2) if os.isatty(handle)]))
    try:
        with quiet_logs():
            yield
    except KeyboardInterrupt as stop:
        for signum in (signal.SIGINT, signal.SIGTERM):  # another one would show a stack while Python ends
            signal.signal(signum, signal.SIG_IGN)
        print(f"fedlight: stopped {stop}".rstrip(), file=sys.stderr)
        sys.exit(128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT))
    except Exception as error:
        # The first is for `quiet_when_unread`.
        if isinstance(error, BrokenPipeError) or not _can_be_mended(error):
            raise
        if os.environ.get("FEDLIGHT_TRACEBACK"):
            traceback.print_exc()
        else:
            print(f"fedlight: {_message(error)}\n(FEDLIGHT_TRACEBACK=1 shows where)", file=sys.stderr)
        sys.exit(REFUSED)
    else:
        signal.signal(signal.SIGTERM, before)  # ours would show a stack while Python ends
    finally:
        sys.unraisablehook = hook


@contextmanager
def quiet_when_unread() -> Iterator[None]:
    """End with exit code 141, as by SIGPIPE, if the reader of the output is gone, as in ``fedlight --help | head -1``."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):
            raise  # rich turns the error into an exit with 1
        with suppress(OSError, ValueError):  # Python would flush once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


class OneLineArguments(argparse.ArgumentParser):
    """Parser that reports wrong arguments in one line, without the command's usage."""

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2; for an unknown option, the nearest known one is named."""
        if match := re.match(r"unrecognized arguments: .*?(--[^\s=]+)", message):
            message += near(match[1], self._options())
        print(f"{self.prog.split()[0]}: {message}; see {self.prog} --help", file=sys.stderr)
        sys.exit(REFUSED)

    def _options(self) -> list[str]:
        """Return the options of the command, and of the commands below it."""
        below = [action.choices.values() for action in self._actions if isinstance(action.choices, dict)]
        return [*self._option_string_actions, *(name for sub in chain(*below) for name in sub._options())]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python, torch or a GPU had too little memory.

    Examples:
        >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    of_torch = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and of_torch)


def _message(error: Exception) -> str:
    """Return an error's message in one line; for an error of the system about a file, or of memory, with the remedy."""
    if is_out_of_memory(error):
        where = " ".join(["there is not enough memory", *getattr(error, "__notes__", ())])
        asked = f" ({first_line(error)})" if str(error) else ""
        return (
            f"{where}{asked}: lower data.batch_size, data.max_tokens or federated.clients_at_once, or take a smaller model "
            "or model.base=nf4; what was finished before is kept"
        )
    if isinstance(error, OSError) and error.filename and str(error).startswith("[Errno"):
        return f"{error.filename}: {error.strerror}; check the path and who may read and write there, or give another"
    return printable(" ".join(str(error).split())) or type(error).__name__


def _stop(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _stop_later(hook: Callable[["sys.UnraisableHookArgs"], object], lost: "sys.UnraisableHookArgs") -> None:
    """Send a signal again whose exception Python drops, as in the callback of a weak reference and in ``__del__``."""
    if isinstance(lost.exc_value, KeyboardInterrupt):
        again = signal.SIGTERM if isinstance(lost.exc_value, Terminated) else signal.SIGINT
        threading.Timer(0.01, os.kill, [os.getpid(), again]).start()
    else:
        hook(lost)


def _hang_up(terminals: Sequence[int], signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)
    # Writing to the closed terminal would raise an error and end the clean-up.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for handle in terminals:
        os.dup2(nowhere, handle)
    os.close(nowhere)
    raise Terminated


def _can_be_mended(error: Exception) -> bool:
    if isinstance(error, ModuleNotFoundError):
        return error.name is None  # raised by fedlight for an optional package; a failed import has a name
    if isinstance(error, (ValueError, OSError)) or is_out_of_memory(error):
        return True  # checked before the class of Lightning, which takes seconds to import
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    return isinstance(error, MisconfigurationException)


NOTICES = {
    # Lightning, about itself and about settings in the config
    "lightning.pytorch.utilities.rank_zero": (
        r"💡 Tip: For seamless cloud (logging|uploads)",
        r"GPU available: False, used: False",
        r"GPU available: True \(\w+\), used: True",
        r"TPU available: False, using: 0 TPU cores",
        r"`Trainer\.fit` stopped: `max_epochs=\d+` reached",  # the table that ends a run says how far it came
        # `trainer.limit_*_batches` and `trainer.val_check_interval`, said again
        r"`Trainer\(limit_(train|val|test|predict)_batches=1\)` was configured so 1 batch (per epoch )?will be used\.",
        r"`Trainer\(limit_(train|val|test|predict)_batches=1\.0\)` was configured so 100% of the batches "
        r"(per epoch )?will be used\.",
        r"`Trainer\(val_check_interval=1(\.0)?\)` was configured so validation will run "
        r"(after every batch|at the end of the training epoch)\.",
        r"You are using a CUDA device \(.*\) that has Tensor Cores",  # precision is `trainer.precision`
    ),
    "lightning.fabric.utilities.seed": (r"(\[rank: \d+\] )?Seed set to",),
    "lightning.pytorch.accelerators.cuda": (r"LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES",),
    # bitsandbytes, wherever it is imported on a processor with AVX512-BF16: a faster product for weights that it packs for
    # evaluation alone; bases here are not (see base_model). With `kernels` installed, its errors are shown.
    "bitsandbytes.backends.cpu.ops": (
        r"Failed to load CPU gemm_4bit_forward from kernels-community: No module named 'kernels'\.",
    ),
}
WARNINGS = (
    # Lightning's own call of a function that torch is about to rename
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # PEFT, about transformers
    r"`is_gradient_checkpointing` is deprecated",
    # Lightning, of data that lies in memory ready to be batched: processes would only copy it
    r"The '\w+_dataloader' does not have many workers",
)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Leave out the notices of libraries while the body runs."""
    filters = {logging.getLogger(name): _unless(starts) for name, starts in NOTICES.items()}
    for logger, unless in filters.items():
        logger.addFilter(unless)
    try:
        with warnings.catch_warnings():
            for start in WARNINGS:
                warnings.filterwarnings("ignore", message=start)
            yield
    finally:
        for logger, unless in filters.items():
            logger.removeFilter(unless)


def _unless(starts: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
    """Return a filter of messages that start with one of the patterns."""
    pattern = re.compile("|".join(starts))
    return lambda record: not pattern.match(record.getMessage())


def silence_lightning() -> None:
    """Hide Lightning's own messages, except warnings; fedlight reports through the same loggers."""
    import lightning.pytorch  # it sets up its loggers when it is imported

    folder = Path(lightning.__file__).parent

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or folder not in Path(record.pathname).parents

    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(is_wanted)


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out warnings and the log, which are for runs, while settings are checked."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def wide_console(width: int = 200) -> "Console":
    """Return the console of the output; a file has no width, and ``width`` keeps a table from cutting its words."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence["str | Text"]]) -> None:
    """Print a table of texts, whose long lines are folded."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    wide_console().print(table)


def rich_table(
    title: str, header: Iterable[str], lines: Iterable[Iterable[str]], left: Collection[str] = ("method",)
) -> "Table":
    """Return a table for a terminal, with all columns but those in ``left`` aligned right."""
    from rich.table import Table

    table = Table(title=title)
    for name in header:
        table.add_column(name, justify="left" if name in left else "right")
    for line in lines:
        table.add_row(*line)
    return table


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances a progress bar until the end; a total of 0 shows none.

    Outside of a terminal there is a line every half minute instead. Of several processes the first one shows it.

    Examples:
        >>> with progress_bar("Encoding", total=2) as advance:
        ...     advance(2)
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    is_first = all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    is_main = threading.current_thread() is threading.main_thread()  # work side by side would show a bar each
    if not (total and is_first and is_main):
        yield lambda number: None
        return
    if not console.is_terminal:
        yield _lines_of_progress(what, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda number: progress.advance(task, number)


def _lines_of_progress(what: str, total: int) -> Callable[[int], None]:
    start = said = time.monotonic()
    done = 0

    def advance(number: int) -> None:
        nonlocal done, said
        done, now = done + number, time.monotonic()
        if now - said >= SECONDS_BETWEEN_LINES and done:
            said = now
            minutes = (now - start) * (total - done) / done / 60
            print(f"{what}: {done:,} of {total:,}, {minutes:.1f} min left", file=sys.stderr, flush=True)

    return advance


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence progress bars and reports of a new head."""
    from transformers.utils import logging as messages

    level, has_bars = messages.get_verbosity(), messages.is_progress_bar_enabled()
    messages.set_verbosity_error()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if has_bars:
            messages.enable_progress_bar()
