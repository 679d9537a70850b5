"""What a package that brings a tracker tests it with."""
