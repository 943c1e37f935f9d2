"""What speaks the words of other systems: their options, names and routes. The core imports none of it."""
