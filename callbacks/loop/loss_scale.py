"""The scale by which 16-bit training multiplies its loss: each client of a round starts with the same.

``precision="16-mixed"`` multiplies the loss so that small gradients survive in 16 bits, leaves out a step whose gradients
overflow and then halves the scale. It would hand that on to the next client, and who comes first would lose the steps. So a
visit starts with the scale of the round's beginning; the next round has the smallest that a visit ended with.
"""

from typing import Any

import lightning as L


class LossScale:
    """Puts the scale back; does nothing where the trainer's precision has none."""

    def start_round(self, trainer: L.Trainer, changes_gradients: str | None) -> None:
        """Before the first batch of a round.

        Args:
            trainer: whose precision it is.
            changes_gradients: the name of an algorithm that adds to gradients; None if it leaves them alone.

        Raises:
            ValueError: the algorithm would add to gradients that are still multiplied.
        """
        self._plugin: Any = trainer.precision_plugin
        self.is_used = getattr(self._plugin, "scaler", None) is not None
        if not self.is_used:
            return
        fused = [one for one in trainer.optimizers if getattr(one, "_step_supports_amp_scaling", False)]
        if fused and changes_gradients:
            raise ValueError(
                f"{type(fused[0]).__name__} with fused=True divides gradients by the loss scale itself, after "
                f"{changes_gradients} has added to them: leave fused out, or set trainer.precision='bf16-mixed'"
            )
        self._start = self._plugin.state_dict()
        self._ends: list[dict[str, Any]] = []

    def start_visit(self) -> None:
        """Before the first batch of a visit."""
        if self.is_used:
            self._plugin.load_state_dict(dict(self._start))

    def finish_visit(self) -> None:
        """After the last batch of a visit."""
        if self.is_used:
            self._ends.append(self._plugin.state_dict())

    def finish_round(self) -> None:
        """After the last batch of a round."""
        if self.is_used and self._ends:
            smallest = min(self._ends, key=lambda end: (end["scale"], end["_growth_tracker"]))
            self._plugin.load_state_dict(dict(smallest))
