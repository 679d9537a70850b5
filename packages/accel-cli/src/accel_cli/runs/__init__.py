"""The actions of `accel runs`: what they print, and the runs that they start."""
