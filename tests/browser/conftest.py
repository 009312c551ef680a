import shutil

import pytest
from browsing import CHROMIUM
from playwright.sync_api import sync_playwright


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        yield playwright.chromium.launch(executable_path=shutil.which(CHROMIUM[0]), args=flags)
