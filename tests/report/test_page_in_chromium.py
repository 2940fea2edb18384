"""The page in a browser: what is drawn, what a click does, in the dark and on a phone."""

import pytest

from subquad.report import write_page
from tests.report.browser import MODES, click, complaints, marks, turn, until
from tests.report.made_up import METHODS, made_up

HOSTILE = "</script><img src=x onerror=alert(1)>"


def column(driver, table, number):
    cells = f"return [...document.querySelectorAll('#{table} tbody tr')].map(row => row.cells[{number}].textContent.trim())"
    return driver.execute_script(cells)


def heading(driver, table, number):
    return driver.find_element("css selector", f"#{table} thead th:nth-child({number + 1})")


def test_it_draws_every_chart_without_a_complaint(shown, tmp_path):
    driver = shown()
    solid_and_dashed = len(METHODS) + 1 + 1  # the baseline's end is predicted
    assert marks(driver, "time") == solid_and_dashed
    assert marks(driver, "memory") == 2 * (len(METHODS) + 1)
    assert marks(driver, "fidelity", "mark-symbol") == len(METHODS)
    labels = driver.execute_script(
        "return [...document.querySelectorAll('[data-chart=fidelity] .mark-text text')].map(t => t.textContent)"
    )
    assert set(METHODS) <= set(labels)
    assert complaints(driver) == []
    assert (
        driver.execute_script("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
        == 0
    )
    driver.save_screenshot(str(tmp_path / "light.png"))


def test_a_click_on_a_method_hides_it_and_another_shows_it(shown):
    driver = shown()
    before = {chart: marks(driver, chart) for chart in ("time", "memory")}
    button = driver.find_element("css selector", "[data-method=linear]")
    click(driver, button)
    until(driver, lambda: marks(driver, "time") == before["time"] - 1)
    until(driver, lambda: marks(driver, "memory") == before["memory"] - 2)
    until(driver, lambda: marks(driver, "fidelity", "mark-symbol") == len(METHODS) - 1)
    assert {b.get_attribute("aria-pressed") for b in driver.find_elements("css selector", "[data-method=linear]")} == {"false"}
    click(driver, button)
    until(driver, lambda: marks(driver, "time") == before["time"])
    click(driver, driver.find_element("css selector", "[data-all=hide]"))
    until(driver, lambda: marks(driver, "time") == 2)
    click(driver, driver.find_element("css selector", "[data-all=show]"))
    until(driver, lambda: marks(driver, "time") == before["time"])


def test_nothing_is_left_and_all_comes_back(shown):
    driver = shown()
    before = marks(driver, "time")
    click(driver, driver.find_element("css selector", "[data-all=hide]"))
    click(driver, driver.find_element("css selector", "[data-method=sdpa]"))
    until(driver, lambda: marks(driver, "time") == 0)
    click(driver, driver.find_element("css selector", "[data-all=show]"))
    until(driver, lambda: marks(driver, "time") == before)
    assert complaints(driver) == []


def test_short_results_and_names_that_would_act(shown, tmp_path):
    results = made_up(["linear", HOSTILE], [512])
    results.refusals[HOSTILE] = HOSTILE
    write_page(results, tmp_path / "a.html")
    driver = shown(path=tmp_path / "a.html")
    assert marks(driver, "time", "mark-symbol") == 2 * 3  # what is seen, and what the pointer meets
    assert complaints(driver) == []


def test_the_switch_changes_the_pass_and_keeps_what_is_hidden(shown):
    driver = shown()
    forward = marks(driver, "time")
    click(driver, driver.find_element("css selector", "[data-method=linear]"))
    until(driver, lambda: marks(driver, "time") == forward - 1)
    click(driver, driver.find_element("css selector", "input[value=training]"))
    until(driver, lambda: marks(driver, "time") == 2 * len(METHODS) - 1)  # one failed where it would be predicted
    click(driver, driver.find_element("css selector", "input[value=forward]"))
    until(driver, lambda: marks(driver, "time") == forward - 1)


def test_a_point_says_what_it_is(shown):
    from selenium.webdriver.common.action_chains import ActionChains

    driver = shown()
    click(driver, driver.find_element("css selector", "[data-all=hide]"))
    until(driver, lambda: marks(driver, "time") == 2)
    targets = driver.find_elements("css selector", "[data-chart=time] .mark-symbol path")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", targets[-1])
    ActionChains(driver).move_to_element(targets[-1]).perform()
    until(driver, lambda: "predicted" in driver.find_element("id", "vg-tooltip-element").text)
    text = driver.find_element("id", "vg-tooltip-element").text
    assert all(word in text for word in ("sdpa", "65,536", "120 s", "against SDPA"))


def test_headings_sort_by_number_and_by_word_with_gaps_last(shown):
    driver = shown()
    click(driver, heading(driver, "crossovers", 2).find_element("tag name", "button"))
    texts = column(driver, "crossovers", 2)
    starts = [int(text.replace(",", "").replace("≤ ", "")) for text in texts if text[-1].isdigit()]
    assert starts == sorted(starts)
    assert texts[-1] == "-"
    assert heading(driver, "crossovers", 2).get_attribute("aria-sort") == "ascending"
    heading(driver, "crossovers", 2).find_element("tag name", "button").send_keys("\n")
    assert heading(driver, "crossovers", 2).get_attribute("aria-sort") == "descending"
    texts = column(driver, "crossovers", 2)
    assert [int(t.replace(",", "").replace("≤ ", "")) for t in texts if t[-1].isdigit()] == starts[::-1]
    assert texts[-1] == "-"
    click(driver, heading(driver, "crossovers", 0).find_element("tag name", "button"))
    assert column(driver, "crossovers", 0) == sorted(column(driver, "crossovers", 0))
    assert heading(driver, "crossovers", 2).get_attribute("aria-sort") is None


def test_dark_follows_the_system_while_the_page_is_open(shown, tmp_path):
    driver = shown()

    def colours():
        """Of the page, of all words on axes, behind the charts, and of the line at 1."""
        script = """const page = getComputedStyle(document.body).backgroundColor;
            const unique = (found, name) => [...new Set([...document.querySelectorAll(found)].map(x => getComputedStyle(x)[name]))];
            return [page, unique('[data-chart] .role-axis-label text', 'fill'), unique('[data-chart] svg.marks', 'backgroundColor'),
              unique('[data-chart=fidelity] .mark-rule.role-mark line', 'stroke')];"""
        return driver.execute_script(script)

    light = colours()
    click(driver, driver.find_element("css selector", "[data-method=linear]"))
    hidden = len(METHODS) + 1
    until(driver, lambda: marks(driver, "time") == hidden)
    turn(driver, "dark")
    until(driver, lambda: set(driver.execute_script(MODES)) == {"dark"})
    dark = colours()
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(13, 17, 23)"
    assert len(light[1]) == len(dark[1]) == 1
    assert light[1] != dark[1]
    assert light[2] == dark[2] == ["rgba(0, 0, 0, 0)"]
    assert (light[3], dark[3]) == (light[1], dark[1])
    assert marks(driver, "time") == hidden
    driver.save_screenshot(str(tmp_path / "dark.png"))


@pytest.mark.parametrize("width", [360, 768])
def test_a_narrow_page_does_not_scroll_sideways(shown, width, tmp_path):
    driver = shown(width=width)
    driver.execute_script("document.querySelector('details').open = true")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    charts = driver.execute_script(
        "return [...document.querySelectorAll('[data-chart] svg.marks')].map(x => x.getBoundingClientRect().right)"
    )
    assert len(charts) == 3
    assert max(charts) <= width
    boxes = driver.execute_script("return [...document.querySelectorAll('.scroll')].map(x => [x.scrollWidth, x.clientWidth])")
    assert any(inner > outer for inner, outer in boxes)
    driver.save_screenshot(str(tmp_path / "narrow.png"))
