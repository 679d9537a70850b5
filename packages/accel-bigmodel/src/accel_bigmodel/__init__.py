"""Models larger than memory: weight files, device maps, offload and meta initialisation."""
