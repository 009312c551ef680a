"""Copies of executed notebooks at a folder or address that papermill can write to."""

import importlib.util
from pathlib import Path

# Scheme: the package that papermill needs for it, and papermill's extra that brings it.
EXTRAS = {
    "s3": ("boto3", "s3"),
    "gs": ("gcsfs", "gcs"),
    "abs": ("azure.storage.blob", "azure"),
    "adl": ("azure.datalake.store", "azure"),
}
PLAIN = ("", "http", "https", "hdfs")


def check_destination(place: str) -> None:
    """Raise ValueError where notebooks cannot go: unknown scheme, or its extra is missing."""
    scheme = place.partition("://")[0] if "://" in place else ""
    if scheme in PLAIN:
        return
    if scheme not in EXTRAS:
        known = ", ".join(f"{name}://" for name in (*EXTRAS, *PLAIN[1:]))
        raise ValueError(f"notebooks cannot go to {place}: use a folder, or one of {known}")
    package, extra = EXTRAS[scheme]
    if not _is_there(package):
        raise ValueError(f"{place} needs {package}: pip install 'papermill[{extra}]'")


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def copy_notebook(notebook: Path, place: str) -> list[str]:
    """Copy an executed notebook to `place`/run/.

    Returns:
        What went wrong, in words, if something did: the run goes on, its own copy is there.
    """
    from papermill.iorw import papermill_io

    if not place or not notebook.exists():
        return []
    target = f"{place.rstrip('/')}/{notebook.parent.parent.name}/{notebook.name}"
    try:
        if "://" not in target:
            Path(target).parent.mkdir(parents=True, exist_ok=True)
        papermill_io.write(notebook.read_text(encoding="utf-8"), target)
    except Exception as error:  # each store's client raises its own
        return [f"{target} was not written ({type(error).__name__}: {error}); see {notebook}"]
    return []
