"""``prune_folder``: from a folder of the transformers library to another, pruned block by block, resumable."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver import __version__
from shaver.integrations.block_moments import matrix
from shaver.integrations.calibration_text import read_windows
from shaver.integrations.causal_blocks import FAMILIES
from shaver.integrations.oneshot import OneShot, PrunedMatrix, check_windows, prune_blocks
from shaver.io import as_path, check_folder, digest, load_state, read_json, save_state, write_json

#: The report beside the weights.
REPORT = "pruning.json"


@dataclass(frozen=True)
class PrunedFolder:
    """What :func:`prune_folder` did.

    Attributes:
        folder: The plain transformers folder that was written.
        matrices: One entry per pruned weight matrix.
        windows: How many windows of calibration text were used, and their length.
        resumed: Blocks that an earlier, interrupted call had finished.
        widths: Entries of the configuration that became smaller, before and after, and the model's parameters.
    """

    folder: Path
    matrices: tuple[PrunedMatrix, ...]
    windows: tuple[int, int]
    resumed: int
    widths: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def sparsity(self) -> float:
        """The share of the matrices' weights that was removed."""
        return 1 - sum(row.kept for row in self.matrices) / sum(row.weights for row in self.matrices)


def prune_folder(
    folder: str | Path,
    out: str | Path,
    calibration: str | Path | Tensor,
    settings: OneShot,
    *,
    windows: int = 64,
    length: int = 512,
    column: str = "text",
    progress: Callable[[int, int], None] | None = None,
) -> PrunedFolder:
    """Prune a causal model on disk and write a plain folder that ``AutoModelForCausalLM.from_pretrained`` opens.

    The folder given is not changed, and the other one appears when it is complete. Every finished block is written
    to ``.<out>.partial`` beside it: the same call continues there after an interruption and gives the same weights.
    The tokenizer and the generation configuration are copied.

    Example:
        >>> from shaver.integrations.model_folder import prune_folder
        >>> from shaver.integrations.oneshot import OneShot
        >>> prune_folder("smollm2", "smollm2-sparse", "reviews.txt", OneShot(sparsity=0.5))

    Args:
        folder: What ``save_pretrained`` wrote: ``config.json``, safetensors weights, tokenizer.
        out: The new folder; it must not exist.
        calibration: A text file, a parquet file, a file of token ids, or token ids ``(windows, length)``.
        settings: What is removed, and how.
        windows: How many windows of the calibration file are used.
        length: Tokens per window.
        column: Of a parquet file.
        progress: ``progress(done, total)`` is called after each block.

    Raises:
        ValueError: The folder is no model, or of an unknown family, or the text does not fit. Nothing is written.
        FileExistsError: ``out`` exists.
    """
    source, target = as_path(folder), as_path(out)
    config = _config(source)
    if target.exists():
        raise FileExistsError(f"{target} exists already; give another folder, or remove it.")
    check_folder(target.parent)
    tokenizer = _tokenizer(source)
    if isinstance(calibration, Tensor):
        ids = calibration
    else:
        ids = read_windows(calibration, tokenizer, length=length, count=windows, column=column)
    _check_vocabulary(config, ids, tokenizer)
    model = _model(source)
    check_windows(model, ids)
    place = target.parent / f".{target.name}.partial"
    identity = _identity(source, ids, settings)
    _prepare(place, identity)
    resumed = 0

    def stored(number: int) -> Path:
        return place / f"block-{number:04d}.safetensors"

    def store(number: int, block: nn.Module, rows: list[PrunedMatrix]) -> None:
        check_pattern(block, settings.pattern, rows)
        save_state(stored(number), {"weights": dict(block.state_dict()), "rows": [asdict(row) for row in rows]})

    def restore(number: int, block: nn.Module) -> list[PrunedMatrix] | None:
        nonlocal resumed
        if not stored(number).exists():
            return None
        state = load_state(stored(number))
        block.load_state_dict(state["weights"])
        resumed += 1
        return [PrunedMatrix(**row) for row in state["rows"]]

    sizes = _sizes(model)
    try:
        matrices = prune_blocks(model, ids, settings, progress=progress, store=store, restore=restore)
    except ValueError:
        if not list(place.glob("block-*")):  # a model that cannot be pruned leaves nothing behind
            shutil.rmtree(place)
        raise
    widths = {name: (sizes.get(name, size), size) for name, size in _sizes(model).items()}
    widths = {name: (before, after) for name, (before, after) in widths.items() if before != after}
    found = PrunedFolder(target, tuple(matrices), (len(ids), ids.shape[1]), resumed, widths)
    made = place / "model"
    shutil.rmtree(made, ignore_errors=True)
    model.save_pretrained(made)
    if tokenizer is not None:
        tokenizer.save_pretrained(made)
    write_json(made / REPORT, {"source": source.name, "settings": asdict(settings), "sparsity": found.sparsity,
                               "matrices": [asdict(row) for row in matrices]})  # fmt: skip
    made.rename(target)
    shutil.rmtree(place)
    return found


def check_pattern(block: nn.Module, pattern: tuple[int, int] | None, rows: list[PrunedMatrix]) -> None:
    """Check that every pruned matrix keeps at most N of each M neighbours along its inputs; else there is a bug."""
    if pattern is None:
        return
    n, m = pattern
    for row in rows:
        path = next(path for path, _ in block.named_modules() if path and row.name.endswith(f".{path}.weight"))
        weight = matrix(block.get_submodule(path))
        whole = weight.shape[1] - weight.shape[1] % m
        if int((weight[:, :whole].reshape(len(weight), -1, m) != 0).sum(2).max()) > n:
            raise RuntimeError(f"{row.name} does not have the pattern {n}:{m}.")


def _config(source: Path) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    wanted = "a folder that save_pretrained of the transformers library wrote (config.json and safetensors weights)"
    if not source.is_dir():
        raise ValueError(f"{source} is not a folder; give {wanted}.")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} holds no model: config.json is missing. Give {wanted}.")
    described = read_json(source / "config.json")
    if not isinstance(described, dict) or "model_type" not in described:
        raise ValueError(f"{source}/config.json names no model_type; give {wanted}.")
    if not list(source.glob("*.safetensors")):
        raise ValueError(
            f"{source} holds no safetensors weights; save_pretrained writes them, and pickles are not read."
        )
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ValueError(
            f"{source} is of the family {described['model_type']!r}, which this version of transformers does not know; "
            f"{FAMILIES} models work."
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{source} is of the family {described['model_type']!r}, which has no causal language model; {FAMILIES} "
            "models work, and shaver.prune and shaver.compact take other networks in Python."
        )
    return config


def _tokenizer(source: Path) -> Any:
    from transformers import AutoTokenizer

    if not any((source / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    return AutoTokenizer.from_pretrained(source, local_files_only=True)


def _model(source: Path) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        opened: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the weights in {source} cannot be read ({error}); the files are damaged.") from error
    model, loading = opened
    missing = sorted(loading["missing_keys"])
    if missing:
        raise ValueError(f"the weights in {source} lack {', '.join(missing[:3])}: the folder is incomplete.")
    return model.eval()


def _sizes(model: Any) -> dict[str, int]:
    """The whole numbers of the configuration, and the number of parameters."""
    entries = {name: value for name, value in model.config.to_dict().items() if type(value) is int}
    return entries | {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _check_vocabulary(config: Any, ids: Tensor, tokenizer: Any) -> None:
    size = getattr(config.get_text_config(), "vocab_size", None)
    most = int(ids.max())
    if isinstance(size, int) and most >= size:
        who = "" if tokenizer is None else f" The tokenizer in the folder has {len(tokenizer)} tokens."
        raise ValueError(
            f"the calibration text has the token {most}, but the model's vocabulary has {size} entries: the tokenizer "
            f"or the token ids belong to another model.{who}"
        )


def _identity(source: Path, ids: Tensor, settings: OneShot) -> dict[str, Any]:
    files = sorted(path for path in source.glob("*.safetensors"))
    sizes = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return {
        "shaver": __version__,
        "torch": torch.__version__,
        "settings": {**asdict(settings), "pattern": list(settings.pattern) if settings.pattern else None},
        "weights": sizes,
        "tokens": digest({"ids": ids}),
    }


def _prepare(place: Path, identity: dict[str, Any]) -> None:
    """Keep the blocks of an interrupted call with the same model, text and settings; remove those of another."""
    plan = place / "plan.json"
    if plan.exists() and read_json(plan) == identity:
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    write_json(plan, identity)
