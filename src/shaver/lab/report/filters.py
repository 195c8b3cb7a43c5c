"""Pictures of a network: its filters, the widths of its layers, and the prior precisions that it learned."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shaver.criteria import prunable
from shaver.lab.report.canvas import CYCLE, drawing, save_figure
from shaver.structure import removal_record

_NEGATIVE, _ZERO, _POSITIVE = "#1f5fa8", "#ebebeb", "#c8381e"
#: Pixels on a side beyond which the gaps between kernels would be most of what is seen, and those beyond which kernels
#: are shown by their norm alone.
_DENSE, _LARGE = 400, 1200


def filter_bank(
    networks: Mapping[str, nn.Module],
    path: Path,
    *,
    layers: Sequence[str] | None = None,
    most: int = 8,
    suffixes: Sequence[str] = ("svg", "png"),
) -> list[Path]:
    """Draw the weights of one network in several states side by side, what was removed in black.

    Example:
        >>> filter_bank({"dense": model, "95 % of weights": pruned, "80 % of units": small}, Path("filters"))

    Kernels are tiles, a block of them for each layer; weight matrices are heat maps; both red above and blue below
    zero, on one scale per layer. The longer side lies across the page. A compact network is drawn at its original size,
    with what it lost in black.
    """
    weights = {title: weights_of(network) for title, network in networks.items()}
    chosen = _evenly(list(layers or next(iter(weights.values()))), most)
    pictures = {name: _same_size(name, {t: w.get(name) for t, w in weights.items()}) for name in chosen}
    images = {name: {title: tiles(w) for title, w in row.items()} for name, row in pictures.items()}
    heights = _heights([next(iter(row.values())) for row in images.values()])
    with drawing() as plt:
        from matplotlib.patches import Patch

        size = (3.7 * len(networks) + 0.2, sum(heights) + 0.32 * len(heights) + 1.1)
        figure, axes = plt.subplots(
            1 + len(chosen), len(networks), figsize=size, squeeze=False, height_ratios=[0.18, *heights],
            layout="constrained",
        )  # fmt: skip
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.02, hspace=0.0, wspace=0.02)
        for column, title in enumerate(networks):
            axes[0][column].axis("off")
            axes[0][column].text(0, 0, title, weight="bold", fontsize=11, va="bottom")
            for axis, name in zip(axes[1:, column], chosen, strict=True):
                _draw(plt, axis, images[name][title], _scale(pictures[name].values()))
                _caption(axis, name, pictures[name][title], labelled=column == 0)
        bar = figure.colorbar(
            _colours(plt, 1.0), ax=list(axes.flat), location="bottom", shrink=0.3, aspect=32, pad=0.012, anchor=(0, 0)
        )
        bar.outline.set_visible(False)
        bar.set_ticks([-1, 0, 1], labels=["negative", "0", "positive"])
        bar.ax.tick_params(length=0, labelsize=8)
        figure.legend(handles=[Patch(color="black", label="removed")], loc="lower right", frameon=False, fontsize=9)
        return save_figure(plt, path, suffixes)


def layer_bars(
    networks: Mapping[str, nn.Module], path: Path, *, suffixes: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """Draw how wide and how sparse each layer is in each of several states of one network.

    The width of a layer is the number of its outputs with a weight; its sparsity is the share of removed weights.
    """
    weights = {title: weights_of(network) for title, network in networks.items()}
    names = list(next(iter(weights.values())))
    with drawing() as plt:
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9.4, 0.34 * len(names) * len(networks) + 1.3), sharey=True, layout="constrained"
        )
        thick = 0.8 / len(networks)
        for i, title in enumerate(networks):
            colour = "#c9c9c9" if i == 0 else CYCLE[i - 1]
            places = [row + (i - (len(networks) - 1) / 2) * thick for row in range(len(names))]
            widths = [int((weights[title][name].flatten(1) != 0).any(1).sum()) for name in names]
            shares = [100 * width / len(weights[title][name]) for width, name in zip(widths, names, strict=True)]
            gone = [100 * (1 - float((weights[title][name] != 0).float().mean())) for name in names]
            for axis, values, labels in ((left, shares, map(str, widths)), (right, gone, map("{:.1f}".format, gone))):
                bars = axis.barh(places, values, 0.88 * thick, color=colour, label=title)
                axis.bar_label(bars, list(labels), padding=3, fontsize=8, color="#444444")
        left.set_title("outputs that are left: number, and share in %")
        right.set_title("weights removed, %")
        left.set_yticks(range(len(names)), [name.removesuffix(".weight") for name in names])
        left.invert_yaxis()
        for axis in (left, right):
            axis.set_xlim(0, 112)
            axis.set_xticks([0, 25, 50, 75, 100])
            axis.grid(axis="y", visible=False)
            axis.tick_params(axis="y", length=0)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=len(networks), frameon=False)
        return save_figure(plt, path, suffixes)


def precision_histograms(
    deltas: Mapping[str, Mapping[str, Tensor]],
    model: nn.Module,
    path: Path,
    *,
    suffixes: Sequence[str] = ("svg", "png"),
) -> list[Path]:
    """Draw the histogram of log₁₀ δ in each layer, one line for each prior or training.

    Example:
        >>> precision_histograms({"unit prior": history.posterior.delta()}, model, Path("precision"))
    """
    layers = prunable(model)
    logs = {
        title: {n: delta[n].detach().double().log10().expand(w.shape).flatten().cpu() for n, w in layers.items()}
        for title, delta in deltas.items()
    }
    everything = torch.cat([values for by_layer in logs.values() for values in by_layer.values()])
    low, high = float(everything.min()), float(everything.max())
    edges = torch.linspace(low - 0.25, high + 0.25, max(24, round(6 * (high - low))) + 1)
    with drawing() as plt:
        figure, axes = plt.subplots(
            len(layers), 1, figsize=(6.2, 0.78 * len(layers) + 1.1), sharex=True, squeeze=False, layout="constrained"
        )
        figure.get_layout_engine().set(h_pad=0.01, hspace=0.0)
        for axis, (name, weight) in zip(axes.flat, layers.items(), strict=True):
            for title, colour in zip(logs, CYCLE, strict=False):
                share = torch.histogram(logs[title][name], edges.double()).hist / weight.numel()
                axis.stairs(share.sqrt(), edges, fill=True, alpha=0.35, color=colour)
                axis.stairs(share.sqrt(), edges, color=colour, linewidth=1.2, label=title)
            axis.set_ylim(bottom=0)
            axis.set_yticks([])
            axis.spines["left"].set_visible(False)
            axis.grid(axis="y", visible=False)
            label = f"{name.removesuffix('.weight')}\n{weight.numel():,} weights"
            axis.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        axes.flat[-1].xaxis.set_major_locator(plt.MaxNLocator(integer=True))
        axes.flat[-1].set_xlabel("log₁₀ δ: small for weights that the data need, large for the others\n"
                                 "height: square root of the share of weights")  # fmt: skip
        if len(deltas) > 1:
            handles, labels = axes.flat[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper right", ncols=len(deltas), frameon=False, fontsize=8)
        return save_figure(plt, path, suffixes)


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    """Matrices and kernels by name, at the size that the network was built with: zero where units were removed."""
    plan = removal_record(network)
    found = {}
    for name, weight in prunable(network).items():
        values = weight.detach().cpu().float()
        if plan is not None and name in plan.kept:
            shape, kept = plan.shapes[name], plan.kept[name]
            places = [kept.get(dim, torch.arange(size)).cpu() for dim, size in enumerate(shape)]
            whole = torch.zeros(shape)
            whole[torch.meshgrid(*places, indexing="ij")] = values
            values = whole
        found[name] = values
    return found


def tiles(weight: Tensor) -> Tensor:
    """A weight as one image: kernels side by side with gaps of NaN between them, the longer side across.

    A matrix ``(outputs, inputs)`` is the image itself, or its transpose; so are kernels of one number. In large banks
    there are no gaps. Banks too large to see a kernel in, and kernels of three dimensions, are shown by the norm of
    each kernel.
    """
    if weight.ndim == 3:
        weight = weight.unsqueeze(2)  # a kernel over time is a row
    side = max(weight.shape[:2]) * max(weight.shape[2:], default=1)
    if weight.ndim > 2 and weight.shape[2:].numel() == 1:
        weight = weight.flatten(1)
    elif weight.ndim > 4 or (weight.ndim == 4 and side > _LARGE):
        weight = weight.flatten(2).norm(dim=2)
    if weight.ndim == 2:
        return weight if weight.shape[1] >= weight.shape[0] else weight.T
    if weight.shape[0] * weight.shape[3] > weight.shape[1] * weight.shape[2]:
        weight = weight.transpose(0, 1)
    rows, columns, height, width = weight.shape
    gap = 0 if side > _DENSE else 1
    image = torch.full((rows, columns, height + gap, width + gap), float("nan"))
    image[:, :, :height, :width] = weight
    whole = image.permute(0, 2, 1, 3).reshape(rows * (height + gap), columns * (width + gap))
    return whole[: len(whole) - gap, : whole.shape[1] - gap]


def _evenly(names: list[str], most: int) -> list[str]:
    if len(names) <= most:
        return names
    return [names[round(i * (len(names) - 1) / (most - 1))] for i in range(most)]


def _same_size(name: str, weights: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    found = {title: weight for title, weight in weights.items() if weight is not None}
    if len(found) < len(weights) or len({weight.shape for weight in found.values()}) > 1:
        shapes = {title: "none" if weight is None else tuple(weight.shape) for title, weight in weights.items()}
        raise ValueError(f"the networks are not states of one: {name!r} has shapes {shapes}.")
    return found


def _heights(images: Sequence[Tensor]) -> list[float]:
    """Inches, for images that are 3.6 wide: square pixels, as far as that leaves a readable page."""
    for highest in (3.6, 2.4, 1.6):
        heights = [min(highest, max(0.3, 3.6 * image.shape[0] / image.shape[1])) for image in images]
        if sum(heights) < 12:
            break
    return heights


def _scale(weights: Any) -> float:
    """What the strongest colour stands for; a few outliers may be stronger."""
    values = torch.cat([w[w != 0].abs() for w in weights]).sort().values
    return float(values[min(len(values) - 1, round(0.98 * len(values)))]) if len(values) else 1.0


def _colours(plt: Any, scale: float) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    colours = LinearSegmentedColormap.from_list("weights", [_NEGATIVE, _ZERO, _POSITIVE])
    return plt.cm.ScalarMappable(Normalize(-scale, scale, clip=True), colours)


def _draw(plt: Any, axis: Any, image: Tensor, scale: float) -> None:
    pixels = _colours(plt, scale).to_rgba(image.nan_to_num(0.0).numpy())
    pixels[(image == 0).numpy()] = (0, 0, 0, 1)
    pixels[image.isnan().numpy()] = (1, 1, 1, 1)
    axis.imshow(pixels, aspect="auto", interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _caption(axis: Any, name: str, weight: Tensor, *, labelled: bool) -> None:
    text = f"{int((weight != 0).sum()):,} of {weight.numel():,} left"
    if labelled:
        text = f"{name.removesuffix('.weight')}   {' × '.join(map(str, weight.shape))}"
    axis.set_title(text, fontsize=8, pad=3, weight="bold" if labelled else "normal", color="#333333")
