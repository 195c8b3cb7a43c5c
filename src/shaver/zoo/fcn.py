"""The fully connected network."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from shaver.zoo.network import Network


class FCN(Network):
    """Linear layers with ReLU between them; inputs of any shape are flattened.

    Example:
        >>> cancer = FCN(inputs=30, hidden=(100, 100), classes=2)  # 13,402 parameters
        >>> mnist = FCN()  # 784-256-10, 203,530 parameters
        >>> lenet_300_100 = FCN(hidden=(300, 100))  # 266,610 parameters

    Args:
        inputs: Numbers per sample.
        hidden: Width of each hidden layer; empty for logistic regression.
        classes: Number of outputs.
        dropout: Share of the inputs that are set to zero at random while the network trains.
    """

    def __init__(
        self, inputs: int = 784, hidden: Sequence[int] = (256,), classes: int = 10, dropout: float = 0.0
    ) -> None:
        super().__init__("fcn", inputs=inputs, hidden=list(hidden), classes=classes)
        self.dropout = self.input_dropout(dropout)
        layers: list[nn.Module] = []
        for before, after in pairwise([inputs, *hidden, classes]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of samples with ``inputs`` numbers each."""
        first = self.layers[0]
        assert isinstance(first, nn.Linear)
        if x.ndim < 2 or x.shape[1:].numel() != first.in_features:
            raise ValueError(
                f"expected samples of {first.in_features} numbers, shape (batch, {first.in_features}) or any that "
                f"flattens to it, but got {tuple(x.shape)}."
            )
        logits: Tensor = self.layers(self.dropout(x.flatten(1)))
        return logits
