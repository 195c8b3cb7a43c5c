"""One-shot pruning of a causal language model, block by block, without labels, gradients or training.

    report = prune_blocks(model, windows, OneShot(sparsity=0.5))

One block is processed at a time, in float32. The hidden states of all windows are kept between blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from shaver.criteria.order import best_of_each
from shaver.integrations.block_moments import (
    BlockStage,
    Call,
    StageMoments,
    find_stages,
    is_layer,
    matrix,
    stage_moments,
    weight_scores,
)
from shaver.integrations.block_units import BlockUnits, Widths, find_widths, shrink
from shaver.integrations.causal_blocks import BlockChain, find_blocks
from shaver.integrations.whole_layers import drop_layers, find_layers, layers_to_remove
from shaver.measure.evaluating import evaluating
from shaver.naming import check_name
from shaver.pruning.ranking import check_sparsity
from shaver.repairing.conditional import conjugate_gradients
from shaver.repairing.damage import DAMPING
from shaver.repairing.sweep import inverse_factor, sweep

Criterion = Literal["opd", "wanda", "magnitude"]
#: Windows that are passed through a block together.
BATCH = 4
#: Tokens that show which layers of a block read the same tensor.
FEW = 16
#: Steps of conjugate gradients after the masks are chosen. On four layers of SmolLM2-135M at 50 %, 8, 20 and 100 steps
#: left 78, 77 and 76 % of SparseGPT's squared error.
STEPS = 10


@dataclass(frozen=True, kw_only=True)
class OneShot:
    """What is removed from every weight matrix of every block, by which score, and whether the rest compensates for it.

    Attributes:
        sparsity: The share of weights to remove from each matrix, or of units, or of layers.
        pattern: Instead of a share: ``(2, 4)`` keeps two of every four neighbours in a row.
        criterion: ``"opd"``: the posterior damage, that is, the cost of a removal after the rest of the row has made up
            for it. ``"wanda"``: the size of a weight times the norm of its input, within each row. ``"magnitude"``.
        units: Remove whole units, so that the model becomes smaller and faster: hidden units of the feed-forward part,
            and key-value heads with their query heads where the configuration can express it. The share is rounded to
            whole units and is the same in every block.
        layers: Remove whole layers (blocks), so that the model becomes shallower: one after the other, each time the
            one without which the loss on the calibration text is lowest. Those after them are then fitted to the dense
            model's hidden states.
        repair: Move the remaining weights to their conditional mean.
        damping: How strongly weights are held near the dense ones, as a share of the mean squared input.
        dense_target: Fit the outputs of the dense model, instead of what the dense weights give on the pruned model's
            hidden states. It takes about twice the time.
    """

    sparsity: float | None = None
    pattern: tuple[int, int] | None = None
    criterion: Criterion = "opd"
    units: bool = False
    layers: bool = False
    repair: bool = True
    damping: float = DAMPING
    dense_target: bool = False

    def __post_init__(self) -> None:
        check_name("criterion", self.criterion, get_args(Criterion))
        if (self.sparsity is None) == (self.pattern is None):
            raise ValueError("say how much to remove: either sparsity=0.5 or pattern=(2, 4).")
        if self.sparsity is not None:
            check_sparsity(self.sparsity)
        if self.units and self.layers:
            raise ValueError("units and layers are removed by two calls, one after the other: give one of them.")
        if (self.units or self.layers) and self.sparsity is None:
            raise ValueError("whole units and layers have no pattern: say which share to remove, as sparsity=0.25.")
        if self.layers and self.criterion != "opd":
            raise ValueError(f"layers are ranked by the loss without them: leave out criterion={self.criterion!r}.")
        if self.pattern is not None and not 0 < self.pattern[0] <= self.pattern[1]:
            raise ValueError(f"pattern is (n, m) with 0 < n <= m, such as (2, 4), not {self.pattern!r}.")
        if not self.damping > 0:
            raise ValueError(f"damping is a share of the mean squared input, above 0, not {self.damping!r}.")


@dataclass(frozen=True)
class PrunedMatrix:
    """One weight matrix after pruning.

    Attributes:
        name: The parameter's name in the model as it was.
        weights: How many it has.
        kept: How many are not removed.
        error: Squared error of the outputs as a share of the target's square.
    """

    name: str
    weights: int
    kept: int
    error: float


Store = Callable[[int, nn.Module, list[PrunedMatrix]], None]
Restore = Callable[[int, nn.Module], list[PrunedMatrix] | None]


def prune_blocks(
    model: nn.Module,
    windows: Tensor,
    settings: OneShot,
    *,
    progress: Callable[[int, int], None] | None = None,
    store: Store | None = None,
    restore: Restore | None = None,
) -> list[PrunedMatrix]:
    """Prune the blocks of a causal model of the transformers library in their order; the model is changed in place.

    Each block reads what the pruned blocks before it give. Embeddings, norms, biases and the output layer stay. With
    ``units=True`` or ``layers=True`` the model and its configuration are smaller afterwards, as ``save_pretrained``
    writes them.

    Example:
        >>> from shaver.integrations.oneshot import OneShot, prune_blocks
        >>> windows = torch.tensor(tokenizer(text)["input_ids"])[: 64 * 512].reshape(64, 512)
        >>> prune_blocks(model, windows, OneShot(pattern=(2, 4)))
        >>> model.save_pretrained("sparse")

    Args:
        model: In float32, bfloat16 or float16; the work is done in float32.
        windows: Token ids, ``(windows, length)``. 64 windows of 512 tokens are useful.
        settings: What is removed, and how.
        progress: ``progress(done, total)`` is called after each block, and after each layer left out for trial.
        store: Called with number, block and its report after each block, to keep what is finished.
        restore: Called with number and block before each; loads a finished one and returns its report, else ``None``.

    Returns:
        One entry per weight matrix.

    Raises:
        ValueError: The windows do not fit the model, or it is of an unknown family. The message says what works.
    """
    check_windows(model, windows)
    with evaluating(model), torch.no_grad():
        chain = find_blocks(model)
        share = settings.sparsity or 0.0
        widths = find_widths(chain, share) if settings.units else None
        count = layers_to_remove(chain, share) if settings.layers else 0
        steps = len(chain) + sum(len(chain) - number for number in range(count))
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, steps)

        removed = find_layers(chain, windows, count, step)
        found: list[PrunedMatrix] = []
        for rows in _pruned(chain, windows, settings, widths, removed, store, restore):
            found += rows
            step()
        if widths is not None:
            shrink(chain, widths)
        if removed:
            drop_layers(chain, removed)
    return found


def check_windows(model: nn.Module, windows: Tensor) -> None:
    """Refuse windows that are empty, too long, of another shape or kind, or hold tokens that the model lacks."""
    if windows.ndim != 2 or not windows.numel() or windows.is_floating_point():
        raise ValueError(
            f"windows are token ids of shape (windows, length), not {windows.dtype} of shape {tuple(windows.shape)}."
        )
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    if not isinstance(table, nn.Embedding):
        raise ValueError(f"{type(model).__name__} has no token embedding: it is not a language model.")
    least, most = int(windows.min()), int(windows.max())
    if least < 0 or most >= table.num_embeddings:
        raise ValueError(
            f"the calibration tokens go from {least} to {most}, but the model's vocabulary has {table.num_embeddings} "
            "entries: they belong to another tokenizer."
        )
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and windows.shape[1] > longest:
        raise ValueError(f"windows of {windows.shape[1]} tokens are longer than the {longest} that the model can read.")


def _pruned(
    chain: BlockChain,
    windows: Tensor,
    settings: OneShot,
    widths: Widths | None,
    removed: tuple[int, ...],
    store: Store | None,
    restore: Restore | None,
) -> Iterator[list[PrunedMatrix]]:
    batches = [windows[start : start + BATCH] for start in range(0, len(windows), BATCH)]
    by_shape = {batch.shape: chain.calls(batch) for batch in {batch.shape: batch for batch in batches}.values()}
    hidden = [chain.entering(batch) for batch in batches]
    few = windows[:1, :FEW]
    short = chain.calls(few)
    is_dense = (settings.dense_target or settings.layers) and settings.repair
    dense = [state.clone() for state in hidden] if is_dense else None
    for number, block in enumerate(chain.blocks):
        calls = [by_shape[batch.shape][number] for batch in batches]
        before = deepcopy(block).float() if dense is not None else None
        is_first = bool(removed) and (dense is None or number < removed[0])  # nothing to compensate for
        if is_first or number in removed:
            if dense is not None and before is not None:
                _pass_through(before, calls, dense)
                hidden = list(dense) if is_first else hidden
            yield _whole(f"{chain.path}.{number}", block, number not in removed)
            continue
        rows = None if restore is None else restore(number, block)
        work = deepcopy(block).float()
        if rows is not None:
            _pass_through(work, calls, hidden)
            if dense is not None and before is not None:
                _pass_through(before, calls, dense)
        else:
            rows = []
            units = None if widths is None else BlockUnits(widths, settings.criterion, settings.repair)
            stages = find_stages(work, short[number], hidden[0][:1, :FEW])
            if not stages:
                raise ValueError(f"{chain.path}.{number} ({type(block).__name__}) has no linear layers to prune.")
            with closing(stage_moments(work, stages, calls, hidden, dense)) as stops:
                for stage, moments in stops:
                    rows += _prune_stage(work, block, stage, moments, settings, units)
            if units is not None:
                left = units.mask(block)
                rows = [replace(row, kept=left.get(row.name, row.kept)) for row in rows]
            rows = [replace(row, name=f"{chain.path}.{number}.{row.name}") for row in rows]
            if store is not None:
                store(number, block, rows)
        yield rows


def _pass_through(block: nn.Module, calls: Sequence[Call], states: list[Tensor]) -> None:
    """Replace what enters a block by what leaves it, for each batch."""
    for place, call in enumerate(calls):
        states[place] = call(block, states[place])


def _whole(place: str, block: nn.Module, is_kept: bool) -> list[PrunedMatrix]:
    """The report of a block that stays as it is, or is removed."""
    sizes = {path: matrix(module).numel() for path, module in block.named_modules() if is_layer(module)}
    return [
        PrunedMatrix(f"{place}.{path}.weight", size, size * is_kept, float(not is_kept)) for path, size in sizes.items()
    ]


def _prune_stage(
    work: nn.Module,
    block: nn.Module,
    stage: BlockStage,
    moments: StageMoments,
    settings: OneShot,
    units: BlockUnits | None,
) -> list[PrunedMatrix]:
    rows = []
    second = (moments.second / moments.rows).float()
    cross = second if moments.cross is moments.second else (moments.cross / moments.rows).float()
    ridge = settings.damping * (float(second.diagonal().mean()) or 1.0)
    for path in stage.paths:
        own = block.get_submodule(path)
        weight = matrix(work.get_submodule(path))
        mean, target = weight, weight @ cross + ridge * weight
        if cross is not second:
            if path in moments.drift:
                target = target + (moments.drift[path] / moments.rows).float()
            upper = inverse_factor(second, torch.full_like(second[0], ridge))
            mean = target @ upper.t() @ upper
        solved, kept = mean, torch.ones_like(mean, dtype=torch.bool)
        if units is not None:
            solved = units.reduced(work, path, mean, second, ridge)
        elif not settings.layers:
            solved, kept = _solved(mean, target, second, ridge, settings)
        final = (solved * kept).to(matrix(own).dtype)
        off = final.float() - mean
        error = float(((off @ second) * off).sum() / ((mean @ second) * mean).sum().clamp_min(1e-30))
        weight.copy_(final)
        matrix(own).copy_(final)
        rows.append(PrunedMatrix(f"{path}.weight", kept.numel(), int(kept.sum()), error))
    return rows


def _solved(mean: Tensor, target: Tensor, second: Tensor, ridge: float, settings: OneShot) -> tuple[Tensor, Tensor]:
    """The weights of one matrix after the removal, and which are kept; ``mean`` solves for ``target`` before it."""
    damping = torch.full_like(second[0], ridge)
    if settings.repair and settings.criterion == "opd":
        start, kept = sweep(mean, second, sparsity=settings.sparsity, pattern=settings.pattern, damping=damping)
    else:
        kept = choose(weight_scores(mean, second, ridge, settings.criterion), settings)
        start = mean
    if not settings.repair:
        return mean, kept
    return conjugate_gradients(second, target, kept, start, damping, steps=STEPS), kept


def choose(ranked: Tensor, settings: OneShot) -> Tensor:
    """What is kept: N of every M in a row, or the best of the matrix (magnitude) or of each row."""
    if settings.pattern is not None:
        return best_of_each(ranked, *settings.pattern)
    assert settings.sparsity is not None
    rows = ranked.reshape(1, -1) if settings.criterion == "magnitude" else ranked
    count = round(settings.sparsity * rows.shape[1])
    removed = rows.argsort(dim=1, stable=True)[:, :count]
    return torch.ones_like(rows, dtype=torch.bool).scatter_(1, removed, False).reshape(ranked.shape)
