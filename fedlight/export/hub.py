"""Exported folder on the Hugging Face hub."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlight.support.words import first_line

REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def make_repo(repo: str, public: bool, api: Any = None) -> Any:
    """Make the repository, unless it is there, and return the hub's client; nothing is exported in vain without it.

    Args:
        repo: ``owner/name``.
        public: whether everybody may read a new one.
        api: ``huggingface_hub.HfApi``, or what stands for it.

    Raises:
        OSError: the hub refuses it or cannot be reached.
        ValueError: the name is none of the hub.
    """
    if not REPO.fullmatch(repo):
        raise ValueError(f"--push {repo}: give the name of a repository at the hub, such as owner/name")
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    with _hub_said(repo):
        api.create_repo(repo, private=not public, exist_ok=True)
    return api


def push(folder: Path, repo: str, api: Any) -> str:
    """Upload a folder in one commit and return its address.

    Raises:
        OSError: the hub refuses it or cannot be reached.
    """
    with _hub_said(repo):
        # One commit: no download gets half of it.
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export of fedlight")
    return f"https://huggingface.co/{repo}"


@contextmanager
def _hub_said(repo: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its class depends on the HTTP library, which has changed several times
        raise OSError(
            f"--push {repo}: the hub says: {first_line(error)}; log in with `hf auth login` to an account that may write "
            "there, or check the network"
        ) from None
