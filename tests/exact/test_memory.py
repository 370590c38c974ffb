"""``measure_peak`` counts allocator events to the byte, or refuses."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

import gradstow as gs
from gradstow.cost import PeakMemory, measure_peak
from gradstow.cost._events import Event, Level, _checked
from gradstow.cost._memory import paused
from gradstow.errors import GradstowError

MIB = 2**20


def block(nbytes: int, device: str = "cpu") -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_peak_and_end_are_exact() -> None:
    with measure_peak("cpu") as memory:
        first = block(8 * MIB)
        del first
        second = block(4 * MIB)
    assert (memory.peak_bytes, memory.end_bytes) == (8 * MIB, 4 * MIB)
    assert [level for _, level in memory.timeline] == [8 * MIB, 0, 4 * MIB]
    assert second.numel() == 4 * MIB


def test_peak_is_the_highest_sum_not_the_largest_block() -> None:
    with measure_peak("cpu") as memory:
        first, second = block(3), block(5)
        del first
        third = block(4)
        del second, third
    assert [level for _, level in memory.timeline] == [3, 8, 5, 9, 4, 0]
    assert (memory.peak_bytes, memory.end_bytes) == (9, 0)


def test_timeline_is_in_order_and_in_seconds() -> None:
    with measure_peak("cpu") as memory:
        torch.ones(1000).sum()
    times = [seconds for seconds, _ in memory.timeline]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 60


def test_nothing_allocated_counts_nothing() -> None:
    with measure_peak("cpu") as memory:
        pass
    assert (memory.peak_bytes, memory.end_bytes, memory.timeline) == (0, 0, ())


def test_a_training_step_counts_activations_and_gradients() -> None:
    weight = torch.zeros(256, 256, requires_grad=True)
    x = torch.zeros(64, 256)
    with measure_peak("cpu") as memory:
        (x @ weight).relu().sum().backward()
    # relu and its gradient through it (64 KiB each) stand beside the weight gradient's 256 KiB.
    assert memory.end_bytes == 256 * 256 * 4
    assert memory.peak_bytes >= memory.end_bytes + 64 * 256 * 4


def test_memory_from_before_is_neither_added_nor_taken_away() -> None:
    """Torch gives the free of an older block no event, or one with the size of another block."""
    with measure_peak("cpu"):
        older = block(7 * MIB)  # an earlier session has seen this address, with this size
    del older
    older = block(7 * MIB - 4096)  # takes the same address where the allocator reuses it
    with measure_peak("cpu") as memory:
        del older
        newer = block(MIB)
    assert (memory.peak_bytes, memory.end_bytes) == (MIB, MIB)
    assert newer.numel() == MIB


def test_an_address_that_comes_again_was_freed_unseen() -> None:
    level = Level()
    level.apply(Event(1, 64, 100, 0))
    level.apply(Event(2, 64, 30, 0))
    level.apply(Event(3, 128, -50, 0))  # a free of a block that was never in view
    assert (level.now, level.peak) == (30, 100)


def test_lost_events_are_an_error() -> None:
    tag = [Event(0, 8, 1, 101), Event(1, 8, -1, 100)]
    last = [Event(8, 8, 1, 161), Event(9, 8, -1, 160)]
    whole = [Event(2, 16, 40, 140), Event(3, 24, 20, 160)]
    assert _checked((*tag, *whole, *last)) == tuple(whole)
    with pytest.raises(GradstowError, match="lost allocator events"):
        _checked((*tag, whole[1], *last))
    with pytest.raises(GradstowError, match="cut short"):
        _checked((*tag, *whole))


def test_nesting_is_refused_and_the_outer_measurement_survives() -> None:
    with measure_peak("cpu") as outer:
        kept = block(MIB)
        with pytest.raises(GradstowError, match="already running"), measure_peak("cpu"):
            pass
        more = block(MIB)
    assert outer.peak_bytes == 2 * MIB
    assert kept.numel() + more.numel() == 2 * MIB


def test_a_running_profiler_is_refused_and_survives() -> None:
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        with pytest.raises(GradstowError, match="profiler is already running"), measure_peak("cpu"):
            pass
        block(12345)
    assert any(event.nbytes() == 12345 for event in profiler.kineto_results.events())


def test_a_profiler_inside_the_block_is_an_error_not_a_zero() -> None:
    memory = measure_peak("cpu")

    def step() -> None:
        with memory, torch.autograd.profiler.profile():
            pass

    with pytest.raises(GradstowError, match="cut short"):
        step()
    with pytest.raises(GradstowError, match="no result"):
        memory.peak_bytes  # noqa: B018
    with measure_peak("cpu") as again:
        block(100)
    assert again.peak_bytes == 100


def test_an_exception_passes_unchanged_and_the_next_measurement_works() -> None:
    error, memory = KeyError("mine"), measure_peak("cpu")

    def step() -> None:
        with memory:
            block(MIB)
            raise error

    with pytest.raises(KeyError) as caught:
        step()
    assert caught.value is error
    assert memory.peak_bytes == MIB
    with measure_peak("cpu") as again:
        block(100)
    assert again.peak_bytes == 100


@pytest.mark.parametrize("name", ["peak_bytes", "end_bytes", "timeline", "rss_peak_bytes"])
def test_reading_too_early_is_refused(name: str) -> None:
    memory = measure_peak("cpu")
    with pytest.raises(GradstowError, match="no result yet"):
        getattr(memory, name)
    with memory, pytest.raises(GradstowError, match="no result yet"):
        getattr(memory, name)
    assert getattr(memory, name) is not ...


def test_a_measurement_runs_once() -> None:
    memory = measure_peak("cpu")
    with memory:
        pass
    with pytest.raises(GradstowError, match="has run already"), memory:
        pass
    with measure_peak("cpu"):
        pass


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(GradstowError, match="cpu and cuda"):
        measure_peak("meta")


def test_what_is_paused_does_not_count() -> None:
    with measure_peak("cpu") as memory:
        first = block(2 * MIB)
        with paused():
            block(64 * MIB)
        second = block(MIB)
        del first
    assert [level for _, level in memory.timeline] == [2 * MIB, 3 * MIB, MIB]
    assert (memory.peak_bytes, memory.end_bytes) == (3 * MIB, MIB)
    assert second.numel() == MIB


def test_pausing_without_a_measurement_does_nothing() -> None:
    with paused():
        block(10)


def test_other_threads_are_not_seen() -> None:
    """Written down in the docstring; should torch change this, the docstring must too."""
    kept: list[torch.Tensor] = []
    with measure_peak("cpu") as memory:
        thread = threading.Thread(target=lambda: kept.append(block(5 * MIB)))
        thread.start()
        thread.join()
    assert memory.peak_bytes == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the resident set's mark")
def test_the_resident_set_follows() -> None:
    with measure_peak("cpu") as memory:
        torch.ones(64 * MIB, dtype=torch.uint8)
    assert memory.rss_peak_bytes is None or memory.rss_peak_bytes >= 48 * MIB
    with measure_peak("cpu") as after:
        pass
    assert after.rss_peak_bytes is None or after.rss_peak_bytes < 48 * MIB


class _Allocator:
    """Stands for ``torch.cuda``: counts live bytes and their peak."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def move(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def reset(self, device: Any) -> None:
        self.peak = self.live


def test_cuda_reads_the_allocators_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _Allocator()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: fake.live)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: fake.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", fake.reset)
    fake.move(1000)
    fake.move(-900)
    memory = PeakMemory("cuda:0")
    with memory:
        fake.move(-60)
        fake.move(500)
        fake.move(-500)
        with paused():
            fake.move(9000)
            fake.move(-9000)
            fake.reset(None)
        fake.move(10)
    assert (memory.peak_bytes, memory.end_bytes, memory.timeline) == (440, -50, ())


@pytest.mark.gpu
def test_cuda_counts_blocks(device: str) -> None:
    older = block(4 * MIB, device)
    with measure_peak() as memory:
        first = block(8 * MIB, device)
        del first, older
        second = block(2 * MIB, device)
    assert memory.device.type == "cuda"
    assert (memory.peak_bytes, memory.end_bytes) == (8 * MIB, -2 * MIB)
    assert second.numel() == 2 * MIB


def test_a_reading_grows_with_what_is_held(device: str) -> None:
    before = gs.memory(device)
    held = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    after = gs.memory(device)
    if device == "cpu":
        assert before.allocated_bytes is None
        assert after.device == "cpu"
        assert "allocated unknown" in str(after)
    else:
        assert after.allocated_bytes - before.allocated_bytes == held.nbytes
    assert after.reserved_bytes - before.reserved_bytes > 60 << 20
    assert after.peak_bytes >= before.peak_bytes
    assert after.to_json()["reserved_bytes"] == after.reserved_bytes


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("meta", "memory cannot measure on 'meta'"),
        ("nonsense", "memory knows no device 'nonsense'. Write cpu, cuda or cuda:0"),
        (0.5, "memory knows no device 0.5"),
        ("cuda:99", "memory cannot measure on cuda:99: PyTorch sees [0-9] CUDA devices here"),
    ],
)
def test_a_reading_of_another_device_is_refused(device: Any, words: str) -> None:
    with pytest.raises(GradstowError, match=words):
        gs.memory(device)
