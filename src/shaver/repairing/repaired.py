"""``repair``: give what is left of a pruned network the weights that match the dense network's outputs best."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward, check_network
from shaver.criteria import PosteriorLike, prunable
from shaver.criteria.registry import check_posterior
from shaver.measure.evaluating import evaluating, restored
from shaver.naming import check_functions, check_number, shown
from shaver.repairing.calibration import calibration_list, call
from shaver.repairing.conditional import conditional_mean, prior_damping
from shaver.repairing.damage import DAMPING
from shaver.repairing.factors import factor_blocks, fit_by_factors, tempered_curvature
from shaver.repairing.joint import check_passes, joint_fit
from shaver.repairing.moments import Moments, Statistics, sequential_moments
from shaver.repairing.norms import norm_buffers, set_statistics
from shaver.repairing.rectified import rectified_error, rectified_fit, rectified_variance
from shaver.repairing.sites import Site, find_sites, make_plan, norms_of, parameters_of


@dataclass(frozen=True)
class RepairedLayer:
    """One weight's row in the report.

    Attributes:
        name: The parameter's name.
        kept: The share of weights that is kept.
        before: Squared error of the layer's outputs against the dense network's before the repair, as a share of their
            variance. The layers before it are repaired already. Where a ReLU takes the outputs, both are those after
            it.
        after: The same after it.
    """

    name: str
    kept: float
    before: float
    after: float


@dataclass(frozen=True)
class Repaired:
    """What a repair did. ``print(repaired)`` shows a table.

    Attributes:
        layers: The weights that were fitted, in the order of the forward pass.
        norms: BatchNorm layers whose statistics were measured again.
        unrepaired: Why a pruned weight could not be repaired, by parameter name.
        joint: Squared error of the network's outputs as a share of their variance, before and after all layers were
            fitted together, on held-out batches; ``None`` without ``passes``.
    """

    layers: tuple[RepairedLayer, ...] = ()
    norms: tuple[str, ...] = ()
    unrepaired: Mapping[str, str] = field(default_factory=dict)
    joint: tuple[float, float] | None = None

    def __str__(self) -> str:
        width = max([9, *(len(layer.name) for layer in self.layers)])
        lines = [f"{'parameter':<{width}}  {'kept':>7}  {'error before':>12}  {'after':>7}"]
        for layer in self.layers:
            lines.append(f"{layer.name:<{width}}  {layer.kept:7.4f}  {layer.before:12.4f}  {layer.after:7.4f}")
        if self.norms:
            lines.append(f"{len(self.norms)} BatchNorm layers measured again")
        if self.joint is not None:
            lines.append(f"{'all layers together':<{width + 9}}  {self.joint[0]:12.4f}  {self.joint[1]:7.4f}")
        lines += [f"not repaired: {name} ({reason})" for name, reason in self.unrepaired.items()]
        return "\n".join(lines)


def repair(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    *,
    reference: nn.Module,
    masks: Mapping[str, Tensor] | None = None,
    posterior: PosteriorLike | None = None,
    damping: float | None = None,
    passes: int = 0,
    forward: Forward | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Repaired:
    """Adjust the remaining weights of a pruned network, so that they compensate for the removed ones.

    Each layer, in the order of the forward pass, gets the conditional mean of its posterior: the weights whose outputs,
    on the inputs that the repaired layers before it produce, are closest to the dense network's. Removed weights stay
    zero. Biases take part, and BatchNorm statistics are measured again. No labels are needed, and no gradients unless
    ``passes`` are given: then all layers are fitted together afterwards, to the dense network's outputs.

    Example:
        >>> import copy, torch.nn.utils.prune
        >>> dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> pruned = copy.deepcopy(dense)
        >>> nn.utils.prune.l1_unstructured(pruned[0], "weight", 0.5)           # or zeros from anywhere
        >>> print(repair(pruned, [torch.randn(256, 8)], reference=dense))

    Args:
        model: The pruned network; its weights are changed in place. After an error or an interruption it is as it was.
        batches: Calibration data: tensors, tuples ``(inputs, …)`` or dicts. 256 images are useful, 1,000 to 4,000
            better; they are kept in memory. Of a loader the first 4,096 samples (or 512 batches) are taken, so it
            should shuffle; a list is taken whole.
        reference: The network before pruning, with the same layers. It is not changed.
        masks: Which weights are kept, by parameter name; ``None`` takes what is not zero.
        posterior: Its δ is the damping, unless ``damping`` is given.
        damping: How strongly weights are held near the dense ones, as a share of the mean squared input. ``None`` is
            the posterior's δ, or 0.01 without a posterior.
        passes: Passes over the batches in which all layers are fitted together (:func:`shaver.repairing.joint_fit`).
            Each batch is one step of gradient descent. They help most at high sparsity; 10 to 40 are useful.
        forward: ``forward(model, batch)`` for batches of another layout.
        progress: ``progress(done, total)`` is called after each layer and each pass.

    Returns:
        The error of each layer before and after, and the names of what could not be repaired.

    Raises:
        ValueError: There are neither batches nor Kronecker factors, batches hold NaN, or model and reference do not fit
            together.
    """
    if damping is not None:
        check_number("damping, a share of the mean squared input,", damping, least=0, above=True)
    check_passes(passes, batches)
    check_functions(forward=forward, progress=progress)
    check_posterior(posterior)
    check_network(model, "repair")
    check_network(reference, "reference=")
    if reference is model:
        raise ValueError("the reference is the model itself; pass a copy from before pruning (copy.deepcopy).")
    data = [] if batches is None else calibration_list(batches)
    kept = _kept(model, reference, masks)
    removed = [name for name, mask in kept.items() if not bool(mask.all())]
    if not removed:
        return Repaired()
    weights = [name for name in removed if kept[name].ndim > 1]
    if batches is None:
        return _without_data(model, reference, kept, weights, posterior, damping)
    changing = [*model.parameters(), *norm_buffers(model)]
    with evaluating(model, reference), torch.random.fork_rng(devices=[]), restored(changing):
        plan = make_plan(reference, lambda: call(reference, data[0], forward), weights)
        prior = posterior if damping is None else None  # the user's damping comes first
        fitting = _Fitting(model, reference, kept, prior, DAMPING if damping is None else damping)
        total = len(set(plan.stops)) + passes
        norms: list[str] = []
        stops = sequential_moments(plan, model, reference, data, lambda network, batch: call(network, batch, forward))
        with closing(stops):
            for done, (stop, measured) in enumerate(stops, 1):
                if isinstance(stop, Site) and isinstance(measured, Moments):
                    fitting.fit(stop, measured)
                elif isinstance(stop, str) and isinstance(measured, Statistics) and fitting.is_changed:
                    set_statistics(stop, norms_of(model)[stop], measured.mean, measured.variance)
                    norms.append(stop)
                if progress is not None:
                    progress(done, total)
        joint = None
        if passes:

            def report(done: int, _: int) -> None:
                if progress is not None:
                    progress(total - passes + done, total)

            joint = joint_fit(
                model, data, reference=reference, passes=passes, masks=kept, forward=forward, progress=report
            )
    return Repaired(tuple(fitting.layers), tuple(norms), plan.unrepaired, joint)


def _without_data(
    model: nn.Module,
    reference: nn.Module,
    kept: Mapping[str, Tensor],
    removed: Iterable[str],
    posterior: PosteriorLike | None,
    damping: float | None,
) -> Repaired:
    """Repair from the Kronecker factors of a posterior, and name what has none."""
    if posterior is None or not factor_blocks(posterior):
        raise ValueError(
            'repair needs batches of inputs, or a posterior with Kronecker factors (structure="kron") in their place.'
        )
    with restored([*model.parameters(), *norm_buffers(model)]):
        errors = fit_by_factors(model, reference, kept, posterior, damping)
    layers = [RepairedLayer(name, float(kept[name].double().mean()), *pair) for name, pair in errors.items()]
    left = {name: "the posterior has no Kronecker factors of it" for name in removed if name not in errors}
    return Repaired(tuple(layers), (), left | dict.fromkeys(norms_of(model), "BatchNorm needs batches of inputs"))


class _Fitting:
    """Solves one site after the other and writes the result into the model."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        kept: Mapping[str, Tensor],
        posterior: PosteriorLike | None,
        damping: float,
    ) -> None:
        self.model, self.reference, self.kept = model, reference, kept
        self.damping = damping
        self.layers: list[RepairedLayer] = []
        self.is_changed = False
        self._delta = dict(posterior.delta()) if posterior is not None else {}
        self._curvature = tempered_curvature(posterior) if posterior is not None else {}

    def fit(self, site: Site, moments: Moments) -> None:
        """Give one site's weights their conditional mean. Layers before the first pruned layer stay as they are."""
        weight, dense = site.weight(self.model).double(), site.weight(self.reference).double()
        kept = site.matrix(self.model, self.kept[site.parameter]) if site.parameter in self.kept else None
        if kept is None:
            kept = torch.ones_like(weight, dtype=torch.bool)
        if not self.is_changed and bool(kept.all()):
            return
        self.is_changed = True
        bias, dense_bias = site.bias(self.model), site.bias(self.reference)
        has_constant = bias is not None or site.norm is not None
        groups, outputs, _ = weight.shape
        constant = torch.full_like(weight[..., :1], has_constant, dtype=torch.bool)
        bias_kept = site.bias_kept(self.kept)
        if bias is not None and bias_kept is not None:
            constant &= bias_kept.to(constant.device).reshape_as(constant)
        zeros = weight.new_zeros(groups, outputs, 1)
        mean = torch.cat([dense, zeros if dense_bias is None else dense_bias.double().reshape_as(zeros)], -1)
        before = torch.cat([weight * kept, zeros if bias is None else bias.double().reshape_as(zeros)], -1)
        solved = torch.empty_like(before)
        for group in range(groups):
            scale = moments.second[group].diagonal()[:-1].mean()
            ridge = self._ridge(site, group, moments.second[group]) + 1e-12 * scale + 1e-30
            damping = torch.cat([ridge, ridge.new_full((*ridge.shape[:-1], 1), float(scale * 1e-9 + 1e-30))], -1)
            second, free = moments.second[group], torch.cat([kept[group], constant[group]], -1)
            solved[group] = conditional_mean(second, moments.cross[group], free, mean[group], damping)
            if moments.pairs:
                pairs = moments.pairs_of(group)
                solved[group] = rectified_fit(pairs, second, solved[group], free, mean[group], damping)
        site.write(self.model, solved[..., :-1], solved[..., -1] if bias is not None else None)
        before_after = self._errors(moments, before, solved)
        self.layers.append(RepairedLayer(site.name, float(kept.double().mean()), *before_after))

    @staticmethod
    def _errors(moments: Moments, *weights: Tensor) -> tuple[float, ...]:
        """Squared errors as shares of the outputs' variance; both after the ReLU, where one takes the outputs."""
        if not moments.pairs:
            variance = float(moments.variance.sum()) or 1.0
            return tuple(float(moments.error(weight).sum()) / variance for weight in weights)
        variance, errors = 0.0, [0.0] * len(weights)
        for group in range(len(moments.second)):
            pairs = moments.pairs_of(group)
            variance += float(rectified_variance(pairs).sum())
            errors = [e + float(rectified_error(pairs, w[group]).sum()) for e, w in zip(errors, weights, strict=True)]
        return tuple(error / (variance or 1.0) for error in errors)

    def _ridge(self, site: Site, group: int, second: Tensor) -> Tensor:
        """Λ in the units of the moments: a share of their mean, or δ/G with the posterior's δ and curvature."""
        squares = second.diagonal()[:-1]
        name = site.parameter
        if name not in self._delta:
            return (self.damping * squares.mean()).expand(1, len(squares))
        curvature = self._curvature[name]
        delta = site.matrix(self.model, self._delta[name].expand_as(curvature))[group].double()
        h = site.matrix(self.model, curvature)[group].double()
        return prior_damping(delta, h, squares)


def _kept(model: nn.Module, reference: nn.Module, masks: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Masks by parameter name, checked against both networks."""
    own, dense = parameters_of(model), parameters_of(reference)
    for name, parameter in own.items():
        twin = dense.get(name)
        if twin is None or twin.shape != parameter.shape:
            shape = "no such parameter" if twin is None else f"shape {tuple(twin.shape)}"
            raise ValueError(
                f"the reference is another network: {name!r} has shape {tuple(parameter.shape)} in the model and "
                f"{shape} in the reference. Pass the network as it was before pruning."
            )
    if masks is not None:
        if not isinstance(masks, Mapping) or not all(isinstance(mask, Tensor) for mask in masks.values()):
            raise TypeError(f"masks are tensors by parameter name, not {shown(masks)}.")
        for name, mask in masks.items():
            if name not in own or own[name].shape != mask.shape:
                raise ValueError(
                    f"the masks name {name!r} of shape {tuple(mask.shape)}, which the model does not have."
                )
        return dict(masks)
    buffers = dict(model.named_buffers())
    kept = {}
    others = [name.removesuffix("_orig") for name in prunable(model)]
    for name in dict.fromkeys([*(site.parameter for site in find_sites(model)), *others]):
        values, held = own[name].detach(), buffers.get(f"{name}_mask")
        kept[name] = values != 0 if held is None else (values != 0) & (held != 0)
    return kept
