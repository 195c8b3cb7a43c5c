"""Which weights can be repaired, where the forward pass uses them, and in which order."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.repairing.lockstep import Lane, lanes, visiting
from shaver.repairing.views import CONVOLUTIONS, TRANSPOSED, has_view, matrix_of, weight_of

_INPUTS = ("query", "key", "value")
_OUTPUT = "output"


@dataclass(eq=False)
class Site:
    """One weight matrix: the whole of a parameter, or the rows of a packed one that belong to one input.

    Attributes:
        name: The parameter's name, with the part in brackets for a packed one.
        parameter: The parameter's name in the model, as masks have it.
        users: Module paths that apply it, each with the part of the module it is.
        rows: Its rows of the parameter; ``None`` is all of them.
        norm: Path of a BatchNorm that takes this site's outputs, if there is one.
        rectified: Whether a ReLU takes this site's outputs, and nothing else does.
        size: Rows of inputs in the first batch.
        spans: The spatial sizes of a convolution's outputs, along which its rows can be thinned out.
    """

    name: str
    parameter: str
    users: list[tuple[str, str]]
    rows: slice | None = None
    norm: str | None = None
    rectified: bool = False
    size: int = 0
    spans: tuple[int, ...] = ()

    def matrix(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """The site's part of a tensor shaped like the parameter, as ``(groups, outputs, inputs)``."""
        if self.rows is not None:
            return tensor[self.rows].unsqueeze(0)
        return matrix_of(self.owner(model), tensor)

    def weight(self, model: nn.Module) -> Tensor:
        """The weight as ``(groups, outputs, inputs)``, detached."""
        return self.matrix(model, parameters_of(model)[self.parameter].detach())

    def bias(self, model: nn.Module) -> Tensor | None:
        """The bias as a vector that shares the parameter's memory, if all users of the weight share one."""
        biases = [bias_of(model.get_submodule(path), part) for path, part in self.users]
        first = biases[0]
        if first is None or any(bias is None or bias.data_ptr() != first.data_ptr() for bias in biases):
            return None
        return first

    def bias_kept(self, masks: Mapping[str, Tensor]) -> Tensor | None:
        """The mask of the bias, if the masks have one."""
        path, part = self.users[0]
        own = {"": "bias", _OUTPUT: "out_proj.bias"}.get(part, "in_proj_bias")
        mask = masks.get(f"{path}.{own}" if path else own)
        if mask is None or part not in _INPUTS:
            return mask
        return mask.reshape(3, -1)[_INPUTS.index(part)]

    @torch.no_grad()
    def write(self, model: nn.Module, matrix: Tensor, bias: Tensor | None) -> None:
        """Give the weight new values, and the bias if there is one."""
        parameter = parameters_of(model)[self.parameter]
        if self.rows is not None:
            parameter[self.rows] = matrix[0].to(parameter)
        else:
            parameter.copy_(weight_of(self.owner(model), matrix, parameter.shape).to(parameter))
        held = self.bias(model)
        if held is not None and bias is not None:
            held.copy_(bias.reshape(-1).to(held))

    def owner(self, model: nn.Module) -> nn.Module:
        """The layer whose view the weight has."""
        path, part = self.users[0]
        owner = model.get_submodule(path)
        return owner.out_proj if isinstance(owner, nn.MultiheadAttention) and part == _OUTPUT else owner


@dataclass
class RepairPlan:
    """The sites and norms of a network in the order of the forward pass.

    Attributes:
        by_user: The site of a module's part.
        norms: Paths of the BatchNorm layers with running statistics.
        stops: A site or a norm's path for each use in a forward pass.
        unrepaired: Why a weight has no site, by parameter name.
    """

    by_user: dict[tuple[str, str], Site]
    norms: tuple[str, ...]
    stops: list[Site | str] = field(default_factory=list)
    unrepaired: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """The modules that the plan stops at."""
        return [*dict.fromkeys(path for path, _ in self.by_user), *self.norms]

    def sites_at(self, path: str) -> list[tuple[str, Site]]:
        """The sites of a module, each with the part of the module it is."""
        return [(part, self.by_user[path, part]) for part in ("", *_INPUTS, _OUTPUT) if (path, part) in self.by_user]


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name; one that torch's own pruning has renamed has its original name."""
    known = dict(model.named_parameters(remove_duplicate=False))
    return {name.removesuffix("_orig"): parameter for name, parameter in known.items()}


def find_sites(model: nn.Module) -> list[Site]:
    """All weights that have a view as a matrix, tied ones once with all their users."""
    found: dict[tuple[int, str], Site] = {}
    known = parameters_of(model)
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}

    def add(path: str, part: str, own: str, parameter: Tensor, rows: slice | None = None) -> None:
        if id(parameter) in embedded:
            return
        name = f"{path}.{own}" if path else own
        label = f"{name}[{part}]" if rows is not None else name
        site = found.setdefault((id(parameter), part if rows is not None else ""), Site(label, name, [], rows))
        site.users.append((path, part))

    for path, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for part in _INPUTS:
                if module.in_proj_weight is not None:
                    add(path, part, "in_proj_weight", module.in_proj_weight, _rows(module, part))
                else:
                    add(path, part, f"{part[0]}_proj_weight", getattr(module, f"{part[0]}_proj_weight"))
            add(path, _OUTPUT, "out_proj.weight", module.out_proj.weight)
        elif has_view(module) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            weight = getattr(module, "weight_orig", module.weight)
            if isinstance(weight, nn.Parameter) and f"{path}.weight".lstrip(".") in known:
                add(path, "", "weight", weight)
    return list(found.values())


def make_plan(model: nn.Module, run: Callable[[], object], wanted: Iterable[str]) -> RepairPlan:
    """Call ``run``, the network in eval mode on one batch, and note which sites and norms it uses, in which order.

    Parameters in ``wanted`` that have no site are named in ``unrepaired``.
    """
    sites = find_sites(model)
    plan = RepairPlan({user: site for site in sites for user in site.users}, norms=tuple(norms_of(model)))
    made = _Outputs()

    def note(_: Lane, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        if isinstance(module, _BatchNorm):
            maker = made.site_of(args[0])
            if maker is not None:
                maker.norm = path
            plan.stops.append(path)
            return
        for part, site in plan.sites_at(path):
            first = site_output(module, part, args, kwargs, out)
            made.add(first, site)
            site.size += first.numel() // (site.weight(model).shape[:2].numel() or 1)
            if isinstance(module, CONVOLUTIONS + TRANSPOSED):
                site.spans = tuple(first.shape[-len(module.stride) :])
            plan.stops.append(site)

    def watched() -> None:
        with made:  # modes of torch hold for one thread
            made.note(tree_leaves(run()), "output")

    with visiting(model, plan.paths, note, before=False), lanes([watched]) as (lane,):
        lane.advance()
    for site in sites:
        shared = site.bias(model) is not None or all(
            bias_of(model.get_submodule(p), part) is None for p, part in site.users
        )
        site.rectified = shared and made.uses.get(site) == {"relu"}
    used = {stop.parameter for stop in plan.stops if isinstance(stop, Site)}
    plan.unrepaired = {name: _reason(model, name, sites) for name in wanted if name not in used}
    return plan


class _Outputs(TorchFunctionMode):
    """The outputs of sites in one forward pass, and which functions take them.

    Attributes:
        uses: The names of the functions that take a site's outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref[Tensor], Site]] = {}
        self.uses: dict[Site, set[str]] = {}

    def add(self, output: Tensor, site: Site) -> None:
        """Record a site's output."""
        self._made[id(output)] = (weakref.ref(output), site)

    def site_of(self, tensor: object) -> Site | None:
        """The site whose output this tensor is."""
        ref, site = self._made.get(id(tensor), (None, None))
        return site if ref is not None and ref() is tensor else None

    def note(self, values: Iterable[Any], use: str) -> None:
        """Record the use of those values that are outputs of sites."""
        for value in values:
            site = self.site_of(value)
            if site is not None:
                self.uses.setdefault(site, set()).add(use)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor | tuple | list) and not isinstance(result, torch.Size):
            self.note(tree_leaves((args, kwargs)), func.__name__.strip("_"))
            self._made.pop(id(result), None)  # changed in place: from here on it is another tensor
        return result


def norms_of(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers with running statistics, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def site_input(module: nn.Module, part: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """What the weight of this part multiplies in this call."""
    if not part:
        first: Tensor = args[0] if args else next(iter(kwargs.values()))
        return first
    if part in _INPUTS:
        given: Tensor = kwargs[part] if part in kwargs else args[_INPUTS.index(part)]
        return given
    assert isinstance(module, nn.MultiheadAttention)
    # With the identity for its output matrix, attention returns what that matrix would have multiplied.
    plain = {"out_proj.weight": torch.eye(module.embed_dim).to(module.out_proj.weight)}
    if module.out_proj.bias is not None:
        plain["out_proj.bias"] = torch.zeros_like(module.out_proj.bias)
    mixed: Tensor = functional_call(module, plain, args, dict(kwargs))[0]
    return mixed


def site_output(module: nn.Module, part: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Tensor:
    """What the weight of this part gives in this call, bias included."""
    if part in _INPUTS:
        assert isinstance(module, nn.MultiheadAttention)
        packed = module.in_proj_weight is not None
        weight = module.in_proj_weight[_rows(module, part)] if packed else getattr(module, f"{part[0]}_proj_weight")
        return F.linear(site_input(module, part, args, kwargs), weight, bias_of(module, part))
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def bias_of(module: nn.Module, part: str) -> Tensor | None:
    """The bias of a module's part, sharing the parameter's memory."""
    if not isinstance(module, nn.MultiheadAttention):
        bias = getattr(module, "bias", None)
        return bias.detach() if isinstance(bias, nn.Parameter) else None
    if part == _OUTPUT:
        return None if module.out_proj.bias is None else module.out_proj.bias.detach()
    if module.in_proj_bias is None:
        return None
    return module.in_proj_bias.detach()[_rows(module, part)]


def _rows(module: nn.MultiheadAttention, part: str) -> slice:
    place = _INPUTS.index(part)
    return slice(place * module.embed_dim, (place + 1) * module.embed_dim)


def _reason(model: nn.Module, name: str, sites: list[Site]) -> str:
    if any(site.parameter == name for site in sites):
        return "the forward pass does not use its layer"
    owner = model.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or (has_view(owner) and not is_transposed_linear(owner)):
        return "it is tied to an embedding, or computed from other parameters"
    return f"there is no rule for {type(owner).__name__}"
