"""SpaM: an object for the user's own training loop that learns the prior while the weights are trained.

The weights minimise Σ_n −log p(y_n|θ)/T + ½ θᵀδθ. δ maximises the evidence at the current weights and curvature.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shaver.closures import Attachment, Objective, inner_optimizer, scale_of
from shaver.curvature.blocks import Curvature
from shaver.curvature.capture import trainable_parameters
from shaver.curvature.estimation import STRUCTURES, estimate
from shaver.curvature.online import UNMEASURED, OnlineCurvature
from shaver.evidence import Posterior, improve
from shaver.evidence.noise import NoiseLearner
from shaver.invariance import ScaleFree, kept_norms
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import check_count, check_name
from shaver.priors import Grouping, make_prior
from shaver.ranks import Ranks, held_parameters, unwrapped
from shaver.selection import Selection
from shaver.settings import Settings, settings_for
from shaver.shards import check_settings, joined, rows_of
from shaver.stepping import (
    Factors,
    add_prior_gradient,
    apply_prior,
    check_optimizers,
    clear_vanished,
    embeddings_of,
    shrink,
    take_step,
    unscale,
)
from shaver.timetable import Timetable
from shaver.watch import Watch


class SpaM:
    """Sparsifiability via the marginal likelihood (SpaM), for any training loop.

    Example:
        >>> spam = SpaM(model, data_size=len(train_set), total_steps=30 * len(loader))
        >>> for epoch in range(30):
        ...     for x, y in loader:
        ...         loss = F.cross_entropy(model(x), y)
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         spam.step(optimizer)
        >>> spam.posterior.precision()        # for OPD
        >>> spam.close()                      # removes the hooks from the model

    Args:
        model: The network; its trainable parameters get a prior.
        data_size: N, the number of training samples.
        prior: ``"parameter"``, ``"unit"``, ``"layer"``, ``"scalar"`` or a grouping function.
        structure: ``"diag"``, or ``"kron"``, for which δ is learned by epochs.
        likelihood: ``"classification"``, ``"regression"`` or your own. For a regression, call ``backward`` on
            ``spam.loss(outputs, targets)``, so that the noise is learned too.
        total_steps: Number of steps of the whole training. If None, learning δ begins once the loss has settled and
            ends when you call :meth:`freeze`.
        seed: Seed of the labels that MC samples.
        outputs: A function that extracts the outputs from what the model returns. Needed if the model returns neither
            a tensor nor an object with ``.logits``.
        group: The process group whose ranks each hold part of a batch. Not needed for ``DistributedDataParallel``.
        settings: All other settings. Single ones can be passed by name: ``SpaM(model, n, shrink=0.5)``.

    Attributes:
        prior: The prior; ``prior.delta()`` gives the precisions.
        temperature: T: the likelihood counts 1/T times.
        updates: Number of updates of δ so far.
        scale_free: Weights whose scale has no effect, such as filters before a BatchNorm; see
            :class:`shaver.invariance.ScaleFree`.
        timetable: When curvature is measured and δ is updated; see :class:`shaver.timetable.Timetable`.
        watch: Whether learning δ does harm; see :class:`shaver.watch.Watch`.
    """

    def __init__(
        self,
        model: nn.Module,
        data_size: int,
        *,
        prior: str | Grouping = "parameter",
        structure: str = "diag",
        likelihood: str | Likelihood = "classification",
        total_steps: int | None = None,
        seed: int = 0,
        outputs: Callable[[Any], Tensor] | None = None,
        settings: Settings | None = None,
        group: Any = None,
        **options: Any,
    ) -> None:
        check_name("structure", structure, STRUCTURES)
        settings = settings_for(structure, settings, options)
        self.data_size = check_count("data_size, the number of training samples,", data_size)
        self.seed = check_count("seed", seed, 0)
        total_steps = None if total_steps is None else check_count("total_steps", total_steps)
        model, self.ranks = unwrapped(model)
        if group is not None:
            self.ranks = Ranks(group)
        self.model, self.structure = model, structure
        self.likelihood = get_likelihood(likelihood)
        self.noise = NoiseLearner(self.likelihood)
        self.theta = trainable_parameters(model)
        self.settings = settings = settings.completed(
            has_own=prior == "parameter" and not self.noise.is_learned,
            weights=self._weights(),
            data_size=self.data_size,
            total_steps=total_steps,
        )
        self.temperature = settings.temperature or 1.0
        self.scale_free, self.watch = ScaleFree(self.theta), Watch(self.data_size)
        self.timetable = Timetable(settings, total_steps, self.watch, per_weight=prior == "parameter")
        self._held = held_parameters(self.theta, self.ranks)
        if self._held.is_sharded:
            check_settings(prior, settings)
        for_rows = prior == "parameter"  # as large as the network, so each rank makes only its own rows
        weights = self._held.rows() if for_rows else self.theta
        made = make_prior(prior, weights, init=settings.initial_precision, bounds=settings.bounds)
        self.prior = self._held.prior_of(made, for_rows)
        self.updates = 0
        self._attached: dict[int, Attachment] = {}
        self._checked: set[tuple[int, ...]] = set()
        self._made_of: list[Tensor] = []
        self._delta: dict[Tensor, Tensor] = {}
        self._factors = Factors()
        self._has_warned = self._is_debiased = False
        self._curvature: Curvature | None = None
        self.online: OnlineCurvature | None = None
        if settings.online:
            self.online = OnlineCurvature(
                model,
                data_size,
                source=settings.source,
                every=self.timetable.spacing,
                decay=settings.decay,
                likelihood=self.likelihood,
                loss=settings.loss,
                seed=seed,
                outputs=outputs,
                ranks=self.ranks,
            )

    def _weights(self) -> int:
        return sum(p.numel() for p in self.theta.values())

    def __repr__(self) -> str:
        """The model, the prior, the progress and the current statistics."""
        weights, total = self._weights(), self.timetable.total_steps
        steps = f"{self.steps:,}" + (f" of {total:,}" if total is not None else "")
        measured = "by epochs" if self.online is None else f"{self.online.measurements:,} curvature measurements"
        state = "frozen" if self.timetable.is_frozen else f"{self.updates:,} updates of δ"
        lines = [
            f"SpaM of {type(self.model).__name__} with {weights:,} weights, {self.data_size:,} samples",
            f"  prior {self.prior.kind!r}, structure {self.structure!r}, source {self.settings.source!r}, "
            f"temperature {self.temperature:.3g}",
            f"  step {steps}, {measured}, {state}",
        ]
        if not self._held.is_sharded:  # the statistics of sharded parameters need all ranks
            lines += [f"  {name} {value:.4g}" for name, value in self.statistics().items()]
        return "\n".join(lines)

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.timetable.steps

    # In the loop -----------------------------------------------------------------------------------------------

    def step(self, *optimizers: Optimizer, scaler: Any = None, closure: Callable[[], Any] | None = None) -> Any:
        """Take ``optimizer.step()`` with the prior; update δ when it is due.

        Args:
            optimizers: The optimizer, or several optimizers that each hold part of the model's parameters.
            scaler: A ``torch.amp.GradScaler``: then ``scaler.step(optimizer)`` is called. Call ``scaler.update()``
                afterwards as usual.
            closure: For one optimizer that evaluates the loss itself, such as L-BFGS. Calls
                ``optimizer.step(closure)`` and returns its result. L-BFGS minimises the loss including the prior.
        """
        if not optimizers:
            raise TypeError("spam.step(optimizer) needs the optimizer whose step it takes.")
        if any(id(optimizer) in self._attached for optimizer in optimizers):
            raise RuntimeError("spam is attached to this optimizer: call optimizer.step() itself, not spam.step.")
        self._check(optimizers)
        if closure is not None:
            if len(optimizers) > 1 or scaler is not None:
                raise TypeError(
                    f"closure= works with one optimizer and no scaler, not with {len(optimizers)} optimizers"
                    f"{' and a scaler' if scaler is not None else ''}."
                )
            objective = Objective(self, optimizers[0], closure)
            result = optimizers[0].step(objective)
            objective.finish()
            return result
        if needs := [type(o).__name__ for o in optimizers if isinstance(o, LBFGS)]:
            raise TypeError(f"{needs[0]} evaluates the loss itself: call spam.step(optimizer, closure=closure).")
        scaled = scaler is not None and scaler.is_enabled()
        strength = self.observe(float(scaler.get_scale()) if scaled else None)
        for optimizer in optimizers:
            if scaled and not self.settings.proximal:
                unscale(optimizer, scaler)
            self.before_step(optimizer, strength)
            if take_step(optimizer, scaler):
                self.after_step(optimizer, strength)
        self.advance(*optimizers)
        return None

    def attach(self, *optimizers: Any, scale: Callable[[], float | None] | None = None) -> None:
        """Make every ``optimizer.step()`` act as ``spam.step(optimizer)``, until :meth:`close`.

        For trainers that call ``optimizer.step()`` themselves, with or without a closure.

        Args:
            optimizers: Torch optimizers, or accelerate's wrappers of them. Each optimizer's step counts as one step.
            scale: A function that returns the loss scale of mixed precision, or None; called at every step. Not
                needed for accelerate.
        """
        inner = [inner_optimizer(given) for given in optimizers]
        self._check(inner)
        for given, optimizer in zip(optimizers, inner, strict=True):
            if id(optimizer) not in self._attached:
                self._attached[id(optimizer)] = Attachment(self, optimizer, scale or scale_of(given))

    def observe(self, scale: float | None = None) -> float:
        """Record the curvature from the current gradients. Returns the factor of the prior in the loss."""
        weight = 1.0
        self.scale_free.observe()
        if self.online is not None:
            if self.online.step(scale):
                self.watch.record(self.online.newest_nll)
            weight = self.online.weight
        return weight * self.temperature / self.data_size

    def in_objective(self, optimizer: Optimizer) -> bool:
        """Whether the prior is part of the loss that the optimizer minimises. If not, it is a proximal step afterwards.

        L-BFGS compares losses and gradients at several points. It would mistake a proximal step for a property of the
        loss. It also bounds its own step, so no δ is too large for it.
        """
        return not self.settings.proximal or isinstance(optimizer, LBFGS)

    def before_step(self, optimizer: Optimizer, strength: float) -> None:
        """Add the prior's gradient, if the prior is part of the objective. ``strength`` is its factor in the loss."""
        if self.in_objective(optimizer):
            add_prior_gradient(optimizer, *self._terms(strength))

    def after_step(self, optimizer: Optimizer, strength: float) -> None:
        """Take the prior's proximal step, if the prior is not part of the objective."""
        if not self.in_objective(optimizer):
            apply_prior(optimizer, *self._terms(strength), self._factors)

    def _terms(self, strength: float) -> tuple[dict[Tensor, Tensor], float, dict[Tensor, int], float]:
        """What both forms of the prior's step need: δ, its factor, the scale-free weights and the initial precision."""
        return self.delta_by_parameter(), strength, self.scale_free.by_parameter, self.settings.initial_precision

    def _check(self, optimizers: Sequence[Optimizer]) -> None:
        """Check each set of optimizers once."""
        key = tuple(map(id, optimizers))
        if key not in self._checked:
            self._checked.add(key)
            check_optimizers(optimizers, self.theta.values())

    def unobserved(self) -> AbstractContextManager[None]:
        """A context in which passes of the model are not measured."""
        return nullcontext() if self.online is None else self.online.paused()

    def advance(self, *optimizers: Optimizer) -> None:
        """Count a step that has been taken, and update δ if an update is due."""
        self.timetable.steps += 1
        if self.settings.proximal and self.steps % 10 == 0:
            clear_vanished(self.theta.values())
        if self.settings.debias is not False and not self._is_debiased:
            names: dict[Tensor, str] = {p: name for name, p in self.theta.items()}
            for optimizer in optimizers:
                self.timetable.note_rates(optimizer, names)
            if self.timetable.releases:
                self.debias()
        if self.online is None:
            return
        self.online.every = self.timetable.spacing
        if not self.timetable.is_due:
            return
        if self.online.measurements:
            self._update(self.online.curvature(copied=self.noise.is_learned))  # learning the noise changes H
            for optimizer in optimizers:
                if isinstance(optimizer, LBFGS):  # its history belongs to the old objective
                    optimizer.state.clear()
        elif not self.online.passes and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"δ is not learned: {UNMEASURED}", stacklevel=3)

    def end_epoch(self, batches: Iterable[Any], **reading: Any) -> None:
        """By epochs: estimate H over ``batches`` and update δ, if an update is due. Online: only counts the epoch.

        Args:
            batches: The training data; with several ranks, each rank passes its own share.
            reading: ``forward=`` and ``targets=`` for other batch layouts, ``fraction=`` for part of the data.
        """
        self.timetable.epochs += 1
        if self.online is None and self.timetable.is_epoch_due:
            self.update(batches, **reading)

    def update(self, batches: Iterable[Any], **reading: Any) -> None:
        """Estimate H in a separate pass over ``batches`` and update δ now."""
        source = self.settings.source
        found = estimate(
            self.model, batches, self.likelihood, self.structure, source, seed=self.seed + self.updates, **reading
        )
        self._update(found.sum_over_ranks(self.ranks))

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean negative log likelihood of a batch; for a regression, under the current noise."""
        if not self.steps:
            self.likelihood.check(outputs, targets)
        self.noise.outputs = max(1, outputs[0].numel())
        nll = self.likelihood.nll(outputs, targets)
        if self.online is not None:
            self.online.note(float(nll.detach().sum()))
        return nll.mean()

    def freeze(self) -> None:
        """Stop learning δ, so that the weights settle.

        For trainings without ``total_steps``: call it when 60 % of the training are over.
        """
        self.timetable.freeze()

    def debias(self) -> None:
        """Train the weights under ``initial_precision`` from now on, so that δ no longer pulls them to zero.

        Called after the freeze, see :attr:`shaver.timetable.Timetable.releases`; pruning during training can call it
        once its masks are final. δ is still learned until the freeze.
        """
        self._is_debiased = True
        self._made_of = []  # forces δ per parameter to be computed again

    @torch.no_grad()
    def _update(self, curvature: Curvature) -> None:
        """Move δ to the maximum of the evidence, and the weights part of the way to the new posterior mean."""
        settings, temperature = self.settings, self.temperature
        if self.online is None:  # online, the average has it
            self._curvature = curvature
        if self.timetable.skips():
            return
        before, rows = self.prior.snapshot(), self._held.rows()
        with torch.enable_grad():
            # the paper's Proposition 1 would hold the δ of a tensor together; see the page on defaults
            projected = settings.method == "gradient"
            posterior = improve(
                self.prior, curvature, rows, method=settings.method, temperature=temperature, projected=projected
            )
        scale = self.noise.update(curvature, lambda: self._held.total(posterior.effective_parameters)[0], temperature)
        if scale is not None and self.online is not None:
            self.online.rescale(scale, curvature.log_likelihood)
        self._held.decide_together([factor.values for factor in self.prior.factors])
        diagonal = curvature.diagonal()
        matrices = {name: diagonal[name] for name, parameter in self.theta.items() if parameter.ndim > 1}
        self.watch.keep_matrices(self.prior, before, matrices, temperature, self._held.total, self.steps)
        if settings.shrink and self.updates and not self._is_debiased:
            power = settings.shrink if self.online is None else settings.share(self.timetable.update)
            scale_free, tables = self.scale_free.by_parameter, embeddings_of(self.model)
            for name, h in diagonal.items():
                if self.theta[name] in tables:
                    continue
                deltas = before.delta_of(name), self.prior.delta_of(name)
                with kept_norms([self.theta[name]], scale_free):
                    shrink(rows[name].detach(), h, deltas, temperature=temperature, power=power, total=self._held.total)
        self.updates += 1
        self._made_of, self._delta = [], {}  # releases the old δ
        self.watch.warn_of_empty_matrices(rows, self.steps)
        if self.online is not None:
            likelihood = curvature.log_likelihood / temperature
            evidence = math.nan
            if math.isfinite(likelihood):
                evidence = likelihood + self._held.total(posterior.log_evidence - likelihood)[0]
            self.watch.warn_of_harm(evidence, self.steps)

    # Results ---------------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> Posterior:
        """The posterior at the current weights, from the newest H and δ. If sharded: for this rank's rows.

        Weights that δ no longer pulls do not fit the δ that was learned (:meth:`debias`). Then the posterior has the δ
        of highest evidence at the current weights.
        """
        curvature, prior, rows = self.curvature, self.prior, self._held.rows()
        if self._is_debiased:
            prior = prior.snapshot()
            improve(prior, curvature, rows, temperature=self.temperature, projected=False)
        return Posterior(
            curvature,
            prior,
            rows,
            self.temperature,
            model=None if self._held.is_sharded else self.model,
            likelihood=self.likelihood,
        )

    @property
    def curvature(self) -> Curvature:
        """The newest H: the online average, or the last estimate."""
        if self.online is not None:
            return self.online.curvature()
        if self._curvature is None:
            raise RuntimeError(
                "no curvature has been estimated yet: call spam.end_epoch(batches) at the end of each epoch, or "
                "spam.update(batches)."
            )
        return self._curvature

    def statistics(self) -> dict[str, float]:
        """Log evidence, effective number of parameters, share of weights with S > 1, and mean log δ.

        Empty before the first curvature measurement. With sharded parameters all ranks must call it.
        """
        if not (self._curvature if self.online is None else self.online.measurements):
            return {}
        posterior = self.posterior
        own = [factor.values for factor in self.prior.factors if not factor.ranks.rank]  # shared ones count once
        weights = sum(p.numel() for p in posterior.theta.values())
        likelihood = posterior.curvature.log_likelihood / self.temperature
        known = math.isfinite(likelihood)
        effective, relevant, count, log_delta, behind, occam = self._held.total(
            posterior.effective_parameters,
            posterior.relevance() * weights,
            weights,
            sum(float(values.double().log().sum()) for values in own),
            sum(values.numel() for values in own),
            posterior.log_evidence - likelihood if known else 0.0,
        )
        found = {"effective_parameters": effective, "relevant": relevant / count, "mean_log_delta": log_delta / behind}
        if known:
            found["log_evidence"] = likelihood + occam
        return found | self.noise.statistics()

    def close(self) -> None:
        """Remove every hook from the model and the optimizers. The posterior stays available."""
        for attachment in self._attached.values():
            attachment.remove()
        self._attached.clear()
        if self.online is not None:
            self.online.close()

    def select(self, kept: Selection) -> None:
        """Follow a model whose tensors were sliced in place: each kept weight keeps its δ and its curvature.

        :func:`shaver.structure.remove_units` calls this between two steps.

        Args:
            kept: Parameter → dimension → the kept positions.
        """
        self.theta = trainable_parameters(self.model)
        self.scale_free.select(self.theta)
        self._held = held_parameters(self.theta, self.ranks)
        added = {name: p for name, p in self.theta.items() if name not in self.prior.names}
        self.prior = self.prior.select(kept, added, self.settings.initial_precision)
        self._factors = Factors()
        self._made_of = []  # forces δ per parameter to be computed again
        if self.online is not None:
            self.online.select(kept)
        if self._curvature is not None:
            self._curvature = self._curvature.select(kept, added)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume, as nested dicts of tensors and numbers.

        With sharded parameters each tensor is a ``DTensor``;
        :func:`shaver.integrations.distributed.full_state_dict` gathers the whole tensors.
        """
        prior = self.prior.state_dict()
        owners = {f.key: next(iter(f.layouts)) for f in self.prior.factors if not f.ranks}
        prior["values"] = {
            f.key: joined(f.values, self.theta[owners[f.key]]) if f.key in owners else f.values
            for f in self.prior.factors
        }
        return {
            "prior": prior,
            "online": None if self.online is None else self.online.state_dict(),
            "curvature": None if self._curvature is None else self._curvature.state_dict(),
            "likelihood": self.likelihood.state(),
            **self.timetable.state(),
            "temperature": self.temperature,
            "updates": self.updates,
            "outputs": self.noise.outputs,
            "scale_free": self.scale_free.state(),
            "watch": self.watch.state(),
            "is_debiased": self._is_debiased,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        values = dict(state["prior"]["values"])
        for factor in self.prior.factors:
            if factor.key in values and not factor.ranks:
                values[factor.key] = rows_of(values[factor.key], self.theta[next(iter(factor.layouts))])
        self.prior.load_state_dict(state["prior"] | {"values": values})
        if (self.online is None) != (state["online"] is None):
            saved, this = ("by epochs", "online") if state["online"] is None else ("online", "by epochs")
            raise ValueError(
                f"the saved SpaM learned {saved} and this one learns {this}: pass online={state['online'] is not None}."
            )
        self.timetable.load_state(state)
        if self.online is not None:
            self.online.load_state_dict(state["online"])
            self.online.every = self.timetable.spacing
        found = state["curvature"]
        self._curvature = None if found is None else Curvature.from_state_dict(found)
        self.likelihood.load_state(state["likelihood"])
        self.temperature, self.updates = state["temperature"], state["updates"]
        self.noise.outputs = state["outputs"]
        self.scale_free.load_state(state["scale_free"])
        self.watch.load_state(state["watch"])
        self._is_debiased = state["is_debiased"]
        self._made_of = []

    def delta_by_parameter(self) -> dict[Tensor, Tensor]:
        """δ of each parameter, computed again when the prior's values have been replaced."""
        values = [factor.values for factor in self.prior.factors]
        if len(values) != len(self._made_of) or any(a is not b for a, b in zip(values, self._made_of, strict=True)):
            found: dict[Tensor, Tensor] = {p: self.prior.delta_of(name) for name, p in self.theta.items()}
            if self._is_debiased:
                found = {p: delta.new_tensor(self.settings.initial_precision) for p, delta in found.items()}
            self._made_of, self._delta = values, found
        return self._delta
