"""``compact``: from a trained network to a smaller dense one in a single call."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.batches import Forward, check_values
from shaver.criteria import PosteriorLike
from shaver.curvature.capture import copied
from shaver.measure import Cost, cost
from shaver.measure.example import Example
from shaver.naming import check_flags, check_name
from shaver.pruning.ranking import check_sparsity
from shaver.repairing import Repaired, joint_fit, repair
from shaver.repairing.calibration import calibration_list
from shaver.repairing.joint import check_passes
from shaver.structure.choice import Choice, ChoiceOptions, Chooser
from shaver.structure.config_widths import Ties, evened, expressible
from shaver.structure.groups import Groups, check_groups, kept_units, mask_units
from shaver.structure.inputs import check_example
from shaver.structure.removal import Removal, remove_units
from shaver.structure.scores import DAMAGE, score_units
from shaver.structure.search import find_groups

if TYPE_CHECKING:
    from shaver.spam import SpaM


@dataclass(frozen=True)
class CompactReport:
    """A small network and what was removed. ``print(report)`` shows widths and cost before and after.

    Attributes:
        model: The small network.
        groups: The groups of the network as it was.
        choice: Which units stayed, the share requested and the share removed.
        before: Parameters, bytes and FLOPs of the network as it was.
        after: The same of the small one.
        repaired: What the repair did, with ``calibration``.
    """

    model: nn.Module
    groups: Groups
    choice: Choice
    before: Cost
    after: Cost
    repaired: Repaired | None = None

    def __str__(self) -> str:
        lines = [str(self.choice)]
        for title, key in (("parameters", "parameters"), ("bytes", "bytes_dense"), ("FLOPs per sample", "flops")):
            before, after = getattr(self.before, key), getattr(self.after, key)
            lines.append(f"{title:<16}{before:>14,} → {after:>14,}  ÷ {before / max(after, 1):.2f}")
        return "\n".join(lines)


_P = ParamSpec("_P")


def _network_alone(function: Callable[_P, CompactReport]) -> Callable[_P, nn.Module]:
    """The same function, with the same signature and documentation, that returns the small network only."""

    @wraps(function)
    def compact(*args: _P.args, **kwargs: _P.kwargs) -> nn.Module:
        return function(*args, **kwargs).model

    compact.__name__ = compact.__qualname__ = "compact"
    compact.__signature__ = signature(function).replace(return_annotation=nn.Module)  # type: ignore[attr-defined]
    return compact


def compact_with_report(
    model: nn.Module,
    example: Example,
    *,
    criterion: str | None = None,
    posterior: PosteriorLike | None = None,
    batches: Iterable[Any] | None = None,
    sparsity: float | None = None,
    target: str = "units",
    spread: str = "uniform",
    normalise: str | None = None,
    round_to: int = 1,
    min_units: int = 1,
    free_widths: bool = False,
    groups: Groups | None = None,
    masks: Mapping[str, Tensor] | None = None,
    calibration: Iterable[Any] | None = None,
    passes: int = 0,
    in_place: bool = False,
    optimizer: Optimizer | None = None,
    spam: "SpaM | None" = None,
    forward: Forward | None = None,
    progress: Callable[[int, int], None] | None = None,
    **scoring: Any,
) -> CompactReport:
    """Make a smaller dense network: remove the least important units, with the weights that compute or read them.

    ``compact`` returns the small network; ``compact_with_report`` returns a :class:`CompactReport` that contains it.

    Example:
        >>> small = shaver.compact(model, example=x, criterion="opd", posterior=spam.posterior, sparsity=0.8)
        >>> half = shaver.compact(model, example=x, criterion="magnitude", sparsity=0.5, target="flops")
        >>> small = shaver.compact(model, example=x, sparsity=0.5, calibration=loader)       # repaired
        >>> report = shaver.structure.compact_with_report(model, x, criterion="magnitude", sparsity=0.5)
        >>> print(report)                            # widths, parameters, bytes and FLOPs before and after
        >>> shaver.compact(model, example=x)         # removes dead units only

    For networks that are to be compacted, train SpaM with ``prior="unit"``: one precision per unit switches off whole
    units, where one per weight thins all of them.

    Args:
        model: The network. A copy is made smaller, unless ``in_place``.
        example: An input: to find coupled units, to check the result, and to count FLOPs. A tensor, a tuple of
            positional or a dict of keyword arguments.
        criterion: ``"opd"``, ``"magnitude"``, ``"snip"``, ``"grasp"``, ``"synflow"``, ``"random"`` or another, summed
            over everything that belongs to a unit; or ``"damage"``, what a removal costs after repair
            (:func:`shaver.structure.unit_damage`). ``None`` is ``"damage"`` with ``calibration`` and no posterior, else
            ``"opd"``.
        posterior: For OPD and OBD.
        batches: For the criteria that need data; ``"damage"`` takes ``calibration`` without them.
        sparsity: The share of the target to remove, in [0, 1). Without one, only dead units are removed: those with
            no weight that is not zero on the way in, or none on the way out.
        target: ``"units"``, ``"parameters"``, ``"flops"`` or ``"latency"``.
        spread: ``"uniform"`` removes the same share of each group, ``"global"`` lets each group have its own width.
        normalise: Under ``"global"``; see :class:`shaver.structure.ChoiceOptions`, except that ``None`` is ``"none"``
            for SynFlow, whose order of removal is global already.
        round_to: Widths become multiples of this.
        min_units: Each group keeps at least this many units.
        free_widths: For models of the transformers library. By default their small versions have widths that the
            configuration expresses, the same in every layer, so that ``small.save_pretrained(folder)`` writes a folder
            that ``from_pretrained`` opens without ``shaver``; units of other groups stay. True removes units of all
            groups, freely; then only :func:`shaver.save` stores the network.
        groups: What may be removed, from :func:`shaver.structure.find_groups`; found here if left out. Outputs are
            never removed, residual streams only if asked for there.
        masks: Remove exactly the units that these masks removed, such as ``history.masks`` after pruning during
            training; criterion, sparsity and the options of the choice are then ignored.
        calibration: Batches of unlabelled inputs (of a loader, the first 4,096 samples). Before the units are removed,
            the weights that remain are repaired (:func:`shaver.repair`), so that the small network's outputs are near
            those of the whole one.
        passes: Passes over the calibration data in which all layers of the small network are fitted together
            (:func:`shaver.repairing.joint_fit`). They help most at high sparsity; 10 to 40 are useful.
        in_place: Change the network itself.
        optimizer: Its state is sliced too, so that training goes on without a jump; needs ``in_place``.
        spam: Its prior and curvature are sliced too; needs ``in_place``.
        forward: ``forward(model, batch)`` for batches (and then an example) of another layout.
        progress: ``progress(done, total)`` is called after each layer of the repair, then after each pass.
        **scoring: Further arguments of :func:`shaver.score`, such as ``likelihood`` and ``seed``.

    Raises:
        ValueError: An option is out of range, or the target is out of reach; the network is as it was.
        CompactionError: The small network would not compute what the masked one does; the network is as it was.
    """
    check_passes(passes, calibration)
    if criterion is None:
        criterion = DAMAGE if calibration is not None and posterior is None else "opd"
    if calibration is not None:
        calibration = calibration_list(calibration)
        batches = calibration if criterion == DAMAGE and batches is None else batches
    if normalise is None and criterion == "synflow":
        normalise = "none"
    options = ChoiceOptions(target=target, spread=spread, normalise=normalise, round_to=round_to, min_units=min_units)
    check_values(model, "compact")
    example = copied(check_example(example, forward))
    groups = find_groups(model, example, forward=forward) if groups is None else check_groups(groups, model)
    ties: Ties = {}
    check_flags(free_widths=free_widths, in_place=in_place)
    if masks is None and not free_widths:
        groups, ties = expressible(model, groups)
    if masks is not None:
        choice = _masked(model, groups, masks)
    elif sparsity is None:
        choice = _without_dead_units(model, groups, ties)
    else:
        check_sparsity(sparsity)
        if criterion == "synflow":
            scoring = {"spread": spread} | ({"example": example} if batches is None else {}) | scoring
        if forward is not None:
            scoring = {"forward": forward} | scoring
        scores = score_units(model, groups, criterion, posterior=posterior, batches=batches, **scoring)
        choice = Chooser(model, groups, options, example, ties).choose(scores, sparsity)
    before = cost(model, example)
    remove = partial(
        remove_units,
        groups=groups,
        kept=choice.kept,
        example=example,
        forward=forward,
        mask=masks is None and sparsity is not None,
    )
    if calibration is None:
        small, report = remove(model, in_place=in_place, optimizer=optimizer, spam=spam).model, None
    else:
        whole = deepcopy(model)
        units = mask_units(whole, groups, choice.kept)
        units.apply_(whole)
        report = repair(whole, calibration, reference=model, masks=units, forward=forward, progress=progress)
        states: dict[str, Any] = {"optimizer": optimizer, "spam": spam}
        small = remove(whole, **({} if in_place else states)).model  # refuses the state of another network
        if passes:
            joint = joint_fit(small, calibration, reference=model, passes=passes, forward=forward, progress=progress)
            report = replace(report, joint=joint)
        if in_place:
            small = _put(model, whole, small, partial(remove, **states))
    return CompactReport(small, groups, choice, before, cost(small, example), report)


compact = _network_alone(compact_with_report)


def _put(model: nn.Module, whole: nn.Module, small: nn.Module, remove: Callable[..., Removal]) -> nn.Module:
    """Make the network itself the small one. After an error it is as it was."""
    before = deepcopy(model.state_dict())
    try:
        model.load_state_dict(whole.state_dict())
        remove(model, in_place=True)
    except BaseException:
        model.load_state_dict(before)
        raise
    model.load_state_dict(small.state_dict())
    return model


def _masked(model: nn.Module, groups: Groups, masks: Mapping[str, Tensor]) -> Choice:
    """The units of which the masks keep something."""
    if not isinstance(masks, Mapping):
        raise TypeError(f"masks are a dict of one mask per parameter, by name, not {masks!r}.")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, mask in masks.items():
        shape = parameters[check_name("parameter in masks", name, parameters)].shape
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
            given = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(f"the mask of {name!r} takes truth values of shape {tuple(shape)}, not {given}.")
    kept = kept_units(groups, masks)
    empty = [name for name, keep in kept.items() if not bool(keep.any())]
    if empty:
        raise ValueError(f"the masks remove every unit of {', '.join(empty)}: no network is left.")
    return Choice.of(kept)


def _without_dead_units(model: nn.Module, groups: Groups, ties: Ties) -> Choice:
    """Every unit that is not dead; a group whose units are all dead keeps its first."""
    kept = kept_units(groups, {name: parameter.detach() != 0 for name, parameter in model.named_parameters()})
    for keep in kept.values():
        keep[0] |= not bool(keep.any())
    return Choice.of(evened(kept, ties))
