"""A KV connector for vLLM that keeps keys and values in files, as its example does, and drops them when it is told to.

Runs inside the engine: `--kv-transfer-config` names this module.
"""

import shutil
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class KeptKeys(ExampleConnector):
    def reset_cache(self):
        for folder in Path(self._storage_path).iterdir():
            shutil.rmtree(folder)
        return True
