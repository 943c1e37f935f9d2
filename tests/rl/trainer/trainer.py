"""Trains for a few steps, and prints whether every worker held the trainer's weights after each of them."""

import json
import sys
import warnings

import hydra
import torch
from hydra.utils import instantiate

import torchrl_ext.rl.hydra

torchrl_ext.rl.hydra.register()  # all that a script of TorchRL's does not have
warnings.filterwarnings("ignore")


@hydra.main(config_path=".", config_name="config", version_base=None)
def main(config):
    trainer = instantiate(config.trainer)
    scheme = trainer.collector._weight_sync_schemes["policy"]
    seen = []

    def compare():
        actor = dict(trainer.loss_module.actor_network_params.flatten_keys(".").items())
        workers = trainer.collector.state_dict()
        held = [workers[f"worker{index}"]["policy_state_dict"] for index in range(2)]
        equal = all(torch.equal(state[name], actor[name].data) for state in held for name in state)
        seen.append({"equal": equal, "first": float(next(iter(actor.values())).flatten()[0])})

    trainer.register_op("post_steps", compare)
    trainer.train()
    json.dump({"scheme": type(scheme).__name__, "steps": seen}, sys.stdout)


if __name__ == "__main__":
    main()
