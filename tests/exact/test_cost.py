"""Costs of single ops: working bytes exactly, seconds as far as they can be told, and what is unknown."""

from __future__ import annotations

import json
import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from gradstow import _signature
from gradstow._signature import encode
from gradstow.cost import (
    _cache,
    _machine,
    analytic_costs,
    find_profile,
    measure,
    measure_peak,
    measured_costs,
)
from gradstow.cost._inputs import Undecodable, meta_call, real_call, sizes, storage_items
from gradstow.cost._shrink import analytic, shrink
from gradstow.errors import GradstowError
from gradstow.ir import CostTable, OpCost

MIB = 2**20
UNKNOWN = OpCost(0.0, 0, "unknown")


def sign(target: str, *args: Any, **kwargs: Any) -> str:
    signature = _signature.encode(target, args, kwargs)
    assert signature
    return signature


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def on(device: str, signature: str) -> str:
    """Signatures are written from meta tensors, to allocate nothing."""
    return signature.replace('"meta"', f'"{torch.device(device).type}"')


def cost_of(signature: str, device: str = "cpu", limit_bytes: int = 1 << 40) -> OpCost:
    signature = on(device, signature)
    return measure([signature], device=device, limit_bytes=limit_bytes).costs[signature]


def cpu_call(signature: str) -> Any:
    return real_call(on("cpu", signature), torch.device("cpu"))


# ------------------------------------------------------------------------------------- inputs


def test_inputs_have_the_layout_that_was_signed() -> None:
    layouts = [
        meta(2, 3, 4),
        meta(3, 4).t(),
        meta(2, 8, 4, 4).to(memory_format=torch.channels_last),
        meta(5, 1).expand(5, 1000),
        meta(0, 7),
        meta(),
        meta(6, dtype=torch.bfloat16),
        meta(6, dtype=torch.complex64),
    ]
    for wanted in layouts:
        made = cpu_call(sign("aten.neg.default", wanted)).args[0]
        assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
        items = storage_items(list(wanted.shape), list(wanted.stride()))
        assert made.untyped_storage().nbytes() == items * made.element_size()


def test_inputs_hold_noise_or_valid_indices() -> None:
    floats = cpu_call(sign("aten.neg.default", meta(100_003))).args[0]
    assert 0 < floats.min() < 0.1
    assert 0.9 < floats.max() < 1
    bools = cpu_call(sign("aten.neg.default", meta(1000, dtype=torch.bool))).args[0]
    assert 300 < bools.sum() < 700
    indices = cpu_call(sign("aten.neg.default", meta(1000, dtype=torch.int64))).args[0]
    assert not indices.any()


def test_sizes_come_without_running() -> None:
    found = sizes(sign("aten.mm.default", meta(1000, 20), meta(20, 10**6)))
    assert found.input_bytes == 4 * (1000 * 20 + 20 * 10**6)
    assert found.outputs == (((1000, 10**6), 4 * 10**9),)
    assert sizes(sign("aten.view.default", meta(4, 6), [24])).view
    added = sizes(sign("aten.add_.Tensor", meta(4, 6), meta(4, 6)))
    assert not added.view
    assert added.total_bytes == 2 * 4 * 24


def test_device_arguments_go_to_meta() -> None:
    call = meta_call(sign("aten.full.default", [1 << 40], 1.0, device=torch.device("cpu")))
    assert call.run().device.type == "meta"


@pytest.mark.parametrize("signature", ["", "{", "null", "[]", '["aten.nothing.default",[],{}]', '["mm",[],{}]'])
def test_what_cannot_be_decoded_is_unknown(signature: str) -> None:
    with pytest.raises(Undecodable):
        sizes(signature)
    assert cost_of(signature) == UNKNOWN


# ---------------------------------------------------------------------------------- measuring


def test_outputs_are_not_working_memory(device: str) -> None:
    assert cost_of(sign("aten.neg.default", meta(MIB)), device).working_bytes == 0
    norm = sign("aten.native_layer_norm.default", meta(64, 512), [512], None, None, 1e-5)
    assert cost_of(norm, device).seconds > 0


@pytest.fixture(scope="module")
def scratch() -> Iterator[str]:
    """Signature of an op on 3600 bytes that takes 7200 and 3600, frees the first, and gives out 3600 new.

    Registered once: torch.ops keeps a handle that dies with the library.
    """

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        first, second = torch.cat([x, x]), x.clone()
        del first
        out = x.clone()
        del second
        return [out, out.t(), x]

    library = torch.library.Library("gradstow_test", "FRAGMENT")
    library.define("scratch(Tensor x) -> Tensor[]")
    library.impl("scratch", run, "CompositeExplicitAutograd")
    yield sign("gradstow_test.scratch.default", meta(90, 10))
    del library


def test_working_bytes_are_the_peak_less_new_outputs(scratch: str) -> None:
    found = cost_of(scratch)
    assert (found.working_bytes, found.how) == (7200 + 3600 - 3600, "measured")


def test_in_place_ops_and_views_make_nothing(device: str) -> None:
    for signature in (
        sign("aten.copy_.default", meta(MIB), meta(MIB)),
        sign("aten.relu_.default", meta(MIB)),
        sign("aten.view.default", meta(MIB), [2, -1]),
        sign("aten.expand.default", meta(1, 10), [1 << 30, 10]),
    ):
        found = cost_of(signature, device)
        assert (found.working_bytes, found.how) == (0, "measured")


def test_batch_norm_with_running_statistics_runs(device: str) -> None:
    stats = [meta(16) for _ in range(4)]
    found = cost_of(sign("aten._native_batch_norm_legit.default", meta(4, 16, 8, 8), *stats, True, 0.1, 1e-5), device)
    assert found.how == "measured"
    assert found.seconds > 0


def test_an_op_that_refuses_its_inputs_is_unknown(device: str) -> None:
    refused = on(device, sign("aten.mm.default", meta(2, 3), meta(2, 3)))
    fine = on(device, sign("aten.mm.default", meta(2, 3), meta(3, 2)))
    table = measure([refused, fine, ""], device=device, limit_bytes=MIB)
    assert list(table.costs) == [refused, fine, ""]
    assert table.costs[refused] == UNKNOWN
    assert table.costs[""] == UNKNOWN
    assert table.costs[fine].how == "measured"


def test_each_op_is_measured_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Working bytes of one op do not depend on its neighbours, and repeats are measured once."""
    runs: list[str] = []
    real = _machine.Cpu.seconds
    monkeypatch.setattr(_machine.Cpu, "seconds", lambda self, text: runs.append(text) or real(self, text))
    ops = [
        on("cpu", sign("aten.neg.default", meta(1000))),
        on(
            "cpu",
            sign("aten.native_batch_norm_backward.default", *_backward_inputs(), True, 1e-5, [True] * 3),
        ),
        on("cpu", sign("aten.mul.Scalar", meta(1000), 2.0)),
    ]
    together = measure([*ops, *ops], device="cpu", limit_bytes=MIB)
    assert runs == ops
    alone = {text: cost_of(text).working_bytes for text in ops}
    assert {text: cost.working_bytes for text, cost in together.costs.items()} == alone


def _backward_inputs() -> list[torch.Tensor]:
    return [meta(4, 16, 8, 8), meta(4, 16, 8, 8), *(meta(16) for _ in range(5))]


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[int, int]] = []
    ops = [on("cpu", sign("aten.neg.default", meta(n))) for n in (1, 2, 3)]
    measure([*ops, ""], device="cpu", limit_bytes=MIB, progress=lambda *at: seen.append(at))
    assert seen == [(done, 7) for done in range(1, 8)]


def test_the_random_state_is_left_alone(device: str) -> None:
    random = [
        on(device, text)
        for text in (
            sign("aten.native_dropout.default", meta(1000), 0.5, True),
            sign("aten.rand_like.default", meta(1000)),
            sign("aten.normal_.default", meta(1000)),
            sign("aten.randperm.default", 1000, device=torch.device("meta")),
        )
    ]
    before = torch.get_rng_state(), torch.cuda.get_rng_state() if device != "cpu" else None
    table = measure(random, device=device, limit_bytes=MIB)
    assert {cost.how for cost in table.costs.values()} == {"measured"}
    assert torch.equal(before[0], torch.get_rng_state())
    if before[1] is not None:
        assert torch.equal(before[1], torch.cuda.get_rng_state())


def test_autocast_and_grad_mode_of_the_caller_do_not_reach_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[torch.dtype, bool]] = []
    real = _machine.tensors_in

    def look(out: Any) -> Any:
        seen.append((out.dtype, torch.is_grad_enabled()))
        return real(out)

    monkeypatch.setattr(_machine, "tensors_in", look)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        cost_of(sign("aten.mm.default", meta(8, 8), meta(8, 8)))
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.bfloat16
    assert seen == [(torch.float32, False)]


def test_measuring_inside_a_measurement_is_not_part_of_it() -> None:
    with measure_peak("cpu") as memory:
        kept = torch.empty(1000, dtype=torch.uint8)
        cost_of(sign("aten.neg.default", meta(MIB)))
    assert memory.peak_bytes < MIB
    assert memory.end_bytes == kept.numel()


def test_measuring_under_a_profiler_is_refused() -> None:
    with torch.autograd.profiler.profile(), pytest.raises(GradstowError, match="already running"):
        cost_of(sign("aten.neg.default", meta(10)))


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(GradstowError, match="cannot be measured"):
        measure([], device="xpu", limit_bytes=1)


def test_the_table_says_where_it_holds(device: str) -> None:
    table = measure([], device=device, limit_bytes=1)
    assert table.device == _machine.device_name(device)
    assert table.threads == torch.get_num_threads()
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table


# -------------------------------------------------------------------------------- extrapolation


def shapes_of(args: list[Any]) -> list[Any]:
    return [arg["T"][0] if isinstance(arg, dict) and "T" in arg else arg for arg in args]


@pytest.mark.parametrize(
    ("signature", "size", "wanted"),
    [
        (sign("aten.relu.default", meta(8, 64, 10, 10)), 8, [["n", 64, 10, 10]]),
        (sign("aten.mm.default", meta(800, 64), meta(64, 8)), 800, [["n", 64], [64, 8]]),
        # A weight gradient: the samples are the inner dimension of a transposed operand.
        (sign("aten.mm.default", meta(800, 64).t(), meta(800, 64)), 800, [[64, "n"], ["n", 64]]),
        (sign("aten.expand.default", meta(8, 1, 100), [8, 50, 100]), 8, [["n", 1, 100], ["n", 50, 100]]),
        (sign("aten.native_group_norm.default", meta(8, 4, 5, 5), None, None, 8, 4, 25, 2, 1e-5), 8, None),
    ],
)
def test_the_outermost_dimension_shrinks_everywhere(signature: str, size: int, wanted: Any) -> None:
    full = sizes(signature)
    limit = math.ceil(full.total_bytes / 3)
    found = shrink(signature, full, limit)
    assert found is not None
    smaller = round(size / found.scale)
    assert found.scale == size / smaller
    assert size / 8 <= smaller <= size / 3
    assert sizes(found.signature).fits(limit)
    args = shapes_of(json.loads(found.signature)[1])
    if wanted is None:  # the number of samples stands as a plain number, too
        assert args == [[smaller, 4, 5, 5], None, None, smaller, 4, 25, 2, 1e-5]
    else:
        assert args == [[smaller if part == "n" else part for part in shape] for shape in wanted]


def test_a_size_that_may_mean_channels_is_not_shrunk() -> None:
    """As many samples as channels: nothing tells them apart, and a kernel may read past a short weight."""
    batch = sign("aten.native_batch_norm.default", meta(64, 64, 8, 8), *[meta(64)] * 4, True, 0.1, 1e-5)
    assert shrink(batch, sizes(batch), MIB // 2) is None
    assert cost_of(batch, limit_bytes=MIB // 2).how == "extrapolated"


def test_work_that_grows_faster_is_not_scaled() -> None:
    square = sign("aten.mm.default", meta(500, 64), meta(500, 64).t())
    assert shrink(square, sizes(square), MIB // 2) is None


def test_extrapolated_working_bytes_scale(scratch: str) -> None:
    full = sizes(scratch)
    assert full.total_bytes == 3600 * 2  # the input, and a new block that two outputs share
    part = cost_of(scratch, limit_bytes=full.total_bytes // 3)
    assert (part.working_bytes, part.how) == (7200, "extrapolated")
    assert part.seconds > 0


def test_no_op_runs_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    real = _machine.real_call
    monkeypatch.setattr(_machine, "real_call", lambda text, device: ran.append(text) or real(text, device))
    tebibytes = [
        sign("aten.relu.default", meta(1 << 20, 1 << 18)),
        sign("aten.mm.default", meta(1 << 20, 1 << 20), meta(1 << 20, 1 << 20)),
        sign("aten.full.default", [1 << 38], 1.0, device=torch.device("meta")),
    ]
    table = measure([on("cpu", text) for text in tebibytes], device="cpu", limit_bytes=4 * MIB)
    assert {cost.how for cost in table.costs.values()} == {"extrapolated"}
    assert all(cost.seconds > 1 for cost in table.costs.values())
    assert all(sizes(text).total_bytes <= 4 * MIB for text in ran)


def test_analytic_costs_follow_bytes_and_flops() -> None:
    cpu = torch.device("cpu")

    def seconds(signature: str) -> float:
        return analytic(signature, sizes(signature), cpu).seconds

    add = [sign("aten.add.Tensor", meta(n, 1000), meta(n, 1000)) for n in (1000, 4000)]
    assert seconds(add[1]) == pytest.approx(4 * seconds(add[0]))
    matmul = [sign("aten.mm.default", meta(n, 4096), meta(4096, 4096)) for n in (4096, 8192)]
    assert seconds(matmul[1]) == pytest.approx(2 * seconds(matmul[0]))
    view = sign("aten.view.default", meta(1000, 1000), [1000000])
    assert analytic(view, sizes(view), cpu) == OpCost(0.0, 0, "extrapolated")


def test_outputs_that_depend_on_data_run_only_when_they_surely_fit() -> None:
    small = sign("aten.nonzero.default", meta(100, dtype=torch.bool))
    assert cost_of(small, limit_bytes=6400).how == "measured"
    assert cost_of(small, limit_bytes=6399) == UNKNOWN


# ---------------------------------------------------------------------------------------- cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADSTOW_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_cache, "_warned", False)
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the cache lets through to be measured."""
    calls: list[list[str]] = []
    real: Callable[..., CostTable] = _cache.measure

    def spy(signatures: Sequence[str], **kwargs: Any) -> CostTable:
        calls.append(list(signatures))
        return real(signatures, **kwargs)

    monkeypatch.setattr(_cache, "measure", spy)
    return calls


NEG, EXP = (on("cpu", sign(f"aten.{name}.default", meta(1000))) for name in ("neg", "exp"))


def test_what_was_measured_is_not_measured_again(folder: Path, asked: list[list[str]]) -> None:
    first = measured_costs([NEG, NEG], "cpu", MIB)
    second = measured_costs([EXP, NEG], "cpu", MIB)
    third = measured_costs([EXP, NEG], "cpu", MIB)
    assert asked == [[NEG], [EXP]]
    assert second.costs[NEG] == first.costs[NEG]
    assert third == second
    assert list(third.costs) == [EXP, NEG]
    assert len(list(folder.iterdir())) == 1


def test_unknown_costs_are_not_kept(folder: Path, asked: list[list[str]]) -> None:
    for _ in range(2):
        assert measured_costs([""], "cpu", MIB).costs == {"": UNKNOWN}
    assert asked == [[""], [""]]
    assert not folder.exists()


def test_an_extrapolated_cost_is_measured_once_the_limit_allows(folder: Path, asked: list[list[str]]) -> None:
    wide = on("cpu", sign("aten.neg.default", meta(100, 50)))
    hows = [measured_costs([wide], "cpu", limit).costs[wide].how for limit in (9000, 9000, MIB, 9000)]
    assert hows == ["extrapolated", "extrapolated", "measured", "measured"]
    assert asked == [[wide], [wide]]


def test_other_threads_and_settings_have_their_own_costs(folder: Path, asked: list[list[str]]) -> None:
    measured_costs([NEG], "cpu", MIB)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert measured_costs([NEG], "cpu", MIB).threads == threads + 1
    finally:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    try:
        measured_costs([NEG], "cpu", MIB)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [[NEG]] * 3
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "\x00\xff",
        lambda text: text.replace('"measured"', '"guessed"'),
        lambda text: text.replace('"measured"', "7"),
        lambda text: text.replace("[", "[NaN, ", 3),
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: json.dumps({**json.loads(text), "costs": {"x": [-1.0, 0, "measured"]}}),
        lambda text: json.dumps({**json.loads(text), "costs": [1, 2]}),
    ],
)
def test_a_damaged_cache_is_ignored_with_one_warning(
    folder: Path, asked: list[list[str]], damage: Callable[[str], str]
) -> None:
    measured_costs([NEG], "cpu", MIB)
    (file,) = folder.iterdir()
    file.write_text(damage(file.read_text()), encoding="latin-1")
    with pytest.warns(UserWarning, match="cost cache cannot be read") as caught:
        assert measured_costs([NEG], "cpu", MIB).costs[NEG].how == "measured"
    assert len(caught) == 1
    measured_costs([NEG], "cpu", MIB)
    assert asked == [[NEG], [NEG]], "the damaged file is replaced by a good one"


def test_an_unwritable_cache_is_ignored_with_one_warning(folder: Path, asked: list[list[str]]) -> None:
    folder.write_text("a file where the folder should be")
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(2):
            assert measured_costs([NEG], "cpu", MIB).costs[NEG].how == "measured"
    assert ["GRADSTOW_CACHE_DIR" in str(warning.message) for warning in caught] == [True]
    assert asked == [[NEG], [NEG]]


def test_the_oldest_entries_leave(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cache, "_MOST_ENTRIES", 3)
    key = _cache.cost_key("cpu")
    for name in "abcd":
        _cache._add(key, {name: OpCost(1.0)})
    _cache._add(key, {"b": OpCost(2.0)})  # measured again: the newest now
    _cache._add(key, {"e": OpCost(1.0)})
    assert {name: cost.seconds for name, cost in _cache._read(key).items()} == {"d": 1.0, "b": 2.0, "e": 1.0}


def _write_many(key: dict[str, Any], who: str) -> None:
    for number in range(40):
        _cache._add(key, {f"{who}{number}": OpCost(float(number), number)})


def test_two_processes_never_damage_the_file(folder: Path) -> None:
    key = _cache.cost_key("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside torch's idle threads
        context = multiprocessing.get_context("fork")
        writers = [context.Process(target=_write_many, args=(key, who)) for who in "ab"]
        for writer in writers:
            writer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while any(writer.is_alive() for writer in writers):
            _cache._read(key)
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0]
    found = _cache._read(key)
    assert {"a39", "b39"} & set(found)
    assert all(cost == OpCost(float(name[1:]), int(name[1:])) for name, cost in found.items())
    assert [file.suffix for file in folder.iterdir()] == [".json"]


# ------------------------------------------------------------------------------------------- devices elsewhere


def test_a_profile_prices_by_its_data_sheet() -> None:
    h100, t4 = find_profile("cuda:h100"), find_profile("cuda:t4")
    square = torch.empty(4096, 4096, device="meta")
    big = encode("aten.mm.default", (square, square), {})
    copy = encode("aten.neg.default", (torch.empty(64 * MIB, device="meta"),), {})
    view = encode("aten.t.default", (torch.empty(8, 8, device="meta"),), {})
    fast, slow = (analytic_costs([big, copy, view, ""], profile).costs for profile in (h100, t4))
    assert fast[big].seconds == pytest.approx(2 * 4096**3 / (0.6 * 67e12), rel=0.05)
    assert fast[copy].seconds == pytest.approx(2 * 4 * 64 * MIB / (0.8 * 3.35e12), rel=0.05)
    assert slow[big].seconds > 5 * fast[big].seconds
    assert fast[view].seconds == 0
    assert fast[""].how == "unknown"


def test_attention_on_cpu_has_a_formula() -> None:
    q = torch.empty(2, 4, 128, 64, device="meta")
    forward = encode("aten._scaled_dot_product_flash_attention_for_cpu.default", (q, q, q), {})
    seconds = analytic_costs([forward], find_profile("cuda:t4")).costs[forward].seconds
    assert seconds >= 4 * 2 * 4 * 128 * 128 * 64 / (0.6 * 8.1e12)


def test_an_unknown_profile_names_the_closest() -> None:
    with pytest.raises(GradstowError, match="no device profile 'cuda:h10'. Did you mean cuda:h100"):
        find_profile("cuda:h10")
