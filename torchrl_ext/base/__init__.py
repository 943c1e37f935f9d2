"""Words that all rooms use: errors, types, messages, deadlines, the report of an update, names of classes.

Here belongs what two layers have to call by one name. Nothing here moves a byte or calls an engine.

=============  ========================================================================================
error          says what happened, what was expected, what the state is now, and what to do next
deadline       the time by which a whole step has to end, however many waits it has
message        one step of an update, from the trainer's control layer to an engine's workers
report, row    what an update did; what one engine serves after it
registry       names of transports, engines and encodings, and the classes behind them
=============  ========================================================================================
"""
