"""Keys <-> bytes, durably: stores, the versions in them, and their manifests."""

from torchrl_ext.stores.base import Store
from torchrl_ext.stores.chain import Chain
from torchrl_ext.stores.local import LocalStore
from torchrl_ext.stores.manifest import Manifest, Placed
from torchrl_ext.stores.opening import open_store
from torchrl_ext.stores.versions import version_name, version_number

__all__ = [
    "Chain",
    "LocalStore",
    "Manifest",
    "Placed",
    "Store",
    "open_store",
    "version_name",
    "version_number",
]
