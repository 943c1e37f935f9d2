"""Memory that a trainer and the engines of its machine share."""
