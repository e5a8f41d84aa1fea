"""One clear line where a model cannot be had from the Hugging Face hub, within seconds, whatever its client says of that.

The clients of the hub ask for each file of a model, and try each again for a minute. Here the hub is asked once whether it
answers at all; where it does not, what lies in the cache is taken and nothing else is tried.
"""

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS = 8
"""That the hub has for its first answer: more than a slow network takes for one."""
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


@contextmanager
def hub_errors(
    model: str, instead: str = "or check the network and HF_ENDPOINT", what: str = "model"
) -> Iterator[None]:
    """What goes wrong inside while the hub is asked for a model is said with its remedy.

    Args:
        model: hub name.
        instead: what else than a folder helps where the hub cannot be reached.
        what: setting that names it.

    Raises:
        OSError: inside, anything failed.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except GatedRepoError:
        raise OSError(
            f"{what}={model!r} is gated: accept its terms on the hub and run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise OSError(
            f"{what}={model!r}: neither a folder here nor a model on the hub; check the name"
        ) from None
    except Exception as error:  # which one depends on the HTTP library, of which there have been several
        raise OSError(
            f"{what}={model!r} is no folder here, and the hub cannot be reached ({type(error).__name__}): "
            f"give the folder of a downloaded model, {instead}"
        ) from None


def check_hub_name(model: str, what: str = "model") -> None:
    """Refuses, within seconds, what is no folder and cannot be had from the hub either; what is cached is not asked for.

    Args:
        model: hub name, or what looks like a path.
        what: setting that names it.

    Raises:
        FileNotFoundError: it looks like a path, and nothing is there.
        OSError: there is no such name at the hub, or the hub cannot be reached.
    """
    if not NAME.fullmatch(model):
        raise FileNotFoundError(
            f"{what}={model!r}: there is no such folder; give a folder of save_pretrained, or a name at the hub such as "
            "owner/name"
        )
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    with hub_errors(model, what=what):
        HfApi().model_info(model, timeout=SECONDS)


@contextmanager
def hub_asked_once(name: str) -> Iterator[None]:
    """Has the clients of the hub take the cache alone inside, where the hub does not answer.

    Args:
        name: of a model or data set at the hub; for a path here nobody is asked.
    """
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets")
    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists() or _answers(constants.ENDPOINT):
        yield
        return
    switches = [constants, *([datasets.config] if datasets is not None else [])]
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch in switches:
            switch.HF_HUB_OFFLINE = True
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value


@functools.cache
def _answers(endpoint: str) -> bool:
    """Does a server answer there, whatever it says? Asked once in a process."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception:  # which one depends on the HTTP library, of which there have been several
        return False
    return True
