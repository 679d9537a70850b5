"""What exists only because scripts and libraries expect it; everything else comes from our packages as it is."""
