"""The page of a conversion in a browser: maps and curves are drawn, in the dark and on a phone."""

import pytest

from subquad.report.conversion import write_conversion_page
from tests.report.browser import click, complaints, marks, until
from tests.report.test_conversion import MEASURES, made_up


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "report.html"
    write_conversion_page(made_up(), path)
    return path


def squares(driver, name):
    return marks(driver, name, "mark-rect.role-mark")


@pytest.mark.parametrize(("mode", "width"), [("light", 1200), ("dark", 1200), ("light", 390)])
def test_it_draws_maps_and_curves_without_a_complaint(shown, converted, mode, width):
    driver = shown(mode, width, converted)
    assert [squares(driver, name) for name in MEASURES] == [12, 8, 12, 8]
    assert marks(driver, "repair") == 1
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width
    edges = "return [...document.querySelectorAll('[data-chart] svg.marks')].map(svg => svg.getBoundingClientRect().right)"
    assert max(driver.execute_script(edges)) <= width
    assert marks(driver, "repair", "mark-symbol") == 2 * 3  # a mark, and what is easier to hit
    click(driver, driver.find_element("css selector", "input[value=lora]"))
    until(driver, lambda: marks(driver, "repair", "mark-symbol") == 2 * 2)
    assert complaints(driver) == []
    loaded = "return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
    assert driver.execute_script(loaded) == 0


def test_before_and_after_stand_side_by_side_where_there_is_room(shown, converted):
    place = (
        "return ['swap', 'now'].map(when => document.querySelector(`[data-chart=error-${when}]`).getBoundingClientRect().top)"
    )
    wide, narrow = (shown("light", width, converted).execute_script(place) for width in (1200, 390))
    assert wide[0] == wide[1]
    assert narrow[0] < narrow[1]


def test_no_damage_has_the_colour_of_the_page_and_much_has_the_opposite(shown, converted):
    ends = "const found = document.querySelectorAll('[data-chart=kl-swap] .mark-rect.role-mark path'); return [0, 11].map(i => found[i].getAttribute('fill'))"
    light, dark = (shown(mode, path=converted).execute_script(ends) for mode in ("light", "dark"))
    brightness = lambda colour: sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
    assert brightness(light[0]) > brightness(light[1])
    assert brightness(dark[0]) < brightness(dark[1])
