"""Curvature by other libraries, called as their documentation says, on the same batches.

Every function takes a model, batches, structure and source. It computes the sums over all batches and returns how many
parameters the result covers. If the library does not support the case, it raises, and the table shows the reason.
"""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
Peer = Callable[[nn.Module, Batches, str, str], int]


MODULES = {
    "curvlinops": ["curvlinops"],
    "laplace-torch": ["laplace.curvature.curvlinops"],
    "BackPACK": ["backpack", "backpack.extensions"],
    "ASDL": ["asdl.fisher"],
}


def load(libraries: list[str]) -> None:
    """Import the libraries before anything is measured. The rows of a missing library give the error."""
    for library in libraries:
        for module in MODULES[library]:
            with suppress(ImportError):
                import_module(module)


class Unsupported(Exception):
    """The library does not offer this kind of curvature."""


def curvlinops(model: nn.Module, batches: Batches, structure: str, source: str) -> int:
    """Kronecker factors of Linear and Conv2d layers; it has no exact diagonal."""
    from curvlinops import KFACLinearOperator

    if structure != "kron":
        raise Unsupported("no exact diagonal of its own; see laplace-torch")
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    parameters = [p for module in layers for p in module.parameters(recurse=False)]
    operator = KFACLinearOperator(
        model.eval(),
        nn.CrossEntropyLoss(reduction="sum"),
        parameters,
        batches,
        fisher_type={"ggn": "type-2", "ef": "empirical", "mc": "mc"}[source],
        check_deterministic=False,
        num_data=sum(len(y) for _, y in batches),
        num_per_example_loss_terms=1,
    )
    operator.compute_kronecker_factors()
    return sum(p.numel() for p in parameters)


def laplace_torch(model: nn.Module, batches: Batches, structure: str, source: str) -> int:
    """laplace-torch with its default backend: Jacobians by torch.func for the diagonal, curvlinops for KFAC."""
    from laplace.curvature.curvlinops import CurvlinopsEF, CurvlinopsGGN

    model.eval()
    backend: Any = (
        CurvlinopsEF(model, "classification")
        if source == "ef"
        else CurvlinopsGGN(model, "classification", stochastic=source == "mc")
    )
    total: Any = None
    count = sum(len(y) for _, y in batches)
    for x, y in batches:
        _, part = backend.diag(x, y) if structure == "diag" else backend.kron(x, y, N=count)
        total = part if total is None else total + part
    return sum(p.numel() for p in model.parameters())


def backpack(model: nn.Module, batches: Batches, structure: str, source: str) -> int:
    """BackPACK's extensions. Its KFAC is wrongly scaled for convolutions, which does not change its cost."""
    from backpack import backpack as active
    from backpack import extend, extensions

    kinds = {
        ("diag", "ggn"): extensions.DiagGGNExact,
        ("diag", "mc"): extensions.DiagGGNMC,
        ("diag", "ef"): extensions.SumGradSquared,
        ("kron", "ggn"): extensions.KFLR,
        ("kron", "mc"): extensions.KFAC,
    }
    if (structure, source) not in kinds:
        raise Unsupported("no Kronecker factors of the empirical Fisher")
    extension = kinds[structure, source]()
    model, loss = extend(model.eval()), extend(nn.CrossEntropyLoss(reduction="sum"))
    totals: dict[str, list[Tensor]] = {}
    for x, y in batches:
        with active(extension):
            loss(model(x), y).backward()
        for name, p in model.named_parameters():
            if not hasattr(p, extension.savefield):
                raise Unsupported(f"gives nothing for {name}")
            part = getattr(p, extension.savefield)
            parts = part if isinstance(part, list) else [part]
            totals[name] = [a + b for a, b in zip(totals[name], parts, strict=True)] if name in totals else parts
            delattr(p, extension.savefield)
        model.zero_grad()
    return sum(p.numel() for name, p in model.named_parameters() if name in totals)


def asdl(model: nn.Module, batches: Batches, structure: str, source: str) -> int:
    """ASDL's statistics. It silently leaves out parameters of modules that it does not know."""
    from asdl.fisher import FisherConfig, get_fisher_maker

    config = FisherConfig(
        fisher_type={"ggn": "fisher_exact", "ef": "fisher_emp", "mc": "fisher_mc"}[source],
        loss_type="cross_entropy",
        fisher_shapes=[structure],
        data_size=1,
    )
    maker = get_fisher_maker(model.eval(), config)
    loss = nn.CrossEntropyLoss(reduction="sum")
    for index, (x, y) in enumerate(batches):
        outputs = maker.setup_model_call(model, x)
        if source == "ef":
            maker.setup_loss_call(loss, outputs, y)
        maker.forward_and_backward(accumulate=index > 0)
    known = [module for module in model.modules() if getattr(module, "fisher", None) is not None]
    for module in known:
        if not torch.isfinite(_first_tensor(module.fisher, structure)).all():
            raise FloatingPointError("the result is not finite")
    return sum(p.numel() for module in known for p in module.parameters(recurse=False))


def _first_tensor(statistics: Any, structure: str) -> Tensor:
    part = getattr(statistics, structure)
    return next(v for v in vars(part).values() if isinstance(v, Tensor))


PEERS: dict[str, Peer] = {
    "curvlinops": curvlinops,
    "laplace-torch": laplace_torch,
    "BackPACK": backpack,
    "ASDL": asdl,
}
