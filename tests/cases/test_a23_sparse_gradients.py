"""A23. Sparse embedding gradients with accumulation and two optimizers: nothing is densified unasked."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equality import Seen, state
from gradstow._stow import plan_of
from twins import POLICIES, assert_equal_twins


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8, sparse=True)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).mean(1))


IDS = torch.tensor([[3, 3, 7, 9], [7, 7, 7, 1], [49, 0, 3, 3]])


@pytest.mark.parametrize("policy", POLICIES)
def test_two_micro_batches_and_two_optimizers(policy: str) -> None:
    def use(model: nn.Module) -> Seen:
        sparse = torch.optim.SparseAdam(model.words.parameters(), 1e-2)
        dense = torch.optim.Adam(model.head.parameters(), 1e-2)
        seen: Seen = []
        for step in range(3):
            sparse.zero_grad(set_to_none=True)
            dense.zero_grad(set_to_none=True)
            for part in (IDS, IDS.roll(step, 1)):
                model(part).square().mean().backward()
            grad = model.words.weight.grad
            assert grad.is_sparse
            assert not grad.is_coalesced()
            seen += state(model, f"step {step}")
            sparse.step()
            dense.step()
        return seen + [(n, p.detach().clone()) for n, p in model.named_parameters()]

    model = assert_equal_twins(Words, use, policy)
    plan = plan_of(model)
    assert plan is not None
    assert any("embedding of words runs as plain PyTorch" in b.reason for b in plan.graph.breaks)
