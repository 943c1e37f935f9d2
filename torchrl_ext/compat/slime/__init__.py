"""Engine routes that slime and vime call."""
