"""The data layer: weights from the trainer's memory into an engine's; knows no engine, no route and no pause.

Here belong sources of weights, deltas, versions in files, transports, and how tensors land in a live model. What calls
an engine, or waits for its answer about anything but bytes, belongs to `torchrl_ext.control` or `torchrl_ext.sync`.

=============  ========================================================================================
source         lists parameters, and yields their tensors in the same order
parameter      a tensor in checkpoint coordinates: name, dtype, full shape
shard, slice   a block of a parameter that a trainer rank holds; one that a worker needs
segment        the place of a parameter in a stream of units
version        the weights after one update; a keyframe has all of them, a delta what changed since its base
chain, root    versions that build on each other; the folder or bucket that has them
handoff        one prepared version: what workers have to know of it, and the steps that move its bytes
landing end    a worker's end of a transport
stage, commit  make ready beside the live weights; write to them
=============  ========================================================================================
"""
