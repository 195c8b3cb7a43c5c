"""One pass of training that is watched: what its layers saw, and the hooks that catch its gradients on their way."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shaver.curvature.capture import Call
from shaver.curvature.plan import Plan
from shaver.curvature.reading import read_loss
from shaver.likelihoods import Classification, Likelihood

#: Numbers in the outputs of all layers beyond which MC does not hold their gradients side by side.
STREAMED = 2**26


@dataclass(frozen=True)
class Look:
    """What is wanted of a pass.

    Attributes:
        source: ``"ef"`` or ``"mc"``.
        likelihood: What the outputs mean.
        reads: Whether the loss's scale is read off its gradient at the outputs.
        generator: For the labels that MC draws.
        add: ``add(parameter name, sum of squares)``, in units of the negative log likelihood.
        always: Whether zeros are added too, because other ranks wait for them.
    """

    source: str
    likelihood: Likelihood
    reads: bool
    generator: torch.Generator
    add: Callable[[str, Tensor], None]
    always: bool = False


class Pass:
    """One forward pass and, once it happened, its backward pass.

    Args:
        args: The model's arguments.
        kwargs: Its keyword arguments.
        count: The number of samples.
        look: What is wanted.

    Attributes:
        calls: The calls of layers that have a rule.
        cotangent: The gradient at the outputs whose square counts: the loss's own for EF, the drawn one for MC.
        backward: Whether the backward pass has reached the outputs.
        factor: c in loss = c · Σ −log p; 1 where it is not read off, 0 where no sample has a loss.
        nll: Σ −log p, NaN unless read or told.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], count: int, look: Look) -> None:
        self.args, self.kwargs, self.count, self.look = args, kwargs, count, look
        self.calls: list[Call] = []
        self.cotangent: Tensor | None = None
        self.backward = False
        self.factor, self.nll = 0.0, math.nan
        self._plan: Plan | None = None
        self._outputs: Tensor | None = None
        self._edge: GradientEdge | None = None
        self._caught: dict[int, Tensor | None] = {}  # place of the call → gradient, None once it is squared
        self._streams = self._sampling = False

    def attend(self, outputs: Tensor, plan: Plan) -> None:
        """The forward pass is over: hook into the graph, to be there when the backward pass comes by."""
        if isinstance(self.look.likelihood, Classification):
            self.look.likelihood.check_classes(outputs)
        self._plan, self._outputs, self._edge = plan, outputs.detach(), _before_casts(get_gradient_edge(outputs))
        # before the layers' hooks: the last layer's needs what is read at the outputs
        self._edge.node.register_prehook(self._at_outputs(self._edge.output_nr))
        self._streams = self.look.source == "mc" and sum(call.shape.numel() for call in self.calls) > STREAMED
        if self.look.source == "ef" or self._streams:
            alone = plan.single_uses(self.calls)
            for place, call in enumerate(self.calls):
                at_once = (call.name, call.parameter) in alone
                call.edge.node.register_prehook(self._at_layer(place, call.edge.output_nr, at_once))

    def finish(self) -> None:
        """Add what could not be squared on the way: layers used several times."""
        waiting = {place: gradient for place, gradient in self._caught.items() if gradient is not None}
        self._square(waiting)

    def scaled(self, squares: Tensor) -> Tensor:
        """Squares of gradients of the loss as squares of gradients of the negative log likelihood, in place."""
        return squares.div_(self.factor**2) if self.look.source == "ef" else squares

    def clear(self) -> None:
        """Let go of the graph, which holds this pass by its hooks, and of everything large.

        A backward pass that comes later finds nothing to do.
        """
        self.args, self.kwargs, self.calls, self._caught = (), {}, [], {}
        self._plan = self._outputs = self._edge = self.cotangent = None
        self.backward = False

    def _at_outputs(self, number: int) -> Callable[..., None]:
        """A hook for the gradient that the loss sends to the outputs; the first one counts."""

        def hook(grads: tuple[Tensor, ...]) -> None:
            if grads[number] is None or self.backward or self._outputs is None:
                return
            self.backward = True
            gradient = grads[number].detach()
            self._read(self._outputs, gradient)
            self.cotangent = gradient
            if self.look.source == "mc":
                self._sample(self._outputs, gradient)
            self._outputs = None
            assert self._plan is not None
            if not (self._plan.generic or self._plan.idle or self._plan.doubted(self.calls, self.count)):
                self.cotangent = None  # nobody will ask, and with a large vocabulary it is large

        return hook

    def _at_layer(self, place: int, number: int, at_once: bool) -> Callable[..., None]:
        """A hook for the gradient at a layer's output. A layer used once is squared and forgotten on the spot."""

        def hook(grads: tuple[Tensor, ...]) -> None:
            if grads[number] is None or place in self._caught or not self.backward:
                return
            if self.look.source == "mc" and not self._sampling:
                return  # the loss's own gradient, which MC does not ask for
            self._caught[place] = grads[number].detach()
            if at_once:
                self._square({place: grads[number].detach()})

        return hook

    def _read(self, outputs: Tensor, gradient: Tensor) -> None:
        self.factor = 1.0  # a reduction that the user told is taken out at the end of the step
        if not self.look.reads:
            return
        assert isinstance(self.look.likelihood, Classification)
        try:
            reading = read_loss(self.look.likelihood, outputs, gradient)
        except FloatingPointError:  # judged at the end of the step: a loss scaler expects it now and then
            self.factor = self.nll = math.nan
            return
        # None: every label is predicted with certainty or ignored, there is nothing to read or to add
        self.factor, self.nll = (0.0, 0.0) if reading is None else (reading.factor, reading.nll)

    def _sample(self, outputs: Tensor, gradient: Tensor) -> None:
        """MC's own backward pass, from inside the loss's: only now is it known which labels are ignored."""
        assert self._edge is not None
        likelihood = self.look.likelihood
        drawn = likelihood.mc_gradient(outputs, self.look.generator).to(gradient.dtype)
        if isinstance(likelihood, Classification):
            drawn.mul_((gradient != 0).any(likelihood.class_dim, keepdim=True))
        self.cotangent = drawn
        # layers that do not fit side by side are squared as the gradient comes by; only where it ends is asked for
        places = _ends(self._edge.node, self.calls) if self._streams else range(len(self.calls))
        edges = [self.calls[place].edge for place in places]
        if not edges:
            return
        self._sampling = True
        try:
            grads = torch.autograd.grad([self._edge], edges, [drawn], retain_graph=True, allow_unused=True)
        finally:
            self._sampling = False
        self._caught |= {place: g for place, g in zip(places, grads, strict=True) if place not in self._caught}
        del grads
        self.finish()

    def _square(self, gradients: dict[int, Tensor]) -> None:
        """Add the squares of per-sample gradients, given the gradients at the outputs of some calls."""
        if not gradients or not (self.factor or self.look.always):
            return
        assert self._plan is not None
        calls = [self.calls[place] for place in gradients]
        with torch.no_grad():
            for name, use in self._plan.uses(calls, [g.unsqueeze(0) for g in gradients.values()], self.count):
                squares = use.square_sum()
                self.look.add(name, self.scaled(squares) if self.factor else squares.zero_())
        for place, call in zip(gradients, calls, strict=True):
            self._caught[place] = None
            call.inputs = torch.empty_like(call.inputs, device="meta")  # the shape alone is asked for from now on


def _before_casts(edge: GradientEdge) -> GradientEdge:
    """Where the outputs were made, before they were cast: a loss inside the model sees them like that.

    Mixed precision hands single-precision copies of the outputs on, which the model's own loss knows nothing of.
    """
    while edge.node.name() == "ToCopyBackward0":
        node, number = edge.node.next_functions[0]
        edge = GradientEdge(node, number)  # type: ignore[arg-type]
    return edge


def _ends(root: Node, calls: list[Call]) -> list[int]:
    """Places of the calls below which there is no other: a gradient that reaches these passes all the others."""
    places: dict[Node, list[int]] = {}
    for place, call in enumerate(calls):
        places.setdefault(call.edge.node, []).append(place)
    reaches: dict[Node, bool] = {}  # node → whether a call is below it
    stack = [(root, False)]
    while stack:
        node, is_done = stack.pop()
        below = [child for child, _ in node.next_functions if child is not None]
        if is_done:
            reaches[node] = any(child in places or reaches[child] for child in below)
        elif node not in reaches:
            reaches[node] = False
            stack.append((node, True))
            stack += [(child, False) for child in below if child not in reaches]
    return [place for node, those in places.items() if not reaches.get(node, False) for place in those]
