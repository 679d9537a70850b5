"""A backend as it was written for version 1 of the interface; it stays as it is, to be run by the adapter.

It is `accel-backend-example` of that time: data parallelism that sends only the largest entries of the gradients.
"""
