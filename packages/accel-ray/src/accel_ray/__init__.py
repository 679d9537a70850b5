"""The launcher `ray` of `accel launch`: it starts the processes of a run on the nodes of a Ray cluster."""
