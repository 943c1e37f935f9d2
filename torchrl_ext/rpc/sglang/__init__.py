"""SGLang servers, driven over HTTP."""
