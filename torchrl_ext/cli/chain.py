"""``torchrl-ext chain``: look at, check, thin out, unpack and convert the versions that a trainer published."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchrl_ext.compat.convert import LAYOUTS, Rebuilt, convert, skyrls_versions
from torchrl_ext.errors import ConfigError, IntegrityError, WeightSyncError
from torchrl_ext.stores import LocalStore, Store, open_store, version_name
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.manifest import MANIFEST
from torchrl_ext.types import Info, ParamMeta, dtype_name
from torchrl_ext.versions.checkpoint_reader import PublishedVersion
from torchrl_ext.versions.open_route import OpenRoute
from torchrl_ext.versions.others import view_of
from torchrl_ext.versions.reader import ChainReader
from torchrl_ext.weights.checkpoint import companion_files
from torchrl_ext.weights.source import WeightSource

__all__ = ["Reader", "add_parser", "run"]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    parser = subparsers.add_parser("chain", help="list, check, thin out, unpack and convert the versions under a root")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("root", metavar="ROOT", help="directory, or URL of an object store")
    common.add_argument("--base", metavar="DIR", help="checkpoint that is version 0, where a delta comes first")
    common.add_argument(
        "--storage-option", action="append", default=[], metavar="KEY=VALUE", help="setting of the fsspec filesystem"
    )
    common.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")

    def action(name: str, summary: str, *aliases: str) -> argparse.ArgumentParser:
        found = actions.add_parser(name, help=summary, parents=[common], aliases=aliases)
        found.set_defaults(action=name)
        return found

    action("ls", "every version: kind, base, bytes, encoding, density", "list")
    action("show", "one version and its tensors").add_argument("version", type=int)
    action("verify", "recompute every digest; status 1 where a version is damaged or cannot be checked")
    collect = action("gc", "remove what the newest keyframes and readers do not need")
    collect.add_argument("--keep", type=int, default=1, metavar="N", help="keyframes to keep, with all that follows")
    unpack = action("materialize", "write a version as a complete Hugging Face checkpoint")
    unpack.add_argument("version", type=int)
    unpack.add_argument("out", metavar="OUT_DIR")
    unpack.add_argument("--shard-bytes", type=int, default=4 << 30, help="bound on the tensors of one file")
    anew = action("convert", "write every version anew, in our layout or another library's")
    anew.add_argument("out", metavar="OUT_DIR")
    anew.add_argument("--to", required=True, choices=LAYOUTS)
    compare = action("diff", "which tensors differ between two versions, and how much of them")
    compare.add_argument("a", type=int)
    compare.add_argument("b", type=int)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one action, and print lines, or with ``--json`` one document.

    Returns:
        0; 1 where `verify` finds damage, or cannot check a version.
    """
    options = dict(_option(text) for text in args.storage_option)
    chain = Reader(open_store(args.root, options), args.base)
    if not chain.store.available():
        raise ConfigError(f"there is nothing at {args.root}", expected="a root that a delta transport publishes into")
    document, lines = _ACTIONS[args.action](chain, args)
    if args.json:
        print(json.dumps(document))
    else:
        print("\n".join(lines))
    return 1 if document.get("damaged") or document.get("unchecked") else 0


class Reader:
    """Reads the chain of versions under a root."""

    def __init__(self, store: Store, base: str | None) -> None:
        self.store, self.base = store, base and os.path.abspath(base)
        self.chain = Chain(store, view=view_of(store, self.base, settles=True))

    def follower(self, keep: bool = False) -> ChainReader:
        found = ChainReader(self.chain, lambda number, full: PublishedVersion(self.store, number, full), self.base)
        found.retain(lambda name: keep)
        return found

    def numbers(self) -> list[int]:
        """Return the number of every version, without those that are not wholly written."""
        found = []
        for number in self.chain.numbers():
            with suppress(FileNotFoundError):
                with suppress(WeightSyncError):  # reported when the version is read
                    self.chain.version(number)
                found.append(number)
        return found

    def route(self, version: int, follower: ChainReader) -> OpenRoute:
        try:
            if self.base is None and self.chain.route(version, based=True).start is not None:
                raise ConfigError(
                    f"version {version} in {self.store.url} leads back to a checkpoint that is not among its versions",
                    hint="name its directory with --base",
                )
            return follower.open(version)
        except FileNotFoundError:
            numbers = self.numbers()
            known = f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
            raise ConfigError(f"{self.store.url} holds no version {version}", expected=f"one of {known}") from None

    def tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        follower = self.follower()
        return follower.tensors(self.route(version, follower), {})

    def beside(self, number: int) -> dict[str, bytes]:
        """Return the files that make a checkpoint of the weights of a full version, by name."""
        folder = version_name(number)
        names = (name for name in self.store.sizes(folder) if not name.endswith((".safetensors", ".index.json")))
        return {name: self.store.get(f"{folder}/{name}") for name in names if name not in (MANIFEST, "DONE")}

    def rebuilt(self) -> Iterator[Rebuilt]:
        """Yield every version, rebuilt from the one before where that takes fewer bytes."""
        follower, names = self.follower(keep=True), list[str]()
        files = {} if self.base is None else companion_files(self.base)
        for number in self.numbers():
            for _ in follower.tensors(self.route(number, follower), {}):
                pass
            whole, held = self.chain.version(number).full is not None, follower.mirror
            names = names if held.keys() == set(names) else [*held]
            files = self.beside(number) if whole else files
            yield Rebuilt(number=number, whole=whole, tensors={name: held[name] for name in names}, beside=files)

    def summary(self, number: int) -> Info:
        version = self.chain.version(number)
        full, delta = version.full, version.delta
        total = sum(meta.numel for meta in version.params)
        telling = delta if delta is not None and delta.digests.size else None  # another library gives no counts
        return {
            "version": number,
            "kind": "delta" if full is None else "keyframe" if delta is None else "keyframe+delta",
            "base": delta.base_version if delta else None,
            "bytes": sum(delta.files.values()) if delta else 0,
            "keyframe_bytes": sum(full.files.values()) if full else 0,
            "encoding": sorted({codec["name"] for codec in delta.codecs}) if delta else [],
            "density": int(telling.changed.sum()) / max(1, total) if telling else None,
            "run_id": version.run_id,
        }


def _ls(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    rows = [reader.summary(number) for number in reader.numbers()]
    document = {"root": reader.store.url, "latest": reader.chain.latest(), "versions": rows}
    lines = [f"{'version':>8}  {'kind':<15}{'base':>8}{'delta bytes':>14}{'full bytes':>16}  {'density':>9}  encoding"]
    lines += [_line(row) for row in rows]
    return document, [*lines, f"latest: {document['latest']}"]


def _line(row: Info) -> str:
    base = "" if row["base"] is None else row["base"]
    share = "" if row["density"] is None else f"{row['density']:.4%}"
    full = f"{row['keyframe_bytes']:,}" if row["keyframe_bytes"] else ""
    line = f"{row['version']:>8}  {row['kind']:<15}{base:>8}{row['bytes']:>14,}{full:>16}  {share:>9}  "
    return (line + ", ".join(row["encoding"])).rstrip()


def _show(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    try:
        document = reader.summary(args.version)
    except FileNotFoundError:
        raise ConfigError(f"{reader.store.url} holds no version {args.version}") from None
    version = reader.chain.version(args.version)
    full, delta = version.full, version.delta
    tensors = []
    for meta in version.params:
        tensor: Info = {"name": meta.name, "dtype": dtype_name(meta.dtype), "shape": list(meta.shape)}
        tensor |= dict.fromkeys(("changed", "encoding", "file", "digest"))
        if delta is not None:
            changed = int(delta.changed[delta.table.number[meta.name]])
            tensor |= {"changed": changed, "digest": delta.hex_digests.get(meta.name)}
            if changed:
                blocks, placed = delta.blocks_of(meta.name), delta.placed.get(meta.name)
                used = set(blocks["codec"]) if placed is None else range(len(delta.codecs))
                names = {delta.codecs[codec]["name"] for codec in used}
                files = dict.fromkeys([*delta.files][file] for file in blocks["file"])
                files = files if placed is None else {placed.file: None}
                tensor |= {"encoding": ", ".join(sorted(names)), "file": ", ".join(files)}
        tensors.append(tensor)
    document |= {"files": {**(full.files if full else {}), **(delta.files if delta else {})}, "tensors": tensors}
    lines = [_line(document), *(f"    {name}  {size:,} bytes" for name, size in document["files"].items())]
    lines += [f"    {t['name']}  {t['dtype']}{t['shape']}  {t['changed'] or 0:,} changed" for t in tensors]
    return document, lines


def _verify(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    from torchrl_ext.weights.digests import tensor_digest

    follower = reader.follower(keep=True)
    rows: list[Info] = []
    for number in reader.numbers():
        ok: bool | None = True
        error = None
        try:
            route = reader.route(number, follower)
            full = reader.chain.version(number).full
            checksums = {row.meta.name: row.checksum for row in full.params if row.checksum} if full else {}
            for name, tensor in follower.tensors(route, {}):
                if name in checksums and tensor_digest(tensor) != checksums[name]:
                    raise IntegrityError(
                        f"tensor {name!r} by the delta is not that of the keyframe of version {number}"
                    )
            if full is not None:
                with closing(PublishedVersion(reader.store, number, full)) as published:
                    published.verify()
        except ConfigError as raised:  # the command names too little to check it
            ok, error = None, str(raised)
        except WeightSyncError as raised:
            ok, error = False, str(raised)
        if not ok:
            follower = reader.follower(keep=True)
        rows.append({"version": number, "ok": ok, "error": error})
        print(f"version {number}: {_FOUND[ok]}", file=sys.stderr)
    known = {row["version"] for row in rows}
    document = {
        "root": reader.store.url,
        "versions": rows,
        "damaged": [row["version"] for row in rows if row["ok"] is False],
        "unchecked": [row["version"] for row in rows if row["ok"] is None],
        "incomplete": [number for number in reader.chain.numbers() if number not in known],
    }
    lines = [f"version {number}: being written, or left unfinished" for number in document["incomplete"]]
    lines += [f"version {row['version']}: {row['error']}" for row in rows if not row["ok"]]
    good = sum(row["ok"] is True for row in rows)
    return document, [*lines, f"{good} of {len(rows)} versions are what their digests say"]


_FOUND = {True: "ok", False: "damaged", None: "not checked"}


def _gc(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    if args.keep < 1:
        raise ConfigError(f"--keep is {args.keep}", expected="1 or more keyframes")
    reader.store.own()  # fails where a trainer has the lock: it collects by itself
    try:
        removed = reader.chain.collect(keep_keyframes=args.keep)
    finally:
        reader.store.disown()
    document = {"root": reader.store.url, "removed": removed, "kept": reader.chain.numbers()}
    return document, [f"removed {len(removed)} versions, kept {len(document['kept'])}"]


def _materialize(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    from torchrl_ext.versions.checkpoint_writer import FullWriter

    out = Path(os.path.abspath(args.out))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already", expected="a new or empty directory", state="nothing was written")
    follower = reader.follower()
    route = reader.route(args.version, follower)
    with closing(route):
        source = _Unpacked(reader, route, follower)
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists():
            out.rmdir()
        with LocalStore(out.parent).draft(out.name, needed_bytes=sum(m.nbytes for m in route.params)) as draft:
            manifest = FullWriter(args.shard_bytes).write(
                draft, source, args.version, reader.chain.version(args.version).run_id
            )
    document = {"version": args.version, "path": str(out), "bytes": sum(manifest.files.values())}
    return document, [f"version {args.version} is in {out}, {document['bytes']:,} bytes"]


def _convert(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    versions = skyrls_versions(reader.store, reader.base) or reader.rebuilt()
    rows = convert(versions, args.out, args.to, reader.base)
    document = {"path": os.path.abspath(args.out), "to": args.to, "versions": rows}
    lines = [f"{row['version']:>8}  {row['kind']:<15}{row['bytes']:>16,} bytes" for row in rows]
    return document, [*lines, f"{len(rows)} versions are in {document['path']}"]


def _diff(reader: Reader, args: argparse.Namespace) -> tuple[Info, list[str]]:
    from torchrl_ext.codecs.patch import diff

    new, total, changed = dict(reader.tensors(args.b)), 0, 0
    rows: list[Info] = []
    seen: set[str] = set()
    for name, tensor in reader.tensors(args.a):
        meta, other = ParamMeta.of(name, tensor), new.get(name)
        seen.add(name)
        if other is None or ParamMeta.of(name, other) != meta:
            rows.append({"name": name, "changed": None, "elements": meta.numel, "density": None})
            continue
        count = diff(meta, tensor, other.contiguous()).changed
        total, changed = total + meta.numel, changed + count
        if count:
            rows.append({"name": name, "changed": count, "elements": meta.numel, "density": count / meta.numel})
    rows += [
        {"name": name, "changed": None, "elements": tensor.numel(), "density": None}
        for name, tensor in new.items()
        if name not in seen
    ]
    density = changed / max(1, total)
    document = {"a": args.a, "b": args.b, "density": density, "changed": changed, "tensors": rows}
    shares = ["another parameter" if row["density"] is None else f"{row['density']:.4%}" for row in rows]
    lines = [f"{row['name']}  {share}" for row, share in zip(rows, shares, strict=True)]
    return document, [*lines, f"{changed:,} of {total:,} elements, {density:.4%}"]


class _Unpacked(WeightSource):
    """A source of the tensors at the end of a route, with the files that make them a checkpoint."""

    def __init__(self, reader: Reader, route: OpenRoute, follower: ChainReader) -> None:
        self._reader, self._route, self._follower = reader, route, follower

    def params(self) -> tuple[ParamMeta, ...]:
        if self._route.published is not None:
            return self._route.published.params()
        own = {meta.name for meta in self._route.params}
        base = self._route.base
        return tuple(meta for meta in base.params() if meta.name in own) if base is not None else ()

    def files(self) -> Mapping[str, bytes]:
        keyframe = self._route.keyframe
        if keyframe is None:
            return {} if self._route.base is None else self._route.base.files()
        return self._reader.beside(keyframe.version)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._follower.tensors(self._route, {})


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError(f"--storage-option {text!r}", expected="KEY=VALUE")
    return key, value


_ACTIONS = {
    "ls": _ls,
    "show": _show,
    "verify": _verify,
    "gc": _gc,
    "materialize": _materialize,
    "convert": _convert,
    "diff": _diff,
}
