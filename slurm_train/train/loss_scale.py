"""Dynamic loss scaling for fp16, decided by the gradient norm of the whole model, so that all ranks decide alike."""

from __future__ import annotations

import math

from torch import Tensor

LARGEST = 2.0**127  # the largest power of two in fp32


class LossScale:
    """A factor for the loss, so large that small gradients do not vanish in fp16, and none overflows.

        scale(loss).backward()
        norm = clip_gradients(parameters, limit, scale=scale.value)
        if scale.update(norm):
            optimizer.step()

    Args:
        value: the first factor.
        growth: what it is multiplied by after `interval` steps in a row with a finite norm.
        backoff: what it is multiplied by after a step whose norm is not finite.
        interval: see `growth`.
    """

    def __init__(self, value: float = 65536.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000) -> None:
        self.value = value
        self._growth = growth
        self._backoff = backoff
        self._interval = interval
        self._good = 0

    def __call__(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.value

    def update(self, norm: Tensor) -> bool:
        """Whether to take the step: its gradient norm is finite. Sets the factor of the next step. Waits for `norm`."""
        finite = math.isfinite(norm.item())
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value *= self._backoff
        elif self._good == self._interval:
            self.value = min(self.value * self._growth, LARGEST)
            self._good = 0
        return finite

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds of it."""
        return {"value": self.value, "good": self._good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from `state_dict`."""
        self.value, self._good = state["value"], int(state["good"])
