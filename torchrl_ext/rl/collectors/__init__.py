"""Weight sync schemes and weight updaters for TorchRL's collectors, over our senders and receivers."""
