"""TorchRL's `VLLMWeightSyncScheme` joins vLLM, as far as it comes: run where vLLM is, with TorchRL on the path.

Prints one line of JSON last: the error with which it ends, as this machine is and with a CUDA device pretended.
"""

import json
import sys
from types import SimpleNamespace
from unittest import mock


def joined():
    """Do what TorchRL's documentation does on the trainer, and return the error."""
    import torch
    from torchrl.weight_update.llm import VLLMWeightSyncScheme

    sys.modules.setdefault("ray", SimpleNamespace())  # its actors are not reached: there are none
    try:
        transport = VLLMWeightSyncScheme(gpus_per_replica=1, num_replicas=1).create_transport()
        transport.init_all_workers_group({"w": (torch.bfloat16, torch.Size([2]))})
    except Exception as error:  # noqa: BLE001 - it is the result
        return f"{type(error).__name__}: {error}"
    return ""


def main():
    """Find out, and print."""
    sys.path += sys.argv[1:]  # behind vLLM's own packages
    import torch

    here = joined()
    with mock.patch.object(torch.cuda, "set_device"):
        print(json.dumps({"here": here, "with a device": joined()}))


if __name__ == "__main__":
    main()
