"""`python -m grpo_nb reward-lab`: serve the Reward Lab with Voilà, to this machine only."""

import os
import secrets
import socket
import webbrowser
from urllib.parse import quote

from grpo_nb.pipeline.notebooks import execute_notebook, set_environment
from grpo_nb.runs import NOTEBOOKS, Run
from grpo_nb.runs.config import of_stage

HOST = "127.0.0.1"
SERVED = "notebooks/reward_lab.ipynb"


def serve(name: str, profile: str = "auto", port: int = 8866, browser: bool = True) -> None:
    """Serve the Reward Lab of a run until Ctrl-C.

    The address contains a token: `$GRPO_NB_TOKEN`, or a new one.

    Args:
        name: The name of the run; notebook 1 is executed first if it is not done.
        profile: The profile for notebook 1.
        port: The port on 127.0.0.1.
        browser: Whether to open the address, which is printed in any case.

    Raises:
        RuntimeError: Voilà is missing, the port is taken, or notebook 1 failed.
    """
    try:
        from voila.app import Voila
    except ImportError:
        raise RuntimeError("Voilà is not installed: type `make install`") from None
    run = Run(name)
    with socket.socket() as probe:
        if probe.connect_ex((HOST, port)) == 0:
            raise RuntimeError(f"port {port} is taken: choose another one with --port")
    (run / SERVED).parent.mkdir(parents=True, exist_ok=True)
    if run.state("01").status != "done":
        print(f"{NOTEBOOKS['01']} comes first", flush=True)
        parameters = {"run_name": name, "profile": profile}
        execute_notebook(run, "01", parameters | {"settings": of_stage("01", run.settings())})
    set_environment(run)
    token = os.environ.pop("GRPO_NB_TOKEN", "") or secrets.token_urlsafe(24)
    url = f"http://{HOST}:{port}/?token={quote(token)}"

    class RewardLabApp(Voila):
        def launch_browser(self) -> None:  # called once the server listens
            print(f"The Reward Lab of run {name!r}: {url}\nCtrl-C ends it.", flush=True)
            if browser:
                webbrowser.open(url)

    app = RewardLabApp(ip=HOST, port=port, port_retries=0, token=token, log_level="ERROR")
    app.config.KernelManager.transport = "ipc"  # only this user can reach the kernels
    app.config.VoilaConfiguration.show_tracebacks = True
    prepare(run)
    app.initialize([str(run / SERVED)])
    app.start()


def prepare(run: Run) -> None:
    """Write the notebook to serve, which contains only the run's lab."""
    import nbformat

    kind = "Environment" if run.config().data.environment else "Reward"
    title = nbformat.v4.new_markdown_cell(f"# The {kind} Lab of run {run.name}")
    lab = nbformat.v4.new_code_cell(f"from grpo_nb import views\n\nviews.open_lab({run.name!r})")
    notebook = nbformat.v4.new_notebook(cells=[title, lab])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, run / SERVED)
