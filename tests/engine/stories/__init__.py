"""What each system whose users we serve promises, acted out on running engines and checked: one module per system."""
