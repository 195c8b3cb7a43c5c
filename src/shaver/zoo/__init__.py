"""The paper's networks, LeNet-5-Caffe and two small ones. Each can be rebuilt from a plain dict of its arguments.

Example:
    >>> import shaver.zoo
    >>> model = shaver.zoo.build("wrn16_fixup", seed=0, classes=100)
"""

from shaver.zoo.fcn import FCN
from shaver.zoo.fixup import Bias, Scale
from shaver.zoo.lenet import DigitsCNN, LeNet, LeNetCaffe
from shaver.zoo.mixer import Mixer
from shaver.zoo.reader import Reader
from shaver.zoo.registry import arguments_of, build, names, rebuild
from shaver.zoo.resnet import WRN16, ResNet18, ResNet18Fixup, WRN16Fixup
from shaver.zoo.vit import ViT

__all__ = [
    "FCN",
    "WRN16",
    "Bias",
    "DigitsCNN",
    "LeNet",
    "LeNetCaffe",
    "Mixer",
    "Reader",
    "ResNet18",
    "ResNet18Fixup",
    "Scale",
    "ViT",
    "WRN16Fixup",
    "arguments_of",
    "build",
    "names",
    "rebuild",
]
