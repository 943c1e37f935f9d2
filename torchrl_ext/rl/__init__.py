"""TorchRL: weight sync schemes and updaters for collectors, a policy over remote engines, Hydra's config groups.

Here belongs what TorchRL calls, in its words. What a trainer without TorchRL needs, too, belongs below.

==============  =======================================================================================
scheme          TorchRL's pairing of a trainer end and a worker end, one per model of a collector
updater         what an LLM collector calls to update its engines
policy          an actor whose tokens come from remote engines, with the version that sampled each
lag             by how many versions a token's weights are older than the newest
run             the sequence of updates in which version numbers are comparable
==============  =======================================================================================
"""
