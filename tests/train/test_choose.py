"""The choice of micro-batch and plan, and the largest batch for a budget: both by plans, both checked by running."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradstow as gs
from gradstow._verify import compare, digest
from gradstow.capture import resident_bytes
from gradstow.errors import BudgetError, BudgetTooSmall, CaptureError, GradstowError
from gradstow.train._choose import Choice, choose
from gradstow.train._max_batch import MaxBatch, max_batch
from gradstow.train._window import split

BATCH = 12
KIB = 1024


def make_model(p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    convs = [nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Dropout(p)]
    return nn.Sequential(*convs, nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 256, 5))


def make_batch(count: int) -> Any:
    return torch.randn(count, 3, 16, 16), torch.randint(0, 5, (count,))


def loss(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1])


def chosen(model: nn.Module, budget: Any, **options: Any) -> Choice:
    torch.manual_seed(1)
    return choose(model, options.pop("batch", None) or make_batch(BATCH), loss=loss, budget=budget, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def smallest(model: nn.Module, **options: Any) -> int:
    with pytest.raises(BudgetTooSmall) as caught:
        chosen(model, 1000, **options)
    return caught.value.minimum_bytes


# --------------------------------------------------------------------------------------------- choose


def test_without_a_budget_the_whole_batch_is_taken() -> None:
    choice = chosen(make_model(), None)
    assert (choice.micro_batch, choice.micro_batches, choice.plans) == (BATCH, 1, (choice.plan,))
    assert choice.chosen.stores_all
    assert "no limit" in str(choice)


@pytest.mark.parametrize("budget", ["70%", "30%"])
def test_the_choice_is_the_fastest_that_fits(budget: str) -> None:
    model = make_model()
    choice = chosen(model, budget, optimizer=adamw(model))
    assert choice.budget_bytes is not None
    taken = [a for a in choice.alternatives if not a.refused]
    fastest = max(a.samples_per_second for a in taken if a.solved)
    assert choice.chosen.samples_per_second >= 0.99 * fastest
    assert all(a.peak_bytes <= choice.budget_bytes for a in taken)
    assert all(a.peak_bytes > choice.budget_bytes for a in choice.alternatives if a.refused)
    assert all(plan.predicted_peak_bytes <= choice.budget_bytes for plan in choice.plans)
    sizes = [a.micro_batch for a in choice.alternatives]
    assert sizes == sorted(set(sizes), reverse=True)
    assert len(sizes) <= 8, "few plans, not dozens"
    assert all((a.micro_batches - 1) * a.micro_batch < BATCH <= a.micro_batches * a.micro_batch for a in taken)


def test_the_same_choice_each_time() -> None:
    model = make_model()
    first, second = (chosen(model, "45%", optimizer=adamw(model)) for _ in range(2))
    assert first.to_json() == second.to_json()
    assert [p.dumps() for p in first.plans] == [p.dumps() for p in second.plans]


def test_a_percentage_is_of_the_whole_batchs_plain_peak() -> None:
    model = make_model()
    whole = gs.plan(model, make_batch(BATCH), loss=loss, keep_output=False)
    choice = chosen(model, "50%")
    assert choice.budget_bytes == whole.resident_bytes + int(0.5 * whole.plain_step_peak_bytes)


def test_the_chosen_plans_run_within_the_budget_and_give_plain_gradients() -> None:
    """A window of a full, a full and a short micro-batch, each by the plan that was made for it."""
    model, plain = make_model(0.2), make_model(0.2)
    batch = make_batch(10)
    choice = choose(model, batch, loss=loss, budget=smallest(model, batch=batch) + 60 * KIB)
    assert choice.micro_batches > 1
    parts = split(batch, choice.micro_batch)
    last = choice.plans[-1] if len(parts[-1][0]) != choice.micro_batch else choice.plan
    plans = [choice.plans[1], *[choice.plan] * (len(parts) - 2), last]
    torch.manual_seed(3)
    for part, plan in zip(parts, plans, strict=True):
        assert plan.graph.resident.gradients == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        gs.stow(model, plan=plan)
        there = resident_bytes(model, batch, "cpu").total
        with gs.measure_peak() as memory:
            loss(model(part[0]), part).backward()
        gs.unstow(model)
        assert there + memory.peak_bytes <= choice.budget_bytes
        assert plan.predicted_peak_bytes <= choice.budget_bytes
    torch.manual_seed(3)
    for part in parts:
        loss(plain(part[0]), part).backward()
    pairs = [[(n, digest(p.grad)) for n, p in m.named_parameters()] for m in (plain, model)]
    assert not compare(*pairs)


def test_micro_batches_count_the_whole_batch_and_the_gradients() -> None:
    model = make_model()
    choice = chosen(model, "30%", optimizer=adamw(model))
    parameters = sum(p.nbytes for p in model.parameters())
    resident = choice.plan.graph.resident
    assert resident.gradients == parameters
    assert resident.batch == sum(t.nbytes for t in make_batch(BATCH))
    assert resident.optimizer >= 2 * parameters
    assert choice.plans[1].graph.resident.gradients == 0


def test_the_plan_is_that_of_gradients_that_exist() -> None:
    """What is planned without any gradient is what ``gs.plan`` plans where they are there."""
    model, batch = make_model(), make_batch(BATCH)
    choice = choose(model, batch, loss=loss, budget="40%")
    assert choice.micro_batches > 1
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    part = split(batch, choice.micro_batch)[0]
    own = gs.plan(model, part, loss=loss, budget=choice.budget_bytes, keep_output=False)
    assert own.schedule == choice.plan.schedule
    assert own.graph.resident == choice.plan.graph.resident
    assert own.predicted_peak_bytes == choice.plan.predicted_peak_bytes


def test_parameters_without_a_gradient_have_none() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unused = make_model(), nn.Linear(100, 100)
            self.inner[0].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Unused()
    choice = chosen(model, "30%")
    used = [p for n, p in model.named_parameters() if n.startswith("inner.") and p.requires_grad]
    assert choice.micro_batches > 1
    assert choice.plan.graph.resident.gradients == sum(p.nbytes for p in used)


def test_coupled_models_are_never_split() -> None:
    model = make_model()
    choice = chosen(model, "100%", coupled="BatchNorm2d bn1")
    assert [a.micro_batch for a in choice.alternatives] == [BATCH]
    assert "not split: BatchNorm2d bn1 couples the samples" in str(choice)
    whole = smallest(model, coupled=["bn1", "bn2"])
    assert whole > smallest(model)
    with pytest.raises(BudgetTooSmall, match=r"whole batch of 12 .* not split, because bn1, bn2 couple the samples"):
        chosen(model, whole - 1, coupled=["bn1", "bn2"])
    assert chosen(model, whole, coupled=["bn1", "bn2"]).micro_batch == BATCH


@pytest.mark.parametrize("with_optimizer", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_smallest_budget_is_named_and_holds(with_optimizer: bool) -> None:
    model = make_model()
    options = {"optimizer": adamw(model)} if with_optimizer else {}
    least = smallest(model, **options)
    assert chosen(model, least, **options).plan.predicted_peak_bytes <= least
    with pytest.raises(BudgetTooSmall, match="not even a single sample") as caught:
        chosen(model, least - 1, **options)
    assert caught.value.minimum_bytes == least


def test_a_pair_of_mean_and_count_is_planned_as_its_mean() -> None:
    model = make_model()

    def pair(output: Any, batch: Any) -> Any:
        return loss(output, batch), (batch[1] >= 0).sum()

    plain = chosen(model, "45%")
    counted = choose(model, make_batch(BATCH), loss=pair, budget="45%")
    assert counted.plan.dumps() == plain.plan.dumps()


def test_a_loss_that_asks_its_data_leaves_room() -> None:
    def pair(output: Any, batch: Any) -> Any:
        return loss(output, batch), int((batch[1] >= 0).sum().item())

    with pytest.warns(UserWarning, match="six times the outputs"):
        choice = choose(make_model(), make_batch(BATCH), loss=pair, budget="60%")
    assert choice.plan.graph.reserve_bytes > 0


@pytest.mark.usefixtures("guessed_costs")  # some processors' convolutions need more memory in bfloat16
def test_precision_is_planned_for() -> None:
    model = make_model()
    full, short = (chosen(model, None, precision=name).plan for name in ("fp32", "bf16"))
    assert short.plain_step_peak_bytes < full.plain_step_peak_bytes
    gs.stow(model, plan=short)
    batch = make_batch(BATCH)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch[0])
    loss(output.float(), batch).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_several_optimizers_count_together() -> None:
    model = make_model()
    halves = list(model.parameters())[:2], list(model.parameters())[2:]
    both = [torch.optim.AdamW(half) for half in halves]
    together, apart = (chosen(model, None, optimizer=o).plan.graph.resident.optimizer for o in (adamw(model), both))
    assert together == apart > 0


def test_a_batch_of_another_size_is_an_example() -> None:
    model = make_model()
    small, large = (chosen(model, "45%", batch=make_batch(n), batch_size=BATCH) for n in (3, BATCH))
    assert small.to_json() == large.to_json()
    assert small.plan.dumps() == large.plan.dumps()


def test_channels_last_stays() -> None:
    model = make_model().to(memory_format=torch.channels_last)
    x, y = make_batch(BATCH)
    batch = x.contiguous(memory_format=torch.channels_last), y
    choice = choose(model, batch, loss=loss, budget="45%")
    gs.stow(model, plan=choice.plans[1])
    part = split(batch, choice.micro_batch)[0]
    loss(model(part[0]), part).backward()


def test_a_model_that_cannot_be_rehearsed_is_told_what_to_do() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x[: int((x.sum() > 0).nonzero().numel()) + 1])

    with pytest.raises(CaptureError, match="give micro_batch= as a number"):
        choose(Asks(), make_batch(4), loss=lambda output, _batch: output.sum(), budget="50%")


@pytest.mark.parametrize("size", [0, -1, True, 2.5])
def test_what_is_no_batch_size(size: Any) -> None:
    with pytest.raises(GradstowError, match="is no number of samples"):
        chosen(make_model(), None, batch_size=size)


def test_random_streams_and_the_model_are_left_alone() -> None:
    model = make_model(0.3)
    before = torch.get_rng_state()
    choose(model, (torch.ones(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)), loss=loss, budget="50%")
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())


# ------------------------------------------------------------------------------------------- max_batch

BUDGET = 2048 * KIB


def fits(model: nn.Module, count: int, budget: int, **options: Any) -> bool:
    try:
        gs.plan(model, make_batch(count), loss=loss, budget=budget, **options)
    except BudgetTooSmall:
        return False
    return True


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_the_boundary_is_shown_by_plans(with_optimizer: bool) -> None:
    model = make_model()
    options = {"optimizer": adamw(model)} if with_optimizer else {}
    found = max_batch(model, make_batch, loss=loss, budget=BUDGET, **options)
    assert fits(model, found.batch_size, BUDGET, **options)
    assert not fits(model, found.batch_size + 1, BUDGET, **options)
    by_size = {t.batch_size: t for t in found.tried}
    assert by_size[found.batch_size].fits
    assert not by_size[found.batch_size + 1].fits
    assert by_size[found.batch_size].peak_bytes <= BUDGET < by_size[found.batch_size + 1].peak_bytes
    assert len(found.tried) <= 8
    assert int(found) == found.batch_size == range(1000)[found]


def test_the_largest_batch_really_trains_within_the_budget() -> None:
    model, plain = make_model(0.2), make_model(0.2)
    found = max_batch(model, make_batch, loss=loss, budget=BUDGET)
    batch = make_batch(int(found))
    there = resident_bytes(model, batch, "cpu").total
    gs.stow(model, plan=found.plan)
    torch.manual_seed(2)
    with gs.measure_peak() as memory:
        output = model(batch[0])
        loss(output, batch).backward()
    assert there + memory.peak_bytes <= BUDGET
    torch.manual_seed(2)
    loss(plain(batch[0]), batch).backward()
    pairs = [[(n, digest(p.grad)) for n, p in m.named_parameters()] for m in (plain, model)]
    assert not compare(*pairs)


def test_an_example_serves_as_well_as_a_function() -> None:
    model = make_model()
    torch.manual_seed(0)
    one, two = (
        max_batch(model, made, loss=loss, budget=BUDGET, effort="quick") for made in (make_batch, make_batch(5))
    )
    assert one.to_json() == two.to_json()
    assert one.plan.dumps() == two.plan.dumps()


def test_the_function_is_called_on_fakes_only() -> None:
    seen: list[type] = []

    def make(count: int) -> Any:
        batch = make_batch(count)
        seen.append(type(batch[0]))
        return batch

    max_batch(make_model(), make, loss=loss, budget=BUDGET, effort="quick")
    assert seen
    assert torch.Tensor not in seen


def test_a_function_that_needs_real_tensors_makes_one_small_batch() -> None:
    sizes: list[int] = []

    def make(count: int) -> Any:
        sizes.append(count)
        x = torch.as_tensor(np.random.default_rng(0).random((count, 3, 16, 16), dtype=np.float32))
        return x * float(x.max()), torch.zeros(count, dtype=torch.long)

    found = max_batch(make_model(), make, loss=loss, budget=BUDGET, effort="quick")
    assert max(sizes) == 2
    assert found.batch_size == max_batch(make_model(), make_batch, loss=loss, budget=BUDGET, effort="quick").batch_size


def test_the_sizes_are_told_while_they_are_planned() -> None:
    said: list[str] = []
    found = max_batch(
        make_model(),
        make_batch,
        loss=loss,
        budget="1MB",
        limit=6,
        effort="quick",
        progress=lambda stage, _done, _total: said.append(stage),
    )
    assert {f"batch of {t.batch_size}" for t in found.tried} <= {*said}


def test_the_limit_of_the_search() -> None:
    found = max_batch(make_model(), make_batch, loss=loss, budget="1GiB", limit=10, effort="quick")
    assert (found.batch_size, found.limited) == (10, True)
    assert "the limit of the search" in str(found)
    assert max_batch(make_model(), make_batch, loss=loss, budget="1GiB", limit=1, effort="quick").batch_size == 1


def test_more_budget_never_allows_less() -> None:
    model = make_model()
    sizes = [int(max_batch(model, make_batch, loss=loss, budget=b * KIB, effort="quick")) for b in (512, 1536)]
    assert sizes[0] < sizes[1]


@pytest.mark.usefixtures("guessed_costs")  # some processors' convolutions need more for one sample than for two
def test_a_single_sample_that_does_not_fit() -> None:
    model = make_model()
    with pytest.raises(BudgetTooSmall, match="not even 1 sample fits") as caught:
        max_batch(model, make_batch, loss=loss, budget=1000)
    least = caught.value.minimum_bytes
    assert max_batch(model, make_batch, loss=loss, budget=least).batch_size == 1


def test_a_model_that_refuses_a_single_sample() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))

    def make(count: int) -> Any:
        return torch.randn(count, 8), torch.randint(0, 5, (count,))

    with pytest.raises(BudgetTooSmall, match="not even 2 samples fit") as caught:
        max_batch(model, make, loss=loss, budget=100)
    assert max_batch(model, make, loss=loss, budget=caught.value.minimum_bytes).batch_size >= 2


@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_a_percentage_means_nothing(budget: str) -> None:
    with pytest.raises(BudgetError, match="grows with the batch"):
        max_batch(make_model(), make_batch, loss=loss, budget=budget)


def test_batches_that_are_always_the_same() -> None:
    with pytest.raises(CaptureError, match="the same batch for 4 samples as for 2"):
        max_batch(make_model(), lambda _count: make_batch(3), loss=loss, budget="1GiB", effort="quick")


def test_auto_is_read_once() -> None:
    found = max_batch(make_model(), make_batch, loss=loss, budget="auto", limit=3, effort="quick")
    assert isinstance(found, MaxBatch)
    assert found.limited
    assert found.budget_bytes > BUDGET


def test_batches_of_language_models() -> None:
    """Mappings, and a model whose output is the loss."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.head(F.gelu(self.embed(input_ids)))
            return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}

    ids = torch.randint(0, 64, (2, 16))
    found = max_batch(Words(), {"input_ids": ids, "labels": ids.clone()}, budget="1MiB", effort="quick")
    assert found.batch_size > 2
    assert not found.limited
