"""Transformers that return or take keys and values of earlier tokens while they train: plain's numbers, one cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradstow as gs
from equality import differences, state

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("guessed_costs"),
    pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning"),
]

SAMPLES, LENGTH, HALF, WIDTH, HEADS, LAYERS = 2, 48, 24, 32, 4, 2
BYTES_PER_TOKEN = {"gpt2": 4 * WIDTH, "llama": 4 * WIDTH // 2}  # of a layer's keys: llama's two heads serve four
Part = tuple[torch.Tensor, Any]  # a loss, and the cache as the loop holds it


def model_of(kind: str) -> Any:
    """Weights that are not shared: the order in which several uses' gradients are added up is a known limit."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "attn_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=64, **sizes, **ends)).train()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **heads)).train()


def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))


def earlier(model: Any) -> list[torch.Tensor]:
    """Keys and values of HALF tokens, which want gradients."""
    heads = getattr(model.config, "num_key_value_heads", HEADS)
    made = torch.Generator().manual_seed(3)
    size = (SAMPLES, heads, HALF, WIDTH // HEADS)
    return [torch.randn(size, generator=made).requires_grad_() for _ in range(2 * LAYERS)]


def returned(model: Any, ids: torch.Tensor, _: list[torch.Tensor]) -> Part:
    """The loss reads the cache that the model made."""
    output = model(input_ids=ids, labels=ids, use_cache=True)
    cache = output.past_key_values
    return output.loss + sum(x.square().mean() for layer in cache.layers for x in (layer.keys, layer.values)), cache


def appended(model: Any, ids: torch.Tensor, _: list[torch.Tensor]) -> Part:
    """A new cache of the user's, which the model fills."""
    cache = transformers.DynamicCache()
    output = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True)
    assert output.past_key_values is cache
    return output.loss + sum(layer.values.mean() for layer in cache.layers), cache


def taken(model: Any, ids: torch.Tensor, given: list[torch.Tensor]) -> Part:
    """Gradients flow into a cache that the user made."""
    cache = transformers.DynamicCache()
    for i in range(LAYERS):
        cache.update(given[2 * i], given[2 * i + 1], i)
    ids = ids[:, HALF:]
    return model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss, cache


def in_two_chunks(model: Any, ids: torch.Tensor, _: list[torch.Tensor]) -> Part:
    """The second half of a sequence attends to the first, and one backward runs through both."""
    first = model(input_ids=ids[:, :HALF], labels=ids[:, :HALF], use_cache=True)
    cache, ids = first.past_key_values, ids[:, HALF:]
    second = model(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True)
    return first.loss + second.loss, cache


def train(model: Any, step: Callable[..., Part], steps: int = 3) -> list[tuple[str, torch.Tensor | None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[tuple[str, torch.Tensor | None]] = []
    for i in range(steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        given = earlier(model)
        loss, cache = step(model, tokens(), given)
        assert cache.get_seq_length() == LENGTH
        loss.backward()
        seen += [(f"loss {i}", loss.detach().clone()), *state(model, f"step {i}")]
        seen += [(f"gradient of given {k} in {i}", x.grad) for k, x in enumerate(given)]
        seen += [(f"keys {k} in {i}", layer.keys.detach().clone()) for k, layer in enumerate(cache.layers)]
        optimizer.step()
    return seen


def peak(model: Any, step: Callable[..., Part], kind: str) -> int:
    """Of a step that holds the cache until the backward is done; and the cache is what it should be, once."""
    model.zero_grad(set_to_none=True)
    given, ids = earlier(model), tokens()
    with gs.measure_peak() as memory:
        loss, cache = step(model, ids, given)
        loss.backward()
    held = [x for layer in cache.layers for x in (layer.keys, layer.values)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    assert len(storages) == 2 * LAYERS
    assert set(storages.values()) == {SAMPLES * LENGTH * BYTES_PER_TOKEN[kind]}
    model.zero_grad(set_to_none=True)
    return memory.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("step", [returned, appended, taken, in_two_chunks])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_plains_numbers_and_one_cache(kind: str, step: Callable[..., Part], recwarn: pytest.WarningsRecorder) -> None:
    plain, stowed = model_of(kind), gs.stow(model_of(kind), budget="80%")
    expected = train(plain, step)
    assert differences(expected, train(stowed, step)) == []
    assert not [w for w in recwarn if "gradstow" in str(w.message)], "everything was foreseen"
    most = 1.0 if step is in_two_chunks else 0.81  # each of two calls has its own budget
    assert peak(stowed, step, kind) <= most * peak(plain, step, kind)


def test_a_difference_is_seen() -> None:
    expected = train(model_of("llama"), taken, 1)
    other = model_of("llama")

    def wrong(model: Any, ids: torch.Tensor, given: list[torch.Tensor]) -> Part:
        return taken(model, ids, [x * (1 + 1e-6) for x in given])

    assert any("given" in name for name in differences(expected, train(other, wrong, 1)))


@pytest.mark.slow
def test_eager_attention_keeps_one_layer_at_most() -> None:
    """At the smallest budget, values of queries × keys that wait for the backward are of one layer."""
    length, layers = 1024, 4
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=length,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, 64, (1, length))
    batch = {"input_ids": ids, "labels": ids}

    def squares(plan: gs.Plan) -> set[str]:
        """The layers whose queries × keys values are kept."""
        kept = [r for r in plan.rows if r.decision not in ("recompute", "free")]
        return {r.module for r in kept if r.shape[-2:] == (length, length) and ".h." in r.module}

    with pytest.raises(gs.errors.BudgetTooSmall) as refused:
        gs.plan(model, batch, budget=1 << 16, effort="quick")
    plan = gs.plan(model, batch, budget=refused.value.minimum_bytes, effort="quick")
    assert len([r for r in plan.rows if r.op == "_softmax" and r.shape[-2:] == (length, length)]) == layers
    assert len(squares(plan)) <= 1
    assert plan.predicted_peak_bytes < plan.plain_peak_bytes / 2
