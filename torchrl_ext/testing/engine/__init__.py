"""A conformance kit for the weight updates of a running engine, with our plugin or without it::

    pip install "torchrl_ext[testing]"
    pytest --pyargs torchrl_ext.testing.engine --url http://127.0.0.1:8000 --kind vllm --transport disk

The engine must serve the checkpoint of ``--model`` (by default the path that it reports), and have no other trainer.
Each case sends weights by one transport and judges the engine by its log-probabilities: against those before any
update and, where `transformers` can load the checkpoint, those of `transformers`. A case is *passed*, *failed* (so is
the run), *refused* (the engine takes no update by this transport, says why, and serves what it served) or *not
applicable*. Every case brings the start weights back.

``--help`` lists the options. They exist only in runs that name this package, so that they meet no option of your own.
"""
