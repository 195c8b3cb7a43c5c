"""One curvature measurement: a recorded forward pass of training, and the gradients of its backward pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from shaver.curvature import kernels
from shaver.curvature.capture import Call
from shaver.curvature.loss_scale import read_loss
from shaver.curvature.plan import Plan
from shaver.likelihoods import Classification, Likelihood


@dataclass(frozen=True)
class Request:
    """What to measure."""

    source: str  # "ef" or "mc"
    likelihood: Likelihood  # the likelihood of the outputs
    reads_scale: bool  # whether the scale of the loss is read from its gradient at the outputs
    generator: torch.Generator  # for the labels that MC samples
    # add(parameter name, sum of squares), in units of the negative log likelihood
    add: Callable[[str, Tensor], None]
    always: bool = False  # whether zeros are added too, because other ranks wait for them


class Measurement:
    """One measured forward pass and its backward pass."""

    def __init__(self, inputs: tuple[Any, Any], count: int, request: Request, plan: Plan) -> None:
        self.inputs, self.count, self.request, self.plan = inputs, count, request, plan
        self.calls: list[Call] = []  # of layers that have a rule
        # the gradient at the outputs that is propagated and squared: that of the loss for EF, the sampled one for MC
        self.cotangent: Tensor | None = None
        self.backward = False  # whether the backward pass has reached the outputs
        self.factor = 0.0  # c in loss = c · Σ −log p; 1 if it is not read from the gradient, 0 if no sample has a loss
        self.nll = math.nan  # Σ −log p; NaN if it is neither read from the gradient nor set
        self.left: list[str] = []  # parameters for the generic rule
        self._outputs: Tensor | None = None
        self._edge: GradientEdge | None = None
        self._caught: dict[int, Tensor | None] = {}  # place of the call → gradient, None once it is squared
        self._streams = self._sampling = False

    @property
    def _draws(self) -> bool:
        """Whether the measurement needs its own backward pass: for MC, and to check routed rows."""
        return self.request.source == "mc" or self.plan.routed

    def forward_done(self, outputs: Tensor) -> None:
        """After the forward pass: install hooks in its graph for the backward pass."""
        if isinstance(self.request.likelihood, Classification):
            self.request.likelihood.check_classes(outputs)
        self._outputs, self._edge = outputs.detach(), _before_casts(get_gradient_edge(outputs))
        self.left = [*self.plan.generic, *self.plan.doubted(self.calls, self.count)]
        # before the hooks of the layers: that of the last layer needs the values read at the outputs
        self._edge.node.register_prehook(self._at_outputs(self._edge.output_nr))
        self._streams = self._draws and sum(call.shape.numel() for call in self.calls) > kernels.STREAMED
        if not self._draws or self._streams:
            alone = self.plan.single_uses(self.calls)
            for place, call in enumerate(self.calls):
                call.edge.node.register_prehook(self._at_layer(place, call.edge.output_nr, alone[place]))

    def finish(self) -> None:
        """Add the squares of layers that are used several times; all others have been added already."""
        self._square({place: gradient for place, gradient in self._caught.items() if gradient is not None})

    def scaled(self, squares: Tensor) -> Tensor:
        """Convert squared gradients of the loss to those of the negative log likelihood, in place."""
        return squares.div_(self.factor**2) if self.request.source == "ef" else squares

    def clear(self) -> None:
        """Release the graph, whose hooks refer to this measurement, and all large tensors.

        A later backward pass is not measured.
        """
        self.inputs, self.calls, self._caught = ((), {}), [], {}
        self._outputs = self._edge = self.cotangent = None
        self.backward = False

    def _at_outputs(self, number: int) -> Callable[..., None]:
        """A hook for the gradient of the loss at the outputs; only the first gradient counts."""

        def hook(grads: tuple[Tensor, ...]) -> None:
            if grads[number] is None or self.backward or self._outputs is None:
                return
            self.backward = True
            outputs, gradient = self._outputs, grads[number].detach()
            self._outputs = None
            self._read(outputs, gradient)
            self.cotangent = gradient if self.request.source == "ef" else self._drawn(outputs, gradient)
            if self._draws and (math.isfinite(self.factor) or self.request.always):
                self._backward(self.cotangent)
            if not self.left and not self.plan.unseen(self.calls):
                self.cotangent = None  # no longer needed, and large for a large vocabulary

        return hook

    def _at_layer(self, place: int, number: int, at_once: bool) -> Callable[..., None]:
        """A hook for the gradient at a layer's output. The gradient of a layer used once is squared at once."""

        def hook(grads: tuple[Tensor, ...]) -> None:
            if grads[number] is None or place in self._caught or not self.backward:
                return
            if self._draws and not self._sampling:
                return  # the loss's own gradient, which is not measured
            self._caught[place] = grads[number].detach()
            if at_once:
                self._square({place: grads[number].detach()})

        return hook

    def _read(self, outputs: Tensor, gradient: Tensor) -> None:
        if not self.request.reads_scale:  # the user's reduction is divided out at the end of the step
            self.factor = 1.0 if bool(torch.isfinite(outputs).all()) else math.nan
            return
        assert isinstance(self.request.likelihood, Classification)
        try:
            # None: every label is predicted with certainty or ignored, so there is nothing to read or add
            self.factor, self.nll = read_loss(self.request.likelihood, outputs, gradient) or (0.0, 0.0)
        except FloatingPointError:  # handled at the end of the step: with a loss scaler it is no error
            self.factor = self.nll = math.nan

    def _drawn(self, outputs: Tensor, gradient: Tensor) -> Tensor:
        """The output gradient of MC. Zero rows in the gradient of the loss show which labels are ignored."""
        likelihood = self.request.likelihood
        if math.isnan(self.factor):
            return gradient
        drawn = likelihood.mc_gradient(outputs, self.request.generator).to(gradient.dtype)
        if isinstance(likelihood, Classification):
            drawn.mul_((gradient != 0).any(likelihood.class_dim, keepdim=True))
        return drawn

    def _backward(self, cotangent: Tensor) -> None:
        """The measurement's own backward pass, inside that of the loss."""
        assert self._edge is not None
        if self.plan.routed:
            self.left = [*self.plan.generic, *self.plan.misrouted(self.calls, self._edge, cotangent)]
        # if the layers do not fit in memory together, each is squared when its gradient arrives, and only the last
        # gradients of the pass are requested
        places = _ends(self._edge.node, self.calls) if self._streams else range(len(self.calls))
        edges = [self.calls[place].edge for place in places]
        if not edges:
            return
        self._sampling = True
        try:
            grads = torch.autograd.grad([self._edge], edges, [cotangent], retain_graph=True, allow_unused=True)
        finally:
            self._sampling = False
        self._caught |= {place: g for place, g in zip(places, grads, strict=True) if place not in self._caught}
        del grads
        self.finish()

    def _square(self, gradients: dict[int, Tensor]) -> None:
        """Add the squares of per-sample gradients, given the gradients at the outputs of some calls."""
        if not gradients or not (self.factor or self.request.always):
            return
        calls = [self.calls[place] for place in gradients]
        with torch.no_grad():
            grads = [gradient.unsqueeze(0) for gradient in gradients.values()]
            for name, use in self.plan.uses(calls, grads, self.count, self.left):
                squares = use.square_sum()
                self.request.add(name, self.scaled(squares) if self.factor else squares.zero_())
        for place, call in zip(gradients, calls, strict=True):
            self._caught[place] = None
            call.inputs = torch.empty_like(call.inputs, device="meta")  # only the shape is still needed


def _before_casts(edge: GradientEdge) -> GradientEdge:
    """The edge of the outputs before they were cast, which a loss inside the model uses.

    Mixed precision returns single-precision copies of the outputs; the model's own loss does not use the copies.
    """
    while edge.node.name() == "ToCopyBackward0":
        node, number = edge.node.next_functions[0]
        edge = GradientEdge(node, number)  # type: ignore[arg-type]
    return edge


def _ends(root: Node, calls: list[Call]) -> list[int]:
    """Positions of the calls that have no other call below them: a gradient that reaches these passes all others."""
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
