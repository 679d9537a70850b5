"""Settings: one definition per field, read from flags, variables, config files and arguments. Never imports torch."""
