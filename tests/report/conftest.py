"""One page and one browser for all tests that look at them."""

import shutil

import pytest

from subquad.report import write_page
from tests.report.browser import MODES, WAIT, turn
from tests.report.made_up import made_up

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
]  # fmt: skip


@pytest.fixture(scope="session")
def results():
    return made_up()


@pytest.fixture(scope="session")
def page(results, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(results, path)
    return path


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    selenium = pytest.importorskip("selenium.webdriver", reason="pip install selenium, to look at the page in Chromium")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("apt-get install chromium chromium-driver, to look at the page in Chromium")
    options = selenium.ChromeOptions()
    options.binary_location = paths[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=selenium.ChromeService(paths[1]))
    yield driver
    driver.quit()


@pytest.fixture
def shown(chromium, page):
    """Opens the page anew, light or dark, at a width."""
    from selenium.webdriver.support.ui import WebDriverWait

    def open_page(mode="light", width=1200, path=page):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        turn(chromium, mode)
        chromium.get(path.as_uri())
        WebDriverWait(chromium, WAIT).until(lambda driver: set(driver.execute_script(MODES)) == {mode})
        return chromium

    return open_page
