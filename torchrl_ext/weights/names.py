"""Trainer names to checkpoint names, by a table of regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torchrl_ext.errors import ConfigError

__all__ = ["as_mapper", "regex_mapper"]


def regex_mapper(table: Mapping[str, str]) -> Callable[[str], str]:
    """A mapper that applies the first pattern which matches a whole name; other names stay.

    Args:
        table: pattern -> replacement (`re.Match.expand` syntax), tried in order.

    Raises:
        ConfigError: a pattern is no regular expression.
    """
    rules = []
    for pattern, replacement in table.items():
        try:
            rules.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ConfigError(f"name pattern {pattern!r} is no regular expression: {error}") from None

    def mapper(name: str) -> str:
        for pattern, replacement in rules:
            match = pattern.fullmatch(name)
            if match:
                return match.expand(replacement)
        return name

    return mapper


def as_mapper(mapper: Callable[[str], str] | Mapping[str, str]) -> Callable[[str], str]:
    """A callable stays; a mapping becomes a `regex_mapper`."""
    return regex_mapper(mapper) if isinstance(mapper, Mapping) else mapper
