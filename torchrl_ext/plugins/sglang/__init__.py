"""What runs inside a stock SGLang."""
