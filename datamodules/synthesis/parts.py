"""Candidates of some clients in a round: read where an earlier run has made the same, made and written where not."""

from collections import Counter
from collections.abc import Mapping, Sequence

from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedlight.datamodules.instructions.augmentation_record import digest_of
from fedlight.datamodules.synthesis.record import Part, SynthesisRecord, state_digest
from fedlight.datamodules.synthesis.synthesis import Synthesis
from fedlight.datamodules.text.templates import Template
from fedlight.evaluation.tasks.model import AnswersPrompts
from fedlight.federation.protocols import KnowsBaseBits
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields


def made_or_read(
    synthesis: Synthesis,
    rows: Mapping[str, Sequence[Fields]],
    template: Template,
    module: nn.Module,
    seed: int,
    round_idx: int,
    record: SynthesisRecord | None,
    others: Sequence[Part],
) -> Part:
    """The candidates of some clients.

    Args:
        synthesis: that makes them.
        rows: each client's own.
        template: whose slots they fill.
        module: that writes them, as it stands.
        seed: of the run.
        round_idx: from 0.
        record: where they are looked for and written; None: nowhere.
        others: what was made for other clients in this round, to be written with them.

    Raises:
        TypeError: the module writes no texts.
        OSError: nothing can be written to the folder.
    """
    if not isinstance(module, AnswersPrompts):
        raise TypeError(f"{type(module).__name__} writes no texts: train a LanguageModule such as SFTModule")
    clients = list(rows)
    settings = {
        "synthesis": synthesis.settings(),
        "seed": seed,
        "round": round_idx,
        "template": template.text,
        "client rows": digest_of({"client": client, **row} for client in rows for row in rows[client]),
        "model state": state_digest(module),
        "base bits": module.base_bits if isinstance(module, KnowsBaseBits) else None,
    }
    if record is not None:
        found, why_not = record.find(round_idx, settings, clients)
        if found is not None:
            rank_zero_info(
                f"{record.file(round_idx)}: candidates of an earlier run with the same settings and model"
            )
            return found
        if why_not:
            rank_zero_info(f"{record.file(round_idx)}: its candidates are not used: {why_not}")
        record.make_room(round_idx)
    made = synthesis.make(rows, template, module, derive_seed(seed, "synthesis", round_idx))
    part = Part(settings, clients, made, Counter(synthesis.counts), Counter(synthesis.notes))
    if record is not None:
        record.write(round_idx, [*others, part])
    return part
