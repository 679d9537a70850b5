"""The header in which all processes meet before anything of a size of its own moves."""
