"""One training run: its state, its steps and epochs, and its checkpoints."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shaver.batches import batch_size_of
from shaver.files import checkpoints
from shaver.likelihoods import Classification, get_likelihood
from shaver.measure.evaluating import evaluating
from shaver.pruning import Hold, Masks, OnlinePruner, Schedule
from shaver.repairing import recalibrate
from shaver.training import divergence, identity
from shaver.training.divergence import Diverged
from shaver.training.history import History
from shaver.training.lasso import l1_norm, soft_threshold
from shaver.training.optimizers import build_optimizer, scheduled_lr
from shaver.training.options import AMP_TYPES, Options
from shaver.training.progress import TrainingProgress
from shaver.training.randomness import random_state, set_random_state
from shaver.training.sources import Source, chunks, to_device
from shaver.training.spreading import Spread, join
from shaver.zoo.network import Network

if TYPE_CHECKING:
    from shaver.spam import SpaM

#: Batches from which BatchNorm statistics are measured again at the end of SpaM and of pruning during training.
NORM_BATCHES = 100


class Run:
    """The state of a run, and the methods that train an epoch, take a step and write a checkpoint.

    ``settings`` has the arguments of ``fit`` that change the numbers: method, epochs, lr, batch_size, seed.
    """

    spam: "SpaM | None" = None
    hold: Hold | None = None
    pruner: OnlinePruner | None = None
    folder: Path | None = None

    def __init__(
        self, model: nn.Module, train: Source, valid: Source | None, settings: Mapping[str, Any], options: Options
    ) -> None:
        self.model, self.train, self.valid, self.settings, self.options = model, train, valid, settings, options
        self.method, self.epochs, self.seed = settings["method"], settings["epochs"], settings["seed"]
        self.likelihood = get_likelihood(options.likelihood)
        self.l1 = options.l1 if self.method == "l1" else 0.0
        decay = options.weight_decay
        if self.method == "spam":
            decay = None  # its prior takes the place of the optimizer's weight decay
        elif decay is None and self.method == "map" and isinstance(options.optimizer, str):
            decay = 1 / train.data_size
        self.optimizer = build_optimizer(options.optimizer, model, settings["lr"], decay)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(self.device.type) if options.amp == "float16" else None
        self.spread = Spread(join(self.device), model)
        self.steps_per_epoch = -(-train.count // options.accumulate)
        self.history, self.epoch, self.step, self.finished = History(), 0, 0, False
        self.plain_loss = options.accumulate == 1 and options.amp != "float16"  # a mean over the batch, not scaled
        self.identity: dict[str, Any] = {}
        self._checked = False
        self._outputs: Tensor | None = None

    def prepare(
        self, spam: Mapping[str, Any], masks: Masks | None, online: Schedule | None, folder: Path | None
    ) -> None:
        """Attach SpaM and the pruner, then restore a checkpoint if there is one."""
        try:
            if self.method == "spam":
                from shaver.training.learner import attach_spam  # MAP and L1 need none of it

                self.spam = attach_spam(self, spam)
            found = None
            if folder is not None:
                self.folder = folder
                self.identity = self._identity(spam, masks, online)
                found = self._open(folder)
            if masks is not None:  # only now, because it changes weights
                self.hold = masks.hold(self.model, self.optimizer)
            elif online is not None:
                self.pruner = OnlinePruner(self.model, self.optimizer, online, self.spam)
            if found is not None:
                self._restore(found)
        except BaseException:
            self.release()
            raise

    @property
    def masks(self) -> Masks | None:
        """The current masks: those that are held, or those of the pruner."""
        holder = self.hold if self.hold is not None else self.pruner
        return None if holder is None else holder.masks

    def _identity(self, spam: Mapping[str, Any], masks: Masks | None, online: Schedule | None) -> dict[str, Any]:
        """The identity of the run, by which a checkpoint is accepted or refused."""
        described: dict[str, Any] = identity.describe(
            {
                **self.settings,
                "spam": dict(spam),
                "online": None if online is None else vars(online),
                **self.options.settled(),
                "l1": self.l1 or None,
            }
        )
        return described | {
            "optimizer": identity.describe_optimizer(self.options.optimizer, self.optimizer),
            "likelihood": identity.describe(self.options.likelihood),
            "noise": dict(self.likelihood.state()),
            "teacher": None if (guide := self.options.teacher) is None else identity.fingerprint(guide.state_dict()),
            "masks": None if masks is None else f"{masks.kept} of {masks.total} weights, {identity.fingerprint(masks)}",
            identity.DATA: self.train.description,
            identity.VALID: None if self.valid is None else self.valid.description,
            "network": identity.shapes_of(self.model),
            identity.START: identity.fingerprint(self.model.state_dict()),
        }

    def _open(self, folder: Path) -> dict[str, Any] | None:
        """Prepare the folder. Returns the newest state in it, if there is one and it belongs to this run."""
        if self.spread.first:
            folder.mkdir(parents=True, exist_ok=True)
            checkpoints.clear(folder, checkpoints=not self.options.resume)
        self.spread.ranks.wait()
        found = checkpoints.load_newest(folder)
        self.spread.check_same_epoch(0 if found is None else int(found[1]["epoch"]), folder)
        if found is None:
            return None
        path, state = found
        asked = dict(self.identity)
        if self.options.resume == "anyway":
            asked |= {key: state["config"].get(key) for key in (identity.START, identity.DATA, identity.VALID)}
        if asked[identity.START] == identity.fingerprint(state["model"]):
            asked |= {key: state["config"].get(key) for key in (identity.START, "noise")}  # it is there already
        identity.check_same(path, state["config"], asked)
        self.identity = dict(state["config"])
        return state

    def train_epoch(self, bar: TrainingProgress) -> dict[str, Any]:
        """Train one epoch, then validate, record the row and write the checkpoint."""
        began = time.perf_counter()
        self.model.train()
        total, seen, lr = 0.0, 0, 0.0
        groups = chunks(self.spread.own(self.train.epoch(self.epoch)), self.options.accumulate)
        for group in self.spread.draws(groups, self.seed, self.epoch):
            lr = self._set_lr()
            loss, size = self._take_step(group)
            total, seen = total + loss, seen + size
            bar.add_batches(len(group), total / seen)
        if not seen:
            raise ValueError(f"train had no batches in epoch {self.epoch + 1}; it had {self.train.count} before.")
        self._checked = True
        self.spread.even_buffers()
        if self.spam is not None:
            own = self.spread.own(self.train.epoch(self.epoch))
            again = (to_device(batch, self.device) for batch in own if batch is not None)
            with self._naming_divergence():
                self.spam.end_epoch(again, forward=self.options.forward, targets=self.options.targets)
        if self.pruner is not None:
            self.pruner.after_epoch(min(1.0, (self.epoch + 1) / self.epochs))
        if (self.spam is not None or self.pruner is not None) and self.epoch + 1 == self.epochs:
            # The prior and the masks have moved the weights since BatchNorm averaged its statistics.
            again = (to_device(batch, self.device) for batch in self.train.epoch(self.epoch))
            recalibrate(self.model, islice(again, NORM_BATCHES), forward=self.options.forward)
            self.spread.even_buffers()  # of sampled data each rank has its own
        if found := divergence.explain_parameters(self.model):
            raise self._diverged(found)
        row: dict[str, Any] = {"epoch": self.epoch + 1, "loss": total / seen, "lr": lr}
        if self.l1:
            row["penalty"] = self.l1 * float(l1_norm(self.model))
        if self.valid is not None:
            row |= self._validate(self.valid)
        if self.spam is not None:
            with self._naming_divergence():
                row |= self.spam.statistics()
        if self.hold is not None or self.pruner is not None:
            row["sparsity"] = 0.0 if self.masks is None else self.masks.sparsity
        if self._outputs is not None and divergence.ignores_input(self._outputs):
            row["dead"] = True
        row["seconds"] = time.perf_counter() - began
        self.history.append(row)
        self.epoch += 1
        self.finished = self.epoch >= self.epochs or self._evidence_stalled()
        if self.folder is not None and self.spread.first:
            checkpoints.save_checkpoint(self.folder, self.epoch, self._state())
            self.history.to_csv(self.folder / "history.csv")
        bar.end_epoch(row)
        return row

    def _take_step(self, group: list[Any]) -> tuple[float, int]:
        """One optimizer step on one or more batches; returns the summed loss and the number of samples."""
        self.optimizer.zero_grad(set_to_none=True)
        own = [batch for batch in group if batch is not None]
        size, total, error = sum(batch_size_of(batch) for batch in own), 0.0, None
        try:
            total = self._differentiate(own, size)
        except Exception as raised:  # the other ranks must know before this rank stops
            error = raised
        total, size = self.spread.gather(total, size, error)
        self.step += 1
        self._apply()
        return total, size

    def _differentiate(self, group: list[Any], size: int) -> float:
        """Gradients of the mean loss of ``size`` samples; returns the summed loss."""
        total = 0.0
        for batch in group:
            batch = to_device(batch, self.device)
            with self._autocast():
                outputs = self.options.forward(self.model, batch)
                expected = self.options.targets(batch)
                if not self._checked:  # only in the first epoch
                    self.likelihood.check(outputs, expected)
                loss = self._loss(outputs, expected, size)
                if self.options.teacher is not None:
                    loss = (loss + self._divergence(self.options.teacher, batch, outputs, expected) / size) / 2
            value = float(loss.detach())
            if not math.isfinite(value):
                raise self._diverged(divergence.explain_loss(self.model, batch, outputs, value), ahead=1)
            total += value * size
            self._outputs = outputs.detach() if len(outputs) > 1 else self._outputs
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return total

    def _loss(self, outputs: Tensor, expected: Tensor, size: int) -> Tensor:
        """This batch's share of the mean negative log likelihood over the ``size`` samples of a step."""
        if self.spam is not None and self.plain_loss:
            return self.spam.loss(outputs, expected)  # the same number, which SpaM records
        return self.likelihood.nll(outputs, expected).sum() / size

    def _divergence(self, teacher: nn.Module, batch: Any, outputs: Tensor, expected: Tensor) -> Tensor:
        """The sum over a batch of the divergence from the teacher's outputs."""
        with evaluating(teacher):
            aim = self.options.forward(teacher, batch)
        if aim.shape != outputs.shape:
            raise ValueError(
                f"the teacher's outputs have shape {tuple(aim.shape)}, the network's {tuple(outputs.shape)}: a teacher "
                "has the same outputs."
            )
        return self.likelihood.divergence(outputs, aim, expected).sum()

    def _apply(self) -> None:
        """Check and clip the gradient, then take the step of the method."""
        if self.scaler is not None and self.options.clip is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.scaler is None:  # with a scaler, infinite gradients are normal, and it skips the step
            norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            if not math.isfinite(float(norm)):
                found = divergence.explain_gradient(self.model)
                raise self._diverged(found or f"the norm of the gradient is {float(norm)}")
        if self.options.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.options.clip)
        if self.spam is not None:
            with self._naming_divergence():
                self.spam.step(self.optimizer, scaler=self.scaler)
        elif self.scaler is not None:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        if self.l1:
            soft_threshold(self.optimizer, self.l1)
        if self.pruner is not None:
            self.pruner.after_step(min(1.0, self.step / (self.epochs * self.steps_per_epoch)))

    def release(self) -> None:
        """Remove gradients and hooks, and restore the learning rate of a user's own optimizer."""
        if self.spam is not None:
            self.spam.close()
        for holder in (self.hold, self.pruner):
            if holder is not None:
                holder.release()
        self.optimizer.zero_grad(set_to_none=True)
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base

    def _set_lr(self) -> float:
        share = self.step / max(1, self.epochs * self.steps_per_epoch - 1)  # the last step has the final rate
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = scheduled_lr(self.options.schedule, base, share)
        return float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def _validate(self, source: Source) -> dict[str, float]:
        self.model.eval()
        loss, correct, labels, seen, culprit = 0.0, 0, 0, 0, None
        for batch in self.spread.own(source.epoch(0)):
            if batch is None:
                continue
            batch = to_device(batch, self.device)
            outputs, expected = self.options.forward(self.model, batch), self.options.targets(batch)
            if not self.history:  # only in the first validation
                self.likelihood.check(outputs, expected)
            own = float(self.likelihood.nll(outputs, expected).sum())
            if not math.isfinite(own):
                culprit = divergence.explain_loss(self.model, batch, outputs, own, "the validation loss")
                break
            loss += own
            seen += batch_size_of(batch)
            if isinstance(self.likelihood, Classification):
                counted = expected != self.likelihood.ignore_index
                correct += int((outputs.argmax(self.likelihood.class_dim) == expected)[counted].sum())
                labels += int(counted.sum())
        loss, *counts = self.spread.ranks.total(loss, correct, labels, seen, culprit is not None)
        correct, labels, seen, failed = map(int, counts)
        if failed:  # on all ranks, so that none waits for another
            raise self._diverged(culprit or "the validation loss is not finite on another rank")
        return {"valid_loss": loss / seen} | ({"valid_accuracy": correct / labels} if labels else {})

    def _evidence_stalled(self) -> bool:
        patience = self.options.early_stopping
        evidences = [row["log_evidence"] for row in self.history if row.get("log_evidence") is not None]
        if patience is None or len(evidences) <= patience:
            return False
        return bool(max(evidences[-patience:]) <= max(evidences[:-patience]))

    @contextmanager
    def _naming_divergence(self) -> Iterator[None]:
        """Report precisions or an evidence that are not finite as divergence, like a NaN in the loss."""
        try:
            yield
        except FloatingPointError as error:
            raise self._diverged(str(error).rstrip(".")) from error

    def _diverged(self, culprit: str, ahead: int = 0) -> Diverged:
        if self.folder is None:
            rest = "no folder was given, so there is no checkpoint."
        elif not self.epoch:
            rest = "no epoch was completed."
        else:
            rest = f"the state after epoch {self.epoch} is in {self.folder}."
        advice = f"A smaller lr, clip=1.0 or cleaner data usually help; {rest}"
        return Diverged(self.epoch + 1, self.step + ahead, culprit, advice)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.options.amp is None:
            return nullcontext()
        return torch.autocast(self.device.type, AMP_TYPES[self.options.amp])

    def _state(self) -> dict[str, Any]:
        return {
            "config": self.identity,
            "network": self.model.arguments if isinstance(self.model, Network) else None,
            "epoch": self.epoch,
            "step": self.step,
            "finished": self.finished,
            "history": list(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "base_lrs": self.base_lrs,
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "spam": None if self.spam is None else self.spam.state_dict(),
            "pruning": None if self.pruner is None else self.pruner.state_dict(),
            "likelihood": self.likelihood.state(),
            "random": random_state(),
            "generators": [generator.get_state() for generator in self.train.generators()],
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.epoch, self.step, self.finished = state["epoch"], state["step"], state["finished"]
        self.history.extend(state["history"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.base_lrs = state["base_lrs"]
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.spam is not None:
            self.spam.load_state_dict(state["spam"])
        if self.pruner is not None:
            self.pruner.load_state_dict(state["pruning"])
        if self.hold is not None:
            self.hold.apply_()
        self.likelihood.load_state(state["likelihood"])
        set_random_state(state["random"])
        for generator, saved in zip(self.train.generators(), state["generators"], strict=True):
            generator.set_state(saved)
