"""The vendors' routers, in environments of their own."""

from __future__ import annotations

from torchrl_ext.testing.environments import Recipe, ensure, is_here

_ROUTERS = {
    make: Recipe(
        name=f"{make}-router-{release}", module=f"{make}_router", packages=(f"{make}-router=={release}",), size=size
    )
    for make, release, size in (
        ("vllm", "0.1.17", "about 100 MB, ten seconds"),
        ("sglang", "0.3.2", "about 200 MB, ten seconds"),
    )
}


def settings_for_router(engine):
    """The settings that select an environment with an engine's router; vLLM's for one that has none."""
    recipe = _ROUTERS.get(engine, _ROUTERS["vllm"])
    return {} if is_here(recipe) else {"python": ensure(recipe)}
