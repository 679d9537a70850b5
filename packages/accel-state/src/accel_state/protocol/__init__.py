"""The checked call between processes: headers that are compared, and what happens when they differ."""
