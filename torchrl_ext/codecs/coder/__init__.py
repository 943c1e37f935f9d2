"""The entropy coder of our own encodings; whoever adds an encoding need not read it."""
