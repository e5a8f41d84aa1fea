"""Base of the algorithms whose clients may have LoRA adapters of unlike ranks."""

from collections.abc import Mapping

from fedlight.federation.algorithm import Algorithm, Weighting, WithLocal
from fedlight.federation.lora.ranks import LoraRanks
from fedlight.federation.protocols import Federation


class UnlikeRanks(WithLocal):
    """Algorithm whose clients may have LoRA adapters of unlike ranks.

    For a client of a smaller rank the tensors of ``send`` and ``reply`` are cut to it, and all hooks see zeros beyond it;
    see `fedlight.federation.lora.ranks`.

    Args:
        ranks: client or device -> its rank, others have the module's; or several ranks: each client has the largest that
            fits its device; None: all have the module's.
        weighting, local: as for `WithLocal`.

    Raises:
        ValueError: these are no ranks; in ``check_settings``, for a list of ranks without a fleet.
    """

    def __init__(self, ranks: LoraRanks | None, weighting: Weighting, local: Algorithm | None) -> None:
        super().__init__(weighting, local)
        numbers = [*ranks.values()] if isinstance(ranks, Mapping) else ranks
        if numbers is not None and not numbers:
            raise ValueError(
                f"ranks={ranks!r} must give a rank for clients or devices, such as {{pixel_8_pro: 8}}, or a list of "
                "ranks, such as [2, 4, 8], of which each client has the largest that fits its device"
            )
        if numbers and min(numbers) < 1:
            raise ValueError(f"ranks={ranks!r}: {min(numbers)} is no rank, a whole number from 1")
        # YAML reads names of digits as numbers.
        self.ranks = (
            {str(name): rank for name, rank in ranks.items()} if isinstance(ranks, Mapping) else ranks
        )

    def check_settings(self, federation: Federation) -> None:
        if isinstance(self.ranks, list) and not federation.has_fleet:
            raise ValueError(
                f"ranks={self.ranks!r} are ranks of which each client has the largest that fits its device: set "
                "fleet, or name a rank for each client, such as {c001: 4}"
            )
