"""The cases by subject; none of these modules imports torch, ours or the original before a side asks for it."""
