"""Sources for trainers that hold weights in forms of their own; nothing else imports them."""
