"""Where the data layer and the control layer meet."""
