"""Device families: one object per device type with everything that depends on the device type."""
