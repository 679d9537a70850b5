"""Collectives on nested data (gather, reduce, broadcast, pad) and random-number state, with named errors instead of hangs."""
