"""What tests do with a page in a browser."""

MODES = "return [...document.querySelectorAll('[data-chart]')].map(box => box.dataset.mode)"
WAIT = 20


def turn(driver, mode):
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": mode}]})


def until(driver, condition):
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, WAIT).until(lambda driver: condition())


def marks(driver, chart, kind="mark-line"):
    return driver.execute_script(f"return document.querySelectorAll('[data-chart={chart}] .{kind} path').length")


def complaints(driver):
    return [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def click(driver, element):
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()
