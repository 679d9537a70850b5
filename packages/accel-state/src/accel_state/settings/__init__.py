"""Settings: one definition for each, read from flags, variables, config files and arguments. Never imports torch."""
