"""Where data and control meet: senders, receivers and engine workers, and engines that are driven without HTTP.

Here belongs what needs both layers: the order of an update on the trainer, and what a worker does with each message.
How bytes travel and how an engine is called do not.

==============  =======================================================================================
sender          numbers versions, runs the steps of an update in order, writes its report
connection      a sender and the workers that joined it; a later one replaces it
engine worker   handles the messages of a connection in one worker of an engine
receiver        lands a version in a model, and compares digests
proof           what an engine was shown to hold: sent, in place, rehearsed, outputs
==============  =======================================================================================
"""
