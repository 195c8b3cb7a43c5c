"""H from training's own passes: a moving average of the diagonal, with no pass over the data of its own.

Hooks on the model look at every k-th step. The empirical Fisher (EF) is read off the ordinary backward pass; the
Monte-Carlo Fisher (MC) adds one backward pass, without weight gradients, on those steps.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shaver.batches import outputs_in
from shaver.curvature.blocks import Curvature, DiagonalBlock, at_least_float32
from shaver.curvature.capture import Call, Functional, append, copier, functional_linears, undisturbed, watch
from shaver.curvature.engine import MEMORY_BUDGET
from shaver.curvature.generic import GenericRule
from shaver.curvature.passes import Look, Pass
from shaver.curvature.plan import Plan
from shaver.curvature.planning import make_plan
from shaver.curvature.sharded import check_same_unit, plan_by_copy
from shaver.likelihoods import Classification, Likelihood, get_likelihood
from shaver.naming import check_name
from shaver.ranks import ALONE, Ranks
from shaver.selection import Selection, take
from shaver.shards import is_sharded, joined, rows_of, scattered, zeros_for


class OnlineCurvature:
    """Watches a model in training and keeps a bias-corrected moving average of the diagonal of H.

    Example:
        >>> online = OnlineCurvature(model, data_size=len(train_set), every=4)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss = F.cross_entropy(model(x), y)
        ...     with online.watch():
        ...         loss.backward()
        ...     optimizer.step()
        >>> h = online.curvature().diagonal()

    Several forward and backward passes before one ``step`` (gradient accumulation) count as one larger batch. In
    training mode batch norm's statistics count as constants and dropout stays on, except for parameters left to the
    generic rule, which sees the network in evaluation mode. Gradients are those of an unwatched step.

    Args:
        model: The network, called as ``model(...)`` in the loop.
        data_size: N: H is scaled to the sum over the whole data set.
        source: ``"ef"`` or ``"mc"``.
        every: Look at every ``every``-th step.
        decay: Of the moving average, for each look.
        likelihood: What the outputs mean.
        loss: How the loss that is differentiated relates to the likelihood: ``"mean"`` or ``"sum"`` over the samples
            of a step of the negative log likelihood, or ``"auto"``: for classification the factor is read off the
            gradient at the outputs, whatever the reduction, accumulation or loss scale; otherwise ``"mean"``.
        seed: For the labels that MC draws.
        outputs: From what the model returns to the outputs that the likelihood is about, where that is neither a
            tensor nor something with ``.logits``: ``outputs=lambda result: result[1]``.
        ranks: The processes whose samples make up a batch, each watching its own; ``step`` is a collective then.

    Attributes:
        weight: What the last observed step's loss counts as, in units of the mean negative log likelihood: 1 for a
            mean, the batch size for a sum; a loss scale that :meth:`step` is told is taken out.
    """

    def __init__(
        self,
        model: nn.Module,
        data_size: int,
        *,
        source: str = "ef",
        every: int = 4,
        decay: float = 0.98,
        likelihood: str | Likelihood = "classification",
        loss: str = "auto",
        seed: int = 0,
        outputs: Callable[[Any], Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        check_name("online source", source, ("ef", "mc"))
        check_name("loss", loss, ("auto", "mean", "sum"))
        if data_size < 1 or every < 1 or not 0 <= decay < 1:
            raise ValueError(
                f"data_size and every are at least 1 and decay is in [0, 1), not data_size={data_size}, "
                f"every={every}, decay={decay}."
            )
        self.model, self.data_size, self.source = model, data_size, source
        self.outputs = outputs or outputs_in
        self.every, self.decay, self.likelihood, self.loss = every, decay, get_likelihood(likelihood), loss
        self.wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.wanted:
            raise ValueError("the model has no trainable parameter; set requires_grad on those that matter.")
        self.ranks, self.seed = ranks, seed
        self.generator = torch.Generator().manual_seed(seed)
        self.average: dict[str, Tensor] = {}
        self.average_nll = 0.0
        self.looks = self.steps = 0
        self.weight = 1.0
        self.rules: dict[str, str] = {}
        self.plan: Plan | None = None
        self._planned_for = 0  # samples
        self._reads = loss == "auto" and isinstance(self.likelihood, Classification)
        self._sums: dict[str, Tensor] = {}
        self._count = self._weighed = 0  # samples seen in this step, and those whose weight in the loss is known
        self._weight = self._nll = 0.0
        self._sharded = any(is_sharded(p) for p in self.wanted.values())
        self._look = Look(source, self.likelihood, self._reads, self.generator, self._add, self._sharded)
        self._passes: list[Pass] = []
        self._running: Pass | None = None
        self._busy = False

        # Plain functions, which copy.deepcopy(model) takes along as they are; a copy of the model is not watched.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._before(module, args, kwargs)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            self._after(result)

        def always(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            self._during.close()

        self._after_hook = after
        self._during = ExitStack()  # what holds while the model runs
        self._handles: list[RemovableHandle] = [
            # first of all, or, if sharded, once the hook that brings the weights together has run
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=not self._sharded),
            model.register_forward_hook(always, always_call=True),
            model.register_forward_hook(after, with_kwargs=True),
        ]
        self._layer_handles: list[RemovableHandle] = []

    # The user's side -------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the present step is looked at."""
        return self.steps % self.every == 0

    @contextmanager
    def watch(self, scale: float | None = None) -> Iterator[None]:
        """Around ``loss.backward()`` in a loop of one's own: ends the step, see :meth:`step`."""
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self.step(scale)

    def step(self, scale: float | None = None) -> bool:
        """End a step: take what its passes showed into the average. Returns whether there was anything.

        Args:
            scale: The loss scale of mixed precision, ``scaler.get_scale()``. A step with infinite gradients, which the
                scaler skips, is left out then instead of being an error.
        """
        looked = self.active
        self.steps += 1
        if not looked:
            return False
        try:
            for seen in self._passes:
                if self.plan is not None and seen.backward:
                    self._finish(seen)
            return bool(self._count or self.ranks) and self._merge(scale)
        finally:
            self.forget()

    def forget(self) -> None:
        """Drop the passes and sums of the step that is under way."""
        for seen in self._passes:
            seen.clear()
        self._passes, self._sums = [], {}
        self._count = self._weighed = 0
        self._weight = self._nll = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes of the model inside the block are not looked at."""
        busy, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = busy

    def note(self, nll: float) -> None:
        """Tell the negative log likelihood of the pass just made, where it cannot be read off the gradient."""
        if self._passes and self.active:
            self._passes[-1].nll = nll

    def rescale(self, factor: float, log_likelihood: float) -> None:
        """A regression's noise has changed: multiply H, and take the data's log likelihood under the new noise."""
        for average in self.average.values():
            average.mul_(factor)
        self.average_nll = -log_likelihood / self.data_size * (1 - self.decay**self.looks)

    def curvature(self) -> Curvature:
        """The average so far as a :class:`Curvature`; the log likelihood is an average too."""
        if not self.looks:
            raise RuntimeError(
                "no training step has been observed yet: the model must be called as model(x) in training mode with "
                "gradients on, and followed by backward() and, in place of optimizer.step(), spam.step(optimizer) "
                "(spam.attach(optimizer) makes it so for a trainer's own steps)."
            )
        correction = 1 / (1 - self.decay**self.looks)
        blocks = {name: DiagonalBlock(self.average[name] * correction) for name in self.wanted}
        log_likelihood = -self.average_nll * correction * self.data_size
        return Curvature(dict(blocks), log_likelihood, self.data_size, "diag", self.source, dict(self.rules))

    def select(self, kept: Selection) -> None:
        """The model's tensors have been sliced in place: slice the average too, and look at the layers anew.

        Args:
            kept: Parameter → dimension → the positions that stayed. Parameters that are new start at zero.
        """
        self.forget()
        for handle in self._layer_handles:
            handle.remove()
        self._layer_handles, self.plan, self._planned_for = [], None, 0
        self.wanted = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.average = {name: take(average, kept.get(name)) for name, average in self.average.items()}
        if self.average:
            for name, p in self.wanted.items():
                if name not in self.average:
                    self.average[name] = torch.zeros_like(at_least_float32(p.detach()))

    def close(self) -> None:
        """Remove every hook from the model."""
        for handle in [*self._handles, *self._layer_handles]:
            handle.remove()
        self._handles, self._layer_handles = [], []
        self.forget()

    def state_dict(self) -> dict[str, object]:
        """Tensors and numbers that a resumed run needs."""
        return {
            "average": {name: joined(value, self.wanted[name]) for name, value in self.average.items()},
            "average_nll": self.average_nll,
            "looks": self.looks,
            "steps": self.steps,
            "weight": self.weight,
            "rules": dict(self.rules),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take :meth:`state_dict` back."""
        rows = {name: rows_of(value, self.wanted[name]) for name, value in state["average"].items()}
        self.average = {name: value.to(self.wanted[name].device, copy=True) for name, value in rows.items()}
        self.average_nll, self.looks, self.steps = state["average_nll"], state["looks"], state["steps"]
        self.weight, self.rules = state["weight"], dict(state["rules"])
        self.generator.set_state(state["generator"])

    # The hooks -------------------------------------------------------------------------------------------------

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = None
        if (
            model is not self.model
            or self._busy
            or not self.active
            or not torch.is_grad_enabled()
            or not model.training
        ):
            return
        first = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.ndim), None)
        if first is None or not len(first):
            return
        planned = self.plan is not None and not self._planned_for == 1 < len(first)
        if not planned:  # or planned with one sample, which cannot tell where samples stand
            self._make_plan(args, kwargs)
            self._planned_for = len(first)
        if self.ranks.rank and not self._passes:  # labels of its own, the same again in a resumed run
            self.generator.manual_seed(_mixed(self.seed, self.steps, self.ranks.rank))
        self._running = Pass(args, kwargs, len(first), self._look)
        if not planned and self.plan is not None:
            for raw in self.plan.copies.values():
                if raw.module is model:  # its own hook came too late for the call that is just beginning
                    copier(raw, self._keep, self._samples)(model, args)
        if self.plan is not None:
            self._during.enter_context(functional_linears(self.plan.linears, self._keep))

    def _make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._busy = True
        try:
            if self._sharded:
                self.plan = plan_by_copy(self.model, self._call, (args, kwargs))
            else:
                with undisturbed(self.model):
                    self.plan = make_plan(self.model, self._call, (args, kwargs), self.wanted)
        finally:
            self._busy = False
        self.rules = self.plan.labels()
        for handle in self._layer_handles:
            handle.remove()
        copies = list(self.plan.copies.values())
        self._layer_handles = watch(self.plan.modules, copies, self._keep, self._samples, self.plan.spread)
        self._handles.pop().remove()  # the model may be a layer itself: what ends its pass comes last
        self._handles.append(self.model.register_forward_hook(self._after_hook, with_kwargs=True))

    def _samples(self) -> int:
        return self._running.count if self._running is not None else 0

    def _keep(self, call: Call, made_by: Node) -> None:
        if self._running is not None:
            append(self._running.calls, call, made_by)

    def _after(self, result: Any) -> None:
        seen, self._running = self._running, None
        if seen is None:
            return
        outputs = self.outputs(result)
        if not outputs.requires_grad:
            return
        assert self.plan is not None
        seen.attend(outputs, self.plan)
        self._passes.append(seen)

    # The sums --------------------------------------------------------------------------------------------------

    def _finish(self, seen: Pass) -> None:
        """What one pass still has to give: layers used several times, and the generic rule."""
        self._count += seen.count
        assert self.plan is not None
        if seen.factor or self._sharded:
            seen.finish()
        if not seen.factor:
            return
        rest = [*self.plan.generic, *(name for name in self.plan.idle if self.wanted[name].grad is not None)]
        rest += self.plan.doubted(seen.calls, seen.count)
        if rest:
            self._generic(rest, seen)
        self._weight += seen.factor * seen.count
        self._weighed += seen.count
        self._nll += seen.nll

    def _generic(self, names: list[str], seen: Pass) -> None:
        if self._sharded:
            raise NotImplementedError(
                f"the layer of {names[0]!r} was called with other rows than in the first step, which sharded "
                "parameters do not allow; train with DistributedDataParallel."
            )
        assert self.plan is not None
        assert seen.cotangent is not None
        rule = GenericRule(Functional(self.model, self._call), MEMORY_BUDGET, self.plan.vectorised)
        self._busy = True
        try:
            with undisturbed(self.model):
                weights = {name: self.wanted[name] for name in names}
                squares = rule.square_sum(weights, (seen.args, seen.kwargs), seen.cotangent.unsqueeze(0))
        finally:
            self._busy = False
        for name, value in squares.items():
            self._add(name, seen.scaled(value))

    def _add(self, name: str, squares: Tensor) -> None:
        squares = scattered(squares, self.wanted[name])
        if name in self._sums:
            self._sums[name] += squares
        else:
            self._sums[name] = squares

    def _merge(self, scale: float | None) -> bool:
        """Scale the step's sums to the data set and take them into the average; False where they overflowed."""
        factor = 1.0  # of the negative log likelihood in the loss, where it was not read off
        if not self._reads and self._count:
            factor = (scale or 1.0) / (1 if self.loss == "sum" else self._count)
            self._weight *= factor
        unit = factor**2 if self.source == "ef" else 1.0
        wrong = next((name for name, sums in self._sums.items() if not math.isfinite(sums.sum())), None)
        if wrong is None and math.isnan(self._weight):
            wrong = next(iter(self.wanted))
        weight = self._weight * self._count / self._weighed if self._weighed else 0.0
        # The loss of several ranks is the mean of theirs: those that have one count alike.
        count, weighed, weight, nll, bad = self.ranks.total(
            self._count, bool(self._weighed), weight, self._nll, wrong is not None
        )
        if bad:
            if scale is not None:
                return False
            raise FloatingPointError(
                f"the curvature of {wrong!r} is not finite at step {self.steps}: the batch, the weights or the "
                "loss hold NaN or infinity."
                if wrong is not None
                else f"the curvature of another rank's samples is not finite at step {self.steps}."
            )
        if not count:
            return False
        if count > self.data_size and not self.looks:
            warnings.warn(
                f"a step has {count:.0f} samples and data_size is {self.data_size}: it is the number of training "
                "samples, not of batches.",
                stacklevel=2,
            )
        if self.ranks:
            self._gather(unit)
            unit = 1.0
        share = (1 - self.decay) * self.data_size / count / unit
        for name in self.wanted:
            if name not in self.average:
                self.average[name] = zeros_for(self.wanted[name])
        seen = [name for name in self.wanted if name in self._sums]
        torch._foreach_mul_(list(self.average.values()), self.decay)
        if seen:
            torch._foreach_add_([self.average[n] for n in seen], [self._sums[n] for n in seen], alpha=share)
        self.average_nll = self.decay * self.average_nll + (1 - self.decay) * nll / count
        if weighed:
            self.weight = weight / weighed / (scale or 1.0)
        self.looks += 1
        return True

    def _gather(self, unit: float) -> None:
        """The sums of all ranks, in units of the negative log likelihood."""
        if self._sharded and unit != 1:
            check_same_unit(self.ranks, unit, self.loss, self._count)
        for name in self.wanted:
            like = zeros_for(self.wanted[name])
            self._sums[name] = self._sums[name].div_(unit).to(like.dtype) if name in self._sums else like
        if not self._sharded:
            self.ranks.sum_([self._sums[name] for name in self.wanted])

    def _call(self, model: nn.Module, batch: Any) -> Tensor:
        args, kwargs = batch
        return self.outputs(model(*args, **kwargs))


def _mixed(*key: int) -> int:
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state)
