"""Device families: one object per device type answers every question whose answer depends on the device type."""
