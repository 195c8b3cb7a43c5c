"""The probe: a forward and backward pass of a few samples, and autograd's per-sample gradients for comparison."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shaver.batches import Forward, batch_size_of, tensors_in
from shaver.curvature.blocks import at_least_float32
from shaver.curvature.capture import Call, Functional, Recording, Samples, copied
from shaver.curvature.uses import Use

#: Samples in the probe. With three, a dimension of two tokens is not mistaken for the samples.
SAMPLES = 3
#: The factors of the samples in the two sums whose gradients are compared. They differ, so that a row that is counted
#: for another sample shows. Multiplying by a power of two does not round, which matters in half precision.
_FACTORS = ((1.0, 0.5, 4.0), (0.25, -2.0, 1.0))
#: Parameters with at most this many values are compared in both sums: few values may agree by chance.
_SMALL = 10_000
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass
class Reference:
    """Autograd's gradients of one parameter, of sums of the samples with different factors."""

    sums: list[tuple[Sequence[float], Tensor]]  # (factor of each sample, gradient) for one or two sums

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.sums[0][1].shape

    def sizes(self, use: Use, floor: float) -> list[float] | None:
        """The sizes of a use's per-sample gradients; None if a sum of them differs by more than rounding."""
        totals = [torch.zeros_like(at_least_float32(gradient)) for _, gradient in self.sums]
        sizes = []
        for n in range(len(self.sums[0][0])):  # one sample at a time, because gradients of a vocabulary are large
            found = use.per_sample(n, n + 1)[0, 0]
            if found.shape != self.shape:
                raise ValueError(f"gives shape {tuple(found.shape)} for {tuple(self.shape)}")
            for total, (factors, _) in zip(totals, self.sums, strict=True):
                total.add_(found, alpha=factors[n])
            sizes.append(_rms(found))
        for total, (_, gradient) in zip(totals, self.sums, strict=True):
            if not _rms(total.sub_(gradient)) <= tolerance(gradient) * (_rms(gradient) + negligible(gradient) * floor):
                return None
        return sizes


class RuleProbe:
    """A few samples of a batch, passed through the model at randomly perturbed weights.

    The model does not change. Weights are perturbed, as copies, because at special weights, such as a zero-initialised
    head, all gradients before the head vanish and a wrong rule would pass the check. Large weights are special only if
    many of their values are equal or nearly zero; the others are used as they are, because copies would need as much
    memory as the model. Samples that are all equal or zero are perturbed too.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward | None,
        batch: Any,
        wanted: Mapping[str, Tensor],
        modules: Mapping[str, nn.Module],
    ) -> None:
        self.model, self.function = model, Functional(model, forward)
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: _perturbed(p, generator) for name, p in wanted.items()}
        self._recording = Recording(modules, {name: w for name, w in self.weights.items() if w.ndim == 2})
        with self.function.placed(self.weights):  # also in backward passes, which may compute activations again
            outputs = self._first_pass(batch)
            self.outputs = outputs.detach()
            self.direction = torch.randn(outputs.shape, generator=generator).to(outputs)
            grads: Sequence[Tensor | None] = ()
            if edges := [call.edge for call in self.calls]:
                grads = torch.autograd.grad(outputs, edges, self.direction, retain_graph=True, allow_unused=True)
        self._graph = outputs
        self._floor = 0.0
        # module name → its calls that have a gradient, with that gradient (1, *output shape)
        self.passed: dict[str, list[tuple[Call, Tensor]]] = {}
        for call, grad in zip(self.calls, grads, strict=True):
            if grad is not None:
                self.passed.setdefault(call.name, []).append((call, grad.unsqueeze(0)))

    def visit(self, look: Callable[[str, Reference], None]) -> None:
        """Call ``look(name, reference)`` for each parameter with a gradient, once; then release the graph.

        A gradient is passed on as soon as it arrives and is not kept, because all gradients together are as large as
        the model. A first pass finds the largest, and keeps those of small parameters.
        """
        first, second = (factors[: self.count] for factors in _FACTORS)
        small: dict[str, Tensor] = {}

        def measure(name: str, gradient: Tensor) -> None:
            self._floor = max(self._floor, _rms(gradient))
            if gradient.numel() <= _SMALL:
                small[name] = gradient

        def compare(name: str, gradient: Tensor) -> None:
            sums: list[tuple[Sequence[float], Tensor]] = [(second, gradient)]
            look(name, Reference(sums + ([(first, small.pop(name))] if name in small else [])))

        self._backward(first, measure, retain_graph=True)
        self._backward(second, compare, retain_graph=False)
        del self._graph

    def _backward(self, factors: Sequence[float], look: Callable[[str, Tensor], None], retain_graph: bool) -> None:
        """One backward pass that calls ``look(name, gradient)`` for each parameter."""

        def arrived(name: str, leaf: Tensor) -> None:
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            look(name, gradient.to_dense())

        leaves = list(self.weights.values())
        rows = self.direction * _column(factors, self.direction)
        with ExitStack() as stack:
            stack.enter_context(self.function.placed(self.weights))
            for name, leaf in self.weights.items():
                handle = leaf.register_post_accumulate_grad_hook(partial(arrived, name))  # type: ignore[no-untyped-call]
                stack.callback(handle.remove)
            self._graph.backward(rows, retain_graph=retain_graph, inputs=leaves)  # type: ignore[no-untyped-call]

    def again(self, recording: Recording) -> tuple[list[Call], Sequence[Tensor | None]]:
        """The same pass with another recording: its calls and their gradients."""
        for count in dict.fromkeys([max(1, self.count - 1), self.count]):
            with recording.of(count) as calls:
                outputs = self.function.at(self.weights, copied(self.samples.take(self.batch, slice(0, count))))
            found, expected = outputs.detach(), self.outputs[:count]
            if found.shape != expected.shape or not _rms(found - expected) <= tolerance(expected) * _rms(expected):
                raise ValueError("the outputs change")
        return calls, torch.autograd.grad(outputs, [c.edge for c in calls], self.direction, allow_unused=True)

    def agreement(self, use: Use, reference: Reference) -> bool | None:
        """Compare a use's per-sample gradients with autograd's: None if they differ.

        Otherwise, whether they can tell a right copy per sample from a wrong one: two samples at least have some.
        """
        sizes = reference.sizes(use, self._floor)
        if sizes is None:
            return None
        least = negligible(reference.sums[0][1]) * self._floor
        return sum(size > least for size in sizes) >= min(2, self.count)

    def holds_on_random_inputs(self, module: nn.Module, rule: Callable[..., Mapping[str, Use]], inputs: Tensor) -> bool:
        """Whether a rule also holds for normal random inputs: the batch may, for example, have no negative ones."""
        if not inputs.is_floating_point():
            return True
        generator = torch.Generator().manual_seed(1)
        with self.function.placed(self.weights), torch.enable_grad():
            # in the parameters' precision: the model's own pass may have run under autocast
            x = torch.randn(inputs.shape, generator=generator).to(next(module.parameters()))
            y = module(x.clone())
            direction = torch.randn(y.shape, generator=generator).to(y)
            own = {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}
            factors = torch.linspace(1, 2, len(x), dtype=torch.float64).tolist()
            grads = torch.autograd.grad(y, list(own.values()), direction * _column(factors, y))
            uses = rule(module, at_least_float32(x), at_least_float32(direction).unsqueeze(0))
        references = {name: Reference([(factors, grad)]) for name, grad in zip(own, grads, strict=True)}
        return all(reference.sizes(uses[name], 1.0) is not None for name, reference in references.items())

    def _first_pass(self, batch: Any) -> Tensor:
        """Run the model; find the entries of the batch that are not per sample by trying. The outputs have a graph."""
        uncertain = Samples.uncertain(batch)
        sets = itertools.chain.from_iterable(itertools.combinations(uncertain, size) for size in range(3))
        failed: Exception | None = None
        for shared in sets:
            try:
                return self._try_pass(batch, Samples(frozenset(shared)))
            except (ValueError, RuntimeError) as error:
                failed = failed or error
        assert failed is not None
        raise failed

    def _try_pass(self, batch: Any, samples: Samples) -> Tensor:
        self.samples = samples
        self.batch = _varied(samples, copied(samples.take(batch, slice(0, SAMPLES))))
        self.count = batch_size_of(self.batch)
        given, routing = copied(self.batch), _Routing()
        with described(self.batch), routing, self._recording.of(self.count) as self.calls:
            outputs = self.function(given)
        # whether the data may decide which rows a layer receives, as in a mixture of experts
        self.routed = routing.found
        self.alters_inputs = any(tensor._version > 0 for tensor in tensors_in(given))
        check_outputs(outputs, self.count)
        self._check_independent(outputs.detach())
        return outputs

    def _check_independent(self, outputs: Tensor) -> None:
        """Refuse a model whose output for a sample depends on the other samples: it has no per-sample gradients."""
        if self.count < 2:
            return
        suspects = [
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
        ]
        hint = f" Suspect: {', '.join(suspects)} (track_running_stats=False)." if suspects else ""
        message = (
            "the output of a sample changes with the other samples in its batch, so per-sample gradients do not "
            "exist. The cause is a batch-dependent layer (BatchNorm without running statistics) or randomness in "
            f"evaluation mode.{hint}"
        )
        try:
            with torch.no_grad():
                alone = self.function(copied(self.samples.take(self.batch, slice(0, 1))))
        except ValueError as error:  # BatchNorm raises it for a batch of one
            if suspects:
                raise ValueError(message) from error
            raise
        if alone.shape[1:] != outputs.shape[1:]:
            return
        distance, scale = (alone[0] - outputs[0]).abs().max(), outputs.abs().max()
        finite = torch.isfinite(alone).all() and torch.isfinite(outputs).all()
        # NaN is reported when the batch is processed
        if bool(finite) and bool(distance > tolerance(alone) * scale):
            raise ValueError(message)


class _Routing(TorchFunctionMode):
    """Detects operations by which the data can decide which rows a layer receives."""

    NAMES = frozenset(
        [
            *("nonzero", "argwhere", "masked_select", "masked_scatter", "index_select", "gather", "take"),
            *("take_along_dim", "sort", "argsort", "topk", "kthvalue", "unique", "unique_consecutive", "argmax"),
            *("argmin", "bincount", "searchsorted", "bucketize", "multinomial", "repeat_interleave", "one_hot"),
            *("index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "scatter"),
            *("scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
            *("item", "tolist", "numpy", "__index__", "__int__", "__float__"),
        ]
    )

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._decisions = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__":  # one decision per batch (is a mask all ones?) is not one decision per sample
            self._decisions += 1
            self.found |= self._decisions >= SAMPLES
        elif name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found |= any(isinstance(i, Tensor | list | np.ndarray) for i in index)
        else:
            self.found |= name in self.NAMES or (name == "where" and len(args) + len(kwargs or {}) == 1)
        return func(*args, **(kwargs or {}))


def check_outputs(outputs: Tensor, count: int) -> None:
    """Check that the outputs have a gradient and one row per sample."""
    if not outputs.requires_grad:
        raise ValueError(
            "the model's outputs have no gradient: the model detaches them, runs under no_grad, or does not use its "
            "trainable parameters."
        )
    if outputs.is_complex():
        raise ValueError(f"the model's outputs are {outputs.dtype}; a likelihood needs real outputs.")
    if outputs.ndim == 0 or outputs.shape[0] != count:
        raise ValueError(
            f"the model returned outputs of shape {tuple(outputs.shape)} for {count} samples; the first dimension "
            "must be the samples. Pass forward=lambda model, batch: … that puts them first."
        )


@contextmanager
def described(batch: Any) -> Iterator[None]:
    """Add the batch's shapes to torch's error message if the model cannot process the batch."""
    try:
        yield
    except RuntimeError as error:
        shapes = [f"{tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}" for v in tensors_in(batch)]
        raise ValueError(f"the model cannot process a batch with tensors {', '.join(shapes)}: {error}") from error


def tolerance(values: Tensor) -> float:
    """Relative rounding error in the precision of ``values``, with a margin."""
    return _TOLERANCE.get(values.dtype, 0.2)


def negligible(values: Tensor) -> float:
    """The size, as a share of the largest gradient's, below which a gradient may be zero but for rounding."""
    return 1e-8 if values.dtype == torch.float64 else 1e-4


def _column(factors: Sequence[float], like: Tensor) -> Tensor:
    """One factor per sample, in a shape that multiplies ``like``."""
    return torch.tensor(factors, dtype=torch.float64).to(like).view(-1, *(1,) * (like.ndim - 1))


def _rms(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(values.numel())


def _varied(samples: Samples, batch: Any) -> Any:
    """The batch with noise on the entries that are equal for all samples."""
    generator = torch.Generator().manual_seed(2)
    rows, rebuild = samples.split(batch)

    def vary(values: Tensor) -> Tensor:
        is_plain = values.is_floating_point() and bool(torch.isfinite(values).all())
        if not is_plain or not bool((values == values[:1]).all()) or (len(values) == 1 and bool(values.any())):
            return values
        scale = 0.1 * values.square().mean().sqrt() + 0.1
        return values + scale * torch.randn(values.shape, generator=generator).to(values)

    return rebuild([vary(row) for row in rows])


def _perturbed(parameter: Tensor, generator: torch.Generator) -> Tensor:
    """A leaf with a perturbed copy of the values, or with the parameter's own values if it is large and not special."""
    values = parameter.detach()
    if values.numel() > _SMALL and not _is_special(values):
        return values.requires_grad_()
    noise = torch.randn(values.shape, generator=generator).to(values)
    scale = 0.1 * values.square().mean().sqrt() + 0.02
    return (values + scale * noise).requires_grad_()


def _is_special(values: Tensor) -> bool:
    """Whether many values of a large weight are equal or nearly zero, judged by about a thousand of them."""
    some = values.reshape(-1)[:: values.numel() // 1000]
    most_common = int((some == some.mode().values).sum())
    nearly_zero = int((some.abs() < 1e-4).sum())
    return most_common > 0.1 * len(some) or nearly_zero > 0.25 * len(some)
