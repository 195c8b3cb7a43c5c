"""The blocks of a causal language model: which modules they are, how each is called, and what enters the first one.

A decoder of the transformers library embeds tokens, passes the hidden states through a list of equal blocks, and maps
the last ones to logits. Nothing here knows the names that a family gives to its parts: one pass over a few tokens shows
which list of modules forms the chain, and with which other arguments (positions, masks) each block is called.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

#: What the errors name as known to work.
FAMILIES = "Llama, Qwen2, Mistral and GPT-2"


class _Reached(Exception):
    """The pass has come to the first block."""


@dataclass(frozen=True)
class BlockChain:
    """The blocks of a causal model in their order.

    Attributes:
        model: The model that they belong to.
        path: The name of the list that holds them, such as ``"model.layers"``.
        blocks: The modules.
        gives_tuples: Whether a block gives its hidden states as the first part of a tuple.
    """

    model: nn.Module
    path: str
    blocks: Sequence[nn.Module]
    gives_tuples: bool

    def __len__(self) -> int:
        return len(self.blocks)

    @torch.no_grad()
    def entering(self, tokens: Tensor) -> Tensor:
        """The hidden states that enter the first block, in float32."""
        found: list[Tensor] = []

        def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.append(_hidden(args, kwargs))
            raise _Reached

        with self.blocks[0].register_forward_pre_hook(stop, with_kwargs=True), suppress(_Reached):
            _body(self.model)(input_ids=tokens, use_cache=False)
        return found[0].float()

    @torch.no_grad()
    def calls(self, tokens: Tensor) -> list[Callable[[nn.Module, Tensor], Tensor]]:
        """For each block, a function that runs it, or a copy in float32, on hidden states shaped like ``tokens``."""
        found: dict[int, Callable[[nn.Module, Tensor], Tensor]] = {}

        def note(place: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            others = {key: _wide(value) for key, value in kwargs.items() if key != "hidden_states"}
            rest = _wide(args[1:])
            found[place] = lambda block, hidden: _first(block(hidden, *rest, **others))

        with ExitStack() as hooks:
            for place, block in enumerate(self.blocks):
                hooks.enter_context(block.register_forward_pre_hook(partial(note, place), with_kwargs=True))
            _body(self.model)(input_ids=tokens, use_cache=False)
        return [found[place] for place in range(len(self.blocks))]

    @property
    def some_tokens(self) -> Tensor:
        """Two short windows of tokens that the model has."""
        return torch.arange(12).reshape(2, 6) % _vocabulary(self.model)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """The model's logits for :attr:`some_tokens`, in float64."""
        logits: Tensor = self.model(self.some_tokens, use_cache=False).logits
        return logits.double()


@torch.no_grad()
def find_blocks(model: nn.Module) -> BlockChain:
    """The chain of blocks of a causal model of the transformers library.

    Raises:
        ValueError: There is no such chain, or a later token changes earlier outputs. The message says what works.
    """
    name = type(model).__name__
    lists = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    }
    seen: dict[str, list[tuple[int, Tensor, Tensor]]] = {path: [] for path in lists}
    tuples: set[str] = set()

    def note(path: str, place: int, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        seen[path].append((place, _hidden(args, kwargs), _first(out)))
        if not isinstance(out, Tensor):
            tuples.add(path)

    works = (
        f"Pruning block by block works for {FAMILIES} models and others with one chain of blocks. For other networks, "
        "shaver.prune(model, scores, sparsity, calibration=batches) prunes and repairs."
    )
    size = _vocabulary(model)
    tokens = torch.arange(6).unsqueeze(0) % size
    with ExitStack() as hooks:
        for path, blocks in lists.items():
            for place, block in enumerate(blocks):
                hooks.enter_context(block.register_forward_hook(partial(note, path, place), with_kwargs=True))
        try:
            first = _first(_body(model)(input_ids=tokens, use_cache=False))
        except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
            raise ValueError(f"{name} cannot be called with tokens alone ({error}). {works}") from error
    chains = [path for path, calls in seen.items() if calls and _is_chain(calls, len(lists[path]))]
    outer = [path for path in chains if not any(path.startswith(f"{other}.") for other in chains)]
    if len(outer) != 1:
        found = " and ".join(outer) or "none"
        raise ValueError(
            f"{name} is of a family that is not known here: its blocks should form one chain, each fed by the one "
            f"before, and {found} of its lists of modules {'do' if outer else 'does'}. {works}"
        )
    other = tokens.clone()
    other[0, -1] = (int(tokens[0, -1]) + 1) % size
    changed = _first(_body(model)(input_ids=other, use_cache=False))
    if not torch.allclose(first[:, :-1].float(), changed[:, :-1].float(), rtol=1e-3, atol=1e-4):
        raise ValueError(f"{name} is not causal: a later token changes earlier outputs. {works}")
    return BlockChain(model, outer[0], list(lists[outer[0]]), outer[0] in tuples)


def _is_chain(calls: Sequence[tuple[int, Tensor, Tensor]], size: int) -> bool:
    """Whether each block ran once, in order, on what the one before gave."""
    if [place for place, _, _ in calls] != list(range(size)):
        return False
    shapes = {(x.shape, y.shape) for _, x, y in calls if isinstance(x, Tensor) and isinstance(y, Tensor)}
    if len(shapes) != 1 or len(set(next(iter(shapes)))) != 1:
        return False
    return all(x is y for (_, _, y), (_, x, _) in pairwise(calls))


def _vocabulary(model: nn.Module) -> int:
    table: Any = getattr(model, "get_input_embeddings", lambda: None)()
    return int(getattr(table, "num_embeddings", 2))


def _body(model: nn.Module) -> nn.Module:
    """The model without its head."""
    body = getattr(model, "base_model", model)
    return body if isinstance(body, nn.Module) else model


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs.get("hidden_states")


def _first(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]


def _wide(value: Any) -> Any:
    """Floating tensors in float32, also inside tuples."""
    if isinstance(value, Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_wide(part) for part in value)
    return value
