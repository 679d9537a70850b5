"""What tests of loaders share, in this project and in packages built on it: data sets."""
