"""Sample requests and answers in the shapes of SkyRL's client: images, prompt log-probabilities, routed experts."""

from __future__ import annotations

import base64
import hashlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_ext.errors import ConfigError, EngineRefusedError
from torchrl_ext.rollout.generation import Generation
from torchrl_ext.types import Info

__all__ = [
    "image_messages",
    "prompt_logprobs",
    "routed_experts",
    "safe_salt",
    "sampling_of",
    "spliced",
    "wants_prompt",
]

IMAGES = ("image", "image_asset_pointer")

_NAMES = {"stop_strings": "stop", "stop_tokens": "stop_token_ids"}
_KNOWN = ("temperature", "max_tokens", "seed", "top_k", "top_p", *_NAMES)
_DTYPES = ("uint8", "uint16", "int16", "int32")
_UNSAFE = str.maketrans({one: f"%{ord(one):02X}" for one in "%@/\\\0"})
_LONGEST_SALT = 128


def sampling_of(body: Mapping[str, Any]) -> Info:
    """Return vLLM's sampling settings for a sample request."""
    given = body.get("sampling_params") or {}
    found = {_NAMES.get(name, name): given[name] for name in _KNOWN if given.get(name) is not None}
    if wants_prompt(body):
        found["prompt_logprobs"] = max(0, body.get("topk_prompt_logprobs") or 0)
    return found


def wants_prompt(body: Mapping[str, Any]) -> bool:
    """Return whether a request asks for its prompt's log-probabilities."""
    return bool(body.get("include_prompt_logprobs", body.get("prompt_logprobs", False)))


def image_messages(chunks: Sequence[Mapping[str, Any]]) -> list[Info]:
    """Return a chat that consists of a prompt's images; [] for a prompt without images."""
    urls = []
    for chunk in chunks:
        if chunk.get("type") == "image":
            data = chunk["data"]
            text = data.decode("ascii") if isinstance(data, bytes) else data
            urls.append(f"data:image/{chunk.get('format', 'jpeg')};base64,{text}")
        elif chunk.get("type") == "image_asset_pointer":
            urls.append(chunk["location"])
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": parts}] if parts else []


def spliced(chunks: Sequence[Mapping[str, Any]], rendered: Mapping[str, Any]) -> tuple[list[int], Info | None]:
    """Return the token ids of a prompt and the features of its images, or None without images.

    Args:
        chunks: text as ``tokens``, and images, in order.
        rendered: the engine's answer to `image_messages`; its ``features`` locate each image's tokens.

    Raises:
        EngineRefusedError: the answer does not have one place for each image.
    """
    features = rendered.get("features") or {}
    places = (features.get("mm_placeholders") or {}).get("image") or []
    count = sum(chunk.get("type") in IMAGES for chunk in chunks)
    if len(places) != count:
        raise EngineRefusedError(f"the engine rendered {len(places)} images", expected=f"{count}, as in the prompt")
    ids, moved, rest = list[int](), list[Info](), iter(places)
    for chunk in chunks:
        if chunk.get("type") in IMAGES:
            place = next(rest)
            tokens = rendered["token_ids"][place["offset"] : place["offset"] + place["length"]]
            moved.append({"offset": len(ids), "length": len(tokens)})
        else:
            tokens = chunk.get("tokens") or []
        ids.extend(tokens)
    if not count:
        return ids, None
    hashes, data = features.get("mm_hashes") or {}, features.get("kwargs_data")
    return ids, {"mm_hashes": hashes, "mm_placeholders": {"image": moved}, "kwargs_data": data}


def prompt_logprobs(ids: Sequence[int], found: Generation, most: int) -> tuple[list[Any], list[Any] | None]:
    """Return the log-probabilities of a prompt's tokens, and the ``most`` most probable tokens at each position.

    Returns:
        Log-probabilities in nats, None for the first token; and pairs of token id and log-probability, the most
        probable first, or None if ``most`` is 0.

    Raises:
        EngineRefusedError: the answer lacks them.
    """
    rows = found.extras[0].get("prompt_logprobs") if found.extras else None
    try:
        if rows is None or len(rows) != len(ids):
            raise ValueError("there is not one row per token")
        own = [None if row is None else row[str(token)]["logprob"] for token, row in zip(ids, rows, strict=True)]
        pairs = [None if row is None else [(int(one), score["logprob"]) for one, score in row.items()] for row in rows]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineRefusedError(
            f"the engine answered without the log-probabilities of the prompt: {error}", expected="a vLLM server's"
        ) from None
    top = [None if row is None else sorted(row, key=lambda pair: -pair[1])[:most] for row in pairs]
    return own, top if most > 0 else None


def routed_experts(found: Generation) -> Any:
    """Return the experts to which a generation's tokens were routed, as an array ``[tokens, layers, experts]``.

    Each answer covers all tokens before its last one. After an abort, each row is from the first answer that covers it.

    Raises:
        EngineRefusedError: an answer has no experts, or not in a packed form.
    """
    import numpy  # imported late: only models with experts need it

    rows = [_unpacked(extra.get("routed_experts")) for extra in found.extras] or [_unpacked(None)]
    whole = rows[0]
    for one in rows[1:]:
        whole = numpy.concatenate([whole, one[len(whole) :]])
    return whole


def _unpacked(packed: Any) -> Any:
    """Return the array in vLLM's form (base64 of an ``.npy`` file) or SkyRL's (raw bytes, shape and dtype)."""
    import numpy

    try:
        if isinstance(packed, str):
            found = numpy.load(io.BytesIO(base64.b64decode(packed, validate=True)), allow_pickle=False)
            dtype, shape = found.dtype.name, found.shape
        elif isinstance(packed, dict):
            dtype, shape = packed["dtype"], tuple(packed["shape"])
            if dtype not in _DTYPES or not all(type(one) is int and one >= 0 for one in shape):
                raise ValueError(f"dtype {dtype!r}, shape {shape}")
            data = base64.b64decode(packed["data"], validate=True)
            if len(data) != math.prod(shape) * numpy.dtype(dtype).itemsize:
                raise ValueError(f"{len(data)} bytes for shape {shape} of {dtype}")
            found = numpy.frombuffer(data, dtype).reshape(shape)
        else:
            raise ValueError(f"it is a {type(packed).__name__}")
        if dtype not in _DTYPES or len(shape) != 3:
            raise ValueError(f"dtype {dtype}, shape {shape}")
    except (EOFError, KeyError, OSError, TypeError, ValueError) as error:
        raise EngineRefusedError(
            f"the server must return packed routed experts, and did not: {error}",
            hint="start vLLM with --enable-return-routed-experts; the model needs to have experts",
        ) from None
    return found


def safe_salt(salt: Any) -> str | None:
    """Return a cache salt that vLLM accepts, distinct for each salt; None for an empty one.

    vLLM refuses '@', '/', backslashes, NUL and more than 128 characters; SkyRL's salts contain model names.

    Raises:
        ConfigError: ``salt`` is not a string.
    """
    if salt is None or salt == "":
        return None
    if not isinstance(salt, str):
        raise ConfigError(f"cache_salt is {salt!r}", expected="a string")
    safe = salt.translate(_UNSAFE)
    if len(safe) <= _LONGEST_SALT:
        return safe
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
