"""What is trained: models by name, where they are checkpointed, and their loss inside the module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradstow.cli._targets import build_target
from peers import _nets

Make = Callable[[int], tuple[nn.Module, Any, Any]]


@dataclass(frozen=True)
class Model:
    """How to make a model, and what people name when they save its memory by hand.

    Attributes:
        make: (model, batch, loss) for a number of examples; loss is None where the output has one.
        blocks: classes of the modules that get a checkpoint.
        chain: the path of a Sequential whose parts follow one another; "" where the blocks do; None without any.
        keeps: classes of what is worth keeping inside a block, as torch_remat is told.
    """

    make: Make
    batch: int
    blocks: tuple[str, ...]
    chain: str | None = ""
    keeps: tuple[str, ...] = ("Conv2d", "Linear")


class WithLoss(nn.Module):
    """The model and its loss, so that compilers and planners see one whole step."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> torch.Tensor:
        if self.loss is None:
            return self.model(**batch).loss
        return self.loss(self.model(batch[0]), batch)


@dataclass(frozen=True)
class Subject:
    name: str
    spec: Model
    module: WithLoss
    batch: Any


def build(name: str, device: str = "cpu") -> Subject:
    """With random weights and a random batch that depend on nothing but the name."""
    spec = MODELS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, batch, loss = spec.make(spec.batch)
    batch = torch.utils._pytree.tree_map(lambda t: t.to(device), batch)
    return Subject(name, spec, WithLoss(model.train(), loss).to(device), batch)


def chosen(parts: list[str]) -> list[str]:
    """Models whose name contains one of the parts; without any, all but the tiny ones."""
    if not parts:
        return [name for name in MODELS if name not in TINY]
    exact = [name for name in MODELS if name in parts]
    return exact or [name for name in MODELS if any(part in name for part in parts)]


def _target(text: str, seq: int = 256, attn: str | None = None) -> Make:
    def make(batch: int) -> tuple[nn.Module, Any, Any]:
        target = build_target(text, batch, seq=seq, attn=attn)
        return target.model, target.batch, target.loss

    return make


def _gpt2(attn: str, dropout: bool, text: str = "transformers:gpt2", seq: int = 256, batch: int = 4) -> Model:
    off = "" if dropout else ",resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0"
    return Model(_target(text + off, seq, attn), batch, ("GPT2Block",), keeps=("GPT2Attention",))


_SMALL = "transformers:gpt2,n_layer=2,n_embd=64,n_head=4,vocab_size=256"
_LLAMA = (
    "transformers:llama,num_hidden_layers=6,hidden_size=512,intermediate_size=1376,num_attention_heads=8,"
    "num_key_value_heads=8,vocab_size=8000"
)
MODELS = {
    # their convolutions follow one another without a name: what is checkpointed is all of them, and the classifier
    "alexnet": Model(_target("torchvision:alexnet"), 64, ("Sequential",), "features"),
    "vgg16": Model(_target("torchvision:vgg16"), 8, ("Sequential",), "features"),
    "resnet50": Model(_target("torchvision:resnet50"), 8, ("Bottleneck",)),
    "densenet121": Model(_target("torchvision:densenet121"), 4, ("_DenseLayer",), "features"),
    "mobilenet_v3_large": Model(_target("torchvision:mobilenet_v3_large"), 16, ("InvertedResidual",), "features"),
    "vit_b_16": Model(_target("torchvision:vit_b_16"), 4, ("EncoderBlock",), keeps=("MultiheadAttention",)),
    "swin_t": Model(
        _target("torchvision:swin_t"), 4, ("SwinTransformerBlock",), "features", ("ShiftedWindowAttention",)
    ),
    "convnext_tiny": Model(_target("torchvision:convnext_tiny"), 4, ("CNBlock",), "features"),
    "unet": Model(_nets.unet, 4, ("Double",), None),
    "gpt2_sdpa": _gpt2("sdpa", dropout=False),
    "gpt2_sdpa_dropout": _gpt2("sdpa", dropout=True),
    "gpt2_eager": _gpt2("eager", dropout=False),
    "gpt2_eager_dropout": _gpt2("eager", dropout=True),
    "bert": Model(_target("transformers:bert", 128), 8, ("BertLayer",), keeps=("BertAttention",)),
    "t5_small": Model(
        _target("transformers:t5", 128), 8, ("T5Block",), None, ("T5LayerSelfAttention", "T5LayerCrossAttention")
    ),
    "llama": Model(_target(_LLAMA), 4, ("LlamaDecoderLayer",), keeps=("LlamaAttention",)),
    "lstm": Model(_nets.lstm, 16, ("Recurrent",), keeps=()),  # torch_remat takes no nested tuples, which LSTMs return
    "tiny_cnn": Model(_nets.tiny_cnn, 16, ("Stage",), "features", ("Conv2d",)),
    "tiny_gpt": _gpt2("sdpa", dropout=False, text=_SMALL, seq=64, batch=8),
}
TINY = ("tiny_cnn", "tiny_gpt")
