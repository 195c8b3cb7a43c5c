"""Networks for the tests of compaction, one for each way in which units are coupled; random in every number."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver import zoo
from shaver.structure import Groups, find_groups

Case = tuple[nn.Module, Any]


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and statistic random, so that nothing is equal only because it is zero or one; float64."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise / max(1.0, parameter[0].numel() ** 0.5 if parameter.ndim > 1 else 1.0))
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator, dtype=torch.float64)
            if name.endswith("running_mean"):
                buffer.copy_(0.4 * noise - 0.2)
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + noise)
    return model


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


def channels_with_batch_norm() -> Case:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    ), numbers(4, 2, 6, 6)  # fmt: skip


def flattened_maps() -> Case:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5), nn.Tanh(), nn.Linear(5, 3)
    ), numbers(4, 1, 6, 6)


def depthwise() -> Case:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 3, 1), nn.Flatten(), nn.Linear(3 * 25, 3),
    ), numbers(4, 3, 5, 5)  # fmt: skip


def grouped() -> Case:
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, groups=4), nn.ReLU(), nn.Conv2d(12, 3, 1), nn.Flatten(),
        nn.Linear(3 * 9, 3),
    ), numbers(4, 3, 5, 5)  # fmt: skip


def one_dimension() -> Case:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.GELU(), nn.ConvTranspose1d(8, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 7, 3),
    ), numbers(4, 3, 7)  # fmt: skip


class GroupedQueries(nn.Module):
    """Attention with two key heads for four query heads, as a user might write it."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 6
        self.q, self.k, self.v = nn.Linear(10, 24), nn.Linear(10, 12), nn.Linear(10, 12)
        self.o, self.head = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.head((x + self.o(mixed)).mean(1))
        return out


class Encoder(nn.Module):
    """PyTorch's own encoder, with its MultiheadAttention."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, **options)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).mean(1))
        return out


def encoder() -> Case:
    return Encoder(), numbers(4, 5, 24)


def of_zoo(name: str, *shape: int, **options: Any) -> Callable[[], Case]:
    return lambda: (zoo.build(name, seed=0, **options), numbers(*shape))


def of_transformers(name: str) -> Callable[[], Case]:
    def build() -> Case:
        import transformers as hub

        sizes: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 16, "vocab_size": 50}
        plain: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 3, "intermediate_size": 20}
        ids = {"input_ids": tokens(3, 7)}
        if name == "bert":
            return hub.BertForSequenceClassification(hub.BertConfig(**sizes, **plain)), ids
        if name == "distilbert":
            config = hub.DistilBertConfig(vocab_size=50, dim=24, n_layers=2, n_heads=3, hidden_dim=20)
            return hub.DistilBertForSequenceClassification(config), ids
        if name == "gpt2":
            ends = {"bos_token_id": 0, "eos_token_id": 0}
            config = hub.GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=3, n_positions=16, **ends)
            return hub.GPT2LMHeadModel(config), ids
        if name == "llama":
            wide = plain | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
            return hub.LlamaForCausalLM(hub.LlamaConfig(**sizes, **wide)), ids
        assert name == "vit"
        vit = hub.ViTConfig(num_hidden_layers=2, image_size=8, patch_size=4, **plain)
        return hub.ViTForImageClassification(vit), {"pixel_values": numbers(3, 3, 8, 8)}

    return build


CASES: dict[str, Callable[[], Case]] = {
    "channels with BatchNorm": channels_with_batch_norm,
    "flattened maps": flattened_maps,
    "depthwise": depthwise,
    "grouped": grouped,
    "one dimension": one_dimension,
    "MultiheadAttention": encoder,
    "grouped queries": lambda: (GroupedQueries(), numbers(4, 5, 10)),
    "fcn": of_zoo("fcn", 4, 784, hidden=[12, 9]),
    "lenet": of_zoo("lenet", 4, 1, 28, 28),
    "digits_cnn": of_zoo("digits_cnn", 4, 1, 8, 8),
    "mixer": of_zoo("mixer", 4, 1, 28, 28, dim=16, token_dim=10, channel_dim=12),
    "vit": of_zoo("vit", 4, 1, 28, 28, dim=16, heads=4, mlp_dim=12),
    "resnet18": of_zoo("resnet18", 4, 3, 8, 8, planes=4),
    "resnet18_fixup": of_zoo("resnet18_fixup", 4, 3, 8, 8, planes=4),
    "wrn16": of_zoo("wrn16", 4, 3, 8, 8, widen=1),
    "wrn16_fixup": of_zoo("wrn16_fixup", 4, 3, 8, 8, widen=1),
    **{f"transformers {name}": of_transformers(name) for name in ("bert", "distilbert", "gpt2", "llama", "vit")},
}

_GROUPS: dict[str, Groups] = {}


def case(name: str, seed: int = 0) -> tuple[nn.Module, Groups, Any]:
    """A network, its groups and an example; the groups are found once."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, example = CASES[name]()
    model = shaken(model, seed)
    if name not in _GROUPS:
        _GROUPS[name] = find_groups(model, example)
    return model, _GROUPS[name], example


def draw(groups: Groups, seed: int, share: float = 0.5) -> dict[str, Tensor]:
    """Some units of each group, at least one of each and not all of any that has two."""
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for name, group in groups.items():
        keep = torch.rand(group.units, generator=generator) < share
        keep[torch.randint(group.units, (1,), generator=generator)] = True
        if group.units > 1 and bool(keep.all()):
            keep[0] = False
        kept[name] = keep
    return kept


def outputs(model: nn.Module, example: Any) -> Tensor:
    with torch.no_grad():
        result = model(**example) if isinstance(example, dict) else model(example)
    found: Tensor = getattr(result, "logits", result)
    return found


def other(example: Any) -> Any:
    """Inputs like the example's, but not the same."""
    if isinstance(example, dict):
        return {key: other(value) for key, value in example.items()}
    return tokens(*example.shape, seed=7) if example.dtype == torch.int64 else numbers(*example.shape, seed=7)


def copy_of(masks: Any, model: nn.Module) -> nn.Module:
    from copy import deepcopy

    masked = deepcopy(model)
    masks.apply_(masked)
    return masked
