"""The fit of all layers together: the network's outputs against the dense network's, without labels.

A repair fits one layer after the other to the outputs of the same layer of the dense network. Where much was removed,
no weights can reproduce these, and only the outputs of the last layer matter. Here all weights move together to lower

    Σ (f(x) − f*(x))²     f* the dense network, f the repaired one

by Adam, starting from the weights that the repair found.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shaver.batches import Forward
from shaver.curvature.blocks import at_least_float32
from shaver.measure.evaluating import evaluating, restored
from shaver.naming import check_count
from shaver.repairing.calibration import calibration_list, call
from shaver.repairing.sites import parameters_of

#: The length of the largest step, as a share of the root mean square of a layer's weights.
RATE = 0.02
#: One batch in this many is held out to see whether the fit carries over to other data.
HELD_OUT = 8
#: Bytes of the dense network's outputs that are kept; of a language model they may not fit, and are computed again.
KEPT = 2**30
#: Steps with a rising rate at the beginning, as a share of all.
WARM_UP = 0.05


def joint_fit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    reference: nn.Module,
    passes: int,
    masks: Mapping[str, Tensor] | None = None,
    forward: Forward | None = None,
    rate: float = RATE,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, float]:
    """Fit all kept weights together, so that the outputs come closer to the dense network's.

    Use it after :func:`shaver.repair` where much was removed; ``repair``, ``prune`` and ``compact`` call it with
    ``passes``. It needs gradients, and about as much time as ``passes`` epochs of training on the calibration data.
    Embeddings stay as they are. Norm statistics are constants. With eight batches or more, one in eight is held out.
    The weights after the pass that was nearest to the dense network there are taken, or those from before.

    Example:
        >>> dense = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        >>> small = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> batches = [torch.randn(64, 8) for _ in range(16)]
        >>> before, after = joint_fit(small, batches, reference=dense, passes=5)
        >>> after < before
        True

    Args:
        model: The network; its weights are changed in place. After an error or an interruption it is as it was.
        batches: Unlabelled inputs, as for :func:`shaver.repair`. Each batch is one step: 64 to 256 samples are best.
        reference: The dense network. It need not have the same layers, only the same outputs.
        passes: Passes over the batches.
        masks: Which weights are kept, by parameter name.
        forward: ``forward(model, batch)`` for batches of another layout.
        rate: The length of the largest step, as a share of the root mean square of a layer's weights.
        progress: ``progress(done, total)`` is called after each pass.

    Returns:
        The squared error of the outputs before and after, as a share of their variance, on the held-out batches.

    Raises:
        ValueError: The outputs of the networks do not fit together, or hold nothing but integers.
    """
    check_count("passes", passes, 0)
    data = calibration_list(batches)
    with evaluating(model, reference), torch.random.fork_rng(devices=[]):
        error = OutputError(reference, data, forward)
        if error.is_empty:
            raise ValueError("the network returns no floating-point tensor to compare with the dense network's.")
        held = list(range(0, len(data), HELD_OUT)) if len(data) >= HELD_OUT else list(range(len(data)))
        used = [place for place in range(len(data)) if place not in held] if len(data) >= HELD_OUT else held
        before = error.mean(model, held)
        if not passes:
            return before, before
        with _trainable(model, masks) as layers:
            weights = [parameter for layer in layers for parameter, _ in layer]
            best, after = [weight.detach().clone() for weight in weights], before
            for done in _descend(model, layers, error, used, passes, rate):
                reached = error.mean(model, held)
                if reached < after:
                    best, after = [weight.detach().clone() for weight in weights], reached
                if progress is not None:
                    progress(done, passes)
            for weight, values in zip(weights, best, strict=True):
                weight.copy_(values)
    return before, after


def check_passes(passes: int, calibration: object) -> None:
    """Check that ``passes`` is an integer of at least 0, and that there is data for it."""
    if check_count("passes", passes, 0) and calibration is None:
        raise ValueError(f"passes={passes} are passes over calibration data: give calibration=… too.")


def _descend(
    model: nn.Module,
    layers: Sequence[Sequence[tuple[nn.Parameter, Tensor | None]]],
    error: "OutputError",
    used: Sequence[int],
    passes: int,
    rate: float,
) -> Iterator[int]:
    """Count the passes of Adam with a warm-up and a cosine, and a rate for each layer in the scale of its weights."""
    groups = [{"params": [p for p, _ in layer], "scale": _scale(layer)} for layer in layers]
    optimizer = torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(0)
    total, done = passes * len(used), 0
    for number in range(passes):
        for place in torch.randperm(len(used), generator=generator).tolist():
            factor = min((done + 1) / (WARM_UP * total + 1), 0.5 * (1 + math.cos(math.pi * done / total)))
            for group in optimizer.param_groups:
                group["lr"] = rate * factor * group["scale"]
            optimizer.zero_grad()
            with torch.enable_grad():
                error.of(model, used[place]).backward()  # type: ignore[no-untyped-call]
            for layer in layers:
                for parameter, mask in layer:
                    if mask is not None and parameter.grad is not None:
                        parameter.grad.mul_(mask)  # Adam leaves what never had a gradient where it is
            optimizer.step()
            done += 1
        yield number + 1


class OutputError:
    """The squared error of a network's outputs against the dense network's, as a share of their variance.

    Use it within :func:`shaver.measure.evaluating.evaluating` of both networks.
    """

    def __init__(self, reference: nn.Module, data: Sequence[Any], forward: Forward | None) -> None:
        self._reference, self._data, self._forward = reference, data, forward
        self._kept: list[list[Tensor]] = []
        spreads: list[_Spread] = []
        for place, batch in enumerate(data):
            targets = _floating(call(reference, batch, forward))
            spreads = spreads or [_Spread() for _ in targets]
            for spread, target in zip(spreads, targets, strict=True):
                spread.add(target)
            if len(self._kept) == place and len(data) * sum(y.nbytes for y in targets) <= KEPT:
                self._kept.append(targets)
        self._scales = [spread.variance or 1.0 for spread in spreads]

    @property
    def is_empty(self) -> bool:
        """Whether the outputs hold no floating-point tensor; the error is then zero."""
        return not self._scales

    def of(self, model: nn.Module, place: int) -> Tensor:
        """The error on one batch."""
        outputs, targets = _floating(call(model, self._data[place], self._forward)), self._targets(place)
        if [y.shape for y in outputs] != [y.shape for y in targets]:
            raise ValueError(
                f"the network's outputs have the shapes {[tuple(y.shape) for y in outputs]}, the reference's "
                f"{[tuple(y.shape) for y in targets]}: they are different networks."
            )
        errors = [
            (at_least_float32(y) - at_least_float32(target)).square().mean() / scale
            for y, target, scale in zip(outputs, targets, self._scales, strict=True)
        ]
        return torch.stack(errors).mean() if errors else torch.zeros(())

    def mean(self, model: nn.Module, places: Sequence[int] | None = None) -> float:
        """The mean error on some batches; ``None`` is all."""
        places = range(len(self._data)) if places is None else places
        return sum(float(self.of(model, place)) for place in places) / len(places)

    def _targets(self, place: int) -> list[Tensor]:
        if place < len(self._kept):
            return self._kept[place]
        with torch.no_grad():
            return _floating(call(self._reference, self._data[place], self._forward))


def _floating(output: Any) -> list[Tensor]:
    """The floating-point tensors among a network's outputs."""
    values = output.values() if isinstance(output, Mapping) else tree_leaves(output)  # results of transformers are both
    return [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]


class _Spread:
    """The variance of values that come batch by batch (Chan et al., 1983)."""

    def __init__(self) -> None:
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    def add(self, values: Tensor) -> None:
        """Count one batch in."""
        values = values.double()
        mean, count = float(values.mean()), self._count + values.numel()
        self._squares += float((values - mean).square().sum())
        self._squares += (mean - self._mean) ** 2 * self._count * values.numel() / count
        self._mean += (mean - self._mean) * values.numel() / count
        self._count = count

    @property
    def variance(self) -> float:
        """The mean squared distance from the mean."""
        return self._squares / max(self._count, 1)


def _scale(layer: Sequence[tuple[nn.Parameter, Tensor | None]]) -> float:
    """The root mean square of a layer's kept weights."""
    values = torch.cat([(p if mask is None else p[mask]).detach().flatten().float() for p, mask in layer])
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


@contextmanager
def _trainable(
    model: nn.Module, masks: Mapping[str, Tensor] | None
) -> Iterator[list[list[tuple[nn.Parameter, Tensor | None]]]]:
    """The parameters of each layer with their masks. Gradients and flags are restored, and values after an error."""
    kept = {id(parameter): (masks or {}).get(name) for name, parameter in parameters_of(model).items()}
    left_out = {id(p) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) for p in m.parameters()}
    layers: list[list[tuple[nn.Parameter, Tensor | None]]] = []
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point() and id(p) not in left_out]
        left_out |= {id(p) for p in own}  # a tied weight belongs to the first of its layers
        layers += [[(p, kept[id(p)]) for p in own]] if own else []
    found = [p for layer in layers for p, _ in layer]
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in found):
        raise ValueError("passes need gradients of at least single precision: call model.float() first.")
    before = [(p, p.grad, p.requires_grad) for p in found]
    try:
        for parameter in found:
            parameter.grad = None
            parameter.requires_grad_(True)
        with restored(found):
            yield layers
    finally:
        for parameter, gradient, required in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient
