"""From texts to unit vectors, by which instructions are clustered, compared and retrieved.

``SentenceEncoder`` is a sentence-transformers model (Reimers and Gurevych, "Sentence-BERT", EMNLP 2019,
https://arxiv.org/abs/1908.10084). ``HashedEncoder`` needs no model and no hub: words are hashed to signed coordinates
(Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", ICML 2009, https://arxiv.org/abs/0902.2206), with
counts damped to 1 + ln(count).
"""

import hashlib
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
from fedlight.datamodules.vectors.sentence_folder import content_digest, find_folder, most_tokens
from fedlight.support.needs import Model, Need
from fedlight.support.progress_bar import progress_bar

KEPT_AT_ONCE = 1024  # texts that an interruption loses at most


class Encoder(ABC):
    """Turns texts into vectors of unit length."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Names all that the vectors depend on; equal identities give equal vectors."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Numbers in a vector; may load the model."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors ``(texts, dimension)`` float32, in the order of the texts."""

    def release(self) -> None:  # noqa: B027 (an encoder without a model has nothing to give back)
        """Gives back the memory of a loaded model; the next text that is not cached loads it again."""


class HashedEncoder(Encoder):
    """Words and pairs of neighbouring words, hashed: the encoder of the toy world, and where no model can be had.

    A text without any word has a fixed vector of its own.

    Args:
        dimension: numbers in a vector, >= 1.
        seed: of the hash; another one scatters the words in another way.
        word_pairs: count pairs of neighbouring words too.

    Example:
        >>> encoder = HashedEncoder(dimension=64)
        >>> one, same, other = encoder.encode(["the cat sat", "The cat SAT!", "sums of odd numbers"])
        >>> round(float(one @ same), 3), bool(abs(one @ other) < 0.5)
        (1.0, True)
    """

    def __init__(self, dimension: int = 384, seed: int = 0, word_pairs: bool = True) -> None:
        if dimension < 1:
            raise ValueError(f"dimension={dimension}: a vector needs at least 1 number, for example 384")
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
        vectors = np.zeros((len(texts), self._dimension), dtype=np.float32)
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
        """Coordinate and sign; Python's own hash would differ between processes."""
        if feature not in self._places:
            digest = hashlib.blake2b(f"{self.seed} {feature}".encode("utf-8", "surrogatepass"), digest_size=8)
            number = int.from_bytes(digest.digest(), "little")
            self._places[feature] = ((number >> 1) % self._dimension, 1.0 if number & 1 else -1.0)
        return self._places[feature]


class SentenceEncoder(Encoder):
    """A sentence-transformers model, with a cache on disk: a text is encoded once, and never again in a later run.

    Equal texts are encoded once, batches are of about equally long texts, and what is done is kept every 1,024 texts. The
    model is loaded when the first text needs it. In a terminal a bar shows the progress.

    Args:
        model: folder of ``SentenceTransformer.save``, or hub name.
        batch_size: texts in a batch, >= 1.
        max_tokens: longer texts are cut; None leaves it to the model.
        cache: folder of the cache, shared by all encoders; None keeps nothing.
        device: ``"auto"`` (the accelerator if there is one), or a torch device.
        trust_remote_code: run code that comes with the model.

    Raises:
        ValueError: a number out of its range.
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
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: a batch has at least 1 text, for example 64")
        if max_tokens is not None and max_tokens < 3:
            raise ValueError(
                f"max_tokens={max_tokens}: give at least 3 (a start, a word, an end), or leave it out"
            )
        self.model = model
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.cache = cache
        self.device = device
        self.trust_remote_code = trust_remote_code
        self._network: Any = None

    @classmethod
    def requires(cls, settings: Mapping[str, Any]) -> list[Need]:
        """The model."""
        return [Model(settings["model"], is_encoder=True)]

    @cached_property
    def folder(self) -> Path:
        """Where the model lies.

        Raises:
            OSError: there is no such model, or the hub cannot be reached.
            ValueError: ``max_tokens`` is more than it has positions.
        """
        folder = find_folder(self.model)
        limit = most_tokens(folder)
        if limit is not None and self.max_tokens is not None and self.max_tokens > limit:
            raise ValueError(
                f"max_tokens={self.max_tokens}: model={self.model!r} reads {limit} tokens at most"
            )
        return folder

    @cached_property
    def identity(self) -> str:
        """By the content of the model's files, so that a folder that was moved is still known."""
        return f"sentence-transformers {content_digest(self.folder)} max_tokens={self.max_tokens}"

    @property
    def dimension(self) -> int:
        cached = None if self._kept is None else self._kept.dimension()
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
    def _kept(self) -> EmbeddingCache | None:
        return None if self.cache is None else EmbeddingCache(self.cache, self.identity)

    def _find(self, texts: Sequence[str]) -> tuple[np.ndarray | None, np.ndarray]:
        """Vectors of what was kept, if any, and which texts are missing; says what was damaged."""
        if self._kept is None:
            return None, np.arange(len(texts))
        before = self._kept.damaged
        found = self._kept.find(texts)
        if self._kept.damaged > before:
            warnings.warn(
                f"{self._kept.damaged - before} damaged files of the embedding cache {self._kept.folder} were removed; "
                "their texts are encoded again",
                stacklevel=3,
            )
        return (None, np.arange(len(texts))) if found is None else (found[0], np.flatnonzero(~found[1]))

    def _encode_missing(
        self, texts: Sequence[str], vectors: np.ndarray | None, missing: np.ndarray
    ) -> np.ndarray:
        """All vectors ``(texts, dimension)``: the rows ``missing`` are encoded, and kept on the way."""
        with progress_bar(f"Encoding with {Path(self.model).name}", len(missing)) as advance:
            for start in range(0, len(missing), KEPT_AT_ONCE):
                some = missing[start : start + KEPT_AT_ONCE]
                some = some[np.argsort([-len(texts[row]) for row in some], kind="stable")]
                for first in range(0, len(some), self.batch_size):
                    batch = some[first : first + self.batch_size]
                    new = self._encode_batch([texts[row] for row in batch])
                    if vectors is None:
                        vectors = np.empty((len(texts), new.shape[1]), dtype=np.float32)
                    vectors[batch] = new
                    advance(len(batch))
                if self._kept is not None and vectors is not None:
                    self._kept.add([texts[row] for row in some], vectors[some])
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
            raise ValueError(f"model={self.model!r} gives vectors that are not finite: load its weights anew")
        return vectors.astype(np.float32)

    def _load(self) -> Any:
        if self._network is None:
            import torch
            from safetensors import SafetensorError
            from sentence_transformers import SentenceTransformer
            from transformers.utils import logging as messages

            folder, level, bars = self.folder, messages.get_verbosity(), messages.is_progress_bar_enabled()
            messages.set_verbosity_error()
            messages.disable_progress_bar()
            try:
                with torch.random.fork_rng(devices=[]):
                    self._network = SentenceTransformer(
                        str(folder),
                        device=None if self.device == "auto" else self.device,
                        trust_remote_code=self.trust_remote_code,
                        local_files_only=True,
                        model_kwargs={"use_safetensors": True},
                    )
            except (OSError, ValueError, SafetensorError) as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise OSError(f"model={self.model!r} cannot be loaded: {reason}") from None
            finally:
                messages.set_verbosity(level)
                if bars:
                    messages.enable_progress_bar()
            if self.max_tokens is not None:
                self._network.max_seq_length = self.max_tokens
        return self._network
