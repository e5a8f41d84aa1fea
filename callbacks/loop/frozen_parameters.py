"""Parameters that no optimizer holds, such as a frozen base or a teacher that follows its student.

They are neither sent nor put back, so training must not change them. A copy of a base may be too large, so of large ones a
few values are kept: whoever averages weights moves all of them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

VALUES = 32
"""Of a large parameter, evenly spread."""
WHOLE = 2**16
"""Up to so many values a parameter is kept whole: of a code book, a batch moves a few rows."""


class FrozenParameters:
    """Knows whether they are still what they were when this was made.

    Args:
        module: whose parameters they are.
        federated: those that the optimizers hold, by name.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> frozen = FrozenParameters(layer, {"weight": layer.weight})
        >>> frozen.refuse_moved()
        >>> _ = layer.bias.data.add_(1)
        >>> frozen.refuse_moved()
        Traceback (most recent call last):
        ValueError: training changes bias: parameters that no optimizer holds, so what one client makes of them ...
    """

    def __init__(self, module: nn.Module, federated: Mapping[str, Tensor]) -> None:
        self._parameters = {
            name: p for name, p in module.named_parameters() if name not in federated and not p.is_meta
        }
        self._before = {name: _some(p) for name, p in self._parameters.items()}

    def refuse_moved(self) -> None:
        """Raises ``ValueError`` where one of them has changed."""
        moved = [
            name for name, p in self._parameters.items() if not torch.equal(_some(p), self._before[name])
        ]
        if moved:
            more = f" and {len(moved) - 6} more" if len(moved) > 6 else ""
            raise ValueError(
                f"training changes {', '.join(moved[:6])}{more}: parameters that no optimizer holds, so what one client "
                "makes of them would pass to the next. Give them to the optimizer as well: it leaves what has no gradient "
                "alone, and they are then sent and averaged like the others"
            )


def _some(parameter: Tensor) -> Tensor:
    """A copy of its values, or of some; NaN as 0, since it equals nothing."""
    values = parameter.detach().reshape(-1)
    stride = max(1, len(values) // VALUES) if len(values) > WHOLE else 1
    return values[::stride].to(torch.float32, copy=True).nan_to_num_()
