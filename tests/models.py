"""Small models, each with a batch and a loss, that between them use what real models use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import gradstow as gs

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A model to train: how to make it, what to feed it, what to minimise.

    ``unplanned`` is part of the message with which gradstow may refuse to plan it, or "".
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor]
    autocast: torch.dtype | None = None
    unplanned: str = ""
    forward: Callable[[nn.Module, Any], Any] = field(default=lambda model, batch: model(batch[0]))

    def model(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        return self.make().to(device).train()

    def data(self, device: str) -> Any:
        torch.manual_seed(1)
        return torch.utils._pytree.tree_map(lambda t: t.to(device), self.batch())

    def call(self, model: nn.Module, batch: Any) -> Any:
        """The model's forward, under autocast where the case has it; backward runs outside of it."""
        if self.autocast is None:
            return self.forward(model, batch)
        with torch.autocast(next(model.parameters()).device.type, self.autocast):
            return self.forward(model, batch)

    def run(self, model: nn.Module, batch: Any) -> Tensor:
        return self.loss(self.call(model, batch), batch)


def measured_step(case: Case, model: nn.Module, batch: Any, device: str) -> int:
    """Step peak of the second step: the first one plans, and everything is in place."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with gs.measure_peak(device) as memory:
            case.run(model, batch).backward()
    model.zero_grad(set_to_none=True)
    return memory.peak_bytes


# ------------------------------------------------------------------------------------- batches and losses


def images(
    channels_last: bool = False, dtype: torch.dtype = torch.float32, count: int = 4, side: int = 16
) -> Callable[[], Any]:
    def make() -> Any:
        x = torch.randn(count, 3, side, side, dtype=dtype)
        if channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        return x, torch.randint(0, 5, (count,))

    return make


def rows(features: int = 16, dtype: torch.dtype = torch.float32, count: int = 8) -> Callable[[], Any]:
    return lambda: (torch.randn(count, features, dtype=dtype), torch.randn(count, 4, dtype=dtype))


def tokens(count: int = 3, length: int = 12) -> Any:
    x = torch.randint(0, 29, (count, length))
    return x, torch.roll(x, -1, 1)


def cross_entropy(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output.float(), batch[1])


def token_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def squares(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


# ------------------------------------------------------------------------------------------------- models


class ConvNet(nn.Module):
    """Convolution, BatchNorm, in-place ReLU, max-pool, dropout."""

    def __init__(self, p: float = 0.3, width: int = 8) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(p),
            nn.AdaptiveAvgPool2d(2),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * width, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.p = p
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(p)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        return self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.drop(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Tied embedding and head, causal attention, dropout; ``saves`` checkpoints every second block."""

    def __init__(self, p: float = 0.1, layers: int = 2, saves: bool = False, width: int = 16) -> None:
        super().__init__()
        self.saves = saves
        self.embed, self.place = nn.Embedding(29, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, p) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 29, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for number, block in enumerate(self.blocks):
            if self.saves and number % 2 == 0:
                h = checkpoint(block, h, use_reentrant=False)
            else:
                h = block(h)
        return self.head(self.norm(h))


class DenseNet(nn.Module):
    """Every layer reads the concatenation of all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 4 * i) for i in range(4))
        self.head = nn.Linear(19, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            found.append(layer(F.relu(norm(torch.cat(found, 1)))))
        return self.head(torch.cat(found, 1).mean((2, 3)))


def norm_net(dimensions: int, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """Two BatchNorms of one kind around a nonlinearity."""
    if dimensions == 2:
        layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, **options), nn.SiLU(), nn.Conv2d(6, 6, 3)]
        layers += [nn.BatchNorm2d(6, **options), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    else:
        layers = [nn.Linear(16, 12), nn.BatchNorm1d(12, **options), nn.ReLU(), nn.Linear(12, 4)]
        layers += [nn.BatchNorm1d(4, **options)]
    return nn.Sequential(*layers).to(dtype)


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.norm1(self.conv1(x)), 0.1)
        x = F.hardswish(self.norm2(self.conv2(x)))
        return self.head(F.avg_pool2d(x, 2).amax((2, 3)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 8)
        self.cell = kind(8, 16, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(x))[0])


class Reused(nn.Module):
    """One layer and one BatchNorm, used three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(16, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.norm = nn.BatchNorm1d(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.norm(self.layer(x)))
        return self.last(x)


class InPlace(nn.Module):
    """Writes into views and over activations, as real code does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h[:, :4] *= 2
        h.add_(1)
        left, right = h.chunk(2, 1)
        right = right.clone().mul_(left.sigmoid())
        h = torch.cat([left, right], 1)
        h[:, 3:5].zero_()
        return self.last(h.view(4, 2, 16).transpose(0, 1).reshape(8, 16).relu_())


class Outputs(nn.Module):
    """A mapping of outputs, most of which the loss does not use; one is an input handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a = nn.Linear(16, 16), nn.Linear(16, 4)
        self.b, self.unused = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x).tanh()
        return {"a": self.a(h), "b": self.b(h.exp()), "hidden": h, "x": x, "width": 16, "none": None}


class Scattered(nn.Module):
    """Top-k routing, random noise, where, index, cumulative sums: what must never be decided twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x) + 0.1 * torch.randn(8, 3, device=x.device)
        best, which = scores.softmax(-1).topk(2, -1)
        made = torch.stack([expert(x.relu()) for expert in self.experts], 1)
        chosen = made.gather(1, which.unsqueeze(-1).expand(-1, -1, 4))
        y = (chosen * best.unsqueeze(-1)).sum(1)
        return torch.where(y > 0, y, 0.1 * y).cumsum(1)


class Frozen(ConvNet):
    """The first layers do not train, their BatchNorm still counts."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.features[:4].parameters():
            parameter.requires_grad_(False)


class Notes:
    """A side effect: counts."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class Broken(nn.Module):
    """A graph break of some kind between two layers."""

    def __init__(self, kind: str, features: int = 16) -> None:
        super().__init__()
        self.kind, self.calls = kind, Notes()
        self.first, self.last = nn.Linear(features, features), nn.Linear(features, 4)
        self.inner = nn.Sequential(nn.Linear(features, 2 * features), nn.ReLU(), nn.Dropout(0.2))
        self.outer = nn.Sequential(nn.Linear(2 * features, features), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu() * 2
        if self.kind == "print":
            print(end="")
        elif self.kind == "effect":
            note(self.calls)
        else:
            torch._dynamo.graph_break()
        return self.last(x + self.outer(self.inner(x)).exp().sin())


class Cut(nn.Module):
    """A block with a graph break in its middle."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(features, 2 * features), nn.Linear(2 * features, features)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.up(x)), 0.2).tanh()
        torch._dynamo.graph_break()
        return x + self.down(h).sin()


class Loop(nn.Module):
    """Calls one block in a loop, and others of the same shape: the same graphs run several times in a step."""

    def __init__(self, features: int = 16) -> None:
        super().__init__()
        self.shared, self.others = Cut(features), nn.ModuleList(Cut(features) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.shared(x)
        for block in self.others:
            x = block(x)
        return x


class Skipped(nn.Module):
    """A graph break in a loop's own body: Dynamo runs the whole frame outside of any graph."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.layer = Cut(256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        for _ in range(2):
            x = self.layer(x).exp().sin()
            torch._dynamo.graph_break()
        return x


class Counting(nn.Module):
    """Reads buffers that it changes later in the same forward: a step counter, a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x) * (1 + self.steps) - self.mean * 2)
        self.steps.add_(1)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.last(torch.tanh(h * 3))


def spectral() -> nn.Module:
    """Each forward improves the estimate of the largest singular value, which the weight is divided by."""
    return nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4))


class Mirrored(nn.Module):
    """Ops that read two views of one storage, lazy conjugates, and views that are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        square = self.first(x).T @ self.first(x)
        skew = square * 1.5
        skew = skew - skew.T
        z = torch.fft.fft(skew.tanh() @ self.first.weight)
        y = (z * z.conj() / (1 + z.abs())).real
        v = y.view(16, 2, 8)
        v[:, 1].sigmoid_()
        return self.last((y * 0.1).tanh())[:8]


@torch._dynamo.disable
def note(calls: Notes) -> None:
    calls.add()


def dropout_case(p: float) -> Case:
    return Case(lambda: ConvNet(p), images(), cross_entropy)


def norm_case(dimensions: int, dtype: torch.dtype = torch.float32, **options: Any) -> Case:
    batch = images(dtype=dtype) if dimensions == 2 else rows(dtype=dtype)
    return Case(lambda: norm_net(dimensions, dtype, **options), batch, cross_entropy if dimensions == 2 else squares)


CASES = {
    "conv": Case(ConvNet, images(), cross_entropy),
    "counting": Case(Counting, rows(), squares),
    "spectral": Case(
        lambda: nn.Sequential(spectral_norm(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 4)), rows(), squares
    ),
    "mirrored": Case(Mirrored, rows(), squares),
    "conv-channels-last": Case(
        lambda: ConvNet().to(memory_format=torch.channels_last), images(channels_last=True), cross_entropy
    ),
    "conv-frozen": Case(Frozen, images(), cross_entropy),
    "conv-autocast": Case(ConvNet, images(), cross_entropy, autocast=torch.bfloat16),
    "transformer": Case(lambda: Transformer(layers=1), tokens, token_loss),
    "transformer-autocast": Case(lambda: Transformer(layers=1), tokens, token_loss, autocast=torch.bfloat16),
    "transformer-checkpoint": Case(lambda: Transformer(layers=1, saves=True), tokens, token_loss),
    "densenet": Case(DenseNet, images(), cross_entropy),
    "dropout-0": dropout_case(0.0),
    "dropout-0.1": dropout_case(0.1),
    "dropout-0.15": dropout_case(0.15),
    "dropout-0.5": dropout_case(0.5),
    "dropout-1": dropout_case(1.0),
    "norm1d": norm_case(1),
    "norm1d-double": norm_case(1, torch.float64),
    "norm1d-bfloat16": norm_case(1, torch.bfloat16),
    "norm2d-double": norm_case(2, torch.float64),
    "norm2d-bfloat16": norm_case(2, torch.bfloat16),
    "norm2d-no-affine": norm_case(2, affine=False),
    "norm2d-no-statistics": norm_case(2, track_running_stats=False),
    "norm2d-no-momentum": norm_case(2, momentum=None),
    "groups": Case(Groups, images(), cross_entropy),
    "lstm": Case(lambda: Recurrent(nn.LSTM), tokens, token_loss),
    "gru": Case(lambda: Recurrent(nn.GRU), tokens, token_loss),
    "reused": Case(Reused, rows(), squares),
    "in-place": Case(InPlace, rows(), squares),
    "scattered": Case(Scattered, rows(), squares),
    "outputs": Case(Outputs, rows(), lambda output, batch: squares(output["a"], batch)),
    "outputs-two": Case(Outputs, rows(), lambda output, batch: squares(output["a"] * output["b"], batch)),
}


def first_four(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output[:, :4], batch[1])


def broken_cases(features: int = 16, count: int = 8) -> dict[str, Case]:
    batch = rows(features, count=count)
    cases = {
        kind: Case(lambda kind=kind: Broken(kind, features), batch, squares) for kind in ("break", "print", "effect")
    }
    return cases | {"loop": Case(lambda: Loop(features), batch, first_four)}


BROKEN = broken_cases()
