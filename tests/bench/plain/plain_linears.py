"""A plugin of vLLM with which a CPU keeps linear weights as a GPU does: plain tensors, which are written in place."""


def register():
    """Switch both kinds of packing off, before a model is loaded."""
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as layers

    _ = ops._supports_onednn, layers.check_cpu_sgl_kernel  # raises where they are absent: setting them would do nothing
    ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False
