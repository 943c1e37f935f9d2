"""Whom connections with TLS trust: the same for every session of this package."""

from __future__ import annotations

import os
import ssl
from functools import cache

import httpx

__all__ = ["authorities"]


def authorities() -> ssl.SSLContext:
    """Those of the system (SSL_CERT_FILE and SSL_CERT_DIR name others, as with OpenSSL) and those that httpx brings."""
    return _authorities(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _authorities(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Reading them takes longer than a call; OpenSSL looks at the two variables by itself."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context
