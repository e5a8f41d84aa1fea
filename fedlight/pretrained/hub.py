"""Models and tokenizers by folder or hub name, with clear errors, within seconds, for those that cannot be loaded.

The hub's clients request each file of a model and retry each for a minute. Here the hub is asked once whether it answers at
all; if it does not, only the cache is used.
"""

import functools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedlight.pretrained.named import PRETRAINED, find_pretrained
from fedlight.support.words import first_line

SECONDS = 8  # time limit of the hub's first answer, longer than a slow network needs
EMBEDDED = {"toy": Path(__file__).parents[1] / "toy/model"}  # models that come with fedlight: name -> folder
OWN_LICENCE = "apache-2.0"  # licence of fedlight, and of the models that come with it
UNKNOWN = "unknown"
NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)


@contextmanager
def hub_errors(
    model: str, instead: str = "or check the network and HF_ENDPOINT", what: str = "model"
) -> Iterator[None]:
    """Raise an OSError of one line for errors of the body, which asks the hub for the model that the setting ``what`` names.

    ``instead`` is the remedy, besides a folder, if the hub cannot be reached.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        yield
    except Exception as error:  # its class depends on the HTTP library, which has changed several times
        reason = (
            f" is no folder here, and the hub cannot be reached ({type(error).__name__}): give the folder of a downloaded "
            f"model, {instead}"
        )
        if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError, too
            reason = " is gated: accept its terms on the hub and run `hf auth login`"
        elif isinstance(error, RepositoryNotFoundError):
            reason = ": neither a folder here nor a model on the hub; check the name"
        raise OSError(f"{what}={model!r}{reason}") from None


def check_hub_name(model: str, what: str = "model") -> None:
    """Check, within seconds, that a model which is no folder here is in the cache or at the hub; ``what`` names its setting.

    Raises:
        FileNotFoundError: ``model`` looks like a path, and there is no such folder.
        OSError: there is no such name at the hub, or the hub cannot be reached.
    """
    if not NAME.fullmatch(model):
        raise FileNotFoundError(
            f"{what}={model!r}: there is no such folder; give a folder of save_pretrained, or a name at the hub such as "
            "owner/name"
        )
    from huggingface_hub import HfApi

    if cached_file(model, "config.json"):
        return
    with hub_errors(model, what=what):
        HfApi().model_info(model, timeout=SECONDS)


def cached_file(model: str, file: str) -> Path | None:
    """Return a file of a model in the hub's cache; None without one, also for a folder."""
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # a folder's path is no name of the hub
        cached = try_to_load_from_cache(model, file)
        return Path(cached) if isinstance(cached, str) else None  # else a mark of absence
    return None


@contextmanager
def hub_asked_once(name: str) -> Iterator[None]:
    """Let the hub's clients use only the cache inside the body if the hub does not answer; it is not asked for a path."""
    from huggingface_hub import constants

    datasets = sys.modules.get("datasets")  # its switch is no reason to import it
    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists() or answers(constants.ENDPOINT):
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
def answers(endpoint: str) -> bool:
    """Return whether a server answers at all."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception:  # its class depends on the HTTP library, which has changed several times
        return False
    return True


@contextmanager
def shorten_load_errors(model: str) -> Iterator[None]:
    """Turn an error inside ``transformers``, which may have many lines, into an OSError of one line."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = first_line(error)
        raise OSError(f"model={model!r} cannot be loaded: {reason}") from None


def find_licence(model: str, ask: bool = False) -> str:
    """Return the licence in a model's card, ``unknown`` where there is none; ``model`` is a hub name, folder, or ``"toy"``.

    With ``ask`` the hub is asked where the card is neither in the folder nor in the cache; no answer counts as none.
    """
    from huggingface_hub import HfApi, ModelCard, constants

    if model in EMBEDDED:
        return OWN_LICENCE
    if model in PRETRAINED:
        return PRETRAINED[model].licence
    card, folder = Path(model).expanduser() / "README.md", Path(model).expanduser().is_dir()
    try:
        if not folder and (cached := cached_file(model, "README.md")):
            card = cached
        if card.is_file():
            return str(ModelCard.load(card, ignore_metadata_errors=True).data.license or UNKNOWN)
        if ask and not folder and not constants.HF_HUB_OFFLINE:
            data = HfApi().model_info(model, timeout=SECONDS).card_data
            return str((data and data.license) or UNKNOWN)
    except Exception:  # a damaged card, no such name, no network: nothing says the licence
        pass
    return UNKNOWN


def find_model(model: str) -> str:
    """Return a folder or hub name that ``transformers`` can load, checked within seconds and before anything is read.

    Raises:
        FileNotFoundError: ``model`` is a path without a model.
        OSError: the hub has no such name, or cannot be reached.
    """
    where = _folder_or_name(model, "model")
    if Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        raise FileNotFoundError(f"model={model!r}: it has no config.json; give a folder of save_pretrained")
    return where


def load_tokenizer(
    name: str, what: str = "tokenizer", trust_remote_code: bool = False, fast: bool = True
) -> Any:
    """Return a tokenizer by hub name or folder, which the setting ``what`` names; ``"toy"`` is the embedded model's.

    With ``fast`` a slow one is refused, which does not tell the characters of a token.

    Raises:
        FileNotFoundError: ``name`` looks like a path that does not exist.
        OSError: no tokenizer has this name, the hub cannot be reached, or the tokenizer is code that may not run.
        ValueError: the tokenizer is a slow one.
    """
    from transformers import AutoTokenizer

    where = _folder_or_name(name, what)
    try:
        with hub_asked_once(where):
            tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        remedy = "give a folder of a downloaded model, check the name, or set HF_ENDPOINT to a mirror"
        if "trust_remote_code" in str(error):
            remedy = "it is code that only a module's trust_remote_code runs; data need a folder with its tokenizer.json"
        raise OSError(f"{what}={name!r} cannot be loaded ({first_line(error)}): {remedy}") from None
    if fast and not tokenizer.is_fast:
        raise ValueError(f"{what}={name!r} is not fast; save it with a tokenizer.json next to the model")
    return tokenizer


def _folder_or_name(name: str, what: str) -> str:
    folder = EMBEDDED.get(name) or find_pretrained(name, what) or Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    check_hub_name(name, what)
    return name
