"""The page of a training run in a browser: what is drawn, what a click does, in the dark and on a phone."""

import pytest

from subquad.report.training import write_training_page
from tests.report.browser import click, complaints, marks, until
from tests.report.test_training import made_up

METHODS = ["local", "linear", "softmax"]  # those that have made a step


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "report.html"
    write_training_page(made_up(), path)
    return path


def test_it_draws_the_curves_without_a_complaint(shown, trained):
    driver = shown(path=trained)
    assert marks(driver, "curves") == len(METHODS)
    assert complaints(driver) == []
    loaded = "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
    assert driver.execute_script(loaded) == 0


def test_the_switch_shows_another_figure_and_a_click_hides_a_method(shown, trained):
    driver = shown(path=trained)
    click(driver, driver.find_element("css selector", "input[value='validation bits']"))
    until(driver, lambda: marks(driver, "curves") == 2)  # the third was never evaluated
    click(driver, driver.find_element("css selector", "[data-method=linear]"))
    until(driver, lambda: marks(driver, "curves") == 1)
    click(driver, driver.find_element("css selector", "[data-all=show]"))
    until(driver, lambda: marks(driver, "curves") == 2)
    assert complaints(driver) == []


def test_a_point_says_what_it_is(shown, trained):
    from selenium.webdriver.common.action_chains import ActionChains

    driver = shown(path=trained)
    target = driver.find_elements("css selector", "[data-chart=curves] .mark-symbol path")[-1]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", target)
    ActionChains(driver).move_to_element(target).perform()
    until(driver, lambda: "step" in driver.find_element("id", "vg-tooltip-element").text)


def test_the_best_score_comes_first_and_headings_sort(shown, trained):
    driver = shown(path=trained)
    names = "return [...document.querySelectorAll('#summary tbody th')].map(cell => cell.textContent)"
    assert driver.execute_script(names)[:2] == ["linear", "local"]
    click(driver, driver.find_element("css selector", "#summary thead th:nth-child(4) button"))
    assert driver.execute_script(names)[:2] == ["linear", "local"]
    click(driver, driver.find_element("css selector", "#summary thead th:nth-child(4) button"))
    assert driver.execute_script(names)[:2] == ["local", "linear"]


def test_dark_has_dark_paper_and_light_words(shown, trained):
    colours = """const style = (found, name) => getComputedStyle(document.querySelector(found))[name];
        return [style('body', 'backgroundColor'), style('body', 'color'), style('[data-chart] .role-axis-label text', 'fill')];"""
    light, dark = (shown(mode, path=trained).execute_script(colours) for mode in ("light", "dark"))
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(13, 17, 23)"
    assert light[1] == light[2]
    assert dark[1] == dark[2] != light[2]


def test_a_phone_shows_all_of_it_without_scrolling_sideways(shown, trained):
    driver = shown(width=390, path=trained)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
    right = "return document.querySelector('[data-chart] svg.marks').getBoundingClientRect().right"
    assert driver.execute_script(right) <= 390
    assert complaints(driver) == []
