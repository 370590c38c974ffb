"""A value that two graphs read: its gradients are added up in eager's order, one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gradstow as gs
import twins
from equality import differences

pytestmark = pytest.mark.usefixtures("guessed_costs")


class Block(nn.Module):
    """Three readings of ``h`` in the second graph and one in the third."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.norm, self.kind = nn.Linear(16, 24), nn.LayerNorm(24), kind
        self.a, self.b, self.c, self.last = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        torch._dynamo.graph_break()
        a, b, c = self.a(h), self.b(h).tanh(), self.c(h)
        if self.kind == "handed on":
            h = h.view(-1, 24)
            a, b, c = (part.view(-1, 24) for part in (a, b, c))
        if self.kind == "in place":
            h = h * 1
            h.mul_(1.5)
        torch._dynamo.graph_break()
        return self.last(h + (a.softmax(-1) * b + c) * h)


@pytest.mark.parametrize("policy", twins.POLICIES)
@pytest.mark.parametrize("kind", ["read", "handed on", "in place"])
def test_gradients_of_a_value_that_two_graphs_read(kind: str, policy: str) -> None:
    twins.assert_equal_twins(
        lambda: Block(kind), twins.steps(lambda model, _: model(twins.data(40, 16)).sin().square().mean()), policy
    )


def test_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one input for all uses the first graph brackets its own sum."""
    monkeypatch.setattr("gradstow.capture._cut.separate_uses", lambda module, _inputs, leaves: (module, None))
    use = twins.steps(lambda model, _: model(twins.data(40, 16)).sin().square().mean())
    found = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = Block("read")
        found.append(use(gs.stow(model, policy="recompute-all") if stow else model))
    assert differences(*found) != []
