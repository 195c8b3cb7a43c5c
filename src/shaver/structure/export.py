"""ONNX files: the network for other runtimes, written once the file has been seen to compute the same."""

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import LABELS, outputs_in
from shaver.curvature.capture import undisturbed
from shaver.io import atomic_path
from shaver.measure.example import Example, call

#: The largest difference between the file's outputs and the network's, relative to the largest output.
TOLERANCE = 1e-5


def export_onnx(
    model: nn.Module,
    example: Example,
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool = True,
    outputs: Callable[[Any], Tensor] | None = None,
) -> Path:
    """Write a network as one ONNX file, in evaluation mode, and compare it with the network, in onnxruntime if present.

    Example:
        >>> small = shaver.compact(model, example=x, criterion="magnitude", sparsity=0.5)
        >>> shaver.structure.export_onnx(small, x, "small.onnx")

    Args:
        model: The network; left as it is. Of one that returns more than a tensor the file gives the ``logits``.
        example: An input: a tensor, a tuple of positional or a dict of keyword arguments.
        path: The file; it appears, or replaces an older one, only when the comparison has passed.
        dynamic_batch: The file takes batches of any size: the first dimension of every tensor in the example.
        outputs: From what the model returns to the tensor that the file gives, where that is neither a tensor nor has
            ``.logits``: ``outputs=lambda result: result[0]``.

    Returns:
        The path.

    Raises:
        ImportError: The extra ``onnx`` is not installed.
        ValueError: The network cannot be exported, or the file computes something else.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if missing:
        raise ImportError(f'ONNX files need {", ".join(missing)}: pip install "shaver[onnx]".')
    target = Path(path)
    positional, named = _arguments(example)
    with undisturbed(model), torch.no_grad(), atomic_path(target) as temporary:
        result = call(model, example)
        pick = outputs or _logits
        plain = outputs is None and isinstance(result, Tensor)
        expected = pick(result)
        try:
            if plain:
                _write(model, positional, named, temporary, dynamic_batch)
            else:
                wrapped = _Outputs(model, pick, len(positional), list(named))
                _write(wrapped, (*positional, *named.values()), {}, temporary, dynamic_batch)
        except Exception as error:
            raise ValueError(f"{type(model).__name__} cannot be exported to ONNX: {_reason(error)}") from error
        difference = 0.0
        if find_spec("onnxruntime") is not None:
            difference = _difference(expected, _run(temporary, [*positional, *named.values()]))
        if not difference <= TOLERANCE:
            raise ValueError(
                f"the ONNX file of {type(model).__name__} differs from the network by {difference:.2g} of the largest "
                f"output, more than {TOLERANCE:g}; {target} was not written."
            )
    return target


def _logits(result: Any) -> Tensor:
    try:
        return outputs_in(result)
    except TypeError as error:
        raise TypeError(
            f"the model returned a {type(result).__name__}, not a tensor or something with .logits; pass "
            "outputs=lambda result: … that picks one."
        ) from error


class _Outputs(nn.Module):
    """A network that returns its outputs and nothing else; all arguments are positional, as the exporter wants it."""

    def __init__(self, model: nn.Module, pick: Callable[[Any], Tensor], count: int, names: list[str]) -> None:
        super().__init__()
        self.model, self.pick, self.count, self.names = model, pick, count, names

    def forward(self, *args: Any) -> Tensor:
        named = dict(zip(self.names, args[self.count :], strict=True))
        return self.pick(self.model(*args[: self.count], **named))


def _arguments(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), {key: value for key, value in example.items() if key != LABELS}
    return tuple(example), {}


def _write(
    model: nn.Module, positional: tuple[Any, ...], named: dict[str, Any], path: Path, dynamic_batch: bool
) -> None:
    shapes: Any = None
    if dynamic_batch:
        batch = torch.export.Dim.DYNAMIC

        def first(value: Any) -> Any:
            return {0: batch} if isinstance(value, Tensor) and value.ndim and len(value) > 1 else None

        shapes = tuple(map(first, positional)) if positional else {key: first(value) for key, value in named.items()}
        if isinstance(model, _Outputs):
            shapes = {"args": shapes}
    with _quietly():
        torch.onnx.export(
            model,
            positional,
            str(path),
            kwargs=named or None,
            input_names=model.names if isinstance(model, _Outputs) and model.names else None,
            dynamo=True,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )


def _reason(error: BaseException) -> str:
    """The first line of what is behind the exporter's own report, which has colours and advice in it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporter reports each of its stages, what it uses that is deprecated, and that torchvision is not there."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _run(path: Path, inputs: list[Any]) -> Tensor:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    tensors = [value.detach().cpu().numpy() for value in inputs if isinstance(value, Tensor)]
    feed = {wanted.name: value for wanted, value in zip(session.get_inputs(), tensors, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


def _difference(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        return float("inf")
    size = float(expected.abs().max()) or 1.0
    return float((expected.cpu().double() - found.double()).abs().max()) / size
