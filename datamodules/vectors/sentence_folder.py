"""The folder of a sentence-transformers model, by path or hub name, and what identifies its content."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fedlight.support.hub_errors import NAME, hub_asked_once, hub_errors

WEIGHTS = ".safetensors"
READ = (".json", ".txt", ".model", WEIGHTS)
# Of no influence on a vector, and not in every copy.
IGNORED = ("data_config.json", "train_script.py", "README.md")
UNUSED_FORMATS = ["onnx/*", "openvino/*", "*.bin", "*.ot", "*.h5", "*.msgpack", "*.onnx"]


def find_folder(model: str) -> Path:
    """Where a model lies here; of a hub name it is downloaded once.

    Args:
        model: folder of ``SentenceTransformer.save``, or hub name such as ``sentence-transformers/all-MiniLM-L6-v2``.

    Raises:
        FileNotFoundError: a path where nothing lies, or a folder that is no sentence-transformers model.
        OSError: there is no such hub name, or the hub cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path, model)
    if not NAME.fullmatch(model):
        raise FileNotFoundError(f"model={model!r}: there is no such folder")
    return _checked(_from_hub(model), model)


def content_digest(folder: Path) -> str:
    """Sixteen hex digits of configuration, vocabulary and weights: a copy elsewhere has the same.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "config.json").write_text("{}")
        >>> before = content_digest(folder)
        >>> _ = (folder / "README.md").write_text("more words")
        >>> before == content_digest(folder)
        True
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        name = file.relative_to(folder).as_posix()
        if name.endswith(READ) and name not in IGNORED and not name.startswith((".", "onnx/", "openvino/")):
            with file.open("rb") as stream:
                content = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest()
            digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


def most_tokens(folder: Path) -> int | None:
    """How many positions the transformer has; None where its config does not say."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found = config.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def _checked(folder: Path, model: str) -> Path:
    if not (folder / "modules.json").is_file():
        raise FileNotFoundError(
            f"model={model!r}: no modules.json lies in {folder}, so it is no sentence-transformers model; give a folder "
            "of SentenceTransformer.save"
        )
    if not any(folder.rglob(f"*{WEIGHTS}")):
        raise FileNotFoundError(
            f"model={model!r}: no {WEIGHTS} file lies in {folder}; save the model anew with SentenceTransformer.save"
        )
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:  # what is cached is taken without asking the hub
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / "modules.json").is_file() and any(folder.rglob(f"*{WEIGHTS}")):
            return folder
    except OSError:
        pass
    with hub_errors(name, "check the network and HF_ENDPOINT, or use HashedEncoder"), hub_asked_once(name):
        return Path(snapshot_download(name, ignore_patterns=UNUSED_FORMATS, etag_timeout=10))
