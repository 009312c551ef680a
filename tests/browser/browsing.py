"""Servers, JupyterLab in a browser, and how well its text can be read."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import nbformat
import numpy as np
import pytest
from conftest import free_port

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
COLORS = """nodes => nodes.map(node => {
  const rgba = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g); return [r, g, b, a]; };
  const look = getComputedStyle, colors = [rgba(look(node).color)], text = node.innerText;
  for (; node; node = node.parentElement) colors.unshift(rgba(look(node).backgroundColor));
  return [text, colors];
})"""


def unreadable(nodes):
    """The texts that differ too little from what is behind them, with their contrast.

    1 is none, 21 black on white.
    """
    contrasts = []
    for text, colors in nodes.evaluate_all(COLORS):
        color, lights = 255, []
        for *top, alpha in np.array(colors, dtype=float):
            color = np.array(top) * alpha + color * (1 - alpha)
            lights.append(np.dot([0.2126, 0.7152, 0.0722], (color / 255) ** 2.2))
        low, high = sorted(lights[-2:])
        contrasts.append(((high + 0.05) / (low + 0.05), text))
    assert contrasts
    return [pair for pair in contrasts if pair[0] <= 4.5]


@contextmanager
def served(folder, settings):
    """The address of JupyterLab in a folder."""
    for plugin, content in JUPYTERLAB.items():
        write_json(settings / f"@jupyterlab/{plugin}.jupyterlab-settings", content)
    names = ("JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR", "JUPYTER_CONFIG_DIR")
    environment = dict.fromkeys(names, str(settings)) | {"PYTHONPATH": str(PROJECT_ROOT)}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.{name}" for name in (f"token={TOKEN}", "ip=127.0.0.1")]
    command += [f"--ServerApp.root_dir={folder}", f"--ServerApp.port={free_port()}"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=os.environ | environment, **options) as process:
        printed = iter(process.stdout.readline, "")
        addresses = (re.search(r"http://127[^\s?]+", line) for line in printed)
        try:
            yield next(filter(None, addresses))[0]
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert process.returncode == 0


@contextmanager
def jupyterlab(browser, tmp_path_factory, *sources):
    """A page of JupyterLab with a notebook of these cells, all of which are run."""
    folder = tmp_path_factory.mktemp("root")
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, folder / "mine.ipynb")
    with served(folder, tmp_path_factory.mktemp("settings")) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, color_scheme="light")
        page.set_default_timeout(SLOW)
        page.goto(f"{address}/tree/mine.ipynb?token={TOKEN}&reset")
        page.get_by_role("button", name="| Idle").wait_for()
        page.keyboard.press("Control+b")  # no file browser
        for name in ("Run", "Run All Cells"):
            page.get_by_role("menuitem", name=name, exact=True).click()
        yield page
