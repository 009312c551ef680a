"""The run's model on the hub."""

from pathlib import Path
from typing import NamedTuple

from grpo_nb.export.card import model_card
from grpo_nb.export.merging import MERGED, check_complete
from grpo_nb.runs import Run, sha256


class Push(NamedTuple):
    """What goes up: {path in the repository: file here}, and the model card."""

    repo: str
    files: dict[str, Path]
    card: str

    def describe(self) -> str:
        sizes = {name: path.stat().st_size for name, path in self.files.items()}
        lines = [f"  {name}  {size / 1e6:.2f} MB" for name, size in sizes.items()]
        return "\n".join([f"{self.repo}:", "  README.md  (the model card)", *lines])


def plan_push(run: Run, repo: str) -> Push:
    """Everything of model/merged, the GGUF files, the parity report and the pictures.

    Raises:
        ValueError: Not of the form OWNER/NAME, a file is not as stage 04 wrote it, or a
            stage before was run again since.
        FileNotFoundError: No whole merged model.
    """
    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ValueError(f"--repo {repo!r}: give OWNER/NAME")
    run.refuse_stale()
    folder = check_complete(run / "model/merged")
    _check_written(run)
    files = {path.name: path for path in sorted(folder.iterdir()) if path.name != "README.md"}
    beside = [*sorted((run / "model").glob("*.gguf")), run / "model/parity.json"]
    files |= {path.name: path for path in beside if path.exists()}
    files |= {f"figures/{path.name}": path for path in sorted((run / "figures").glob("*.png"))}
    return Push(repo, files, model_card(run, repo))


def _check_written(run: Run) -> None:
    """Refuse a merged model that a copy or a full disk has cut short."""
    recorded = run.manifest().get("04", {}).get("outputs", {})
    for name, digest in recorded.items():
        if name.startswith(f"{MERGED}/") and (
            not (run / name).is_file() or sha256(run / name) != digest
        ):
            raise ValueError(
                f"{run / name} is not as 04_merge_and_infer wrote it (its sha256 is another than "
                "in manifest.json): run that notebook (--from 04) again"
            )


def push(planned: Push, private: bool = True) -> str:
    """Create the repository if need be and upload in one commit; returns the commit's address.

    The token is the hub client's own: `$HF_TOKEN`, or `hf auth login`.

    Raises:
        RuntimeError: The hub refused.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError

    operations = [CommitOperationAdd("README.md", planned.card.encode())]
    operations += [CommitOperationAdd(name, path) for name, path in planned.files.items()]
    api = HfApi()
    try:
        api.create_repo(planned.repo, private=private, exist_ok=True)
        commit = api.create_commit(
            planned.repo, operations, commit_message="Model trained with grpo_nb"
        )
    except HfHubHTTPError as error:
        raise RuntimeError(
            f"the hub refused {planned.repo} ({str(error).splitlines()[0]}): see that $HF_TOKEN "
            "or `hf auth login` gives a token that may write there"
        ) from None
    return commit.commit_url
