"""Random networks with random batches, and their curvature by one sample at a time in double precision.

A network is drawn from a seed alone, so that a failure can be drawn again: ``compare(seed)``. The reference shares no
code with the library.
"""

import copy
import random
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import tests.curvature.networks as net
from shaver.curvature import OnlineCurvature, estimate

CLASSES = 3


class DropConnect(nn.Module):
    """Drops weights in training."""

    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.5, self.training)


class Slope(nn.Module):
    """A learned slope for negative inputs, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


class Form(nn.Module):
    """A bilinear layer of the input with itself."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.form = nn.Bilinear(width, width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, x.flip(-1))


class InPlace(nn.Module):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5) if not x.requires_grad else x * 0.5


class Raw(nn.Module):
    """Raw parameters that broadcast: a shift per position, a gain, a temperature."""

    def __init__(self, positions: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(positions, width))
        self.gain, self.temperature = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain + self.shift) * self.temperature


class Capacity(nn.Module):
    """Experts that take the tokens with the highest scores, a fixed number each, wherever they come from."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(width, experts),
            nn.ModuleList(nn.Linear(width, width) for _ in range(experts)),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)  # tokens are chosen within each sample
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            best = scores[..., number].topk(max(1, x.shape[1] // 2), 1).indices.unsqueeze(-1)
            chosen = x.gather(1, best.expand(-1, -1, x.shape[-1]))
            weighted = expert(chosen) * scores[..., number, None].gather(1, best)
            out = out.scatter_add(1, best.expand_as(weighted), weighted)
        return out


@dataclass
class Drawn:
    """A network and its batches.

    Attributes:
        kind: The family.
        model: In double precision.
        batches: ``(x, y)`` pairs.
        steady: Whether training mode gives the same outputs as evaluation mode.
    """

    kind: str
    model: nn.Module
    batches: list[tuple[Tensor, Tensor]]
    steady: bool = True


@dataclass
class Outcome:
    """What came out of one comparison: ``equal``, ``refused``, ``wrong`` or ``crashed``, with words.

    Attributes:
        seed: What to draw it again from.
        kind: The family of networks.
        results: (what was compared, result, words) for each comparison.
    """

    seed: int
    kind: str
    results: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, what: str, compare: Callable[[], str]) -> None:
        """Run one comparison; it returns what differs, or nothing."""
        try:
            words = compare()
            self.results.append((what, "wrong" if words else "equal", words))
        except (ValueError, NotImplementedError, FloatingPointError) as error:
            self.results.append((what, "refused", str(error)))
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.results.append((what, "crashed", f"{type(error).__name__} in {last.filename}: {error}"))


def activation(rng: random.Random) -> nn.Module:
    kinds = [nn.ReLU, lambda: nn.ReLU(inplace=True), nn.Tanh, nn.GELU, nn.PReLU, Slope, net.Scale, net.Bias]
    return rng.choice(kinds)()


def wrapped(layer: nn.Module, rng: random.Random) -> nn.Module:
    """The layer, perhaps parametrized."""
    kind = rng.choice(["plain"] * 4 + ["weight norm", "spectral norm", "dropped weights"])
    if kind == "weight norm":
        return parametrizations.weight_norm(layer)
    if kind == "spectral norm":
        return parametrizations.spectral_norm(layer)
    if kind == "dropped weights":
        parametrize.register_parametrization(layer, "weight", DropConnect())
    return layer


def dense(rng: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width = first = rng.randint(1, 4)
    layers: list[nn.Module] = [InPlace()] if rng.random() < 0.1 else []
    for _ in range(rng.randint(0, 3)):
        out = rng.randint(1, 4)
        kind = rng.choice(["linear", "linear", "linear", "bilinear", "norm"])
        if kind == "bilinear":
            layers += [Form(width, out), activation(rng)]
        else:
            layers += [wrapped(nn.Linear(width, out, bias=rng.random() < 0.7), rng)]
            layers += [rng.choice([nn.BatchNorm1d, nn.LayerNorm, nn.RMSNorm])(out)] if kind == "norm" else []
            layers += [activation(rng), *([nn.Dropout(0.3)] if rng.random() < 0.2 else [])]
        width = out
    if layers and rng.random() < 0.3:
        layers += [nn.Linear(width, width)] * 2  # one module, called twice
    return nn.Sequential(*layers, nn.Linear(width, CLASSES)), (first,)


def convolutional(rng: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width = channels = rng.randint(1, 4)
    side, layers = rng.randint(3, 5), []
    for _ in range(rng.randint(1, 2)):
        groups = rng.choice([g for g in range(1, width + 1) if width % g == 0])
        out, kernel = groups * rng.randint(1, 2), rng.choice([1, 3])
        layer = nn.Conv2d(
            width, out, kernel, stride=rng.randint(1, 2), padding=kernel // 2, groups=groups, bias=rng.random() < 0.7,
            padding_mode=rng.choice(["zeros", "replicate", "circular"]),
        )  # fmt: skip
        norm = rng.choice([lambda w: nn.BatchNorm2d(w), lambda w: nn.GroupNorm(1, w), lambda w: nn.Identity()])(out)
        layers += [wrapped(layer, rng), norm, activation(rng)]
        width = out
    if rng.random() < 0.2:
        layers += [nn.ConvTranspose2d(width, width, 2)]
    return nn.Sequential(*layers, net.pool_pixels(), nn.Linear(width, CLASSES)), (channels, side, side)


def transposed() -> nn.Module:
    return net.Apply(lambda x: x.transpose(0, 1))


def unfolded(positions: int, width: int) -> nn.Module:
    return net.Apply(lambda x: x.view(-1, positions, width))


def positional(rng: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width, positions = 2 * rng.randint(1, 2), rng.randint(1, 4)
    makers: list[Callable[[], list[nn.Module]]] = [
        lambda: [net.TransformerBlock(width)],
        lambda: [net.MixerBlock(positions, width)],
        lambda: [nn.Linear(width, width), nn.RMSNorm(width), nn.SiLU()],
        lambda: [transposed(), nn.Linear(width, width), transposed()],
        lambda: [nn.TransformerEncoderLayer(width, 2, 3, batch_first=True, dropout=0.0)],
        lambda: [Raw(positions, width)],
        lambda: [net.Apply(lambda x: x.flatten(0, 1)), nn.Linear(width, width), unfolded(positions, width)],
    ]
    layers = [layer for _ in range(rng.randint(1, 2)) for layer in rng.choice(makers)()]
    return nn.Sequential(*layers, net.pool_positions(), nn.Linear(width, CLASSES)), (positions, width)


def experts(rng: random.Random) -> tuple[nn.Module, tuple[int, ...]]:
    width, positions, count = rng.randint(2, 3), rng.randint(1, 3), rng.randint(2, 3)
    if rng.random() < 0.6:
        return net.Routed(width, count), (positions, width)
    return nn.Sequential(Capacity(width, count), nn.Tanh(), net.pool_positions(), nn.Linear(width, CLASSES)), (
        positions,
        width,
    )


FAMILIES = {"dense": dense, "convolutional": convolutional, "positional": positional, "experts": experts}


def draw(seed: int) -> Drawn:
    """A network and two or three batches, drawn from the seed alone."""
    rng = random.Random(seed)
    kind = rng.choice(list(FAMILIES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, shape = FAMILIES[kind](rng)
        model = model.double()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                special = rng.random()
                if special < 0.04:
                    parameter.zero_()  # a head that starts at zero, a dead layer
                elif special < 0.5 and parameter.ndim < 2:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        for parameter in model.parameters():
            if rng.random() < 0.05:
                parameter.requires_grad_(False)
        if not any(p.requires_grad for p in model.parameters()):
            next(iter(model.parameters())).requires_grad_(True)
        batches = []
        for _ in range(rng.randint(2, 3)):
            count = rng.randint(1, 5)
            x = torch.randn(count, *shape, dtype=torch.float64)
            example = rng.random()
            if example < 0.08:
                x = torch.zeros_like(x)
            elif example < 0.16:
                x = -x.abs()
            elif example < 0.24:
                x = x[:1].repeat(count, *(1,) * len(shape))  # all samples are equal
            batches.append((x, torch.randint(CLASSES, (count,))))
    kinds = (nn.modules.batchnorm._BatchNorm, nn.Dropout, DropConnect, parametrizations._SpectralNorm)
    steady = not any(isinstance(module, kinds) for module in model.modules())
    return Drawn(kind, model, batches, steady)


def reference(drawn: Drawn, x: Tensor, y: Tensor) -> dict[str, dict[str, Tensor]]:
    """The diagonals of Σ_n J_nᵀ Λ_n J_n and Σ_n g_n g_nᵀ, one sample and one output at a time, in evaluation mode."""
    model = drawn.model.eval()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    totals = {source: {name: torch.zeros_like(p) for name, p in parameters.items()} for source in ("ggn", "ef")}
    for n in range(len(x)):
        outputs = model(x[n : n + 1].clone())[0]
        rows = [
            torch.autograd.grad(outputs[c], list(parameters.values()), retain_graph=True, allow_unused=True)
            for c in range(CLASSES)
        ]
        p = outputs.detach().softmax(0)
        gradient = p - F.one_hot(y[n], CLASSES)
        for i, (name, w) in enumerate(parameters.items()):
            jacobian = torch.stack([torch.zeros_like(w) if row[i] is None else row[i] for row in rows])
            jacobian = jacobian.reshape(CLASSES, -1)
            for source, middle in (("ggn", p.diag() - p.outer(p)), ("ef", gradient.outer(gradient))):
                totals[source][name] += (jacobian * (middle @ jacobian)).sum(0).view_as(w)
    return totals


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """The first parameter whose numbers differ by more than 1e-8 of their size, in words."""
    largest = max((float(h.abs().max()) for h in expected.values() if h.numel()), default=0.0)
    for name, h in expected.items():
        error = float((found[name] - h).abs().max()) if h.numel() else 0.0
        if not error <= 1e-8 * float(h.abs().max()) + 1e-12 * largest:
            return f"{name}: off by {error:.2e} where the largest is {float(h.abs().max()):.2e}"
    return ""


def compare(seed: int, compile_with: str | None = None) -> Outcome:
    """Compare estimates and online measurements with the reference, and training with and without measurements."""
    drawn = draw(seed)
    outcome = Outcome(seed, drawn.kind + (" compiled" if compile_with else ""))
    try:
        parts = [reference(drawn, x, y) for x, y in drawn.batches]
    except (RuntimeError, ValueError):  # a network that cannot run, such as group norm over a single number
        return outcome
    if compile_with:
        drawn.model.compile(backend=compile_with)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in ("ggn", "ef"):
            expected = {name: torch.stack([part[source][name] for part in parts]).sum(0) for name in parts[0][source]}
            outcome.add(
                f"estimate {source}",
                lambda source=source, expected=expected: difference(
                    estimate(drawn.model, drawn.batches, source=source).diagonal(), expected
                ),
            )
        if drawn.steady:
            outcome.add("online", lambda: _online(drawn, [part["ef"] for part in parts]))
        outcome.add("training", lambda: _training(drawn))
    return outcome


def _online(drawn: Drawn, references: list[dict[str, Tensor]]) -> str:
    """Each step's measurement beside the reference for its batch."""
    online = OnlineCurvature(drawn.model.train(), 7, every=1, decay=0.0, source="ef")
    try:
        for (x, y), sums in zip(drawn.batches, references, strict=True):
            drawn.model.train().zero_grad()
            with online.measure():
                F.cross_entropy(drawn.model(x.clone()), y).backward()
            found = online.curvature().diagonal()
            if words := difference(found, {name: h * 7 / len(y) for name, h in sums.items()}):
                return words
    finally:
        online.close()
    return ""


def _training(drawn: Drawn) -> str:
    """The same training with and without MC measurements: gradients, buffers and random numbers."""
    states = []
    for measures in (False, True):
        model = copy.deepcopy(drawn.model).train()
        online = OnlineCurvature(model, 7, every=1, source="mc") if measures else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for x, y in drawn.batches:
                if len(x) < 2:
                    continue  # batch norm cannot train on one sample
                F.cross_entropy(model(x.clone()), y).backward()
                if online is not None:
                    online.step()
            tensors = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            states.append(tensors | dict(model.named_buffers()) | {"random numbers": torch.get_rng_state()})
    plain, measured = states
    if plain.keys() != measured.keys():
        return f"gradients of {sorted(plain.keys() ^ measured.keys())}"
    for name, value in plain.items():
        if not torch.allclose(measured[name].double(), value.double(), rtol=1e-10, atol=1e-13, equal_nan=True):
            return f"{name} differs"
    return ""
