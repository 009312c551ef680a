"""Servers, JupyterLab in a browser, and how well its text can be read."""

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

from grpo_nb.files import write_json
from grpo_nb.machine import PROJECT_ROOT

CHROMIUM = [*filter(shutil.which, ("chromium", "chromium-browser", "google-chrome"))]
NEEDS_BROWSER = pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium")
TOKEN = "a-token-of-the-test"
SLOW = 120_000  # milliseconds; a kernel starts and runs the notebook
JUPYTERLAB = {  # settings of a fresh JupyterLab
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/themes": {"adaptive-theme": True},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
COLORS = """node => {
  const rgba = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g); return [r, g, b, a]; };
  const look = getComputedStyle, colors = [rgba(look(node).color)];
  for (; node; node = node.parentElement) colors.unshift(rgba(look(node).backgroundColor));
  return colors;
}"""


def contrast(node):
    """Of a node's text with what is behind it: 1 is none, 21 black on white."""
    color, lights = 255, []
    for *top, alpha in np.array(node.evaluate(COLORS), dtype=float):
        color = np.array(top) * alpha + color * (1 - alpha)
        lights.append(np.dot([0.2126, 0.7152, 0.0722], (color / 255) ** 2.2))
    low, high = sorted(lights[-2:])
    return (high + 0.05) / (low + 0.05)


@contextmanager
def served(*command, **variables):
    """(what a server prints until it names its address, the address)."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"], printed = os.environ | variables, ""
    with subprocess.Popen([sys.executable, "-m", *command], **options) as process:
        while not (found := re.search(r"http://127\S+\n", printed)):
            printed += (line := process.stdout.readline())
            assert line, f"it ended: {printed}"
        try:
            yield printed, found[0].strip()
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert process.returncode == 0


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return str(held.getsockname()[1])


@contextmanager
def jupyterlab(browser, notebook, settings):
    """A page of JupyterLab with a notebook open in it, its kernel idle."""
    for plugin, content in JUPYTERLAB.items():
        write_json(settings / f"@jupyterlab/{plugin}.jupyterlab-settings", content)
    names = ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "JUPYTER_CONFIG_DIR")
    environment = dict.fromkeys(names, str(settings)) | {"PYTHONPATH": str(PROJECT_ROOT)}
    command = ["jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.token={TOKEN}"]
    command += [f"--ServerApp.root_dir={notebook.parent}", f"--ServerApp.port={free_port()}"]
    with served(*command, "--ServerApp.ip=127.0.0.1", **environment) as (_, address):
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, color_scheme="light")
        page.set_default_timeout(SLOW)
        page.goto(f"{address.partition('?')[0]}/tree/{notebook.name}?token={TOKEN}&reset")
        page.get_by_role("button", name="| Idle").wait_for()
        page.keyboard.press("Control+b")  # no file browser
        yield page


def run_all_cells(page):
    for name in ("Run", "Run All Cells"):
        page.get_by_role("menuitem", name=name, exact=True).click()
