"""``estimate``: H over a data set, exactly or from part of it, for any model."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward, Targets, batch_size_of, targets_of
from shaver.curvature.blocks import Block, Curvature, DiagonalBlock, KroneckerBlock, at_least_float32
from shaver.curvature.capture import Call, Functional, trainable_parameters, uncompiled, undisturbed
from shaver.curvature.generic import GenericRule
from shaver.curvature.plan import Plan
from shaver.curvature.probe import check_outputs, described
from shaver.curvature.rule_choice import make_plan
from shaver.curvature.uses import Outer, Shift, Use, joint_square_sum
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import check_count, check_functions, check_name, check_number

STRUCTURES = ("diag", "kron")
SOURCES = ("ggn", "ef", "mc")
#: Default number of bytes that an estimate may use in addition to the model.
MEMORY_BUDGET = 2**30
#: A Kronecker factor with more rows than this is not built; the block is then diagonal, and ``coverage()`` says so.
FACTOR_LIMIT = 10_000


def estimate(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str | Likelihood = "classification",
    structure: str = "diag",
    source: str = "ggn",
    *,
    forward: Forward | None = None,
    targets: Targets | None = None,
    samples: int = 1,
    seed: int = 0,
    fraction: float | None = None,
    max_samples: int | None = None,
    sharing: str = "expand",
    memory_budget: int | None = None,
) -> Curvature:
    """Estimate the curvature of the negative log likelihood, summed over the data, at the model's current weights.

    The model runs in evaluation mode and is left unchanged: mode, gradients, hooks and random state.

    Args:
        model: Any network whose outputs have one row per sample.
        batches: Batches ``(x, y)`` or dicts with ``labels``; a DataLoader, a list, a generator.
        likelihood: ``"classification"``, ``"regression"`` or a :class:`shaver.likelihoods.Likelihood`.
        structure: ``"diag"``, or ``"kron"`` for Kronecker factors where a layer has them.
        source: ``"ggn"``: the generalised Gauss–Newton matrix (GGN) Σ JᵀΛJ, exactly. ``"ef"``: the empirical Fisher
            (EF) Σ g gᵀ. ``"mc"``: labels sampled from the model, unbiased for the GGN at the cost of the EF.
        forward: ``forward(model, batch) -> outputs`` for other batch layouts.
        targets: ``targets(batch) -> targets`` for other batch layouts.
        samples: Number of sampled labels per sample, for ``source="mc"``.
        seed: Seed for sampling labels and for choosing samples.
        fraction: Use this share of the samples, chosen at random. H and the log likelihood are scaled to all samples.
        max_samples: The same as a number of samples; needs the size of the data (``len(loader.dataset)``).
        sharing: How Kronecker factors treat weights shared over positions or tokens: ``"expand"`` counts every
            position as a sample, ``"reduce"`` first averages inputs and sums gradients over positions.
        memory_budget: Bytes to use in addition to the model; batches are split to fit. Default: 1 GiB.

    Returns:
        A :class:`Curvature`: ``.diagonal()``, ``.blocks``, ``.coverage()``, ``.log_likelihood``.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,)))]
        >>> curvature = estimate(net, data, source="ggn")
        >>> {name: tuple(h.shape) for name, h in curvature.diagonal().items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    check_name("structure", structure, STRUCTURES)
    check_name("source", source, SOURCES)
    check_name("sharing", sharing, ("expand", "reduce"))
    check_functions(forward=forward, targets=targets)
    budget = MEMORY_BUDGET if memory_budget is None else check_count("memory_budget", memory_budget)
    check_count("samples", samples)
    generator = torch.Generator().manual_seed(check_count("seed", seed, 0))
    chosen, reduce = get_likelihood(likelihood), sharing == "reduce"
    work = _Estimation(
        model, chosen, structure, source, forward, targets or targets_of, samples, generator, reduce, budget
    )
    share = _share(batches, fraction, max_samples)
    with undisturbed(model), uncompiled():
        for index, batch in enumerate(_iterable(batches)):
            work.add(batch, share, index)
    return work.finish(share)


@dataclass
class _Estimation:
    """The running sums of one estimate."""

    model: nn.Module
    likelihood: Likelihood
    structure: str
    source: str
    forward: Forward | None
    targets: Targets
    samples: int
    generator: torch.Generator
    reduce: bool
    budget: int

    def __post_init__(self) -> None:
        self.wanted = trainable_parameters(self.model)
        self.function = Functional(self.model, self.forward)
        self.offset = float(torch.rand((), generator=self.generator))
        self.plan: Plan | None = None
        self.planned_for = 0
        self.diagonals: dict[str, Tensor] = {}
        self.factors: dict[str, KroneckerBlock] = {}  # with a sum over samples in A, not a mean
        self.counts: dict[str, int] = {}  # the number of terms in that sum
        self._gradient_factors: dict[tuple[int, ...], Tensor] = {}
        self.log_likelihood = 0.0
        self.seen = self.used = 0

    def add(self, batch: Any, share: float, index: int) -> None:
        """Add one batch, or ``share`` of its samples, split so that it fits the memory budget."""
        size = batch_size_of(batch)
        chosen = self._chosen(size, share)
        if not size or (chosen is not None and not len(chosen)):
            return
        if self.plan is None or self.planned_for == 1 < size:  # one sample does not show which dimension is the batch
            self.plan, self.planned_for = make_plan(self.model, self.forward, batch, self.wanted), size
            self.function.copies_inputs = self.plan.alters_inputs
        if chosen is not None:
            batch, size = self.plan.samples.take(batch, chosen), len(chosen)
        self.used += size
        start = 0
        while start < size:
            step, columns = self._fit(size - start)
            piece = batch if step == size else self.plan.samples.take(batch, slice(start, start + step))
            self._add_piece(piece, step, columns, index)
            start += step

    def _chosen(self, size: int, share: float) -> Tensor | None:
        """Indices of the samples to use from a batch of ``size``; None means all. Each has probability ``share``."""
        before = math.floor(self.seen * share + self.offset)
        self.seen += size
        if share == 1.0:
            return None
        count = math.floor(self.seen * share + self.offset) - before
        return torch.randperm(size, generator=self.generator)[:count].sort().values

    def _fit(self, size: int) -> tuple[int, int]:
        """The number of samples, and of output gradients at a time, that fit the budget."""
        assert self.plan is not None
        number = next(iter(self.wanted.values())).element_size()
        forward_pass = number * (4 * self.plan.outputs + 2 * self.plan.patches)  # activations and patches
        column = number * max(self.plan.outputs, 1)
        if forward_pass + column > self.budget:
            raise ValueError(
                f"one sample needs about {(forward_pass + column) / 2**20:.1f} MiB for its curvature, more than "
                f"memory_budget={self.budget} bytes ({self.budget / 2**20:.1f} MiB); pass a larger memory_budget."
            )
        samples = max(1, min(size, self.budget // (forward_pass + column)))
        wished = min(size, 64)
        if samples > wished:  # several columns share the unfolded inputs; several samples share the calls
            columns = max(1, (self.budget // wished - forward_pass) // column)
            samples = max(wished, min(size, self.budget // (forward_pass + min(columns, 16) * column)))
            return samples, columns
        return samples, 1

    def _cotangents(self, outputs: Tensor, batch: Any, index: int) -> Tensor:
        """Output gradients ``(K, *outputs.shape)`` whose per-sample outer products sum to H. Adds the likelihood."""
        leaf = outputs.detach().requires_grad_()
        target = self.targets(batch)
        self.likelihood.check(leaf, target)
        nll = self.likelihood.nll(leaf, target)
        if nll.shape != (len(outputs),):
            raise ValueError(
                f"{type(self.likelihood).__name__}.nll must return one number per sample, shape ({len(outputs)},), "
                f"but returned shape {tuple(nll.shape)}."
            )
        if not bool(torch.isfinite(nll).all()):
            worst = int((~torch.isfinite(nll)).nonzero()[0])
            value = float(nll.detach()[worst])
            raise ValueError(
                f"the loss of sample {worst} in batch {index} is {value}: the data, the weights or the outputs hold "
                "NaN or infinity."
            )
        self.log_likelihood -= float(nll.detach().double().sum())
        if self.source == "ef":
            return torch.autograd.grad(nll.sum(), leaf)[0].unsqueeze(0)
        if self.source == "ggn":
            columns = self.likelihood.root(leaf.detach())
        else:
            draws = [self.likelihood.mc_gradient(leaf.detach(), self.generator) for _ in range(self.samples)]
            columns = torch.stack(draws) / math.sqrt(self.samples)
        mask = self.likelihood.counted(leaf, target)
        return columns if mask is None else columns * mask

    def _add_piece(self, batch: Any, size: int, columns: int, index: int) -> None:
        plan = self.plan
        assert plan is not None
        with described(batch), plan.recording.of(size) as calls:
            outputs = self.function(batch)
        check_outputs(outputs, size)
        cotangents = self._cotangents(outputs, batch, index).to(outputs.dtype)
        edges = [call.edge for call in calls]
        doubted = self._doubted(outputs, cotangents, calls)
        rest = dict.fromkeys([*plan.generic, *self._unseen(outputs, cotangents, calls), *doubted])
        chunks = torch.split(cotangents, columns)
        for number, chunk in enumerate(chunks):
            last = number == len(chunks) - 1
            passes = [
                torch.autograd.grad(outputs, edges, row, retain_graph=not last or k < len(chunk) - 1, allow_unused=True)
                for k, row in enumerate(chunk)
                if edges
            ]  # gradients at the layers' outputs; weight gradients are never computed
            columns_of = [
                dict(plan.uses(calls, [g if g is None else g.unsqueeze(0) for g in grads], size, doubted))
                for grads in passes
            ]
            self._gradient_factors.clear()
            for name in columns_of[0] if columns_of else ():
                self._accumulate(name, [uses[name] for uses in columns_of], index, first=number == 0)
        del outputs, calls, edges
        if rest:
            weights = {name: self.wanted[name] for name in rest}
            generic = GenericRule(self.function, self.budget, plan)
            for name, squares in generic.square_sum(weights, batch, cotangents).items():
                self._add_diagonal(name, squares, index)

    def _doubted(self, outputs: Tensor, cotangents: Tensor, calls: list[Call]) -> set[str]:
        """Parameters of layers whose inputs do not hold the samples as planned in this batch."""
        assert self.plan is not None
        if not self.plan.routed:
            return self.plan.doubted(calls, len(outputs))
        signs = torch.randn(len(cotangents), generator=torch.Generator().manual_seed(0)).to(cotangents)
        return self.plan.misrouted(calls, outputs, torch.tensordot(signs, cotangents, 1))

    def _unseen(self, outputs: Tensor, cotangents: Tensor, calls: list[Call]) -> list[str]:
        """Parameters with a gradient but no recorded call, because of a new branch or hooks that did not run."""
        assert self.plan is not None
        names = self.plan.unseen(calls)
        if not names:
            return []
        leaves = [self.wanted[name] for name in names]
        grads = torch.autograd.grad(outputs, leaves, cotangents[0], retain_graph=True, allow_unused=True)
        return [name for name, grad in zip(names, grads, strict=True) if grad is not None]

    def _accumulate(self, name: str, uses: list[Use], index: int, first: bool) -> None:
        """Add one parameter's uses under several output gradients of the same samples."""
        use = uses[0]
        if not (self.structure == "kron" and isinstance(use, Outer | Shift) and _dimension(use) <= FACTOR_LIMIT):
            self._add_diagonal(name, joint_square_sum(uses), index)
            return
        gradient = self._gradient_factor([u for u in uses if isinstance(u, Outer | Shift)])
        sums = [gradient]
        if first:  # the other output gradients of the same samples have the same inputs
            inputs, count = use.input_factor(self.reduce)
            sums.append(inputs)
        if not all(bool(torch.isfinite(s.sum())) for s in sums):
            raise _not_finite(name, index)
        if name not in self.factors:
            transposed = isinstance(use, Outer) and use.transposed
            self.factors[name] = KroneckerBlock(inputs, gradient.clone(), self.wanted[name].shape, transposed)
            self.counts[name] = count
            return
        known = self.factors[name]
        known.G += gradient
        if first:
            known.A += inputs
            self.counts[name] += count

    def _gradient_factor(self, uses: list[Outer | Shift]) -> Tensor:
        """G over these output gradients. A layer's weight and bias share it, so it is computed once."""
        key = tuple(id(use.grads) for use in uses)
        if key not in self._gradient_factors:
            parts = [use.gradient_factor(self.reduce) for use in uses]
            self._gradient_factors[key] = torch.stack(parts).sum(0)
        return self._gradient_factors[key]

    def _add_diagonal(self, name: str, squares: Tensor, index: int) -> None:
        if not bool(torch.isfinite(squares.sum())):
            raise _not_finite(name, index)
        if name in self.diagonals:
            self.diagonals[name] += squares
        else:
            self.diagonals[name] = squares

    def finish(self, share: float) -> Curvature:
        """The sums as a :class:`Curvature`, scaled to all samples if only a share was used."""
        if not self.seen:
            raise ValueError("the batches are empty: nothing to estimate the curvature from.")
        if not self.used or self.plan is None:
            raise ValueError(f"a share of {share} of {self.seen} samples is less than one sample; use a larger one.")
        labels = self.plan.labels()
        blocks: dict[str, Block] = {}
        rules: dict[str, str] = {}
        for name, parameter in self.wanted.items():
            blocks[name], kind = self._block(name, parameter)
            rules[name] = f"{kind}: {labels[name]}" if self.structure == "kron" else labels[name]
            if share != 1.0:
                blocks[name].scale(1 / share)
        return Curvature(blocks, self.log_likelihood / share, self.seen, self.structure, self.source, rules)

    def _block(self, name: str, parameter: Tensor) -> tuple[Block, str]:
        """H of one parameter, and its structure in words. Batches that need the generic rule have no factors."""
        values = self.diagonals.get(name)
        if name not in self.factors:
            if values is None:
                values = torch.zeros_like(at_least_float32(parameter.detach()))
            return DiagonalBlock(values), "diagonal"
        block = replace(self.factors[name], A=self.factors[name].A / self.counts[name])
        if values is None:
            return block, "kronecker"
        return DiagonalBlock(values + block.diagonal()), "diagonal (generic rule in some batches)"


def _dimension(use: Outer | Shift) -> int:
    outputs = use.grads.shape[2] // use.groups
    return max(outputs, torch.Size(use.shape).numel() // use.grads.shape[2]) if isinstance(use, Outer) else outputs


def _share(batches: Iterable[Any], fraction: float | None, max_samples: int | None) -> float:
    if fraction is not None and max_samples is not None:
        raise ValueError(f"pass fraction ({fraction}) or max_samples ({max_samples}), not both.")
    if fraction is not None:
        return check_number("fraction", fraction, least=0, most=1, above=True)
    if max_samples is None:
        return 1.0
    check_count("max_samples", max_samples)
    size = getattr(batches, "data_size", None)
    if size is None and hasattr(batches, "dataset"):
        size = len(batches.dataset)
    if size is None and isinstance(batches, list | tuple):
        size = sum(batch_size_of(batch) for batch in batches)
    if size is None:
        raise ValueError("max_samples needs the size of the data, which this iterable does not have; use fraction=.")
    return float(min(1.0, max_samples / size))


def _not_finite(name: str, index: int) -> ValueError:
    return ValueError(
        f"the curvature of {name!r} is not finite in batch {index}: its inputs or gradients hold NaN or infinity."
    )


def _iterable(batches: Iterable[Any]) -> Iterable[Any]:
    """The batches, or an error that says what they should be."""
    if isinstance(batches, Tensor | str | Mapping) or not hasattr(batches, "__iter__"):
        kind = f"a tensor of shape {tuple(batches.shape)}" if isinstance(batches, Tensor) else repr(type(batches))
        raise TypeError(f"batches is a DataLoader or a list of batches such as [(x, y)], not {kind}.")
    if isinstance(batches, tuple) and batches and isinstance(batches[0], Tensor):
        raise TypeError("batches is one batch (x, y) here; pass a list of batches, [(x, y)].")
    return batches
