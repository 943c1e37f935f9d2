"""How weights land: in a module, in an engine's own layout, whole or only what changed."""
