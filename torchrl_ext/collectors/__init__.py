"""TorchRL's side: schemes, updaters and its own names, over our senders and receivers."""
