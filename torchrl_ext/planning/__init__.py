"""Predict the cost of weight updates and recommend a route."""
