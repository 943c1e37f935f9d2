"""`Sliced` is a tensor of its full shape of which only some blocks are there, for loaders that take slices alone."""
