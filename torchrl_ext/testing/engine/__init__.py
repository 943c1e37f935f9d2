"""A conformance kit for the weight updates of a running engine, with our plugin or without it::

    pip install "torchrl_ext[testing]"
    pytest --pyargs torchrl_ext.testing.engine --url http://127.0.0.1:8000 --kind vllm --transport disk

The engine must serve the checkpoint of ``--model`` (by default the path that it reports), and have no other trainer.
Each case sends weights by one transport and judges the engine by its log-probabilities: against the ones that it gave
before any update, and, where `transformers` can load the checkpoint, against those of `transformers`. A case is
*passed*, *failed*, *refused* (the engine takes no update by this transport, says why, and serves what it served) or
*not applicable*. Every case brings the start weights back. A failed case fails the run.

========================  ============================================================================================
``--url``, ``--kind``     the engine, and its kind in `torchrl_ext.engines` (by default the kind that it reports);
                          without ``--url`` every case is skipped
``--model``               the checkpoint directory that the engine was started with
``--transport``           a name of `torchrl_ext.transports` (``disk``); stock engines follow by ``disk`` and ``native``
``--root``                directory for files, which the engine must see at the same path; a temporary one by default
``--results``             file that gets one line of JSON per case
========================  ============================================================================================

The options exist only in runs that name this package, so that they meet no option of your own tests.
"""
