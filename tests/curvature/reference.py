"""Dense float64 references for the curvature engine: one sample at a time, by definition, sharing no code with it.

Everything here loops over single samples, so a "sample" is whatever one row of the batch is, however a model
folds, transposes or broadcasts it. The output Hessian comes from ``torch.func.hessian`` of the negative log
likelihood, never from ``Likelihood.root``.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

from shaver.likelihoods import get_likelihood

Named = dict[str, Tensor]
_KEEP = {"retain_graph": True, "allow_unused": True}
Forward = Callable[[nn.Module, Any], Tensor]


def default_forward(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0])


def default_targets(batch: Any) -> Tensor:
    return batch[1]


class _Network(nn.Module):
    """A model together with its ``forward(model, batch)``, so that ``functional_call`` reaches both."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, batch: Any) -> Tensor:
        """In evaluation mode, whatever the mode the model is in; a copy would refuse models with hooked weights."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            return self.run(self.model, batch)
        finally:
            for module, mode in modes:
                module.training = mode


class Problem:
    """A model, its data and its likelihood, with the curvature computed by definition."""

    def __init__(
        self,
        model: nn.Module,
        batches: Any,
        likelihood: Any = "classification",
        forward: Forward | None = None,
        targets: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self.network = _Network(model, forward or default_forward)
        self.batches = list(batches)
        self.likelihood = get_likelihood(likelihood)
        self.targets = targets or default_targets
        self.parameters = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        self.places = _places(model)

    def samples(self) -> Iterator[tuple[Any, Tensor]]:
        """Each row of each batch as a batch of one, with its target."""
        for batch in self.batches:
            for n in range(len(self.targets(batch))):
                one = (
                    {key: value[n : n + 1] for key, value in batch.items()}
                    if isinstance(batch, dict)
                    else tuple(value[n : n + 1] for value in batch)
                )
                yield one, self.targets(one)

    def outputs(self, parameters: Named, sample: Any) -> Tensor:
        named = {f"model.{place}": value for name, value in parameters.items() for place in self.places[name]}
        return functional_call(self.network, named, (sample,), tie_weights=False)

    def nll(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.likelihood.nll(outputs, target).sum()

    def output_hessian(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Λ = ∂²nll/∂f² at one sample's flattened outputs."""
        flat = outputs.detach().reshape(-1)
        return hessian(lambda f: self.nll(f.reshape(outputs.shape), target))(flat)

    def log_likelihood(self) -> float:
        return -sum(float(self.nll(self.outputs(self.parameters, x), y)) for x, y in self.samples())

    def jacobians(self) -> Iterator[tuple[Named, Tensor]]:
        """For each sample, J with rows over flattened outputs, ``(outputs, *parameter)``, and Λ."""
        for sample, target in self.samples():

            def flat(parameters: Named, sample: Any = sample) -> Tensor:
                return self.outputs(parameters, sample).reshape(-1)

            with torch.no_grad():
                outputs = self.outputs(self.parameters, sample)
            yield jacrev(flat)(self.parameters), self.output_hessian(outputs, target)

    def gradients(self) -> Iterator[Named]:
        """For each sample, the gradient of its negative log likelihood."""
        for sample, target in self.samples():

            def loss(parameters: Named, sample: Any = sample, target: Tensor = target) -> Tensor:
                return self.nll(self.outputs(parameters, sample), target)

            yield grad(loss)(self.parameters)

    def diagonal(self, source: str) -> Named:
        """H_pp: Σ_n (J_nᵀ Λ_n J_n)_pp for ``"ggn"``, Σ_n g_np² for ``"ef"``."""
        total = {name: torch.zeros_like(value) for name, value in self.parameters.items()}
        if source == "ggn":
            for jacobian, lam in self.jacobians():
                for name, J in jacobian.items():
                    rows = J.reshape(len(J), -1)
                    total[name] += (rows * (lam @ rows)).sum(0).reshape(total[name].shape)
        else:
            for gradient in self.gradients():
                for name, g in gradient.items():
                    total[name] += g.square()
        return total

    def dense(self, source: str) -> Tensor:
        """The whole P × P matrix, parameters flattened in the order of ``named_parameters``."""
        size = sum(value.numel() for value in self.parameters.values())
        total = torch.zeros(size, size, dtype=torch.float64)
        if source == "ggn":
            for jacobian, lam in self.jacobians():
                rows = torch.cat([jacobian[name].reshape(len(lam), -1) for name in self.parameters], 1)
                total += rows.T @ lam @ rows
        else:
            for gradient in self.gradients():
                g = torch.cat([gradient[name].flatten() for name in self.parameters])
                total += torch.outer(g, g)
        return total

    def block(self, source: str, name: str) -> Tensor:
        """One parameter's square block of :meth:`dense`."""
        start = 0
        for other, value in self.parameters.items():
            if other == name:
                return self.dense(source)[start : start + value.numel(), start : start + value.numel()]
            start += value.numel()
        raise KeyError(name)

    def kronecker(self, source: str, sharing: str) -> dict[str, tuple[Tensor, Tensor]]:
        """KFAC's factors (A, G), each ``(groups, …, …)``, for Linear-like layers and convolutions.

        expand: A = mean_{n,t} a aᵀ and G = Σ_{n,t} Σ_k g gᵀ, with k over the columns of √Λ (one for the EF).
        reduce: A = mean_n ā āᵀ with ā = mean_t a, and G = Σ_n Σ_k (Σ_t g)(Σ_t g)ᵀ. A further call, and a further
        layer that holds the same weight, is a further position. A bias is the same with the input 1. A parameter
        that is also held by another kind of module, or that no gradient reaches, has no factors.
        """
        model = self.network.model
        held = {name: [place.rpartition(".")[0] for place in self.places[name]] for name in self.parameters}
        layers = {module: model.get_submodule(module) for modules in held.values() for module in modules}
        layers = {name: module for name, module in layers.items() if _is_kronecker_layer(module)}
        held = {name: modules for name, modules in held.items() if set(modules) <= set(layers)}
        inputs: dict[str, list[Tensor]] = {name: [] for name in held}  # per sample (groups, positions, in)
        squares: dict[str, list[Tensor]] = {name: [] for name in held}  # per sample and column (groups, out, out)
        for sample, target in self.samples():
            seen, outputs = self._run_with_records(layers, sample)
            columns = self._columns(outputs, target, source)
            for name, modules in held.items():
                calls = [(layers[module], x, y) for module in modules for x, y in seen[module]]
                if not calls:
                    continue
                a = torch.cat([_rows_in(module, x) for module, x, _ in calls], 1)
                a = torch.ones_like(a[:, :, :1]) if name.endswith("bias") else a
                inputs[name].append(a if sharing == "expand" else a.mean(1, keepdim=True))
                for column in columns:
                    gradients = torch.autograd.grad(
                        outputs.reshape(-1), [y for *_, y in calls], column, **_KEEP, materialize_grads=True
                    )
                    rows = [_rows_out(module, g) for (module, *_), g in zip(calls, gradients, strict=True)]
                    g = torch.cat(rows, 1) if sharing == "expand" else torch.cat(rows, 1).sum(1, keepdim=True)
                    squares[name].append(g.mT @ g)
        factors = {}
        for name in held:
            if inputs[name]:
                rows = torch.cat(inputs[name], 1)
                factors[name] = (rows.mT @ rows / rows.shape[1], torch.stack(squares[name]).sum(0))
        return {name: (A, G) for name, (A, G) in factors.items() if G.any()}

    def _columns(self, outputs: Tensor, target: Tensor, source: str) -> list[Tensor]:
        """Flat output gradients: the columns of √Λ by eigendecomposition, or the loss's own gradient."""
        if source == "ggn":
            values, vectors = torch.linalg.eigh(self.output_hessian(outputs, target))
            return list((vectors * values.clamp_min(0).sqrt()).T)
        return [grad(lambda f: self.nll(f.reshape(outputs.shape), target))(outputs.detach().reshape(-1))]

    def _run_with_records(
        self, layers: dict[str, nn.Module], sample: Any
    ) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], Tensor]:
        """One forward pass that keeps each call's input and output; the clone survives in-place activations."""
        seen: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layers}

        def keep(name: str) -> Callable[..., Tensor]:
            def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
                seen[name].append((args[0].detach().clone(), output))
                return output.clone()

            return hook

        handles = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
        with torch.enable_grad():
            outputs = self.network(sample)
        for handle in handles:
            handle.remove()
        return seen, outputs


def _places(model: nn.Module) -> dict[str, list[str]]:
    """Parameter name → every place that holds it, each module object once.

    A module registered under two names must be given to ``functional_call`` once only: torch restores the second
    name to what the first had put there.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    places: dict[str, list[str]] = {name: [] for name in names.values()}
    for prefix, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places[names[id(parameter)]].append(f"{prefix}.{own}" if prefix else own)
    return places


def _is_kronecker_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or type(module).__name__ == "Conv1D"


def _rows_in(module: nn.Module, x: Tensor) -> Tensor:
    """One sample's inputs as ``(groups, positions, in)``."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return x.reshape(1, -1, x.shape[-1])
    return torch.cat([torch.stack(patches(module, row), 1) for row in x.split(1)], 1)


def _rows_out(module: nn.Module, y: Tensor) -> Tensor:
    """One sample's outputs, or their gradients, as ``(groups, positions, out)``."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return y.reshape(1, -1, y.shape[-1])
    rows = [row.reshape(module.groups, module.out_channels // module.groups, -1).mT for row in y]
    return torch.cat(rows, 1)


def patches(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> list[Tensor]:
    """What each output position of a convolution sees of one image, ``(groups, in·kernel)`` a position."""
    sides = len(conv.kernel_size)
    if conv.padding == "same":  # torch puts the odd one out behind
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        before = [t // 2 for t in total]
        after = [t - b for t, b in zip(total, before, strict=True)]
    else:
        before = after = [0] * sides if conv.padding == "valid" else list(conv.padding)
    pad = list(itertools.chain.from_iterable((b, a) for b, a in reversed(list(zip(before, after, strict=True)))))
    padded = F.pad(x, pad, mode="constant" if conv.padding_mode == "zeros" else conv.padding_mode)[0]
    spans = [d * (k - 1) + 1 for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
    starts = [range(0, padded.shape[1 + i] - spans[i] + 1, conv.stride[i]) for i in range(sides)]
    seen = []
    for corner in itertools.product(*starts):
        window = padded[
            (slice(None), *(slice(c, c + s, d) for c, s, d in zip(corner, spans, conv.dilation, strict=True)))
        ]
        seen.append(window.reshape(conv.groups, -1))
    return seen


def assert_same(got: Tensor, expected: Tensor, name: str, tolerance: float = 1e-10, scale: float = 0.0) -> None:
    """Equal relative to each entry, with an absolute floor far below the largest entry.

    Args:
        scale: The size of what the entries are sums of; a floor at 1e-20 of it lets pure rounding error be zero.
    """
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(expected.shape)}"
    got, expected = got.detach(), expected.detach()
    floor = max(tolerance * 1e-3 * float(expected.abs().max()), 1e-20 * scale)
    torch.testing.assert_close(
        got.to(expected.dtype), expected, rtol=tolerance, atol=floor, msg=lambda m: f"{name}: {m}"
    )


def assert_all_same(got: Named, expected: Named, tolerance: float = 1e-10) -> None:
    """The same names in the same order, with the same numbers."""
    assert list(got) == list(expected)
    scale = max(float(values.abs().max()) for values in expected.values())
    for name, values in expected.items():
        assert_same(got[name], values, name, tolerance, scale)
