"""Hugging Face checkpoint directories: safetensors, sharded or not, read one tensor at a time; and the files beside
the weights that make a `transformers` model of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from torchrl_ext.base.errors import ConfigError, IntegrityError
from torchrl_ext.base.files import identity
from torchrl_ext.base.types import ParamMeta, dtype_name
from torchrl_ext.data.stores.tensorfile import TensorFile
from torchrl_ext.data.weights.blocks import Block, Shard
from torchrl_ext.data.weights.source import WeightSource

__all__ = ["CheckpointSource", "companion_files", "local_checkpoint", "opened", "revised", "with_dtype"]

_SINGLE = "model.safetensors"
_INDEX = f"{_SINGLE}.index.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)
_COMPANIONS = {".json", ".txt", ".model", ".jinja", ".py", ".tiktoken", ".spm"}
_NOT_COMPANIONS = ("manifest.json", ".index.json")
_TOKENIZERS = ("tokenizer.model.", "vocab.")  # of Mistral (tokenizer.model.v3), of GPT-2 (vocab.bpe)


def local_checkpoint(place: str | os.PathLike[str]) -> Path:
    """Return the directory of a checkpoint, which need not exist; a name of the Hub stands for a copy in the cache.

    A directory of that name comes first. Otherwise ``"somebody/policy"``, or ``"somebody/policy@revision"``, is looked
    up in the local cache of Hugging Face, and never fetched.

    Raises:
        ConfigError: it is neither a directory nor in the cache.
    """
    if not isinstance(place, str) or os.path.isdir(place) or not _HUB_NAME.fullmatch(place):
        return Path(place)
    name, _, revision = place.partition("@")
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:  # then nobody has filled the cache
        return Path(place)
    try:
        return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    except (OSError, ValueError) as error:  # not there; or no name of the Hub after all
        raise ConfigError(
            f"there is no checkpoint directory {place}, and no model of that name in the local cache "
            f"{constants.HF_HUB_CACHE}",
            expected="a directory, or a name of the Hugging Face Hub whose files are in the local cache",
            state="nothing was read or downloaded",
            hint=f"hf download {name}" + (f" --revision {revision}" if revision else ""),
        ) from error


def revised(model: str, revision: str | None) -> str:
    """Return what `local_checkpoint` takes for a model that an engine was started with, and its revision on the Hub."""
    return model if revision is None or os.path.isdir(model) else f"{model}@{revision}"


def companion_files(directory: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the config, generation and tokenizer files of a checkpoint directory, name -> content.

    Those in folders of it are left out: a version has no folders.

    Raises:
        ConfigError: there is no such directory, nor such a model in the local cache (`local_checkpoint`).
    """
    path = local_checkpoint(directory)
    if not path.is_dir():
        raise ConfigError(f"there is no directory {path}", expected="a model directory with its config.json")
    return {
        file.name: file.read_bytes()
        for file in sorted(path.iterdir())
        if (file.suffix in _COMPANIONS or file.name.startswith(_TOKENIZERS))
        and not file.name.endswith(_NOT_COMPANIONS)
        and file.is_file()
    }


def with_dtype(files: Mapping[str, bytes], dtype: torch.dtype) -> dict[str, bytes]:
    """Return ``files`` with ``dtype`` in their ``config.json``, where there is one that names a dtype.

    Raises:
        IntegrityError: it is no JSON object.
    """
    if "config.json" not in files:
        return dict(files)
    try:
        config = json.loads(files["config.json"])
        if not isinstance(config, dict):
            raise TypeError(f"it is a {type(config).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(
            f"the config.json beside the weights cannot be read: {error}",
            expected="a JSON object",
            state="nothing was written",
            hint="copy the checkpoint again, or pass the file with files=",
        ) from error
    named = [key for key in ("dtype", "torch_dtype") if key in config]  # the latter before transformers 5
    config |= dict.fromkeys(named, dtype_name(dtype))
    return {**files, "config.json": json.dumps(config, indent=2).encode() + b"\n"}


class CheckpointSource(WeightSource):
    """The tensors of a checkpoint directory, in the order of its files (and of each file's header).

    It is the checkpoint that lay there when the source was made: once one of its files is written anew, removed or
    replaced, nothing more can be read of it.

    Args:
        directory: holds ``model.safetensors.index.json`` and the files that it names, or ``*.safetensors`` files; or a
            name of the Hub, for what is in the local cache (`local_checkpoint`).

    Raises:
        ConfigError: there is no checkpoint.
        IntegrityError: names the file that is missing, truncated or damaged, or that has changed since; or a single
            file of weights beside an index of others.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = local_checkpoint(directory)
        if not self.directory.is_dir():
            raise ConfigError(f"there is no checkpoint directory {self.directory}")
        self._seen: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, str] = {}
        where = self._weight_map() if (self.directory / _INDEX).is_file() else None
        names = {path.name for path in self.directory.glob("*.safetensors")} if where is None else {*where.values()}
        if not names:
            raise ConfigError(f"{self.directory} holds no *.safetensors files", expected="a Hugging Face checkpoint")
        params = list[ParamMeta]()
        for name in sorted(names):
            self._see(name)
            file = self._open(name)
            file.close()  # opened again for each pass: hundreds of files are not kept open
            for meta in file.params():
                if where is None or where.get(meta.name) == name:
                    if meta.name in self._file_of:
                        raise IntegrityError(f"{meta.name!r} is in {self._file_of[meta.name]} and in {name}")
                    self._file_of[meta.name] = name
                    params.append(meta)
        self._params = tuple(params)
        for name, placed in (where or {}).items():
            if name not in self._file_of:
                raise IntegrityError(f"{self.directory / placed} lacks {name!r}, which {_INDEX} places there")

    def _weight_map(self) -> dict[str, str]:
        index = self.directory / _INDEX
        self._see(_INDEX)
        try:
            where: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            for name, file in where.items():
                if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
                    raise ValueError(f"{name!r} lies in {file!r}")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise IntegrityError(
                f"{index} cannot be used: {error}", expected="a Hugging Face safetensors index"
            ) from None
        if _SINGLE not in where.values() and (self.directory / _SINGLE).exists():
            raise IntegrityError(
                f"{self.directory / _SINGLE} lies beside {_INDEX}, which names other files",
                expected="one checkpoint: vLLM and SGLang load what the index names, transformers the single file",
                state="nothing was read",
                hint="remove the older of the two, the single file, or the index and the files that it names",
            )
        return where

    def params(self) -> tuple[ParamMeta, ...]:
        return self._params

    def pairs(self, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        read = self._reader()
        for meta in self._params:
            if names is None or meta.name in names:
                yield meta.name, read(meta.name)
        for name in self._seen:
            self._require_unchanged(name)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.pairs()

    def shards(self) -> Iterator[Shard]:
        """Yield every tensor as a whole, on each rank: it is read when it is taken, and other ranks need not do so."""
        read = self._reader()
        for meta in filter(attrgetter("numel"), self._params):
            yield Shard(meta, Block.whole(meta.shape), partial(read, meta.name))

    def files(self) -> Mapping[str, bytes]:
        return companion_files(self.directory)

    def _reader(self) -> Callable[[str], Tensor]:
        """Return what reads a tensor by its name, and keeps the file open of which the last one was."""
        file: TensorFile | None = None

        def read(name: str) -> Tensor:
            nonlocal file
            if file is None or os.path.basename(file.path) != self._file_of[name]:
                self._require_unchanged(self._file_of[name])
                file = self._open(self._file_of[name])
            tensor, _ = file.read(name)
            self._require_unchanged(self._file_of[name])  # after it was read: a shard may be the last that is taken
            return tensor

        return read

    def _see(self, name: str) -> None:
        """Note what a file is, before anything in it is read."""
        with suppress(OSError, ValueError):  # opening it says so
            self._seen[name] = identity(self.directory / name)

    def _require_unchanged(self, name: str) -> None:
        try:
            if identity(self.directory / name) == self._seen[name]:
                return
        except FileNotFoundError:
            pass
        raise IntegrityError(
            f"{self.directory / name} is another file than when the checkpoint was opened, or was written anew",
            expected="a directory that nobody saves into while it is read",
            state="what was read of it may be of two checkpoints, and counts for nothing",
            hint="save each checkpoint into a directory of its own, or start again when the save has ended",
        )

    def _open(self, name: str) -> TensorFile:
        try:
            return TensorFile(self.directory / name)
        except OSError as error:
            raise IntegrityError(
                f"{self.directory / name} cannot be opened: {error.strerror}",
                expected=f"every file of {self.directory}",
                hint="copy the checkpoint again",
            ) from error


def opened(directory: str) -> CheckpointSource | None:
    """Return the checkpoint that an engine starts with, as it is now, to fall back on; None where there is none."""
    try:
        return CheckpointSource(directory)
    except (ConfigError, IntegrityError):  # of another format; whoever needs it asks again, and gets the reason
        return None
