"""``torchrl-ext chain``: look at, check, thin out and unpack the versions that a trainer published."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchrl_ext.base.errors import ConfigError, IntegrityError, WeightSyncError
from torchrl_ext.cli.frame import answer, note

if TYPE_CHECKING:
    from torchrl_ext.data.versions.roots import Reader

__all__ = ["VERSION_HEAD", "app", "version_line"]

Root = Annotated[str, typer.Argument(metavar="ROOT", help="Directory or URL of the versions.")]
Base = Annotated[
    str | None, typer.Option(metavar="DIR", help="Checkpoint that counts as version 0 if the first version is a delta.")
]
Version = Annotated[int, typer.Argument(metavar="VERSION")]
Out = Annotated[str, typer.Argument(metavar="OUT_DIR", help="A new or empty directory.")]

app = typer.Typer(help="List, check, prune and unpack the versions under a root.")


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
def verify(root: Root, base: Base = None) -> int:
    """Recompute every digest; the exit status is 1 if a version is damaged or cannot be checked.

    Example: `torchrl-ext chain verify /shared/updates --base checkpoints/start`
    """
    import xxhash

    from torchrl_ext.data.versions.full import PublishedVersion
    from torchrl_ext.data.weights.digests import byte_view

    reader = _reader(root, base)
    follower = reader.follower(keep=True)
    rows: list[dict[str, Any]] = []
    for number in reader.numbers():
        ok: bool | None = True
        error = None
        try:
            route = reader.route(number, follower)
            manifest = reader.chain.version(number)
            checksums = {meta.name: place[1] for meta, place in zip(manifest.params, manifest.full or (), strict=False)}
            for name, tensor in follower.tensors(route, {}):
                found = xxhash.xxh3_128_hexdigest(byte_view(tensor).numpy().data)
                if checksums.get(name, found) != found:
                    raise IntegrityError(
                        f"tensor {name!r} by the delta is not that of the keyframe of version {number}"
                    )
            if manifest.full is not None:
                with closing(PublishedVersion(reader.store, manifest)) as published:
                    published.verify()
        except ConfigError as raised:  # the command names too little to check it
            ok, error = None, str(raised)
        except WeightSyncError as raised:
            ok, error = False, str(raised)
        if not ok:
            follower = reader.follower(keep=True)
        rows.append({"version": number, "ok": ok, "error": error})
        note(f"version {number}: {'not checked' if ok is None else 'ok' if ok else 'damaged'}")
    known = {row["version"] for row in rows}
    document = {
        "root": reader.store.url,
        "versions": rows,
        "damaged": [row["version"] for row in rows if row["ok"] is False],
        "unchecked": [row["version"] for row in rows if row["ok"] is None],
        "incomplete": [number for number in reader.chain.numbers() if number not in known],
    }
    lines = [f"version {number}: unfinished; a trainer may still be writing it" for number in document["incomplete"]]
    lines += [f"version {row['version']}: {row['error']}" for row in rows if not row["ok"]]
    good = sum(row["ok"] is True for row in rows)
    status = 0 if good == len(rows) else 1
    return answer(document, *lines, f"{good} of {len(rows)} versions match their digests", status=status)


@app.command()
def gc(
    root: Root,
    keep: Annotated[
        int, typer.Option(min=1, metavar="N", help="Keyframes to keep, with every version that follows them.")
    ] = 1,
    base: Base = None,
) -> int:
    """Remove the versions before the newest keyframes.

    Example: `torchrl-ext chain gc /shared/updates --keep 2`
    """
    reader = _reader(root, base)
    reader.store.own()  # fails where a trainer has the lock: it collects by itself
    try:
        removed = reader.chain.collect(keep_keyframes=keep)
    finally:
        reader.store.disown()
    document = {"root": reader.store.url, "removed": removed, "kept": reader.chain.numbers()}
    return answer(document, f"removed {len(removed)} versions, kept {len(document['kept'])}")


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
    """Write a version as a complete Hugging Face checkpoint.

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
