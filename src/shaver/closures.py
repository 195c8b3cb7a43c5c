"""SpaM in steps that other code takes: closures that an optimizer calls, and optimizers that a trainer steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from shaver.spam import SpaM


class Objective:
    """A closure that adds the prior. Curvature is measured in its first evaluation per step only."""

    def __init__(
        self, spam: "SpaM", optimizer: Optimizer, closure: Callable[[], Any], scale: float | None = None
    ) -> None:
        self._spam, self._optimizer, self._closure, self._scale = spam, optimizer, closure, scale
        self._strength: float | None = None

    def __call__(self) -> Any:
        """The loss, including the prior's penalty where the prior is part of the objective."""
        if self._strength is None:
            loss = self._closure()
            self._strength = self._spam.observe(self._scale)
        else:  # a second measurement of the same samples would count them twice
            with self._spam.unobserved():
                loss = self._closure()
        self._spam.before_step(self._optimizer, self._strength)
        if loss is None or not self._spam.in_objective(self._optimizer):
            return loss
        return loss + self._penalty(self._strength)

    def finish(self) -> None:
        """After the optimizer's step: take the proximal step if there is one, and update δ if it is due."""
        if self._strength is None:
            raise RuntimeError(
                f"{type(self._optimizer).__name__}.step(closure) did not call the closure; use an optimizer that does."
            )
        self._spam.after_step(self._optimizer, self._strength)
        self._spam.advance(self._optimizer)

    @torch.no_grad()
    def _penalty(self, strength: float) -> float:
        """½ · strength · θᵀδθ over the weights that the optimizer trains."""
        delta = self._spam.delta_by_parameter()
        moved = [p for group in self._optimizer.param_groups for p in group["params"] if p in delta]
        return 0.5 * strength * sum(float((delta[p] * p.square()).sum(dtype=torch.float64)) for p in moved)


class Attachment:
    """SpaM inside ``optimizer.step()``, for trainers that call it themselves; see :meth:`shaver.SpaM.attach`."""

    def __init__(self, spam: "SpaM", optimizer: Optimizer, scale: Callable[[], float | None]) -> None:
        self._spam, self._scale = spam, scale
        self._step: Objective | float | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Detach SpaM from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is the optimizer
        if given is not None:
            self._step = Objective(self._spam, optimizer, given, self._scale())
            return args[:1], {**kwargs, "closure": self._step}
        self._step = self._spam.observe(self._scale())
        self._spam.before_step(optimizer, self._step)
        return None

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step, self._step = self._step, None
        if isinstance(step, Objective):
            step.finish()
        elif step is not None:
            self._spam.after_step(optimizer, step)
            self._spam.advance(optimizer)


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer inside a wrapper such as accelerate's, which is an ``Optimizer`` but has no hooks."""
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise TypeError(f"expected a torch optimizer, or a wrapper with .optimizer, not {optimizer!r}.")
    return inner


def scale_of(optimizer: Any) -> Callable[[], float | None]:
    """A function that returns the current loss scale of a wrapper with its own scaler; None without one."""
    scaler = getattr(optimizer, "scaler", None)
    return lambda: float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else None
