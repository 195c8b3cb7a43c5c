"""SpaM in the transformers library's Trainer, and with accelerate: the same numbers as in a loop of one's own."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from shaver.integrations.transformers import KEY, SpaMCallback, check_tokenizer
from shaver.settings import FINE_TUNING
from shaver.spam import SpaM
from tests.curvature.languages import CAUSAL, CLASSIFIERS, build, tokens

N, BATCH, EPOCHS, WARMUP, LR = 16, 4, 4, 2, 1e-2
QUICK: dict[str, Any] = {"every": 2, "update": 2, "decay": 0.8, "burn_in": 0.0}


class InOrder(T.Trainer):
    """A Trainer that does not shuffle, so that a loop can see the same batches."""

    def _get_train_sampler(self, *args: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def network(causal: bool, dtype: torch.dtype = torch.float32) -> nn.Module:
    return build(CAUSAL["gpt2"] if causal else CLASSIFIERS["bert"]).to(dtype)


def rows(causal: bool) -> list[dict[str, Tensor]]:
    batch = tokens(N, causal)
    return [{key: value[n] for key, value in batch.items()} for n in range(N)]


def trained(
    folder: Path,
    causal: bool,
    callback: SpaMCallback | None,
    resume: str | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[nn.Module, T.Trainer]:
    model = network(causal, dtype)
    known: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": EPOCHS, "save_strategy": "no"}
    arguments = T.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        learning_rate=LR,
        warmup_steps=WARMUP,
        lr_scheduler_type="linear",
        logging_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **(known | options),
    )
    callbacks = [] if callback is None else [callback]
    trainer = InOrder(model, arguments, train_dataset=rows(causal), callbacks=callbacks)
    trainer.remove_callback(T.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer


def in_a_loop(causal: bool, accumulation: int, **options: Any) -> tuple[nn.Module, SpaM]:
    """What the Trainer does, written out, with the README's line in place of ``optimizer.step()``."""
    model = network(causal, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    steps = EPOCHS * (N // BATCH // accumulation)
    schedule = T.get_linear_schedule_with_warmup(optimizer, WARMUP, steps)
    spam = SpaM(model, N, total_steps=steps, settings=FINE_TUNING, **QUICK, **options)
    collate = T.default_data_collator
    for _ in range(EPOCHS):
        loader = iter(DataLoader(rows(causal), BATCH, collate_fn=collate))
        while group := list(itertools.islice(loader, accumulation)):
            # the Trainer divides by all labels of a step, among them the first of a row, which nothing predicts
            counted = sum(int((batch["labels"] != -100).sum()) for batch in group)
            for batch in group:
                if causal:
                    model(**batch, num_items_in_batch=counted).loss.backward()
                else:  # the Trainer leaves dividing to models with **kwargs; BERT's does not, so its gradients add up
                    model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            spam.step(optimizer)
            schedule.step()
            optimizer.zero_grad()
    return model, spam


def determined(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the biases of attention's keys: softmax does not see them, so that rounding alone moves them."""
    found = {name: value for name, value in values.items() if not name.endswith("key.bias")}
    for name in [name for name in found if name.endswith("c_attn.bias")]:  # queries, keys and values in one
        query, _, value = found.pop(name).chunk(3)
        found |= {f"{name}, queries": query, f"{name}, values": value}
    assert found.keys() != values.keys()
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float) -> None:
    assert a.keys() == b.keys()
    for name, value in b.items():
        atol = rtol * float(value.detach().abs().max())
        torch.testing.assert_close(a[name], value, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize(("causal", "accumulation"), [(True, 2), (False, 1), (False, 2)])
def test_the_trainer_gives_what_a_loop_gives(tmp_path: Path, causal: bool, accumulation: int, source: str):
    callback = SpaMCallback(source=source, **QUICK)
    # In float64: Adam divides by the gradient's size, so that float32's rounding would grow to another training.
    precise: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "dtype": torch.float64}
    model, trainer = trained(tmp_path, causal, callback, **precise)
    expected, spam = in_a_loop(causal, accumulation, source=source)
    assert callback.spam is not None
    assert callback.spam.updates == spam.updates > 1
    assert callback.spam.steps == trainer.state.global_step == spam.steps
    assert_same(determined(dict(model.named_parameters())), determined(dict(expected.named_parameters())), 1e-6)
    assert_same(determined(callback.posterior.precision()), determined(spam.posterior.precision()), 1e-5)
    plain, _ = trained(tmp_path, causal, None, **precise)
    apart = [float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]
    assert max(apart) > 1e-3  # the prior did something


@pytest.mark.parametrize("causal", [True, False])
def test_a_checkpoint_of_the_trainer_resumes_to_the_same_numbers(tmp_path: Path, causal: bool):
    options = {"save_strategy": "steps", "save_steps": 3}
    first = SpaMCallback(**QUICK)
    model, _ = trained(tmp_path, causal, first, **options)
    second = SpaMCallback(**QUICK)
    resumed, trainer = trained(tmp_path, causal, second, str(tmp_path / "checkpoint-3"), **options)
    assert first.spam is not None
    assert second.spam is not None
    assert second.spam.updates == first.spam.updates > 1
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()), 0)
    assert_same(second.spam.prior.delta(), first.spam.prior.delta(), 0)
    assert KEY not in trainer.optimizer.param_groups[0]


@pytest.mark.parametrize("causal", [True, False])
def test_mixed_precision_learns_nearly_the_same(tmp_path: Path, causal: bool):
    exact, half = (SpaMCallback(source="ef", **QUICK) for _ in range(2))
    trained(tmp_path, causal, exact)
    trained(tmp_path, causal, half, bf16=True)
    assert exact.spam is not None
    assert half.spam is not None
    assert half.spam.updates == exact.spam.updates
    assert not [rule for rule in half.spam.curvature.rules.values() if "generic" in rule]
    found, expected = (c.spam.statistics()["effective_parameters"] for c in (half, exact))
    assert found == pytest.approx(expected, rel=0.2)


def test_training_again_goes_on_and_the_log_tells_of_it(tmp_path: Path):
    told: list[tuple[dict[str, float], int]] = []

    class Tracker:
        def log(self, row: dict[str, float], step: int) -> None:
            told.append((row, step))

    callback = SpaMCallback(logger=Tracker(), **QUICK)
    _, trainer = trained(tmp_path, False, callback, num_train_epochs=1)
    assert callback.spam is not None
    steps = callback.spam.steps
    assert [(sorted(row)[0], step) for row, step in told] == [("spam/effective_parameters", 2)]
    logged = [entry for entry in trainer.state.log_history if "spam/log_evidence" in entry]
    assert [entry["step"] for entry in logged] == [2]
    assert not callback.spam.model._forward_hooks  # taken off at the end
    trainer.train()
    assert callback.spam.steps == 2 * steps


def test_accelerate_needs_one_line_and_its_checkpoints_too(tmp_path: Path):
    """spam.attach(optimizer), and accelerator.register_for_checkpointing(spam)."""

    def run(stop: int | None = None, resume: bool = False) -> tuple[nn.Module, SpaM]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = network(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        loader = DataLoader(rows(False), BATCH, collate_fn=T.default_data_collator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        spam = SpaM(model, N, **QUICK)
        spam.attach(optimizer)
        accelerator.register_for_checkpointing(spam)
        if resume:
            accelerator.load_state(str(tmp_path))
        for epoch in range(2 if resume else 0, 4):
            if epoch == stop:
                accelerator.save_state(str(tmp_path))
                break
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
        return model, spam

    model, spam = run()
    assert spam.steps == 8  # the wrapper steps after every second batch only
    assert spam.updates == 4
    run(stop=2)
    resumed, again = run(resume=True)
    assert again.steps == spam.steps
    assert_same(dict(resumed.named_parameters()), dict(model.named_parameters()), 0)
    assert_same(again.prior.delta(), spam.prior.delta(), 0)


class Words:
    """As much of a tokenizer as the check looks at."""

    def __init__(self, size: int, pad: int | None = 0) -> None:
        self.size, self.pad_token_id = size, pad

    def __len__(self) -> int:
        return self.size


def test_a_tokenizer_that_does_not_fit_is_named():
    model = network(True)
    check_tokenizer(model, Words(13))
    with pytest.raises(ValueError, match=r"20 tokens.*embedding has 13 rows.*resize_token_embeddings\(20"):
        check_tokenizer(model, Words(20))
    with pytest.raises(ValueError, match=r"no pad token.*tokenizer\.pad_token = tokenizer\.eos_token"):
        check_tokenizer(model, Words(13, pad=None))
    classifier = build(CLASSIFIERS["gpt2"])
    classifier.config.pad_token_id = None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"cannot find the last token of a sequence.*model\.config\.pad_token_id = 0"):
        check_tokenizer(classifier, Words(13))


def test_what_the_callback_cannot_do_it_says():
    with pytest.raises(ValueError, match="learns online"):
        SpaMCallback(structure="kron")
    with pytest.raises(RuntimeError, match="has not been used in a training"):
        _ = SpaMCallback().posterior
