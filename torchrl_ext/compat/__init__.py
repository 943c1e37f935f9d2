"""Words of other systems: options of slime and vime, SkyRL's client, vLLM's trainer API, Megatron.

Here belongs what reads or speaks another system's names, and turns them into ours. No room below imports it, so that a
system that goes leaves no trace.

==============  =======================================================================================
flags           options of slime and vime, under their own names
backend         a transport under vLLM's trainer API
==============  =======================================================================================
"""
