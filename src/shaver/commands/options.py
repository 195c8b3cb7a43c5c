"""The options of all commands, with their help texts. Nothing here imports torch, so that ``--help`` starts at once."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shaver.lab.recipes.catalogue import get_recipe
from shaver.lab.recipes.recipe import Recipe
from shaver.lab.report import FORMATS, Format


def _reader(metavar: str, read: Callable[[str], Any], what: str, *, several: bool = False) -> Any:
    """A reader of an option, with an error that says what would work."""

    def parse(texts: list[str]) -> Any:
        values = []
        for text in texts:
            try:
                values.append(read(text))
            except ValueError:
                raise ValueError(f"{text!r} is not {what}.") from None
        return tuple(values) if several else values[0]

    return PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar=metavar,
        instance_from_str=parse,
        is_instance=lambda value: True,
        str_from_instance=lambda value: list(map(str, value or ())) if several else [str(value)],
    )


_WHOLE = _reader("NUMBER", int, "an integer")
_NUMBER = _reader("NUMBER", float, "a number")
_SHARE = _reader("SHARE", float, "a share such as 0.95")
_SHARES = _reader("SHARE ...", float, "a share such as 0.95", several=True)
_SIZES = _reader("SIZE ...", int, "an integer", several=True)
_SHARE_OR_AUTO = _reader(
    "SHARE|auto", lambda text: text if text == "auto" else float(text), "a share such as 0.95 or auto"
)
#: The scopes that remove whole units and whole layers of a language model.
UNITS, LAYERS = "units", "layers"


def _text(metavar: str, hint: str = "") -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


#: An option without a default of its own: the help does not say "default: None".
_NO_DEFAULT = tyro.conf.arg(help_behavior_hint="")
_RECIPES_OWN = tyro.conf.arg(help_behavior_hint="(default: the recipe's own)")
_NAMES = _text("NAME ...", "(default: the recipe's own)")
_SCOPE = _text("global|layer|N:M|units|layers", "(default: global, or layer with --calibration)")


@dataclass(frozen=True)
class DemoOptions:
    """Train, prune and measure two small networks on data sets that need no download.

    A fully connected network on breast cancer data and a small convolutional network on 8×8 digits are trained by
    MAP (ordinary training with weight decay) and by SpaM, pruned by every criterion to eleven sparsities, and measured
    on test data. The tables are printed; the results folder gets report.html (one page with everything), results.csv,
    a figure and the trained networks. It takes about two minutes on two cores.

    Attributes:
        out: Folder for the results. Networks that an earlier call finished there are not trained again.
        seed: First seed. The same seed gives the same numbers.
        repeats: Number of seeds to average over.
        epochs: Passes over the data, the same for both networks. Use 1 for a quick try.
        processes: Number of networks to train at the same time, with one thread each.
    """

    out: Path = Path("runs/demo")
    seed: Annotated[int, _WHOLE] = 0
    repeats: Annotated[int, _WHOLE] = 3
    epochs: Annotated[int | None, _WHOLE, _NO_DEFAULT] = None
    processes: Annotated[int, _WHOLE] = 2


@dataclass(frozen=True)
class RunOptions:
    """Run an experiment of the paper: train its networks, prune them by every criterion, measure and write tables.

    Example: `shaver run lenet-mnist --epochs 5 --seeds 1 --priors parameter unit`. A cell is one trained network,
    pruned in one way. Finished cells are not run again, interrupted ones (Ctrl-C, a crash) continue where they stopped,
    and a failed cell does not stop the others.

    Attributes:
        recipe: Name of the experiment; `shaver list` shows all of them.
        scale: cpu is a smaller version for two cores; reports state what was reduced. paper has the paper's
            hyper-parameters.
        tasks: Run only these pairs of network and data, such as lenet-mnist.
        methods: Training methods: map, spam, l1; for recipes that prune during training also vd and l0.
        priors: SpaM's priors: parameter, unit, layer, scalar.
        curvatures: SpaM's curvatures: diag or kron, from mc, ef or ggn, such as diag-mc or kron-ggn.
        seeds: Number of seeds.
        first_seed: The first seed.
        epochs: Passes over the training data.
        batch_size: Samples per step.
        optimizer: sgd, adam or adamw.
        lr: Learning rate.
        samples: Train on this many samples only.
        weights: Language models: a local folder with pretrained weights and their tokenizer, as save_pretrained
            writes it.
        vocabularies: Language models without weights: a folder with bert-base-uncased-vocab/vocab.txt or
            gpt2-bpe/encoder.json and gpt2-bpe/vocab.bpe.
        length: Language models: tokens per text.
        test_samples: Language models: measure on this many texts only.
        scored: Language models: number of training texts for SNIP, GraSP and the curvature of MAP networks.
        stages: Run only these ways to prune: posthoc, repaired, finetuned, online, structured, two-steps.
        criteria: How weights are ranked: opd, obd, magnitude, snip, grasp, synflow, wanda, random.
        sparsities: Shares of the weights to remove, such as 0.9 0.95.
        tuning_epochs: Epochs of fine-tuning, if the recipe fine-tunes.
        out: The run folder. Default: runs/RECIPE-SCALE. Trained networks are stored in networks/ beside it.
        processes: Number of cells to run at the same time, with one thread each. Default: the number of cores; for
            slurm, 100 jobs.
        engine: local runs cells as processes on this machine; slurm submits them as cluster jobs through submitit.
        slurm: Options of submitit's executor, such as timeout_min=240 slurm_partition=gpu mem_gb=8.
        any_code: Keep finished cells, and continue interrupted ones, even if another version of the code made them.
        show: Print the recipe with all its settings and exit.
    """

    recipe: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE")]
    scale: Literal["cpu", "paper"] = "cpu"
    tasks: Annotated[tuple[str, ...] | None, _NAMES] = None
    methods: Annotated[tuple[str, ...] | None, _NAMES] = None
    priors: Annotated[tuple[str, ...] | None, _NAMES] = None
    curvatures: Annotated[tuple[str, ...] | None, _NAMES] = None
    seeds: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    first_seed: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    epochs: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    batch_size: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    optimizer: Annotated[str | None, _text("NAME", "(default: the recipe's own)")] = None
    lr: Annotated[float | None, _NUMBER, _RECIPES_OWN] = None
    samples: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    weights: Annotated[Path | None, _text("FOLDER")] = None
    vocabularies: Annotated[Path | None, _text("FOLDER")] = None
    length: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    test_samples: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    scored: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    stages: Annotated[tuple[str, ...] | None, _NAMES] = None
    criteria: Annotated[tuple[str, ...] | None, _NAMES] = None
    sparsities: Annotated[tuple[float, ...] | None, _SHARES, _RECIPES_OWN] = None
    tuning_epochs: Annotated[int | None, _WHOLE, _RECIPES_OWN] = None
    out: Annotated[Path | None, _text("FOLDER")] = None
    processes: Annotated[int | None, _WHOLE, _NO_DEFAULT] = None
    engine: Literal["local", "slurm"] = "local"
    slurm: Annotated[tuple[str, ...], _text("KEY=VALUE ...")] = ()
    any_code: tyro.conf.FlagCreatePairsOff[bool] = False
    show: tyro.conf.FlagCreatePairsOff[bool] = False

    def chosen(self) -> Recipe:
        """The recipe with the user's changes."""
        others = ("recipe", "scale", "out", "processes", "engine", "slurm", "any_code", "show")
        changed = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in others}
        return get_recipe(self.recipe, self.scale).override(**changed)


@dataclass(frozen=True)
class ReportOptions:
    """Show the results of runs: tables (printed and as files), figures, and one HTML page.

    Example: `shaver report runs/lenet-mnist-cpu runs/fcn-mnist-cpu --out report`. The page is a
    single file that opens offline.

    Attributes:
        runs: Folders that `shaver run` or `shaver demo` wrote, all of the same scale.
        out: Folder for tables/, figures/ and report.html. Default: the run's own folder, or report/ for several runs.
        formats: Formats to write.
    """

    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="FOLDER ...")]
    out: Annotated[Path | None, _text("FOLDER")] = None
    formats: tuple[Format, ...] = FORMATS


@dataclass(frozen=True)
class ListOptions:
    """List the experiments: their place in the paper, run time on two cores, and progress.

    Attributes:
        runs: The folder that holds the run folders.
    """

    runs: Path = Path("runs")


@dataclass(frozen=True)
class NetworkOptions:
    """Which network, how much to remove, the data to measure it on, and where the result goes.

    Attributes:
        checkpoint: The trained network: a folder or checkpoint of shaver.fit, a network in a demo's models/ folder, a
            folder of shaver.save, a safetensors file, or a PyTorch file that holds nothing but a state dict.
        sparsity: The share to remove.
        data: Data to measure on, to repair with, and for criteria that need data: cancer, digits, mnist, fashion,
            cifar10, cifar100, or package.module:function. The function returns an object with .train, .test and
            optionally .valid, each a list of batches or a DataLoader. Without data, accuracy is not measured.
        out: Write the network and a report into this folder; shaver.load reads it. Without it nothing is written.
        criterion: How to rank weights: opd (the default), obd, magnitude, snip, grasp, synflow, wanda, random, or
            damage (the cost of a removal after repair). opd and obd use the posterior of a SpaM run, or estimate one
            from the data; snip, grasp, wanda and damage need data; synflow needs data or an input shape; magnitude and
            random need nothing.
        repair: Adjust the remaining weights to compensate for the removed ones. Needs data: reads about 2,048
            training inputs without their labels, the first ones or, if --samples is given, random ones.
        passes: After the repair, fit all layers together, with this many passes over the same inputs. Helps at high
            sparsity; 10 to 40 are useful.
        factory: How to build the network: package.module:function, a function without arguments, such as
            shaver.zoo:LeNet. Not needed for networks of shaver's zoo that shaver saved.
        input_shape: The shape of one input, such as 1 28 28. Without data, needed for FLOPs, latency and synflow.
        likelihood: Kind of output. Default: that of the training run, or classification.
        data_seed: The seed of shaver.data.load that split the data for training. With another seed, the test data may
            contain training samples.
        samples: Use only this many training samples for scores and curvature.
        prior_precision: δ for a posterior estimated after training. Default: one per layer, chosen by the evidence.
        seed: Seed of the random criterion and of the choice of samples.
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    sparsity: Annotated[float | Literal["auto"] | None, _SHARE_OR_AUTO, _NO_DEFAULT] = None
    data: Annotated[str | None, _text("NAME")] = None
    out: Annotated[Path | None, _text("FOLDER")] = None
    criterion: Annotated[str | None, _text("NAME")] = None
    repair: bool = True
    passes: Annotated[int, _WHOLE] = 0
    factory: Annotated[str | None, _text("MODULE:FUNCTION")] = None
    input_shape: Annotated[tuple[int, ...], _SIZES, _NO_DEFAULT] = ()
    likelihood: Annotated[Literal["classification", "regression"] | None, _text("classification|regression")] = None
    data_seed: Annotated[int, _WHOLE] = 0
    samples: Annotated[int | None, _WHOLE, _NO_DEFAULT] = None
    prior_precision: Annotated[float | None, _NUMBER, _NO_DEFAULT] = None
    seed: Annotated[int, _WHOLE] = 0

    def changed(self) -> dict[str, str]:
        """The options that differ from their defaults: field name → option as a user writes it."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return {name: f"--{name.replace('_', '-')}" for name in names}


@dataclass(frozen=True)
class PruneOptions(NetworkOptions):
    """Prune a trained network, measure it before and after, and write it to a smaller file.

    Example: `shaver prune runs/lenet --sparsity 0.95 --data mnist --out small`. The network can come from shaver.fit,
    from the demo (`shaver prune runs/demo/models/digits-spam-0.safetensors --sparsity auto --data digits`), or from
    anywhere else, as a state dict and a function that builds the network (`--factory`). The input file is never
    changed. A causal language model: `shaver prune MODEL_FOLDER --calibration text.txt --sparsity 0.5 --out sparse`.

    Attributes:
        sparsity: The share of weights to remove, such as 0.95; or auto to let the evidence decide how many.
        max_drop: Remove as many weights as possible while validation accuracy falls by at most this much (0.01 is one
            point). With --sparsity, never remove more than that. Needs samples that training did not see; see also
            the option --valid-fraction.
        scope: global ranks all weights together, layer removes the same share of each layer, 2:4 (or another N:M)
            keeps N of every M consecutive weights. For causal language models only: units removes feed-forward units
            and key-value heads, layers removes whole layers; both make the model smaller and faster.
        valid_fraction: The share of the training data that was held out from training; --max-drop measures on it. Give
            the valid_fraction that was passed to shaver.data.load. Not needed if your own data has .valid.
        cap: Highest share of weights to remove from any one layer.
        minimum: Each layer keeps at least this many weights.
        calibration: For a causal language model (CHECKPOINT is a folder of the transformers library): the text that the
            model reads while it is pruned block by block. It is a text file, a parquet file, or token ids in an .npy
            or .safetensors file. --sparsity then applies to each matrix, --criterion is opd, wanda or magnitude, and
            without --out the result goes into NAME-pruned.
        windows: Number of windows of the calibration text to read.
        length: Tokens per window.
        column: The column of a parquet file.
    """

    max_drop: Annotated[float | None, _SHARE, _NO_DEFAULT] = None
    scope: Annotated[str | None, _SCOPE] = None
    valid_fraction: Annotated[float | None, _SHARE, _NO_DEFAULT] = None
    cap: Annotated[float, _SHARE] = 1.0
    minimum: Annotated[int, _WHOLE] = 0
    calibration: Annotated[Path | None, _text("FILE")] = None
    windows: Annotated[int, _WHOLE] = 64
    length: Annotated[int, _WHOLE] = 512
    column: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"


@dataclass(frozen=True)
class CompactOptions(NetworkOptions):
    """Remove whole channels, hidden units and heads of a trained network. The result is smaller and faster.

    Example: `shaver compact runs/lenet --sparsity 0.8 --target flops --data mnist --finetune 5 --out small`. The
    command checks that the small network computes the same as the masked one. The input file is never changed.

    Attributes:
        sparsity: The share of the target to remove, such as 0.8. Without it, only dead units are removed, such as those
            pruned during training.
        criterion: How to rank units: by damage (the cost of a removal after repair), or by the sum over a unit's
            weights of opd, obd, magnitude, snip, grasp, synflow, wanda or random. Default: damage if the
            command repairs and there is no posterior, else opd. opd and obd use the posterior of a SpaM run, or
            estimate one from the data; snip, grasp, wanda and damage need data; synflow needs data or an input shape;
            magnitude and random need nothing.
        target: What the sparsity is a share of: units (channels, hidden units, heads), parameters, flops or measured
            latency.
        spread: uniform removes the same share of each layer; global ranks the units of all layers together.
        round_to: Round widths to multiples of this number; many processors are fastest with multiples of 8.
        min_units: Each layer keeps at least this many units.
        residual: Also remove channels of residual streams, which all blocks of a stage share.
        finetune: Train the small network for this many epochs afterwards, by MAP with a cosine schedule; needs data.
        lr: Learning rate of the fine-tuning.
        batch_size: Batch size of the fine-tuning.
    """

    sparsity: Annotated[float | None, _SHARE, _NO_DEFAULT] = None
    target: Literal["units", "parameters", "flops", "latency"] = "units"
    spread: Literal["uniform", "global"] = "uniform"
    round_to: Annotated[int, _WHOLE] = 1
    min_units: Annotated[int, _WHOLE] = 1
    residual: bool = False
    finetune: Annotated[int, _WHOLE] = 0
    lr: Annotated[float, _NUMBER] = 0.01
    batch_size: Annotated[int, _WHOLE] = 128


@dataclass(frozen=True)
class ExportOptions:
    """Write a network for other programs: `shaver export small --onnx`.

    Attributes:
        folder: The network: a folder that `shaver prune --out`, `shaver compact --out` or shaver.save wrote, or any
            other checkpoint that `shaver prune` accepts.
        onnx: Write an ONNX file and compare it with the network. Default path: network.onnx in the folder.
        input_shape: The shape of one input, such as 1 28 28. Not needed if `shaver prune` or `shaver compact` wrote the
            folder.
        factory: How to build the network: package.module:function. Not needed for networks of shaver's zoo.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    onnx: Annotated[tuple[Path, ...] | None, _text("[PATH]")] = None
    input_shape: Annotated[tuple[int, ...], _SIZES, _NO_DEFAULT] = ()
    factory: Annotated[str | None, _text("MODULE:FUNCTION")] = None
