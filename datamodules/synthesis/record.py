"""Record of each round's candidates on disk, which a resumed or repeated round reads instead of generating them.

A folder has one file for each round, ``round_0003.jsonl``. It holds one part for each call that generated candidates in the
round, in most algorithms one for the whole cohort. A part is a line with its settings, counts and digests, then a line for
each candidate with its client, fields and weight, then a line for each dropped text with its client, fields and the reason
(``dropped``). A file appears whole or not at all. Real devices would each keep their own lines, made from private rows.
"""

import copy
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedlight.datamodules.instructions.augmentation_record import (
    compare_settings,
    digest_bytes,
    digest_rows,
    to_lines,
)
from fedlight.datamodules.synthesis.synthesis import Candidate, Dropped, Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.federation.client import State
from fedlight.federation.protocols import KnowsBaseBits
from fedlight.processes.team import ALONE, working_in
from fedlight.processes.work import for_each, is_first, once
from fedlight.stacking.client_models import CLIENTS_TOGETHER, work_with_models
from fedlight.support.files import read_bytes, refuse_unwritable, sealed, unsealed, write_whole
from fedlight.support.seeding import derive_seed
from fedlight.support.types import FieldsByClient
from fedlight.support.words import count_noun

Settings = Mapping[str, object]

ROWS_DIGEST = "digest of rows"
PART_SETTINGS = ("client rows", "model state", "base bits")  # the parts of one file may differ in these


@dataclass
class Part:
    """Candidates of one call of `Synthesis.make`, and all settings that they depend on; ``clients`` as in the call."""

    settings: Settings
    clients: list[str]
    candidates: dict[str, list[Candidate]]
    counts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    dropped: list[Dropped] = field(default_factory=list)


class SynthesisRecord:
    """Files of candidates in a folder, which `check_writable` makes."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def file(self, round_idx: int) -> Path:
        """Return the path of a round's file; rounds count from 0."""
        return self.folder / f"round_{round_idx:04d}.jsonl"

    def find(self, round_idx: int, settings: Settings, clients: Sequence[str]) -> tuple[Part | None, str]:
        """Return the part of these clients and round with equal settings, but for those in ``PART_SETTINGS``.

        Returns:
            The part and ""; or None and why the file cannot be used, "" if it only lacks these clients.
        """
        try:
            parts = _parse(read_bytes(self.file(round_idx)))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # to be made
            return None, ""
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None, "damaged"
        for part in parts:
            differing = compare_settings(part.settings, settings)
            same_clients = part.clients == list(clients)
            if same_clients and not differing:
                return part, ""
            # The parts of a file differ in clients, their rows and states, but in no other setting.
            if same_clients or not set(differing) <= set(PART_SETTINGS):
                return None, f"made with other {', '.join(differing)}"
        return None, ""

    def check_writable(self, round_idx: int) -> None:
        """Create the folder and check that the round's file can be written, before any candidate is generated.

        Raises:
            OSError: the folder cannot be written, or a folder has the file's name.
        """
        refuse_unwritable(self.folder, "synthesis_folder")
        if (file := self.file(round_idx)).is_dir():
            raise OSError(f"{file} is a folder, where a file is to be written: move it away")

    def write(self, round_idx: int, parts: Sequence[Part]) -> None:
        """Write all parts of a round so far; call `check_writable` before."""
        write_whole(self.file(round_idx), b"".join(map(_serialize, parts)))


@dataclass(frozen=True)
class Making:
    """One round's synthesis: candidates are read from the record, if there is one, or generated and recorded.

    ``others`` are parts of other clients in this round, which share the file. Rounds count from 0.

    Raises:
        TypeError: in either method, the module generates no text.
        OSError: there, the folder cannot be written.
    """

    synthesis: Synthesis
    template: Template
    module: nn.Module
    seed: int
    round_idx: int
    record: SynthesisRecord | None
    others: Sequence[Part]

    def by_module(self, rows: FieldsByClient) -> Part:
        """Return the candidates of some clients, generated by the module as it is; ``rows`` are the clients' own rows."""
        settings = self._settings(rows)
        if (saved := once(lambda: self._find(settings, list(rows)))) is not None:
            return _parse(saved)[0]
        part = self._make(self.synthesis, rows, self.module, settings)
        self._write([part])
        # Also from a user's synthesis, all processes of a team have the candidates that the file has.
        return _parse(once(lambda: _serialize(part).decode()))[0]

    def by_own_models(
        self,
        rows: FieldsByClient,
        states: Mapping[str, State],
        holding: Callable[[State], AbstractContextManager[None]],
    ) -> list[Part]:
        """Return a part for each client, as `by_module` does with the client's own state in the module.

        Several clients' models generate side by side; several processes share the clients. ``states`` has each client's
        values of the module's parameters; ``holding`` puts them into the module while its context lasts.
        """
        parts: dict[str, Part] = {}
        wanted: dict[str, Settings] = {}
        for client, client_rows in rows.items():
            with holding(states[client]):
                settings = self._settings({client: client_rows})
            saved = once(partial(self._find, settings, [client]))
            if saved is None:
                wanted[client] = settings
            else:
                parts[client] = _parse(saved)[0]

        def make(clients: Sequence[str]) -> list[str]:
            def work_of(client: str) -> Callable[[Any], str]:
                # A copy each: `make` sets counts and notes, and several clients' run side by side.
                own_rows, chosen = {client: rows[client]}, copy.copy(self.synthesis)
                return lambda model: _serialize(self._make(chosen, own_rows, model, wanted[client])).decode()

            works = [work_of(client) for client in clients]
            with working_in(ALONE):  # the work of one process
                return work_with_models(self.module, [states[client] for client in clients], works, holding)

        clients = list(wanted)  # those without a part in the record
        starts = range(0, len(clients), CLIENTS_TOGETHER)
        made = for_each(make, [clients[start : start + CLIENTS_TOGETHER] for start in starts])
        parts |= {
            client: _parse(lines)[0] for client, lines in zip(clients, chain.from_iterable(made), strict=True)
        }
        found_or_made = [parts[client] for client in rows]
        if clients:
            self._write(found_or_made)
        return found_or_made

    def _settings(self, rows: FieldsByClient) -> Settings:
        module = self.module
        if not isinstance(module, AnswersPrompts):
            raise TypeError(
                f"{type(module).__name__} generates no text: train a LanguageModule such as SFTModule"
            )
        return {
            "synthesis": self.synthesis.settings(),
            "seed": self.seed,
            "round": self.round_idx,
            "template": self.template.text,
            "client rows": digest_rows({"client": client, **row} for client in rows for row in rows[client]),
            "model state": state_digest(module),
            "base bits": module.base_bits if isinstance(module, KnowsBaseBits) else None,
        }

    def _make(self, synthesis: Synthesis, rows: FieldsByClient, model: Any, settings: Settings) -> Part:
        seed, start = derive_seed(self.seed, "synthesis", self.round_idx), time.perf_counter()
        made = synthesis.make(rows, self.template, model, seed)
        minutes, number = (time.perf_counter() - start) / 60, sum(map(len, made.values()))
        if number:
            rank_zero_info(
                f"{count_noun(number, 'candidate')} in {minutes:.1f} min: {number / minutes:.1f} a minute"
            )
        counts, notes = Counter(synthesis.counts), Counter(synthesis.notes)
        return Part(settings, list(rows), made, counts, notes, [*synthesis.dropped])

    def _find(self, settings: Settings, clients: Sequence[str]) -> str | None:
        """Return the lines of a part in the record; None for a part to make, which may then be written."""
        record, round_idx = self.record, self.round_idx
        if record is None:
            return None
        part, why_not = record.find(round_idx, settings, clients)
        if part is not None:
            rank_zero_info(
                f"{record.file(round_idx)}: candidates of an earlier run with the same settings and model"
            )
            return _serialize(part).decode()
        if why_not:
            rank_zero_info(f"{record.file(round_idx)}: its candidates are not used: {why_not}")
        record.check_writable(round_idx)
        return None

    def _write(self, parts: Sequence[Part]) -> None:
        if self.record is not None and is_first():
            self.record.write(self.round_idx, [*self.others, *parts])


def state_digest(module: nn.Module) -> str:
    """Return a digest of trained values, of names, shapes and types of all tensors, and of the base's description.

    Another trained value, another frozen base, or a base of another number type changes the digest.

    Examples:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> before = state_digest(layer)
        >>> with torch.no_grad():
        ...     _ = layer.weight.add_(1)
        >>> before == state_digest(layer)
        False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.requires_grad:  # the base's description has a checksum of frozen ones
            values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy has no bf16
            digest.update(values.numpy().tobytes())
    base: Any = getattr(module, "base", None)  # a description of the frozen one, with a checksum
    if base is not None:
        # Without the path, which may change.
        described = {name: value for name, value in base.items() if name != "model"}
        digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _parse(content: bytes | str) -> list[Part]:
    """Return the parts of a file; raise ValueError for damaged ones."""
    lines = (content.encode() if isinstance(content, str) else content).splitlines(keepends=True)
    parts = []
    while lines:
        head = unsealed(json.loads(lines[0]))
        rows, lines = lines[1 : 1 + head["rows"]], lines[1 + head["rows"] :]
        if digest_bytes(b"".join(rows)) != head[ROWS_DIGEST]:
            raise ValueError("the rows differ from those written")
        candidates: dict[str, list[Candidate]] = {client: [] for client in head["clients"]}
        dropped = []
        for row in map(json.loads, rows):
            if "dropped" in row:
                dropped.append(Dropped(row["client"], row["fields"], row["dropped"]))
            else:
                candidates[row["client"]].append(Candidate(row["fields"], row["weight"]))
        counts, notes = Counter(head["counts"]), Counter(head["notes"])
        parts.append(Part(dict(head["settings"]), head["clients"], candidates, counts, notes, dropped))
    return parts


def _serialize(part: Part) -> bytes:
    rows = to_lines(
        {"client": client, "fields": candidate.fields, "weight": candidate.weight}
        for client, candidates in part.candidates.items()
        for candidate in candidates
    ) + to_lines({"client": row.client, "fields": row.fields, "dropped": row.reason} for row in part.dropped)
    head = {
        "rows": rows.count(b"\n"),
        ROWS_DIGEST: digest_bytes(rows),
        "clients": part.clients,
        "counts": part.counts,
        "notes": part.notes,
        "settings": part.settings,
    }
    return to_lines([sealed(head)]) + rows
