"""The page in a real browser: no errors, no network, and numbers that are those of its data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradstow as gs
from gradstow._units import format_bytes, format_seconds
from gradstow.report import profile_page

By = pytest.importorskip("selenium.webdriver.common.by").By
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

SMALL, LARGE = (390, 844), (1280, 900)


@pytest.fixture(scope="session")
def profile() -> dict[str, Any]:
    torch.manual_seed(0)
    blocks = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*blocks, nn.Linear(64, 64))
    batch = torch.randn(256, 64)
    found = gs.profile(model, batch, loss=lambda out, _: out.square().mean(), budget="80%", points=4, measure=True)
    data = found.to_json()
    data["plan"]["model"] = "</script><b>odd & named"  # what is in a name stays text
    return data


@pytest.fixture
def opened(browser: Any, profile: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:
    def open_(size: tuple[int, int] = LARGE, data: dict[str, Any] | None = None) -> Any:
        file = tmp_path / "page.html"
        file.write_text(profile_page(profile if data is None else data), encoding="utf-8")
        browser.get_log("browser"), browser.get_log("performance")
        # a window has a least width; a device has none
        browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == SMALL},
        )
        browser.get(file.as_uri())
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        return browser

    return open_


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def asked(browser: Any) -> list[str]:
    """Addresses that the page asked for, its own left out."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:") and not url.endswith("page.html")]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_errors_and_without_a_network(
    opened: Callable[..., Any], size: tuple[int, int], scheme: str, artefacts: Path
) -> None:
    page = opened(size)
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    assert errors(page) == []
    assert asked(page) == []
    wide = page.execute_script("return document.documentElement.scrollWidth")
    assert wide <= size[0], "only tables scroll sideways"
    paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    assert page.find_element(By.ID, "title").text.startswith("</script><b>odd & named")
    page.save_screenshot(str(artefacts / f"page-{scheme}-{size[0]}.png"))


def test_a_console_error_would_be_seen(opened: Callable[..., Any]) -> None:
    page = opened()
    page.execute_script("setTimeout(() => { throw new Error('planted'); }, 0)")
    page.execute_async_script("setTimeout(arguments[0], 50)")
    assert any("planted" in message for message in errors(page))


def test_the_numbers_are_those_of_the_data(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    page = opened()
    text = page.find_element(By.ID, "numbers").text
    for name in ("plain", "planned"):
        assert format_bytes(profile["peaks"][name]["peak_bytes"]) in text
        assert format_bytes(profile["measured"][name]["peak_bytes"]) in text
    cells = [row.text for row in page.find_elements(By.CSS_SELECTOR, "#parts tbody tr")]
    parts = profile["peaks"]["plain"]["parts"]
    assert len(cells) == len({*parts, *profile["peaks"]["planned"]["parts"]}) + 1
    for part, nbytes in parts.items():
        (row,) = [cell for cell in cells if cell.startswith(profile["parts"][part])]
        assert format_bytes(nbytes) in row
    points = page.find_elements(By.CSS_SELECTOR, "#points tbody tr")
    assert len(points) == len(profile["frontier"]["points"])
    assert page.find_element(By.ID, "chosen")
    assert f"{100 * profile['plan']['gap']:.2f} %" in page.find_element(By.ID, "proof").text


def test_bytes_and_seconds_read_as_in_the_text(opened: Callable[..., Any]) -> None:
    page = opened()
    counts = [0, 7, 1023, 1024, 1280, 1792, 3328, 1023 * 1024, 10**6, 1048524, 5 * 2**30, 3 * 2**40 + 2**35, 2**53]
    assert page.execute_script("return arguments[0].map(bytes)", counts) == [format_bytes(n) for n in counts]
    times = [0.0, 2.5e-6, 3.5e-6, 1e-3, 0.00125, 0.0625, 0.99999, 1.125, 12.345]
    assert page.execute_script("return arguments[0].map(seconds)", times) == [format_seconds(t) for t in times]


def test_what_is_saved_is_predicted_and_measured_side_by_side(
    opened: Callable[..., Any], profile: dict[str, Any]
) -> None:
    page, run = opened(), profile["measured"]["plain"]["saved"]
    rows = [row.text for row in page.find_elements(By.CSS_SELECTOR, "#saved tbody tr")]
    total = format_bytes(sum(profile["saved"].values())), format_bytes(sum(run.values()))
    assert rows[-1] == f"all {total[0]} {total[1]}"
    name = max(run, key=lambda one: run[one])
    assert f"{name} {format_bytes(profile['saved'][name])} {format_bytes(run[name])}" in rows


def test_what_holds_a_value_is_named(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    page = opened()
    chart = page.find_elements(By.CSS_SELECTOR, "#charts svg")[0]
    chart.send_keys("p")
    held = profile["peaks"]["plain"]["rows"]
    saved = max((row for row in held if row["part"] == "saved"), key=lambda row: row["bytes"])
    assert f"until {saved['until']}" in page.find_element(By.ID, "moment").text
    page.find_element(By.XPATH, "//summary[starts-with(., 'Every tensor')]").click()
    rows = page.find_elements(By.CSS_SELECTOR, "#held tbody tr")
    assert len(rows) == len(held)
    for row, one in zip(rows, held, strict=True):
        assert row.text.endswith(format_bytes(one["bytes"]))
        assert one["until"] in row.text


def test_long_names_do_not_widen_the_page(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    """A name without a space, in every place that shows one."""
    data = json.loads(json.dumps(profile).replace("addmm", "y" * 400))
    data["modules"]["plain"]["children"][0]["name"] = data["plan"]["rows"][0]["module"] = "x" * 400
    for size in (SMALL, LARGE):
        page = opened(size, data)
        assert errors(page) == []
        assert page.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_on_a_phone_text_is_large_enough_and_fingers_hit(opened: Callable[..., Any]) -> None:
    page = opened(SMALL)
    heights = page.execute_script(
        "return [...document.querySelectorAll('#curve text')].map((text) => text.getBoundingClientRect().height)"
    )
    assert min(heights) > 10
    places = page.execute_script(
        "return [...document.querySelectorAll('#curve text')].map((text) => text.getBoundingClientRect())"
    )
    assert all(place["left"] >= 0 and place["right"] <= SMALL[0] for place in places)
    small = page.execute_script(
        "return [...document.querySelectorAll('button, select, input, summary')].filter("
        "(element) => element.offsetHeight && element.offsetHeight < 24).map((element) => element.outerHTML)"
    )
    assert small == []
    rows = page.execute_script("return [...document.querySelectorAll('#rows tbody tr')].map((row) => row.offsetHeight)")
    assert max(rows) < 80, "a reason takes no line per word"


def test_the_table_filters_and_sorts(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    page, rows = opened(), profile["plan"]["rows"]
    shown = lambda: page.find_elements(By.CSS_SELECTOR, "#rows tbody tr")  # noqa: E731
    assert len(shown()) == len(rows)
    page.find_element(By.ID, "filter").send_keys("gelu")
    expected = [row for row in rows if "gelu" in " ".join(map(str, row.values())).lower()]
    assert 0 < len(shown()) == len(expected) < len(rows)
    total = format_bytes(sum(row["bytes"] for row in expected))
    assert page.find_element(By.ID, "count").text == f"{len(expected)} of {len(rows)} values, {total}"
    page.find_element(By.ID, "filter").clear()
    page.find_element(By.ID, "filter").send_keys(" ")
    decision = rows[0]["decision"]
    page.find_element(By.CSS_SELECTOR, f"#decision option[value={decision}]").click()
    assert len(shown()) == sum(row["decision"] == decision for row in rows)
    page.find_element(By.CSS_SELECTOR, "#decision option").click()
    head = page.find_element(By.CSS_SELECTOR, "#rows th[data-key=module] button")
    for direction in ("ascending", "descending"):
        head.send_keys(Keys.ENTER)
        modules = [row.find_elements(By.TAG_NAME, "td")[3].text for row in shown()]
        assert modules == sorted(modules, key=str.lower, reverse=direction == "descending")
        assert page.find_element(By.CSS_SELECTOR, "#rows th[data-key=module]").get_attribute("aria-sort") == direction


def test_the_keyboard_reaches_every_moment(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    page = opened()
    first, planned = page.find_elements(By.CSS_SELECTOR, "#charts svg")
    told = lambda: page.find_element(By.ID, "moment").text  # noqa: E731
    page.execute_script("arguments[0].focus()", first)
    count = len(profile["timelines"]["plain"]["bytes"])
    first.send_keys(Keys.HOME)
    assert told().startswith(f"plain PyTorch, moment 1 of {count}: ")
    first.send_keys(Keys.ARROW_RIGHT)
    assert f"moment 2 of {count}: {format_bytes(profile['timelines']['plain']['bytes'][1])}" in told()
    first.send_keys("p")
    assert format_bytes(profile["peaks"]["plain"]["peak_bytes"]) in told().splitlines()[0]
    assert profile["peaks"]["plain"]["at"] in told()
    first.send_keys(Keys.END)
    assert f"moment {count} of {count}" in told()
    page.execute_script("arguments[0].focus()", planned)
    assert told().startswith("planned, ")
    reached = set()
    page.execute_script("document.activeElement.blur()")
    for _ in range(60):
        page.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.execute_script("return document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "across", "svg", "step", "filter", "decision", "SUMMARY", "BUTTON"} <= reached


def test_pointing_names_what_is_alive(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    page = opened()
    chart = page.find_elements(By.CSS_SELECTOR, "#charts svg")[0]
    page.execute_script(
        "const box = arguments[0].getBoundingClientRect(); arguments[0].dispatchEvent("
        "new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 5}))",
        chart,
    )
    told = page.find_element(By.ID, "moment").text
    names = {life["name"] for life in profile["timelines"]["plain"]["lives"]}
    assert sum(name in told for name in names) >= 3


def test_five_thousand_values_open_quickly(opened: Callable[..., Any], profile: dict[str, Any]) -> None:
    """Judged against what the same browser needs for a plain table of that many rows, as machines differ."""
    line = profile["timelines"]["planned"]
    many = -(-5000 // len(profile["plan"]["rows"]))
    longer = {
        **line,
        "seconds": [i * 1e-3 for i in range(many * len(line["bytes"]))],
        "bytes": line["bytes"] * many,
        "at": line["at"] * many,
        "parts": {part: levels * many for part, levels in line["parts"].items()},
        "lives": line["lives"] * many,
    }
    data = {
        **profile,
        "plan": {**profile["plan"], "rows": profile["plan"]["rows"] * many},
        "timelines": {"plain": longer, "planned": longer},
    }
    page = opened(LARGE, data)
    assert len(data["plan"]["rows"]) >= 5000
    assert errors(page) == []
    assert len(page.find_elements(By.CSS_SELECTOR, "#rows tbody tr")) == 200
    ready = page.execute_script(
        "return performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart"
    )
    plain = page.execute_script(
        "const start = performance.now(), table = document.createElement('table');"
        "for (let i = 0; i < 5000; i += 1) { const row = table.insertRow();"
        "for (let j = 0; j < 8; j += 1) row.insertCell().textContent = `value ${i} ${j}`; }"
        "document.body.append(table); table.getBoundingClientRect(); return performance.now() - start;"
    )
    print(f"opened in {ready:.0f} ms; a table of 5,000 rows takes {plain:.0f} ms")
    assert ready < 20 * plain
    page.find_element(By.ID, "filter").send_keys("no such value")
    assert page.find_elements(By.CSS_SELECTOR, "#rows tbody tr") == []
