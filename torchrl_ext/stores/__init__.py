"""Keys <-> bytes, durably: stores, the layout of version directories, and their manifests."""

from torchrl_ext.stores.base import Store
from torchrl_ext.stores.local import LocalStore
from torchrl_ext.stores.manifest import Manifest, Placed
from torchrl_ext.stores.opening import open_store
from torchrl_ext.stores.versions import Versions, version_name, version_number

__all__ = [
    "LocalStore",
    "Manifest",
    "Placed",
    "Store",
    "Versions",
    "open_store",
    "version_name",
    "version_number",
]
