"""Start engines and routers as child processes, on this machine or on the nodes of a Ray cluster."""
