"""Who sends which blocks to whom: one pure function of what every member holds or needs."""
