"""Train a BERT with SpaM in the transformers Trainer, remove attention heads and hidden units, and prune weights."""

import argparse
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import shaver
from shaver.integrations.transformers import SpaMCallback

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=4)
epochs = options.parse_args().epochs

# Made-up sentences of 16 words. One word is a 7 or an 8, and the label says which. No download is needed.
generator = torch.Generator().manual_seed(0)
words = torch.randint(10, 30, (2200, 16), generator=generator)
labels = torch.randint(0, 2, (2200,), generator=generator)
words[torch.arange(2200), torch.randint(16, (2200,), generator=generator)] = 7 + labels
rows = [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]
train, test = rows[:2000], rows[2000:]

torch.manual_seed(0)
config = BertConfig(vocab_size=30, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertForSequenceClassification(config)
callback = SpaMCallback(settings=shaver.settings.Settings())  # from scratch; to fine-tune, leave settings out
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(), num_train_epochs=epochs, per_device_train_batch_size=32, learning_rate=1e-3,
    report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
)  # fmt: skip
Trainer(model, arguments, train_dataset=train, callbacks=[callback]).train()

batches = [
    {key: torch.stack([row[key] for row in test[i : i + 100]]) for key in ("input_ids", "labels")} for i in (0, 100)
]
x = {"input_ids": batches[0]["input_ids"][:2]}
print(f"dense             {shaver.measure.quality(model, batches).accuracy:.1%}")
small = shaver.compact(model, x, posterior=callback.posterior, sparsity=0.25)  # a smaller BERT, for save_pretrained
print(f"compact, −25 %    {shaver.measure.quality(small, batches).accuracy:.1%}")
shaver.prune(model, shaver.score(model, "opd", posterior=callback.posterior), sparsity=0.9)
print(f"90 % of weights   {shaver.measure.quality(model, batches).accuracy:.1%}")
