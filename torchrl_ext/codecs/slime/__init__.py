"""slime's encodings and files, byte for byte."""
