"""H from training steps: a moving average of the diagonal, without a separate pass over the data.

Every k-th step is measured. The empirical Fisher (EF) uses the ordinary backward pass; the Monte Carlo Fisher (MC)
adds one backward pass without weight gradients.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shaver.batches import outputs_in
from shaver.curvature.blocks import Curvature, DiagonalBlock
from shaver.curvature.capture import Functional, copied, trainable_parameters, uncompiled, undisturbed
from shaver.curvature.estimation import MEMORY_BUDGET
from shaver.curvature.generic import GenericRule
from shaver.curvature.measurement import Measurement, Request
from shaver.curvature.plan import Plan
from shaver.curvature.rule_choice import check_generic, plan_for
from shaver.likelihoods import Classification, Likelihood, get_likelihood
from shaver.naming import check_count, check_functions, check_name, check_number
from shaver.ranks import ALONE, Ranks, held_parameters
from shaver.selection import Selection, take
from shaver.settings import Settings
from shaver.shards import local

#: Message if no step has been measured.
UNMEASURED = (
    "no training step has been measured yet: call model(x) in training mode with gradients on, then backward(), then "
    "spam.step(optimizer) instead of optimizer.step() (for a trainer that steps itself: spam.attach(optimizer)). A "
    "network that was compiled and run before ignores new hooks: create SpaM first, or call torch._dynamo.reset()."
)

#: Parameters with more weights than this keep the sums of a step in 16 bits.
LARGE = 2**18


class OnlineCurvature:
    """Measures the curvature of a model in training and keeps a bias-corrected moving average of the diagonal of H.

    Example:
        >>> online = OnlineCurvature(model, data_size=len(train_set))
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     loss = F.cross_entropy(model(x), y)
        ...     with online.measure():
        ...         loss.backward()
        ...     optimizer.step()
        >>> h = online.curvature().diagonal()

    Several forward and backward passes before one ``step`` (gradient accumulation) count as one larger batch. The
    statistics of batch norm count as constants, and dropout stays on; but the generic rule runs the network in
    evaluation mode. A measurement does not change the gradients of the step. A compiled network runs uncompiled in
    measured steps.

    Args:
        model: The network, called as ``model(...)`` in the loop.
        data_size: N, the number of training samples. H is scaled to the sum over all of them.
        source: ``"mc"`` or ``"ef"``. The defaults of ``source``, ``every`` and ``decay`` are SpaM's.
        every: Steps between curvature measurements.
        decay: Decay of the moving average, per measurement.
        likelihood: ``"classification"``, ``"regression"`` or your own.
        loss: Reduction of the loss: ``"mean"`` or ``"sum"`` of the negative log likelihood over the samples of a step.
            ``"auto"`` reads the factor of a classification loss from the gradient at the outputs, for any reduction,
            accumulation or loss scale; for other likelihoods it means ``"mean"``.
        seed: Seed of the labels that MC samples.
        outputs: A function from what the model returns to its outputs, such as ``lambda result: result[1]``. Needed if
            the model returns neither a tensor nor an object with ``.logits``.
        ranks: The processes whose samples make up a batch; each measures its own. ``step`` is then a collective.

    Attributes:
        measurements: Number of measured steps.
        passes: Number of recorded forward passes, including those without a backward pass.
        weight: The factor of the mean negative log likelihood in the loss of the last measured step: 1 for a mean, the
            batch size for a sum. A loss scale passed to :meth:`step` is divided out.
    """

    def __init__(
        self,
        model: nn.Module,
        data_size: int,
        *,
        source: str = Settings.source,
        every: int = 15,
        decay: float = Settings.decay,
        likelihood: str | Likelihood = "classification",
        loss: str = "auto",
        seed: int = 0,
        outputs: Callable[[Any], Tensor] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        check_name("online source", source, ("ef", "mc"))
        check_name("loss", loss, ("auto", "mean", "sum"))
        check_functions(outputs=outputs)
        self.model, self.source, self.loss = model, source, loss
        self.data_size, self.every = check_count("data_size", data_size), check_count("every", every)
        if check_number("decay", decay, least=0, most=1) == 1:
            raise ValueError(f"decay must be below 1, not {decay!r}: the average would never change.")
        self.decay, self.outputs, self.likelihood = decay, outputs or outputs_in, get_likelihood(likelihood)
        self.wanted = trainable_parameters(model)
        self.ranks, self.seed = ranks, check_count("seed", seed, 0)
        self.generator = torch.Generator().manual_seed(seed)
        self.average: dict[str, Tensor] = {}
        self.average_nll = self.newest_nll = 0.0
        self.measurements = self.passes = self.steps = 0
        self.weight = 1.0
        self.rules: dict[str, str] = {}
        self.plan: Plan | None = None
        self._planned_for = 0  # samples
        self._held = held_parameters(self.wanted, ranks)
        reads_scale = loss == "auto" and isinstance(self.likelihood, Classification)
        self._request = Request(source, self.likelihood, reads_scale, self.generator, self._add, self._held.is_sharded)
        self._sums: dict[str, Tensor] = {}
        self._passes: list[Measurement] = []
        self._busy = False
        self._during = ExitStack()  # contexts that are open while the model runs

        # A plain function, which copy.deepcopy(model) does not copy; a copy of the model is not measured.
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._before(module, args, kwargs)

        before = torch.compiler.disable(before)  # type: ignore[no-untyped-call]
        # before all other hooks; if sharded, after the hook that gathers the weights
        prepend = not self._held.is_sharded
        self._handle = model.register_forward_pre_hook(before, with_kwargs=True, prepend=prepend)

    # For users -------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the current step is measured."""
        return self.steps % self.every == 0

    @contextmanager
    def measure(self, scale: float | None = None) -> Iterator[None]:
        """A context around ``loss.backward()`` in your own loop; it calls :meth:`step` at its end."""
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self.step(scale)

    def step(self, scale: float | None = None) -> bool:
        """End a step: add its measurement to the average. Returns whether there was one.

        Args:
            scale: The loss scale of mixed precision, ``scaler.get_scale()``. With it, a step with infinite gradients,
                which the scaler skips, is left out and is not an error.
        """
        measured = self.active
        self.steps += 1
        if not measured:
            return False
        try:
            passes = [seen for seen in self._passes if seen.backward]
            for seen in passes:
                self._finish(seen)
            return bool(passes or self.ranks) and self._merge(passes, scale)
        finally:
            self.forget()

    def forget(self) -> None:
        """Discard the passes and sums of the current step."""
        for seen in self._passes:
            seen.clear()
        self._passes, self._sums = [], {}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes of the model inside the block are not measured."""
        busy, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = busy

    def note(self, nll: float) -> None:
        """Set the negative log likelihood of the last pass, if it cannot be read from the gradient."""
        if self._passes and self.active:
            self._passes[-1].nll = nll

    def rescale(self, factor: float, log_likelihood: float) -> None:
        """After the noise of a regression has changed: multiply H, and replace the log likelihood of the data."""
        for average in self.average.values():
            average.mul_(factor)
        self.average_nll = -log_likelihood / self.data_size

    def curvature(self, *, copied: bool = True) -> Curvature:
        """The average so far as a :class:`Curvature`; the log likelihood is an average too.

        Args:
            copied: If not, its tensors are those of the average, which the next measurement changes.

        Raises:
            RuntimeError: Nothing has been measured yet.
        """
        if not self.measurements:
            raise RuntimeError(UNMEASURED)
        averages = {name: self.average[name] for name in self.wanted}
        blocks = {name: DiagonalBlock(h.clone() if copied else h) for name, h in averages.items()}
        log_likelihood = -self.average_nll * self.data_size
        return Curvature(dict(blocks), log_likelihood, self.data_size, "diag", self.source, dict(self.rules))

    def select(self, kept: Selection) -> None:
        """After the model's tensors were sliced in place: slice the average too, and choose the rules again.

        New parameters start at zero.
        """
        self.forget()
        self.plan, self._planned_for = None, 0
        self.wanted = trainable_parameters(self.model)
        self._held = held_parameters(self.wanted, self.ranks)
        self.average = {name: take(average, kept.get(name)) for name, average in self.average.items()}
        if self.average:
            self._add_zeros()

    def close(self) -> None:
        """Remove the hook from the model."""
        self._during.close()
        self._handle.remove()
        self.forget()

    def state_dict(self) -> dict[str, object]:
        """Tensors and numbers needed to resume."""
        return {
            "average": self._held.saved(self.average),
            "average_nll": self.average_nll,
            "measurements": self.measurements,
            "steps": self.steps,
            "weight": self.weight,
            "rules": dict(self.rules),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.average = self._held.loaded(state["average"])
        self.average_nll, self.measurements, self.steps = state["average_nll"], state["measurements"], state["steps"]
        self.passes = self.measurements
        self.weight, self.rules = state["weight"], dict(state["rules"])
        self.generator.set_state(state["generator"])

    # One measured pass -----------------------------------------------------------------------------------------

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At the start of a forward pass: if it is to be measured, record it until it ends."""
        self._during.close()  # a pass that was interrupted
        is_ours = model is self.model and not self._busy and self.active
        if not (is_ours and torch.is_grad_enabled() and model.training):
            return
        first = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.ndim), None)
        if first is None or not len(first):
            return
        # one sample does not show which dimension is the batch
        if self.plan is None or self._planned_for == 1 < len(first):
            with self.paused(), uncompiled():
                self.plan = plan_for(self._held, model, self._call, (args, kwargs))
            self.rules, self._planned_for = self.plan.labels(), len(first)
        if self.ranks.rank and not self._passes:  # own labels per rank, the same again in a resumed run
            self.generator.manual_seed(_mixed(self.seed, self.steps, self.ranks.rank))
        inputs = copied((args, kwargs)) if self.plan.alters_inputs else (args, kwargs)
        seen = Measurement(inputs, len(first), self._request, self.plan)

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            self._during.close()
            if result is not None:  # None: the forward pass failed
                outputs = self.outputs(result)
                if outputs.requires_grad:
                    seen.forward_done(outputs)
                    self._passes.append(seen)
                    self.passes += 1

        self._during.enter_context(uncompiled())
        seen.calls = self._during.enter_context(self.plan.recording.of(seen.count, running=model))
        # after the hooks of the recording, because the model may itself be a layer
        after = torch.compiler.disable(after)  # type: ignore[no-untyped-call]
        handle = model.register_forward_hook(after, with_kwargs=True, always_call=True)
        self._during.callback(handle.remove)

    def _finish(self, seen: Measurement) -> None:
        """Add the rest of a pass: layers that are used several times, and the generic rule."""
        if seen.factor or self._held.is_sharded:
            seen.finish()
        if not seen.factor:
            return
        unseen = [name for name in seen.plan.unseen(seen.calls) if self.wanted[name].grad is not None]
        rest = list(dict.fromkeys([*seen.left, *unseen]))
        if rest and math.isfinite(seen.factor):
            check_generic(self._held, rest)
            assert seen.cotangent is not None
            function = Functional(self.model, self._call)
            function.copies_inputs = seen.plan.alters_inputs
            rule = GenericRule(function, MEMORY_BUDGET, seen.plan)
            with self.paused(), undisturbed(self.model), uncompiled():
                weights = {name: self.wanted[name] for name in rest}
                squares = rule.square_sum(weights, seen.inputs, seen.cotangent.unsqueeze(0))
            for name, value in squares.items():
                self._add(name, seen.scaled(value))

    # The average -----------------------------------------------------------------------------------------------

    def _add(self, name: str, squares: Tensor) -> None:
        """Add to the sums of the step. A large sum that may be the only one of its step waits in 16 bits.

        The gradients of the loss are computed meanwhile, when a training takes the most memory. The 16 bits round by at
        most 0.4 %, and one measurement differs from the next by far more.
        """
        squares = self._held.own(name, squares)
        if name in self._sums:
            squares.add_(self._sums[name])
        elif not self.ranks and squares.dtype == torch.float32 and squares.numel() > LARGE:
            squares = squares.bfloat16()
        self._sums[name] = squares

    def _add_zeros(self) -> None:
        """Start the average of new parameters."""
        self.average |= {name: self._held.zeros(name) for name in self.wanted if name not in self.average}

    def _merge(self, passes: list[Measurement], scale: float | None) -> bool:
        """Scale the step's sums to the data set and add them to the average; False if they overflowed."""
        own, counted = sum(seen.count for seen in passes), [seen for seen in passes if seen.factor]
        weighed = sum(seen.count for seen in counted)  # samples whose weight in the loss is known
        factor = 1.0  # of the negative log likelihood in the loss, if it was not read from the gradient
        if not self._request.reads_scale and own:
            factor = (scale or 1.0) / (1 if self.loss == "sum" else own)
        unit = factor**2 if self.source == "ef" else 1.0
        weight = factor * sum(seen.factor * seen.count for seen in counted) * own / weighed if weighed else 0.0
        wrong = next((name for name, sums in self._sums.items() if not math.isfinite(sums.sum())), None)
        if wrong is None and math.isnan(weight):
            wrong = next(iter(self.wanted))
        if wrong is not None:  # rather the weights that hold NaN themselves
            wrong = next((name for name, w in self.wanted.items() if not bool(local(w).isfinite().all())), wrong)
        # The loss of several ranks is the mean of their losses; ranks with a loss have equal weight.
        nll = sum(seen.nll for seen in counted)
        count, known, weight, nll, bad = self.ranks.total(own, bool(weighed), weight, nll, wrong is not None)
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
        if count > self.data_size and not self.measurements:
            warnings.warn(
                f"a step has {count:.0f} samples, but data_size is {self.data_size}: data_size is the number of "
                "training samples, not of batches.",
                stacklevel=2,
            )
        if self.ranks:
            self._held.gather(self._sums, unit, self.loss, own)
            unit = 1.0
        self._add_zeros()
        seen_names = [name for name in self.wanted if name in self._sums]
        newest = (1 - self.decay) / (1 - self.decay ** (self.measurements + 1))  # corrects the bias of the first ones
        torch._foreach_mul_(list(self.average.values()), 1 - newest)
        if seen_names:
            share = newest * self.data_size / count / unit
            averages = [self.average[name] for name in seen_names]
            torch._foreach_add_(averages, [self._sums[name] for name in seen_names], alpha=share)
        self.newest_nll = nll / count
        self.average_nll += newest * (self.newest_nll - self.average_nll)
        if known:
            self.weight = weight / known / (scale or 1.0)
        self.measurements += 1
        return True

    def _call(self, model: nn.Module, batch: Any) -> Tensor:
        args, kwargs = batch
        return self.outputs(model(*args, **kwargs))


def _mixed(*key: int) -> int:
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state)
