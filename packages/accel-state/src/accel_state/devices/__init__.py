"""Device families: one object per kind of device, asked for everything that differs between kinds."""
