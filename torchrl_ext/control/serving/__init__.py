"""Start engines and routers as child processes."""
