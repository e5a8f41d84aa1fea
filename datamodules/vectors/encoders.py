"""Encoders of texts into unit vectors, to cluster, compare and retrieve instructions.

``SentenceEncoder`` is a sentence-transformers model (Reimers and Gurevych, "Sentence-BERT", EMNLP 2019,
https://arxiv.org/abs/1908.10084). ``HashedEncoder`` needs no model and no hub: it hashes words to signed coordinates
(Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009, https://arxiv.org/abs/0902.2206), with
counts damped to 1 + ln(count).
"""

import hashlib
import json
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedlight.datamodules.vectors.embedding_cache import EmbeddingCache
from fedlight.pretrained.hub import NAME, hub_asked_once, hub_errors, shorten_load_errors
from fedlight.pretrained.named import find_pretrained
from fedlight.processes.work import for_each, is_first, once
from fedlight.support.checks import Checked, refuse_below
from fedlight.support.console import progress_bar, silence_transformers
from fedlight.support.needs import Model, Need

CACHED_AT_ONCE = 1024  # an interruption loses at most so many texts
WEIGHTS = ".safetensors"
# Files of a model folder that decide its vectors, those that do not and are not in every copy, and those never downloaded.
READ = (".json", ".txt", ".model", WEIGHTS)
IGNORED = ("data_config.json", "train_script.py", "README.md")
UNUSED_FORMATS = ["onnx/*", "openvino/*", "*.bin", "*.ot", "*.h5", "*.msgpack", "*.onnx"]


class Encoder(Checked, ABC):
    """Base class of encoders that map texts to vectors of unit length."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Description of everything the vectors depend on; equal identities give equal vectors."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Length of a vector; reading it may load the model."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return unit vectors ``(texts, dimension)`` float32, in the order of the texts."""

    def release(self) -> None:
        """Free the memory of a loaded model; the next text that is not cached loads it again."""


class HashedEncoder(Encoder):
    """Encoder by feature hashing of words and pairs of neighbouring words; needs no model.

    All texts without any word have the same fixed vector.

    Args:
        dimension: length of a vector, >= 1.
        seed: seed of the hash.
        word_pairs: count pairs of neighbouring words too.

    Examples:
        >>> encoder = HashedEncoder(dimension=64)
        >>> first, same, other = encoder.encode(["the cat sat", "The cat SAT!", "sums of odd numbers"])
        >>> round(float(first @ same), 3), bool(abs(first @ other) < 0.5)
        (1.0, True)
    """

    def __init__(self, dimension: int = 384, seed: int = 0, word_pairs: bool = True) -> None:
        refuse_below(1, dimension=dimension)
        self._dimension = dimension
        self.seed = seed
        self.word_pairs = word_pairs
        self._places: dict[str, tuple[int, float]] = {}

    @property
    def identity(self) -> str:
        return f"hashed-1 dimension={self._dimension} seed={self.seed} word_pairs={self.word_pairs}"

    @property
    def dimension(self) -> int:
        return self._dimension

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.zeros((len(texts), self._dimension), dtype=np.float32)  # [texts, dimension]
        for vector, text in zip(vectors, texts, strict=True):
            places = [(self._place(feature), count) for feature, count in self._features(text).items()]
            for (index, sign), count in places:
                vector[index] += sign * (1 + math.log(count))
            length = float(np.linalg.norm(vector))
            if length < 1e-6:  # no word, or words that cancel each other
                index, sign = self._place("")
                vector[:], vector[index], length = 0, sign, 1
            vector /= length
        return vectors

    def _features(self, text: str) -> Counter[str]:
        words = re.findall(r"\w+", text.lower())
        pairs = [f"{first} {second}" for first, second in pairwise(words)]
        return Counter(words + pairs if self.word_pairs else words)

    def _place(self, feature: str) -> tuple[int, float]:
        """Return coordinate and sign of a feature."""
        if feature not in self._places:
            # Python's own ``hash`` would differ between processes.
            digest = hashlib.blake2b(f"{self.seed} {feature}".encode("utf-8", "surrogatepass"), digest_size=8)
            number = int.from_bytes(digest.digest(), "little")
            self._places[feature] = ((number >> 1) % self._dimension, 1.0 if number & 1 else -1.0)
        return self._places[feature]


class SentenceEncoder(Encoder):
    """Encoder by a sentence-transformers model, with a cache on disk that later runs share.

    Equal texts are encoded once, texts of a batch have about equal lengths, and vectors are cached every 1,024 texts. The
    model is loaded when the first text needs it. A bar shows the progress, or a line every half minute outside a terminal.

    Args:
        model: folder of ``SentenceTransformer.save``, or hub name.
        batch_size: texts per batch, >= 1.
        max_tokens: longer texts are truncated, >= 3; None: the model's own limit.
        cache: folder of the cache, shared by all encoders; None: no cache.
        device: ``"auto"`` (the accelerator if there is one), or a torch device.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        model: str,
        batch_size: int = 64,
        max_tokens: int | None = None,
        cache: str | None = "~/.cache/fedlight/embeddings",
        device: str = "auto",
        trust_remote_code: bool = False,
    ) -> None:
        refuse_below(1, batch_size=batch_size)
        refuse_below(3, max_tokens=max_tokens)
        self.model, self.setting = model, "model"
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.cache = cache
        self.device = device
        self.trust_remote_code = trust_remote_code
        self._network: Any = None

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> list[Need]:
        """Return the model."""
        return [Model(settings["model"], is_encoder=True)]

    @cached_property
    def folder(self) -> Path:
        """Folder of the model.

        Raises:
            OSError: there is no such model, or the hub cannot be reached.
            ValueError: ``max_tokens`` exceeds the number of the model's positions, or is set for a static model.
        """
        folder = find_folder(self.model, self.setting)
        file = folder / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if self.max_tokens is not None and "StaticEmbedding" in (folder / "modules.json").read_text("utf-8"):
            raise ValueError(
                f"max_tokens={self.max_tokens}: {self.setting}={self.model!r} takes the mean of all tokens, so set "
                "max_tokens to null"
            )
        limit = config.get("max_position_embeddings")
        if isinstance(limit, int) and self.max_tokens is not None and self.max_tokens > limit:
            raise ValueError(
                f"max_tokens={self.max_tokens}: {self.setting}={self.model!r} reads {limit} tokens at most"
            )
        return folder

    @cached_property
    def identity(self) -> str:
        """Digest of the model's files and ``max_tokens``; a moved folder keeps its identity."""
        return f"sentence-transformers {content_digest(self.folder)} max_tokens={self.max_tokens}"

    @property
    def dimension(self) -> int:
        cached = None if self._cache is None else self._cache.dimension()
        return cached or self._encode_batch(["dimension"]).shape[1]

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        unique = list(dict.fromkeys(texts))
        if not unique:
            return np.empty((0, self.dimension), dtype=np.float32)
        vectors = self._encode_missing(unique, *self._find(unique))
        if len(unique) == len(texts):
            return vectors
        place = {text: number for number, text in enumerate(unique)}
        return vectors[[place[text] for text in texts]]

    def release(self) -> None:
        self._network = None

    @cached_property
    def _cache(self) -> EmbeddingCache | None:
        return None if self.cache is None else EmbeddingCache(self.cache, self.identity)

    def _find(self, texts: Sequence[str]) -> tuple[np.ndarray | None, np.ndarray]:
        """Return the vectors of cached texts, if any, and the missing texts; one process looks for all."""
        import torch

        if (cache := self._cache) is None:
            return None, np.arange(len(texts))

        def look() -> tuple[Any, list[int]]:
            before = cache.damaged
            cached = cache.find(texts)
            if cache.damaged > before:
                warnings.warn(
                    f"{cache.damaged - before} damaged files of the embedding cache {cache.folder} were removed; their "
                    "texts are encoded again",
                    stacklevel=6,
                )
            if cached is None:
                return None, [*range(len(texts))]
            return torch.from_numpy(cached[0]), np.flatnonzero(~cached[1]).tolist()

        vectors, missing = once(look)
        return None if vectors is None else vectors.numpy(), np.array(missing, dtype=np.int64)

    def _encode_missing(
        self, texts: Sequence[str], vectors: np.ndarray | None, missing: np.ndarray
    ) -> np.ndarray:
        """Return all vectors ``(texts, dimension)`` after encoding and caching the rows ``missing``.

        Several processes share the batches.
        """
        import torch

        with progress_bar(f"Encoding with {Path(self.model).name}", len(missing)) as advance:
            for start in range(0, len(missing), CACHED_AT_ONCE):
                some = missing[start : start + CACHED_AT_ONCE]
                some = some[np.argsort([-len(texts[row]) for row in some], kind="stable")]  # little padding
                batches = [
                    some[first : first + self.batch_size] for first in range(0, len(some), self.batch_size)
                ]

                def encode(batch: np.ndarray) -> torch.Tensor:
                    new = self._encode_batch([texts[row] for row in batch])
                    advance(len(batch))
                    return torch.from_numpy(new)

                new = torch.cat(for_each(encode, batches)).numpy()
                if vectors is None:
                    vectors = np.empty((len(texts), new.shape[1]), dtype=np.float32)
                vectors[some] = new
                if self._cache is not None and is_first():  # one process writes
                    self._cache.add([texts[row] for row in some], new)
        assert vectors is not None
        return vectors

    def _encode_batch(self, texts: list[str]) -> np.ndarray:
        vectors: np.ndarray = self._load().encode(
            texts,
            batch_size=self.batch_size,
            normalize_embeddings=True,
            convert_to_numpy=True,
            show_progress_bar=False,
        )
        if not np.isfinite(vectors).all():
            raise ValueError(
                f"model={self.model!r} gives vectors that are not finite: download its weights again"
            )
        return vectors.astype(np.float32)

    def _load(self) -> Any:
        if self._network is None:
            import torch
            from sentence_transformers import SentenceTransformer

            # Loading draws initial weights, which must not advance the run's random stream.
            folder, fork = self.folder, torch.random.fork_rng(devices=[])
            with shorten_load_errors(self.model), silence_transformers(), fork:
                self._network = SentenceTransformer(
                    str(folder),
                    device=None if self.device == "auto" else self.device,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=True,
                    model_kwargs={"use_safetensors": True},  # pickled weights could run code
                )
            if self.max_tokens is not None:
                self._network.max_seq_length = self.max_tokens
        return self._network


def find_folder(model: str, what: str = "model") -> Path:
    """Return the folder of a model, a folder or a hub name, which is downloaded once; ``what`` names its setting.

    Raises:
        FileNotFoundError: the path does not exist, or the folder holds no sentence-transformers model.
        OSError: there is no such hub name, or the hub cannot be reached.
    """
    folder = find_pretrained(model, what) or Path(model).expanduser()
    if not folder.is_dir():
        if not NAME.fullmatch(model):
            raise FileNotFoundError(f"{what}={model!r}: there is no such folder")
        folder = _download(model, what)
    if not (folder / "modules.json").is_file():
        raise FileNotFoundError(
            f"{what}={model!r}: {folder} has no modules.json, so it is no sentence-transformers model; give a folder of "
            "SentenceTransformer.save"
        )
    if not any(folder.rglob(f"*{WEIGHTS}")):
        raise FileNotFoundError(
            f"{what}={model!r}: {folder} has no {WEIGHTS} file; save the model again with SentenceTransformer.save"
        )
    return folder


def content_digest(folder: Path) -> str:
    """Return 16 hex digits of a model's configuration, vocabulary and weights, equal for every copy of the model.

    Examples:
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


def _download(name: str, what: str) -> Path:
    from huggingface_hub import snapshot_download

    try:  # a cached model needs no request to the hub
        folder = Path(snapshot_download(name, local_files_only=True))
        if (folder / "modules.json").is_file() and any(folder.rglob(f"*{WEIGHTS}")):
            return folder
    except OSError:
        pass
    with (
        hub_errors(name, "check the network and HF_ENDPOINT, or use HashedEncoder", what),
        hub_asked_once(name),
    ):
        return Path(snapshot_download(name, ignore_patterns=UNUSED_FORMATS, etag_timeout=10))
