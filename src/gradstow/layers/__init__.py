"""Memory-lean layers, usable on their own: torch's modules with a backward that keeps less, or computes more precisely.

Each is a subclass of the torch module that it replaces, with the same arguments and the same ``state_dict``;
``convert`` swaps them into a model that is already there. Nothing here needs a plan; everything works under one.
"""

from gradstow.layers._activations import (
    GELU,
    Hardsigmoid,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    Mish,
    ReLU,
    ReLU6,
    SiLU,
    Softsign,
)
from gradstow.layers._attention import Attention
from gradstow.layers._blocked import BlockedLinear
from gradstow.layers._conv import Conv1d, Conv2d, Conv3d
from gradstow.layers._conversion import Conversion, Swap
from gradstow.layers._convert import convert
from gradstow.layers._dropout import Dropout
from gradstow.layers._fused import BNReLU, ConvBN, ConvBNReLU, FusedSequential
from gradstow.layers._linear import Linear
from gradstow.layers._losses import LinearCrossEntropy
from gradstow.layers._norms import GroupNorm, LayerNorm, RMSNorm
from gradstow.layers._pooling import MaxPool1d, MaxPool2d
from gradstow.layers.ops._attention import attention
from gradstow.layers.ops._cross_entropy import linear_cross_entropy

__all__ = [
    "GELU",
    "Attention",
    "BNReLU",
    "BlockedLinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvBN",
    "ConvBNReLU",
    "Conversion",
    "Dropout",
    "FusedSequential",
    "GroupNorm",
    "Hardsigmoid",
    "Hardtanh",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LinearCrossEntropy",
    "LogSigmoid",
    "MaxPool1d",
    "MaxPool2d",
    "Mish",
    "RMSNorm",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Softsign",
    "Swap",
    "attention",
    "convert",
    "linear_cross_entropy",
]
