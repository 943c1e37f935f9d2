"""``torchrl-ext chain``: look at and unpack the versions that a trainer published."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrl_ext.base.errors import ConfigError
from torchrl_ext.cli.frame import answer

if TYPE_CHECKING:
    from torchrl_ext.data.versions.roots import Reader

__all__ = ["VERSION_HEAD", "app", "version_line"]

Root = Annotated[str, typer.Argument(metavar="ROOT", help="Directory or URL of the versions.")]
Base = Annotated[
    str | None, typer.Option(metavar="DIR", help="Checkpoint that counts as version 0 if the first version is a delta.")
]
Version = Annotated[int, typer.Argument(metavar="VERSION")]
Out = Annotated[str, typer.Argument(metavar="OUT_DIR", help="A new or empty directory.")]

app = typer.Typer(help="List and unpack the versions under a root.")


def _reader(root: str, base: str | None) -> Reader:
    from torchrl_ext.data.stores.opening import open_store
    from torchrl_ext.data.versions.roots import Reader

    store = open_store(root)
    if not store.available():
        raise ConfigError(f"there is nothing at {root}", expected="a root that a delta transport publishes into")
    return Reader(store, base)


@app.command()
def ls(root: Root, base: Base = None) -> int:
    """List every version: kind, base, bytes, encoding, density.

    Examples:
    * `torchrl-ext chain ls /shared/updates`
    * `torchrl-ext chain ls s3://bucket/run-7`
    """
    reader = _reader(root, base)
    rows = [reader.summary(number) for number in reader.numbers()]
    document = {"root": reader.store.url, "latest": reader.chain.latest(), "versions": rows}
    return answer(document, VERSION_HEAD, *map(version_line, rows), f"latest: {document['latest']}")


VERSION_HEAD = f"{'version':>7}  {'kind':<14}{'base':>7}{'delta bytes':>14}{'full bytes':>15}  {'density':>8}  encoding"


def version_line(row: Mapping[str, Any]) -> str:
    """Return the line of a version below `VERSION_HEAD`, from `torchrl_ext.data.versions.roots.Reader.summary`."""
    base = "" if row["base"] is None else row["base"]
    share = "" if row["density"] is None else f"{row['density']:.4%}"
    full = f"{row['keyframe_bytes']:,}" if row["keyframe_bytes"] else ""
    line = f"{row['version']:>7}  {row['kind']:<14}{base:>7}{row['bytes']:>14,}{full:>15}  {share:>8}  "
    return (line + ", ".join(row["encoding"])).rstrip()


@app.command()
def materialize(
    root: Root,
    version: Version,
    out: Out,
    shard_bytes: Annotated[
        int, typer.Option(min=1, show_default="4 GiB", help="Largest total size of the tensors in one file, in bytes.")
    ] = 4 << 30,
    base: Base = None,
) -> int:
    """Write a version as a complete Hugging Face checkpoint, if every digest on the way to it is right.

    Example: `torchrl-ext chain materialize /shared/updates 12 checkpoints/step-12`
    """
    from torchrl_ext.data.stores.local import LocalStore
    from torchrl_ext.data.versions.full import FullWriter
    from torchrl_ext.data.versions.roots import Unpacked

    reader = _reader(root, base)
    folder = Path(os.path.abspath(out))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already", expected="a new or empty directory", state="nothing was written")
    with closing(Unpacked(reader, version)) as source:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists():
            folder.rmdir()
        with LocalStore(folder.parent).draft(folder.name) as draft:
            manifest = FullWriter(shard_bytes).write(draft, source, version, reader.chain.version(version).run_id)
    document = {"version": version, "path": str(folder), "bytes": sum(manifest.files.values())}
    return answer(document, f"version {version} is in {folder}, {document['bytes']:,} bytes")
