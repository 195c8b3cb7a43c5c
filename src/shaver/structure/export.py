"""ONNX files for other runtimes, written only after the file was found to compute the same as the network."""

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

from shaver.batches import LABELS, check_values, outputs_in
from shaver.curvature.capture import copied, undisturbed
from shaver.io import atomic_path
from shaver.measure.example import Example, call, samples_of
from shaver.structure.inputs import check_example, short

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
    """Write a network as one ONNX file, in evaluation mode, and compare both in onnxruntime if that is installed.

    Example:
        >>> small = shaver.compact(model, example=x, criterion="magnitude", sparsity=0.5)
        >>> shaver.structure.export_onnx(small, x, "small.onnx")

    Args:
        model: The network; left as it is. If it returns more than a tensor, the file gives its ``logits``.
        example: An input: a tensor, a tuple of positional or a dict of keyword arguments.
        path: The file; it appears, or replaces an older one, only when the comparison has passed.
        dynamic_batch: The file takes batches of any size, whatever the size of the example: the first dimension of
            every tensor in it.
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
    if not isinstance(path, str | os.PathLike) or Path(path).is_dir():
        raise ValueError(f"path must name a file, such as 'small.onnx', not {str(path)!r}.")
    target, kind = Path(path), type(check_values(model, "export_onnx")).__name__
    example = copied(check_example(example))
    # The exporter takes a dimension of size 1 for a constant, so the network is traced with at least two samples.
    traced = short(example, max(2, samples_of(example))) if dynamic_batch else example
    inputs = [traced, short(traced, samples_of(traced) + 1)] if dynamic_batch else [traced]
    with undisturbed(model), torch.no_grad(), atomic_path(target) as temporary:
        results = [_result(model, batch, len(inputs) > 1) for batch in inputs]
        pick = outputs or _logits
        expected = [pick(result) for result in results]
        positional, named = _arguments(traced)
        network = model
        if outputs is not None or not isinstance(results[0], Tensor):
            network = _Outputs(model, pick, len(positional), list(named))
            positional, named = (*positional, *named.values()), {}
        try:
            _write(network, positional, named, temporary, dynamic_batch)
        except Exception as error:
            raise ValueError(f"{kind} cannot be exported to ONNX: {_reason(error)}") from error
        for batch, wanted in zip(inputs, expected, strict=True) if find_spec("onnxruntime") is not None else ():
            try:
                positional, named = _arguments(batch)
                difference = _difference(wanted, _run(temporary, [*positional, *named.values()]))
            except Exception as error:  # onnxruntime has error types of its own
                raise ValueError(
                    f"the ONNX file of {kind} does not run on {samples_of(batch)} samples: {_reason(error)} {target} "
                    "was not written; dynamic_batch=False writes a file for the example's batch size alone."
                ) from error
            if not difference <= TOLERANCE:
                raise ValueError(
                    f"the ONNX file of {kind} differs from the network by {difference:.2g} of the largest output, more "
                    f"than {TOLERANCE:g}; {target} was not written."
                )
    return target


def _result(model: nn.Module, batch: Example, dynamic: bool) -> Any:
    try:
        return call(model, copied(batch))
    except Exception as error:  # whatever the user's network raises
        hint = "; dynamic_batch=False keeps the example's batch size" if dynamic else ""
        raise ValueError(
            f"{type(model).__name__} does not run on {samples_of(batch)} samples of the example: {_reason(error)}{hint}"
        ) from error


def _logits(result: Any) -> Tensor:
    try:
        return outputs_in(result)
    except TypeError as error:
        raise TypeError(
            f"the model returned a {type(result).__name__}, not a tensor or something with .logits; pass "
            "outputs=lambda result: … that picks one."
        ) from error


class _Outputs(nn.Module):
    """A network that returns one tensor and takes positional arguments only, as the exporter requires."""

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
    def first(value: Any) -> Any:
        is_batch = isinstance(value, Tensor) and value.ndim and len(value) > 1
        return {0: torch.export.Dim.DYNAMIC} if is_batch else None

    shapes: Any = None
    if dynamic_batch:
        shapes = tuple(map(first, positional)) if positional else {key: first(value) for key, value in named.items()}
        shapes = {"args": shapes} if isinstance(model, _Outputs) else shapes
    with _quietly():
        torch.onnx.export(
            model,
            positional,
            str(path),
            kwargs=named or None,
            input_names=model.names or None if isinstance(model, _Outputs) else None,
            dynamo=True,
            dynamic_shapes=shapes,
            external_data=False,
            verbose=False,
        )


def _reason(error: BaseException) -> str:
    """The first line of the original error, without the exporter's colours and advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence the exporter: it prints its stages, deprecation warnings and that torchvision is missing."""
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
    return float((expected.cpu().double() - found.double()).abs().max()) / (float(expected.abs().max()) or 1.0)
